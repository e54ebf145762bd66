"""The watermark of two operators through Spark, where event times fall as well as rise: batch by batch as Spark's own.

That of one, late rows and restarts are in ``test_windows_spark.py`` and ``test_timers_spark.py``.
"""

import datetime as dt
import random
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dstl.checkpoint.report import CheckpointReport

pytestmark = pytest.mark.usefixtures("one_partition", "same_batches")


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


def counted(grouped: Any, at: int, **mode: Any) -> DataFrame:
    """Windows of a second, each put out when it is over: few watermarks put out the same."""
    counts: DataFrame = grouped.count(**mode)
    return counts.select(F.lit(at).alias("of"), "k", F.unix_seconds("window.start"), "count")


def run(df: DataFrame, location: str) -> tuple[list[tuple[Any, ...]], dict[int, int]]:
    """Process everything that is there; return what came out of each batch, and by which watermark it went."""
    got: list[tuple[Any, ...]] = []
    writer = df.writeStream.foreachBatch(lambda out, batch: got.extend((batch, *row) for row in out.collect()))
    query = writer.option("checkpointLocation", location).trigger(availableNow=True).start()
    query.awaitTermination()
    told = {each.batchId: dt.datetime.fromisoformat(each.eventTime["watermark"]) for each in query.recentProgress}
    return sorted(got), {batch: round(mark.timestamp() * 1000) for batch, mark in told.items()}


def test_two_operators_go_by_the_slower_and_one_that_pauses_holds_it_as_in_spark(
    home: Home, rng: random.Random
) -> None:
    """Where a run begins both have rows: Spark forgets there what an operator has seen, and we do not."""
    sources = [home.stream("k string, i long") for _ in range(2)]
    frames = [timed(source.read()) for source in sources]
    window, rows_came_out = F.window("t", "1 second"), 0
    for number in range(2):
        for at, source in enumerate(sources):
            times = [[500 * number + 90 + at], *event_times(rng, 3, 500 * number)]
            if at == number:
                times[2:5] = [[], [], [3]]
            if at and not number:
                times.insert(0, [])  # no row so far: the other one's do not count
            for rows in rows_of(times, rng):
                source.add(rows)
        one, other = (counted(frame.groupBy(window, "k"), at) for at, frame in enumerate(frames))
        want, want_marks = run(one.union(other), str(home.path / "native"))
        marks: dict[int, set[int]] = {}
        with home.backend(parallelism=2) as backend:

            def note(report: Any, marks: dict[int, set[int]] = marks) -> None:
                if isinstance(report, CheckpointReport):
                    marks[report.batch_id] = set(report.watermarks.values())

            backend.add_listener(note)
            one, other = (
                counted(backend.groupBy(frame, window, "k"), at, outputMode="append") for at, frame in enumerate(frames)
            )
            ours, _ = run(one.union(other), backend.checkpoint_location)
        assert (ours, marks) == (want, {batch: {mark} for batch, mark in want_marks.items()}), f"run {number}"
        rows_came_out += len(want)
    assert rows_came_out
