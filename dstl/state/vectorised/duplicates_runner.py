"""The runner of a deduplication: the first row of each key passes, later ones do not, until the key is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField, StructType, TimestampType

from dstl.column_buffers import array_of, from_int64, numpy_of, to_int64, valid_of
from dstl.errors import named
from dstl.rpc.messages import ExpiryPlace
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import gathered, latest_ms
from dstl.state.vectorised.column_state import ColumnState
from dstl.state.vectorised.group_runner import is_over, late_after
from dstl.state.vectorised.key_codes import Groups, by_key_group, group_codes

_WITHIN = StructType([StructField("expires_at", TimestampType())])
_EXPIRES_AT = ExpiryPlace(in_key=False, offset=2)
"""Behind the version and the null bitmap of a value of one column."""


@dataclass(frozen=True, kw_only=True)
class Deduplication(StatefulOperator):
    """A deduplication, checked when the query is defined. Its output has the columns of its input.

    Attributes:
        columns: The rows' columns that tell rows apart, and of a window ``start`` or ``end``; else None.
        key_schema: The state's key: one column for each of those.
        time: The rows' column with the watermark, a moment or a window; None where there is none.
        expires: The key's column that the watermark is compared with; None where keys stay for ever.
        within_us: Microseconds behind the event time of a key's first row at which the key is forgotten, instead.
    """

    columns: tuple[tuple[str, str | None], ...]
    time: str | None = None
    expires: str | None = None
    within_us: int | None = None

    @property
    def ends(self) -> bool:
        """True where keys are forgotten."""
        return self.expires is not None or self.within_us is not None


class DuplicatesRunner:
    """Runs one task of a deduplication.

    Args:
        deduplication: The definition.
        operator: Name of the operator, for messages.
        registry: The operator's states; takes the deduplication's.

    Attributes:
        max_event_time_ms: Latest event time of the input, late rows included; None without one.
        late_rows: Rows dropped because their event time, or window's end, was at or before the watermark.

    Raises:
        Invalid: A type that cannot be a key.
    """

    def __init__(self, deduplication: Deduplication, *, operator: str, registry: StateRegistry) -> None:
        self._deduplication = deduplication
        self._within = deduplication.within_us
        name = "seen" if self._within is None else "seen_within_watermark"
        with named(f"operator {operator!r}"):
            self._keys = KeyCodec(deduplication.key_schema)
            place = None if self._within is None else _EXPIRES_AT
            if deduplication.expires is not None:
                place = self._keys.place_of(deduplication.expires)
            schema = StructType([]) if self._within is None else _WITHIN
            self._state = ColumnState(registry, name, schema, place=place)
        self._output = arrow_schema_of(deduplication.input_schema, f"operator {operator!r}: the input")
        self.max_event_time_ms: int | None = None
        self.late_rows = 0

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput) -> Iterator[pa.RecordBatch]:
        """Process one partition of one micro-batch; its rows are gathered first and must fit the worker's memory.

        Yields:
            The rows that pass, in their order.

        Raises:
            DstlError: Prior state cannot be read, or changes not sent.
        """
        rows = gathered(batches, self._deduplication.input_schema)
        if rows is not None:
            rows = self._on_time(rows, task)
        if rows is not None and rows.num_rows:
            yield from self._first_rows(rows, task)
        state = self._state
        if state.place is None:
            return
        until = task.watermark_ms * 1000
        for due in task.source.fetch_due(state.state_id, task.key_groups, state.place, until, with_values=False):
            state.delete(task, numpy_of(due.column("key_group")), due.column("key"))

    def _on_time(self, rows: pa.Table, task: TaskInput) -> pa.Table:
        time = self._deduplication.time
        if time is None:
            return rows
        column = rows.column(time).combine_chunks()
        ends = column
        if pa.types.is_struct(column.type):
            column, ends = pc.struct_field(column, "start"), pc.struct_field(column, "end")
        self.max_event_time_ms = latest_ms(pa.table({"time": column}), "time")
        late = is_over(ends, late_after(task))
        count = np.count_nonzero(late)
        if not count:
            return rows
        self.late_rows += int(count)
        return rows.filter(array_of(~late)).combine_chunks()

    def _first_rows(self, rows: pa.Table, task: TaskInput) -> Iterator[pa.RecordBatch]:
        columns = [self._column(rows, *each) for each in self._deduplication.columns]
        table = pa.table(columns, names=self._keys.names)
        groups = Groups(group_codes(table, table.column_names))
        order, key_groups = by_key_group(rows, groups.first_rows())
        first = groups.first_rows()[order]
        at = array_of(first)
        columns = self._keys.canonical([column.take(at) for column in columns])
        keys = self._keys.encode_array(columns, len(first))
        before = self._state.fetch(task, key_groups, keys)
        is_new = ~valid_of(before)
        expiries = self._expiries(rows, at, columns)
        kept = is_new
        if expiries is not None:
            kept = is_new & ~is_over(expiries, task.watermark_ms * 1000)
        put = array_of(kept)
        held = _no_columns(int(np.count_nonzero(kept)))
        if self._within is not None and expiries is not None:
            held = pa.RecordBatch.from_arrays([expiries.filter(put)], schema=self._state.schema)
        self._state.put(task, key_groups[kept], keys.filter(put), before.filter(put), held)
        passing = rows.select(self._output.names).take(array_of(np.sort(first[is_new]))).combine_chunks()
        for batch in passing.to_batches():
            yield pa.RecordBatch.from_arrays(batch.columns, schema=self._output)

    def _expiries(self, rows: pa.Table, at: pa.Array, columns: list[pa.Array]) -> pa.Array | None:
        """Return when each key is forgotten, a null for never; None where none is."""
        if self._within is not None:
            assert self._deduplication.time is not None
            column = rows.column(self._deduplication.time).combine_chunks().take(at)
            moments: npt.NDArray[np.int64] = to_int64(column)
            return from_int64(moments + self._within, None, self._state.schema.field(0).type)
        if self._deduplication.expires is None:
            return None
        return columns[self._keys.names.index(self._deduplication.expires)]

    @staticmethod
    def _column(rows: pa.Table, name: str, field: str | None) -> pa.Array:
        column = rows.column(name).combine_chunks()
        return column if field is None else pc.struct_field(column, field)


def _no_columns(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_struct_array(pa.Array.from_buffers(pa.struct([]), count, [None]))
