"""The index of a base file: where its blocks are and which keys they may have, read from the file's end.

Its bytes are given in :mod:`materializer.bases.key_group_file`.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import google_crc32c
import numpy as np
import pyarrow as pa
import zstandard

from dstl.errors import CorruptData, Invalid
from dstl.store.zstd_frame import decompress
from handles.key_group import KeyGroup
from materializer.bases.key_group_block import (
    FIXED_ROW_BYTES,
    MAX_BLOCK_BYTES,
    KeyGroupBlock,
    StateKey,
    damaged,
    decode_blocks,
    inner_frames,
)
from materializer.tables.base import PAGE_ROWS

MAGIC = b"DSTLBASE"
END_MAGIC = MAGIC[::-1]
FORMAT_VERSION = 1  # nothing has been released since the first

LOAD_PAGE_BYTES = 16 << 20
"""Raw bytes of the pages that a load gets: a heap keeps a page's values where they are, and copies those of further
pages behind them."""

MAX_INDEX_BYTES = 256 << 20  # above every index; a forged size must not be believed

_NUMBERS = len(KeyGroupBlock._fields)
_FIXED_ENTRY_BYTES = 4 * _NUMBERS + 6  # and the state, and a length
_TRAILER = struct.Struct("<IIQQIIHHI8s")
_CRC_AT = _TRAILER.size - 12
_TAIL_BYTES, _TAIL_SHARE = 4 << 10, 1 << 7
"""An index has mostly less than a 128th of the file and these bytes: what is read to have it with one request."""


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
    blocks: list[KeyGroupBlock]
    bounds: list[StateKey]
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
                raise damaged(self.name, f"block {at} of {len(self.blocks)} fails its checksum")

    def page(self, blocks: range, stored: memoryview) -> pa.RecordBatch:
        """Return the rows of neighbouring blocks, which have been checked; see :func:`decode_blocks`."""
        return decode_blocks(self.blocks[blocks.start : blocks.stop], stored, self.name)

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


def encode_index(
    key_group: KeyGroup,
    entries: Sequence[KeyGroupBlock],
    bounds: Sequence[StateKey],
    compressor: zstandard.ZstdCompressor,
) -> tuple[bytes, bytes]:
    """Return index and trailer of a file.

    Raises:
        Invalid: Keys are too long for an index.
    """
    raw = raw_index(entries, bounds)
    if len(raw) > MAX_INDEX_BYTES:
        raise Invalid(f"the keys of key group {key_group} are too long for an index of a base: use shorter keys")
    totals = sum(block.rows for block in entries), sum(block.head + block.values for block in entries)
    return seal_index(compressor.compress(raw), key_group, len(entries), *totals, len(raw))


def raw_index(entries: Sequence[KeyGroupBlock], bounds: Sequence[StateKey]) -> bytes:
    """Return an index before compression."""
    keys = [key for _, key in bounds]
    return b"".join(
        (
            np.array(entries, "<u4").reshape(len(entries), _NUMBERS).T.tobytes(),
            np.array([state for state, _ in bounds], "<u2").tobytes(),
            np.array(list(map(len, keys)), "<u4").tobytes(),
            *keys,
        )
    )


def seal_index(index: bytes, *fields: int, version: int = FORMAT_VERSION) -> tuple[bytes, bytes]:
    """Return a stored index and its trailer: key group, blocks, rows, raw bytes, and the raw length of the index."""
    front = _TRAILER.pack(*fields, len(index), version, 0, 0, b"")[:_CRC_AT]
    crc = google_crc32c.extend(google_crc32c.value(index), front)
    return index, front + struct.pack("<I", crc) + END_MAGIC


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
        raise damaged(name, f"{length} bytes are too few")
    trailer = view[-_TRAILER.size :]
    of_group, blocks, rows, raw_bytes, raw_size, stored_size, version, flags, crc, end = _TRAILER.unpack(trailer)
    if end != END_MAGIC:
        raise damaged(name, "it does not end as a base does")
    needed = stored_size + _TRAILER.size
    if needed + len(MAGIC) > length:
        raise damaged(name, f"an index of {stored_size} bytes in {length}")
    if needed > len(view):
        return int(needed)
    stored = view[len(view) - needed : len(view) - _TRAILER.size]
    # The library takes no memoryview, and a copy costs more than the checksum.
    if google_crc32c.extend(google_crc32c.extend(0, np.frombuffer(stored, np.uint8)), bytes(trailer[:_CRC_AT])) != crc:
        raise damaged(name, "its index fails its checksum")
    if version != FORMAT_VERSION or flags:
        raise Invalid(f"{name} is of format version {version}.{flags}, newer than {FORMAT_VERSION}: upgrade DSTL")
    if of_group != key_group:
        raise CorruptData(f"{name} holds key group {of_group}, not {key_group}: restore from an older base")
    try:
        raw = decompress(stored, raw_size, max_size=MAX_INDEX_BYTES)
    except ValueError as error:
        raise damaged(name, f"its index, {error}") from error
    index = _parse_index(raw, blocks, name)
    counted = sum(block.rows for block in index.blocks), sum(index.raw_sizes), index.starts[-1]
    if counted != (rows, raw_bytes, length - needed):
        raise damaged(name, "its index does not describe it")
    return index


def _parse_index(raw: bytes, blocks: int, name: str) -> KeyGroupIndex:
    fixed = _FIXED_ENTRY_BYTES * blocks
    if fixed > len(raw):
        raise damaged(name, f"{blocks} blocks in an index of {len(raw)} bytes")
    numbers = np.frombuffer(raw, "<u4", _NUMBERS * blocks).reshape(_NUMBERS, blocks)
    states = np.frombuffer(raw, "<u2", blocks, 4 * _NUMBERS * blocks).tolist()
    lengths = np.frombuffer(raw, "<u4", blocks, (4 * _NUMBERS + 2) * blocks)
    ends = (np.cumsum(lengths, dtype=np.int64) + fixed).tolist()
    if (ends[-1] if ends else fixed) != len(raw):
        raise damaged(name, "the keys of its index do not add up")
    keys = [raw[start:stop] for start, stop in zip([fixed, *ends], ends, strict=False)]
    bounds = list(zip(states, keys, strict=True))
    if bounds != sorted(bounds):
        raise damaged(name, "its index is not in order")
    rows, _, _, values, _, stored_values, _ = numbers
    raws = numbers[:4].sum(axis=0, dtype=np.int64) + (FIXED_ROW_BYTES - 1) * rows.astype(np.int64)
    raws += 4 * inner_frames(values.astype(np.int64))
    if (rows == 0).any() or (raws > MAX_BLOCK_BYTES).any() or ((values == 0) != (stored_values == 0)).any():
        raise damaged(name, f"its blocks claim {rows.tolist()[:9]} rows and {raws.tolist()[:9]} bytes")
    stored = numbers[4:6].sum(axis=0, dtype=np.int64)
    starts = np.cumsum([len(MAGIC), *stored.tolist()]).tolist()
    # Not by _make: a base of gigabytes has many, and this takes a third of the time.
    made = list(map(partial(tuple.__new__, KeyGroupBlock), numbers.T.tolist()))
    return KeyGroupIndex(name, made, bounds, starts, raws.tolist())
