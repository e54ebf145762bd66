"""Objects in S3, or in a server that speaks it, through aioboto3."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import google_crc32c

from dstl.errors import AccessDenied, DstlError, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.options import S3Options
from dstl.runtime import all_of
from dstl.store.base import ByteRange, ObjectInfo, check_name
from dstl.store.s3_client import S3Client
from dstl.store.s3_errors import error_code, sdk_errors, translating

_MAX_PARTS = 10_000  # S3's own limit


def checksum_of(body: bytes) -> str:
    """Return the CRC-32C as S3 writes it; S3 refuses a body that does not match it."""
    return base64.b64encode(google_crc32c.value(body).to_bytes(4, "big")).decode()


class MultipartUploader:
    """Uploads objects in parts.

    Invariants:
        1. Only the completing request can make the object: before it every failure is certain.
        2. Whatever ends without success is aborted in the background, also when it was cancelled; an abort after a
           completion that went unheard does no harm, S3 then knows the upload no more.

    A process that dies leaves its parts; the bucket's lifecycle rule ``AbortIncompleteMultipartUpload`` removes them.

    Args:
        client: Shared with the store.
        part_size: Bytes of all parts but the last; grows where 10,000 parts would not do.
        concurrency: Parts of one object under way at once.
    """

    def __init__(self, client: S3Client, *, part_size: int, concurrency: int) -> None:
        self._client = client
        self._part_size = part_size
        self._concurrency = concurrency
        self._aborts: set[asyncio.Task[None]] = set()

    async def upload(
        self,
        target: Mapping[str, str],
        body: memoryview,
        *,
        what: str,
        creating: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Upload one object and return the SDK's answer to the completing request.

        Args:
            target: Bucket and key.
            body: The bytes; must not change until the call ends.
            what: The object, for messages.
            creating: Further parameters of the first request (encryption).
        """
        with translating(f"CreateMultipartUpload {what}"):
            created = await self._client.call(
                "create_multipart_upload", **target, **creating, ChecksumAlgorithm="CRC32C"
            )
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            parts = await self._parts(upload, body, what)
            with translating(f"CompleteMultipartUpload {what}", writes=True):
                return await self._client.call("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(upload)
            raise

    async def close(self) -> None:
        """Wait for the aborts that are under way. Idempotent."""
        await asyncio.gather(*self._aborts)

    async def _parts(self, upload: Mapping[str, str], body: memoryview, what: str) -> list[dict[str, Any]]:
        size = max(self._part_size, -(-len(body) // _MAX_PARTS))
        free = asyncio.Semaphore(self._concurrency)

        async def send(number: int, at: int) -> dict[str, Any]:
            async with free:
                part = bytes(body[at : at + size])
                checksum = checksum_of(part)
                with translating(f"UploadPart {what}"):
                    answer = await self._client.call(
                        "upload_part", **upload, PartNumber=number, Body=part, ChecksumCRC32C=checksum
                    )
                return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

        places = enumerate(range(0, len(body), size), 1)
        return await all_of(send(number, at) for number, at in places)

    def _abort(self, upload: Mapping[str, str]) -> None:
        async def abort() -> None:
            # Best effort: what stays is invisible, and the lifecycle rule's business.
            with suppress(DstlError, *sdk_errors()):
                await self._client.call("abort_multipart_upload", **upload)

        task = asyncio.get_running_loop().create_task(abort(), name="dstl-s3-abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


_PAGE = 1000  # S3's own limit of a list and of a deletion
_DIRECTORY_BUCKET = "--x-s3"  # ends the name of every bucket of S3 Express, and of no other
_REFUSALS: dict[str, type[DstlError]] = {"AccessDenied": AccessDenied, "SlowDown": SlowDown}
"""Of one object of a deletion, by S3's code."""


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

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects, a request per thousand; keys that are not of our grammar are passed over.

        A directory bucket (S3 Express) lists in no order: all its pages are read before the first object.

        Raises:
            Invalid: Another server lists a folder in another order: what is read first would be taken for the newest
                manifest.
        """
        if self._bucket.endswith(_DIRECTORY_BUCKET):
            for info in sorted([info async for info in self._listed(prefix)], key=lambda info: info.name):
                yield info
            return
        last = ""
        async for info in self._listed(prefix):
            if info.name < last and info.name.rpartition("/")[0] == last.rpartition("/")[0]:
                raise Invalid(
                    f"{self._url(prefix)} is not listed in the order of names ({last!r} is before {info.name!r}): DSTL "
                    "cannot be used on this server"
                )
            last = info.name
            yield info

    async def _listed(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects as the server lists them."""
        page: dict[str, Any] = {}
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
            raise _REFUSALS.get(code, Unavailable)(f"{what} for {refused[0].get('Key')}")

    async def _call(self, operation: str, name: str, *, writes: bool = False, **parameters: Any) -> dict[str, Any]:
        target = self._target(name)
        shown = "".join(word.capitalize() for word in operation.split("_"))
        with translating(f"{shown} {self._url(name)}", writes=writes):
            return await self._client.call(operation, **target, **parameters)

    def _target(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_name(name)}

    def _url(self, name: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{name}"


def _date(answer: dict[str, Any]) -> float:
    """Return S3's time of an answer."""
    return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()
