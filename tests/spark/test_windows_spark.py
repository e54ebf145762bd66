"""Windowed aggregates and deduplication through Spark: batch by batch as Spark's own, with late rows and restarts."""

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from home import Home
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from dstl.errors import Invalid
from dstl.spark import StateBackend
from dstl.spark.listener import CheckpointReport

SCHEMA = "k string, g string, i long, v long, x double"
RUNS = (2, 3)
"""The parallelism of each run, which a driver of its own makes."""


AGGREGATES: tuple[Callable[[], Column], ...] = (
    lambda: F.count("*").alias("n"),
    lambda: F.sum("v"),
    lambda: F.avg("x").alias("mean"),
    lambda: F.min("x").alias("low"),
    lambda: F.max(F.col("v") * 2).alias("high"),
    lambda: F.count("g").alias("some"),
    lambda: F.collect_list("v").alias("list"),
    lambda: F.collect_set("g").alias("set"),
    lambda: F.min_by(F.col("v") * 3, "v").alias("least"),
    lambda: F.max_by(F.concat("k", "x"), "x").alias("most"),
    lambda: F.bool_and(F.col("v") > 0).alias("all"),
    lambda: F.count_if(F.col("v") > 0).alias("above"),
    lambda: F.any_value(F.lit(7)).alias("seven"),
    lambda: F.stddev("v").alias("deviation"),
    lambda: F.var_pop("x").alias("variance"),
)


def settled(df: DataFrame) -> DataFrame:
    """Put lists in one order, and take the last digits off, which depend on the order of rows."""
    changed = {name: F.sort_array(name) for name in ("list", "set")}
    # Times pi: 5.6484375 would be rounded by the last bit of a double, which depends on the order of the rows.
    changed |= {name: F.round(F.col(name) * F.pi(), 6) for name in ("deviation", "variance")}
    return df.withColumns({name: column for name, column in changed.items() if name in df.columns})


class Windowed(NamedTuple):
    """An aggregation: grouping columns, mode, and which of the aggregates: the first, and steps."""

    name: str
    mode: str
    by: tuple[Any, ...]
    of: tuple[int, int] = (0, 1)

    @property
    def label(self) -> str:
        return f"{self.name}-{self.mode}"

    def native(self, df: DataFrame) -> DataFrame:
        return settled(df.groupBy(*self._cols()).agg(*self._aggregates()))

    def ours(self, backend: StateBackend, df: DataFrame) -> DataFrame:
        grouped = backend.groupBy(df, *self._cols())
        return settled(grouped.agg(*self._aggregates(), outputMode=self.mode, name=self.label))

    def _aggregates(self) -> list[Column]:
        return [each() for each in AGGREGATES[self.of[0] :: self.of[1]]]

    def _cols(self) -> list[Any]:
        return [each() if callable(each) else each for each in self.by]


class Duplicates(NamedTuple):
    """A deduplication, by its method and columns."""

    method: str
    subset: tuple[str, ...] | None
    mode: str = "append"

    @property
    def label(self) -> str:
        return f"{self.method}-{'-'.join(self.subset or ('all',))}"

    def native(self, df: DataFrame) -> DataFrame:
        found: DataFrame = getattr(df, self.method)(None if self.subset is None else list(self.subset))
        return found

    def ours(self, backend: StateBackend, df: DataFrame) -> DataFrame:
        found: DataFrame = getattr(backend, self.method)(df, self.subset, name=self.label)
        return found


TUMBLING = ("k", lambda: F.window("t", "10 seconds"))
SLIDING = (lambda: F.window("t", "30 seconds", "10 seconds", "3 seconds").alias("w"), "k")
RAGGED = ("k", lambda: F.window("t", "25 seconds", "10 seconds"), lambda: F.upper("g").alias("big"))
SESSION = ("k", lambda: F.session_window("t", "8 seconds"))

