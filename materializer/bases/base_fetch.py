"""Base files fetched and decoded ahead of the table that takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import all_of, call_in_thread, closed_after
from dstl.store.prefetcher import BudgetLease, Prefetcher
from dstl.store.retry_policy import RetryPolicy
from handles.materialized_handle import KeyGroupBase
from materializer.bases.base_cache import BaseSource
from materializer.bases.key_group_file import open_key_group

AHEAD_FETCHES = 16
"""Connections at once. One to S3 carries 25 to 90 MB/s and a core decodes 1 GB/s, so a restore is bound by connections:
more would take memory, fewer would leave the core idle (``dstl/docs/decisions/restore-cost.md``)."""


FETCH_BYTES = 8 << 20
"""Bytes of a fetch. Smaller ones cost a tenth more of a core where the store is quick."""

AHEAD_BYTES = AHEAD_FETCHES * FETCH_BYTES
"""Stored bytes that a restore may hold before their turn, of bases and of log each."""

DECODED_AHEAD_BYTES = 64 << 20
"""Decoded bytes that may wait for the table. A part for which there is no room is decoded page by page while it is
loaded: what is stored as some kilobytes may be gigabytes."""


@dataclass(slots=True)
class BaseFetch:
    """Neighbouring parts of a base file that are fetched together: bytes ``[start, stop)``."""

    name: str
    start: int
    stop: int
    bases: list[KeyGroupBase] = field(default_factory=list)


Pages = Iterable[pa.RecordBatch] | DstlError
Parts = list[tuple[KeyGroupBase, Pages]]


def join_fetches(bases: Iterable[KeyGroupBase]) -> list[BaseFetch]:
    """Join parts that lie side by side in one file into one request."""
    fetches: list[BaseFetch] = []
    for base in sorted(bases, key=lambda each: (each.file.name, each.offset)):
        last = fetches[-1] if fetches else None
        end = base.offset + base.length
        if last and last.name == base.file.name and last.stop == base.offset and end - last.start <= FETCH_BYTES:
            last.stop = end
            last.bases.append(base)
        else:
            fetches.append(BaseFetch(base.file.name, base.offset, end, [base]))
    return fetches


async def decode_ahead(
    fetches: Iterator[BaseFetch], source: BaseSource, begins: asyncio.Event
) -> AsyncGenerator[Parts]:
    """Yield the parts of each fetch with their pages, or with the error instead; a bounded number ahead."""

    async def load(fetch: BaseFetch, lease: BudgetLease) -> Parts:
        return await _load(fetch, source, lease, begins)

    ahead = Prefetcher(
        fetches,
        load,
        cost=lambda fetch: fetch.stop - fetch.start,
        max_bytes=AHEAD_BYTES,
        max_count=AHEAD_FETCHES,
        max_taken=DECODED_AHEAD_BYTES,
    )
    async with closed_after(source), aclosing(ahead):
        async for parts in ahead:
            yield parts


async def _load(fetch: BaseFetch, source: BaseSource, lease: BudgetLease, begins: asyncio.Event) -> Parts:
    async def read() -> Parts:
        data = await _get(fetch, source)
        await begins.wait()
        opened = await call_in_thread(_open, fetch, data)
        # What there is no room for is decoded page by page while it is loaded.
        room = [lease.try_take(raw) for _, raw, _ in opened]
        try:
            return await call_in_thread(_decode_pages, opened, room)
        except BaseException:
            lease.give_back(sum(raw for (_, raw, _), has_room in zip(opened, room, strict=True) if has_room))
            raise

    try:
        # Requests are repeated one by one: what is left for all of them is damage, which may be the network's.
        return await RetryPolicy(source.runtime, attempts=2).read(read)
    except (CorruptData, MissingState) as error:
        if len(fetch.bases) == 1:
            return [(fetch.bases[0], error)]
    # One of them is damaged: each by itself, so that the others are not lost with it.
    alone = [BaseFetch(fetch.name, base.offset, base.offset + base.length, [base]) for base in fetch.bases]
    return [part for each in alone for part in await _load(each, source, lease, begins)]


async def _get(fetch: BaseFetch, source: BaseSource) -> bytes | memoryview:
    """Return a fetch's bytes: those of a large key group by several requests, for each connection has its own pace.

    Each is repeated by itself: of a hundred requests one fails more often than not, where one in a hundred does.
    """
    size, retries = FETCH_BYTES, RetryPolicy(source.runtime)

    async def get(start: int) -> bytes:
        stop = min(fetch.stop, start + size)
        return await retries.read(lambda: source.get(fetch.bases[0].file, start, stop))

    starts = range(fetch.start, fetch.stop, size)
    if len(starts) == 1:
        return await get(fetch.start)
    turn = asyncio.Semaphore(AHEAD_FETCHES)
    whole = np.empty(fetch.stop - fetch.start, np.uint8)

    async def piece(start: int) -> None:
        async with turn:
            data = await get(start)
        whole[start - fetch.start : start - fetch.start + len(data)] = np.frombuffer(data, np.uint8)

    await all_of(map(piece, starts))
    return whole.data


_Opened = list[tuple[KeyGroupBase, int, Iterator[pa.RecordBatch]]]


def _open(fetch: BaseFetch, data: bytes | memoryview) -> _Opened:
    """Check the parts of a fetch; returns each with the bytes that its pages will take. Runs in a thread."""
    view = memoryview(data)
    opened = []
    for base in fetch.bases:
        at = base.offset - fetch.start
        part = open_key_group(view[at : at + base.length], base.key_group, name=f"base file {fetch.name}")
        opened.append((base, *part))
    return opened


def _decode_pages(opened: _Opened, room: list[bool]) -> Parts:
    """Decode the pages of those parts that there is room for. Runs in a thread."""
    return [(base, list(pages) if has_room else pages) for (base, _, pages), has_room in zip(opened, room, strict=True)]
