"""A block of a base file: rows that lie side by side, read all at once or only those of some keys.

Its bytes are given in :mod:`materializer.bases.key_group_file`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.column_buffers import bytes_of, lengths_of
from dstl.errors import CorruptData
from dstl.store.zstd_frame import decompress, decompress_frames_into
from materializer.tables.base import ENTRY_SCHEMA, PAGE_ROWS

FRAME_BYTES = 32 << 10
"""Bytes of values in each frame of a block but the last: what a lookup unpacks for a value. A load unpacks them in one
call: of 256 KiB in 91 us instead of 82, a lookup in 10 (``dstl/docs/decisions/serve-while-restoring.md``)."""

FIXED_ROW_BYTES = 14  # two bytes of the state, and three lengths
MAX_BLOCK_BYTES = MAX_CHANGE_BYTES + 4 * (MAX_CHANGE_BYTES // FRAME_BYTES) + FIXED_ROW_BYTES * PAGE_ROWS
"""Most raw bytes of one block, so the most that a decoder allocates at once: one largest change fits."""

StateKey = tuple[int, bytes]
"""State and key."""

Row = tuple[int, bytes, bytes, bytes]
"""State, key, user key and value."""


def damaged(name: str, why: str) -> CorruptData:
    """Return the error of a base file that is not what was written."""
    return CorruptData(f"{name} is damaged: {why}; restore from an older base")


class KeyGroupBlock(NamedTuple):
    """A block's entry of an index: its rows, bytes before compression, stored bytes of both halves, and their crc."""

    rows: int
    keys: int
    user_keys: int
    values: int
    stored_head: int
    stored_values: int
    crc: int

    @property
    def frames(self) -> int:
        """Frames of values whose stored length the head has: all but the last."""
        return int(inner_frames(self.values))

    @property
    def head(self) -> int:
        """Bytes of the head before compression."""
        return FIXED_ROW_BYTES * self.rows + 4 * self.frames + self.keys + self.user_keys

    def find(self, stored: memoryview, asked: Iterable[StateKey], name: str) -> Iterator[Row]:
        """Yield the rows of some keys; only the values' own frames are unpacked.

        Args:
            stored: The block's bytes, which have been checked.
            asked: The keys.
            name: Of the object, for messages.

        Raises:
            CorruptData: They are not what they claim to be.
        """
        try:
            head = decompress(stored[: self.stored_head], self.head, max_size=MAX_BLOCK_BYTES)
            rows, fixed = self.rows, FIXED_ROW_BYTES * self.rows
            lengths = np.frombuffer(head, "<u4", 3 * rows, 2 * rows).reshape(3, rows)
            ends = np.zeros((3, rows + 1), np.int64)
            np.cumsum(lengths, axis=1, out=ends[:, 1:])
            if ends[:, -1].tolist() != [self.keys, self.user_keys, self.values]:
                raise ValueError("lengths do not add up")
            # Views give out one number at a fourth of an array's price.
            states = np.frombuffer(head, "<u2", rows).data
            keys, user_keys, values = (each.data for each in ends)
            first = fixed + 4 * self.frames
            user_first = first + self.keys
            frames = _Frames(stored[self.stored_head :], np.frombuffer(head, "<u4", self.frames, fixed), self.values)

            def state_key(row: int) -> StateKey:
                return states[row], head[first + keys[row] : first + keys[row + 1]]

            for each in asked:
                row = bisect_left(range(rows), each, key=state_key)
                while row < rows and state_key(row) == each:
                    user_key = head[user_first + user_keys[row] : user_first + user_keys[row + 1]]
                    yield *each, user_key, frames.read(values[row], values[row + 1])
                    row += 1
        except ValueError as error:
            raise damaged(name, str(error)) from error


class _Frames:
    """The values of a block, unpacked where they are read.

    Args:
        stored: Their frames.
        lengths: Stored bytes of each but the last.
        total: Bytes of all values.
    """

    def __init__(self, stored: memoryview, lengths: npt.NDArray[np.uint32], total: int) -> None:
        self._stored = stored
        self._lengths = lengths
        self._total = total
        self._starts: list[int] | None = None
        self._raw: dict[int, bytes] = {}

    def read(self, start: int, stop: int) -> bytes:
        """Return some bytes of values."""
        if start == stop:
            return b""
        first, last = start // FRAME_BYTES, (stop - 1) // FRAME_BYTES
        raw = self._frame(first) if first == last else b"".join(map(self._frame, range(first, last + 1)))
        return raw[start - first * FRAME_BYTES : stop - first * FRAME_BYTES]

    def _frame(self, at: int) -> bytes:
        if at not in self._raw:
            if self._starts is None:
                self._starts = [0, *np.cumsum(self._lengths, dtype=np.int64).tolist(), len(self._stored)]
                if len(self._lengths) and self._starts[-2] >= self._starts[-1]:
                    raise ValueError("lengths of frames do not add up")
            part = self._stored[self._starts[at] : self._starts[at + 1]]
            size = min(FRAME_BYTES, self._total - at * FRAME_BYTES)
            self._raw[at] = decompress(part, size, max_size=FRAME_BYTES)
        return self._raw[at]