# Each aggregate is merged by sessions, and put out by a window and before its end.
CASES: tuple[Windowed | Duplicates, ...] = (
    Windowed("tumbling", "append", TUMBLING, (0, 2)),
    Windowed("sliding", "append", SLIDING, (1, 2)),
    Windowed("gap-of-row", "append", (lambda: F.session_window("t", F.col("g")).alias("s"), "k")),
    Duplicates("dropDuplicates", ("t", "k")),
    Duplicates("dropDuplicatesWithinWatermark", ("k",)),
    Windowed("ragged", "update", RAGGED, (0, 3)),
    Windowed("session", "complete", SESSION, (1, 3)),
)
MORE: tuple[Windowed | Duplicates, ...] = (
    Windowed("ragged", "append", RAGGED),
    Windowed("window-alone", "append", (lambda: F.window("t", "20 seconds", "5 seconds"),)),
    Windowed("moment", "append", ("t", "k")),
    Windowed("session", "append", SESSION),
    Duplicates("dropDuplicates", ("k", "v")),
    Duplicates("dropDuplicates", None),
    Windowed("tumbling", "update", TUMBLING),
    Windowed("sliding", "complete", SLIDING),
)
"""The long form takes these, too."""


def batches(rng: random.Random, count: int, start: int) -> list[list[dict[str, Any]]]:
    """Rows whose event times rise, leap, fall far behind and are missing; some batches are empty."""
    now, made = start, []
    for _ in range(count):
        now += rng.choice([1, 3, 12, 12, 40, 0])
        kind = rng.choice(["on time", "on time", "mixed", "late", "empty"])
        rows = []
        for _ in range(0 if kind == "empty" else rng.randrange(1, 12)):
            behind = rng.randrange(5, 90) if kind == "late" or (kind == "mixed" and rng.random() < 0.4) else 0
            at = max(1, now - behind - rng.randrange(9))
            row: dict[str, Any] = {"k": rng.choice(["a", "b", "c", None])}
            row["v"] = rng.choice([None, rng.randrange(-50, 50)])
            row |= {"i": at if rng.random() < 0.93 else None, "x": rng.choice([None, rng.randrange(64) / 8])}
            row["g"] = rng.choice(["4 seconds", "15 seconds", "0 seconds"])
            rows.append(row)
        made.append(rows)
    # In a first run, which has no watermark yet, these make a window and a session that the next batch closes.
    made[0].append({"k": "d", "v": 1, "i": max(1, now - 60), "x": 1.0, "g": "4 seconds"})
    made[0].append({"k": "a", "v": 1, "i": now, "x": 1.0, "g": "4 seconds"})
    # One that is late whatever came before: it is behind what the first batch has.
    made[-1].append({"k": "a", "v": 1, "i": max(1, start - 200), "x": 1.0, "g": "4 seconds"})
    return made


def timed(df: DataFrame) -> DataFrame:
    return df.withColumn("t", F.timestamp_seconds("i")).withWatermark("t", "5 seconds")


Rows = list[tuple[int, str, str]]
"""Batch, query and row, as JSON."""


def run(df: DataFrame, mode: str, checkpoint: str) -> tuple[Rows, StreamingQuery]:
    """Process everything that is there and return what came out."""
    got: Rows = []
    writer = df.writeStream.foreachBatch(lambda out, batch: got.extend((batch, *row) for row in out.collect()))
    query = writer.outputMode(mode).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    return got, query


def together(frames: dict[Windowed | Duplicates, DataFrame]) -> DataFrame:
    shown = [df.select(F.lit(case.label).alias("case"), F.to_json(F.struct("*"))) for case, df in frames.items()]
    return functools.reduce(DataFrame.union, shown)


def native_late(query: StreamingQuery) -> dict[int, list[int]]:
    """Return, by batch, how many rows Spark's operators have dropped."""
    return {
        progress.batchId: sorted(operator.numRowsDroppedByWatermark for operator in progress.stateOperators)
        for progress in query.recentProgress
        if progress.stateOperators
    }


