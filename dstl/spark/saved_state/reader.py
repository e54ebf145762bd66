"""Reads the states of a checkpoint without running its query; safe beside a running job, for it only reads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pyspark.sql.types import LongType, StructField, StructType

from dstl.checkpoint.savepoint.creation import choose_checkpoint, key_group_chunks
from dstl.checkpoint.savepoint.format import SavepointObjects
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.errors import DstlError, Invalid
from dstl.runtime import Runtime
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import TimeToLive, ValueCodec
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.registry import StateRegistry
from dstl.state.timers import expiry_ms
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint, OperatorEntry
from handles.key_group import KeyGroup
from materializer.bases.table_directory import FileBases
from materializer.restore.restore import heap_tables
from materializer.tables import StateTable
from materializer.tables.base import StateEntry

Change = Literal["put", "delete", "clear"]
T = TypeVar("T")

_TIMER = StructType([StructField("expiry_ms", LongType(), nullable=False)])


@dataclass(frozen=True, slots=True)
class StateRow:
    """One entry of a state.

    Attributes:
        key: The grouping columns; none of a broadcast state, which is the same for all keys.
        user_key: Of a map or broadcast state; of a timer, when it is due in Unix milliseconds; None otherwise.
        value: The value's columns; none of a timer, nor where the row is gone.
        change: ``put``, ``delete``, or ``clear`` for all rows of the key; None where none is told.
    """

    key: tuple[Any, ...]
    user_key: tuple[Any, ...] | None
    value: tuple[Any, ...]
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class StateColumns:
    """The types of a state's rows.

    Attributes:
        key: The grouping columns; no column where rows have none.
        user_key: As in :class:`StateRow`; None where rows have none.
        value: The value's columns, as the newest schema has them.
        has_change: Rows tell of changes.
    """

    key: StructType
    user_key: StructType | None
    value: StructType
    has_change: bool = False


async def latest_watermark(store: ObjectStore, runtime: Runtime) -> int | None:
    """Return the watermark after the latest checkpoint, Unix milliseconds; None where none can be read, or has one."""
    try:
        return (await choose_checkpoint(store, runtime)).watermark_ms
    except DstlError:
        return None


async def find_savepoint(store: ObjectStore, runtime: Runtime, name: str) -> CompletedCheckpoint:
    """Return a savepoint of a location as the checkpoint that it is a copy of.

    Raises:
        MissingState: There is not one of that name.
        CorruptData: Its descriptor is damaged.
    """
    return savepoint_as_checkpoint(await SavepointObjects(store, runtime).descriptor(name))


def state_columns(checkpoint: CompletedCheckpoint, operator: str, state: str) -> StateColumns:
    """Return the types of a state's rows.

    Raises:
        Invalid: No such operator or state; names those that there are.
    """
    registry, descriptor = find_state(checkpoint, operator, state)
    if descriptor.kind is StateKind.TIMER:
        return StateColumns(registry.key_schema, _TIMER, StructType([]))
    if descriptor.kind is StateKind.BROADCAST:
        return StateColumns(StructType([]), descriptor.user_key, descriptor.value_schemas[-1])
    return StateColumns(registry.key_schema, descriptor.user_key, descriptor.value_schemas[-1])


async def read_state(
    store: ObjectStore, runtime: Runtime, checkpoint: CompletedCheckpoint, operator: str, state: str
) -> AsyncGenerator[StateRow]:
    """Yield every live entry of one state, key group by key group; the elements of a list in their order.

    Tables are rebuilt for some key groups at a time, so memory is bounded whatever the size of the state.

    Args:
        store: Where the checkpoint is.
        runtime: Clock, for retries and for entries whose time to live has passed.
        checkpoint: Which one.
        operator: The operator's uid.
        state: The state's name.

    Raises:
        Invalid: No such operator or state; names those that there are.
        CorruptData, MissingState: The checkpoint is damaged, or was subsumed by its running job meanwhile.
    """
    registry, descriptor = find_state(checkpoint, operator, state)
    decoder = RowDecoder(registry, descriptor, int(runtime.clock.wall() * 1000))
    async with FileBases(store, runtime) as files:
        for chunk in key_group_chunks(checkpoint):
            async with heap_tables(checkpoint, files, chunk, operator) as tables:
                for _, (key, user_key, value) in entries_of(tables.get(operator), descriptor.state_id):
                    if (row := decoder.row(key, user_key, value)) is not None:
                        yield row


def find_operator(checkpoint: CompletedCheckpoint, operator: str) -> OperatorEntry:
    """Return an operator of a checkpoint.

    Raises:
        Invalid: No such operator; names those that there are.
    """
    held = {entry.uid: entry for entry in checkpoint.operators}
    return _named(held, operator, f"checkpoint {checkpoint.checkpoint_id} has no operator")


def find_state(checkpoint: CompletedCheckpoint, operator: str, state: str) -> tuple[StateRegistry, StateDescriptor]:
    """Return an operator's states, and one of them.

    Raises:
        Invalid: No such operator or state; names those that there are.
    """
    entry = find_operator(checkpoint, operator)
    registry = StateRegistry.from_wire(entry.registry) if entry.registry else StateRegistry(StructType())
    return registry, state_named(registry, operator, state)


def state_named(registry: StateRegistry, operator: str, state: str) -> StateDescriptor:
    """Return one of an operator's states.

    Raises:
        Invalid: No such state; names those that there are.
    """
    held = {descriptor.name: descriptor for descriptor in registry.descriptors}
    return _named(held, state, f"operator {operator!r} has no state")


def _named(held: Mapping[str, T], name: str, has_none: str) -> T:
    if name not in held:
        raise Invalid(f"{has_none} {name!r}; it has {', '.join(map(repr, held)) or 'none'}")
    return held[name]


def entries_of(table: StateTable | None, state: int) -> Iterator[tuple[KeyGroup, StateEntry]]:
    """Yield one state's entries with their key groups, in the order of these, of keys and of user keys."""
    for group in table.key_groups() if table is not None else ():
        assert table is not None
        after: tuple[bytes, bytes] | None = None
        while page := table.scan(state, group, after=after):
            yield from ((group, entry) for entry in page)
            after = page[-1].key, page[-1].user_key


