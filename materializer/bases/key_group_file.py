"""One key group of a table snapshot as bytes: the canonical base file, the same for every kind of table.

Used for heap materializations and for savepoints, so a base of one table kind restores into another. Equal content is
equal bytes (for one compression level and zstd version). All integers are little-endian::

    file    = "DSTLBASE" block* index trailer
    block   = head values, each one zstd frame that states its content size
    head    = state u16 * rows | key length u32 * rows | user key length u32 * rows | value length u32 * rows
              | keys | user keys
    index   = one zstd frame that states its content size, of
    entries = rows u32 * blocks | key bytes u32 * blocks | user key bytes u32 * blocks | value bytes u32 * blocks
              | stored size of head u32 * blocks | stored size of values u32 * blocks | crc u32 * blocks
              | state u16 * blocks | length of key u32 * blocks | keys
    trailer = key group u32 | blocks u32 | rows u64 | raw size u64 | index raw size u32 | index stored size u32
              | format version u16 | flags u16 = 0 | crc u32 | "ESABLTSD"

Rows are ordered by state, key, user key, across blocks too. Values have a frame of their own, so that those of many
blocks are unpacked into one array. A block's crc is the CRC-32C of its stored bytes, the trailer's that of index and
trailer up to it. State and key of an index entry are a *bound*: no row of its block is below
them, and none of the block before is above. So who has the index finds a key's blocks, and reads and checks them alone;
who has the whole file checks all of it before the first row is given out. Every size is checked before it allocates.
"""

from __future__ import annotations

import itertools
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import MAX_CHANGE_BYTES, value_offsets
from dstl.errors import CorruptData, Invalid
from dstl.store.zstd_frame import decompress, decompress_into
from handles.key_group import KeyGroup
from materializer.tables.base import ENTRY_SCHEMA, PAGE_ROWS, Expired, TableSnapshot

MAGIC = b"DSTLBASE"
END_MAGIC = MAGIC[::-1]
FORMAT_VERSION = 1  # nothing has been released since the first

BLOCK_BYTES = 256 << 10
"""Raw bytes of a block, unless one row alone has more: what a lookup reads and unpacks for a key. Smaller ones make a
load slower, by 10 us each; larger ones a lookup (``dstl/docs/decisions/serve-while-restoring.md``)."""

LOAD_PAGE_BYTES = 16 << 20
"""Raw bytes of the pages that a load gets: a heap keeps a page's values where they are, and copies those of further
pages behind them."""

_FIXED_ROW_BYTES = 14  # two bytes of the state, and three lengths
MAX_BLOCK_BYTES = MAX_CHANGE_BYTES + _FIXED_ROW_BYTES * PAGE_ROWS
"""Most raw bytes of one block, so the most that a decoder allocates at once: one largest change fits."""

MAX_INDEX_BYTES = 256 << 20  # above every index; a forged size must not be believed

_NUMBERS = 7  # of a block: see the module
_FIXED_ENTRY_BYTES = 4 * _NUMBERS + 6  # and the state, and a length
_TRAILER = struct.Struct("<IIQQIIHHI8s")
_CRC_AT = _TRAILER.size - 12
_TAIL_BYTES, _TAIL_SHARE = 4 << 10, 1 << 7
"""An index has mostly less than a 128th of the file and these bytes: what is read to have it with one request."""

Bound = tuple[int, bytes]
"""State and key."""


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


class _Block(NamedTuple):
    """An entry of an index: see the module."""

    rows: int
    keys: int
    user_keys: int
    values: int
    stored_head: int
    stored_values: int
    crc: int

    @property
    def head(self) -> int:
        return _FIXED_ROW_BYTES * self.rows + self.keys + self.user_keys


