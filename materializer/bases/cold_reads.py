"""Reads of key groups that are not loaded yet: the blocks of some keys, by range, put below what the table has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import pyarrow as pa

from dstl.errors import Closed, CorruptData, MissingState
from dstl.runtime import all_of, call_in_thread, end_tasks
from dstl.store.retry_policy import RetryPolicy
from handles.key_group import KeyGroup
from handles.materialized_handle import KeyGroupBase
from materializer.bases.base_cache import BaseSource
from materializer.bases.key_group_block import Row
from materializer.bases.key_group_index import KeyGroupIndex, read_index, tail_bytes
from materializer.bases.loading import BaseLoad
from materializer.tables import ENTRY_SCHEMA, HeapStateTable

Asked = tuple[int, bytes | None]
"""A state and a key; without a key all of the state."""


@dataclass(frozen=True, slots=True)
class ReadCosts:
    """Prices of reading in place and of loading in seconds of a core: ``dstl/docs/decisions/serve-while-restoring.md``.

    Attributes:
        request: A request for bytes through aiobotocore.
        stored: A byte of it. What lies between two blocks is read along where that is cheaper than a second request.
        block: To check a block and search it.
        key: To look a key up, and put it below what the table has.
        raw: A byte of a base, before compression, that is decoded and put into a table.
        share: A key group is loaded first where reading in place costs more than this share of its load, which comes
            all the same; or more than twice this share, where the load of all that is asked for is not ``soon`` there.
        soon: Seconds of such a load.
        run: Most bytes of a request.
        requests: At once; so many runs may be in memory.
    """

    request: float = 1e-3
    stored: float = 1.1e-9
    block: float = 60e-6
    key: float = 10e-6
    raw: float = 2.3e-9
    share: float = 1 / 3
    soon: float = 2.0
    run: int = 8 << 20
    requests: int = 60


READ_COSTS = ReadCosts()


def requests_at_once() -> asyncio.Semaphore:
    """Return what all reads in place of a restore share, whatever the number of operators: connections and memory."""
    return asyncio.Semaphore(READ_COSTS.requests)


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
        requests: Held by each request, and by what has come until it was searched; see :func:`requests_at_once`.
        turn: Held while blocks are searched: threads that take turns at the interpreter are three times as slow.
    """

    def __init__(
        self,
        load: BaseLoad,
        table: HeapStateTable,
        bases: Mapping[KeyGroup, KeyGroupBase],
        source: BaseSource,
        requests: asyncio.Semaphore,
        turn: asyncio.Semaphore,
    ) -> None:
        self._load = load
        self._table = table
        self._bases = bases
        self._source = source
        self._retries = RetryPolicy(source.runtime)
        self._requests = requests
        self._turn = turn
        self._known: dict[KeyGroup, _Known] = {}

    async def bring(self, asked: Mapping[KeyGroup, Iterable[Asked]]) -> None:
        """Have the table show these keys as they are: their blocks are read, or their key groups loaded first.

        Raises:
            Unavailable: The store did not answer several times in a row.
            CorruptData, MissingState: What they need is in no object that can be read.
        """
        missing: dict[KeyGroup, set[Asked]] = {}
        for group, wanted in asked.items():
            if not self._table.is_cold(group):
                self._known.pop(group, None)
                continue
            there = self._known.setdefault(group, _Known()).there
            lacking = {each for each in wanted if each not in there and (each[0], None) not in there}
            if lacking:
                missing[group] = lacking
        is_soon = sum(_load_seconds(self._bases[group]) for group in missing) <= READ_COSTS.soon
        share = READ_COSTS.share * (1 if is_soon else 2)
        self._load.reading += 1
        try:
            await all_of(self._bring(group, each, share) for group, each in missing.items())
        finally:
            self._load.reading -= 1

    def prepare(self) -> None:
        """Begin to read the indexes of those bases of which keys may be read in place."""
        for group, base in self._bases.items():
            if not base.file.files and _least(1) <= READ_COSTS.share * _load_seconds(base):
                self._begin_index(self._known.setdefault(group, _Known()), base)

    async def close(self) -> None:
        """End what reads. Idempotent."""
        tasks = [known.index for known in self._known.values() if known.index is not None]
        self._known.clear()
        await end_tasks(tasks)
        await self._source.close()

    async def _bring(self, group: KeyGroup, missing: set[Asked], share: float) -> None:
        try:
            found = await self._read(group, missing, share)
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

    async def _read(self, group: KeyGroup, missing: set[Asked], share: float) -> list[pa.RecordBatch] | None:
        """Return the rows of a base that are asked for; None where it is better loaded."""
        base = self._bases[group]
        if base.file.files or _least(len(missing)) > share * _load_seconds(base):
            return None
        index = await self._index(base)
        wanted: dict[int, list[Asked]] = {}
        for state, key in sorted(missing, key=lambda each: (each[0], each[1] or b"")):
            blocks = index.blocks_of_state(state) if key is None else index.blocks_of(state, key)
            for at in blocks:
                wanted.setdefault(at, []).append((state, key))
        runs = _runs(sorted(wanted), index)
        if _seconds(index, runs, wanted) > share * _load_seconds(base, sum(index.raw_sizes)):
            return None
        found = await all_of(self._read_run(base, index, run, wanted) for run in runs)
        return [rows for each in found for rows in each]

    async def _index(self, base: KeyGroupBase) -> KeyGroupIndex:
        known = self._known.setdefault(base.key_group, _Known())
        if known.index is None or (known.index.done() and (known.index.cancelled() or known.index.exception())):
            self._begin_index(known, base)
        assert known.index is not None
        # Not awaited itself: others wait for it too, and its end by close() is not the end of this task.
        await asyncio.wait([known.index])
        if known.index.cancelled():
            raise Closed("the restore has ended")
        return known.index.result()

    def _begin_index(self, known: _Known, base: KeyGroupBase) -> None:
        known.index = asyncio.ensure_future(self._retries.read(lambda: self._read_index(base)))
        # Perhaps nobody asks for it.
        known.index.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _read_index(self, base: KeyGroupBase) -> KeyGroupIndex:
        end, size = base.offset + base.length, tail_bytes(base.length)
        while True:
            async with self._requests:
                tail = await self._source.get(base.file, end - size, end)
            found = read_index(tail, base.length, base.key_group, name=f"base file {base.file.name}")
            if isinstance(found, KeyGroupIndex):
                return found
            if found <= size:
                raise CorruptData(f"base file {base.file.name} is damaged: its index has {found} bytes in {size}")
            size = found

    async def _read_run(
        self, base: KeyGroupBase, index: KeyGroupIndex, run: Sequence[int], wanted: Mapping[int, list[Asked]]
    ) -> list[pa.RecordBatch]:
        start, stop = index.starts[run[0]], index.starts[run[-1] + 1]

        async def read() -> list[pa.RecordBatch]:
            async with self._requests:
                data = await self._source.get(base.file, base.offset + start, base.offset + stop)
                async with self._turn:
                    return await call_in_thread(_rows, index, run, memoryview(data), wanted)

        return await self._retries.read(read)


