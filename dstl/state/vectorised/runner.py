"""The runner of a function over whole columns: a partition's rows, its distinct keys and their prior states.

Nothing runs per row in Python. Per distinct key there is one look-up in the TaskManager's table and one change.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.changelog.change_set import OP_DELETE, OP_PUT
from dstl.errors import Invalid, UserCodeError, clip
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_columns import ValueColumns, without_expired
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.change_records import change_records, send_parts
from dstl.state.vectorised.key_codes import Groups, group_codes, whole_table

__all__ = ["KeyedFunction", "Update", "VectorisedRunner", "conform"]


class Update(NamedTuple):
    """The result of one call of a function.

    Attributes:
        states: New states, one row per key in the keys' order; None: all stay as they are.
        kept: For each key, False to remove its state; None: all are kept.
        output: Rows of the output schema; None for none.
    """

    states: pa.RecordBatch | None
    kept: npt.NDArray[np.bool_] | None
    output: pa.RecordBatch | None


class KeyedFunction(Protocol):
    """The work of an operator on the rows of many keys.

    Attributes:
        state_name: The one state's name.
        state_schema: Its columns.
        output_schema: Columns of the output.
    """

    state_name: str
    state_schema: StructType
    output_schema: StructType

    def update(
        self,
        rows: pa.Table,
        groups: Groups,
        keys: pa.RecordBatch,
        states: pa.RecordBatch,
        exists: npt.NDArray[np.bool_],
    ) -> Update:
        """Return new states and output.

        Args:
            rows: The input's columns, each in one chunk.
            groups: Which row belongs to which key.
            keys: The distinct keys.
            states: Their prior states; nulls where there is none.
            exists: For each key, whether it has a prior state.

        Raises:
            UserCodeError: The user's function raised.
            Invalid: What it returned does not fit.
        """
        ...


class VectorisedRunner:
    """Runs one operator's function in one task.

    A key is in one call of the function per micro-batch, with all its rows, in the order in which they came.

    Args:
        function: What to do.
        operator: Name of the operator, for messages.
        key_schema: The grouping columns, which are columns of the input too.
        input_schema: All columns of the input but the helper columns.
        registry: The operator's states; takes the function's.
        call_rows: Rows of one call, about. More: fewer calls and round trips; fewer: less memory beside the rows.
        part_bytes: The change set is sent in parts of about this size.
        ttl_ms: Milliseconds of processing time after which a state that was not written is gone; 0 for never.

    Attributes:
        max_event_time_ms: Always None: these operators know no event time.
        late_rows: Always 0, therefore.

    Raises:
        Invalid: A type that cannot be a key or a state, or a state schema that cannot follow the stored one.
    """

    max_event_time_ms: int | None = None
    late_rows: int = 0

    def __init__(
        self,
        function: KeyedFunction,
        *,
        operator: str,
        key_schema: StructType,
        input_schema: StructType,
        registry: StateRegistry,
        call_rows: int = 1 << 20,
        part_bytes: int = 8 << 20,
        ttl_ms: int = 0,
    ) -> None:
        self.registry = registry
        self._ttl_ms = ttl_ms
        self._function = function
        self._operator = operator
        self._keys = KeyCodec(key_schema)
        self._input_names = list(input_schema.names)
        self._call_rows = call_rows
        self._part_bytes = part_bytes
        self._output_schema = arrow_schema_of(function.output_schema, f"operator {operator!r}: the output")
        arrow_schema_of(function.state_schema, f"operator {operator!r}: the state")
        for field in function.state_schema.fields:
            if "variant" in field.dataType.simpleString():
                raise Invalid(
                    f"operator {operator!r}: the state's column {field.name!r} is {field.dataType.simpleString()}: "
                    "vectorised operators keep no variants; keep a string of it (to_json, say)"
                )
        try:
            self._state: StateDescriptor = registry.declare(
                function.state_name, StateKind.VALUE, function.state_schema, ttl_ms=ttl_ms
            )
        except Invalid as error:
            raise Invalid(f"operator {operator!r}: {error}") from error
        self._values = ValueColumns(function.state_name, self._state.value_schemas)

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
        if self._ttl_ms:
            self._values = ValueColumns(self._state.name, self._state.value_schemas, task.processing_time_ms)
        rows = whole_table(held)
        del held
        groups = Groups(group_codes(rows, self._keys.names))
        first = groups.first_rows()
        key_groups = np.asarray(rows.column(KEY_GROUP_COLUMN).combine_chunks())[first].astype(np.uint16)
        order = np.argsort(key_groups, kind="stable")
        groups, first, key_groups = groups.reordered(order), first[order], key_groups[order]
        found = rows.select(self._keys.names).take(pa.array(first)).combine_chunks()
        keys = pa.table(self._keys.canonical(found.columns), names=found.column_names)
        inputs = rows.select(self._input_names)
        for start, stop, part_rows, part_groups in self._calls(inputs, groups):
            part_keys = _batch_of(keys.slice(start, stop - start))
            yield from self._call(part_rows, part_groups, part_keys, key_groups[start:stop], task)

    def _calls(self, rows: pa.Table, groups: Groups) -> Iterator[tuple[int, int, pa.Table, Groups]]:
        """Yield the keys ``[start, stop)`` of each call, and their rows."""
        if rows.num_rows <= self._call_rows:
            yield 0, groups.count, rows, groups
            return
        ends = np.cumsum(groups.sizes())
        order = np.argsort(groups.codes, kind="stable")
        calls = ends // self._call_rows
        cuts = [0, *(np.flatnonzero(calls[1:] != calls[:-1]) + 1).tolist(), groups.count]
        for start, stop in pairwise(cuts):
            picked = np.sort(order[ends[start - 1] if start else 0 : ends[stop - 1]])
            part = rows.take(pa.array(picked)).combine_chunks()
            yield start, stop, part, Groups(groups.codes[picked] - start)

    def _call(
        self,
        rows: pa.Table,
        groups: Groups,
        keys: pa.RecordBatch,
        key_groups: npt.NDArray[np.uint16],
        task: TaskInput,
    ) -> Iterator[pa.RecordBatch]:
        encoded = self._keys.encode_array(keys.columns, keys.num_rows)
        stored = task.source.fetch_values(self._state.state_id, key_groups, encoded)
        before = without_expired(stored, task.processing_time_ms - self._ttl_ms) if self._ttl_ms else stored
        exists = before.is_valid().to_numpy(zero_copy_only=False)
        states = self._values.decode(before)
        try:
            update = self._function.update(rows, groups, keys, states, exists)
        except UserCodeError:
            raise
        except Invalid as error:
            raise Invalid(f"operator {self._operator!r}: {clip(error)}") from error
        if update.states is not None:
            columns = conform(update.states, self._values.schema, f"operator {self._operator!r}: the new states")
            if columns.num_rows != keys.num_rows:
                raise Invalid(
                    f"operator {self._operator!r} returned {columns.num_rows} new states for {keys.num_rows} keys: one "
                    "row per key is needed, in the keys' order"
                )
            self._send(key_groups, encoded, before, self._values.encode(columns, update.kept), update.kept, task)
        if update.output is not None and update.output.num_rows:
            yield conform(update.output, self._output_schema, f"operator {self._operator!r}: the output")

    def _send(
        self,
        key_groups: npt.NDArray[np.uint16],
        keys: pa.Array,
        before: pa.Array,
        after: pa.Array,
        kept: npt.NDArray[np.bool_] | None,
        task: TaskInput,
    ) -> None:
        """Send what has changed."""
        changed = ~pc.equal(before, after).fill_null(False).to_numpy(zero_copy_only=False)
        ops = np.full(len(keys), OP_PUT, np.uint8)
        if kept is not None and not kept.all():
            changed = np.where(kept, changed, before.is_valid().to_numpy(zero_copy_only=False))
            ops[~kept] = OP_DELETE
            after = pc.if_else(pa.array(kept), after, b"")
        changes = change_records(self._state.state_id, ops, key_groups, keys, after)
        if not changed.all():
            changes = changes.filter(pa.array(changed))
        send_parts(changes, self._part_bytes, task.send)


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
    columns: list[Any] = [column.combine_chunks() for column in table.columns]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)
