"""Which bytes of a segment a read asks for, and what is decoded together."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from dstl.changelog.segment.index import BlockEntry, LogIndex

__all__ = ["AskedAhead", "Fetch", "Unit", "Wanted", "units"]

_GAP = 64 << 10
"""Bytes that are fetched in vain rather than asked around."""
_FETCH = 8 << 20
_MAX_FETCHES = 8
_UNIT = 1 << 20
"""Decoded at once, and few of them ahead, so that decoding writes to memory that is still in a cache: taking twenty
times as much costs as much again as the decoding."""
_RECORD_BYTES = 16

Wanted = tuple[LogIndex, BlockEntry]


@dataclass(slots=True)
class Fetch:
    """Bytes ``[start, stop)`` of the segment, asked for once however many units use them."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.stop - self.start


@dataclass(slots=True)
class Unit:
    """Blocks that are decoded together, out of one fetch.

    Attributes:
        fetch: The bytes that hold them all.
        blocks: In the order of their offsets.
        raw: Their uncompressed bytes.
        stored: Their stored bytes.
        cost: About the bytes that they take in memory once decoded.
    """

    fetch: Fetch
    blocks: list[Wanted] = field(default_factory=list)
    raw: int = 0
    stored: int = 0
    cost: int = 0

    def add(self, log: LogIndex, entry: BlockEntry) -> None:
        """Decode this block with the others."""
        self.blocks.append((log, entry))
        self.raw += entry.raw_length
        self.stored += entry.length
        self.cost += entry.raw_length + _RECORD_BYTES * entry.records


class AskedAhead:
    """The fetches of one read: asked for in order, as many ahead as fit, and dropped when their last unit is used."""

    def __init__(self, get: Callable[[int, int], Coroutine[None, None, bytes]], units: list[Unit], budget: int) -> None:
        self._get = get
        self._budget = budget
        self._users = Counter(id(unit.fetch) for unit in units)
        self._waiting = deque({id(unit.fetch): unit.fetch for unit in units}.values())
        self._tasks: dict[int, asyncio.Task[bytes]] = {}
        self._held = 0

    async def get(self, unit: Unit) -> bytes:
        """Return the bytes of the unit's fetch; every unit asks once, in order."""
        while self._waiting and (
            id(unit.fetch) not in self._tasks
            or (len(self._tasks) < _MAX_FETCHES and self._held + self._waiting[0].size <= self._budget)
        ):
            fetch = self._waiting.popleft()
            self._held += fetch.size
            self._tasks[id(fetch)] = asyncio.create_task(self._get(fetch.start, fetch.stop))
        return await self._tasks[id(unit.fetch)]

    def used(self, unit: Unit) -> None:
        """The unit's changes were taken."""
        fetch = unit.fetch
        self._users[id(fetch)] -= 1
        if not self._users[id(fetch)]:
            del self._tasks[id(fetch)]
            self._held -= fetch.size

    def tasks(self) -> list[asyncio.Task[Any]]:
        """What is under way or was not dropped."""
        return list(self._tasks.values())


def units(wanted: Iterator[Wanted]) -> Iterator[Unit]:
    """Join neighbours into fetches, and cut fetches into what is decoded at once."""
    unit: Unit | None = None
    for log, entry in wanted:
        stop = entry.offset + entry.length
        if unit is None:
            unit = Unit(Fetch(entry.offset, stop))
        elif entry.offset - unit.fetch.stop > _GAP or stop - unit.fetch.start > _FETCH:
            yield unit
            unit = Unit(Fetch(entry.offset, stop))
        elif unit.raw + entry.raw_length > _UNIT:
            yield unit
            unit = Unit(unit.fetch)
        unit.fetch.stop = stop
        unit.add(log, entry)
    if unit is not None:
        yield unit
