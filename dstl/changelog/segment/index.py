"""The frame of a segment (header, footer, trailer), the index in its footer as values, and the limits of the format.

``handles/FORMAT.md`` is normative::

    header | block 0 | block 1 | ... | footer | trailer

Blocks follow each other without a gap, so their lengths in the footer say where each lies, and every byte of a segment
is under exactly one CRC-32C or is a magic number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from dstl.changelog.change_set import META_KEY_GROUP
from dstl.errors import CorruptData, Invalid
from handles.key_group import KeyGroupRange
from handles.segment_handle import SequenceNumber, SequenceNumberRange

FORMAT_MAJOR = 1
"""A reader refuses another major version."""
FORMAT_MINOR = 0
"""A reader takes a higher minor version: it may only add what can be ignored."""

CODEC_STORED = 0  # the values are the format's: see handles/FORMAT.md
CODEC_ZSTD = 1  # likewise
CODEC_MASK = 0x000F
"""The part of a block's flags that says how it is stored; the others are for later minor versions."""

MAX_BLOCK_BYTES = 80 << 20
"""Most uncompressed bytes of a block that a reader will allocate; above ``MAX_CHANGE_BYTES``."""
MAX_BLOCK_RECORDS = 1 << 20
"""Most changes of a block: columns that are constant take no bytes, so bytes alone bound nothing."""
MAX_FOOTER_BYTES = 16 << 20  # half a million blocks; a reader allocates it on an object's word alone
HEADER_SIZE = 16  # bytes of the header's struct
TRAILER_SIZE = 24  # bytes of the trailer's struct

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


class BlockTable:
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

    def __iter__(self) -> Iterator[BlockEntry]:
        return iter(self._entries(np.arange(len(self))))

    def find_blocks(self, key_groups: KeyGroupRange | None, sqns: SequenceNumberRange) -> list[BlockEntry]:
        """Return the blocks that may hold changes of these key groups (None: all, and metadata) and numbers."""
        base, rows = self._base_sqn, self.rows
        wanted = (rows["from_delta"] + np.int64(base) < sqns.to_sqn) & (
            rows["to_delta"] + np.int64(base) > sqns.from_sqn
        )
        if key_groups is not None:
            first, last = rows["first_key_group"], rows["last_key_group"]
            wanted &= (first <= key_groups.end) & (last >= key_groups.start)
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


_MAX_TEXT = 1 << 12  # far above any log id; a forged length must not be believed
_MAX_SQN = (1 << 63) - 1  # what a signed column of Arrow or numpy holds

_HEAD_MAGIC = b"\x89DSTLSG\n"
_TAIL_MAGIC = b"\nGSLTSD\x98"
_HEADER = struct.Struct("<8sHHI")
_TRAILER = struct.Struct("<IIHHI8s")

