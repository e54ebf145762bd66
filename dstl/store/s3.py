"""Objects in S3, or in a server that speaks it, through aioboto3."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from dstl.errors import AccessDenied, DstlError, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.options import S3Options
from dstl.store.base import ByteRange, ObjectInfo, check_name
from dstl.store.s3_client import S3Client
from dstl.store.s3_errors import error_code, translating
from dstl.store.s3_multipart import MultipartUploader, checksum_of

__all__ = ["S3Store"]

_PAGE = 1000


class S3Store:
    """An object store under a prefix of one bucket.

    Invariants:
        1. ``if_absent`` is ``If-None-Match: *``, decided by S3, on one PutObject whatever the size: servers that honour
           it there may ignore it where an upload in parts is completed, and what the probe has seen of a small object
           must hold for a large one. After a lost answer the name may be taken by ourselves: the caller compares what
           it reads back.
        2. Every body carries its CRC-32C, which S3 checks before it stores and keeps with the object. Its answer
           repeats it, which confirms content and length. Where it does not, the server has ignored it, or the object
           was made of parts: then the length is asked for. What is not confirmed is ``OutcomeUnknown``.
        3. One request per call, no retry by the SDK; objects from ``multipart_threshold`` on take one per part and
           three more, unless they are put ``if_absent``; a put takes one more where the server ignores checksums.
           ``requests`` counts them.

    Deleting is idempotent, so a lost answer to it is ``Unavailable``: do it again. The SDK is imported by the first
    request, in a thread; making the client then takes the loop about 50 ms, once. Does not survive a fork.

    Args:
        bucket: Its name.
        prefix: Path elements of the names' grammar, without a slash at either end; may be empty.
        options: See :class:`~dstl.options.S3Options`.
    """

    def __init__(self, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        options = options or S3Options()
        self._bucket = bucket
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self._client = S3Client(options)
        self._threshold = options.multipart_threshold
        self._parts = MultipartUploader(
            self._client, part_size=options.multipart_part_size, concurrency=options.multipart_concurrency
        )
        self._encryption: dict[str, Any] = {}
        if options.sse_kms_key_id is not None:
            self._encryption = {
                "ServerSideEncryption": "aws:kms",
                "SSEKMSKeyId": options.sse_kms_key_id,
                "BucketKeyEnabled": True,
            }

    @property
    def location(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def requests(self) -> Counter[str]:
        """Requests sent to S3 so far, by the SDK's operation name."""
        return self._client.requests

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        target = self._target(name)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        view = memoryview(data).cast("B")
        if len(view) >= self._threshold and not if_absent:
            answer = await self._parts.upload(target, view, what=self._url(name), creating=self._encryption)
            await self._confirm_length(name, len(view))
        else:
            body = data if isinstance(data, bytes) else bytes(view)
            checksum = checksum_of(body)
            answer = await self._call(
                "put_object", name, writes=True, Body=body, ChecksumCRC32C=checksum, **condition, **self._encryption
            )
            if (told := answer.get("ChecksumCRC32C")) is None:
                await self._confirm_length(name, len(view))
            elif told != checksum:
                raise OutcomeUnknown(f"PutObject {self._url(name)}: S3 reports another checksum than was sent")
        return ObjectInfo(name, len(view), _date(answer))

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        condition = {}
        if byte_range is not None:
            condition["Range"] = f"bytes={byte_range.start}-{byte_range.stop - 1}"
        with translating(f"GetObject {self._url(name)}"):
            try:
                answer = await self._client.call("get_object", **self._target(name), **condition)
            except Exception as error:
                if error_code(error)[1] == 416:
                    return b""
                raise
            async with answer["Body"] as stream:
                body: bytes = await stream.read()
        return body

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        answer = await self._call("head_object", name)
        return ObjectInfo(name, answer["ContentLength"], answer["LastModified"].timestamp())

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects in name order, a request per thousand; keys that are not of our grammar are passed over."""
        page: dict[str, Any] = {"StartAfter": self._prefix + start_after} if start_after else {}
        while True:
            with translating(f"ListObjectsV2 {self._url(prefix)}"):
                answer = await self._client.call(
                    "list_objects_v2", Bucket=self._bucket, Prefix=self._prefix + prefix, MaxKeys=_PAGE, **page
                )
            for found in answer.get("Contents", ()):
                name = found["Key"][len(self._prefix) :]
                try:
                    check_name(name)
                except Invalid:
                    continue
                yield ObjectInfo(name, found["Size"], found["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            page = {"ContinuationToken": answer["NextContinuationToken"]}

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects, a request per thousand; a name that is already gone is a success."""
        for name in names:
            check_name(name)
        if len(names) == 1:
            await self._call("delete_object", names[0])
            return
        for at in range(0, len(names), _PAGE):
            await self._delete(names[at : at + _PAGE])

    async def close(self) -> None:
        """Wait for aborts under way and close this loop's connections. Idempotent."""
        await self._parts.close()
        await self._client.close()

    async def _confirm_length(self, name: str, sent: int) -> None:
        """Ask for the length of what was stored.

        Raises:
            OutcomeUnknown: It is another, or cannot be asked for.
        """
        what = f"PutObject {self._url(name)}"
        try:
            stored = (await self.head(name)).size
        except DstlError as error:
            raise OutcomeUnknown(f"{what} was answered, and what is stored could not be confirmed: {error}") from error
        if stored != sent:
            raise OutcomeUnknown(f"{what}: S3 has stored {stored} bytes of {sent}")

    async def _delete(self, names: Sequence[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        with translating(f"DeleteObjects {self.location}"):
            answer = await self._client.call(
                "delete_objects", Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
            )
        refused = [one for one in answer.get("Errors", ()) if one.get("Code") not in ("NoSuchKey", "NotFound")]
        if refused:
            code = str(refused[0].get("Code"))
            what = f"DeleteObjects {self.location}: {len(refused)} of {len(names)} refused, first {code}"
            raise _refusal(code)(f"{what} for {refused[0].get('Key')}")

    async def _call(self, operation: str, name: str, *, writes: bool = False, **parameters: Any) -> dict[str, Any]:
        target = self._target(name)
        shown = "".join(word.capitalize() for word in operation.split("_"))
        with translating(f"{shown} {self._url(name)}", writes=writes):
            return await self._client.call(operation, **target, **parameters)

    def _target(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_name(name)}

    def _url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"


def _refusal(code: str) -> type[DstlError]:
    if code == "AccessDenied":
        return AccessDenied
    return SlowDown if code == "SlowDown" else Unavailable


def _date(answer: dict[str, Any]) -> float:
    """Return S3's time of an answer."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
