"""Watermarks through Spark, where event times fall as well as rise: batch by batch as Spark's own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark.listener import CheckpointReport

pytestmark = pytest.mark.usefixtures("rocksdb", "same_batches")

OUTPUT = "k string, what string, at long, n long, mark long"
WINDOW_S = 10


class Windows(StatefulProcessor):
    """Counts a key's rows by windows of ten seconds; says what it sees, and each window when it is over."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.counts = handle.getMapState("counts", "w long", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for i in sorted(row.i for row in rows):
            window = i // WINDOW_S * WINDOW_S
            before = self.counts.getValue((window,))[0] if self.counts.containsKey((window,)) else 0
            self.counts.updateValue((window,), (before + 1,))
            self.handle.registerTimer((window + WINDOW_S) * 1000)
            yield Row(k=key[0], what="row", at=i, n=before + 1, mark=timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        window = expiredTimerInfo.getExpiryTimeInMs() // 1000 - WINDOW_S
        n = self.counts.getValue((window,))[0]
        self.counts.removeKey((window,))
        yield Row(k=key[0], what="window", at=window, n=n, mark=timerValues.getCurrentWatermarkInMs())


def event_times(rng: random.Random, batches: int, start: int = 0) -> list[list[int]]:
    """By batch, seconds that rise, fall far behind, pause and come back."""
    now, made = 100 + start, []
    for _ in range(batches):
        kind = rng.choice(["rise", "rise", "leap", "late", "mixed", "none"])
        now += {"rise": rng.randrange(1, 4), "leap": rng.randrange(10, 60)}.get(kind, 0)
        times = [now - rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        behind = [max(1, now - rng.randrange(5, 90)) for _ in range(rng.randrange(1, 4))]
        made.append({"late": behind, "mixed": times + behind, "none": []}.get(kind, times))
    return made


def rows_of(times: list[list[int]], rng: random.Random) -> list[list[dict[str, Any]]]:
    return [[{"k": rng.choice("abc"), "i": i} for i in batch] for batch in times]


def timed(df: DataFrame) -> DataFrame:
    return df.withColumn("t", F.timestamp_seconds("i")).withWatermark("t", "2500 milliseconds")


def test_a_watermark_never_falls_and_late_rows_and_windows_are_those_of_spark(home: Home, seed: int) -> None:
    rng = random.Random(seed)
    source = home.stream("k string, i long")
    df = timed(source.read())
    what = (Windows(), OUTPUT, "append", "eventTime")
    native = df.groupBy("k").transformWithState(*what)
    # A straggler far behind, an empty batch, and the straggler again: each set the watermark back.
    runs = [[[1], [1000], [1001], [5], [], [7], [1002]], [[6], [1003], *event_times(rng, 5, 1000)]]
    want, ours = [], []
    late: dict[int, int] = {}
    for number, times in enumerate(runs):
        for rows in rows_of(times, rng):
            source.add(rows)
        want += source.collect(native, "native")
        # Each run is a driver of its own.
        with home.backend(parallelism=2) as backend:
            backend.add_listener(lambda report: late.update(dropped(report)))
            ours += source.collect(backend.groupBy(df, "k").transformWithState(*what), backend)
        assert sorted(ours) == sorted(want), f"run {number}"
    assert any(row[2] == "window" for row in want)
    assert sum(map(len, (batch for times in runs for batch in times))) == sum(late.values()) + sum(
        row[2] == "row" for row in want
    )
    assert late[3] == 1
    # The watermark is also that of an aggregation of Spark's.
    marks = aggregation_marks(source, df.groupBy(F.window("t", "10 seconds"), "k").count(), home.path)
    assert {row[0]: row[5] for row in ours if row[2] == "row"}.items() <= marks.items()


def dropped(report: Any) -> dict[int, int]:
    return {report.batch_id: sum(report.late_rows.values())} if isinstance(report, CheckpointReport) else {}


def aggregation_marks(source: Any, df: DataFrame, directory: Path) -> dict[int, int]:
    """Return the watermark of each batch of a query, in milliseconds."""
    query = df.writeStream.format("noop").outputMode("append").option("checkpointLocation", str(directory / "counted"))
    running = query.trigger(availableNow=True).start()
    running.awaitTermination()
    reported = {p.batchId: p.eventTime["watermark"] for p in running.recentProgress}
    spark = source.spark
    as_ms = F.expr("unix_millis(to_timestamp(mark))")
    frame = spark.createDataFrame(list(reported.items()), "batch long, mark string").select("batch", as_ms)
    return {row[0]: row[1] for row in frame.collect()}


def test_two_operators_go_by_the_slower_and_one_that_pauses_holds_it_as_in_spark(home: Home, seed: int) -> None:
    """Where a run begins both have rows: Spark forgets there what an operator has seen, and we do not."""
    rng = random.Random(seed)
    sources = [home.stream("k string, i long") for _ in range(2)]
    frames = [timed(source.read()) for source in sources]
    what = (Windows(), OUTPUT, "append", "eventTime")
    first, second = (frame.groupBy("k").transformWithState(*what) for frame in frames)
    want, ours = [], []
    for number in range(2):
        for at, source in enumerate(sources):
            times = [[500 * number + 90 + at], *event_times(rng, 5, 500 * number)]
            if at == number:
                times[2:5] = [[], [], [3]]
            if at and not number:
                times.insert(0, [])  # no row so far: the other one's do not count
            for rows in rows_of(times, rng):
                source.add(rows)
        want += sources[0].collect(first.union(second), "native")
        with home.backend(parallelism=2) as backend:
            one, other = (backend.groupBy(frame, "k").transformWithState(*what) for frame in frames)
            ours += sources[0].collect(one.union(other), backend)
        assert sorted(ours) == sorted(want), f"run {number}"
    assert any(row[2] == "window" for row in want)
