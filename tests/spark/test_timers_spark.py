"""Timers and times to live through Spark: as Spark's own, and without input."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from home import Home
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark.query.ticks import interval_ms
from worlds.waiting import wait_until

INPUT = "k string, i long, op string, n long, t timestamp"
OUTPUT = "k string, i long, what string"
START_S = 1_700_000_000


class Alarms(StatefulProcessor):
    """Registers, deletes and lists timers as its rows say; says what it sees, and what fires."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.fired = handle.getListState("fired", "at long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.i):
            seen: Any = None
            if row.op == "register":
                self.handle.registerTimer(row.n)
            elif row.op == "delete":
                self.handle.deleteTimer(row.n)
            else:
                seen = (sorted(self.handle.listTimers()), [one[0] for one in self.fired.get()])
            yield Row(k=key[0], i=row.i, what=f"{row.op} {seen} {self.now(timerValues)}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        self.fired.appendValue((at,))
        yield Row(k=key[0], i=at, what=f"fired {self.now(timerValues)}")

    def now(self, times: Any) -> Any:
        return int(times.getCurrentWatermarkInMs())


class PandasAlarms(Alarms):
    """In pandas style, with timers from an initial state."""

    def handleInitialState(self, key: Any, initialState: pd.DataFrame, timerValues: Any) -> None:
        for at in initialState["at"]:
            self.handle.registerTimer(int(at))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        taken = (Row(**row) for frame in rows for row in frame.to_dict("records"))
        yield pd.DataFrame([row.asDict() for row in super().handleInputRows(key, taken, timerValues)])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        fired = super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
        yield pd.DataFrame([row.asDict() for row in fired])


class Reminders(Alarms):
    """In processing time, with states that live for a millisecond or for an hour."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.short = handle.getValueState("short", "n long", 1)
        self.long = handle.getMapState("long", "n long", "x long", 3_600_000)
        self.brief = handle.getListState("brief", "n long", 1)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        found = (self.short.get(), sorted(map(repr, self.long.keys())), list(self.brief.get()))
        yield Row(k=key[0], i=-1, what=repr(found))
        taken = list(rows)
        n = max(row.i for row in taken)
        self.short.update((n,))
        self.long.updateValue((n,), (n,))
        self.brief.appendValue((n,))
        yield Row(k=key[0], i=-2, what=repr((self.short.get(), len(list(self.brief.get())))))
        yield from super().handleInputRows(key, iter(taken), timerValues)

    def now(self, times: Any) -> Any:
        return abs(times.getCurrentProcessingTimeInMs() / 1000 - time.time()) < 600, times.getCurrentWatermarkInMs()


def event_time_batches(rng: random.Random) -> list[list[dict[str, Any]]]:
    """Rows up to 13 seconds behind the newest of their batch, the delay being two: many are late."""
    batches = []
    for batch in range(4):
        rows = []
        for i in range(60):
            at = START_S + batch * 5 - rng.randrange(14)
            op = rng.choice(["register", "register", "delete", "list"])
            n = (START_S + batch * 5 + rng.randrange(-6, 12)) * 1000
            rows.append({"k": rng.choice("abcde"), "i": batch * 100 + i, "op": op, "n": n, "t": at})
        rows.append({"k": None, "i": batch * 100 + 99, "op": "list", "n": 0, "t": None})
        batches.append(rows)
    # Nothing is due after these, so that Spark's last batch without data has nothing left to fire.
    batches += [[{"k": "z", "i": 900 + i, "op": "list", "n": 0, "t": START_S + 1000 + i}] for i in range(2)]
    return batches


@pytest.mark.drawn(1, group="as in Spark")
@pytest.mark.parametrize("style", ["row", "pandas"])
@pytest.mark.usefixtures("rocksdb")
def test_event_time_timers_and_late_rows_are_as_in_spark(home: Home, style: str, seed: int) -> None:
    source = home.stream(INPUT.replace("timestamp", "long"))
    for rows in event_time_batches(random.Random(seed)):
        source.add(rows)
    df = source.read().withColumn("t", F.timestamp_seconds("t")).withWatermark("t", "2 seconds")
    method, processor, state = "transformWithState", Alarms(), None
    if style == "pandas":
        method, processor = "transformWithStateInPandas", PandasAlarms()
        given = [(k, (START_S + i) * 1000) for i, k in enumerate("abxxb")]
        state = home.spark.createDataFrame(given, "k string, at long").groupBy("k")
    what = (processor, OUTPUT, "append", "eventTime", state)
    want = source.collect(getattr(df.groupBy("k"), method)(*what), "native")
    with home.backend(parallelism=3) as backend:
        assert source.collect(getattr(backend.groupBy(df, "k"), method)(*what), backend) == want
        assert {row.key.k for row in backend.read_state(home.spark, "$timers").collect()} == set()
    assert any(row[3].startswith("fired") for row in want)
    assert style == "row" or any(row[1] == "x" for row in want)


class Chained(Alarms):
    """A timer registers others, deletes others, and registers itself again."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        taken = sorted(row.i for row in rows)
        for i in taken:
            self.handle.registerTimer((START_S + i) * 1000)
        yield Row(k=key[0], i=-1, what=f"{taken} {sorted(self.handle.listTimers())} {self.now(timerValues)}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        n = len(list(self.fired.get())) + 1
        yield from super().handleExpiredTimer(key, timerValues, expiredTimerInfo)
        yield Row(k=key[0], i=n, what=f"{key!r} {at} {sorted(self.handle.listTimers())}")
        if n < 9 and n % 2:
            self.handle.registerTimer(at + 500)
        if n % 3 == 0:
            self.handle.deleteTimer(at + 1000)
        if n % 5 == 0:
            self.handle.registerTimer(at)


@pytest.mark.drawn(1, group="as in Spark")
@pytest.mark.usefixtures("rocksdb")
def test_timers_of_timers_fire_as_in_spark(home: Home) -> None:
    source = home.stream("k string, i long")
    last = [1000, 1001, 1002, 1003]  # what fires is due long before: Spark's last batch without data has nothing left
    for seconds in ([1, 2, 3, 5], [3, 11, 24, 25], [6, 9, 11, 24, 26], [3, 11, 24, 31], *([i] for i in last)):
        source.add([{"k": "z" if i in last else k, "i": i} for i in seconds for k in ("a", None)])
    df = source.read().withColumn("t", F.timestamp_seconds(F.col("i") + START_S)).withWatermark("t", "1 second")
    what = (Chained(), OUTPUT, "append", "eventTime")
    want = source.collect(df.groupBy("k").transformWithState(*what), "native")
    with home.backend(parallelism=3) as backend:
        ours = source.collect(backend.groupBy(df, "k").transformWithState(*what), backend)
    # Spark's batch without data at the end fires the timers of "z".
    assert [row for row in ours if row[1] != "z"] == [row for row in want if row[1] != "z"]
    assert any(row[2] == 9 for row in want)


class Passing(StatefulProcessor):
    """Says which rows it sees, and when."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(k=key[0], i=row.i, what=str(timerValues.getCurrentWatermarkInMs() // 1000 - START_S))


@pytest.mark.drawn(1, group="as in Spark")
@pytest.mark.usefixtures("rocksdb")
def test_rows_in_a_window_that_spark_takes_are_taken(home: Home) -> None:
    source = home.stream("k string, i long")
    for seconds in ([1, 2, 25], [3, 11, 24, 26], [3, 11, 24, 26, 45], [3, 24, 44], [3, 26, 38, 44]):
        source.add([{"k": "a", "i": i} for i in seconds])
    df = source.read().withColumn("t", F.timestamp_seconds(F.col("i") + START_S)).withWatermark("t", "1 second")
    df = df.select("k", "i", F.window("t", "10 seconds").alias("w"))
    what = (Passing(), OUTPUT, "append", "eventTime")
    want = {row[:3]: int(row[3]) for row in source.collect(df.groupBy("k").transformWithState(*what), "native")}
    with home.backend(parallelism=2) as backend:
        rows = source.collect(backend.groupBy(df, "k").transformWithState(*what), backend)
    ours = {row[:3]: int(row[3]) for row in rows}
    assert want.keys() <= ours.keys()
    assert (4, "a", 3) not in ours
    # All that is known of a row's time is its window: the watermark stays behind by up to its length.
    assert all(mark - 10 <= ours[row] <= mark for row, mark in want.items() if mark > 0)


@pytest.mark.drawn(1, group="as in Spark")
@pytest.mark.usefixtures("rocksdb")
def test_processing_time_timers_and_times_to_live_are_as_in_spark(home: Home, rng: random.Random) -> None:
    source = home.stream(INPUT)
    far = 9_000_000_000_000
    for batch in range(3):
        rows = []
        for i in range(40):
            n = rng.choice([rng.randrange(1, 9) * 1000, far + rng.randrange(4)])
            op = rng.choice(["register", "delete", "list"])
            at = f"2024-01-01 00:00:{batch * 5 + rng.randrange(10):02d}"
            rows.append({"k": rng.choice("abcd"), "i": batch * 100 + i, "op": op, "n": n, "t": at})
        source.add(rows)
    # A watermark is shown and follows the input, but here nothing is late.
    df = source.read().withWatermark("t", "2 seconds")
    want = source.collect(
        df.groupBy("k").transformWithState(Reminders(), OUTPUT, "append", "processingTime"), "native", batches=3
    )
    with home.backend(parallelism=3) as backend:
        ours = backend.groupBy(df, "k").transformWithState(Reminders(), OUTPUT, "append", "processingTime")
        assert source.collect(ours, backend) == want
        assert {row.expiry_ms for row in backend.read_state(home.spark, "$timers").collect()} <= set(
            range(far, far + 4)
        )


class Soon(StatefulProcessor):
    """Reports a key once, half a second after its row."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            assert row.op is not None, "a tick or a mark has come through"
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 500)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], i=0, what="fired")


