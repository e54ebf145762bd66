"""A point state that is read and written a column at a time: one value under each key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_DELETE, OP_PUT
from dstl.column_buffers import array_of, empty_values, numpy_of, valid_of
from dstl.errors import Invalid
from dstl.rpc.messages import ExpiryPlace
from dstl.state.codec.value_columns import ValueColumns, without_expired
from dstl.state.descriptor import StateKind
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput

KeyGroups = npt.NDArray[np.uint16]
"""The key group of each key."""


def change_records(
    state: int, ops: npt.NDArray[np.uint8], key_groups: KeyGroups, keys: pa.Array, values: pa.Array
) -> pa.RecordBatch:
    """Return one change for each key, as a batch of ``CHANGE_SCHEMA``; a deletion's value is empty."""
    columns = [
        array_of(key_groups),
        array_of(np.full(len(keys), state, np.uint16)),
        array_of(ops),
        keys,
        empty_values(len(keys)),
        values,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def send_parts(changes: pa.RecordBatch, part_bytes: int, send: Callable[[pa.RecordBatch], None]) -> None:
    """Send changes in parts of about ``part_bytes``; none where there is no change."""
    parts = max(1, -(-changes.get_total_buffer_size() // part_bytes))
    size = -(-changes.num_rows // parts)
    for start in range(0, changes.num_rows, max(1, size)):
        send(changes.slice(start, size))


class ColumnState:
    """One state of an operator, of as many keys at once as a task has.

    Args:
        registry: The operator's states; takes this one.
        name: The state's name.
        schema: Its columns.
        ttl_ms: Milliseconds of processing time after which a value that was not written is gone; 0 for never. Every
            value that is put is written then, changed or not.
        place: Where a key or value has its time. What is new to the index by time is sent apart then; None without.

    Attributes:
        name: The state's name.
        place: Where a key or value has its time.
        state_id: Its number.
        schema: Its columns, in Arrow's types.

    Raises:
        Invalid: A type that cannot be kept, or a schema that cannot follow the stored one.
    """

    def __init__(
        self,
        registry: StateRegistry,
        name: str,
        schema: StructType,
        *,
        ttl_ms: int = 0,
        place: ExpiryPlace | None = None,
    ) -> None:
        for field in schema.fields:
            if "variant" in field.dataType.simpleString():
                raise Invalid(
                    f"the state's column {field.name!r} is {field.dataType.simpleString()}: vectorised operators keep "
                    "no variants; keep a string of it (to_json, say)"
                )
        arrow_schema_of(schema, "the state")
        self.name = name
        self.place = place
        descriptor = registry.declare(name, StateKind.VALUE, schema, ttl_ms=ttl_ms)
        self.state_id = descriptor.state_id
        self._schemas = descriptor.value_schemas
        self._values = ValueColumns(name, self._schemas)
        self.schema = self._values.schema
        self._ttl_ms = ttl_ms

    def fetch(self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array) -> pa.Array:
        """Return the stored values of keys, null where there is none or it has expired."""
        stored = task.source.fetch_values(self.state_id, key_groups, keys)
        return without_expired(stored, task.processing_time_ms - self._ttl_ms) if self._ttl_ms else stored

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        """Return stored values as columns; a null has nulls in every one."""
        return self._values.decode(values)

    def put(
        self,
        task: TaskInput,
        key_groups: KeyGroups,
        keys: pa.Array,
        before: pa.Array,
        columns: pa.RecordBatch,
        kept: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Send the values of keys, as far as they have changed.

        Args:
            task: Takes the changes.
            key_groups: Of each key.
            keys: The keys.
            before: What :meth:`fetch` returned for them.
            columns: Their values.
            kept: False for keys whose value is removed; None: all are kept.
        """
        values = self._values
        if self._ttl_ms:
            values = ValueColumns(self.name, self._schemas, task.processing_time_ms)
        after = values.encode(columns, kept)
        changed = ~numpy_of(pc.equal(before, after), False)
        ops = np.full(len(keys), OP_PUT, np.uint8)
        if kept is not None and not kept.all():
            changed = np.where(kept, changed, valid_of(before))
            ops[~kept] = OP_DELETE
            after = pc.if_else(array_of(kept), after, b"")
        changes = change_records(self.state_id, ops, key_groups, keys, after)
        if self.place is not None and task.send_expiring is not None:
            is_new = before.is_null()
            send_parts(changes.filter(is_new), task.part_bytes, task.send_expiring)
            changed &= ~numpy_of(is_new)
        if not changed.all():
            changes = changes.filter(array_of(changed))
        send_parts(changes, task.part_bytes, task.send)

    def delete(self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array) -> None:
        """Send the end of keys."""
        ops = np.full(len(keys), OP_DELETE, np.uint8)
        changes = change_records(self.state_id, ops, key_groups, keys, empty_values(len(keys)))
        send_parts(changes, task.part_bytes, task.send)
