"""Binary columns and numpy: values of one width as rows of a matrix, values of many as ranges of one buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["Bytes", "binary_of", "content_of", "empty_values", "fixed_width_of", "gathered", "lengths_of", "rows_of"]

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_MOST = (1 << 31) - 1


def binary_of(data: npt.NDArray[Any], lengths: npt.NDArray[np.integer]) -> pa.Array:
    """Return values that lie back to back in ``data``, not copied.

    Raises:
        OverflowError: They have more than 2 GiB together.
    """
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return _binary(offsets, data)


def rows_of(rows: npt.NDArray[Any]) -> pa.Array:
    """Return the items of a contiguous array of any type as binary values of one width, not copied."""
    return _binary(np.arange(len(rows) + 1, dtype=np.int64) * rows.dtype.itemsize, rows)


def empty_values(count: int) -> pa.Array:
    """Return so many empty values."""
    return _binary(np.zeros(count + 1, np.int64), np.empty(0, np.uint8))


def content_of(values: pa.Array) -> tuple[Bytes, Positions]:
    """Return the data buffer of a binary array and where each value begins and ends (``len + 1`` offsets)."""
    offsets = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset).astype(np.int64)
    buffer = values.buffers()[2]
    return (np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)), offsets


def lengths_of(values: pa.Array) -> Positions:
    """Return the length of each value; what a null has is not said."""
    return np.diff(content_of(values)[1])


def fixed_width_of(values: pa.Array, width: int) -> Bytes | None:
    """Return values without nulls as a contiguous buffer if each has this width, else None."""
    data, offsets = content_of(values)
    if int(offsets[-1] - offsets[0]) != width * len(values) or not bool((np.diff(offsets) == width).all()):
        return None
    return data[int(offsets[0]) : int(offsets[-1])]


def gathered(data: Bytes, starts: Positions, lengths: Positions) -> pa.Array:
    """Return ranges of a buffer as binary values."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    where = np.arange(total) + np.repeat(starts - ends + lengths, lengths)
    return binary_of(data[where], lengths)


def _binary(offsets: Positions, data: npt.NDArray[Any]) -> pa.Array:
    if int(offsets[-1]) > _MOST:
        raise OverflowError(f"{int(offsets[-1])} bytes do not fit one column")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