@dataclass(frozen=True, slots=True)
class KeyGroupIndex:
    """The index of a base file, checked against itself and its own checksum.

    Attributes:
        name: Of the object, for messages.
        blocks: The blocks.
        bounds: Of each block, ascending.
        starts: Where each block begins in the file, and where the last one ends.
        raw_sizes: Bytes of each block before compression.
    """

    name: str
    blocks: list[_Block]
    bounds: list[Bound]
    starts: list[int]
    raw_sizes: list[int]

    def blocks_of(self, state: int, key: bytes) -> range:
        """Return the blocks that may have entries of a key."""
        return range(max(0, bisect_left(self.bounds, (state, key)) - 1), bisect_right(self.bounds, (state, key)))

    def blocks_of_state(self, state: int) -> range:
        """Return the blocks that may have entries of a state."""
        return range(max(0, bisect_left(self.bounds, (state, b"")) - 1), bisect_left(self.bounds, (state + 1, b"")))

    def check(self, blocks: range, stored: memoryview) -> None:
        """Compare the stored bytes of neighbouring blocks with their checksums.

        Raises:
            CorruptData: They are not what was written.
        """
        # The library takes no memoryview, and a copy costs more than the checksum.
        whole = np.frombuffer(stored, np.uint8)
        first = self.starts[blocks.start]
        for at in blocks:
            part = whole[self.starts[at] - first : self.starts[at + 1] - first]
            if google_crc32c.extend(0, part) != self.blocks[at].crc:
                raise _damaged(self.name, f"block {at} of {len(self.blocks)} fails its checksum")

    def page(self, blocks: range, stored: memoryview) -> pa.RecordBatch:
        """Return the rows of neighbouring blocks as one page with memory of its own, which may be written.

        Args:
            blocks: Which; they have been checked.
            stored: Their bytes, back to back.

        Raises:
            CorruptData: They are not what they claim to be.
        """
        entries = self.blocks[blocks.start : blocks.stop]
        heads: list[bytes] = []
        values = np.empty(sum(block.values for block in entries), np.uint8)
        at = filled = 0
        try:
            for block in entries:
                end = at + block.stored_head
                heads.append(decompress(stored[at:end], block.head, max_size=MAX_BLOCK_BYTES))
                at = end + block.stored_values
                if block.values:
                    decompress_into(stored[end:at], values[filled : filled + block.values])
                    filled += block.values
        except ValueError as error:
            raise _damaged(self.name, str(error)) from error
        return _page(entries, heads, values, self.name)

    def pages(self, data: memoryview) -> Iterator[pa.RecordBatch]:
        """Yield all rows of a whole file that has been checked, in pages of some megabytes."""
        start, size, rows = 0, 0, 0
        for at, (block, raw) in enumerate(zip(self.blocks, self.raw_sizes, strict=True)):
            if at > start and (size + raw > LOAD_PAGE_BYTES or rows + block.rows > PAGE_ROWS):
                yield self.page(range(start, at), data[self.starts[start] : self.starts[at]])
                start, size, rows = at, 0, 0
            size, rows = size + raw, rows + block.rows
        if start < len(self.blocks):
            yield self.page(range(start, len(self.blocks)), data[self.starts[start] : self.starts[-1]])


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
    """Return what :func:`encode_key_group` does, without its data, and the data in pieces of a block each.

    To put large pieces together holds the interpreter's lock for milliseconds, which a batch would notice.
    """
    compressor = zstandard.ZstdCompressor(level=compression_level, write_content_size=True)
    out = [MAGIC]
    entries: list[_Block] = []
    bounds: list[Bound] = []
    last: Bound | None = None
    rows = raw_bytes = dropped = 0
    for page in snapshot.entries(key_group):
        kept = page if not expired else _without_expired(page, expired)
        dropped += page.num_rows - kept.num_rows
        for block in _cut(kept):
            entry, stored = _encode(block, compressor)
            size = entry.head + entry.values
            if size > MAX_BLOCK_BYTES:
                raise Invalid(
                    f"an entry of key group {key_group} is larger than {MAX_CHANGE_BYTES} bytes: split the value"
                )
            entries.append(entry)
            bounds.append(_bound(last, _bound_at(block, 0)))
            last = _bound_at(block, -1)
            out += stored
            rows, raw_bytes = rows + entry.rows, raw_bytes + size
    raw_index = _raw_index(entries, bounds)
    if len(raw_index) > MAX_INDEX_BYTES:
        raise Invalid(f"the keys of key group {key_group} are too long for an index of a base: use shorter keys")
    index = compressor.compress(raw_index)
    fields = (key_group, len(entries), rows, raw_bytes, len(raw_index), len(index), FORMAT_VERSION, 0)
    crc = google_crc32c.extend(google_crc32c.value(index), _TRAILER.pack(*fields, 0, b"")[:_CRC_AT])
    out += (index, _TRAILER.pack(*fields, crc, END_MAGIC))
    return KeyGroupFile(key_group, rows, len(entries), raw_bytes, b"", dropped), out


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
    view = memoryview(data)
    index = read_index(view, len(view), key_group, name=name)
    assert isinstance(index, KeyGroupIndex)
    if view[: len(MAGIC)] != MAGIC:
        raise _damaged(name, "it does not begin as a base does")
    index.check(range(len(index.blocks)), view[index.starts[0] : index.starts[-1]])
    return sum(index.raw_sizes), index.pages(view)


