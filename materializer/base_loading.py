"""The first half of a restore: key groups out of base files, the newest that can be read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa

from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import Runtime
from dstl.store.base import ByteRange, ObjectStore
from handles.base_generations import Generations
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import KeyGroupBase
from materializer.repeated_read import repeated
from materializer.snapshot import decode_key_group
from materializer.tables import StateTable

__all__ = ["LoadedBases", "load_bases"]

_FETCH = 8 << 20
_AHEAD_BYTES = 32 << 20
_AHEAD_FETCHES = 8
_DECODE_AHEAD = 8 << 20
"""A longer part is decoded page by page while it is loaded, instead of whole and ahead."""


@dataclass(slots=True)
class LoadedBases:
    """What was loaded of one operator.

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
    store: ObjectStore,
    runtime: Runtime,
    loaded: Callable[[KeyGroupBase], None],
) -> LoadedBases:
    """Load the owned key groups of one operator into its empty table.

    Neighbouring parts of a file are fetched together, several fetches ahead within a fixed budget of bytes, and decoded
    in threads. A part that is damaged or missing is replaced by the next older base of its key group.

    Args:
        generations: The operator's bases.
        owned: Key groups to load.
        table: Where they go. Its calls are made from a thread, one at a time.
        store: Where the files are.
        runtime: Clock and jitter for repeated reads.
        loaded: Called after each key group.

    Raises:
        Unavailable: The store did not answer several times in a row.
    """
    result = LoadedBases()
    wanted = {group: generations[group] for group in owned if group in generations}
    age = 0
    while wanted:
        failed: list[KeyGroup] = []
        chosen = [bases[age] for bases in wanted.values()]
        async with aclosing(_decoded(_fetches(chosen), store, runtime)) as found:
            async for base, pages in found:
                try:
                    if isinstance(pages, DstlError):
                        raise pages
                    await asyncio.get_running_loop().run_in_executor(None, table.restore, base.key_group, pages)
                except (CorruptData, MissingState):
                    result.damaged.add(base.name)
                    failed.append(base.key_group)
                    continue
                result.loaded[base.key_group] = base
                if age == 0:
                    result.versions[base.key_group] = table.version(base.key_group)
                loaded(base)
        age += 1
        wanted = {group: wanted[group] for group in failed if len(wanted[group]) > age}
    return result


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


async def _decoded(
    fetches: list[_Fetch], store: ObjectStore, runtime: Runtime
) -> AsyncGenerator[tuple[KeyGroupBase, _Pages]]:
    """Yield the parts with their pages, or with why there are none; a bounded number of fetches ahead."""
    waiting = deque(fetches)
    running: deque[tuple[_Fetch, asyncio.Task[Mapping[KeyGroup, _Pages]]]] = deque()
    held = 0
    try:
        while waiting or running:
            while waiting and (
                not running
                or (len(running) < _AHEAD_FETCHES and held + waiting[0].stop - waiting[0].start <= _AHEAD_BYTES)
            ):
                fetch = waiting.popleft()
                held += fetch.stop - fetch.start
                running.append((fetch, asyncio.ensure_future(_fetched(fetch, store, runtime))))
            fetch, task = running[0]
            parts = await task
            running.popleft()
            for base in fetch.bases:
                yield base, parts[base.key_group]
            held -= fetch.stop - fetch.start
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)


async def _fetched(fetch: _Fetch, store: ObjectStore, runtime: Runtime) -> Mapping[KeyGroup, _Pages]:
    async def read() -> Mapping[KeyGroup, _Pages]:
        data = await store.get(fetch.name, ByteRange(fetch.start, fetch.stop))
        if len(data) != fetch.stop - fetch.start:
            raise CorruptData(f"base file {fetch.name} ends at byte {fetch.start + len(data)}, before {fetch.stop}")
        return await asyncio.get_running_loop().run_in_executor(None, partial(_parts, fetch, data))

    try:
        return await repeated(read, runtime)
    except (CorruptData, MissingState) as error:
        if len(fetch.bases) == 1:
            return {fetch.bases[0].key_group: error}
    # One of them is damaged: each by itself, so that the others are not lost with it.
    alone = [_Fetch(fetch.name, base.offset, base.offset + base.length, [base]) for base in fetch.bases]
    found: dict[KeyGroup, _Pages] = {}
    for each in alone:
        found.update(await _fetched(each, store, runtime))
    return found


def _parts(fetch: _Fetch, data: bytes) -> dict[KeyGroup, _Pages]:
    view = memoryview(data)
    found: dict[KeyGroup, _Pages] = {}
    for base in fetch.bases:
        at = base.offset - fetch.start
        pages = decode_key_group(view[at : at + base.length], base.key_group, name=f"base file {fetch.name}")
        found[base.key_group] = list(pages) if base.length <= _DECODE_AHEAD else pages
    return found
