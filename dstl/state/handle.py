"""The handle that a processor's ``init`` gets: PySpark's ``StatefulProcessorHandle`` over DSTL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pyspark.sql.streaming import stateful_processor
from pyspark.sql.types import NullType, StructField, StructType

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import Invalid, brief
from dstl.state.broadcast_state import BroadcastScope, BroadcastState, BroadcastStream
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.schema_evolution import FORM
from dstl.state.codec.stored_schema import with_user_types
from dstl.state.codec.value_codec import TimeToLive, ValueCodec
from dstl.state.descriptor import DeclaredSchemas, DeclaredState, StateDescriptor, StateKind
from dstl.state.entry_state import EntryState, StateAccess
from dstl.state.key_window import KeyWindow
from dstl.state.list_state import ListState
from dstl.state.map_state import MapState
from dstl.state.overlay import Overlay
from dstl.state.registry import TIMERS, StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.timers import Timers
from dstl.state.value_state import (
    AggregateFunction,
    AggregatingState,
    PointState,
    ReduceFunction,
    ReducingState,
    ValueState,
)

S = TypeVar("S", bound=PointState | EntryState)

MAX_VALUE_BYTES = MAX_CHANGE_BYTES - (1 << 16)
"""No encoded value is longer: its key has to find room in the change, too."""


TimeModeName = Literal["none", "processingTime", "eventTime", "None", "ProcessingTime", "EventTime"]
"""What users write, for type checkers: any case is taken, and these are PySpark's."""


class TimeMode(StrEnum):
    """The time that a processor's timers follow. The values are PySpark's, in lower case."""

    NONE = "none"
    PROCESSING_TIME = "processingtime"
    EVENT_TIME = "eventtime"

    @staticmethod
    def parse(text: str) -> TimeMode:
        """Return the mode that PySpark would understand, whatever its case.

        Raises:
            Invalid: None of the three.
        """
        try:
            return TimeMode(text.lower())
        except (ValueError, AttributeError):
            raise Invalid(f"time mode {text!r} is not one of 'none', 'processingTime', 'eventTime'") from None


_TIMERS_OF = {
    mode: StructType([StructField("timer", NullType(), metadata={FORM: f"of {time}"})])
    for mode, time in ((TimeMode.PROCESSING_TIME, "processing time"), (TimeMode.EVENT_TIME, "event time"))
}
"""A timer has no value; its schema remembers which time it is of."""


