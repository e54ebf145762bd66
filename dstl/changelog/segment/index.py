"""The index in a segment's footer as values, and the limits of the format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from dstl.changelog.change_set import META_KEY_GROUP
from handles.key_group import KeyGroupRange
from handles.sequence_number import SequenceNumber, SequenceNumberRange

__all__ = [
    "BLOCK",
    "CODEC_MASK",
    "CODEC_STORED",
    "CODEC_ZSTD",
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "HEADER_SIZE",
    "MAX_BLOCK_BYTES",
    "MAX_BLOCK_RECORDS",
    "MAX_FOOTER_BYTES",
    "TRAILER_SIZE",
    "BlockEntry",
    "BlockTable",
    "LogIndex",
    "SegmentIndex",
]

FORMAT_MAJOR = 1
"""A reader refuses another major version."""
FORMAT_MINOR = 0
"""A reader takes a higher minor version: it may only add what can be ignored."""

CODEC_STORED = 0
CODEC_ZSTD = 1
CODEC_MASK = 0x000F
"""The part of a block's flags that says how it is stored; the others are for later minor versions."""

MAX_BLOCK_BYTES = 80 << 20
"""Most uncompressed bytes of a block that a reader will allocate; above ``MAX_CHANGE_BYTES``."""
MAX_BLOCK_RECORDS = 1 << 20
"""Most changes of a block: columns that are constant take no bytes, so bytes alone bound nothing."""
MAX_FOOTER_BYTES = 16 << 20
HEADER_SIZE = 16
TRAILER_SIZE = 24

BLOCK = np.dtype(
    [
        ("flags", "<u2"),
        ("first_key_group", "<u2"),
        ("last_key_group", "<u2"),
        ("reserved", "<u2"),
        ("from_delta", "<u4"),
        ("to_delta", "<u4"),
        ("records", "<u4"),
        ("length", "<u4"),
        ("raw_length", "<u4"),
        ("checksum", "<u4"),
    ]
)
"""One block in the footer; sequence numbers are counted from the first of the log's entry."""


class BlockEntry(NamedTuple):
    """One block of one log, as the footer tells of it. (A tuple, for an index may have many thousands.)

    Attributes:
        first_key_group: Lowest key group in the block.
        last_key_group: Highest key group in the block, included; both are ``META_KEY_GROUP`` for metadata.
        sqns: Half-open range that holds the sequence numbers of the block's changes.
        records: Number of changes.
        offset: Where the block's stored bytes start, from the start of the segment.
        length: Stored bytes.
        raw_length: Bytes once decompressed.
        checksum: CRC-32C of the stored bytes.
        codec: ``CODEC_STORED`` or ``CODEC_ZSTD``.
    """

    first_key_group: int
    last_key_group: int
    sqns: SequenceNumberRange
    records: int
    offset: int
    length: int
    raw_length: int
    checksum: int
    codec: int


class BlockTable(Sequence[BlockEntry]):
    """The blocks of one log: metadata first, then by ascending key group.

    Kept as columns: an index may have many thousands of blocks, and a reader wants few of them. Immutable.
    """

    __slots__ = ("_base_sqn", "_offsets", "rows")

    def __init__(self, rows: npt.NDArray[np.void], offsets: npt.NDArray[np.int64], base_sqn: SequenceNumber) -> None:
        """Take rows of :data:`BLOCK`, where each block starts, and what the rows' numbers are counted from."""
        self.rows = rows
        self._offsets = offsets
        self._base_sqn = base_sqn

    @staticmethod
    def of(entries: Sequence[BlockEntry], base_sqn: SequenceNumber) -> BlockTable:
        """Return the table of these blocks, in their order."""
        rows = np.zeros(len(entries), BLOCK)
        rows[:] = [
            (
                *(entry.codec, entry.first_key_group, entry.last_key_group, 0),
                *(entry.sqns.from_sqn - base_sqn, entry.sqns.to_sqn - base_sqn),
                *(entry.records, entry.length, entry.raw_length, entry.checksum),
            )
            for entry in entries
        ]
        return BlockTable(rows, np.array([entry.offset for entry in entries], np.int64), base_sqn)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, position: int) -> BlockEntry: ...
    @overload
    def __getitem__(self, position: slice) -> list[BlockEntry]: ...
    def __getitem__(self, position: int | slice) -> BlockEntry | list[BlockEntry]:
        positions = range(len(self))[position]
        if isinstance(positions, range):
            return self._entries(np.arange(len(self))[positions.start : positions.stop : positions.step])
        return self._entries(np.array([positions]))[0]

    def __iter__(self) -> Iterator[BlockEntry]:
        return iter(self._entries(np.arange(len(self))))

    def find_blocks(self, key_groups: KeyGroupRange | None, sqns: SequenceNumberRange) -> list[BlockEntry]:
        """Return the blocks that may hold changes of these key groups (None: all) and numbers, and metadata."""
        base, rows = self._base_sqn, self.rows
        wanted = (rows["from_delta"] + np.int64(base) < sqns.to_sqn) & (
            rows["to_delta"] + np.int64(base) > sqns.from_sqn
        )
        if key_groups is not None:
            first, last = rows["first_key_group"], rows["last_key_group"]
            meets = (first <= key_groups.end) & (last >= key_groups.start)
            wanted &= meets | (first == META_KEY_GROUP)
        return self._entries(np.flatnonzero(wanted))

    def _entries(self, positions: npt.NDArray[np.intp]) -> list[BlockEntry]:
        base = self._base_sqn
        return [
            BlockEntry(
                *(first, last, SequenceNumberRange(base + low, base + high), records),
                *(offset, length, raw_length, checksum, flags & CODEC_MASK),
            )
            for (flags, first, last, _, low, high, records, length, raw_length, checksum), offset in zip(
                self.rows[positions].tolist(), self._offsets[positions].tolist(), strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class LogIndex:
    """A run of adjacent sequence numbers of one log, and its blocks."""

    log_id: str
    sqns: SequenceNumberRange
    blocks: BlockTable = field(compare=False)


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """The contents of a footer.

    Attributes:
        writer_id: Who wrote the segment.
        metadata: What else the writer noted; keys that a reader does not know mean nothing to it.
        logs: By log id, then by sequence number; one log has several entries where its numbers have gaps.
        version: Major and minor format version.
        footer_offset: Where the footer starts, from the start of the segment: the end of the last block.
    """

    writer_id: str
    metadata: Mapping[str, str]
    logs: tuple[LogIndex, ...]
    version: tuple[int, int] = (FORMAT_MAJOR, FORMAT_MINOR)
    footer_offset: int = HEADER_SIZE

    def sqn_ranges(self, log_id: str) -> list[SequenceNumberRange]:
        """Return what the segment holds of one log, in order; empty where it holds nothing."""
        return [log.sqns for log in self.logs if log.log_id == log_id]
