"""One state of a checkpoint as rows for a DataFrame."""

from __future__ import annotations

from typing import Any, Literal

from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    IntegerType,
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
from dstl.spark.saved_state.reader import read_state, state_columns
from dstl.state.registry import StateRegistry
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint


async def state_rows(
    store: ObjectStore, runtime: Runtime, name: str, checkpoint: int | Literal["latest"], operator: str | None
) -> tuple[StructType, list[tuple[Any, ...]]]:
    """Return the schema and the live entries of one state: see ``StateBackend.read_state``."""
    found = await choose_checkpoint(store, runtime, None if checkpoint == "latest" else checkpoint)
    uid = operator_of(found, name) if operator is None else operator
    columns = state_columns(found, uid, name)
    has_key = bool(columns.key.fields)
    schema = StructType().add("key", columns.key, nullable=False) if has_key else StructType()
    is_timer = not columns.value.fields
    for field in columns.user_key.fields if columns.user_key and is_timer else ():
        schema = schema.add(field)
    if columns.user_key is not None and not is_timer:
        schema = schema.add("user_key", columns.user_key, nullable=False)
    if not is_timer:
        schema = schema.add("value", columns.value, nullable=False)
    rows: list[tuple[Any, ...]] = []
    async for row in read_state(store, runtime, found, uid, name):
        if is_timer:
            rows.append((row.key, *(row.user_key or ())))
        elif row.user_key is not None:
            rows.append((*((row.key,) if has_key else ()), row.user_key, row.value))
        else:
            rows.append((row.key, row.value))
    shown = _shown(schema)
    assert isinstance(shown, StructType)
    return shown, rows


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


def _shown(kind: DataType) -> DataType:
    """Return the type with integers for intervals of months and plain strings: of others PySpark makes no DataFrame."""
    if isinstance(kind, YearMonthIntervalType):
        return IntegerType()
    if isinstance(kind, (CharType, VarcharType)):
        return StringType()
    if isinstance(kind, ArrayType):
        return ArrayType(_shown(kind.elementType), kind.containsNull)
    if isinstance(kind, MapType):
        return MapType(_shown(kind.keyType), _shown(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _shown(f.dataType), f.nullable, f.metadata) for f in kind.fields])
    return kind
