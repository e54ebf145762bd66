"""One key group of a table snapshot as bytes: the canonical base file, the same for every kind of table.

Used for heap materializations and for savepoints, so a base of one table kind restores into another. Equal content is
equal bytes (for one compression level and zstd version). All integers are little-endian::

    file    = header block* trailer
    header  = "DSTLBASE" | format version u16 | flags u16 = 0 | key group u32 | crc u32
    block   = rows u32 > 0 | raw size u32 | stored size u32 | stored bytes | crc u32
    trailer = 0 u32 | blocks u32 | rows u64 | raw size u64 | crc u32
    stored bytes = one zstd frame that states its content size, of
    raw     = state u16 * rows | key length u32 * rows | user key length u32 * rows | value length u32 * rows
              | keys | user keys | values

Rows are ordered by state, key, user key, across blocks too. Each crc is the CRC-32C of all bytes of the file before it,
the other crc fields left out: so blocks cannot be lost, doubled or moved. A decoder checks the whole file before it
yields the first row, and every size before it allocates.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import MAX_CHANGE_BYTES, value_offsets
from dstl.errors import CorruptData, Invalid
from dstl.store.zstd_frame import decompress_array
from handles.key_group import KeyGroup
from materializer.tables.base import ENTRY_SCHEMA, PAGE_ROWS, Expired, TableSnapshot

MAGIC = b"DSTLBASE"
FORMAT_VERSION = 1  # nothing has changed since the first

_FIXED_ROW_BYTES = 14  # two bytes of the state, and three lengths
MAX_BLOCK_BYTES = MAX_CHANGE_BYTES + _FIXED_ROW_BYTES * PAGE_ROWS
"""Most raw bytes of one block, so the most that a decoder allocates at once: one largest change fits."""

_HEADER = struct.Struct("<8sHHI")
_BLOCK = struct.Struct("<III")
_TRAILER = struct.Struct("<IIQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class KeyGroupFile:
    """The contents of a base file.

    Attributes:
        key_group: The key group.
        rows: Number of entries.
        blocks: Number of blocks.
        raw_bytes: Bytes before compression.
        data: The file.
        expired: Entries that were left out because their time to live had passed; known when encoding only.
    """

    key_group: KeyGroup
    rows: int
    blocks: int
    raw_bytes: int
    data: bytes
    expired: int = 0

    @property
    def checksum(self) -> int:
        """CRC-32C of the whole file."""
        return int(google_crc32c.value(self.data))


@dataclass(frozen=True, slots=True)
class _Block:
    rows: int
    raw_size: int
    stored: memoryview


def encode_key_group(
    snapshot: TableSnapshot, key_group: KeyGroup, *, expired: Expired | None = None, compression_level: int = 1
) -> KeyGroupFile:
    """Return one key group of a snapshot as a base file.

    May run in any thread that owns the snapshot's reading; holds the interpreter's lock for a page at a time only.
    Memory: the compressed file and one page.

    Args:
        snapshot: The moment to write.
        key_group: Which of its key groups; one that has no entries gives a file without blocks.
        expired: Tests by state id; entries whose value has expired are left out.
        compression_level: zstd level. 1 is within 2 % of level 3 at twice its speed.

    Raises:
        Invalid: An entry is larger than any change may be.
    """
    file, pieces = encode_in_pieces(snapshot, key_group, expired=expired, compression_level=compression_level)
    return replace(file, data=b"".join(pieces))


def encode_in_pieces(
    snapshot: TableSnapshot, key_group: KeyGroup, *, expired: Expired | None = None, compression_level: int = 1
) -> tuple[KeyGroupFile, list[bytes]]:
    """Return what :func:`encode_key_group` does, without its data, and the data in pieces of a page each.

    To put large pieces together holds the interpreter's lock for milliseconds, which a batch would notice.
    """
    compressor = zstandard.ZstdCompressor(level=compression_level, write_content_size=True)
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, 0, key_group)
    crc = google_crc32c.value(header)
    out = [header, _CRC.pack(crc)]
    blocks = rows = raw_bytes = dropped = 0
    for page in snapshot.entries(key_group):
        kept = page if not expired else _without_expired(page, expired)
        dropped += page.num_rows - kept.num_rows
        if not kept.num_rows:
            continue
        raw = _raw_block(kept)
        if len(raw) > MAX_BLOCK_BYTES:
            raise Invalid(f"an entry of key group {key_group} is larger than {MAX_CHANGE_BYTES} bytes: split the value")
        stored = compressor.compress(raw)
        head = _BLOCK.pack(kept.num_rows, len(raw), len(stored))
        crc = google_crc32c.extend(google_crc32c.extend(crc, head), stored)
        out += (head, stored, _CRC.pack(crc))
        blocks, rows, raw_bytes = blocks + 1, rows + kept.num_rows, raw_bytes + len(raw)
    trailer = _TRAILER.pack(0, blocks, rows, raw_bytes)
    out += (trailer, _CRC.pack(google_crc32c.extend(crc, trailer)))
    return KeyGroupFile(key_group, rows, blocks, raw_bytes, b"", dropped), out


def decode_key_group(
    data: bytes | memoryview, key_group: KeyGroup, *, name: str = "a base file"
) -> Iterator[pa.RecordBatch]:
    """Check a base file whole and return its pages of :data:`~materializer.tables.base.ENTRY_SCHEMA`.

    Each has memory of its own, which may be written.

    Args:
        data: The file, without anything before or behind it.
        key_group: The key group that it must hold.
        name: Object name, for messages.

    Raises:
        CorruptData: Any byte is not what was written, the file is cut or of another key group.
        Invalid: The file was written by a newer version.
    """
    return open_key_group(data, key_group, name=name)[1]


def open_key_group(
    data: bytes | memoryview, key_group: KeyGroup, *, name: str = "a base file"
) -> tuple[int, Iterator[pa.RecordBatch]]:
    """Return what :func:`decode_key_group` does, behind the bytes that all pages together take when decoded.

    Nothing is decoded yet; the errors are the same.
    """
    info, blocks = _check_file(data, name)
    if info.key_group != key_group:
        raise CorruptData(f"{name} holds key group {info.key_group}, not {key_group}: restore from an older base")
    return info.raw_bytes, _pages(blocks, name)


def _without_expired(page: pa.RecordBatch, expired: Expired) -> pa.RecordBatch:
    states = page.column("state").to_numpy()
    keep = np.ones(page.num_rows, np.bool_)
    for state, is_expired in expired.items():
        at = np.flatnonzero(states == state)
        if len(at):
            values = page.column("value").take(pa.array(at)).to_pylist()
            keep[at] = [not is_expired(value) for value in values]
    return page if keep.all() else page.filter(pa.array(keep))


def _raw_block(page: pa.RecordBatch) -> bytes:
    lengths: list[bytes] = []
    payloads: list[bytes | memoryview] = []
    for column in page.columns[1:]:
        offsets, payload = value_offsets(column), column.buffers()[2]
        lengths.append(np.diff(offsets).astype("<u4").tobytes())
        payloads.append(b"" if payload is None else memoryview(payload)[int(offsets[0]) : int(offsets[-1])])
    return b"".join([page.column(0).to_numpy().astype("<u2").tobytes(), *lengths, *payloads])


def _check_file(data: bytes | memoryview, name: str) -> tuple[KeyGroupFile, list[_Block]]:
    view = memoryview(data)

    def corrupt(what: str, at: int) -> NoReturn:
        raise CorruptData(f"{name} is damaged: {what} at byte {at} of {len(view)}; restore from an older base")

    if len(view) < _HEADER.size + _CRC.size + _TRAILER.size + _CRC.size:
        corrupt("too short", 0)
    magic, version, flags, key_group = _HEADER.unpack_from(view)
    # The library takes no memoryview, and a copy costs more than the checksum.
    whole = np.frombuffer(view, np.uint8)
    crc = google_crc32c.extend(0, whole[: _HEADER.size])
    if magic != MAGIC or crc != _CRC.unpack_from(view, _HEADER.size)[0]:
        corrupt("not its header", 0)
    if version != FORMAT_VERSION or flags:
        raise Invalid(f"{name} is of format version {version}.{flags}, newer than {FORMAT_VERSION}: upgrade DSTL")
    at = _HEADER.size + _CRC.size
    blocks: list[_Block] = []
    rows = raw_bytes = 0
    while at + _BLOCK.size <= len(view):
        count, raw_size, stored_size = _BLOCK.unpack_from(view, at)
        if not count:
            break
        end = at + _BLOCK.size + stored_size
        if end + _CRC.size > len(view):
            corrupt("a block is cut", at)
        crc = google_crc32c.extend(crc, whole[at:end])
        if crc != _CRC.unpack_from(view, end)[0]:
            corrupt("a block fails its checksum", at)
        if not _FIXED_ROW_BYTES * count <= raw_size <= MAX_BLOCK_BYTES:
            corrupt(f"a block of {count} rows claims {raw_size} bytes", at)
        blocks.append(_Block(count, raw_size, view[at + _BLOCK.size : end]))
        rows, raw_bytes, at = rows + count, raw_bytes + raw_size, end + _CRC.size
    end = at + _TRAILER.size
    if end + _CRC.size != len(view):
        corrupt("the file is cut, or followed by something", at)
    crc = google_crc32c.extend(crc, whole[at:end])
    if crc != _CRC.unpack_from(view, end)[0] or _TRAILER.unpack_from(view, at) != (0, len(blocks), rows, raw_bytes):
        corrupt("not its trailer", at)
    return KeyGroupFile(key_group, rows, len(blocks), raw_bytes, b""), blocks


def _pages(blocks: list[_Block], name: str) -> Iterator[pa.RecordBatch]:
    for block in blocks:
        try:
            raw = decompress_array(block.stored, block.raw_size, max_size=MAX_BLOCK_BYTES)
        except ValueError as error:
            raise CorruptData(f"{name} is damaged: {error}; restore from an older base") from error
        yield _page(raw, block.rows, name)


def _page(raw: npt.NDArray[np.uint8], rows: int, name: str) -> pa.RecordBatch:
    lengths = np.frombuffer(raw, "<u4", 3 * rows, 2 * rows).reshape(3, rows)
    ends = np.zeros((3, rows + 1), np.int64)
    np.cumsum(lengths, axis=1, out=ends[:, 1:])
    start = _FIXED_ROW_BYTES * rows
    if start + int(ends[:, -1].sum()) != len(raw):
        raise CorruptData(f"{name} is damaged: lengths do not add up; restore from an older base")
    columns: list[pa.Array] = [pa.array(np.frombuffer(raw, "<u2", rows))]
    for offsets in ends:
        size = int(offsets[-1])
        columns.append(_binary(offsets.astype(np.int32), pa.py_buffer(raw[start : start + size])))
        start += size
    return pa.RecordBatch.from_arrays(columns, schema=ENTRY_SCHEMA)


def _binary(offsets: npt.NDArray[np.int32], payload: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), payload])
