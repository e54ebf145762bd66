"""One state of a checkpoint as rows for a DataFrame."""

from __future__ import annotations

from typing import Any, Literal

from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    VarcharType,
    YearMonthIntervalType,
)

from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.errors import Invalid
from dstl.runtime import Runtime
from dstl.spark.saved_state.changes import find_span, read_changes
from dstl.spark.saved_state.reader import StateColumns, StateRow, read_state, state_columns
from dstl.state.registry import StateRegistry
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint

CHANGE, EXPIRY, POSITION = "change", "expiry_ms", "position"
FrameRows = tuple[StructType, list[tuple[Any, ...]]]
"""Schema and rows of a DataFrame."""


async def state_rows(
    store: ObjectStore, runtime: Runtime, name: str, checkpoint: int | Literal["latest"], operator: str | None
) -> FrameRows:
    """Return the schema and the live entries of one state: see ``StateBackend.read_state``."""
    found = await choose_checkpoint(store, runtime, None if checkpoint == "latest" else checkpoint)
    uid = operator_of(found, name) if operator is None else operator
    columns = state_columns(found, uid, name)
    schema = frame_schema(columns)
    return schema, [_values(row, schema) async for row in read_state(store, runtime, found, uid, name)]


async def change_rows(
    store: ObjectStore,
    runtime: Runtime,
    name: str,
    after: int,
    checkpoint: int | Literal["latest"],
    operator: str | None,
) -> FrameRows:
    """Return the schema and rows of the changes of one state: see ``StateBackend.read_changes``."""
    to = None if checkpoint == "latest" else checkpoint
    uid = operator_of(await choose_checkpoint(store, runtime, to), name) if operator is None else operator
    span = await find_span(store, runtime, uid, after, to)
    schema = frame_schema(span.columns(name))
    return schema, [_values(row, schema) async for row in read_changes(store, runtime, span, name)]


def _values(row: StateRow, schema: StructType) -> tuple[Any, ...]:
    expiry = row.user_key[0] if EXPIRY in schema.names and row.user_key else None
    value = row.value if row.change in (None, "put") else None
    parts = {CHANGE: row.change, "key": row.key, "user_key": row.user_key, "value": value, EXPIRY: expiry}
    return tuple(parts[name] for name in schema.names)


def frame_schema(columns: StateColumns, *, has_position: bool = False, has_expiry: bool = False) -> StructType:
    """Return the columns of a state's rows in a DataFrame, in types that PySpark makes one of.

    Args:
        columns: The state's.
        has_position: With the place of an element in its list.
        has_expiry: With when a row's time to live ends, Unix milliseconds.
    """
    schema, lacks = StructType(), columns.has_change
    if columns.has_change:
        schema = schema.add(CHANGE, StringType(), nullable=False)
    if columns.key.fields:
        schema = schema.add("key", columns.key, nullable=False)
    if not columns.value.fields:
        return shown_schema(schema.add(EXPIRY, LongType(), nullable=lacks))
    if columns.user_key is not None:
        schema = schema.add("user_key", columns.user_key, nullable=lacks)
    if has_position:
        schema = schema.add(POSITION, LongType(), nullable=False)
    schema = schema.add("value", columns.value, nullable=lacks)
    return shown_schema(schema.add(EXPIRY, LongType()) if has_expiry else schema)


def operator_of(checkpoint: CompletedCheckpoint, state: str) -> str:
    """Return the only operator that has a state of this name.

    Raises:
        Invalid: There is none, or more than one; names those that there are.
    """
    known = {o.uid: StateRegistry.from_wire(o.registry).descriptors for o in checkpoint.operators if o.registry}
    found = [uid for uid, states in known.items() if any(d.name == state for d in states)]
    if not found:
        held = "; ".join(f"{uid!r} has {', '.join(repr(d.name) for d in states)}" for uid, states in known.items())
        raise Invalid(f"checkpoint {checkpoint.checkpoint_id} has no state {state!r}: {held or 'no operator has any'}")
    if len(found) > 1:
        raise Invalid(f"operators {', '.join(map(repr, found))} each have a state {state!r}: name one with operator=")
    return found[0]


def shown_schema(schema: StructType) -> StructType:
    """Return columns in types that PySpark makes a DataFrame of: integers for intervals of months, plain strings."""
    shown = _shown_type(schema)
    assert isinstance(shown, StructType)
    return shown


def _shown_type(kind: DataType) -> DataType:
    if isinstance(kind, YearMonthIntervalType):
        return IntegerType()
    if isinstance(kind, (CharType, VarcharType)):
        return StringType()
    if isinstance(kind, ArrayType):
        return ArrayType(_shown_type(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_shown_type(kind.keyType), _shown_type(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _shown_type(f.dataType), f.nullable, f.metadata) for f in kind.fields])
    return kind
