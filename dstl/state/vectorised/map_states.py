"""The runner of a function of the user's over whole columns: rows, their distinct keys, and those keys' prior states.

Nothing runs per row in Python. Per distinct key there is one look-up in the TaskManager's table and one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from dstl.column_buffers import array_of, numpy_of
from dstl.errors import Invalid, clip, named
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.processor_errors import user_code_error
from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.column_state import ColumnState, KeyGroups
from dstl.state.vectorised.key_codes import Groups, by_key_group, group_codes, parts_of_whole_keys, whole_table

GROUP_COLUMN = "__group"
"""Column of ``rows``: which row of ``keys`` a row belongs to."""
EXISTS_COLUMN = "__exists"
"""Column of ``states``: False where a key has no state; in new states: False removes the state."""

StatesFunction = Callable[[pa.Table, pa.Table, pa.Table], tuple[Any, Any]]
"""``function(rows, keys, states) -> (new states, output)``."""


@dataclass(frozen=True, kw_only=True)
class MapStates(StatefulOperator):
    """An operator that runs a function over whole columns. Its key are the grouping columns, which are columns of the
    input too.

    Attributes:
        name: For messages.
        function: The user's.
        state_schema: Columns of the state.
        ttl_ms: Milliseconds of processing time after which a state that was not written is gone; 0 for never.
    """

    name: str
    function: StatesFunction
    state_schema: StructType
    ttl_ms: int = 0


class MapStatesRunner:
    """Runs one task of ``groupBy(...).mapStates(...)``.

    A key is in one call of the function per micro-batch, with all its rows, in the order in which they came.

    Args:
        operator: The operator.
        registry: Its states; takes the function's.

    Attributes:
        max_event_time_ms: Always None: the operator knows no event time.
        late_rows: Always 0, therefore.

    Raises:
        Invalid: A type that cannot be a key or a state, or a state schema that cannot follow the stored one.
    """

    max_event_time_ms: int | None = None
    late_rows: int = 0

    def __init__(self, operator: MapStates, *, registry: StateRegistry) -> None:
        self._function = operator.function
        self._what = what = f"operator {operator.name!r}"
        self._name = operator.name
        self._keys = KeyCodec(operator.key_schema)
        self._input_names = list(operator.input_schema.names)
        self._output_schema = arrow_schema_of(operator.output_schema, f"{what}: the output")
        with named(what):
            self._state = ColumnState(registry, "state", operator.state_schema, ttl_ms=operator.ttl_ms)

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput) -> Iterator[pa.RecordBatch]:
        """Process one partition of one micro-batch; its rows are gathered first and must fit the worker's memory.

        Yields:
            Batches of the output schema.

        Raises:
            UserCodeError: The function raised; what was sent must be dropped.
            DstlError: Prior state cannot be read, or changes not sent.
        """
        held = [batch for batch in batches if batch.num_rows]
        if not held:
            return
        rows = whole_table(held)
        del held
        groups = Groups(group_codes(rows, self._keys.names))
        first = groups.first_rows()
        order, key_groups = by_key_group(rows, first)
        groups, first = groups.reordered(order), first[order]
        found = rows.select(self._keys.names).take(array_of(first)).combine_chunks()
        keys = pa.table(self._keys.canonical(found.columns), names=found.column_names)
        start = 0
        for part, codes in parts_of_whole_keys(rows.select(self._input_names), groups.codes, task.call_rows):
            count = Groups(codes).count
            of_part = _batch_of(keys.slice(start, count))
            yield from self._call(part, codes, of_part, key_groups[start : start + count], task)
            start += count

    def _call(
        self,
        rows: pa.Table,
        codes: npt.NDArray[np.int64],
        keys: pa.RecordBatch,
        key_groups: KeyGroups,
        task: TaskInput,
    ) -> Iterator[pa.RecordBatch]:
        what = self._what
        encoded = self._keys.encode_array(keys.columns, keys.num_rows)
        before = self._state.fetch(task, key_groups, encoded)
        states = pa.Table.from_batches([self._state.decode(before)]).append_column(EXISTS_COLUMN, before.is_valid())
        given = rows.append_column(GROUP_COLUMN, array_of(codes))
        try:
            found = self._function(given, pa.Table.from_batches([keys]), states)
        except Exception as error:
            raise user_code_error(error, self._function, self._name, None) from error
        try:
            new, kept, output = _checked(found)
        except Invalid as error:
            raise Invalid(f"{what}: {clip(error)}") from error
        if new is not None:
            columns = conform(new, self._state.schema, f"{what}: the new states")
            if columns.num_rows != keys.num_rows:
                raise Invalid(
                    f"{what} returned {columns.num_rows} new states for {keys.num_rows} keys: one row per key is "
                    "needed, in the keys' order"
                )
            self._state.put(task, key_groups, encoded, before, columns, kept)
        if output is not None and output.num_rows:
            yield conform(output, self._output_schema, f"{what}: the output")


def _checked(found: Any) -> tuple[pa.RecordBatch | None, npt.NDArray[np.bool_] | None, pa.RecordBatch | None]:
    """Return the new states, which of them are kept (None: all), and the output."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise Invalid(f"the function returns (new states, output), not {found!r:.200}")
    new, output = (_batch(each, what) for each, what in zip(found, ("new states", "output"), strict=True))
    position = -1 if new is None else new.schema.get_field_index(EXISTS_COLUMN)
    if new is None or position < 0:
        return new, None, output
    kept = new.column(position)
    if not pa.types.is_boolean(kept.type):
        raise Invalid(f"column {EXISTS_COLUMN} of the new states is {kept.type}")
    return new, numpy_of(kept, True), output


def _batch(found: Any, what: str) -> pa.RecordBatch | None:
    if found is None or isinstance(found, pa.RecordBatch):
        return found
    if not isinstance(found, pa.Table):
        raise Invalid(f"the {what} are a {type(found).__name__}, not a pyarrow Table or RecordBatch")
    return _batch_of(found)


def conform(found: pa.RecordBatch, schema: pa.Schema, what: str) -> pa.RecordBatch:
    """Return these columns as the schema has them, matched by name.

    Raises:
        Invalid: A column is missing, cannot be cast, or holds a null where the schema allows none.
    """
    if found.schema.equals(schema):
        return found
    columns = []
    for field in schema:
        position = found.schema.get_field_index(field.name)
        if position < 0:
            raise Invalid(f"{what} has no column {field.name!r} (or two); it has {', '.join(found.schema.names)}")
        column = found.column(position)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise Invalid(
                    f"{what} has column {field.name!r} as {column.type}, not {field.type}: {clip(error)}"
                ) from None
        if column.null_count and not field.nullable:
            raise Invalid(f"{what} has a null in column {field.name!r}, which is NOT NULL")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _batch_of(table: pa.Table) -> pa.RecordBatch:
    """Return a table of one chunk per column as a batch."""
    columns: Sequence[Any] = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)
