"""Operators of a simulated query as careless, thorough and late users write them; each has what no other face has.

Totals of all keys in every batch, late rows beside the others, a state before the first batch, rows and states of the
kinds that fit, and attempts at others. Their model is the product's own runner, as that of the other faces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import time
from functools import partial
from typing import Any

import pandas as pd
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DoubleType, LongType, MapType, NullType, StringType, StructField, StructType, TimeType

from dstl.spark.operators.aggregation import AggregationDefinition
from dstl.spark.task_definition import TaskDefinition
from dstl.state.group_state_processor import GroupStateProcessor
from dstl.state.vectorised.aggregation import LATE, WINDOW_END, WINDOW_START, Aggregate, Aggregation
from dstl.state.vectorised.time_windows import TimeWindows
from tests.simulation.clocked_model import event_time_ms
from tests.simulation.face_input import (
    EVENT_TIME,
    FRONT,
    INITIAL,
    KEY,
    MOMENT,
    NUMBER,
    PAIR,
    ROW,
    TAGS,
    WEIGHT_STREAM,
    processed,
)
from tests.simulation.spark import RULE_GOES, RULES_GO

_LONG = StructType([StructField("n", LongType())])


def _totals(uid: str, input_schema: StructType, **place: Any) -> TaskDefinition:
    """All groups in each batch, by a number in place of the key."""
    rows = StructType([*input_schema.fields, NUMBER, TAGS])
    aggregates = {
        "key": Aggregate("first", "key"),
        "mean": Aggregate("mean", "price"),
        "tags": Aggregate("count_distinct", "tags"),
        "n": Aggregate("count"),
    }
    whole = Aggregation(
        mode="complete",
        aggregates=aggregates,
        key_schema=StructType([NUMBER]),
        others=("number",),
        input_schema=rows,
        output_schema=StructType(
            [NUMBER, *(StructField(n, each.accumulator(rows).result) for n, each in aggregates.items())]
        ),
    )
    return AggregationDefinition(
        uid=uid,
        by=("number",),
        placed_by=("key",),
        operator=whole,
        **place,
    )


def _with_late_rows(uid: str, input_schema: StructType, **place: Any) -> TaskDefinition:
    """Windows that do not overlap; what comes too late for its window is in the output as it came."""
    rows = StructType([*input_schema.fields, StructField(LATE, input_schema)])
    window = StructField("window", StructType([StructField("start", MOMENT), StructField("end", MOMENT)]))
    whole = Aggregation(
        mode="update",
        aggregates={"n": Aggregate("count")},
        key_schema=StructType([StructField(WINDOW_START, MOMENT), StructField(WINDOW_END, MOMENT), *KEY.fields]),
        others=("key",),
        window=1,
        windows=TimeWindows(2_000_000, 2_000_000),
        time="at",
        expires=WINDOW_END,
        input_schema=rows,
        output_schema=StructType([*KEY.fields, window, StructField("n", LongType()), StructField("late", ROW)]),
    )
    return AggregationDefinition(
        uid=uid,
        by=tuple(whole.key_schema.names),
        placed_by=("key",),
        event_time=EVENT_TIME,
        operator=whole,
        **place,
    )


class _Begun(StatefulProcessor):  # type: ignore[misc]
    """Counts on from what a key had before the query began."""

    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", _LONG)
        self._seen = handle.getListState("seen", _LONG)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._n.update((initialState.n,))
        self._seen.appendValue((initialState.n,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            (n,) = self._n.get() or (0,)
            self._n.update((n + 1,))
            self._seen.appendValue((row.operation,))
        yield Row(key=b"key-%d" % key[0], what=f"{self._n.get()} {[n for (n,) in self._seen.get()]}")


def count_group(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """Count a key's rows from what it had before, until it times out some seconds of event time later."""
    before = state.get[0] if state.exists else 0
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"key": [key[0]], "what": [f"timed out at {before}"]})
        return
    numbers = [int(number) for frame in frames for number in frame["operation"]]
    state.update((before + len(numbers),))
    if numbers:
        state.setTimeoutTimestamp(max(state.getCurrentWatermarkMs(), *map(event_time_ms, numbers)) + 2000)
    yield pd.DataFrame({"key": [key[0]], "what": [f"{before} and {numbers}"]})


_MOMENTS = StructType([StructField("at", TimeType()), StructField("nothing", NullType())])
_NAMED = StructType([StructField("label", StringType()), StructField("n", LongType(), nullable=False)])
_SHOWN = (
    StructField("at", MOMENT),
    StructField("n", LongType(), nullable=False),
    StructField("named", _NAMED),
    StructField("pair", PAIR),
    StructField("by", MapType(StringType(), _NAMED)),
    StructField("share", DoubleType()),
)