_LOG = struct.Struct("<QQI")
_COUNTS = struct.Struct("<IIH")
_TEXT = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last bytes of a segment: where its footer starts, counted back from the trailer, and its checksum."""

    footer_length: int
    footer_checksum: int
    version: tuple[int, int]


def pack_header() -> bytes:
    """Return the first bytes of a segment."""
    start = _HEADER.pack(_HEAD_MAGIC, FORMAT_MAJOR, FORMAT_MINOR, 0)[:-4]
    return start + struct.pack("<I", google_crc32c.value(start))


def check_header(data: bytes, where: str, version: tuple[int, int]) -> None:
    """Check the first :data:`HEADER_SIZE` bytes of a segment, which has a trailer, against that one's version.

    Raises:
        CorruptData: They are not what was written.
    """
    magic, major, minor, checksum = _HEADER.unpack_from(data)
    if magic != _HEAD_MAGIC or google_crc32c.value(data[: HEADER_SIZE - 4]) != checksum or (major, minor) != version:
        raise CorruptData(f"{where}: the segment's header is damaged; restore it from a replica")


def pack_trailer(footer: bytes) -> bytes:
    """Return the last bytes of a segment."""
    start = struct.pack("<IIHH", len(footer), google_crc32c.value(footer), FORMAT_MAJOR, FORMAT_MINOR)
    return start + struct.pack("<I", google_crc32c.value(start)) + _TAIL_MAGIC


def unpack_trailer(data: bytes, where: str, segment_size: int) -> Trailer:
    """Parse the last :data:`TRAILER_SIZE` bytes of a segment.

    Raises:
        CorruptData: They are not a trailer, or point outside of the segment.
        Invalid: Another major version wrote it.
    """
    if len(data) != TRAILER_SIZE:
        raise CorruptData(f"{where}: {len(data)} bytes are too few for a segment; restore it from a replica")
    length, checksum, major, minor, own, magic = _TRAILER.unpack(data)
    if magic != _TAIL_MAGIC:
        raise CorruptData(f"{where}: no segment ends here (truncated, or not a segment); restore it from a replica")
    if google_crc32c.value(data[:12]) != own:
        raise CorruptData(f"{where}: the segment's trailer is damaged; restore it from a replica")
    if major != FORMAT_MAJOR:
        raise Invalid(
            f"{where}: segment format {major}.{minor}, this program reads {FORMAT_MAJOR}.x; "
            "use a release of dstl that reads it"
        )
    if length > min(MAX_FOOTER_BYTES, segment_size - HEADER_SIZE - TRAILER_SIZE):
        raise CorruptData(f"{where}: a footer of {length} bytes cannot be in a segment of {segment_size} bytes")
    return Trailer(length, checksum, (major, minor))


def pack_footer(writer_id: str, metadata: Mapping[str, str], logs: Sequence[LogIndex]) -> bytes:
    """Return the footer's bytes: counts, texts, the table of logs, the table of blocks.

    Raises:
        Invalid: A text or the number of entries is above the format's limits.
    """
    if len(metadata) > 0xFFFF:
        raise Invalid(f"{len(metadata)} metadata entries are too many for a segment")
    parts = [_COUNTS.pack(len(logs), sum(len(log.blocks) for log in logs), len(metadata)), _pack_text(writer_id)]
    for name, value in sorted(metadata.items()):
        parts += (_pack_text(name), _pack_text(value))
    for log in logs:
        parts += (_pack_text(log.log_id), _LOG.pack(log.sqns.from_sqn, log.sqns.to_sqn, len(log.blocks)))
    footer = b"".join((*parts, *(log.blocks.rows.tobytes() for log in logs)))
    if len(footer) > MAX_FOOTER_BYTES:
        raise Invalid(f"a footer of {len(footer)} bytes is above {MAX_FOOTER_BYTES}: seal smaller segments")
    return footer


def unpack_footer(data: bytes, where: str, trailer: Trailer, segment_size: int) -> SegmentIndex:
    """Parse and check a footer; everything that its index says then lies within the segment.

    Raises:
        CorruptData: The bytes are not what was written, or contradict themselves.
        Invalid: A block is stored in a way that this release does not know.
    """
    if len(data) != trailer.footer_length or google_crc32c.value(data) != trailer.footer_checksum:
        raise CorruptData(f"{where}: the segment's footer is damaged; restore it from a replica")
    try:
        return _parse_footer(data, trailer.version, segment_size)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, Invalid):
            raise
        raise CorruptData(f"{where}: the segment's footer contradicts itself: {error}") from None


def _parse_footer(data: bytes, version: tuple[int, int], segment_size: int) -> SegmentIndex:
    num_logs, num_blocks, num_metadata = _COUNTS.unpack_from(data)
    writer_id, at = _unpack_text(data, _COUNTS.size)
    metadata: dict[str, str] = {}
    for _ in range(num_metadata):
        name, at = _unpack_text(data, at)
        metadata[name], at = _unpack_text(data, at)
    heads: list[tuple[str, SequenceNumberRange, int]] = []
    for _ in range(num_logs):
        log_id, at = _unpack_text(data, at)
        from_sqn, to_sqn, count = _LOG.unpack_from(data, at)
        if not from_sqn < to_sqn <= _MAX_SQN or not count:
            raise ValueError(f"log {log_id} has {count} blocks of [{from_sqn}, {to_sqn})")
        at += _LOG.size
        heads.append((log_id, SequenceNumberRange(from_sqn, to_sqn), count))
    if num_blocks != sum(count for _, _, count in heads) or num_blocks * BLOCK.itemsize > len(data) - at:
        raise ValueError(f"{num_blocks} blocks do not fit")
    end = at + num_blocks * BLOCK.itemsize
    if end != len(data) and version[1] <= FORMAT_MINOR:
        raise ValueError(f"{len(data) - end} bytes too many")
    table = np.frombuffer(data, BLOCK, num_blocks, at)
    if num_blocks:
        _check_table(table)
    ends = np.cumsum(table["length"], dtype=np.int64) + HEADER_SIZE
    footer_offset = int(ends[-1]) if num_blocks else HEADER_SIZE
    if footer_offset != segment_size - TRAILER_SIZE - len(data):
        raise ValueError(f"its blocks end at {footer_offset}, not where it starts")
    logs: list[LogIndex] = []
    first = 0
    for log_id, sqns, count in heads:
        rows = table[first : first + count]
        _check_order(rows, sqns)
        offsets = ends[first : first + count] - rows["length"]
        logs.append(LogIndex(log_id, sqns, BlockTable(rows, offsets, sqns.from_sqn)))
        first += count
    order = [(log.log_id, log.sqns) for log in logs]
    for (one, low), (two, high) in pairwise(order):
        if one > two or (one == two and low.to_sqn >= high.from_sqn):
            raise ValueError(f"log {two} is out of order")
    return SegmentIndex(writer_id, metadata, tuple(logs), version, footer_offset)


def _check_table(table: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
    codecs = table["flags"] & CODEC_MASK
    if int(codecs.max()) > CODEC_ZSTD:
        raise Invalid(f"a block of codec {int(codecs.max())}: use a release of dstl that reads it")
    stored = codecs == CODEC_STORED
    bad = {
        "key groups": table["first_key_group"] > table["last_key_group"],
        "sequence numbers": table["from_delta"] >= table["to_delta"],
        "records": (table["records"] == 0) | (table["records"] > MAX_BLOCK_RECORDS),
        "length": table["length"] == 0,
        "raw length": (table["raw_length"] == 0) | (table["raw_length"] > MAX_BLOCK_BYTES),
        "stored length": stored & (table["length"] != table["raw_length"]),
    }
    for what, rows in bad.items():
        if rows.any():
            raise ValueError(f"{what} of block {int(np.argmax(rows))}")


def _check_order(rows: np.ndarray[tuple[int], np.dtype[np.void]], sqns: SequenceNumberRange) -> None:
    """Metadata, then ascending key groups; a key group may go on in the next block, from where it stopped."""
    if (int(rows["from_delta"].min()), int(rows["to_delta"].max())) != (0, len(sqns)):
        raise ValueError(f"its blocks are not those of {sqns}")
    before, after = rows[:-1], rows[1:]
    same = after["first_key_group"] == before["last_key_group"]
    goes_on = same & (after["from_delta"] + 1 >= before["to_delta"])
    ascends = after["first_key_group"] > before["last_key_group"]
    after_meta = ~same & (before["last_key_group"] == META_KEY_GROUP)
    if not bool((goes_on | ascends | after_meta).all()):
        raise ValueError("blocks are out of order")


def _pack_text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > _MAX_TEXT:
        raise Invalid(f"{text[:40]!r}... of {len(raw)} bytes is too long for a segment's index")
    return _TEXT.pack(len(raw)) + raw


def _unpack_text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = _TEXT.unpack_from(data, at)
    at += _TEXT.size
    raw = data[at : at + length]
    if length > _MAX_TEXT or len(raw) != length:
        raise ValueError("a text is cut off")
    return raw.decode(), at + length
