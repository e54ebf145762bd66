"""A large object in parts: several under way at once, visible only when complete, aborted otherwise."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import google_crc32c

from dstl.errors import DstlError
from dstl.store.s3_client import S3Client
from dstl.store.s3_errors import sdk_errors, translating

__all__ = ["MultipartUploader", "checksum_of"]

_MAX_PARTS = 10_000


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
        try:
            async with asyncio.TaskGroup() as group:
                sending = [group.create_task(send(number, at)) for number, at in places]
        except ExceptionGroup as failures:
            # The group has cancelled the other parts; the first failure says why.
            raise failures.exceptions[0] from None
        return [one.result() for one in sending]

    def _abort(self, upload: Mapping[str, str]) -> None:
        async def abort() -> None:
            # Best effort: what stays is invisible, and the lifecycle rule's business.
            with suppress(DstlError, *sdk_errors()):
                await self._client.call("abort_multipart_upload", **upload)

        task = asyncio.get_running_loop().create_task(abort(), name="dstl-s3-abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
