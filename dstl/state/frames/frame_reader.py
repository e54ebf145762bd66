"""Conversion of Arrow columns to the pandas frames that a pandas-style processor gets.

The columns' types are those that Spark's own worker ends up with: it goes through Python rows, so that every integer
becomes int64 and every float float64; integers with nulls are floats, timestamps are naive in the session's time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from dstl.state.codec.type_groups import INTEGERS
from dstl.state.frames.frame_blocks import frame_slicer
from dstl.state.frames.row_reader import python_values

__all__ = ["frame_of", "key_values"]


def frame_of(schema: StructType, columns: Sequence[pa.Array], count: int) -> Callable[[int, int], Any]:
    """Return a function that makes the frame of the rows ``[start, stop)``, numbered from 0."""
    import pandas as pd

    series = [_series(column, field.dataType) for column, field in zip(columns, schema.fields, strict=True)]
    # A mixed column of booleans and nulls is a boolean column again in a slice that has no nulls.
    infer = any(
        isinstance(f.dataType, BooleanType) and c.null_count for f, c in zip(schema.fields, columns, strict=True)
    )
    frame = pd.concat(series, axis=1) if series else pd.DataFrame(index=range(count))
    frame.columns = pd.Index(schema.names)

    cut = frame_slicer(frame)
    if infer:
        return lambda start, stop: cut(start, stop).infer_objects()
    return cut


def key_values(column: pa.Array, data_type: DataType) -> list[Any]:
    """Return a grouping column as a pandas-style processor gets it in its key tuple.

    Timestamps are ``pandas.Timestamp`` as in Spark; integers stay integers (Spark makes floats of them beside a null).
    """
    if isinstance(data_type, (TimestampType, TimestampNTZType)):
        return list(_series(column, data_type).tolist())
    return python_values(column)


def _series(column: pa.Array, data_type: DataType) -> Any:
    import pandas as pd

    if isinstance(data_type, INTEGERS):
        return pd.Series(column.to_numpy(zero_copy_only=False), dtype="float64" if column.null_count else "int64")
    if isinstance(data_type, (FloatType, DoubleType)):
        return pd.Series(column.to_numpy(zero_copy_only=False), dtype="float64")
    if isinstance(data_type, BooleanType):
        return pd.Series(column.to_numpy(zero_copy_only=False), dtype=object if column.null_count else bool)
    if isinstance(data_type, (StringType, BinaryType)):
        return pd.Series(column.to_pylist(), dtype=object)
    from pyspark.sql.pandas.types import _create_converter_to_pandas

    zone = column.type.tz if pa.types.is_timestamp(column.type) else None
    convert = _create_converter_to_pandas(
        data_type,
        True,
        timezone=zone or _zone_within(column.type) or "UTC",
        struct_in_pandas="dict",
        error_on_duplicated_field_names=False,
    )
    values = column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=True)
    return convert(values)


def _zone_within(kind: pa.DataType) -> str | None:
    if pa.types.is_timestamp(kind):
        zone: str | None = kind.tz
        return zone
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return next((zone for zone in map(_zone_within, inner) if zone), None)
