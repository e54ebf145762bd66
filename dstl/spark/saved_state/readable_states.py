"""The ways to read state: the part of :class:`~dstl.spark.StateBackend` that looks at a checkpoint, or at one key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dstl.checkpoint.service import CoordinatorService
from dstl.errors import Invalid
from dstl.runtime import IoLoop, Runtime, system_runtime
from dstl.spark.application.checkpoint_directory import CheckpointDirectory
from dstl.spark.query.placement import key_group_column, placing_columns
from dstl.spark.saved_state.frame import FrameRows, change_rows, shown_schema, state_rows
from dstl.spark.saved_state.reader import RowDecoder, StateRow, state_named
from dstl.state.broadcast_state import BROADCAST_KEY_GROUP
from dstl.state.codec.field_codec import bound_row
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.store.base import ObjectStore


class ReadableStates(ABC):
    """Reads the states of a query, beside it."""

    @abstractmethod
    def _reading(self) -> StateReading:
        """Return what reads; refuse a call to a backend that was closed."""

    def read_state(
        self,
        spark: SparkSession,
        name: str,
        checkpoint: int | Literal["latest"] = "latest",
        operator: str | None = None,
    ) -> DataFrame:
        """Return the live entries of one state as of a checkpoint; safe while the query runs, for it only reads.

        The driver reads the operator's state from the store and holds it in memory: it is for looking, not for
        processing terabytes. Entries whose time to live has passed are left out.

        Args:
            spark: The session to make the DataFrame in.
            name: The state's name; ``$timers`` for the timers.
            checkpoint: Its number (as listeners and the command line show it), or ``latest``.
            operator: The operator's name; needed where several have a state of this name.

        Returns:
            ``key`` (a struct of the grouping columns), ``user_key`` (a struct, of a map state) and ``value`` (a struct;
            a list state has a row for each element, in its order); of the timers ``key`` and ``expiry_ms``; of a
            broadcast state no ``key``. Intervals of months are their number.

        Raises:
            Invalid: No such state; names those that there are.
            MissingState: No such checkpoint.
            CorruptData: The checkpoint is damaged.
        """
        return self._reading().frame(spark, partial(state_rows, name=name, checkpoint=checkpoint, operator=operator))

    def read_changes(
        self,
        spark: SparkSession,
        name: str,
        after: int,
        checkpoint: int | Literal["latest"] = "latest",
        operator: str | None = None,
    ) -> DataFrame:
        """Return what has become of the rows of one state between two checkpoints, each row once.

        They are read from the log where it goes back so far: every row that was written, also with the value that it
        had. Else both checkpoints have to be retained, and are compared: every row that differs. The driver reads
        them from the store and holds them in memory. Rows whose time to live has passed are left out.

        Args:
            spark: The session to make the DataFrame in.
            name: The state's name; ``$timers`` for the timers.
            after: The checkpoint before the changes; 0 for the empty state before the first.
            checkpoint: The one behind them, or ``latest``.
            operator: The operator's name; needed where several have a state of this name.

        Returns:
            ``change`` and the columns of :meth:`read_state`: ``put``; ``delete``, with null as value; and ``clear``,
            with a key alone, where all elements of a list, entries of a map or timers of a key were removed before
            what was put then.

        Raises:
            Invalid: No such state (those that there are are named), or ``after`` is not before ``checkpoint``.
            MissingState: ``after`` is not retained, and the log does not go back to it: says what there is.
            CorruptData: A checkpoint is damaged.
        """
        rows = partial(change_rows, name=name, after=after, checkpoint=checkpoint, operator=operator)
        return self._reading().frame(spark, rows)

    def lookup(self, operator: str, state: str, key: Any, user_key: Any = None) -> Any:
        """Return one key's state of the running query, from the memory or disk of its TaskManager.

        It is the state after the last batch that Spark has committed and whose record is durable: never that of the
        running batch, nor one that a restart could take back. With ``spark.dstl.commit=with-next`` this is the batch
        before the one that Spark has reported last, until the next one begins. Two calls may see different batches.

        It is for looking at a key now and then: a call is one request to a TaskManager, beside the tasks' own, and a
        small plan of Spark's for the key's hash, 10 to 50 milliseconds together. It serves no traffic: write results
        to a database for that. Between batches the TaskManager looks through the whole change set of the last one.

        Args:
            operator: The operator's name.
            state: The state's name; ``$timers`` for the timers.
            key: The grouping columns' values in their order, or a dict or ``Row`` by their names; ``()`` for a
                broadcast state.
            user_key: Of a map or broadcast state the one entry that is wanted, given as a key is; by default all, which
                may be more than a lookup returns.

        Returns:
            A ``Row`` of the value's columns, None where there is none; so of one entry of a map. Of a list state a list
            of such rows; of a map or broadcast state a dict of such rows by rows of the user key's columns; of the
            timers their times, Unix milliseconds, ascending. Values whose time to live has passed are left out.

        Raises:
            Invalid: No such operator or state (those that there are are named), a key of another shape, a user key
                where the state has none, or a key with more than 64 MiB of state.
            Unavailable: The query is not running, no batch of it has begun since it was started, or the TaskManager is
                gone, restores or does not answer: look again later.
        """
        return self._reading().look_up(operator, state, key, user_key)


@dataclass(frozen=True, slots=True)
class StateReading:
    """Reads for one backend.

    Attributes:
        session: The backend's.
        store: Of its location.
        loop: Its coordinator's.
        service: Its coordinator.
        directory: The query's checkpoint directory.
        operators: Names of its operators; grows with them.
    """

    session: SparkSession
    store: ObjectStore
    loop: IoLoop
    service: CoordinatorService
    directory: CheckpointDirectory
    operators: list[str]

    def frame(
        self, spark: SparkSession, read: Callable[[ObjectStore, Runtime], Coroutine[Any, Any, FrameRows]]
    ) -> DataFrame:
        """Return what is read of the location, once every commit is there."""
        self.loop.run(self.directory.settle())
        schema, rows = self.loop.run(read(self.store, system_runtime()))
        return spark.createDataFrame(rows, schema)

    def look_up(self, operator: str, state: str, key: Any, user_key: Any) -> Any:
        """Return one key's state: see :meth:`ReadableStates.lookup`."""
        if operator not in self.operators:
            held = ", ".join(map(repr, self.operators))
            raise Invalid(f"there is no operator {operator!r}; {f'there are {held}' if held else 'none is defined'}")
        registry = StateRegistry.from_wire(dict(self.loop.run(self.service.lookups.registry(operator))))
        wanted = state_named(registry, operator, state)
        group, data = self._place(operator, registry, wanted, key)
        user_keys: tuple[bytes, ...] = ()
        if user_key is not None:
            if wanted.kind is StateKind.TIMER or wanted.user_key is None:
                raise Invalid(f"state {state!r} of operator {operator!r} is no map: look it up without user_key")
            user_keys = (KeyCodec(wanted.user_key, "the user key").encode(user_key),)
        found = self.loop.run(self.service.lookups.read(operator, wanted.state_id, group, data, user_keys))
        decoder = RowDecoder(registry, wanted, int(system_runtime().clock.wall() * 1000))
        entries = zip(found.user_keys, found.values, strict=True)
        decoded = _decoded(wanted, [row for entry in entries if (row := decoder.row(data, *entry)) is not None])
        return next(iter(decoded.values()), None) if user_keys else decoded

    def _place(
        self, operator: str, registry: StateRegistry, descriptor: StateDescriptor, key: Any
    ) -> tuple[int, bytes]:
        if descriptor.kind is StateKind.BROADCAST:
            if key != ():
                raise Invalid(f"state {descriptor.name!r} is the same for all keys: look up the key ()")
            return BROADCAST_KEY_GROUP, b""
        keys = KeyCodec(registry.key_schema)
        data = keys.encode(key)
        arrow_schema_of(registry.key_schema, f"the key of operator {operator!r}")
        # Spark computes it while it plans, for an Arrow table of this size is part of the plan.
        columns = pa.table(keys.decode_array(pa.array([data], pa.binary())), names=keys.names)
        group = key_group_column(placing_columns(registry), self.service.fleet.max_parallelism)
        (row,) = self.session.createDataFrame(columns, shown_schema(registry.key_schema)).select(group).collect()
        return row[0], data


def _decoded(descriptor: StateDescriptor, rows: Sequence[StateRow]) -> Any:
    """Return the rows of one key, ordered by user key, as users have them."""
    if descriptor.kind is StateKind.TIMER:
        return [row.user_key[0] for row in rows if row.user_key is not None]
    values = list(map(bound_row(descriptor.value_schemas[-1].names), (row.value for row in rows)))
    if descriptor.kind is StateKind.LIST:
        return values
    if descriptor.user_key is not None:
        user_keys = map(bound_row(descriptor.user_key.names), (row.user_key for row in rows))
        return dict(zip(user_keys, values, strict=True))
    return values[0] if values else None
