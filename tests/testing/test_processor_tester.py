"""The kit for tests of processors: the same outcomes as the query's, without Spark."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid, UserCodeError
from dstl.state.group_state_processor import GroupStateProcessor
from dstl.testing.ddl import parse_ddl
from dstl.testing.processor_tester import ProcessorTester

ROOT = Path(__file__).parents[2]


class Visits(StatefulProcessor):
    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInitialState(self, key, initialState, timerValues):
        self.n.update((initialState.n,))

    def handleInputRows(self, key, rows, timerValues):
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(page=key[0], n=n)


class Session(StatefulProcessor):
    """A list and a map for each key, and a timer a minute after the last row."""

    def init(self, handle):
        self.handle = handle
        self.seen = handle.getListState("seen", "n long")
        self.last = handle.getMapState("last", "kind string", "n long")

    def handleInputRows(self, key, rows, timerValues):
        for row in rows:
            self.seen.appendValue((row.n,))
            self.last.updateValue((row.kind,), (row.n,))
        for at in list(self.handle.listTimers()):
            self.handle.deleteTimer(at)
        now = max(timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs())
        self.handle.registerTimer(now + 60_000)
        return iter(())

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        yield Row(user=key[0], total=sum(n for (n,) in self.seen.get()))
        self.seen.clear()
        self.last.clear()


def visits(processor=None, **more):
    more = {"key": "page string", "input": "page string", "output": "page string, n long", **more}
    return ProcessorTester(processor or Visits(), **more)


def sessions(time_mode="processingTime", processor=None, **more):
    columns = "user string, kind string, n long, at timestamp"
    more = {"key": "user string", "input": columns, "output": "user string, total long", **more}
    return ProcessorTester(processor or Session(), time_mode=time_mode, **more)


def test_state_goes_on_from_batch_to_batch():
    tester = visits()
    assert tester.process([("a",), Row(page="b"), {"page": "a"}]) == [Row(page="a", n=2), Row(page="b", n=1)]
    assert tester.process([("a",)]) == [Row(page="a", n=3)]
    assert tester.peek_value("n", "a") == (3,)
    assert tester.peek_value("n", ("b",)) == (1,)
    assert tester.peek_value("n", "c") is None


def test_a_test_may_set_state_and_initial_state():
    tester = visits()
    tester.update_value("n", "a", (40,))
    assert tester.process([("a",), ("a",)]) == [Row(page="a", n=42)]
    tester.delete("n", "a")
    found = tester.process([("a",)], initial_state=[("a", 6), ("c", 9)], initial_schema="page string, n long")
    assert found == [Row(page="a", n=7)]
    assert tester.peek_value("n", "c") == (9,)


def test_timers_fire_when_time_passes_and_only_then():
    tester = sessions()
    tester.processing_time_ms = 1_000
    assert tester.process([("ann", "x", 3, None), ("bob", "x", 5, None), ("ann", "y", 4, None)]) == []
    assert tester.peek_list("seen", "ann") == [(3,), (4,)]
    assert tester.peek_map("last", "ann") == {("x",): (3,), ("y",): (4,)}
    assert tester.peek_timers("ann") == [61_000]
    tester.update_list("seen", "bob", [(1,), (1,)])
    tester.update_map("last", "bob", {("z",): (2,)})
    assert tester.peek_map("last", "bob") == {("z",): (2,)}
    assert tester.set_processing_time(60_999) == []
    assert sorted(tester.set_processing_time(61_000)) == [Row(user="ann", total=7), Row(user="bob", total=2)]
    assert tester.peek_list("seen", "ann") == []
    assert tester.peek_timers("ann") == []
    with pytest.raises(Invalid, match="cannot go back"):
        tester.set_processing_time(0)


def test_rows_behind_the_watermark_are_late():
    tester = sessions("eventTime", event_time="at")
    at = [datetime(1970, 1, 1, 0, minute, tzinfo=UTC) for minute in range(5)]
    assert tester.process([("ann", "x", 1, at[1])]) == []
    assert tester.set_watermark(120_000) == [Row(user="ann", total=1)]
    assert tester.process([("ann", "x", 5, at[2]), ("ann", "x", 7, at[3])]) == []
    assert tester.late_rows == 1
    assert tester.peek_list("seen", "ann") == [(7,)]


@pytest.mark.parametrize("style", ["row", "pandas"])
def test_late_rows_are_an_output_of_their_own_where_the_processor_takes_them(style):
    class Latecomers(Session):
        def handleLateRows(self, key, rows, timerValues):
            amounts = [n for each in rows for n in (each["n"] if style == "pandas" else [each.n])]
            assert timerValues.getCurrentWatermarkInMs() == 120_000
            total = sum(amounts) + 1000 * len(list(self.seen.get()))
            yield pd.DataFrame({"user": [key[0]], "total": [total]}) if style == "pandas" else Row(key[0], total)

        def handleInputRows(self, key, rows, timerValues):
            for each in rows:
                self.seen.appendList([(int(n),) for n in (each["n"] if style == "pandas" else [each.n])])
            return iter(())

    tester = sessions("eventTime", Latecomers(), event_time="at", style=style)
    at = [datetime(1970, 1, 1, 0, minute, tzinfo=UTC) for minute in range(5)]
    tester.set_watermark(120_000)
    rows = [("ann", "x", 5, at[2]), ("ann", "x", 7, at[3]), ("ann", "x", 6, at[1]), ("bob", "x", 1, at[1])]
    found = tester.process(rows)
    found = list(found.itertuples(index=False, name=None)) if style == "pandas" else list(map(tuple, found))
    assert sorted(found) == [("ann", 1011), ("bob", 1)], "they come behind the rows that are on time"
    assert tester.late_rows == 3


def test_another_version_of_the_processor_takes_over_the_state_or_is_refused():
    class Wider(Visits):
        def init(self, handle):
            self.n = handle.getValueState("n", "n long, since string")

        def handleInputRows(self, key, rows, timerValues):
            yield Row(page=f"{key[0]} {self.n.get()}", n=len(list(rows)))

    class Narrower(Visits):
        def init(self, handle):
            self.n = handle.getValueState("n", "n string")

    tester = visits()
    tester.process([("a",)])
    tester.upgrade(Wider())
    assert tester.process([("a",)]) == [Row(page="a (1, None)", n=1)]
    with pytest.raises(UserCodeError, match="cannot change its schema"):
        tester.upgrade(Narrower())


def test_a_batch_that_fails_has_changed_nothing():
    class Picky(Visits):
        def handleInputRows(self, key, rows, timerValues):
            yield from super().handleInputRows(key, rows, timerValues)
            if key[0] == "bad":
                raise ValueError("no such page")

    tester = visits(Picky())
    with pytest.raises(UserCodeError, match="no such page"):
        tester.process([("a",), ("bad",)])
    assert tester.peek_value("n", "a") is None


def test_a_pandas_processor_takes_and_gives_frames():
    class Sums(StatefulProcessor):
        def init(self, handle):
            self.total = handle.getValueState("total", "n long")

        def handleInputRows(self, key, rows, timerValues):
            total = (self.total.get() or (0,))[0] + sum(int(frame["n"].sum()) for frame in rows)
            self.total.update((total,))
            yield pd.DataFrame({"page": [key[0]], "n": [total]})

    tester = visits(Sums(), input="page string, n long", style="pandas")
    tester.process(pd.DataFrame({"page": ["a", "b"], "n": [1, 2]}))
    found = tester.process(pd.DataFrame({"page": ["a", "a"], "n": [3, 4]}))
    assert found.to_dict("records") == [{"page": "a", "n": 8}]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: visits().process([("a", 1)]), "the test gave 2 values for the 1"),
        (lambda: visits().peek_list("n", "a"), "'n' is a ValueState"),
        (lambda: visits().peek_value("m", "a"), "no state 'm'; it has n"),
        (lambda: visits(key="pag string"), "no column 'pag'"),
        (lambda: visits(input="page strng"), "cannot be used"),
        (lambda: visits(input="page string, at timestamp", event_time="at"), "time mode eventTime alone"),
        (lambda: visits().peek_timers("a"), "no state '\\$timers'"),
    ],
)
def test_mistakes_of_a_test_are_named(wrong, why):
    with pytest.raises(Invalid, match=why):
        wrong()


@pytest.mark.parametrize("text", ["n", "n long,", "n nothing", "n array<", "a decimal(x)"])
def test_text_that_is_no_schema_is_refused(text):
    with pytest.raises(Invalid, match="give a StructType"):
        parse_ddl(text)


def test_no_java_is_started():
    code = (
        "from pyspark import SparkContext; from tests.testing.test_processor_tester import visits;"
        "visits().process([('a',)]); assert SparkContext._active_spark_context is SparkContext._gateway is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nulls_and_whole_numbers_of_a_functions_initial_state_come_over_as_they_are():
    def show(key, frames, state):
        yield pd.DataFrame({"page": [key[0]], "n": [int(state.hasTimedOut)]})

    processor = GroupStateProcessor(show, parse_ddl("n long, s string, x double"), "ProcessingTimeTimeout")
    tester = visits(processor, time_mode="processingTime", style="pandas")
    taken = [
        ("a", 2**53 + 1, None, None, -1),
        ("b", None, "b", math.nan, -1),
        ("c", None, "c", None, None),
        ("d", None, None, None, 1500),
    ]
    schema = "page string, n long, s string, x double, timeoutTimestamp long"
    tester.process([("e",)], initial_state=taken, initial_schema=schema)
    assert tester.peek_value("state", "a") == (2**53 + 1, None, None)
    assert repr(tester.peek_value("state", "b")) == "(None, 'b', nan)"
    assert tester.peek_value("state", "c") == (None, "c", None)
    assert tester.peek_value("state", "d") is None, "it has a timeout alone"
    assert list(tester.set_processing_time(1501).itertuples(index=False, name=None)) == [("d", 1)]
    with pytest.raises(UserCodeError, match="two rows of one key"):
        tester.process([("f",)], initial_state=[("f", 1, "", 0.0, -1), ("f", 2, "", 0.0, -1)], initial_schema=schema)


def test_a_function_with_one_state_and_timeouts_runs_as_in_spark_and_takes_its_state_over():
    calls = []

    def count(key, frames, state):
        calls.append((key, state.hasTimedOut, state.getOption))
        if state.hasTimedOut:
            (n,) = state.get
            state.remove()
        else:
            (n,) = state.getOption or (0,)
            n += sum(len(frame) for frame in frames)
            state.update((n,))
            if n < 10:
                state.setTimeoutDuration(1000)
        yield pd.DataFrame({"page": [key[0]], "n": [n]})

    processor = GroupStateProcessor(count, parse_ddl("n long"), "ProcessingTimeTimeout")
    tester = visits(processor, time_mode="processingTime", style="pandas")

    def seen(frame):
        return sorted(frame.itertuples(index=False, name=None))

    taken = [("c", 7, 1500), ("d", 1, -1)]
    schema = "page string, n long, timeoutTimestamp long"
    assert seen(tester.process([("a",), ("a",)], initial_state=taken, initial_schema=schema)) == [("a", 2)]
    assert tester.peek_value("state", "c") == (7,)
    assert seen(tester.set_processing_time(1000)) == [], "a timeout is over when the time is above it"
    tester.processing_time_ms = 1001
    assert seen(tester.process([("a",)])) == [("a", 3)], "rows put a timeout off"
    assert seen(tester.set_processing_time(1501)) == [("c", 7)]
    assert seen(tester.set_processing_time(2002)) == [("a", 3)]
    assert tester.peek_value("state", "a") is None
    assert seen(tester.process([("e",)] * 10)) == [("e", 10)]
    assert seen(tester.set_processing_time(9000)) == [], "a call that sets no timeout has none"
    assert calls[0] == (("a",), False, None)
    assert (("c",), True, (7,)) in calls