def inner_frames(values: int | npt.NDArray[np.int64]) -> int | npt.NDArray[np.int64]:
    """Return how many frames so many bytes of values have beside the last."""
    return (values + FRAME_BYTES - 1) // FRAME_BYTES - (values > 0)


def encode_block(block: pa.RecordBatch, compressor: zstandard.ZstdCompressor) -> tuple[KeyGroupBlock, list[bytes]]:
    """Return rows as a block: its entry of an index, and its bytes in pieces."""
    lengths: list[bytes] = []
    payloads: list[memoryview] = []
    for column in block.columns[1:]:
        lengths.append(lengths_of(column).astype("<u4").tobytes())
        payloads.append(bytes_of(column).data)
    keys, user_keys, values = payloads
    frames = [compressor.compress(values[at : at + FRAME_BYTES]) for at in range(0, len(values), FRAME_BYTES)]
    stored = np.array([len(frame) for frame in frames[:-1]], "<u4").tobytes()
    states = block.column(0).to_numpy().astype("<u2").tobytes()
    head = compressor.compress(b"".join((states, *lengths, stored, keys, user_keys)))
    pieces = [head, *frames]
    crc = 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
    sizes = len(keys), len(user_keys), len(values)
    return KeyGroupBlock(block.num_rows, *sizes, len(head), sum(map(len, frames)), crc), pieces


def decode_blocks(entries: Sequence[KeyGroupBlock], stored: memoryview, name: str) -> pa.RecordBatch:
    """Return the rows of neighbouring blocks as one page with memory of its own, which may be written.

    Args:
        entries: The blocks.
        stored: Their bytes, back to back, which have been checked.
        name: Of the object, for messages.

    Raises:
        CorruptData: They are not what they claim to be.
    """
    heads: list[bytes] = []
    values = np.empty(sum(block.values for block in entries), np.uint8)
    at = filled = 0
    try:
        for block in entries:
            end = at + block.stored_head
            heads.append(decompress(stored[at:end], block.head, max_size=MAX_BLOCK_BYTES))
            at = end + block.stored_values
            if block.values:
                part = values[filled : filled + block.values]
                decompress_frames_into(stored[end:at], part, FRAME_BYTES)
                filled += block.values
    except ValueError as error:
        raise damaged(name, str(error)) from error
    return _page(entries, heads, values, name)


def _page(
    entries: Sequence[KeyGroupBlock], heads: list[bytes], values: npt.NDArray[np.uint8], name: str
) -> pa.RecordBatch:
    """Return the rows of some blocks as one page: column by column, those of a block behind those of the one before."""
    columns: tuple[list[bytes], ...] = ([], [], [], [], [], [])
    for entry, head in zip(entries, heads, strict=True):
        rows, keys, *_ = entry
        first = FIXED_ROW_BYTES * rows + 4 * entry.frames
        spans = ((0, 2), (2, 6), (6, 10), (10, 14))
        cuts = [(start * rows, stop * rows) for start, stop in spans]
        cuts += (first, first + keys), (first + keys, len(head))
        for column, (start, stop) in zip(columns, cuts, strict=True):
            column.append(head[start:stop])
    states, *lengths, keys_, user_keys = map(b"".join, columns)
    row_ends = np.cumsum([entry.rows for entry in entries])
    sizes = np.array(entries)[:, 1:4].cumsum(axis=0)
    arrays: list[pa.Array] = [pa.array(np.frombuffer(states, "<u2"))]
    for at, payload in enumerate((keys_, user_keys, values)):
        offsets = np.zeros(int(row_ends[-1]) + 1, np.int64)
        np.cumsum(np.frombuffer(lengths[at], "<u4"), out=offsets[1:])
        if (offsets[row_ends] != sizes[:, at]).any():
            raise damaged(name, "lengths do not add up")
        arrays.append(_binary(offsets.astype(np.int32), pa.py_buffer(payload)))
    return pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA)


def _binary(offsets: npt.NDArray[np.int32], payload: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), payload])
