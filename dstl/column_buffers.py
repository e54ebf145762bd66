"""Arrow columns and numpy arrays over the same buffers: numbers, truth values, and binary values.

Arrow's own ways between the two (``pa.array``, ``pa.scalar``, ``to_numpy``, ``fill_null``) import pandas when they are
first called, where it is installed: that takes longer than all else that a worker imports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Nulls = npt.NDArray[np.bool_] | None
"""True where a column is null; None for nowhere."""

_MAX_BYTES = (1 << 31) - 1  # what 32-bit offsets reach
_NUMBERS = [np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)]
_ARROW_KINDS = {each: pa.from_numpy_dtype(each) for each in _NUMBERS}
_NUMPY_KINDS = {kind.id: each for each, kind in _ARROW_KINDS.items()}
"""Looked up, for a small column takes not much longer than to ask Arrow which kind is which."""


def array_of(values: npt.NDArray[Any], nulls: Nulls = None) -> pa.Array:
    """Return numbers, not copied, or truth values as a column; the inverse of :func:`numpy_of`."""
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else np.ascontiguousarray(values)
    validity = None if nulls is None else pa.py_buffer(np.packbits(~nulls, bitorder="little"))
    kind = _ARROW_KINDS.get(values.dtype) or pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data)])


def numpy_of(column: pa.Array, null: Any = None) -> npt.NDArray[Any]:
    """Return a column of numbers, not copied, or of truth values as an array.

    Args:
        column: The column.
        null: What stands for its nulls; None where it has none, or what stands there does not matter.
    """
    count, offset, data, kind = len(column), column.offset, column.buffers()[1], column.type
    dtype = _NUMPY_KINDS.get(kind.id) or np.dtype(kind.to_pandas_dtype())
    if data is None:
        found = np.zeros(count, dtype)
    elif dtype == np.bool_:
        found = _bits(data, offset, count)
    else:
        found = np.frombuffer(data, dtype, count, offset * dtype.itemsize)
    if null is None or not column.null_count:
        return found
    return np.where(valid_of(column), found, dtype.type(null))


def valid_of(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which values of a column are not null."""
    if not column.null_count:
        return np.ones(len(column), np.bool_)
    validity = column.buffers()[0]
    return np.zeros(len(column), np.bool_) if validity is None else _bits(validity, column.offset, len(column))


def filled(column: pa.Array, null: Any) -> pa.Array:
    """Return a column with another value in place of its nulls."""
    return column.fill_null(null) if column.null_count else column


def of_kind(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column cast to a type, itself where it has that: a cast takes ten times as long as a look."""
    return column if column.type == kind else column.cast(kind)


def _bits(data: pa.Buffer, offset: int, count: int) -> npt.NDArray[np.bool_]:
    first = offset // 8
    packed = np.frombuffer(data, np.uint8, -(-(offset + count) // 8) - first, first)
    found = np.unpackbits(packed, count=offset % 8 + count, bitorder="little")
    return found[offset % 8 :].view(np.bool_)


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
    """Return the length of each value; that of a null is undefined."""
    return np.diff(content_of(values)[1])


def fixed_width_of(values: pa.Array, width: int) -> Bytes | None:
    """Return values without nulls as a contiguous buffer if each has this width, else None."""
    data, offsets = content_of(values)
    if int(offsets[-1] - offsets[0]) != width * len(values) or not bool((np.diff(offsets) == width).all()):
        return None
    return data[int(offsets[0]) : int(offsets[-1])]


def piece_of(values: pa.Array, ends: npt.NDArray[np.int64], piece: int) -> pa.Array:
    """Return one of the pieces into which each value is cut, as binary values.

    Args:
        values: Binary, without nulls.
        ends: For each value, where each of its pieces ends in the data buffer; ascending, the last is its own end.
        piece: Which one.
    """
    offsets = np.empty(ends.size + 1, np.int32)
    offsets[0], offsets[1:] = content_of(values)[1][0], ends.reshape(-1)
    buffers = [None, pa.py_buffer(offsets), values.buffers()[2]]
    pieces = np.arange(piece, ends.size, ends.shape[1])
    return pa.Array.from_buffers(pa.binary(), ends.size, buffers).take(array_of(pieces))


def to_int64(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return integers, booleans, days of dates, and microseconds of timestamps, durations and times; 0 for a null."""
    kind = column.type
    if pa.types.is_time64(kind):
        column = column.cast(pa.time64("us")).view(pa.int64())
    elif pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        if kind.unit != "us":
            column = column.cast(pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("us"))
        column = column.view(pa.int64())
    elif pa.types.is_date32(kind):
        column = column.view(pa.int32())
    return numpy_of(of_kind(column, pa.int64()), 0)


def from_int64(numbers: npt.NDArray[np.int64], nulls: Nulls, arrow_type: pa.DataType) -> pa.Array:
    """Return a column of such a type; the inverse of :func:`to_int64`.

    Args:
        numbers: The content.
        nulls: Where the column is null.
        arrow_type: The column's type.

    Raises:
        ValueError: A number does not fit the type.
    """
    column = array_of(numbers, nulls)
    if pa.types.is_timestamp(arrow_type) or pa.types.is_duration(arrow_type):
        return column.view(arrow_type)
    if pa.types.is_time64(arrow_type):
        return column.view(pa.time64("us")).cast(arrow_type)
    if pa.types.is_date32(arrow_type):
        return column.cast(pa.int32()).view(arrow_type)
    return of_kind(column, arrow_type)


def _binary(offsets: Positions, data: npt.NDArray[Any]) -> pa.Array:
    if int(offsets[-1]) > _MAX_BYTES:
        raise OverflowError(f"{int(offsets[-1])} bytes do not fit one column")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)
