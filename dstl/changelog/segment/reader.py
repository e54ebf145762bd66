"""The reader of one stored segment, by key groups and sequence numbers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

from dstl.changelog.change_set import META_KEY_GROUP
from dstl.changelog.segment.block_codec import Block, decode_block
from dstl.changelog.segment.index import (
    HEADER_SIZE,
    TRAILER_SIZE,
    BlockEntry,
    LogIndex,
    SegmentIndex,
    check_header,
    unpack_footer,
    unpack_trailer,
)
from dstl.errors import CorruptData, MissingState
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.prefetcher import BudgetLease, Prefetcher
from dstl.store.retry_policy import read_range
from handles.key_group import KeyGroup, KeyGroupRange
from handles.segment_handle import SegmentHandle, SequenceNumber, SequenceNumberRange


def parse_index(data: bytes, where: str) -> SegmentIndex:
    """Return the index of a whole segment; header, trailer and footer are checked, blocks are not.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    trailer = unpack_trailer(data[-TRAILER_SIZE:], where, len(data))
    check_header(data[:HEADER_SIZE], where, trailer.version)
    end = len(data) - TRAILER_SIZE
    return unpack_footer(data[end - trailer.footer_length : end], where, trailer, len(data))


def verify_segment(data: bytes, where: str) -> SegmentIndex:
    """Check every byte of a segment, decode every block and return its index.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    index = parse_index(data, where)
    for _ in _decoded(data, index, where):
        pass
    return index


def decode_segment(data: bytes, where: str) -> Iterator[tuple[str, SequenceNumber, KeyGroup, pa.RecordBatch]]:
    """Yield log id, sequence number, key group and changes of a whole segment that is checked first.

    In the order of the blocks; the metadata of a run of sequence numbers has the key group ``META_KEY_GROUP`` and
    comes first.

    Raises:
        CorruptData: Before anything was yielded: the bytes are not what was written.
        Invalid: Another major format version wrote it.
    """
    for log_id, block in _decoded(data, verify_segment(data, where), where):
        for key_group, sqn, batch in block.slices():
            yield log_id, sqn, key_group, batch


def _decoded(data: bytes, index: SegmentIndex, where: str) -> Iterator[tuple[str, Block]]:
    """Yield the blocks of a whole segment, each checked and decoded, and their logs."""
    for log in index.logs:
        for entry in log.blocks:
            stored = data[entry.offset : entry.offset + entry.length]
            yield log.log_id, decode_block(stored, entry, log.sqns.from_sqn, where)


_RECORD_BYTES = 16  # of offsets and numbers that a decoded change takes beside its raw bytes

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


_ALL_KEY_GROUPS = KeyGroupRange(0, META_KEY_GROUP - 1)
_NO_KEY_GROUPS: frozenset[KeyGroup] = frozenset()
_NOTHING: Mapping[str, frozenset[KeyGroup]] = {}

_MAX_FETCHES = 8  # hides a store's latency; more take no link any faster
_MAX_UNITS = 4  # decoded side by side; there are no more cores for it beside the loop
_SIZES = ReadSizes()


class Changes(NamedTuple):
    """Changes of one log, of neighbouring key groups and sequence numbers, of each key in the order of their appends.

    Attributes:
        log_id: The log.
        batch: The changes.
        nbytes: Of the batch, in memory.
    """

    log_id: str
    batch: pa.RecordBatch
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Selection:
    """The part of a segment that is wanted; see :meth:`SegmentReader.read`."""

    key_groups: KeyGroupRange | None
    logs: Mapping[str, SequenceNumberRange] | None
    without: Mapping[str, frozenset[KeyGroup]]

    def blocks(self, index: SegmentIndex) -> Iterator[Wanted]:
        """Yield the blocks that hold anything wanted, by offset."""
        for log in index.logs:
            sqns = self._sqns(log)
            if sqns is not None:
                for entry in log.blocks.find_blocks(self.key_groups, sqns):
                    yield log, entry

    def decode(self, data: bytes, start: int, unit: Unit, where: str) -> list[Changes]:
        """Return a unit's changes, out of bytes that begin at this place of the segment. Any thread."""
        found: list[Changes] = []
        for log, entry in unit.blocks:
            at = entry.offset - start
            block = decode_block(data[at : at + entry.length], entry, log.sqns.from_sqn, where)
            found.extend(Changes(log.log_id, batch, batch.nbytes) for batch in block.spans(self._wanted(log)))
        return found

    def _sqns(self, log: LogIndex) -> SequenceNumberRange | None:
        return log.sqns if self.logs is None else self.logs.get(log.log_id)

    def _wanted(self, log: LogIndex) -> Callable[[KeyGroup, SequenceNumber], bool]:
        key_groups, sqns = self.key_groups or _ALL_KEY_GROUPS, self._sqns(log) or ()
        left_out = self.without.get(log.log_id, _NO_KEY_GROUPS)
        return lambda key_group, sqn: sqn in sqns and key_group in key_groups and key_group not in left_out


