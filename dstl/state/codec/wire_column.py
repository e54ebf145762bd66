"""Columns of whole numbers in disguise (dates, timestamps, intervals) as the 64-bit numbers that state holds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["from_int64", "int64_column", "to_int64"]


def int64_column(column: pa.Array) -> pa.Array:
    """Return integers, booleans, days of dates and microseconds of timestamps and durations, nulls left as they are."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        if kind.unit != "us":
            column = column.cast(pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else pa.duration("us"))
        return column.view(pa.int64())
    if pa.types.is_date32(kind):
        column = column.view(pa.int32())
    return column.cast(pa.int64())


def to_int64(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the numbers of :func:`int64_column`; 0 for a null."""
    found: npt.NDArray[np.int64] = int64_column(column).fill_null(0).to_numpy(zero_copy_only=False)
    return found


def from_int64(numbers: npt.NDArray[np.int64], nulls: npt.NDArray[np.bool_], arrow_type: pa.DataType) -> pa.Array:
    """Return such a column; the inverse of :func:`to_int64`.

    Raises:
        ValueError: A number does not fit the type.
    """
    column = pa.array(numbers, mask=nulls if nulls.any() else None)
    if pa.types.is_timestamp(arrow_type) or pa.types.is_duration(arrow_type):
        return column.view(arrow_type)
    if pa.types.is_date32(arrow_type):
        return column.cast(pa.int32()).view(arrow_type)
    return column.cast(arrow_type)
