"""The first half of a restore: key groups out of base files, the newest that can be read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import call_in_thread
from dstl.store.prefetcher import BudgetLease, Prefetcher
from dstl.store.retry_policy import RetryPolicy
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import Generations, KeyGroupBase
from materializer.bases.base_cache import BaseSource
from materializer.bases.file_reader import TableFileReader
from materializer.bases.key_group_file import open_key_group
from materializer.bases.table_directory import FetchedFiles, FileBases, UnusableObject
from materializer.tables import FileTable, StateTable

_log = logging.getLogger(__name__)
_FETCH = 8 << 20
"""Smaller ones cost a tenth more of a core where the store is quick."""

AHEAD_FETCHES = 16
"""Connections at once. One to S3 carries 25 to 90 MB/s and a core decodes 1 GB/s, so a restore is bound by connections:
more would take memory, fewer would leave the core idle (``dstl/docs/decisions/restore-cost.md``)."""

AHEAD_BYTES = AHEAD_FETCHES * _FETCH
"""Stored bytes that a restore may hold before their turn, of bases and of log each."""

DECODED_AHEAD_BYTES = 64 << 20
"""Decoded bytes that may wait for the table. A part for which there is no room is decoded page by page while it is
loaded: what is stored as some kilobytes may be gigabytes."""


@dataclass(slots=True)
class LoadedBases:
    """The bases that were loaded of one operator.

    Attributes:
        loaded: Per key group, the base that it was loaded from; none where no base could be read.
        versions: Table versions of the key groups that were loaded from their newest base.
        damaged: Objects that could not be used.
    """

    loaded: dict[KeyGroup, KeyGroupBase] = field(default_factory=dict)
    versions: dict[KeyGroup, int] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Fetch:
    name: str
    start: int
    stop: int
    bases: list[KeyGroupBase] = field(default_factory=list)


async def load_bases(
    generations: Generations,
    owned: KeyGroupRange,
    table: StateTable,
    files: FileBases,
    advance: Callable[[int], None],
    turn: asyncio.Semaphore,
) -> LoadedBases:
    """Load the owned key groups of one operator into its empty table.

    Neighbouring parts of a file are fetched together, several fetches ahead within a fixed budget of bytes, and decoded
    in threads. A table in files opens the first base that is files as it is; any other table, and further such bases,
    are read key group by key group, by a child process. What is damaged or missing is replaced by the next older base
    of its key groups.

    Args:
        generations: The operator's bases.
        owned: Key groups to load.
        table: Where they go. Its calls are made from a thread, one at a time.
        files: Fetches the bases that are files, and knows where the others lie.
        advance: Told of bytes that were loaded.
        turn: Held while the table takes key groups in.

    Raises:
        Unavailable: The store did not answer several times in a row.
    """
    loading = _Loading(table, files, advance, turn)
    wanted = {group: generations[group] for group in owned if group in generations}
    age = 0
    while wanted:
        chosen = [bases[age] for bases in wanted.values()]
        in_files: dict[str, list[KeyGroupBase]] = {}
        for base in chosen:
            if base.files:
                in_files.setdefault(base.name, []).append(base)
        failed: list[KeyGroup] = []
        # The largest first, for the first may be opened as it is.
        for bases in sorted(in_files.values(), key=len, reverse=True):
            failed += await loading.files_of(bases, newest=age == 0)
        async with aclosing(
            _decode(_fetches(b for b in chosen if not b.files), BaseSource(files.store, files.runtime, files.cache))
        ) as found:
            async for parts in found:
                failed += await loading.parts(parts, newest=age == 0)
        age += 1
        wanted = {group: wanted[group] for group in failed if len(wanted[group]) > age}
    return loading.result


class _Loading:
    """One operator's table while it is loaded."""

    def __init__(
        self, table: StateTable, files: FileBases, advance: Callable[[int], None], turn: asyncio.Semaphore
    ) -> None:
        self._table = table
        self._files = files
        self._turn = turn
        self._advance = advance
        self.result = LoadedBases()

    async def parts(self, parts: _Parts, *, newest: bool) -> list[KeyGroup]:
        """Load key groups from pages; returns those that failed. One call of a thread for all, for each costs a turn of
        the interpreter."""
        async with self._turn:
            unusable = await call_in_thread(_restore_all, self._table, parts)
        reach("R2")
        for base, _ in parts:
            if base.key_group in unusable:
                self.result.damaged.add(base.name)
            else:
                self._loaded(base, newest)
        self._advance(sum(base.length for base, _ in parts if base.key_group not in unusable))
        return unusable

    async def files_of(self, bases: Sequence[KeyGroupBase], *, newest: bool) -> list[KeyGroup]:
        """Load some key groups of one base that is files; returns those that failed."""
        progress = _Share(bases, self._advance, self._files.passes)
        try:
            fetched = await self._files.fetch(bases[0], progress)
        except UnusableObject as error:
            _log.warning("%s", error)
            self.result.damaged.add(error.name)
            return [base.key_group for base in bases]
        table = self._table.as_files
        if table is not None and not self.result.loaded:
            failed = await self._adopt(table, bases, fetched, newest)
        else:
            failed = await self._copy(bases, fetched, newest)
        progress.finish()
        return failed

    async def _adopt(
        self, table: FileTable, bases: Sequence[KeyGroupBase], fetched: FetchedFiles, newest: bool
    ) -> list[KeyGroup]:
        groups = [base.key_group for base in bases]
        try:
            await call_in_thread(table.adopt, fetched.path, groups, fetched.known, fetched.row_bytes)
        except CorruptData:
            self.result.damaged.add(bases[0].name)
            return groups
        for base in bases:
            self._loaded(base, newest)
        return []

    async def _copy(self, bases: Sequence[KeyGroupBase], fetched: FetchedFiles, newest: bool) -> list[KeyGroup]:
        failed = []
        with closing(TableFileReader(fetched.path, bases[0].name)) as reader:
            for base in bases:
                try:
                    async with self._turn:
                        await call_in_thread(self._table.restore, base.key_group, reader.entries(base.key_group))
                except CorruptData:
                    self.result.damaged.add(base.name)
                    failed.append(base.key_group)
                else:
                    self._loaded(base, newest)
        return failed

    def _loaded(self, base: KeyGroupBase, newest: bool) -> None:
        self.result.loaded[base.key_group] = base
        if newest:
            self.result.versions[base.key_group] = self._table.version(base.key_group)