def _runs(blocks: Sequence[int], index: KeyGroupIndex) -> list[list[int]]:
    """Return blocks, in order, that are read with one request each."""
    costs = READ_COSTS
    runs: list[list[int]] = []
    for at in blocks:
        if (
            runs
            and (index.starts[at] - index.starts[runs[-1][-1] + 1]) * costs.stored <= costs.request
            and index.starts[at + 1] - index.starts[runs[-1][0]] <= costs.run
        ):
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _least(keys: int) -> float:
    """Return what it costs at least to read so many keys of a base in place."""
    return 2 * READ_COSTS.request + READ_COSTS.block + keys * READ_COSTS.key


def _load_seconds(base: KeyGroupBase, raw_bytes: int | None = None) -> float:
    """Return what it costs to load a base; at least, where its raw bytes are not known, which are mostly more."""
    return base.length * READ_COSTS.stored + (base.length if raw_bytes is None else raw_bytes) * READ_COSTS.raw


def _seconds(index: KeyGroupIndex, runs: Sequence[Sequence[int]], wanted: Mapping[int, list[Asked]]) -> float:
    """Return what it costs to read runs in place."""
    costs = READ_COSTS
    found = sum(costs.request + (index.starts[run[-1] + 1] - index.starts[run[0]]) * costs.stored for run in runs)
    for at, asked in wanted.items():
        is_whole = any(key is None for _, key in asked)
        found += index.raw_sizes[at] * costs.raw if is_whole else costs.block + len(asked) * costs.key
    return found


def _rows(
    index: KeyGroupIndex, run: Sequence[int], data: memoryview, wanted: Mapping[int, list[Asked]]
) -> list[pa.RecordBatch]:
    """Return the rows of blocks that are asked for, each batch of one state. Runs in a thread."""
    first = index.starts[run[0]]
    found: list[pa.RecordBatch] = []
    rows: list[Row] = []
    for at in run:
        blocks, part = range(at, at + 1), data[index.starts[at] - first : index.starts[at + 1] - first]
        index.check(blocks, part)
        whole = {state for state, key in wanted[at] if key is None}
        if whole:
            page = index.page(blocks, part)
            states = np.asarray(page.column("state"))
            found += [page.filter(pa.array(states == state)) for state in whole]
        keys = [(state, key) for state, key in wanted[at] if key is not None and state not in whole]
        if keys:
            rows += index.blocks[at].find(part, keys, index.name)
    for _, same in itertools.groupby(rows, key=itemgetter(0)):
        columns = zip(*same, strict=True)
        found.append(
            pa.RecordBatch.from_arrays(
                [pa.array(c, t) for c, t in zip(columns, ENTRY_SCHEMA.types, strict=True)], schema=ENTRY_SCHEMA
            )
        )
    return found
