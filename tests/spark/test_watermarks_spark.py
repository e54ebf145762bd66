"""The watermark of two operators through Spark, where event times fall as well as rise: batch by batch as Spark's own.

That of one, late rows and restarts are in ``test_windows_spark.py`` and ``test_timers_spark.py``.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

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


def test_two_operators_go_by_the_slower_and_one_that_pauses_holds_it_as_in_spark(
    home: Home, rng: random.Random
) -> None:
    """Where a run begins both have rows: Spark forgets there what an operator has seen, and we do not."""
    sources = [home.stream("k string, i long") for _ in range(2)]
    frames = [timed(source.read()) for source in sources]
    what = (Windows(), OUTPUT, "append", "eventTime")
    first, second = (frame.groupBy("k").transformWithState(*what) for frame in frames)
    want, ours = [], []
    for number in range(2):
        for at, source in enumerate(sources):
            times = [[500 * number + 90 + at], *event_times(rng, 3, 500 * number)]
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