class RowDecoder:
    """Decodes the entries of one state.

    Args:
        registry: The operator's states.
        descriptor: The state.
        now_ms: The time, Unix milliseconds, by which values expire.
    """

    def __init__(self, registry: StateRegistry, descriptor: StateDescriptor, now_ms: int) -> None:
        self._kind = descriptor.kind
        self._keys = KeyCodec(registry.key_schema)
        self._values = ValueCodec(descriptor.name, descriptor.value_schemas)
        user_key = descriptor.user_key
        self._user_keys = KeyCodec(user_key, "the user key") if user_key is not None else None
        self._ttl = TimeToLive(descriptor.ttl_ms, now_ms)

    def row(self, key: bytes, user_key: bytes, value: bytes | None, change: Change | None = None) -> StateRow | None:
        """Return an entry as a row; None where its time to live has passed.

        Args:
            key: The entry's.
            user_key: The entry's; not looked at where all rows of the key are cleared.
            value: The entry's; None where it is gone.
            change: See :class:`StateRow`.
        """
        if self._kind is StateKind.TIMER:
            expiry = None if change == "clear" else (expiry_ms(user_key),)
            return StateRow(self._keys.decode(key), expiry, (), change)
        if value is not None and self._ttl.is_dead(value):
            return None
        return StateRow(
            () if self._kind is StateKind.BROADCAST else self._keys.decode(key),
            self._user_keys.decode(user_key) if self._user_keys is not None and change != "clear" else None,
            self._values.decode(value) if value is not None else (),
            change,
        )
