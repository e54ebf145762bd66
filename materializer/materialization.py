"""The asynchronous part of a materialization: a snapshot becomes base files in the store, while batches go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, closing
from dataclasses import dataclass

import google_crc32c
import numpy as np

from dstl.changelog.object_names import SegmentNames
from dstl.changelog.upload.uploader import StoredObject, Uploader
from dstl.crash_points import reach
from dstl.options import MaterializationOptions
from dstl.runtime import call_in_thread
from dstl.store.prefetcher import BudgetLease, Prefetcher
from handles.key_group import KeyGroup
from handles.materialized_handle import MaterializedStateHandle
from materializer.bases.base_cache import BaseCache
from materializer.bases.key_group_file import encode_key_group
from materializer.bases.operator_bases import MaterializationPlan
from materializer.bases.table_directory import StoreObject, write_table_files
from materializer.tables import Expired, RocksDBTableSnapshot, TableSnapshot


@dataclass(frozen=True, slots=True)
class WrittenBases:
    """The files that a materialization has stored.

    Attributes:
        handles: The files.
        raw_bytes: Bytes before compression; 0 for a table that is stored as its files.
        expired: Key groups from which expired entries were left out: the table may drop them too.
    """

    handles: tuple[MaterializedStateHandle, ...]
    raw_bytes: int
    expired: tuple[KeyGroup, ...]


@dataclass(slots=True)
class _Pack:
    """Key groups that make one file."""

    data: memoryview
    checksum: int
    parts: list[tuple[KeyGroup, int, int]]
    raw_bytes: int
    expired: list[KeyGroup]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseWriter:
    """Writes base files.

    Invariants:
        1. At most two files are held in memory: one that is uploaded and one that is being encoded. A file is at least
           ``file_bytes`` and at most one key group more.
        2. A file takes its bytes out of the budget that the log's appends wait for, and is uploaded as background.
        3. What was stored when it fails is given to ``discard``: no manifest names it.

    Attributes:
        uploader: The log's own, so that retries, hedges and their budget are shared.
        names: Names of this TaskManager's objects.
        reserve: Holds bytes of the budget.
        discard: Deletes unreferenced objects, best effort, in the background.
        options: Size of files, compression.
        cache: Keeps what was stored for a restart on this host.
    """

    uploader: Uploader
    names: SegmentNames
    reserve: Callable[[int], AbstractAsyncContextManager[None]]
    discard: Callable[[list[str]], None]
    options: MaterializationOptions
    cache: BaseCache | None = None

    async def write(
        self, operator: str, plan: MaterializationPlan, snapshot: TableSnapshot, expired: Expired | None
    ) -> WrittenBases:
        """Write what a plan asks for out of a snapshot, and close the snapshot.

        Raises:
            DstlError: The store did not take a file, or the snapshot cannot be read.
        """
        new: list[str] = []

        async def store(data: bytes | memoryview, checksum: int) -> StoredObject:
            stored = await self._store(data, checksum)
            new.append(stored.name)
            return stored

        try:
            with closing(snapshot):
                if plan.files is not None and isinstance(snapshot, RocksDBTableSnapshot):
                    handle = await write_table_files(operator, plan, snapshot, plan.files, store, self.cache)
                    if handle is not None:
                        return WrittenBases((handle,), 0, ())
                return await self._write_packs(operator, plan, snapshot, expired, store)
        except BaseException:
            if new:
                self.discard(sorted(new))
            raise

    async def _write_packs(
        self,
        operator: str,
        plan: MaterializationPlan,
        snapshot: TableSnapshot,
        expired: Expired | None,
        store: StoreObject,
    ) -> WrittenBases:
        packs = self._packs(plan, snapshot, expired)

        async def encoded() -> AsyncGenerator[_Pack]:
            while (pack := await call_in_thread(next, packs, None)) is not None:
                yield pack
            snapshot.close()  # the last file is uploaded without it

        async def upload(pack: _Pack, _: BudgetLease) -> WrittenBases:
            stored = await store(pack.data, pack.checksum)
            reach("M3")
            if self.cache is not None:
                await call_in_thread(self.cache.put, stored.name, pack.data)
            handle = MaterializedStateHandle(
                operator=operator,
                materialization_id=plan.materialization_id,
                checkpoint=plan.checkpoint,
                name=stored.name,
                size=stored.size,
                checksum=stored.checksum,
                parts=tuple(pack.parts),
            )
            return WrittenBases((handle,), pack.raw_bytes, tuple(pack.expired))

        async with aclosing(Prefetcher(encoded(), upload, cost=lambda pack: len(pack.data), max_bytes=0)) as uploads:
            written = [each async for each in uploads]
        return WrittenBases(
            tuple(handle for each in written for handle in each.handles),
            sum(each.raw_bytes for each in written),
            tuple(group for each in written for group in each.expired),
        )

    async def _store(self, data: bytes | memoryview, checksum: int) -> StoredObject:
        # A file that is larger is mapped, not held.
        async with self.reserve(min(len(data), 4 * self.options.file_bytes)):
            upload = self.uploader.submit(self.names.new_object("base"), data, critical=False, checksum=checksum)
            try:
                return await upload
            except asyncio.CancelledError:
                upload.cancel()
                raise

    def _packs(self, plan: MaterializationPlan, snapshot: TableSnapshot, expired: Expired | None) -> Iterator[_Pack]:
        """Yield full packs; runs in a thread, one pack at a time."""
        pieces: list[bytes] = []
        size = 0
        pack = _Pack(_EMPTY, 0, [], 0, [])
        for key_group in plan.written:
            file = encode_key_group(
                snapshot, key_group, expired=expired, compression_level=self.options.base_compression_level
            )
            length = sum(map(len, file.pieces))
            pack.parts.append((key_group, size, length))
            pack.raw_bytes += file.raw_bytes
            if file.expired:
                pack.expired.append(key_group)
            pieces += file.pieces
            size += length
            if size >= self.options.file_bytes:
                yield _join_pieces(pack, pieces, size)
                pieces, size, pack = [], 0, _Pack(_EMPTY, 0, [], 0, [])
        if pack.parts:
            yield _join_pieces(pack, pieces, size)


_EMPTY = memoryview(b"")


def _join_pieces(pack: _Pack, pieces: list[bytes], size: int) -> _Pack:
    # numpy lets other threads run while it copies; to join 16 MiB would stop the loop for as long as it takes.
    whole = np.empty(size, np.uint8)
    at = 0
    for piece in pieces:
        whole[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    whole.flags.writeable = False
    pack.checksum = google_crc32c.extend(0, whole)
    pack.data = whole.data
    return pack
