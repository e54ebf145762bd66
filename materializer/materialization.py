"""The asynchronous part of a materialization: a snapshot becomes base files in the store, while batches go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import google_crc32c

from dstl.changelog.names import SegmentNames
from dstl.changelog.uploader import StoredObject
from dstl.options import MaterializationOptions
from handles.key_group import KeyGroup
from handles.materialized_handle import MaterializedStateHandle
from materializer.operator_bases import MaterializationPlan
from materializer.snapshot import encode_key_group
from materializer.tables import Expired, TableSnapshot

__all__ = ["BaseUploader", "BaseWriter", "WrittenBases"]


class BaseUploader(Protocol):
    """What is needed of the uploader that the log uses."""

    def upload(
        self, name_of: Callable[[int], str], data: bytes, *, critical: bool, checksum: int | None
    ) -> Awaitable[StoredObject]:
        """Store a body under a name of its own."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenBases:
    """What a materialization has stored.

    Attributes:
        handles: The files.
        raw_bytes: Bytes before compression.
        expired: Key groups from which expired entries were left out: the table may drop them too.
    """

    handles: tuple[MaterializedStateHandle, ...]
    raw_bytes: int
    expired: tuple[KeyGroup, ...]


@dataclass(slots=True)
class _Pack:
    """Key groups that make one file."""

    data: bytes
    checksum: int
    parts: list[tuple[KeyGroup, int, int]]
    raw_bytes: int
    expired: list[KeyGroup]


class BaseWriter:
    """Writes base files.

    Invariants:
        1. At most two files are held in memory: one that is uploaded and one that is being encoded. A file is at least
           ``file_bytes`` and at most one key group more.
        2. A file takes its bytes out of the budget that the log's appends wait for, and is uploaded as background.
        3. What was stored when it fails is given to ``discard``: no manifest names it.

    Args:
        uploader: The log's own, so that retries, hedges and their budget are shared.
        names: Names of this TaskManager's objects.
        reserve: Holds bytes of the budget.
        discard: Deletes objects that nobody refers to, best effort, in the background.
        options: Size of files, compression.
        executor: Threads that encode; by default the loop's.
    """

    def __init__(
        self,
        *,
        uploader: BaseUploader,
        names: SegmentNames,
        reserve: Callable[[int], AbstractAsyncContextManager[None]],
        discard: Callable[[list[str]], None],
        options: MaterializationOptions,
        executor: Executor | None = None,
    ) -> None:
        self._uploader = uploader
        self._names = names
        self._reserve = reserve
        self.discard = discard
        self._options = options
        self._executor = executor

    async def write(
        self, operator: str, plan: MaterializationPlan, snapshot: TableSnapshot, expired: Expired | None
    ) -> WrittenBases:
        """Write what a plan asks for out of a snapshot, and close the snapshot.

        Raises:
            DstlError: The store did not take a file, or the snapshot cannot be read.
        """
        loop = asyncio.get_running_loop()
        packs = self._packs(plan, snapshot, expired)
        handles: list[MaterializedStateHandle] = []
        raw_bytes = 0
        dropped: list[KeyGroup] = []
        upload: asyncio.Task[StoredObject] | None = None
        on_its_way: _Pack | None = None
        encoding: asyncio.Future[_Pack | None] | None = None
        try:
            while True:
                encoding = loop.run_in_executor(self._executor, partial(next, packs, None))
                pack = await encoding
                if pack is None:
                    snapshot.close()
                if upload is not None and on_its_way is not None:
                    handles.append(_handle(operator, plan, on_its_way, await upload))
                if pack is None:
                    return WrittenBases(tuple(handles), raw_bytes, tuple(dropped))
                raw_bytes += pack.raw_bytes
                dropped += pack.expired
                on_its_way, upload = pack, loop.create_task(self._store(pack))
        except BaseException:
            if upload is not None:
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)
                if not upload.cancelled() and upload.exception() is None:
                    handles.append(_handle(operator, plan, on_its_way or _NOTHING, upload.result()))
            if encoding is not None and not encoding.done():
                # The thread reads the snapshot still: it must not be closed under it.
                await asyncio.wait([encoding])
            if handles:
                self.discard(sorted({handle.name for handle in handles}))
            raise
        finally:
            snapshot.close()

    async def _store(self, pack: _Pack) -> StoredObject:
        async with self._reserve(len(pack.data)):
            return await self._uploader.upload(
                self._names.new_object("base"), pack.data, critical=False, checksum=pack.checksum
            )

    def _packs(self, plan: MaterializationPlan, snapshot: TableSnapshot, expired: Expired | None) -> Iterator[_Pack]:
        """Yield full packs; runs in a thread, one pack at a time."""
        data = bytearray()
        pack = _Pack(b"", 0, [], 0, [])
        for key_group in plan.written:
            file = encode_key_group(
                snapshot, key_group, expired=expired, compression_level=self._options.base_compression_level
            )
            pack.parts.append((key_group, len(data), len(file.data)))
            pack.raw_bytes += file.raw_bytes
            if file.expired:
                pack.expired.append(key_group)
            data += file.data
            if len(data) >= self._options.file_bytes:
                yield _sealed(pack, data)
                data, pack = bytearray(), _Pack(b"", 0, [], 0, [])
        if pack.parts:
            yield _sealed(pack, data)


_NOTHING = _Pack(b"", 0, [(0, 0, 0)], 0, [])


def _sealed(pack: _Pack, data: bytearray) -> _Pack:
    pack.data = bytes(data)
    pack.checksum = google_crc32c.value(pack.data)
    return pack


def _handle(operator: str, plan: MaterializationPlan, pack: _Pack, stored: StoredObject) -> MaterializedStateHandle:
    return MaterializedStateHandle(
        operator=operator,
        materialization_id=plan.materialization_id,
        checkpoint=plan.checkpoint,
        name=stored.name,
        size=stored.size,
        checksum=stored.checksum,
        parts=tuple(pack.parts),
    )