class _Share:
    """Counts a whole base's bytes, in each of some passes, as the share that its wanted key groups have of it."""

    def __init__(self, bases: Sequence[KeyGroupBase], advance: Callable[[int], None], passes: int) -> None:
        self._share = sum(base.length for base in bases)
        self._total = max(1, bases[0].total_size) * passes
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


def _fetches(bases: Iterable[KeyGroupBase]) -> list[_Fetch]:
    """Join parts that lie side by side in one file into one request."""
    fetches: list[_Fetch] = []
    for base in sorted(bases, key=lambda each: (each.name, each.offset)):
        last = fetches[-1] if fetches else None
        end = base.offset + base.length
        if last and last.name == base.name and last.stop == base.offset and end - last.start <= _FETCH:
            last.stop = end
            last.bases.append(base)
        else:
            fetches.append(_Fetch(base.name, base.offset, end, [base]))
    return fetches


_Pages = Iterable[pa.RecordBatch] | DstlError
_Parts = list[tuple[KeyGroupBase, _Pages]]


def _restore_all(table: StateTable, parts: _Parts) -> list[KeyGroup]:
    """Restore each key group that has pages, and return the others and those whose pages end in damage."""
    failed = []
    for base, pages in parts:
        try:
            if isinstance(pages, DstlError):
                raise pages
            table.restore(base.key_group, pages)
        except (CorruptData, MissingState):
            failed.append(base.key_group)
    return failed


async def _decode(fetches: list[_Fetch], source: BaseSource) -> AsyncGenerator[_Parts]:
    """Yield the parts of each fetch with their pages, or with the error instead; a bounded number ahead."""

    async def load(fetch: _Fetch, lease: BudgetLease) -> _Parts:
        return await _load(fetch, source, lease)

    ahead = Prefetcher(
        fetches,
        load,
        cost=lambda fetch: fetch.stop - fetch.start,
        max_bytes=AHEAD_BYTES,
        max_count=AHEAD_FETCHES,
        max_taken=DECODED_AHEAD_BYTES,
    )
    try:
        async with aclosing(ahead):
            async for parts in ahead:
                yield parts
    finally:
        await source.close()


async def _load(fetch: _Fetch, source: BaseSource, lease: BudgetLease) -> _Parts:
    async def read() -> _Parts:
        data = await source.get(fetch.bases[0], fetch.start, fetch.stop)
        opened = await call_in_thread(_open, fetch, data)
        # What there is no room for is decoded page by page while it is loaded.
        room = [lease.try_take(raw) for _, raw, _ in opened]
        try:
            return await call_in_thread(_decode_pages, opened, room)
        except BaseException:
            lease.give_back(sum(raw for (_, raw, _), has_room in zip(opened, room, strict=True) if has_room))
            raise

    try:
        return await RetryPolicy(source.runtime).read(read)
    except (CorruptData, MissingState) as error:
        if len(fetch.bases) == 1:
            return [(fetch.bases[0], error)]
    # One of them is damaged: each by itself, so that the others are not lost with it.
    alone = [_Fetch(fetch.name, base.offset, base.offset + base.length, [base]) for base in fetch.bases]
    return [part for each in alone for part in await _load(each, source, lease)]


_Opened = list[tuple[KeyGroupBase, int, Iterator[pa.RecordBatch]]]


def _open(fetch: _Fetch, data: bytes) -> _Opened:
    """Check the parts of a fetch; returns each with the bytes that its pages will take. Runs in a thread."""
    view = memoryview(data)
    opened = []
    for base in fetch.bases:
        at = base.offset - fetch.start
        part = open_key_group(view[at : at + base.length], base.key_group, name=f"base file {fetch.name}")
        opened.append((base, *part))
    return opened


def _decode_pages(opened: _Opened, room: list[bool]) -> _Parts:
    """Decode the pages of those parts that there is room for. Runs in a thread."""
    return [(base, list(pages) if has_room else pages) for (base, _, pages), has_room in zip(opened, room, strict=True)]
