"""The inside of a block: columns of changes as raw buffers. ``handles/FORMAT.md`` is normative.

Arrow's own IPC costs several hundred bytes a message, which would double a small segment; here a column that is
constant or of fixed width says so in five bytes, and what is decoded becomes Arrow arrays without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import CHANGE_SCHEMA, META_KEY_GROUP, OP_META
from dstl.changelog.segment.index import CODEC_STORED, CODEC_ZSTD, MAX_BLOCK_BYTES, BlockEntry
from dstl.column_buffers import array_of
from dstl.errors import CorruptData
from dstl.store.zstd_frame import decompress
from handles.key_group import KeyGroup
from handles.segment_handle import SequenceNumber, SequenceNumberRange

Bytes = npt.NDArray[np.uint8]

RUN = np.dtype([("key_group", "<u2"), ("sqn_delta", "<u4"), ("records", "<u4")])
"""Changes in a row that share key group and sequence number; the latter counted from the log entry's first."""

_NUM_RUNS = struct.Struct("<I")
_WIDTH = struct.Struct("<BI")
_CONSTANT, _PLAIN = 0, 1
_FIXED, _VARIABLE = 0, 1
_LENGTHS: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
_MIN_COMPRESSED = 64  # a zstd frame's own bytes outweigh what so few can save