@pytest.mark.usefixtures("same_batches", "one_partition")
@pytest.mark.parametrize(
    ("cases", "count"),
    [(CASES, 2), pytest.param(CASES + MORE, 6, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
    ids=["some", "all"],
)
def test_batches_are_sparks_own(
    cases: tuple[Windowed | Duplicates, ...], count: int, home: Home, set_conf: Any, rng: random.Random
) -> None:
    """All of ours are one query; of Spark's those in append mode, for it takes only one of another mode."""
    # Moments are the same in every zone; their Arrow type is not.
    set_conf({"spark.sql.session.timeZone": "America/New_York"})
    source = home.stream(SCHEMA)
    df = timed(source.read())
    native = {case: case.native(df) for case in cases}
    appending = [case for case in cases if case.mode == "append"]
    alone = [[case] for case in cases if case.mode != "append"]
    start, all_late = 100, 0
    came_out: set[str] = set()
    for number, parallelism in enumerate(RUNS):
        for rows in batches(rng, count, start):
            source.add(rows)
        start += 60
        want: Rows = []
        want_late: dict[tuple[str, ...], dict[int, list[int]]] = {}
        for of_query in (appending, *alone):
            frames = together({each: native[each] for each in of_query})
            got, query = run(frames, of_query[0].mode, str(home.path / of_query[0].label))
            want += got
            want_late[tuple(case.label for case in of_query)] = native_late(query)
        late: dict[int, dict[str, int]] = {}
        with home.backend(parallelism=parallelism) as backend:
            backend.add_listener(lambda report, into=late: into.update(dropped(report)))  # type: ignore[misc]
            ours = {case: case.ours(backend, df) for case in cases}
            for case in cases:
                assert ours[case].schema.jsonValue() == native[case].schema.jsonValue(), case.label
            found, _ = run(together(ours), "update", backend.checkpoint_location)
        for case in cases:
            mine, theirs = (sorted(row for row in rows if row[1] == case.label) for rows in (found, want))
            assert mine == theirs, f"{case.label}, run {number}"
        for labels, by_batch in want_late.items():
            assert {b: sorted(late[b].get(label, 0) for label in labels) for b in by_batch} == by_batch, labels
        all_late += sum(sum(each.values()) for each in late.values())
        came_out |= {row[1] for row in want}
    assert all_late
    assert came_out == {case.label for case in cases}


def dropped(report: Any) -> dict[int, dict[str, int]]:
    return {report.batch_id: dict(report.late_rows)} if isinstance(report, CheckpointReport) else {}


LATE_CASES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("tumbling", "append", TUMBLING),
    ("sliding", "update", SLIDING),
    ("window-alone", "append", (lambda: F.window("t", "20 seconds"),)),
    ("moment", "append", ("t", "k")),
    ("session", "append", SESSION),
)


def test_each_row_is_in_a_group_or_among_the_late_ones(home: Home, rng: random.Random) -> None:
    source = home.stream(SCHEMA)
    sent = []
    for number, rows in enumerate(batches(rng, 3, 100)):
        # Numbered, and each with a time, without which a row is in no window and late for none.
        sent += [row | {"v": number * 100 + at, "i": row["i"] or 100} for at, row in enumerate(rows)]
        source.add(sent[-len(rows) :] if rows else [])
    source.add([{"k": "end", "v": -1, "i": 10_000, "x": 0.0, "g": ""}])  # it ends every group
    with home.backend(parallelism=2) as backend:
        tagged = [
            backend.groupBy(timed(source.read()), *(each() if callable(each) else each for each in by))
            .agg(
                F.collect_list("v").alias("vs"),
                F.count("*").alias("n"),
                outputMode=mode,
                lateColumnName="late",
                name=name,
            )
            .select(F.lit(name), "vs", "n", "late")
            for name, mode, by in LATE_CASES
        ]
        found, _ = run(functools.reduce(DataFrame.union, tagged), "update", backend.checkpoint_location)
    values = {row["v"]: row for row in sent}
    for name, _, _ in LATE_CASES:
        grouped = [set(vs) for _, case, vs, _, late in found if case == name and late is None]
        late = [row for _, case, _, _, row in found if case == name and row is not None]
        assert all(row.v in values and (row.k, row.i) == (values[row.v]["k"], values[row.v]["i"]) for row in late)
        assert all((vs, n) == (None, None) for _, case, vs, n, row in found if case == name and row is not None)
        numbers = [row.v for row in late]
        assert len(numbers) == len(set(numbers)) > 0, name
        on_time = set().union(*grouped) - {-1}
        assert on_time.isdisjoint(numbers), name
        assert on_time | set(numbers) == set(values), name


def test_late_rows_need_a_group_that_ends(home: Home) -> None:
    rows = home.stream(SCHEMA).read()
    with home.backend() as backend:
        with pytest.raises(Invalid, match="lateColumnName='late' is for groups that end with the watermark"):
            backend.groupBy(rows, "k").count(lateColumnName="late")
        with pytest.raises(Invalid, match="windows that overlap needs another grouping column"):
            backend.groupBy(timed(rows), F.window("t", "20 seconds", "5 seconds")).count(lateColumnName="late")
        with pytest.raises(Invalid, match="two columns 'k': rename one"):
            backend.groupBy(timed(rows), *TUMBLING[:1], TUMBLING[1]()).count(lateColumnName="k")  # type: ignore[operator]
        with pytest.raises(Invalid, match="lateColumnName=7 is no name of a column"):
            backend.groupBy(timed(rows), "t").count(lateColumnName=7)  # type: ignore[arg-type]


@pytest.mark.parametrize("streams", [1, 2])
def test_a_window_ends_without_another_row_and_at_the_latest_when_the_next_run_begins(home: Home, streams: int) -> None:
    """Of one stream by our watermark, of a union by Spark's; a run of one batch ends before what is due by it."""
    sources = [home.stream("k string, t timestamp") for _ in range(streams)]
    batches: list[tuple[Any, ...]] = []
    for trigger in ("once", "availableNow"):
        for source in sources if trigger == "once" or streams == 2 else ():
            source.add([{"k": "a", "t": f"2026-03-01T10:{10 * source.files + at:02}:00"} for at in (0, 9)])
        with home.backend(parallelism=1) as backend:
            rows = [source.read().withWatermark("t", "1 minute") for source in sources]
            windows = backend.groupBy(functools.reduce(DataFrame.union, rows), F.window("t", "5 minutes"))
            out = windows.count(outputMode="append").select(F.minute("window.start"), "count")
            writer = out.writeStream.foreachBatch(
                lambda df, batch: batches.extend((batch, *row) for row in df.collect())
            )
            writer = writer.option("checkpointLocation", backend.checkpoint_location)
            writer.trigger(**{trigger: True}).start().awaitTermination()  # type: ignore[arg-type]
    # Spark's own rises in a run again once there are rows in it.
    assert batches == ([(1, 0, 1)] if streams == 1 else [(1, 0, 2), (2, 5, 2), (2, 10, 2)])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("first", ["true", "false"])
def test_batches_without_data_may_go_and_come_between_runs(first: str, home: Home, set_conf: Any) -> None:
    """Each brings a source, and Spark counts those: it ended with an assertion about sources."""
    source = home.stream("k string, t timestamp")
    got: list[tuple[Any, ...]] = []
    for minute, enabled in ((0, first), (10, {"true": "false", "false": "true"}[first]), (20, first)):
        set_conf({"spark.sql.streaming.noDataMicroBatches.enabled": enabled})
        source.add([{"k": "a", "t": f"2026-03-01T10:{minute:02}:00"}])
        with home.backend(parallelism=1, allow_non_restored_state=minute == 20) as backend:
            rows = source.read().withWatermark("t", "1 minute")
            if minute == 10:  # one that comes, and goes
                rows = backend.dropDuplicatesWithinWatermark(rows, ["k", "t"], name="once")
            windows = backend.groupBy(rows, F.window("t", "5 minutes"), "k")
            counts = windows.agg(F.count("*").alias("n"), outputMode="append", name="counts")
            got += source.collect(counts.select(F.minute("window.start"), "n"), backend)
    # A window ends in a batch without data, or with the next rows.
    assert [row[1:] for row in got] == ([(0, 1), (10, 1)] if first == "true" else [(0, 1)])
