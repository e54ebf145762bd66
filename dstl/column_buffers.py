"""Arrow columns and numpy arrays over the same buffers: numbers, truth values, and binary values.

Arrow's own ways between the two (``pa.array``, ``pa.scalar``, ``to_numpy``, ``fill_null``) import pandas when they are
first called, where it is installed: that takes longer than all else that a worker imports. And its functions let go of
the interpreter for each call, which costs more than to read positions off the buffers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.signedinteger]
Nulls = npt.NDArray[np.bool_] | None
"""True where a column is null; None for nowhere."""

_MAX_BYTES = (1 << 31) - 1  # what 32-bit offsets reach
_SCAN = 1 << 15  # offsets whose differences, 128 KiB, stay in a core's cache
_BINARY = pa.binary()
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


def rows_of(
    rows: npt.NDArray[Any], kind: pa.DataType = _BINARY, valid: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return the items of a contiguous array of any type as binary values of one width, not copied where all are valid.

    Args:
        rows: The items.
        kind: ``binary`` or ``large_binary``.
        valid: False for rows that are null, whatever their item is; None: none is.
    """
    offsets, nulls = np.arange(len(rows) + 1, dtype=np.int64), None
    if valid is not None and not valid.all():
        nulls = pa.py_buffer(np.packbits(valid, bitorder="little"))
        np.cumsum(valid, out=offsets[1:])
        rows = rows[valid]
    return _binary(offsets * rows.dtype.itemsize, rows, kind, nulls)


def empty_values(count: int) -> pa.Array:
    """Return so many empty values."""
    return _binary(np.zeros(count + 1, np.int64), np.empty(0, np.uint8))


def value_offsets(column: pa.Array) -> Offsets:
    """Return the ``len + 1`` offsets of a binary, or large binary, array into its data buffer, as a view."""
    dtype = np.dtype(np.int64 if pa.types.is_large_binary(column.type) else np.int32)
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, dtype)
    return np.frombuffer(buffer, dtype, len(column) + 1, column.offset * dtype.itemsize)


def common_width(offsets: Offsets) -> int | None:
    """Return the length of every value; None where they differ or there is none."""
    if len(offsets) < 2:
        return None
    # The whole must have the width of the first, which is quick to refuse; then each must.
    width = int(offsets[1] - offsets[0])
    if int(offsets[-1]) - int(offsets[0]) != width * (len(offsets) - 1):
        return None
    # Piece by piece, so that the differences stay in the cache.
    for at in range(0, len(offsets) - 1, _SCAN):
        piece = offsets[at : at + _SCAN + 1]
        if not bool((piece[1:] - piece[:-1] == width).all()):
            return None
    return width


def data_of(values: pa.Array) -> Bytes:
    """Return the data buffer of a binary array, in which :func:`value_offsets` are positions."""
    buffer = values.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)


def content_of(values: pa.Array) -> tuple[Bytes, Positions]:
    """Return the data buffer of a binary array and where each value begins and ends (``len + 1`` offsets)."""
    return data_of(values), value_offsets(values).astype(np.int64)


def bytes_of(values: pa.Array) -> Bytes:
    """Return the bytes of all values, which lie back to back, not copied; those of a null are undefined."""
    offsets = value_offsets(values)
    return data_of(values)[int(offsets[0]) : int(offsets[-1])]


def lengths_of(values: pa.Array) -> Offsets:
    """Return the length of each value; that of a null is undefined."""
    return np.diff(value_offsets(values))


def fixed_width_of(values: pa.Array, width: int) -> Bytes | None:
    """Return values without nulls as a contiguous buffer if each has this width, else None."""
    return None if len(values) and common_width(value_offsets(values)) != width else bytes_of(values)


def items_of(values: pa.Array, kind: np.dtype[Any]) -> tuple[npt.NDArray[Any], Positions]:
    """Return the items of this type that each value is made of, and for each item the position of its value.

    Args:
        values: Binary; a null has no items.
        kind: Each value has a whole number of these.
    """
    whole = filled(values, b"")
    return bytes_of(whole).view(kind), np.repeat(np.arange(len(whole)), lengths_of(whole) // kind.itemsize)


def piece_of(values: pa.Array, ends: npt.NDArray[np.int64], piece: int) -> pa.Array:
    """Return one of the pieces into which each value is cut, as binary values.

    Args:
        values: Binary, without nulls.
        ends: For each value, where each of its pieces ends in the data buffer; ascending, the last is its own end.
        piece: Which one.
    """
    offsets = np.empty(ends.size + 1, np.int32)
    offsets[0], offsets[1:] = value_offsets(values)[0], ends.reshape(-1)
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


def _binary(
    offsets: Positions, data: npt.NDArray[Any], kind: pa.DataType = _BINARY, nulls: pa.Buffer | None = None
) -> pa.Array:
    if kind == _BINARY:
        if int(offsets[-1]) > _MAX_BYTES:
            raise OverflowError(f"{int(offsets[-1])} bytes do not fit one column")
        offsets = offsets.astype(np.int32)
    buffers = [nulls, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
