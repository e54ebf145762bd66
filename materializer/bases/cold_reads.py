"""Reads of key groups that are not loaded yet: the blocks of some keys, by range, put below what the table has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dstl.errors import Closed, CorruptData, MissingState
from dstl.runtime import Runtime, call_in_thread
from dstl.store.retry_policy import RetryPolicy
from handles.key_group import KeyGroup
from handles.materialized_handle import KeyGroupBase
from materializer.bases import key_group_file
from materializer.bases.base_cache import BaseSource
from materializer.bases.key_group_file import KeyGroupIndex, read_index, tail_bytes
from materializer.bases.loading import BaseLoad
from materializer.tables import LazyTable

Asked = tuple[int, bytes | None]
"""A state and a key; without a key all of the state."""


@dataclass(frozen=True, slots=True)
class ReadSizes:
    """Limits of reads in place (``dstl/docs/decisions/serve-while-restoring.md``).

    Attributes:
        share: Where more than this share of a key group's blocks is asked for, the key group is loaded instead: a
            request for a block takes as long as the load of four blocks.
        block: Stored bytes of a block, about: more keys than twice the share of the blocks that a base has by that are
            not looked up in its index. Nor is a key group of so few blocks that each is above the share.
        gap: Stored bytes that are read and thrown away rather than asked for around: they cost as much as a request.
        requests: At once: connections that the load behind leaves.
    """

    share: float = 0.25
    block: int = key_group_file.BLOCK_BYTES // 2
    gap: int = 256 << 10
    requests: int = 48


READ_SIZES = ReadSizes()


@dataclass(slots=True)
class _Known:
    """A cold key group: its index, and what has been put below its changes."""

    index: asyncio.Task[KeyGroupIndex] | None = None
    there: set[Asked] = field(default_factory=set)


class ColdReads:
    """Brings what a read needs into a lazy table. One event loop.

    Args:
        load: Loads the key groups whole, behind it.
        table: The table.
        bases: The newest base of each key group.
        source: Reads them.
        runtime: Clock and jitter for repeated reads.
    """

    def __init__(
        self,
        load: BaseLoad,
        table: LazyTable,
        bases: Mapping[KeyGroup, KeyGroupBase],
        source: BaseSource,
        runtime: Runtime,
    ) -> None:
        self._load = load
        self._table = table
        self._bases = bases
        self._source = source
        self._retries = RetryPolicy(runtime)
        self._requests = asyncio.Semaphore(READ_SIZES.requests)
        self._known: dict[KeyGroup, _Known] = {}

    async def bring(self, asked: Mapping[KeyGroup, Iterable[Asked]]) -> None:
        """Have the table show these keys as they are: their blocks are read, or their key groups loaded first.

        Raises:
            Unavailable: The store did not answer several times in a row.
            CorruptData, MissingState: What they need is in no object that can be read.
        """
        works = []
        for group, wanted in asked.items():
            if not self._table.is_cold(group):
                self._known.pop(group, None)
                continue
            there = self._known.setdefault(group, _Known()).there
            missing = {each for each in wanted if each not in there and (each[0], None) not in there}
            if missing:
                works.append(asyncio.ensure_future(self._bring(group, missing)))
        try:
            await asyncio.gather(*works)
        finally:
            for each in works:
                each.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def close(self) -> None:
        """End what reads. Idempotent."""
        tasks = [known.index for known in self._known.values() if known.index is not None]
        self._known.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._source.close()

    async def _bring(self, group: KeyGroup, missing: set[Asked]) -> None:
        try:
            found = await self._read(group, missing)
        except (CorruptData, MissingState, Closed):
            # The load meets the same damage, and turns to an older base and more log; or all is loaded by now.
            found = None
        known = self._known.get(group)
        if found is None or (known is None and self._table.is_cold(group)):
            # Closed before the rows came, they are not put any more: who has asked must not take what is there for all.
            await self._load.wait([group])
        elif known is not None and self._table.is_cold(group):
            for rows in found:
                self._table.put_below(group, rows)
            known.there |= missing

    async def _read(self, group: KeyGroup, missing: set[Asked]) -> list[pa.RecordBatch] | None:
        """Return the rows of a base that are asked for; None where it is better loaded."""
        base = self._bases[group]
        worthwhile = READ_SIZES.share * base.length / READ_SIZES.block
        if base.files or worthwhile < 1 or len(missing) > 2 * worthwhile:
            return None
        index = await self._index(base)
        wanted: dict[int, list[Asked]] = {}
        for state, key in sorted(missing, key=lambda each: (each[0], each[1] or b"")):
            blocks = index.blocks_of_state(state) if key is None else index.blocks_of(state, key)
            for at in blocks:
                wanted.setdefault(at, []).append((state, key))
        if len(wanted) > READ_SIZES.share * len(index.blocks):
            return None
        runs = _runs(sorted(wanted), index)
        works = [asyncio.ensure_future(self._read_run(base, index, run, wanted)) for run in runs]
        try:
            return [rows for found in await asyncio.gather(*works) for rows in found]
        finally:
            for each in works:
                each.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _index(self, base: KeyGroupBase) -> KeyGroupIndex:
        known = self._known.setdefault(base.key_group, _Known())
        if known.index is None or (known.index.done() and (known.index.cancelled() or known.index.exception())):
            known.index = asyncio.ensure_future(self._retries.read(lambda: self._read_index(base)))
        # Not awaited itself: others wait for it too, and its end by close() is not the end of this task.
        await asyncio.wait([known.index])
        if known.index.cancelled():
            raise Closed("the restore has ended")
        return known.index.result()

    async def _read_index(self, base: KeyGroupBase) -> KeyGroupIndex:
        end, size = base.offset + base.length, tail_bytes(base.length)
        while True:
            async with self._requests:
                tail = await self._source.get(base, end - size, end)
            found = read_index(tail, base.length, base.key_group, name=f"base file {base.name}")
            if isinstance(found, KeyGroupIndex):
                return found
            if found <= size:
                raise CorruptData(f"base file {base.name} is damaged: its index has {found} bytes in {size}")
            size = found

    async def _read_run(
        self, base: KeyGroupBase, index: KeyGroupIndex, run: Sequence[int], wanted: Mapping[int, list[Asked]]
    ) -> list[pa.RecordBatch]:
        start, stop = index.starts[run[0]], index.starts[run[-1] + 1]

        async def read() -> list[pa.RecordBatch]:
            async with self._requests:
                data = await self._source.get(base, base.offset + start, base.offset + stop)
            return await call_in_thread(_rows, index, run, memoryview(data), wanted)

        return await self._retries.read(read)


def _runs(blocks: Sequence[int], index: KeyGroupIndex) -> list[list[int]]:
    """Return blocks, in order, that are read with one request each."""
    runs: list[list[int]] = []
    for at in blocks:
        if runs and index.starts[at] - index.starts[runs[-1][-1] + 1] <= READ_SIZES.gap:
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _rows(
    index: KeyGroupIndex, run: Sequence[int], data: memoryview, wanted: Mapping[int, list[Asked]]
) -> list[pa.RecordBatch]:
    """Return the rows of blocks that are asked for. Runs in a thread."""
    first = index.starts[run[0]]
    found = []
    for at in run:
        blocks, part = range(at, at + 1), data[index.starts[at] - first : index.starts[at + 1] - first]
        index.check(blocks, part)
        page = index.page(blocks, part)
        states = np.asarray(page.column("state"))
        for state in dict.fromkeys(state for state, _ in wanted[at]):
            mine = pa.array(states == state)
            keys = [key for of, key in wanted[at] if of == state]
            if None not in keys:
                mine = pc.and_(mine, pc.is_in(page.column("key"), pa.array(keys, pa.binary())))
            found.append(page.filter(mine))
    return found