class BlockLayout:
    """The places of a block's columns in its raw bytes: sized first, then filled.

    Gathered values are thus written once, straight to where the compressor reads them.
    """

    def __init__(self, runs: npt.NDArray[np.void]) -> None:
        """Take the runs; then add the columns in their order."""
        self._parts: list[bytes] = [_NUM_RUNS.pack(len(runs)), runs.tobytes()]
        self._holes: list[tuple[int, int]] = []
        self._size = sum(map(len, self._parts))

    def add_numbers(self, values: npt.NDArray[np.generic]) -> None:
        """Add a column of numbers; of one that is constant, its first value is enough."""
        if bool((values == values[0]).all()):
            self._head(bytes((_CONSTANT,)) + values[:1].tobytes())
        else:
            self._head(bytes((_PLAIN,)) + values.tobytes())

    def add_fixed(self, width: int, records: int) -> None:
        """Add a binary column whose values all are ``width`` bytes."""
        self._head(_WIDTH.pack(_FIXED, width))
        self._hole(width * records)

    def add_variable(self, lengths: npt.NDArray[np.int32]) -> None:
        """Add a binary column of these value lengths."""
        longest = int(lengths.max())
        width = 1 if longest < 1 << 8 else 2 if longest < 1 << 16 else 4
        self._head(bytes((_VARIABLE, width)) + lengths.astype(_LENGTHS[width]).tobytes())
        self._hole(int(lengths.sum(dtype=np.int64)))

    def allocate(self, scratch: Bytes | None) -> tuple[Bytes, list[Bytes]]:
        """Return the raw block, in ``scratch`` where it fits, and a view per binary column for the caller to fill."""
        if scratch is None or len(scratch) < self._size:
            scratch = np.empty(self._size, np.uint8)
        raw = scratch[: self._size]
        at = hole = 0
        for part in self._parts:
            while hole < len(self._holes) and self._holes[hole][0] == at:
                at += self._holes[hole][1]
                hole += 1
            raw[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += len(part)
        return raw, [raw[start : start + size] for start, size in self._holes]

    def _head(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)

    def _hole(self, size: int) -> None:
        self._holes.append((self._size, size))
        self._size += size


def compress_block(raw: Bytes, compressor: zstandard.ZstdCompressor) -> tuple[int, bytes, int]:
    """Return codec, stored bytes and their CRC-32C; bytes that do not shrink are stored as they are."""
    if len(raw) >= _MIN_COMPRESSED:
        stored = compressor.compress(raw.data)
        if len(stored) < len(raw):
            return CODEC_ZSTD, stored, google_crc32c.value(stored)
    stored = raw.tobytes()
    return CODEC_STORED, stored, google_crc32c.value(stored)


@dataclass(frozen=True, slots=True)
class Block:
    """A decoded block.

    Attributes:
        batch: Its changes, by ascending key group, then by sequence number, then in the order of their appends.
        runs: Key group, sequence number and number of changes of each run of rows.
    """

    batch: pa.RecordBatch
    runs: tuple[tuple[KeyGroup, SequenceNumber, int], ...]

    def slices(self) -> Iterator[tuple[KeyGroup, SequenceNumber, pa.RecordBatch]]:
        """Yield the rows of each run; nothing is copied."""
        at = 0
        for key_group, sqn, records in self.runs:
            yield key_group, sqn, self.batch.slice(at, records)
            at += records

    def spans(self, wanted: Callable[[KeyGroup, SequenceNumber], bool]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the runs that are wanted, neighbours together; nothing is copied."""
        start = at = 0
        for key_group, sqn, records in self.runs:
            if not wanted(key_group, sqn):
                if start < at:
                    yield self.batch.slice(start, at - start)
                start = at + records
            at += records
        if start < at:
            yield self.batch if not start else self.batch.slice(start)


def decode_block(stored: bytes, entry: BlockEntry, base_sqn: SequenceNumber, where: str) -> Block:
    """Check, decompress and parse one block. Any thread.

    Nothing is allocated beyond what the entry declares, and the entry was checked against the format's limits.

    Args:
        stored: The block's bytes as they lie in the segment.
        entry: What the footer says of it.
        base_sqn: First sequence number of the log's entry in the index.
        where: Names the object in errors.

    Raises:
        CorruptData: The bytes are not what was written.
    """
    if len(stored) != entry.length or google_crc32c.value(stored) != entry.checksum:
        raise CorruptData(
            f"{where}: the block at byte {entry.offset} is damaged (CRC-32C or length); restore it from a replica"
        )
    try:
        raw = stored
        if entry.codec != CODEC_STORED:
            raw = decompress(stored, entry.raw_length, max_size=MAX_BLOCK_BYTES)
        return _parse(pa.py_buffer(raw), entry, base_sqn)
    except (struct.error, ValueError, IndexError, OverflowError, pa.ArrowException) as error:
        raise CorruptData(f"{where}: the block at byte {entry.offset} contradicts itself: {error}") from None


def _parse(raw: pa.Buffer, entry: BlockEntry, base_sqn: SequenceNumber) -> Block:
    (num_runs,) = _NUM_RUNS.unpack_from(raw)
    at = _NUM_RUNS.size
    if num_runs > entry.records:
        raise ValueError(f"{num_runs} runs of {entry.records} changes")
    runs = np.frombuffer(raw, RUN, num_runs, at)
    at += runs.nbytes
    _check_runs(runs, entry, base_sqn)
    records = entry.records
    columns = [array_of(np.repeat(runs["key_group"], runs["records"]))]
    for width in (np.dtype("<u2"), np.dtype("<u1")):
        column, at = _numbers(raw, at, width, records)
        columns.append(column)
    ops = np.asarray(columns[2])
    is_meta = entry.first_key_group == META_KEY_GROUP
    if ops.max() > OP_META or bool((ops == OP_META).any()) != is_meta or (is_meta and ops.min() != OP_META):
        raise ValueError("unknown kinds of changes")
    for _ in range(3):
        column, at = _binaries(raw, at, records)
        columns.append(column)
    if at != raw.size:
        raise ValueError(f"{raw.size - at} bytes are left over")
    spans = tuple((group, base_sqn + delta, count) for group, delta, count in runs.tolist())
    return Block(pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA), spans)


def _check_runs(runs: npt.NDArray[np.void], entry: BlockEntry, base_sqn: SequenceNumber) -> None:
    groups, deltas, counts = runs["key_group"], runs["sqn_delta"].astype(np.int64), runs["records"]
    if not len(runs) or int(counts.min()) == 0 or int(counts.sum(dtype=np.uint64)) != entry.records:
        raise ValueError("runs do not sum up to the changes")
    order = groups.astype(np.int64) << 32 | deltas
    if not bool((order[1:] > order[:-1]).all()):
        raise ValueError("runs are out of order")
    found = SequenceNumberRange(base_sqn + int(deltas.min()), base_sqn + int(deltas.max()) + 1)
    if (int(groups[0]), int(groups[-1]), found) != (entry.first_key_group, entry.last_key_group, entry.sqns):
        raise ValueError("runs are not those of the index")


def _numbers(raw: pa.Buffer, at: int, dtype: np.dtype[np.uint8 | np.uint16], records: int) -> tuple[pa.Array, int]:
    encoding = raw[at]
    at += 1
    if encoding == _CONSTANT:
        return array_of(np.repeat(np.frombuffer(raw, dtype, 1, at), records)), at + dtype.itemsize
    if encoding != _PLAIN:
        raise ValueError(f"encoding {encoding} of numbers")
    values = np.frombuffer(raw, dtype, records, at)
    return array_of(values if dtype.itemsize == 1 else values.copy()), at + values.nbytes


def _binaries(raw: pa.Buffer, at: int, records: int) -> tuple[pa.Array, int]:
    encoding, second = raw[at : at + 2].to_pybytes()
    offsets: npt.NDArray[np.int32]
    if encoding == _FIXED:
        _, width = _WIDTH.unpack_from(raw, at)
        at += _WIDTH.size
        size = width * records
        if size > raw.size - at:
            raise ValueError(f"{size} bytes of values where {raw.size - at} are left")
        offsets = np.arange(0, size + 1, width, dtype=np.int32) if width else np.zeros(records + 1, np.int32)
    elif encoding == _VARIABLE and second in _LENGTHS:
        at += 2
        lengths = np.frombuffer(raw, _LENGTHS[second], records, at)
        at += lengths.nbytes
        size = int(lengths.sum(dtype=np.uint64))
        if size > raw.size - at:
            raise ValueError(f"{size} bytes of values where {raw.size - at} are left")
        offsets = np.zeros(records + 1, np.int32)
        np.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    else:
        raise ValueError(f"encoding {encoding} of values")
    values = pa.Array.from_buffers(
        pa.binary(), records, [None, pa.py_buffer(offsets), raw.slice(at, size)], null_count=0
    )
    return values, at + size