def test_ticks_let_timers_fire_without_input_each_once_in_a_union_too(home: Home) -> None:
    # The other branch has tasks in the first batch and none later: it shifts the operator's tasks by another distance
    # in each batch, and a task without rows that went by an earlier one would fire another partition's timers.
    source = home.stream(INPUT)
    source.add([{"k": f"k{i}", "i": 0, "op": "x", "n": 0} for i in range(40)])
    got: list[str] = []
    with home.backend(parallelism=5) as backend:
        df = source.read()
        timed = backend.groupBy(df, "k").transformWithState(Soon(), OUTPUT, "append", "processingTime", tick="1 second")
        both = df.select("k", "i", F.lit("row").alias("what")).union(timed)
        query = (
            both.writeStream.foreachBatch(lambda out, _: got.extend(f"{r.k} {r.what}" for r in out.collect()))
            .option("checkpointLocation", backend.checkpoint_location)
            .start()
        )
        wait_until(lambda: len(got) >= 80 or not query.isActive, "every timer")
        time.sleep(1.5)  # another tick: nothing fires again
        sources = {each.description for progress in query.recentProgress for each in progress.sources}
        query.stop()
    assert "dstl_ticks" in sources
    assert sorted(got) == sorted([f"k{i} row" for i in range(40)] + [f"k{i} fired" for i in range(40)])


def test_what_a_tick_may_be(home: Home) -> None:
    assert [
        interval_ms(text, "operator 'x'") for text in ("10 seconds", "1 Second", "500 ms", "2min", "1 hour", "3 s")
    ] == [
        10_000,
        1000,
        500,
        120_000,
        3_600_000,
        3000,
    ]
    for wrong in ("", "seconds", "0 seconds", "-1 second", "5 m", "1 fortnight", 5):
        with pytest.raises(Invalid):
            interval_ms(wrong, "operator 'x'")  # type: ignore[arg-type]
    with home.backend() as backend, pytest.raises(Invalid, match="no timers"):
        backend.groupBy(home.stream(INPUT).read(), "k").transformWithState(
            Soon(), OUTPUT, "append", "none", tick="1 second"
        )
