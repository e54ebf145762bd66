"""A processor with every kind of state and timers, and the model that says what each of its batches must do.

The model runs the same processor over dictionaries: what a task reads, writes and yields in one batch follows from the
state before it, the batch's rows, its time and its watermarks. So lost, repeated or reordered elements, a timer that
fires twice or never, a value that outlives its time and a batch that runs again at another time are seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StructField, StructType

from tests.simulation.spark import QueryLogs

DELAY_MS = 1000
"""How far the watermark stays behind the latest event time."""
SPARKS_DELAY_MS = 1700
"""How far Spark's own does, which no operator of ours makes."""
CLOCK_HOLD_MS = 300
"""How long time stands still when a clock is behind: for some batches."""
TTL_MS = 3000
"""How long a slot of a processing-time operator lives: some batches."""
LOOK = -1
"""An operation that changes nothing: it shows the key's state."""

_LONG = StructType([StructField("n", LongType())])
_EVENT_TIMES_FROM = 1_000_000


def event_time_ms(operation: int) -> int:
    """Return the event time of a record of the source: some come out of order, and some far too late."""
    scattered = (operation * 2654435761 >> 7) % 4000
    return _EVENT_TIMES_FROM + operation * 400 + scattered - (20_000 if operation % 13 == 12 else 0)


def sparks_watermark_ms(logs: QueryLogs, batch: int, run: str = "") -> int:
    """Return Spark's own watermark of a batch: behind the latest event time of all rows before it."""
    before = range(logs.range_of(batch, run).start) if batch > 0 else ()
    return max(0, max(map(event_time_ms, before), default=0) - SPARKS_DELAY_MS)


class Recorder(StatefulProcessor):  # type: ignore[misc]
    """Does with each key's state what the numbers of its operations say, and yields what it sees.

    Args:
        of_event_time: Its timers are in event time, not in processing time.
    """

    def __init__(self, of_event_time: bool) -> None:
        self._of_event_time = of_event_time

    def init(self, handle: Any) -> None:
        """Declare one state of each kind."""
        self._handle = handle
        self._count = handle.getValueState("count", _LONG)
        self._seen = handle.getListState("seen", _LONG)
        self._slots = handle.getMapState("slots", _LONG, _LONG, *(() if self._of_event_time else (TTL_MS,)))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Show the key's state, and change it."""
        yield self._shown(key)
        for row in rows:
            if row.operation != LOOK:
                self._take(row.operation, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Show the key's state when a timer fires, and change it."""
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(key=key[0], what=f"fired at {at}")
        yield self._shown(key)
        self._seen.appendValue((-at,))
        self._slots.updateValue((9,), (at,))
        if at % 5 == 0:
            self._handle.registerTimer(at + 2500)

    def _take(self, operation: int, times: Any) -> None:
        (count,) = self._count.get() or (0,)
        if operation % 11 == 10:
            self._count.clear()
        else:
            self._count.update((count + 1,))
        if operation % 7 == 6:
            self._seen.clear()
        elif operation % 7 == 5:
            self._seen.put([(operation,), (operation,)])
        else:
            self._seen.appendValue((operation,))
        self._slots.updateValue((operation % 5,), (operation,))
        if operation % 6 == 5:
            self._slots.removeKey(((operation + 1) % 5,))
        if operation % 17 == 16:
            self._slots.clear()
        now = event_time_ms(operation) if self._of_event_time else times.getCurrentProcessingTimeInMs()
        if operation % 3 != 2:
            self._handle.registerTimer(now + operation % 4 * 1500)
        elif (first := next(iter(self._handle.listTimers()), None)) is not None:
            self._handle.deleteTimer(first)

    def _shown(self, key: Any) -> Row:
        count = self._count.get()
        seen = [one for (one,) in self._seen.get()]
        slots = sorted((slot, operation) for (slot,), (operation,) in self._slots.iterator())
        timers = list(self._handle.listTimers())
        return Row(key=key[0], what=f"{count and tuple(count)} {seen} {slots} {timers}")


@dataclass
class KeyState:
    """The state of one key.

    Attributes:
        slots: Each has a value and when it was written, in milliseconds.
        expired: Slots that had expired at the time of a batch: they may be swept at any time since, and then stay away
            where time goes back.
    """

    count: int | None = None
    seen: tuple[int, ...] = ()
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    timers: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)

    def copy(self) -> KeyState:
        """Return a state that changes by itself."""
        return KeyState(self.count, self.seen, dict(self.slots), set(self.timers), set(self.expired))

    def swept(self) -> Iterator[KeyState]:
        """Yield what a sweep of some of the expired slots leaves."""
        for count in range(1, len(self.expired) + 1):
            for gone in combinations(sorted(self.expired), count):
                left = self.copy()
                for slot in gone:
                    del left.slots[slot]
                left.expired.difference_update(gone)
                yield left