class SegmentReader:
    """Reads one segment, whole object or part of a manifest, with as few and as small requests as it takes.

    Invariants:
        1. Nothing is yielded from a block whose length, CRC-32C or contents are not what the footer says, nor from a
           footer that is not what the trailer says. A segment of at most 256 KiB is also checked against the handle.
        2. At most ``max_bytes_in_memory`` bytes are held ahead, half of them fetched and half decoded; one request (of
           8 MiB, or one block) and one unit (of 1 MiB, or one block) may always be under way. What the caller keeps is
           the caller's.

    Belongs to one event loop. Does not retry: the caller's policy does.
    """

    def __init__(
        self,
        store: ObjectStore,
        handle: SegmentHandle,
        *,
        max_bytes_in_memory: int = 64 << 20,
        turn: asyncio.Semaphore | None = None,
        sizes: ReadSizes = _SIZES,
    ) -> None:
        """Fetches nothing yet.

        Args:
            store: Where the handle's object is.
            handle: Which bytes are the segment.
            max_bytes_in_memory: More: more requests and threads at once; less: less memory while restoring.
            turn: Held while a unit is decoded; shared by readers that should not take all threads at once.
            sizes: What is fetched and decoded at once.
        """
        self._store = store
        self._handle = handle
        self._turn = turn or nullcontext()
        self._sizes = sizes
        self._budget = max_bytes_in_memory
        self._where = f"{store.location}: segment {handle.name}" + (f"+{handle.offset}" if handle.offset else "")
        self._index: SegmentIndex | None = None
        self._whole: bytes | None = None

    async def index(self) -> SegmentIndex:
        """Return the segment's index; one request, seldom two, and none the second time.

        Raises:
            CorruptData: The bytes are not what was written.
            Invalid: Another major format version wrote it.
            ObjectNotFound: The object is not there.
            Unavailable: Try again.
        """
        if self._index is None:
            small = self._handle.size <= self._sizes.whole
            self._index = await (self._index_of_whole() if small else self._index_of_tail())
        return self._index

    async def read(
        self,
        key_groups: KeyGroupRange | None = None,
        logs: Mapping[str, SequenceNumberRange] | None = None,
        without: Mapping[str, frozenset[KeyGroup]] = _NOTHING,
    ) -> AsyncGenerator[Changes]:
        """Yield the changes of these key groups and logs, without metadata.

        Logs come in order of their ids, each by runs of adjacent sequence numbers; of a run its key groups ascending,
        each by ascending number. So the changes of one log and key group are in order. Blocks are cut only at what is
        not wanted: for small runs, cutting each is most of a replay's time. Close the iterator (``aclosing``) when
        leaving early, so that nothing is fetched on.

        Args:
            key_groups: Inclusive range; None for all.
            logs: For each wanted log the half-open range that the segment is known to hold; None for all of all.
            without: By log, key groups to leave out.

        Raises:
            MissingState: The segment does not hold the whole of a wanted range.
            CorruptData: As for :meth:`index`; earlier blocks may have been yielded, none of them damaged.
            Invalid: As for :meth:`index`.
            ObjectNotFound: As for :meth:`index`.
            Unavailable: As for :meth:`index`.
        """
        selection = _Selection(key_groups, logs, without)
        async with aclosing(self._units(selection)) as units:
            async for found in units:
                for changes in found:
                    yield changes

    async def _units(self, selection: _Selection) -> AsyncGenerator[list[Changes]]:
        """Yield the changes of each unit, in order."""
        index = await self.index()
        if selection.logs is not None:
            self._check_holds(index, selection.logs)
        fetches = plan_fetches(selection.blocks(index), self._sizes)
        if self._whole is not None:
            for fetch in fetches:
                for unit in fetch.units:
                    yield await self._decode(selection, self._whole, 0, unit)
            return
        half = self._budget // 2
        fetched = Prefetcher(fetches, self._fetch, cost=lambda f: f.size, max_bytes=half, max_count=_MAX_FETCHES)
        async with aclosing(fetched):
            async for fetch, data in fetched:
                decode = partial(self._decode, selection, data, fetch.start)
                # What is decoded on the loop gains nothing by being decoded early.
                threads = any(unit.stored > self._sizes.inline for unit in fetch.units)
                count = _MAX_UNITS if threads else 1
                decoded = Prefetcher(fetch.units, decode, cost=lambda u: u.cost, max_bytes=half, max_count=count)
                async with aclosing(decoded):
                    async for found in decoded:
                        yield found

    async def _fetch(self, fetch: Fetch, _: BudgetLease) -> tuple[Fetch, bytes]:
        return fetch, await self._get(fetch.start, fetch.stop)

    async def _decode(
        self, selection: _Selection, data: bytes, start: int, unit: Unit, _: BudgetLease | None = None
    ) -> list[Changes]:
        """Decode a unit out of the segment's bytes from ``start`` on."""
        if unit.stored <= self._sizes.inline:
            return selection.decode(data, start, unit, self._where)
        async with self._turn:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, selection.decode, data, start, unit, self._where)

    async def _index_of_whole(self) -> SegmentIndex:
        data = await self._get(0, self._handle.size)
        if google_crc32c.value(data) != self._handle.checksum:
            # The parts say more precisely what is wrong, if anything is: the handle may be.
            parse_index(data, self._where)
            raise CorruptData(f"{self._where} does not have its handle's CRC-32C; restore it from a replica")
        index = parse_index(data, self._where)
        self._whole = data
        return index

    async def _index_of_tail(self) -> SegmentIndex:
        size = self._handle.size
        tail = await self._get(max(0, size - self._sizes.tail), size)
        trailer = unpack_trailer(tail[-TRAILER_SIZE:], self._where, size)
        needed = trailer.footer_length + TRAILER_SIZE
        if needed > len(tail):
            tail = await self._get(size - needed, size - len(tail)) + tail
        return unpack_footer(tail[-needed:-TRAILER_SIZE], self._where, trailer, size)

    async def _get(self, start: int, stop: int) -> bytes:
        base = self._handle.offset
        data = await read_range(self._store, self._handle.name, ByteRange(base + start, base + stop))
        if len(data) != stop - start:
            raise CorruptData(
                f"{self._where} is truncated: {len(data)} of {stop - start} bytes at {start}; restore it from a replica"
            )
        return data

    def _check_holds(self, index: SegmentIndex, logs: Mapping[str, SequenceNumberRange]) -> None:
        for log_id, wanted in logs.items():
            held = sum(len(wanted.intersect(each) or ()) for each in index.sqn_ranges(log_id))
            if held != len(wanted):
                raise MissingState(
                    f"{self._where} holds {held} of the {len(wanted)} change sets [{wanted.from_sqn}, {wanted.to_sqn}) "
                    f"of log {log_id}; the handle names another segment: choose an older checkpoint"
                )
