"""Operators with event time in a row, batch by batch as Spark's own: watermarks passed on, and batches without data."""

import datetime as dt
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark import StateBackend, cause
from dstl.spark.listener import CheckpointReport

pytestmark = pytest.mark.usefixtures("rocksdb")

TIMED = "k string, i long, mark long, ts timestamp"
SEEN = "k string, what string, mark long"
DELAY = "2 seconds"


def moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


class Sessions(StatefulProcessor):
    """Passes rows on; at each timer, five seconds behind a row, yields a row with an event time that is not late."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for i in sorted(row.i for row in rows):
            self.handle.registerTimer((i + 5) * 1000)
            yield Row(k=key[0], i=i, mark=timerValues.getCurrentWatermarkInMs(), ts=moment(i + 0.5))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs() // 1000
        mark = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], i=-at, mark=mark, ts=moment(max(at, mark / 1000 + 0.5)))


class Reader(StatefulProcessor):
    """Says which rows it sees and by which watermark; sets a timer three seconds behind each row's event time."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        mark = timerValues.getCurrentWatermarkInMs()
        for values in sorted((tuple(row) for row in rows), key=repr):
            n = (self.n.get() or (0,))[0] + 1
            self.n.update((n,))
            at = max(value for value in map(seconds_of, values) if value is not None)
            self.handle.registerTimer((at + 3) * 1000)
            yield Row(k=key[0], what=f"{n} {values!r}", mark=mark)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        what = f"fired {expiredTimerInfo.getExpiryTimeInMs()} {self.n.get()}"
        yield Row(k=key[0], what=what, mark=timerValues.getCurrentWatermarkInMs())


def seconds_of(value: Any) -> int | None:
    if isinstance(value, dict):
        value = value["end"]
    return int(value.timestamp()) if isinstance(value, dt.datetime) else None


def habits(rng: random.Random, start: int, batches: int) -> list[list[dict[str, Any]]]:
    """Event times that rise, leap, fall behind, and batches without a row."""
    now, made = start, []
    for _ in range(batches):
        kind = rng.choice(["rise", "rise", "leap", "late", "none"])
        now += {"rise": rng.randrange(1, 5), "leap": rng.randrange(8, 30)}.get(kind, 0)
        times = [now - rng.randrange(4 if kind != "late" else 25) for _ in range(rng.randrange(1, 5))]
        made.append([{"k": rng.choice("abc"), "i": i} for i in times] if kind != "none" else [])
    return made


def timed(df: DataFrame) -> DataFrame:
    return df.withColumn("t", F.timestamp_seconds("i")).withWatermark("t", DELAY)


def chains(group: Callable[..., Any], df: DataFrame, third: bool) -> DataFrame:
    """A processor behind a processor and one behind an aggregate of Spark's; or such an aggregate behind a processor.

    In one query Spark keeps late rows in one of its two first processors, and drops them in the other.
    """
    rows = timed(df)
    first = group(rows, "k").transformWithState(Sessions(), TIMED, "append", "eventTime", eventTimeColumnName="ts")
    if third:
        again = first.groupBy(F.window("ts", "10 seconds"), "k").count()
        return again.select("k", F.col("window.start").cast("string"), "count")
    second = group(first, "k").transformWithState(Reader(), SEEN, "append", "eventTime")
    counted = rows.groupBy(F.window("t", "10 seconds"), "k").count()
    behind = group(counted, "k").transformWithState(Reader(), SEEN, "append", "eventTime")
    return second.union(behind)


LONG = [pytest.param(3, third, marks=pytest.mark.long) for third in (False, True)]


@pytest.mark.parametrize(("more", "third"), [(0, False), *LONG])
def test_operators_in_a_row_are_as_sparks_batch_by_batch_over_a_restart(
    home: Home, rng: random.Random, more: int, third: bool
) -> None:
    source = home.stream("k string, i long")
    want, ours, reports = [], [], []
    runs = [[[{"k": "a", "i": 30}], *habits(rng, 32, 1 + more)], [*habits(rng, 90, more), [{"k": "a", "i": 150}], []]]
    for number, batches in enumerate(runs):
        for rows in batches:
            source.add(rows)
        want += source.collect(chains(DataFrame.groupBy, source.read(), third), "native")
        with home.backend(parallelism=2 + number) as backend:
            backend.add_listener(reports.append)
            ours += source.collect(chains(backend.groupBy, source.read(), third), backend)
        # Batch by batch: also those that have no data, in which the last timers fire.
        assert ours == want, f"run {number}"
    assert third or any("fired" in str(row) for row in want)
    assert want
    marks = [r.watermarks for r in reports if isinstance(r, CheckpointReport)]
    operators = {"operator-1"} if third else {"operator-1", "operator-2", "operator-3"}
    assert all(set(each) == operators for each in marks)
    assert all(len(set(each.values())) == 1 for each in marks), "operators in a row go by one watermark"
    seen = [each["operator-1"] for each in marks]
    assert seen == sorted(seen)
    assert seen[-1] == 148_000


Grouped = Callable[..., DataFrame]
"""Takes rows, grouping columns and aggregates; returns the aggregation in output mode append."""


def shown(frames: dict[str, DataFrame]) -> DataFrame:
    each = [df.select(F.lit(name).alias("case"), F.to_json(F.struct("*"))) for name, df in frames.items()]
    return functools.reduce(DataFrame.union, each)


