"""The reader that cuts Arrow batches of sorted rows into their grouping keys, doing once what a batch needs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.column_buffers import array_of, numpy_of
from dstl.errors import Invalid
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.frames.frame_reader import frame_of, key_values
from dstl.state.frames.row_reader import python_values, rows_of

KEY_GROUP_COLUMN = "__dstl_key_group"
INITIAL_STATE_COLUMN = "__dstl_initial_state"
"""A struct column, not null in the rows that carry initial state; within a key those rows come first."""

Style = Literal["row", "pandas"]

UNLIMITED = (1 << 31) - 1
"""No limit of a data frame; Spark's default of its bytes."""

_MAX_ROWS = 32_768  # Python rows and keys that exist at once, whatever Spark's batch size


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Sizes of the data frames in which a pandas-style processor gets a key's rows, as Spark's settings say.

    Attributes:
        rows: No frame has more.
        nbytes: A frame is full once its rows have about so many bytes of Arrow data.
    """

    rows: int = UNLIMITED
    nbytes: int = UNLIMITED

    def rows_per_frame(self, columns: Sequence[pa.Array], count: int) -> int:
        """Return how many rows of a batch with these columns and ``count`` rows make a frame; at least one."""
        size = sum(column.nbytes for column in columns)
        return max(1, min(self.rows, -(-self.nbytes * count // size) if size else self.rows))


Slices = Callable[[int, int], Iterator[Any]]
"""Returns the rows ``[start, stop)``: ``Row`` by ``Row``, or in data frames."""


def slices_of(schema: StructType, columns: Sequence[pa.Array], count: int, style: Style, limits: FrameLimits) -> Slices:
    """Return what gives ``count`` rows of these columns as a processor of this style takes them."""
    if style == "pandas":
        frame = frame_of(schema, columns, count)
        most = limits.rows_per_frame(columns, count)
        if most < count:
            return lambda start, stop: (frame(at, min(at + most, stop)) for at in range(start, stop, most))
        return lambda start, stop: iter((frame(start, stop),)) if stop > start else iter(())
    rows = rows_of(tuple(schema.names), [python_values(column) for column in columns])
    return lambda start, stop: iter(rows[start:stop])


@dataclass(slots=True)
class KeyedBatch:
    """The keys of one batch, in the order of its rows, and the rows of each.

    Attributes:
        keys: Bytes of each key.
        key_groups: Group of each key.
        tuples: Each key as the processor gets it.
        starts: Position of the first input row of each key.
        stops: Position after its last.
        slices: Returns the input of ``[start, stop)``: an iterator of rows, or of data frames.
        initial: For each key, what ``handleInitialState`` is called with; None in a batch without initial state.
    """

    keys: list[bytes]
    key_groups: list[int]
    tuples: list[tuple[Any, ...]]
    starts: list[int]
    stops: list[int]
    slices: Slices
    initial: list[list[Any]] | None


class BatchReader:
    """Cuts the batches of one task into their keys.

    Args:
        keys: Codec of the grouping columns.
        schema: The input's columns, helper columns left out.
        style: What the processor takes: rows or data frames.
        event_time_column: Whose latest time is looked for; None for none.
        watermark_ms: Rows at or before it are late, and left out as Spark leaves them out (milliseconds since 1970);
            None leaves out none.
        keep_late: Late rows can be read afterwards, by :meth:`read_late`; they are held until then.

    Attributes:
        initial_style: What ``handleInitialState`` takes.
        max_event_time_ms: Latest event time seen, late rows included; None before the first.
        late_rows: How many rows were late.
        late_keys: Keys of the late rows that are still to be read.
    """

    def __init__(
        self,
        keys: KeyCodec,
        schema: StructType,
        style: Style,
        event_time_column: str | None,
        watermark_ms: int | None,
        limits: FrameLimits = FrameLimits(),
        keep_late: bool = False,
    ) -> None:
        self._keep_late = keep_late
        self._late: list[pa.RecordBatch] = []
        self._keys = keys
        self._schema = schema
        self._style = self.initial_style = style
        self._limits = limits
        self._event_time = event_time_column
        self._watermark_us = None if watermark_ms is None else watermark_ms * 1000
        self.max_event_time_ms: int | None = None
        self.late_rows = 0
        self.late_keys: set[bytes] = set()

    def read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[KeyedBatch]:
        """Cut batches lazily; empty ones are skipped and very large ones taken in slices."""
        for whole in batches:
            batch = self._without_late(whole)
            for offset in range(0, batch.num_rows, _MAX_ROWS):
                yield self._cut(batch.slice(offset, _MAX_ROWS))

    def read_late(self) -> Iterator[KeyedBatch]:
        """Cut the late rows of what has been read; a key may be in several batches."""
        yield from map(self._cut, self._late)
        self.late_keys.clear()

    def _without_late(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._event_time is None or not batch.num_rows:
            return batch
        times = ends = self._column(batch, self._event_time)
        if pa.types.is_struct(times.type):
            # A row is as late as its window's end, and has come at its start or after it: that much is known.
            times, ends = pc.struct_field(times, "start"), pc.struct_field(times, "end")
        latest = pc.max(self._micros(times)).as_py()
        if latest is None:
            return batch
        latest_ms = latest // 1000
        if self.max_event_time_ms is None or latest_ms > self.max_event_time_ms:
            self.max_event_time_ms = latest_ms
        if self._watermark_us is None:
            return batch
        late = pc.fill_null(pc.less_equal(self._micros(ends), self._watermark_us), False)
        if INITIAL_STATE_COLUMN in batch.schema.names:
            late = pc.and_(late, pc.is_null(batch.column(INITIAL_STATE_COLUMN)))
        dropped = pc.sum(late).as_py()
        if not dropped:
            return batch
        self.late_rows += dropped
        if self._keep_late:
            self._late.append(batch.filter(late))
            self.late_keys.update(self._keys_of(self._late[-1])[2])
        return batch.filter(pc.invert(late))

    def _micros(self, times: pa.Array) -> pa.Array:
        if not pa.types.is_timestamp(times.type):
            raise Invalid(f"event time column {self._event_time!r} is {times.type}, not a timestamp")
        return times.cast(pa.timestamp("us", times.type.tz)).view(pa.int64())

    def _cut(self, batch: pa.RecordBatch) -> KeyedBatch:
        count = batch.num_rows
        starts, taken, keys = self._keys_of(batch)
        key_groups = self._column(batch, KEY_GROUP_COLUMN).take(array_of(np.array(starts, np.int64))).to_pylist()
        if self._style == "pandas":
            fields = self._keys.schema.fields
            values = [key_values(column, of.dataType, of.name) for column, of in zip(taken, fields, strict=True)]
        else:
            values = [python_values(column) for column in taken]
        tuples: list[tuple[Any, ...]] = list(zip(*values, strict=True)) if values else [()] * len(starts)
        stops = [*starts[1:], count]
        initial = None
        columns = [self._column(batch, name) for name in self._schema.names]
        if INITIAL_STATE_COLUMN in batch.schema.names:
            carries = batch.column(INITIAL_STATE_COLUMN).is_valid()
            initial = self._initial(batch.column(INITIAL_STATE_COLUMN), carries, starts, stops)
        if initial is not None:
            # Input rows alone make the frames: the others' nulls would turn columns of integers into floats.
            inputs = pc.invert(carries)
            before = np.concatenate(([0], np.cumsum(numpy_of(inputs))))
            starts, stops = before[starts].tolist(), before[stops].tolist()
            columns, count = [column.filter(inputs) for column in columns], int(before[-1])
        slices = slices_of(self._schema, columns, count, self._style, self._limits)
        return KeyedBatch(keys, key_groups, tuples, starts, stops, slices, initial)

    def _keys_of(self, batch: pa.RecordBatch) -> tuple[list[int], list[pa.Array], list[bytes]]:
        """Return the first row of each key, the grouping columns there, and the key's bytes."""
        key_columns = [self._column(batch, name) for name in self._keys.names]
        starts = self._keys.starts(key_columns, batch.num_rows)
        first = array_of(np.array(starts, np.int64))
        taken = self._keys.canonical([column.take(first) for column in key_columns])
        return starts, taken, self._keys.encode_columns(taken, len(starts))

    def _initial(
        self, column: pa.StructArray, carries: pa.BooleanArray, starts: list[int], stops: list[int]
    ) -> list[list[Any]] | None:
        only = column.filter(carries)
        if not len(only):
            return None
        before = np.concatenate(([0], np.cumsum(numpy_of(carries)))).tolist()
        parts = only.flatten()
        names = tuple(only.type.field(i).name for i in range(only.type.num_fields))
        initial: list[list[Any]] = []
        if self.initial_style == "pandas":
            from pyspark.sql.pandas.types import from_arrow_schema

            frame = frame_of(from_arrow_schema(pa.schema(list(only.type))), parts, len(only))
            for start, stop in zip(starts, stops, strict=True):
                a, b = before[start], before[stop]
                initial.append([frame(a, b)] if b > a else [])
        else:
            rows = rows_of(names, [python_values(part) for part in parts])
            initial.extend(rows[before[a] : before[b]] for a, b in zip(starts, stops, strict=True))
        return initial

    @staticmethod
    def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
        position = batch.schema.get_field_index(name)
        if position < 0:
            raise Invalid(f"the input has no column {name!r} (or two); it has {', '.join(batch.schema.names)}")
        return batch.column(position)