States = Mapping[bytes, KeyState]


@dataclass(frozen=True)
class Batch:
    """One batch beside its rows.

    Attributes:
        time_ms: Its processing time, Unix milliseconds.
        watermark_ms: Timers up to it are due.
        late_watermark_ms: Rows up to it are late.
    """

    time_ms: int
    watermark_ms: int
    late_watermark_ms: int


def run_model(
    of_event_time: bool, states: States, rows: Mapping[bytes, Sequence[int]], batch: Batch
) -> tuple[States, dict[bytes, list[str]]]:
    """Return the states after a batch, and what it must yield for each key, in order."""
    after = {key: state.copy() for key, state in states.items()}
    output: dict[bytes, list[str]] = {}
    handle, times = _Handle(batch.time_ms), _Times(batch)
    processor = Recorder(of_event_time)
    processor.init(handle)
    for key, operations in rows.items():
        late = batch.late_watermark_ms if of_event_time else 0
        taken = [Row(operation=each) for each in operations if each == LOOK or event_time_ms(each) > late]
        if taken:
            handle.key = after.setdefault(key, KeyState())
            for row in processor.handleInputRows((key,), iter(taken), times):
                output.setdefault(key, []).append(row.what)
    until = batch.watermark_ms if of_event_time else batch.time_ms
    due = sorted((at, key) for key, state in after.items() for at in state.timers if at <= until)
    for at, key in due:
        handle.key = after[key]
        for row in processor.handleExpiredTimer((key,), times, _Expired(at)):
            output.setdefault(key, []).append(row.what)
        handle.key.timers.discard(at)
    for state in after.values():
        state.expired.update(slot for slot, (_, at) in state.slots.items() if at + TTL_MS <= batch.time_ms)
    return after, output


class _Times:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def getCurrentProcessingTimeInMs(self) -> int:
        return self._batch.time_ms


@dataclass
class _Expired:
    at: int

    def getExpiryTimeInMs(self) -> int:
        return self.at


class _Handle:
    """The handle of a processor, over the dictionaries of one key at a time."""

    def __init__(self, now_ms: int) -> None:
        self.key = KeyState()
        self.now_ms = now_ms

    def getValueState(self, name: str, schema: StructType) -> _Value:
        return _Value(self)

    def getListState(self, name: str, schema: StructType) -> _List:
        return _List(self)

    def getMapState(self, name: str, key: StructType, schema: StructType, ttl_ms: int | None = None) -> _Map:
        return _Map(self, ttl_ms)

    def registerTimer(self, at: int) -> None:
        self.key.timers.add(at)

    def deleteTimer(self, at: int) -> None:
        self.key.timers.discard(at)

    def listTimers(self) -> list[int]:
        return sorted(self.key.timers)


class _State:
    def __init__(self, handle: _Handle) -> None:
        self._handle = handle

    @property
    def _key(self) -> KeyState:
        return self._handle.key


class _Value(_State):
    def get(self) -> tuple[int] | None:
        return None if self._key.count is None else (self._key.count,)

    def update(self, value: tuple[int]) -> None:
        (self._key.count,) = value

    def clear(self) -> None:
        self._key.count = None


class _List(_State):
    def get(self) -> list[tuple[int]]:
        return [(each,) for each in self._key.seen]

    def appendValue(self, value: tuple[int]) -> None:
        self._key.seen += value

    def put(self, values: list[tuple[int]]) -> None:
        self._key.seen = tuple(each for (each,) in values)

    def clear(self) -> None:
        self._key.seen = ()


class _Map(_State):
    def __init__(self, handle: _Handle, ttl_ms: int | None) -> None:
        super().__init__(handle)
        self._ttl_ms = ttl_ms

    def iterator(self) -> list[tuple[tuple[int], tuple[int]]]:
        since = self._handle.now_ms - self._ttl_ms if self._ttl_ms else -1
        return [((slot,), (value,)) for slot, (value, written) in self._key.slots.items() if written > since]

    def updateValue(self, slot: tuple[int], value: tuple[int]) -> None:
        self._key.slots[slot[0]] = value[0], self._handle.now_ms
        self._key.expired.discard(slot[0])

    def removeKey(self, slot: tuple[int]) -> None:
        self._key.slots.pop(slot[0], None)
        self._key.expired.discard(slot[0])

    def clear(self) -> None:
        self._key.slots.clear()
        self._key.expired.clear()
