"""The requests of a read: neighbouring blocks are fetched together, and decoded in smaller units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dstl.changelog.segment.index import BlockEntry, LogIndex

__all__ = ["Fetch", "ReadSizes", "Unit", "Wanted", "plan_fetches"]

_RECORD_BYTES = 16

Wanted = tuple[LogIndex, BlockEntry]


@dataclass(frozen=True, slots=True)
class ReadSizes:
    """Sizes by which a segment is read, in bytes.

    Attributes:
        whole: A segment of at most this size is fetched in one request and checked as a whole.
        tail: First fetched of a larger one: trailer, and nearly always the whole footer.
        gap: Fetched in vain rather than asked around.
        fetch: One request, unless one block is larger.
        unit: Decoded at once, and few of them ahead, so that decoding writes to memory that is still in a cache:
            taking twenty times as much costs as much again as the decoding.
        inline: Stored bytes up to which a unit is decoded on the loop, in about 0.1 ms: a thread would spend as long
            on handing over, and on waiting for the interpreter.
    """

    whole: int = 256 << 10
    tail: int = 64 << 10
    gap: int = 64 << 10
    fetch: int = 8 << 20
    unit: int = 1 << 20
    inline: int = 64 << 10


@dataclass(slots=True)
class Unit:
    """Blocks of one fetch that are decoded together.

    Attributes:
        blocks: In the order of their offsets.
        raw: Their uncompressed bytes.
        stored: Their stored bytes.
        cost: About the bytes that they take in memory once decoded.
    """

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


@dataclass(slots=True)
class Fetch:
    """Bytes ``[start, stop)`` of the segment and the units that they hold."""

    start: int
    stop: int
    units: list[Unit] = field(default_factory=lambda: [Unit()])

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def plan_fetches(wanted: Iterable[Wanted], sizes: ReadSizes) -> list[Fetch]:
    """Join blocks, which come by offset, into fetches, and cut fetches into units."""
    fetches: list[Fetch] = []
    for log, entry in wanted:
        stop = entry.offset + entry.length
        last = fetches[-1] if fetches else None
        if last is None or entry.offset - last.stop > sizes.gap or stop - last.start > sizes.fetch:
            fetches.append(last := Fetch(entry.offset, stop))
        elif last.units[-1].raw + entry.raw_length > sizes.unit:
            last.units.append(Unit())
        last.stop = stop
        last.units[-1].add(log, entry)
    return fetches
