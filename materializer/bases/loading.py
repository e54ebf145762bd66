"""Key groups out of base files, the newest that can be read: all of them, those that are waited for first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing

import pyarrow as pa

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import call_in_thread
from handles.checkpoint import CheckpointId
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import Generations, KeyGroupBase
from materializer.bases.base_cache import BaseSource
from materializer.bases.base_fetch import BaseFetch, Parts, decode_ahead, join_fetches
from materializer.bases.file_reader import TableFileReader
from materializer.bases.table_directory import FetchedFiles, FileBases, UnusableObject
from materializer.tables import HeapStateTable, RocksDBStateTable, StateTable

_log = logging.getLogger(__name__)
PATIENCE_S = 3.0
"""So long in all nothing is put into a table while reads in place go on: each would take twice as long beside it, and a
load that always gave way might never end."""

_PAUSE_S = 0.005  # a part of a load takes ten times as long
OlderLog = Callable[[KeyGroup, CheckpointId], Awaitable[list[pa.RecordBatch]]]
"""Returns a key group's changes between a base of it, or the beginning, and the checkpoint that is restored."""


class BaseLoad:
    """Loads the owned key groups of one operator into its empty table. One event loop.

    Neighbouring parts of a file are fetched together, several fetches ahead within a fixed budget of bytes, and decoded
    in threads. A table in files opens the first base that is files as it is; any other table, and further such bases,
    are read key group by key group, by a child process. What is damaged or missing is replaced by the next older base
    of its key groups.

    Invariants:
        1. A lazy table is written on the loop alone: what threads write is a table of their own, whose key groups it
           then takes at once, under the changes that it has.
        2. A key group of a lazy table is cold until it has all of its newest usable base and all changes since.

    Args:
        generations: The operator's bases.
        owned: Key groups to load.
        table: Where they go. Its calls are made from a thread, one at a time, unless it is lazy.
        files: Fetches the bases that are files, and knows where the others lie.
        advance: Told of bytes that were loaded.
        turn: Held while the table takes key groups in.
        older_log: Of a lazy table, what its changes lack where an older base, or none, is loaded: the table has
            those since the newest base only. Raises where the log does not go back so far.

    Attributes:
        loaded: Per key group, the base that it was loaded from so far; none where no base could be read.
        versions: Table versions of the key groups that were loaded from their newest base.
        damaged: Objects that could not be used.
        lost: Key groups of which no base could be read.
        reading: Reads in place that go on.
        begins: Set once a lazy table may take key groups in; what is fetched waits for it.
    """

    def __init__(
        self,
        generations: Generations,
        owned: KeyGroupRange,
        table: StateTable,
        files: FileBases,
        advance: Callable[[int], None],
        turn: asyncio.Semaphore,
        older_log: OlderLog | None = None,
    ) -> None:
        self._table = table
        self._lazy = table if isinstance(table, HeapStateTable) and older_log is not None else None
        self._files = files
        self._turn = turn
        self._advance = advance
        self._older_log = older_log
        self._left = {group: generations[group] for group in owned if group in generations}
        self._age = dict.fromkeys(self._left, 0)
        self._urgent: dict[KeyGroup, None] = {}
        self._waiting: dict[KeyGroup, asyncio.Future[None]] = {}
        self._pending: dict[KeyGroup, BaseFetch] = {}
        self._patience_s = PATIENCE_S
        self._failure: DstlError | None = None
        self.reading = 0
        self.loaded: dict[KeyGroup, KeyGroupBase] = {}
        self.versions: dict[KeyGroup, int] = {}
        self.damaged: set[str] = set()
        self.lost: list[KeyGroup] = []
        self.begins = asyncio.Event()
        if self._lazy is not None:
            self._lazy.chill(self._left)
        else:
            self.begins.set()

    @property
    def is_lazy(self) -> bool:
        """True where the table may be used before all is loaded."""
        return self._lazy is not None

    @property
    def is_done(self) -> bool:
        """True once nothing is left."""
        return not self._left

    async def run(self) -> None:
        """Load what is left. May be called again when it has failed.

        Raises:
            Unavailable: The store did not answer several times in a row.
            CorruptData: A key group has no usable base, and the log does not go back to the beginning.
        """
        while self._left:
            for group in [group for group, bases in self._left.items() if self._age[group] == len(bases)]:
                await self._load_nothing(group)
            chosen = [bases[self._age[group]] for group, bases in self._left.items()]
            in_files: dict[str, list[KeyGroupBase]] = {}
            for base in chosen:
                if base.file.files:
                    in_files.setdefault(base.file.name, []).append(base)
            # The largest first, for the first may be opened as it is.
            for bases in sorted(in_files.values(), key=len, reverse=True):
                await self._load_files(bases)
            source = BaseSource(self._files.store, self._files.runtime, self._files.cache)
            self._pending.clear()
            self._expect(base for base in chosen if not base.file.files)
            async with aclosing(decode_ahead(self._by_need(), source, self.begins)) as found:
                async for parts in found:
                    await self._load_parts(parts)

    async def wait(self, groups: Iterable[KeyGroup]) -> None:
        """Return once key groups are loaded; they are loaded before others.

        Raises:
            DstlError: What the load has failed with meanwhile.
        """
        cold = [group for group in groups if group in self._left]
        self._urgent.update(dict.fromkeys(cold))
        loop = asyncio.get_running_loop()
        for group in cold:
            if self._failure is not None:
                raise self._failure
            if group in self._left:
                # Several may wait for it, and each may give up.
                await asyncio.shield(self._waiting.setdefault(group, loop.create_future()))

    def fail(self, error: DstlError, *, for_good: bool) -> None:
        """Tell those that wait that the load has failed, and those that come if it was for good."""
        self._failure = self._failure or (error if for_good else None)
        waiting, self._waiting = list(self._waiting.values()), {}
        for each in waiting:
            each.set_exception(error)
            each.exception()  # perhaps nobody waits any more

    def _expect(self, bases: Iterable[KeyGroupBase]) -> None:
        self._pending |= {base.key_group: fetch for fetch in join_fetches(bases) for base in fetch.bases}

    def _by_need(self) -> Iterator[BaseFetch]:
        """Yield fetches, each time the one that is waited for longest, if there is one."""
        pending = self._pending
        while pending:
            group = next((group for group in self._urgent if group in pending), next(iter(pending)))
            fetch = pending[group]
            for base in fetch.bases:
                del pending[base.key_group]
            yield fetch

    async def _load_parts(self, parts: Parts) -> None:
        """Load key groups from pages. One call of a thread for all, for each costs a turn of the interpreter."""
        into: StateTable = self._table if self._lazy is None else HeapStateTable()
        older = {base.key_group: await self._changes_since(base) for base, _ in parts}
        await self._give_way()
        async with self._turn:
            unusable = await call_in_thread(_restore_all, into, parts, older)
        reach("R2")
        for base, _ in parts:
            if base.key_group not in unusable:
                await self._loaded(base, into)
        await self._unusable([base for base, _ in parts if base.key_group in unusable])
        self._advance(sum(base.length for base, _ in parts if base.key_group not in unusable))

    async def _load_files(self, bases: Sequence[KeyGroupBase]) -> None:
        """Load some key groups of one base that is files."""
        progress = _Share(bases, self._advance, self._files.passes)
        try:
            fetched = await self._files.fetch(bases[0].file, progress)
        except UnusableObject as error:
            _log.warning("%s", error)
            await self._unusable(bases, error.name)
            return
        await self.begins.wait()
        if isinstance(self._table, RocksDBStateTable) and not self.loaded:
            await self._adopt(self._table, bases, fetched)
        else:
            await self._copy(bases, fetched)
        progress.finish()

    async def _adopt(self, table: RocksDBStateTable, bases: Sequence[KeyGroupBase], fetched: FetchedFiles) -> None:
        groups = [base.key_group for base in bases]
        try:
            await call_in_thread(table.adopt, fetched.path, groups, fetched.known, fetched.row_bytes)
        except CorruptData:
            await self._unusable(bases)
            return
        for base in bases:
            await self._loaded(base, self._table)

    async def _copy(self, bases: Sequence[KeyGroupBase], fetched: FetchedFiles) -> None:
        with closing(TableFileReader(fetched.path, bases[0].file.name)) as reader:
            for base in sorted(bases, key=lambda each: each.key_group not in self._urgent):
                into: StateTable = self._table if self._lazy is None else HeapStateTable()
                parts: Parts = [(base, reader.entries(base.key_group))]
                older = {base.key_group: await self._changes_since(base)}
                async with self._turn:
                    unusable = await call_in_thread(_restore_all, into, parts, older)
                if unusable:
                    await self._unusable([base])
                else:
                    await self._loaded(base, into)

    async def _changes_since(self, base: KeyGroupBase) -> list[pa.RecordBatch]:
        """Return the changes that a lazy table lacks over this base; none over the newest."""
        if self._older_log is None or self._lazy is None or not self._age[base.key_group]:
            return []
        return await self._older_log(base.key_group, base.checkpoint)

    async def _unusable(self, bases: Iterable[KeyGroupBase], name: str = "") -> None:
        """Turn to the next older bases of key groups: who waits for one of them does not wait for all others before."""
        older = []
        for base in bases:
            group = base.key_group
            self.damaged.add(name or base.file.name)
            self._age[group] += 1
            if self._age[group] == len(self._left[group]):
                await self._load_nothing(group)
            else:
                older.append(self._left[group][self._age[group]])
        self._expect(base for base in older if not base.file.files)

    async def _give_way(self) -> None:
        """Let reads in place have the processor, for a while: their batches wait, and nobody for what is loaded."""
        clock = self._files.runtime.clock
        while self.reading and not self._urgent and self._patience_s > 0:
            await clock.sleep(_PAUSE_S)
            self._patience_s -= _PAUSE_S

    async def _load_nothing(self, group: KeyGroup) -> None:
        """Go on without a base: all that the key group has is in the log."""
        if self._lazy is not None and self._older_log is not None:
            into = HeapStateTable()
            for changes in await self._older_log(group, 0):
                await call_in_thread(into.apply, changes)
            await self._taken(group, into)
        else:
            del self._left[group]
        self.lost.append(group)

    async def _loaded(self, base: KeyGroupBase, source: StateTable) -> None:
        is_newest = not self._age[base.key_group]
        self.loaded[base.key_group] = base
        if await self._taken(base.key_group, source) and is_newest:
            self.versions[base.key_group] = self._table.version(base.key_group)
        await self._files.runtime.clock.sleep(0)  # others are served between two that are taken down as loaded

    async def _taken(self, group: KeyGroup, source: StateTable) -> bool:
        """Record that a key group is there; returns whether it is what its base holds."""
        unchanged = True
        if self._lazy is not None:
            await self.begins.wait()
            unchanged = self._lazy.warm(group, source)
            reach("R7")
        del self._left[group]
        self._urgent.pop(group, None)
        waiting = self._waiting.pop(group, None)
        if waiting is not None:
            waiting.set_result(None)
        return unchanged


class _Share:
    """Counts a whole base's bytes, in each of some passes, as the share that its wanted key groups have of it."""

    def __init__(self, bases: Sequence[KeyGroupBase], advance: Callable[[int], None], passes: int) -> None:
        self._share = sum(base.length for base in bases)
        self._total = max(1, bases[0].file.total_size) * passes
        self._advance = advance
        self._come = self._told = 0

    def __call__(self, nbytes: int) -> None:
        """Record more bytes."""
        self._come = min(self._total, self._come + nbytes)
        now = self._share * self._come // self._total
        self._advance(now - self._told)
        self._told = now

    def finish(self) -> None:
        """Nothing more will come: what did not had come before."""
        self(self._total)


def _restore_all(table: StateTable, parts: Parts, older: Mapping[KeyGroup, list[pa.RecordBatch]]) -> list[KeyGroup]:
    """Restore each key group that has pages, and return the others and those whose pages end in damage."""
    failed = []
    for base, pages in parts:
        try:
            if isinstance(pages, DstlError):
                raise pages
            table.restore(base.key_group, pages)
            for changes in older[base.key_group]:
                table.apply(changes)
        except (CorruptData, MissingState):
            failed.append(base.key_group)
    return failed