class ProcessorHandle(stateful_processor.StatefulProcessorHandle):  # type: ignore[misc]
    """Declares states and registers timers; one for each task.

    Args:
        registry: Gives states their numbers.
        time_mode: Decides whether there are timers and times to live.
        task: Prior state, the batch's time and the number that orders list elements.
        overlay: Takes what the processor writes.
        schemas: Reads the schemas that ``init`` gives as text.
        streams: The operator's broadcast streams, each of which may have a state.
    """

    def __init__(
        self,
        registry: StateRegistry,
        time_mode: TimeMode,
        task: TaskInput,
        overlay: Overlay,
        schemas: DeclaredSchemas,
        streams: Sequence[BroadcastStream] = (),
    ) -> None:
        self._streams = {stream.name: stream for stream in streams}
        self.broadcast = BroadcastScope()
        self._registry = registry
        self._time_mode = time_mode
        self._task = task
        self._overlay = overlay
        self._read_schema = schemas.schema
        self._in_init = True
        self.window = KeyWindow()
        self._access = StateAccess(self.window, task.source, overlay)
        self.points: list[PointState] = []
        self.entries: list[EntryState] = []
        self._made: dict[str, Any] = {}
        self._schemas: dict[str, StructType] = {}
        self.timers: Timers | None = None
        if time_mode is not TimeMode.NONE:
            descriptor = registry.declare(TIMERS, StateKind.TIMER, _TIMERS_OF[time_mode])
            self.timers = Timers(descriptor, self._access)
            self.entries.append(self.timers)

    def getValueState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ValueState:
        """Return the state of this name: one tuple for each grouping key.

        Args:
            stateName: Unique within the processor.
            schema: A ``StructType`` or a DDL string.
            ttlDurationMs: Milliseconds after an update at which the value is gone; None for never. Processing time
                only.

        Raises:
            Invalid: Called outside ``init``; a schema that does not fit what is stored; a time to live in another
                time mode.
        """
        descriptor = self._declare(StateKind.VALUE, stateName, schema, None, ttlDurationMs)
        return self._once(descriptor, lambda declared: ValueState(declared, self.window))

    def getListState(
        self,
        stateName: str,
        schema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> ListState:
        """Return the state of this name: a list of tuples for each grouping key. Arguments and errors as above."""
        descriptor = self._declare(StateKind.LIST, stateName, schema, None, ttlDurationMs)
        return self._once(descriptor, lambda declared: ListState(declared, self._access, self._task.sequence))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Return the state of this name: a map of tuples to tuples for each grouping key; the rest as above."""
        what = f"the user key of state {stateName!r}"
        user_key = self._read_schema(userKeySchema, what)
        user_keys = KeyCodec(user_key, what)
        descriptor = self._declare(StateKind.MAP, stateName, valueSchema, user_key, ttlDurationMs)
        return self._once(descriptor, lambda declared: MapState(declared, self._access, user_keys))

    def getBroadcastState(
        self,
        stateName: str,
        userKeySchema: StructType | str | None = None,
        valueSchema: StructType | str | None = None,
    ) -> BroadcastState:
        """Return the state of a broadcast stream (Flink's ``BroadcastState``): one map for all grouping keys.

        Keyed rows and timers read it; ``handleBroadcastRows`` writes it, in every partition alike. The job keeps one
        copy of it. Behind ``init`` the name alone returns what ``init`` has declared.

        Args:
            stateName: Name of the stream in ``broadcast=``.
            userKeySchema: A ``StructType`` or a DDL string; by default the stream's first column.
            valueSchema: The same of the values; by default all of the stream's columns, so that a row of it is a value.

        Raises:
            Invalid: No such stream, or one that ``init`` has not declared a state for; a schema that does not fit what
                is stored.
        """
        known: BroadcastState | None = self._made.get(stateName)
        if known is not None and not self._in_init and isinstance(known, BroadcastState):
            return known
        stream = self._streams.get(stateName)
        if stream is None:
            held = ", ".join(map(repr, self._streams)) or "none"
            raise Invalid(
                f"there is no broadcast stream {brief(stateName)}; there is {held}: pass "
                f"broadcast={{{stateName!r}: stream}} to transformWithState"
            )
        what = f"the user key of state {stateName!r}"
        key = StructType(stream.schema.fields[:1]) if userKeySchema is None else self._read_schema(userKeySchema, what)
        user_keys = KeyCodec(key, what)
        value = stream.schema if valueSchema is None else valueSchema
        descriptor = self._declare(StateKind.BROADCAST, stateName, value, key, None)
        if known is None:
            source, read = self._task.source, self._task.read_broadcast
            known = BroadcastState(self._declared(descriptor), source, self.broadcast, user_keys, read)
            self._made[stateName] = known
        return known

    def getReducingState(
        self,
        stateName: str,
        schema: StructType | str,
        reduceFunction: ReduceFunction,
        ttlDurationMs: int | None = None,
    ) -> ReducingState:
        """Return a state that folds what is added into one tuple (Flink's ``ReducingState``).

        Args:
            stateName: Unique within the processor.
            schema: Of the added tuples and of the result.
            reduceFunction: Takes two tuples and returns one; associative.
            ttlDurationMs: As for value states.
        """
        descriptor = self._declare(StateKind.REDUCING, stateName, schema, None, ttlDurationMs)
        return self._once(descriptor, lambda declared: ReducingState(declared, self.window, reduceFunction))

    def getAggregatingState(
        self,
        stateName: str,
        schema: StructType | str,
        aggregateFunction: AggregateFunction,
        ttlDurationMs: int | None = None,
    ) -> AggregatingState:
        """Return a state that folds what is added into an accumulator (Flink's ``AggregatingState``).

        Args:
            stateName: Unique within the processor.
            schema: Of the accumulator, which is what is stored.
            aggregateFunction: Makes an accumulator, adds to it, and turns it into a result.
            ttlDurationMs: As for value states.
        """
        descriptor = self._declare(StateKind.AGGREGATING, stateName, schema, None, ttlDurationMs)
        return self._once(descriptor, lambda declared: AggregatingState(declared, self.window, aggregateFunction))

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Have ``handleExpiredTimer`` called for the current key once time reaches this (milliseconds since 1970).

        Raises:
            Invalid: Time mode none, or no current key.
        """
        self._usable_timers().register(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Take back a timer of the current key; nothing happens where there is none."""
        self._usable_timers().delete(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Return the current key's timers, earliest first."""
        return self._usable_timers().of_key()

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state of an earlier version of the processor, for all keys; nothing happens where there is none.

        It is done once, when the query starts. A state that the same ``init`` has declared before refuses every use
        from then on; declared after, it starts empty with each start of the query.

        Raises:
            Invalid: Called outside ``init``.
        """
        self._only_in_init("deleteIfExists", stateName)
        self._registry.remove(stateName)
        made: PointState | EntryState | None = self._made.pop(stateName, None)
        if made is not None:
            made.retire()
            self.points = [state for state in self.points if state is not made]
            self.entries = [state for state in self.entries if state is not made]

    def end_init(self) -> None:
        """Refuse declarations from now on.

        Raises:
            Invalid: A state was declared that the driver has not seen.
        """
        self._in_init = False
        self._registry.end_declarations()
        self.broadcast.open()

    def open_window(self, keys: list[bytes], key_groups: list[int]) -> None:
        """Take these keys in hand and fetch what the point states have for them: one call."""
        self.window.keys, self.window.key_groups, self.window.index = keys, key_groups, -1
        if self.points:
            ids = [state.descriptor.state_id for state in self.points]
            for state, values in zip(self.points, self._task.source.fetch_many(ids, key_groups, keys), strict=True):
                state.open_window(values, self._overlay)
        for entry_state in self.entries:
            entry_state.open_window()

    def close_window(self) -> None:
        """Give the window's writes to the overlay and let go of its keys."""
        if self.window.keys:
            for state in self.points:
                state.close_window(self._overlay)
            for entry_state in self.entries:
                entry_state.close_window()
        self.window.keys, self.window.key_groups, self.window.index = (), (), -1

    def _usable_timers(self) -> Timers:
        if self._time_mode is TimeMode.NONE:
            raise Invalid("timers need time mode processingTime or eventTime; this operator's is 'none'")
        if self.timers is None or self._in_init:
            raise Invalid("timers belong to a grouping key: use them in handleInputRows and its siblings, not in init")
        return self.timers

    def _once(self, descriptor: StateDescriptor, make: Callable[[DeclaredState], S]) -> S:
        """Return the state of a descriptor, made where ``init`` declares it for the first time."""
        known: S | None = self._made.get(descriptor.name)
        if known is None:
            known = self._made[descriptor.name] = make(self._declared(descriptor))
            if isinstance(known, PointState):
                self.points.append(known)
            else:
                self.entries.append(known)
        return known

    def _declared(self, descriptor: StateDescriptor) -> DeclaredState:
        now = self._task.processing_time_ms
        codec = ValueCodec(
            descriptor.name,
            [with_user_types(each, self._schemas[descriptor.name]) for each in descriptor.value_schemas],
            write_time_ms=now if descriptor.ttl_ms else None,
            max_bytes=MAX_VALUE_BYTES,
        )
        return DeclaredState(descriptor, codec, TimeToLive(descriptor.ttl_ms, now))

    def _declare(
        self, kind: StateKind, name: str, given: StructType | str, user_key: StructType | None, ttl_ms: int | None
    ) -> StateDescriptor:
        self._only_in_init("declared", name)
        if not isinstance(name, str) or name.startswith("$"):
            raise Invalid(f"a state's name is a string that does not begin with '$', not {name!r}")
        if ttl_ms is not None:
            if self._time_mode is not TimeMode.PROCESSING_TIME:
                raise Invalid(f"state {name!r} has a time to live: that needs time mode processingTime")
            if ttl_ms <= 0:
                raise Invalid(f"state {name!r} has a time to live of {ttl_ms} ms: it must be above 0")
        self._schemas[name] = schema = self._read_schema(given, f"the schema of state {name!r}")
        return self._registry.declare(name, kind, schema, user_key, ttl_ms or 0)

    def _only_in_init(self, what: str, name: str) -> None:
        if not self._in_init:
            raise Invalid(f"state {name!r} is {what} after init(): declare and delete states in init() only")