def aggregates_in_a_row(grouped: Grouped, group: Callable[..., Any], df: DataFrame, _: DataFrame) -> DataFrame:
    """An aggregate behind an aggregate, both behind a processor that names its output's event time."""
    passed = group(timed(df), "k").transformWithState(
        Sessions(), TIMED, "append", "eventTime", eventTimeColumnName="ts"
    )
    counted = grouped(passed, ["k", F.window("ts", "10 seconds", "5 seconds").alias("w")], F.max("i"), F.count("*"))
    again = grouped(counted, [F.window("w", "20 seconds").alias("v"), "k"], F.count("*"), F.max("max(i)"))
    return shown({"again": again})


def behind_a_join(grouped: Grouped, _: Callable[..., Any], df: DataFrame, other: DataFrame) -> DataFrame:
    """An aggregate behind a join whose other side is six seconds behind: the lower watermark counts."""
    late = other.withColumn("u", F.timestamp_seconds("j")).withWatermark("u", "6 seconds")
    joined = timed(df).join(late, F.expr("k = l AND u BETWEEN t - INTERVAL 4 SECONDS AND t + INTERVAL 4 SECONDS"))
    return shown({"paired": grouped(joined, [F.window("t", "10 seconds"), "k"], F.count("*"), F.sum("j"))})


def behind_an_unbounded_join(grouped: Grouped, _: Callable[..., Any], df: DataFrame, other: DataFrame) -> DataFrame:
    """An aggregate behind a join that keeps its rows for ever: Spark makes no batch for it when the watermark moves."""
    late = other.withColumn("u", F.timestamp_seconds("j")).withWatermark("u", "6 seconds").drop("u")
    joined = timed(df).join(late, F.expr("k = l"))
    return shown({"paired": grouped(joined, [F.window("t", "10 seconds"), "k"], F.count("*"), F.sum("j"))})


def behind_a_union(grouped: Grouped, _: Callable[..., Any], df: DataFrame, other: DataFrame) -> DataFrame:
    """An aggregate of two streams, each with a watermark of its own, one of which is far behind."""
    late = other.select(F.col("l").alias("k"), (F.col("j") - 15).alias("i"))
    both = timed(df).union(timed(late))
    return shown({"both": grouped(both, [F.window("t", "10 seconds"), "k"], F.count("*"), F.sum("i"))})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("query", [aggregates_in_a_row, behind_a_join, behind_an_unbounded_join, behind_a_union])
def test_aggregates_behind_other_operators_are_as_sparks_batch_by_batch_over_a_restart(
    query: Callable[..., DataFrame], home: Home, rng: random.Random
) -> None:
    source, other = home.stream("k string, i long"), home.stream("l string, j long")
    want, ours = [], []
    for number, start in enumerate((30, 80)):
        # Without the empty one, what is due at last comes in a batch for the watermark's sake.
        last: list[list[dict[str, Any]]] = rng.choice([[], [[]]])
        for rows in [[{"k": "a", "i": start}], *habits(rng, start, 1), [{"k": "a", "i": start + 60}], *last]:
            source.add(rows)
            other.add([{"l": row["k"], "j": row["i"] - rng.randrange(3)} for row in rows])
        rows_of_both = source.read(), other.read()
        native = query(lambda df, by, *what: df.groupBy(*by).agg(*what), DataFrame.groupBy, *rows_of_both)
        want += source.collect(native, "native")
        with home.backend(parallelism=2 + number) as backend:

            def grouped(df: DataFrame, by: list[Any], *what: Any, backend: StateBackend = backend) -> DataFrame:
                return backend.groupBy(df, *by).agg(*what, outputMode="append")

            ours += source.collect(query(grouped, backend.groupBy, *rows_of_both), backend)
        assert ours == want, f"run {number}"
    cases = {behind_a_union: "both", aggregates_in_a_row: "again"}
    assert {row[1] for row in want} == {cases.get(query, "paired")}


def test_a_row_behind_the_watermark_is_refused_as_in_spark_and_so_is_what_is_no_event_time(home: Home) -> None:
    class Backwards(Sessions):
        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
            yield Row(k=key[0], i=0, mark=0, ts=moment(3))

    source = home.stream("k string, i long")
    for i in (10, 20, 40):
        source.add([{"k": "a", "i": i}])
    df = timed(source.read())
    what: tuple[Any, ...] = (Backwards(), TIMED, "append", "eventTime")
    with pytest.raises(Exception, match="WATERMARK"):
        source.collect(df.groupBy("k").transformWithState(*what, eventTimeColumnName="ts"), "native")
    with home.backend(parallelism=2) as backend:
        group = backend.groupBy(df, "k")
        with pytest.raises(Invalid, match="'nope' is not a column of the output"):
            group.transformWithState(*what, eventTimeColumnName="nope", name="x")
        with pytest.raises(Invalid, match="is bigint: an event time is a timestamp"):
            group.transformWithState(*what, eventTimeColumnName="i", name="x")
        with pytest.raises(Invalid, match=r"passes the input's watermark on, which needs .*withWatermark"):
            backend.groupBy(source.read(), "k").transformWithState(
                Sessions(), TIMED, "append", "none", eventTimeColumnName="ts", name="x"
            )
        passing = group.transformWithState(*what, eventTimeColumnName="ts")
        other = home.backend("other", parallelism=2)
        with other, pytest.raises(Invalid, match="not one of this backend's"):
            other.groupBy(passing, "k").transformWithState(Reader(), SEEN, "append", "eventTime", name="reader")
        with pytest.raises(Exception, match="event time 'ts'") as raised:
            source.collect(passing, backend)
        assert isinstance(cause(raised.value), Invalid)