def tail_bytes(length: int) -> int:
    """Return how many bytes of a file's end to read to have its index, mostly."""
    return min(length, _TAIL_BYTES + length // _TAIL_SHARE)


def read_index(tail: bytes | memoryview, length: int, key_group: KeyGroup, *, name: str) -> KeyGroupIndex | int:
    """Return the index of a base file, or how many bytes of its end have it, where ``tail`` has fewer.

    Args:
        tail: The end of the file.
        length: Of the whole file.
        key_group: The key group that it must hold.
        name: Object name, for messages.

    Raises:
        CorruptData: Index or trailer are not what was written, or of a file of another length or key group.
        Invalid: The file was written by a newer version.
    """
    view = memoryview(tail)
    if length < len(MAGIC) + _TRAILER.size or len(view) < _TRAILER.size:
        raise _damaged(name, f"{length} bytes are too few")
    trailer = view[-_TRAILER.size :]
    of_group, blocks, rows, raw_bytes, raw_size, stored_size, version, flags, crc, end = _TRAILER.unpack(trailer)
    if end != END_MAGIC:
        raise _damaged(name, "it does not end as a base does")
    needed = stored_size + _TRAILER.size
    if needed + len(MAGIC) > length:
        raise _damaged(name, f"an index of {stored_size} bytes in {length}")
    if needed > len(view):
        return int(needed)
    stored = view[len(view) - needed : len(view) - _TRAILER.size]
    # The library takes no memoryview, and a copy costs more than the checksum.
    if google_crc32c.extend(google_crc32c.extend(0, np.frombuffer(stored, np.uint8)), bytes(trailer[:_CRC_AT])) != crc:
        raise _damaged(name, "its index fails its checksum")
    if version != FORMAT_VERSION or flags:
        raise Invalid(f"{name} is of format version {version}.{flags}, newer than {FORMAT_VERSION}: upgrade DSTL")
    if of_group != key_group:
        raise CorruptData(f"{name} holds key group {of_group}, not {key_group}: restore from an older base")
    try:
        raw = decompress(stored, raw_size, max_size=MAX_INDEX_BYTES)
    except ValueError as error:
        raise _damaged(name, f"its index, {error}") from error
    index = _parse_index(raw, blocks, name)
    counted = sum(block.rows for block in index.blocks), sum(index.raw_sizes), index.starts[-1]
    if counted != (rows, raw_bytes, length - needed):
        raise _damaged(name, "its index does not describe it")
    return index


def _damaged(name: str, why: str) -> CorruptData:
    return CorruptData(f"{name} is damaged: {why}; restore from an older base")


def _without_expired(page: pa.RecordBatch, expired: Expired) -> pa.RecordBatch:
    states = page.column("state").to_numpy()
    keep = np.ones(page.num_rows, np.bool_)
    for state, is_expired in expired.items():
        at = np.flatnonzero(states == state)
        if len(at):
            values = page.column("value").take(pa.array(at)).to_pylist()
            keep[at] = [not is_expired(value) for value in values]
    return page if keep.all() else page.filter(pa.array(keep))


def _cut(page: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a page in blocks."""
    sizes = np.full(page.num_rows, _FIXED_ROW_BYTES, np.int64)
    for column in page.columns[1:]:
        sizes += np.diff(value_offsets(column))
    ends = np.cumsum(sizes)
    start = 0
    while start < page.num_rows:
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + BLOCK_BYTES, side="right")))
        yield page.slice(start, stop - start)
        start = stop


def _bound_at(block: pa.RecordBatch, row: int) -> Bound:
    return block.column(0)[row].as_py(), block.column(1)[row].as_py()


def _bound(last: Bound | None, first: Bound) -> Bound:
    """Return the shortest bound between the last row of a block and the first of the next."""
    if last is None or last[0] != first[0]:
        return first[0], b""
    common = next(
        (at for at, pair in enumerate(zip(last[1], first[1], strict=False)) if pair[0] != pair[1]), len(last[1])
    )
    return first[0], first[1][: common + 1]


def _encode(block: pa.RecordBatch, compressor: zstandard.ZstdCompressor) -> tuple[_Block, list[bytes]]:
    lengths: list[bytes] = []
    payloads: list[bytes | memoryview] = []
    for column in block.columns[1:]:
        offsets, payload = value_offsets(column), column.buffers()[2]
        lengths.append(np.diff(offsets).astype("<u4").tobytes())
        payloads.append(b"" if payload is None else memoryview(payload)[int(offsets[0]) : int(offsets[-1])])
    keys, user_keys, values = payloads
    head = compressor.compress(
        b"".join((block.column(0).to_numpy().astype("<u2").tobytes(), *lengths, keys, user_keys))
    )
    stored = compressor.compress(values) if len(values) else b""
    crc = google_crc32c.extend(google_crc32c.value(head), stored)
    sizes = len(keys), len(user_keys), len(values)
    return _Block(block.num_rows, *sizes, len(head), len(stored), crc), [head, stored]


def _raw_index(entries: list[_Block], bounds: list[Bound]) -> bytes:
    keys = [key for _, key in bounds]
    return b"".join(
        (
            np.array(entries, "<u4").reshape(len(entries), _NUMBERS).T.tobytes(),
            np.array([state for state, _ in bounds], "<u2").tobytes(),
            np.array(list(map(len, keys)), "<u4").tobytes(),
            *keys,
        )
    )


def _parse_index(raw: bytes, blocks: int, name: str) -> KeyGroupIndex:
    fixed = _FIXED_ENTRY_BYTES * blocks
    if fixed > len(raw):
        raise _damaged(name, f"{blocks} blocks in an index of {len(raw)} bytes")
    numbers = np.frombuffer(raw, "<u4", _NUMBERS * blocks).reshape(_NUMBERS, blocks)
    states = np.frombuffer(raw, "<u2", blocks, 4 * _NUMBERS * blocks).tolist()
    lengths = np.frombuffer(raw, "<u4", blocks, (4 * _NUMBERS + 2) * blocks)
    ends = (np.cumsum(lengths, dtype=np.int64) + fixed).tolist()
    if (ends[-1] if ends else fixed) != len(raw):
        raise _damaged(name, "the keys of its index do not add up")
    keys = [raw[start:stop] for start, stop in zip([fixed, *ends], ends, strict=False)]
    bounds = list(zip(states, keys, strict=True))
    if any(above < below for below, above in itertools.pairwise(bounds)):
        raise _damaged(name, "its index is not in order")
    rows, _, _, values, _, stored_values, _ = numbers
    raws = numbers[:4].sum(axis=0, dtype=np.int64) + (_FIXED_ROW_BYTES - 1) * rows.astype(np.int64)
    if (rows == 0).any() or (raws > MAX_BLOCK_BYTES).any() or ((values == 0) != (stored_values == 0)).any():
        raise _damaged(name, f"its blocks claim {rows.tolist()[:9]} rows and {raws.tolist()[:9]} bytes")
    stored = numbers[4:6].sum(axis=0, dtype=np.int64)
    starts = np.cumsum([len(MAGIC), *stored.tolist()]).tolist()
    return KeyGroupIndex(name, list(map(_Block._make, numbers.T.tolist())), bounds, starts, raws.tolist())


def _page(entries: list[_Block], heads: list[bytes], values: npt.NDArray[np.uint8], name: str) -> pa.RecordBatch:
    """Return the rows of some blocks as one page: column by column, those of a block behind those of the one before."""
    columns: tuple[list[bytes], ...] = ([], [], [], [], [], [])
    for entry, head in zip(entries, heads, strict=True):
        rows, keys, *_ = entry
        ends = (0, 2 * rows, 6 * rows, 10 * rows, 14 * rows, 14 * rows + keys, len(head))
        for column, start, stop in zip(columns, ends, ends[1:], strict=False):
            column.append(head[start:stop])
    states, *lengths, keys_, user_keys = map(b"".join, columns)
    row_ends = np.cumsum([entry.rows for entry in entries])
    sizes = np.array(entries)[:, 1:4].cumsum(axis=0)
    arrays: list[pa.Array] = [pa.array(np.frombuffer(states, "<u2"))]
    for at, payload in enumerate((keys_, user_keys, values)):
        offsets = np.zeros(int(row_ends[-1]) + 1, np.int64)
        np.cumsum(np.frombuffer(lengths[at], "<u4"), out=offsets[1:])
        if (offsets[row_ends] != sizes[:, at]).any():
            raise _damaged(name, "lengths do not add up")
        arrays.append(_binary(offsets.astype(np.int32), pa.py_buffer(payload)))
    return pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA)


def _binary(offsets: npt.NDArray[np.int32], payload: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), payload])
