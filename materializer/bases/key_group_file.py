"""One key group of a table snapshot as bytes: the canonical base file, the same for every kind of table.

Used for heap materializations and for savepoints, so a base of one table kind restores into another. Equal content is
equal bytes (for one compression level and zstd version). All integers are little-endian::

    file    = "DSTLBASE" block* index trailer
    block   = head frame*: zstd frames that state their content size; a frame has 32 KiB of values, the last one fewer
    head    = state u16 * rows | key length u32 * rows | user key length u32 * rows | value length u32 * rows
              | stored size of each values frame but the last u32 * frames | keys | user keys
    index   = one zstd frame that states its content size, of
    entries = rows u32 * blocks | key bytes u32 * blocks | user key bytes u32 * blocks | value bytes u32 * blocks
              | stored size of head u32 * blocks | stored size of values u32 * blocks | crc u32 * blocks
              | state u16 * blocks | length of key u32 * blocks | keys
    trailer = key group u32 | blocks u32 | rows u64 | raw size u64 | index raw size u32 | index stored size u32
              | format version u16 | flags u16 = 0 | crc u32 | "ESABLTSD"

Rows are ordered by state, key, user key, across blocks too. Values have frames of their own, so that those of many
blocks are unpacked into one array, and those of one key without the others. A block's crc is the CRC-32C of its stored
bytes, the trailer's that of index and trailer up to it. State and key of an index entry are a *bound*: no row of its
block is below them, and none of the block before is above. So who has the index finds a key's blocks, and reads and
checks them alone; who has the whole file checks all of it before the first row is given out. Every size is checked
before it allocates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.column_buffers import lengths_of
from dstl.errors import Invalid
from handles.key_group import KeyGroup
from materializer.bases.key_group_block import (
    FIXED_ROW_BYTES,
    MAX_BLOCK_BYTES,
    KeyGroupBlock,
    StateKey,
    damaged,
    encode_block,
)
from materializer.bases.key_group_index import MAGIC, KeyGroupIndex, encode_index, read_index
from materializer.tables.base import Expired, TableSnapshot

BLOCK_BYTES = 256 << 10
"""Raw bytes of a block, unless one row alone has more: what a lookup reads for a key. Smaller ones make a load slower,
by 10 us each; larger ones a lookup (``dstl/docs/decisions/serve-while-restoring.md``)."""


@dataclass(frozen=True, slots=True)
class KeyGroupFile:
    """The contents of a base file.

    Attributes:
        rows: Number of entries.
        raw_bytes: Bytes before compression.
        pieces: The file in pieces of a block each: to put large ones together holds the interpreter's lock for
            milliseconds, which a batch would notice.
        expired: Entries that were left out because their time to live had passed.
    """

    rows: int
    raw_bytes: int
    pieces: list[bytes]
    expired: int

    @property
    def data(self) -> bytes:
        """The file."""
        return b"".join(self.pieces)


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
    compressor = zstandard.ZstdCompressor(level=compression_level, write_content_size=True)
    out = [MAGIC]
    entries: list[KeyGroupBlock] = []
    bounds: list[StateKey] = []
    last: StateKey | None = None
    rows = raw_bytes = dropped = 0
    for page in snapshot.entries(key_group):
        kept = page if not expired else _without_expired(page, expired)
        dropped += page.num_rows - kept.num_rows
        for block in _cut(kept):
            entry, stored = encode_block(block, compressor)
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
    out += encode_index(key_group, entries, bounds, compressor)
    return KeyGroupFile(rows, raw_bytes, out, dropped)


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
        raise damaged(name, "it does not begin as a base does")
    index.check(range(len(index.blocks)), view[index.starts[0] : index.starts[-1]])
    return sum(index.raw_sizes), index.pages(view)


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
    sizes = np.full(page.num_rows, FIXED_ROW_BYTES, np.int64)
    for column in page.columns[1:]:
        sizes += lengths_of(column)
    ends = np.cumsum(sizes)
    start = 0
    while start < page.num_rows:
        done = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + BLOCK_BYTES, side="right")))
        yield page.slice(start, stop - start)
        start = stop


def _bound_at(block: pa.RecordBatch, row: int) -> StateKey:
    return block.column(0)[row].as_py(), block.column(1)[row].as_py()


def _bound(last: StateKey | None, first: StateKey) -> StateKey:
    """Return the shortest bound between the last row of a block and the first of the next."""
    if last is None or last[0] != first[0]:
        return first[0], b""
    common = next(
        (at for at, pair in enumerate(zip(last[1], first[1], strict=False)) if pair[0] != pair[1]), len(last[1])
    )
    return first[0], first[1][: common + 1]
