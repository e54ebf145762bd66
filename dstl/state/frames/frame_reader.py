"""Conversion of Arrow columns to the pandas frames that a pandas-style processor gets.

The columns' types are those that Spark's own worker ends up with: it goes through Python rows, so that every integer
becomes int64 and every float float64; integers with nulls are floats, timestamps are naive in the session's time zone.

A pandas-style processor gets and yields one small frame per key, and pandas takes 15 to 50 microseconds to cut one off
or to join one on. Below its public face a frame is an array of each type: cutting and joining those costs a tenth.
Where this pandas is made in another way, the public face serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
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

from dstl.errors import Invalid
from dstl.state.codec.field_codec import INTEGERS
from dstl.state.frames.row_reader import python_values

_MAX_LENGTHS = 256  # most groups of a batch have one of few lengths


def frame_slicer(frame: Any) -> Callable[[int, int], Any]:
    """Return a function that makes the frame of the rows ``[start, stop)``, numbered from 0, sharing their memory."""
    import pandas as pd

    rows: dict[int, Any] = {}

    def by_blocks(start: int, stop: int) -> Any:
        count = stop - start
        index = rows.get(count)
        if index is None:
            index = pd.RangeIndex(count)
            if len(rows) < _MAX_LENGTHS:
                rows[count] = index
        part = cut(slice(start, stop), axis=1)
        # An index of its own: a processor may name it.
        part.axes[1] = index.view()
        return make(part, part.axes)

    try:
        cut, make = frame.copy()._mgr.get_slice, pd.DataFrame._from_mgr
        works = len(by_blocks(0, len(frame))) == len(frame)
    except Exception:  # Another pandas: what it raises here is unknown.
        works = False
    return by_blocks if works else _public_slicer(frame)


def join_frames(frames: Sequence[Any]) -> list[Any]:
    """Return the same rows in their order in fewer frames: neighbours with the same columns and types become one."""
    if len(frames) < 2:
        return list(frames)
    try:
        return _join_runs(frames)
    except Exception:  # Another pandas: what it raises here is unknown.
        return list(frames)


def _join_runs(frames: Sequence[Any]) -> list[Any]:
    layouts = [_layout(frame) for frame in frames]
    joined: list[Any] = []
    first = 0
    for layout, run in groupby(layouts):
        stop = first + sum(1 for _ in run)
        joined.append(_join(frames[first:stop], layout) if stop - first > 1 else frames[first])
        first = stop
    return joined


def _public_slicer(frame: Any) -> Callable[[int, int], Any]:
    import pandas as pd

    def public(start: int, stop: int) -> Any:
        part = frame.iloc[start:stop]
        if start == 0 and stop == len(frame):
            part = part.copy(deep=False)
        part.index = pd.RangeIndex(stop - start)
        # Each slice is handed out once: writing to it is no mistake that pandas should warn of.
        part._is_copy = None
        return part

    return public


def _layout(frame: Any) -> tuple[list[Any], list[tuple[Any, list[int]]]]:
    return frame.columns.tolist(), [(block.dtype, block.mgr_locs.as_array.tolist()) for block in frame._mgr.blocks]


def _join(frames: Sequence[Any], layout: tuple[list[Any], list[tuple[Any, list[int]]]]) -> Any:
    import pandas as pd

    columns: dict[int, Any] = {}
    blocks = [frame._mgr.blocks for frame in frames]
    for number, (_, places) in enumerate(layout[1]):
        values = [each[number].values for each in blocks]
        whole: Any
        if isinstance(values[0], np.ndarray):
            whole = np.concatenate(values, axis=1)
        elif values[0].ndim == 2:
            whole = type(values[0])._concat_same_type(values, axis=1)
        else:
            whole = [type(values[0])._concat_same_type(values)]
        columns.update({place: whole[row] for row, place in enumerate(places)})
    joined = pd.DataFrame({place: columns[place] for place in sorted(columns)}, copy=False)
    joined.columns = frames[0].columns
    return joined


def frame_of(schema: StructType, columns: Sequence[pa.Array], count: int) -> Callable[[int, int], Any]:
    """Return a function that makes the frame of the rows ``[start, stop)``, numbered from 0."""
    import pandas as pd

    series = [_series(column, field.dataType, field.name) for column, field in zip(columns, schema.fields, strict=True)]
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


def key_values(column: pa.Array, data_type: DataType, name: str) -> list[Any]:
    """Return a grouping column as a pandas-style processor gets it in its key tuple.

    Timestamps are ``pandas.Timestamp`` as in Spark; integers stay integers (Spark makes floats of them beside a null).
    """
    if isinstance(data_type, (TimestampType, TimestampNTZType)):
        return list(_series(column, data_type, name).tolist())
    return python_values(column)


def _series(column: pa.Array, data_type: DataType, name: str) -> Any:
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
    try:
        values = column.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True, integer_object_nulls=True)
    except pa.ArrowInvalid as error:
        raise Invalid(
            f"column {name!r} does not fit a frame of pandas, whose times are of 1677 to 2262 ({error}): cast it to a "
            "string in front of the operator, or use transformWithState, whose rows have all times"
        ) from None
    return convert(values)


def _zone_within(kind: pa.DataType) -> str | None:
    if pa.types.is_timestamp(kind):
        zone: str | None = kind.tz
        return zone
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return next((zone for zone in map(_zone_within, inner) if zone), None)
