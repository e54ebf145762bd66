"""The registry of one operator's states: their names, schemas and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pyspark.sql.types import StructType

from dstl.errors import CorruptData, Invalid, brief
from dstl.state.codec.stored_schema import schema_from_json, schema_to_json
from dstl.state.descriptor import MAX_STATES, StateDescriptor, StateKind, evolve

TIMERS = "$timers"
"""Name of the timers' state; a processor's own names may not begin with ``$``."""

_NOWHERE = -1
"""Number of a state that a task declares and the driver has not kept: ``init`` has to delete it again."""
_FORMAT = 1  # nothing has changed since the first


class StateRegistry:
    """Knows the states of one operator and gives new ones their numbers.

    Invariants:
        1. A number is given once: neither a removed state's nor a renamed one's comes back.
        2. The same stored registry and the same declarations in the same order give the same numbers, in every task.

    Args:
        key_schema: The grouping columns.
        known: What the checkpoint has.
        next_id: The first number that was never given.
        removed: Numbers of states that were deleted; the owner of the tables drops what they hold.
        settled: The driver has resolved all declarations already: a state that it did not find, and that ``init`` does
            not delete again, is an error; and a deletion was done by it.
    """

    def __init__(
        self,
        key_schema: StructType,
        known: Iterable[StateDescriptor] = (),
        *,
        next_id: int = 0,
        removed: Iterable[int] = (),
        settled: bool = False,
    ) -> None:
        self.key_schema = key_schema
        self._states: dict[str, StateDescriptor] = {d.name: d for d in known}
        self._declared: dict[str, StateDescriptor] = {}
        self._made_here: set[str] = set()
        self._next_id = max([next_id, *(d.state_id + 1 for d in self._states.values())])
        self.removed: set[int] = set(removed)
        self.settled = settled

    def __copy__(self) -> StateRegistry:
        """Return a registry that knows the same states, with nothing declared yet."""
        known = self._states.values()
        return StateRegistry(self.key_schema, known, next_id=self._next_id, removed=self.removed, settled=self.settled)

    @property
    def descriptors(self) -> tuple[StateDescriptor, ...]:
        """Every state that a checkpoint must remember, declared in this run or not, by number."""
        return tuple(sorted(self._states.values(), key=lambda d: d.state_id))

    @property
    def declared(self) -> tuple[StateDescriptor, ...]:
        """The states that this run's processor has declared, in the order of declaration."""
        return tuple(self._declared.values())

    def declare(
        self, name: str, kind: StateKind, schema: StructType, user_key: StructType | None = None, ttl_ms: int = 0
    ) -> StateDescriptor:
        """Return the descriptor of a state, new or known; declaring the same twice returns the same.

        Raises:
            Invalid: The schema cannot follow the stored one, or the name is taken by another kind of state. That the
                driver has not seen a state is said at the end of ``init``: see :meth:`end_declarations`.
        """
        self._check_schema(name, schema)
        wanted = StateDescriptor(
            name,
            kind,
            0,
            (_as_json(name, schema),),
            _as_json(name, user_key) if user_key is not None else "",
            ttl_ms,
        )
        known = self._states.get(name)
        if known is None:
            found = replace(wanted, state_id=self._new_id(name))
        else:
            found = evolve(known, wanted)
            if self.settled and found.schemas != known.schemas:
                raise Invalid(f"state {name!r} has another schema than when the query was defined")
        before = self._declared.get(name)
        if before is not None and before != found:
            raise Invalid(f"state {name!r} is declared twice, differently")
        self._declared[name] = found
        if found.state_id != _NOWHERE:
            self._states[name] = found
        return found

    def remove(self, name: str) -> None:
        """Forget a state and have its content dropped; nothing happens where there is none.

        A state that the same ``init`` has declared is as if it had not been; the number of one that no checkpoint knows
        is free again, so that an ``init`` which declares and deletes uses up no number with each restart.
        """
        self._declared.pop(name, None)
        if self.settled or name not in self._states:
            return
        state_id = self._states.pop(name).state_id
        if name not in self._made_here:
            self.removed.add(state_id)
        elif state_id == self._next_id - 1:
            self._next_id = state_id
        self._made_here.discard(name)

    def end_declarations(self) -> None:
        """Take the end of ``init``.

        Raises:
            Invalid: It has declared a state, and not deleted it again, that the driver has not seen when the query was
                defined.
        """
        for name, found in self._declared.items():
            if found.state_id == _NOWHERE:
                raise Invalid(
                    f"state {name!r} was not declared when the query was defined: declare every state in init(), always"
                )

    def to_wire(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, a socket or a task's closure."""
        return {
            "format": _FORMAT,
            "key": schema_to_json(self.key_schema),
            "next_id": self._next_id,
            "removed": sorted(self.removed),
            "states": [d.to_wire() for d in self.descriptors],
        }

    @staticmethod
    def from_wire(data: dict[str, Any], *, settled: bool = False) -> StateRegistry:
        """Rebuild a registry; the inverse of :meth:`to_wire`, with nothing declared yet.

        Raises:
            CorruptData: Not a registry, one of a newer version of DSTL, or a schema with other than plain SQL types.
        """
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']}")
            return StateRegistry(
                schema_from_json(data["key"], "the schema of an operator's key"),
                [StateDescriptor.from_wire(one) for one in data["states"]],
                next_id=int(data["next_id"]),
                removed=[int(one) for one in data["removed"]],
                settled=settled,
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptData(
                f"not a state registry: {brief(error)}; was it written by a newer version of DSTL?"
            ) from error

    def _new_id(self, name: str) -> int:
        if self.settled:
            return _NOWHERE
        if self._next_id >= MAX_STATES:
            raise Invalid(f"state {name!r} would be the {MAX_STATES}th of its operator, the most there can be")
        self._next_id += 1
        self._made_here.add(name)
        return self._next_id - 1

    @staticmethod
    def _check_schema(name: str, schema: StructType) -> None:
        if not isinstance(name, str) or not name:
            raise Invalid(f"a state's name is a string that is not empty, not {name!r}")
        if len(set(schema.names)) != len(schema.names):
            raise Invalid(f"state {name!r} has two columns of one name: {schema.simpleString()}")


def _as_json(name: str, schema: StructType) -> str:
    try:
        return schema_to_json(schema)
    except Invalid as error:
        raise Invalid(f"state {name!r}: {error}") from None
