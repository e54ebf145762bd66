"""Conversion of the data frames that a processor yields to Arrow batches, as Spark's own worker builds them.

Columns are matched by name, or by position where no column has a string for a name. A naive timestamp is local to the
session's time zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    StringType,
    StructType,
)

from dstl.errors import Invalid, clip
from dstl.state.codec.field_codec import FLOATS, INTEGERS
from dstl.state.frames.frame_reader import join_frames
from dstl.state.frames.output_checks import forbids_nulls, refuse_null
from dstl.state.frames.row_writer import MOST_BYTES, arrow_schema

_FLAT = (*INTEGERS, *FLOATS, BooleanType, StringType, BinaryType)


class FrameWriter:
    """Builds batches of one schema out of many small frames.

    Args:
        schema: The output schema.
        operator: For messages.
        timezone: The session's time zone: that of naive timestamps.
        most_bytes: A column of a batch has at most so many, unless a row alone has more.
    """

    at_once = 1000
    """Frames that are best given at once: they become one batch."""

    def __init__(self, schema: StructType, operator: str, timezone: str = "UTC", most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.schema = arrow_schema(schema)
        self._types = schema
        self._operator = operator
        self._names = list(schema.names)
        self._forbids = [not f.nullable or forbids_nulls(f.dataType) for f in schema.fields]
        self._timezone = timezone

    def batches(self, parts: Iterable[Sequence[Any]]) -> Iterator[pa.RecordBatch]:
        """Return the rows of these frames, in their order: each part as one batch, or as several where it is too large.

        There is none for a part without rows.

        Raises:
            Invalid: Something is not a frame of the schema; names the operator and the column.
        """
        for frames in parts:
            yield from self._built(frames)

    def _built(self, frames: Sequence[Any]) -> list[pa.RecordBatch]:
        import pandas as pd

        for frame in frames:
            if not isinstance(frame, pd.DataFrame):
                raise Invalid(
                    f"operator {self._operator!r} yielded {type(frame).__name__}: a pandas-style processor yields "
                    "pandas.DataFrame; one that yields Rows is run by transformWithState"
                )
        full = join_frames([frame for frame in frames if len(frame)])
        if not full:
            return []
        arrays = []
        for position, (name, field, data_type) in enumerate(
            zip(self._names, self.schema, [f.dataType for f in self._types.fields], strict=True)
        ):
            try:
                columns = [_column(frame, name, position) for frame in full]
                array = _array(columns, field.type, self._converter(data_type), isinstance(data_type, INTEGERS))
            except KeyError:
                raise Invalid(f"operator {self._operator!r} yielded a frame without the column {name!r}") from None
            except (pa.ArrowException, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
                raise Invalid(
                    f"operator {self._operator!r} yielded a frame whose column {name!r} is not "
                    f"{data_type.simpleString()}: {clip(error)}"
                ) from error
            if array.nbytes > self._most_bytes and (parts := _halves(full)):
                return [made for half in parts for made in self._built(half)]
            if self._forbids[position]:
                refuse_null(array, self._types[name], self._operator)
            arrays.append(array)
        return [pa.RecordBatch.from_arrays(arrays, schema=self.schema)]

    def _converter(self, data_type: DataType) -> Callable[[Any], Any] | None:
        if isinstance(data_type, _FLAT):
            return None
        from pyspark.sql.pandas.types import _create_converter_from_pandas

        made: Callable[[Any], Any] = _create_converter_from_pandas(
            data_type, timezone=self._timezone, error_on_duplicated_field_names=False
        )
        return made


def _halves(frames: list[Any]) -> list[list[Any]]:
    """Return half of the frames, or of the rows of the only one, and the others; nothing where there is one row."""
    if len(frames) == 1:
        (frame,) = frames
        middle = len(frame) // 2
        return [[frame.iloc[:middle]], [frame.iloc[middle:]]] if middle else []
    middle = len(frames) // 2
    return [frames[:middle], frames[middle:]]


def _column(frame: Any, name: str, position: int) -> Any:
    columns = frame.columns
    if name in columns:
        return frame[name]
    if any(isinstance(one, str) for one in columns):
        raise KeyError(name)
    return frame.iloc[:, position]


def _array(columns: list[Any], kind: pa.DataType, convert: Callable[[Any], Any] | None, whole: bool) -> pa.Array:
    import pandas as pd

    if convert is None:
        values = [column.to_numpy() for column in columns]
        joined = np.concatenate(values) if len({v.dtype for v in values}) == 1 else None
        if joined is not None:
            return pa.array(joined, kind, from_pandas=True)
        if whole:
            # Joining integers with a column that has a NaN would make floats of all of them.
            return pa.concat_arrays([pa.array(v, kind, from_pandas=True) for v in values])
    series = pd.concat(columns, ignore_index=True)
    return pa.array(series if convert is None else convert(series), kind, from_pandas=True)