RAISES: ContextVar[bool] = ContextVar("dstl-simulated-user-error", default=False)
"""Whether what a careless user's code asks for is away."""
AWAY = "a service of the user's is away (simulated)"


class _Careless(StatefulProcessor):  # type: ignore[misc]
    """Gives states what they do not hold, goes on when they refuse it, and yields its rows in every form."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._n = handle.getValueState("n", _LONG)
        self._moment = handle.getValueState("moment", _MOMENTS)
        self._slots = handle.getMapState("slots", StructType(FRONT[1:]), _LONG)
        self._gone = handle.getValueState("gone", _LONG)
        handle.deleteIfExists("gone")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        if RAISES.get():
            raise LookupError(AWAY)
        taken = list(rows)
        (n,), refused = self._n.get() or (0,), 0
        for row in taken:
            refused += self._refused(row.operation)
            n += 1
            self._n.update((n,))
            self._moment.update((time(row.operation % 24, 5, 7), None))
            self._slots.updateValue((row.operation % 3,), (n,))
            self._handle.registerTimer(event_time_ms(row.operation) + 700)
        latest = max(taken, key=lambda row: row.at)
        named = Row(n=refused, label=repr(self._moment.get()))
        by = {f"{slot}": (None, value) for (slot,), (value,) in sorted(self._slots.iterator())}
        yield Row(key=key[0], at=latest.at, n=n, named=named, pair=latest.pair, by=by, share=None)
        yield Row(n=n, share=n / 4, key=key[0])
        yield {"key": key[0], "n": n, "named": {"n": refused}, "by": None}
        yield key[0], latest.at, n, ("a label", n), (None, n), {}, 0.5

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        self._slots.removeKey((at % 3,))
        yield key[0], None, at, None, None, None, None

    def _refused(self, number: int) -> int:
        """Try what cannot be; return how much of it was refused."""
        before, done = self._n.get(), 0
        attempts = (
            partial(self._n.update, (f"{number}",)),
            partial(self._moment.update, (number, None)),
            partial(self._moment.update, (None, number)),
            partial(self._slots.updateValue, (None, number, number), (number,)),
            partial(self._gone.update, (number,)),
            self._gone.get,
        )
        for attempt in attempts:
            with suppress(PySparkRuntimeError):
                attempt()
                done += 1
        return len(attempts) - done if self._n.get() == before else -1


class _Ruled(StatefulProcessor):  # type: ignore[misc]
    """Weighs rows by what every partition was told, forgets some of that or all, and shows it when a timer fires."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._weights = handle.getBroadcastState(WEIGHT_STREAM.name)
        self._n = handle.getValueState("n", _LONG)

    def handleBroadcastRows(self, name: str, rows: Iterator[Any]) -> None:
        for row in rows:
            place = (row.weight,)
            if row.number in RULES_GO:
                self._weights.clear()
            elif row.number in RULE_GOES:
                self._weights.removeKey(place)
            elif not self._weights.containsKey(place) or row.number % 3:
                self._weights.updateValue(place, row)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        before = self._n.get()
        for row in rows:
            self._n.update((row.operation,))
            self._handle.registerTimer(event_time_ms(row.operation) + 900)
            with suppress(PySparkRuntimeError):
                self._weights.updateValue((0.5,), (0.5, None, row.operation))
        yield Row(key=key[0], what=f"{before} {self._told()} {self._weights.getValue((float('nan'),))}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        weights = self._handle.getBroadcastState(WEIGHT_STREAM.name)
        yield Row(key=key[0], what=f"at {expiredTimerInfo.getExpiryTimeInMs()} {weights.exists()} {self._told()}")

    def _told(self) -> str:
        return repr(sorted(self._weights.values(), key=repr))


RULED = "ruled"
"""The one with a broadcast stream."""
USER_FACES: Mapping[str, Callable[..., TaskDefinition]] = {
    "totals": _totals,
    "late-rows": _with_late_rows,
    "begun": processed(_Begun, "row", "none", by=NUMBER, has_initial_state=True),
    "begun-groups": processed(
        lambda: GroupStateProcessor(count_group, StructType(INITIAL.fields[:1]), "EventTimeTimeout"),
        has_initial_state=True,
    ),
    RULED: processed(_Ruled, "row", streams=(WEIGHT_STREAM,)),
    "careless": processed(_Careless, "row", shown=_SHOWN, emitted_time="at"),
}
"""What defines each of them, by uid."""
