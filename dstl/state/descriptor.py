"""What a checkpoint remembers about a state: name, number, kind and schemas; and what may change between versions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pyspark.sql.types import DataType, StructField, StructType

from dstl.errors import CorruptData, Invalid, shown
from dstl.state.stored_schema import schema_from_json
from dstl.state.value_codec import MAX_SCHEMA_VERSIONS

__all__ = ["MAX_STATES", "StateDescriptor", "StateKind", "evolve"]

MAX_STATES = 1 << 16
"""An operator has no more states, those that were removed included."""

_WIDER = {
    "tinyint": ("smallint", "int", "bigint"),
    "smallint": ("int", "bigint"),
    "int": ("bigint",),
    "float": ("double",),
}
"""Types whose values are values of the wider type too, so that a column may widen."""


class StateKind(StrEnum):
    """What a state holds for each grouping key. The value is stored with the checkpoint."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    TIMER = "timer"
    REDUCING = "reducing"
    AGGREGATING = "aggregating"


@dataclass(frozen=True, slots=True)
class StateDescriptor:
    """One state of an operator.

    Attributes:
        name: Unique within the operator.
        kind: What it holds.
        state_id: Its number in change records and tables, in ``[0, 65536)``; never reused.
        schemas: Every value schema it has had, as Spark's JSON, oldest first; values carry their version.
        user_key_schema: Of a map state: the user key's schema as Spark's JSON; otherwise empty.
        ttl_ms: Milliseconds after its last write at which a value is gone; 0 for never.
    """

    name: str
    kind: StateKind
    state_id: int
    schemas: tuple[str, ...]
    user_key_schema: str = ""
    ttl_ms: int = 0

    @property
    def value_schemas(self) -> tuple[StructType, ...]:
        """The schemas as Spark types, oldest first; a user-defined type is the SQL type that its values are kept in."""
        return tuple(schema_from_json(text, f"the schema of state {shown(self.name)}") for text in self.schemas)

    @property
    def user_key(self) -> StructType | None:
        """The user key's schema, or None."""
        if not self.user_key_schema:
            return None
        return schema_from_json(self.user_key_schema, f"the user key's schema of state {shown(self.name)}")

    def to_wire(self) -> dict[str, Any]:
        """Return plain data for a checkpoint or a socket."""
        return {
            "name": self.name,
            "kind": self.kind.value,
            "id": self.state_id,
            "schemas": list(self.schemas),
            "user_key": self.user_key_schema,
            "ttl_ms": self.ttl_ms,
        }

    @staticmethod
    def from_wire(data: dict[str, Any]) -> StateDescriptor:
        """Rebuild a descriptor; the inverse of :meth:`to_wire`.

        Raises:
            CorruptData: Not a descriptor, one of a newer version of DSTL, or a schema with other than plain SQL types.
        """
        try:
            found = StateDescriptor(
                name=str(data["name"]),
                kind=StateKind(data["kind"]),
                state_id=int(data["id"]),
                schemas=tuple(str(text) for text in data["schemas"]),
                user_key_schema=str(data["user_key"]),
                ttl_ms=int(data["ttl_ms"]),
            )
            if not 0 <= found.state_id < MAX_STATES or not 1 <= len(found.schemas) <= MAX_SCHEMA_VERSIONS:
                raise ValueError(f"number {found.state_id}, {len(found.schemas)} schemas")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptData(
                f"not a state descriptor: {shown(error)}; was it written by a newer version of DSTL?"
            ) from error
        # Here rather than where it is used first: nothing else of the checkpoint has been touched yet.
        _ = (found.value_schemas, found.user_key)
        return found


def evolve(old: StateDescriptor, new: StateDescriptor) -> StateDescriptor:
    """Return the descriptor to go on with where ``old`` is stored and ``new`` is declared (with one schema).

    Columns may be added (nullable) anywhere, may change places, and may widen (int to bigint, float to double). The
    time to live may change.

    Raises:
        Invalid: Stored values could not be read as the new schema says; names the state and both schemas.
    """
    if old.kind is not new.kind:
        raise Invalid(
            f"state {old.name!r} is stored as a {old.kind.value} state and declared as {new.kind.value}: rename it"
        )
    if (old.user_key is None) != (new.user_key is None) or (
        old.user_key is not None and new.user_key is not None and _shape(old.user_key) != _shape(new.user_key)
    ):
        raise Invalid(
            f"state {old.name!r} is stored with the user key {_show(old.user_key)} and declared with "
            f"{_show(new.user_key)}: user keys cannot change; use another name"
        )
    before, after = old.value_schemas[-1], new.value_schemas[-1]
    reason = _why_incompatible(before, after)
    if reason:
        raise Invalid(
            f"state {old.name!r} cannot change its schema: {reason}. Stored: {_show(before)}; declared: "
            f"{_show(after)}. Add nullable columns, or use another name for the state"
        )
    same = _shape(before) == _shape(after) and before.names == after.names
    schemas = (*old.schemas[:-1], new.schemas[-1]) if same else (*old.schemas, new.schemas[-1])
    if len(schemas) > MAX_SCHEMA_VERSIONS:
        raise Invalid(
            f"state {old.name!r} has had {MAX_SCHEMA_VERSIONS} schemas, the most there can be: use another name"
        )
    return replace(old, schemas=schemas, ttl_ms=new.ttl_ms)


def _why_incompatible(old: StructType, new: StructType) -> str:
    fields: dict[str, StructField] = {f.name: f for f in new.fields}
    for field in old.fields:
        found = fields.pop(field.name, None)
        if found is None:
            return f"column {field.name!r} is gone"
        before, after = field.dataType.simpleString(), found.dataType.simpleString()
        if before != after and after not in _WIDER.get(before, ()):
            return f"column {field.name!r} changes from {before} to {after}"
        if field.nullable and not found.nullable:
            return f"column {field.name!r} may hold nulls and is declared NOT NULL"
    for field in fields.values():
        if not field.nullable:
            return f"the new column {field.name!r} is NOT NULL, and stored values have none"
    return ""


def _shape(data_type: DataType) -> str:
    text: str = data_type.simpleString()
    return text


def _show(schema: StructType | None) -> str:
    return "(none)" if schema is None else _shape(schema)
