"""The descriptor of a state in a checkpoint: its name, number, kind and schemas, and their rules of change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pyspark.sql.types import DataType, StructType

from dstl.errors import CorruptData, Invalid, brief
from dstl.state.codec.schema_evolution import why_unreadable
from dstl.state.codec.stored_schema import schema_from_json
from dstl.state.codec.value_codec import MAX_SCHEMA_VERSIONS, TimeToLive, ValueCodec

MAX_STATES = 1 << 16
"""An operator has no more states, those that were removed included."""


class StateKind(StrEnum):
    """Kind of content that a state has for each grouping key, or for all. The value is stored with the checkpoint."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"
    TIMER = "timer"
    REDUCING = "reducing"
    AGGREGATING = "aggregating"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class StateDescriptor:
    """One state of an operator.

    Attributes:
        name: Unique within the operator.
        kind: What it holds.
        state_id: Its number in change records and tables, in ``[0, 65536)``; never reused.
        schemas: Every value schema it has had, as Spark's JSON, oldest first; values carry their version.
        user_key_schema: Of a map or broadcast state: the user key's schema as Spark's JSON; otherwise empty.
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
        return tuple(schema_from_json(text, f"the schema of state {brief(self.name)}") for text in self.schemas)

    @property
    def user_key(self) -> StructType | None:
        """The user key's schema, or None."""
        if not self.user_key_schema:
            return None
        return schema_from_json(self.user_key_schema, f"the user key's schema of state {brief(self.name)}")

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
                f"not a state descriptor: {brief(error)}; was it written by a newer version of DSTL?"
            ) from error
        # Here rather than where it is used first: nothing else of the checkpoint has been touched yet.
        _ = (found.value_schemas, found.user_key)
        return found


@dataclass(frozen=True, slots=True)
class DeclaredState:
    """A state as a task has declared it.

    Attributes:
        descriptor: What is stored under which number.
        codec: Bytes of the values.
        ttl: Their time to live.
    """

    descriptor: StateDescriptor
    codec: ValueCodec
    ttl: TimeToLive


def evolve(old: StateDescriptor, new: StateDescriptor) -> StateDescriptor:
    """Return the descriptor to go on with where ``old`` is stored and ``new`` is declared (with one schema).

    Columns may be added (nullable), removed and reordered, and may widen
    (``dstl.state.codec.schema_evolution``): values of any earlier schema may still be stored, so the new one is
    compared with each. A user key's columns may be renamed. The time to live may change.

    Raises:
        Invalid: Stored values could not be read as the new schema says; names the state and both schemas.
    """
    if old.kind is not new.kind:
        raise Invalid(
            f"state {old.name!r} is stored as a {old.kind.value} state and declared as {new.kind.value}: rename it"
        )
    if not _same_user_keys(old.user_key, new.user_key):
        raise Invalid(
            f"state {old.name!r} is stored with the user key {_show(old.user_key)} and declared with "
            f"{_show(new.user_key)}: a user key's columns can be renamed, and not change otherwise; give the state "
            "another name"
        )
    stored, after = old.value_schemas, new.value_schemas[-1]
    for number, before in reversed(list(enumerate(stored, start=1))):
        reason = why_unreadable(before, after)
        if reason and old.kind is StateKind.TIMER:
            raise Invalid(
                f"the operator has stored timers, and they would mean other moments: {reason}. Go on with the timeMode "
                "of before, or give the operator another name"
            )
        if reason:
            which = "" if number == len(stored) else f" (its version {number} of {len(stored)}, still among its values)"
            raise Invalid(
                f"state {old.name!r} cannot change its schema: {reason}. Stored: {_show(before)}{which}; declared: "
                f"{_show(after)}. Columns may be added (nullable), removed, reordered and widened; for anything else "
                "give the column or the state another name"
            )
    same = _shape(stored[-1]) == _shape(after)
    schemas = (*old.schemas[:-1], new.schemas[-1]) if same else (*old.schemas, new.schemas[-1])
    if len(schemas) > MAX_SCHEMA_VERSIONS:
        raise Invalid(
            f"state {old.name!r} has had {MAX_SCHEMA_VERSIONS} schemas, the most there can be: use another name"
        )
    return replace(old, schemas=schemas, user_key_schema=new.user_key_schema, ttl_ms=new.ttl_ms)


def _same_user_keys(old: StructType | None, new: StructType | None) -> bool:
    """Return True where stored user keys are user keys of the new schema too, each column what it was."""
    if old is None or new is None:
        return old is new
    if [_shape(field.dataType) for field in old.fields] != [_shape(field.dataType) for field in new.fields]:
        return False
    # Columns have no names in stored keys: two that change places would be taken for each other.
    return all(name == before or name not in old.names for before, name in zip(old.names, new.names, strict=True))


def _shape(data_type: DataType) -> str:
    text: str = data_type.simpleString()
    return text


def _show(schema: StructType | None) -> str:
    return "(none)" if schema is None else _shape(schema)


ParseDdl = Callable[[str], StructType]
"""Returns the schema of a DDL text; raises Invalid for text that is not DDL."""


class DeclaredSchemas:
    """Reads schemas, and remembers what each DDL text stands for.

    A task has no JVM and so no parser. What it unpickles knows the texts that the driver has read when ``init`` ran
    there. Not thread-safe.

    Args:
        parse: Spark's parser; None for none.
    """

    def __init__(self, parse: ParseDdl | None = None) -> None:
        self._parse = parse
        self._known: dict[str, StructType] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_parse": None, "_known": self._known}

    def schema(self, given: StructType | str, what: str) -> StructType:
        """Return the schema that a declaration means.

        Args:
            given: A ``StructType``, or DDL text.
            what: Names the state and which of its schemas it is, for messages.

        Raises:
            Invalid: Neither, text that Spark does not take, or text that the driver has not seen.
        """
        if isinstance(given, StructType):
            return given
        if not isinstance(given, str):
            raise Invalid(f"{what} cannot be used: it is {type(given).__name__}, not a StructType or a DDL string")
        if given not in self._known:
            if self._parse is None:
                raise Invalid(
                    f"{what} cannot be used: init() had no {brief(given)} when the query was defined. Declare every "
                    "state in init(), always with the same text, or give a StructType"
                )
            try:
                self._known[given] = self._parse(given)
            except Invalid as error:
                raise Invalid(f"{what} cannot be used: {error}") from None
        return self._known[given]
