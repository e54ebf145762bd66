"""Single keys of a running query, looked up at its TaskManagers, and whole states: committed batches, over restarts."""

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.checkpoint.report import CheckpointReport
from dstl.errors import Closed, Invalid, MissingState, Unavailable
from dstl.files import barriers
from dstl.spark import StateBackend


class Mean:
    """An aggregate function as PyFlink has them."""

    def create_accumulator(self) -> tuple[int, int]:
        return (0, 0)

    def add(self, value: int, accumulator: tuple[int, int]) -> tuple[int, int]:
        return (accumulator[0] + value, accumulator[1] + 1)

    def get_result(self, accumulator: tuple[int, int]) -> float:
        return accumulator[0] / accumulator[1]


class Everything(StatefulProcessor):
    """A state of each kind by key; a negative row takes its absolute value away again."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "total long, last date")
        self.elements = handle.getListState("elements", "v long")
        self.signs = handle.getMapState("signs", "plus boolean, v long", "n long")
        self.fleeting = handle.getValueState("fleeting", "v long", ttlDurationMs=1)
        self.rules = handle.getBroadcastState("rules", "id string", "least long")
        self.sum = handle.getReducingState("sum", "v long", lambda a, b: (a[0] + b[0],))
        self.mean = handle.getAggregatingState("mean", "total long, n int", Mean())

    def handleBroadcastRows(self, name: str, rows: Iterator[Any]) -> None:
        for row in rows:
            self.rules.updateValue((row.k,), (row.v,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for v in sorted(row.v for row in rows):
            self.total.update(((self.total.get() or (0,))[0] + v, None))
            self.sum.add((v,))
            self.mean.add(v)
            if v < 0:
                self.elements.clear()
                self.signs.removeKey((True, -v))
                self.handle.deleteTimer(9_000_000_000_000 - v)
                continue
            self.elements.appendValue((v,))
            self.signs.updateValue((v > 0, v), (1,))
            self.fleeting.update((v,))
            self.handle.registerTimer(9_000_000_000_000 + v)
        yield Row(k=key[0], total=self.total.get()[0])


def rows(*pairs: tuple[str | None, int]) -> list[dict[str, Any]]:
    return [{"k": k, "v": v} for k, v in pairs]


def defined(backend: StateBackend, df: DataFrame) -> DataFrame:
    return backend.groupBy(df.where("k is null or k != 'rule'"), "k").transformWithState(
        Everything(),
        "k string, total long",
        "append",
        "processingTime",
        broadcast={"rules": df.where("k = 'rule'")},
        name="everything",
    )


def check_frames(spark: SparkSession, backend: StateBackend, before: int) -> None:
    """Read whole states as typed rows, of the newest checkpoint and of the one before."""

    def rows(name: str, **more: Any) -> list[Any]:
        return sorted(map(tuple, backend.read_state(spark, name, **more).collect()), key=repr)

    assert rows("total") == [(("a",), (4, None)), ((None,), (5, None))]
    assert rows("total", checkpoint=before) == [(("a",), (3, None)), ((None,), (5, None))]
    assert rows("elements", operator="everything") == [(("a",), (3,)), ((None,), (5,))]
    assert rows("sum") == [(("a",), (4,)), ((None,), (5,))]
    assert rows("mean") == [(("a",), (4, 5)), ((None,), (5, 1))]
    of_a = [(False, 0), (True, 1), (True, 3)]
    assert rows("signs") == [*((("a",), sign, (1,)) for sign in of_a), ((None,), (True, 5), (1,))]
    assert rows("$timers") == [*((("a",), 9_000_000_000_000 + v) for v in (0, 1, 3)), ((None,), 9_000_000_000_005)]
    schema = backend.read_state(spark, "signs").schema.simpleString()
    assert schema == "struct<key:struct<k:string>,user_key:struct<plus:boolean,v:bigint>,value:struct<n:bigint>>"
    with pytest.raises(Invalid, match=r"no state 'nope': 'everything' has"):
        backend.read_state(spark, "nope")
    with pytest.raises(Invalid, match="no operator 'two'"):
        backend.read_state(spark, "total", operator="two")
    with pytest.raises(MissingState):
        backend.read_state(spark, "total", checkpoint=999_999)


def test_a_key_is_looked_up_as_of_the_last_committed_batch(home: Home) -> None:
    source = home.stream()
    source.add(rows(("a", 1), ("a", 0), (None, 5), ("rule", 7)))
    seen: list[Any] = []
    checkpoints: dict[int, int] = {}

    def look(backend: StateBackend) -> Callable[[DataFrame, int], None]:
        def write(batch: DataFrame, number: int) -> None:
            # All tasks of the batch have ended here, and its changes are at the TaskManagers.
            batch.collect()
            seen.append(
                (
                    number,
                    backend.lookup("everything", "total", ("a",)),
                    backend.lookup("everything", "elements", ("a",)),
                )
            )

        return write

    def writer(backend: StateBackend) -> Any:
        df = defined(backend, source.read())
        return df.writeStream.foreachBatch(look(backend)).option("checkpointLocation", backend.checkpoint_location)

    with home.backend(parallelism=3, task_managers=2) as backend:
        with pytest.raises(Invalid, match="no operator 'everything'; none is defined"):
            backend.lookup("everything", "total", ("a",))
        with pytest.raises(MissingState):
            backend.read_state(home.spark, "total")
        backend.add_listener(
            lambda r: checkpoints.update({r.batch_id: r.checkpoint_id} if isinstance(r, CheckpointReport) else {})
        )
        made = writer(backend)
        query = made.start()
        query.processAllAvailable()

        def found(state: str, key: Any = ("a",)) -> Any:
            return backend.lookup("everything", state, key)

        assert seen == [(0, None, [])]
        assert found("total") == found("total", "a") == found("total", {"k": "a"}) == found("total", Row(k="a"))
        assert (found("total"), found("total").total) == (Row(total=1, last=None), 1)
        assert found("total", (None,)) == Row(total=5, last=None)
        assert found("total", ("nobody",)) is None
        assert found("elements") == [Row(v=0), Row(v=1)]
        assert found("elements", ("nobody",)) == []
        assert found("signs") == {(False, 0): Row(n=1), (True, 1): Row(n=1)}
        assert [key.plus for key in found("signs")] == [False, True]
        assert found("signs", ("nobody",)) == {}
        assert found("$timers") == [9_000_000_000_000, 9_000_000_000_001]
        assert found("fleeting") is None
        assert found("rules", ()) == {("rule",): Row(least=7)}
        assert backend.lookup("everything", "rules", (), ("rule",)) == Row(least=7)
        assert backend.lookup("everything", "signs", "a", (True, 1)) == Row(n=1)
        assert backend.lookup("everything", "signs", "a", {"plus": True, "v": 0}) is None
        assert backend.lookup("everything", "signs", "nobody", (True, 1)) is None
        with pytest.raises(Invalid, match="state 'total' of operator 'everything' is no map"):
            backend.lookup("everything", "total", "a", ("x",))
        source.add(rows(("a", 2)))
        query.processAllAvailable()
        # Another batch that puts, deletes and clears, still an overlay at the TaskManager.
        source.add(rows(("a", -2), ("a", 3)))
        query.processAllAvailable()
        assert seen[1:] == [(1, (1, None), [(0,), (1,)]), (2, (3, None), [(0,), (1,), (2,)])]
        assert found("total").total == 4
        assert found("elements") == [Row(v=3)]
        assert found("signs") == {(False, 0): Row(n=1), (True, 1): Row(n=1), (True, 3): Row(n=1)}
        held = [backend.lookup("everything", "signs", "a", (True, v)) for v in (1, 2, 3)]
        assert held == [Row(n=1), None, Row(n=1)]
        assert found("$timers") == [9_000_000_000_000, 9_000_000_000_001, 9_000_000_000_003]
        check_frames(home.spark, backend, checkpoints[1])
        for state, key, message in (
            ("nope", ("a",), r"operator 'everything' has no state 'nope'; it has '\$timers', 'total', 'elements'"),
            ("total", ("a", "b"), "the grouping key"),
            ("total", (5,), "the grouping key"),
            ("total", {"other": 5}, "the grouping key"),
            ("rules", ("a",), r"the same for all keys: look up the key \(\)"),
        ):
            with pytest.raises(Invalid, match=message):
                found(state, key)
        with pytest.raises(Invalid, match="no operator 'other'; there are 'everything'"):
            backend.lookup("other", "total", ("a",))
        query.stop()
        with pytest.raises(Unavailable, match="the query is not running"):
            found("total")
        # The same driver again, and then another one.
        query = made.start()
        source.add(rows(("a", 10)))
        query.processAllAvailable()
        assert (seen[-1], found("total").total) == ((3, (4, None), [(3,)]), 14)
        query.stop()
    with pytest.raises(Closed):
        backend.lookup("everything", "total", ("a",))
    with home.backend(parallelism=5) as backend:
        query = writer(backend).start()
        with pytest.raises(Unavailable, match="no batch of it has begun"):
            found("total")
        source.add(rows(("a", 100)))
        query.processAllAvailable()
        assert (seen[-1][1].total, found("total").total, found("elements")) == (14, 114, [(3,), (10,), (100,)])
        query.stop()


def started(counts: DataFrame, backend: StateBackend, take: Callable[[list[Row]], Any] = len) -> Any:
    writer = counts.writeStream.outputMode("update").foreachBatch(lambda batch, _: take(batch.collect()))
    return writer.option("checkpointLocation", backend.checkpoint_location).start()


def test_every_group_of_an_aggregation_is_found_by_its_key(home: Home) -> None:
    keys: dict[str, list[Any]] = {
        "number": ["v"],
        "types": [
            "k",
            (F.col("v") % 3).cast("double").alias("x"),
            F.col("v").cast("decimal(20, 3)").alias("m"),
            F.date_add(F.lit("2024-02-28").cast("date"), F.col("v").cast("int")).alias("d"),
            F.timestamp_seconds("v").cast("timestamp_ntz").alias("n"),
            F.struct(F.col("k"), F.col("k").cast("binary").alias("b")).alias("s"),
            F.array(F.col("v"), F.lit(None)).alias("a"),
            F.expr("make_dt_interval(v)").alias("i"),
            (F.col("v") > 3).alias("large"),
        ],
        "both": [F.window("at", "5 seconds"), "k"],
        "window": [F.window("at", "5 seconds")],
    }
    source = home.stream()
    source.add(rows(*((f"k{i % 5}" if i % 5 else None, i % 9) for i in range(45))))
    with home.backend(parallelism=3, task_managers=2) as backend:
        df = source.read().withColumn("at", F.timestamp_seconds("v"))
        counts = {name: backend.groupBy(df, *by).count(outputMode="update", name=name) for name, by in keys.items()}
        shown = [each.select(F.lit(name).alias("of"), F.struct("*").alias(name)) for name, each in counts.items()]
        got: list[Row] = []
        union = functools.partial(DataFrame.unionByName, allowMissingColumns=True)
        query = started(functools.reduce(union, shown), backend, got.extend)
        query.processAllAvailable()
        for name in keys:
            found = [row[name] for row in got if row.of == name]
            assert sum(row["count"] for row in found) == 45
            for row in found:
                *key, count = row
                if "window" in row:
                    key = [row.window.start, row.window.end, *key[1:]]
                assert backend.lookup(name, "aggregates", key) == (count,), row
        query.stop()


def test_with_next_a_lookup_is_as_old_as_what_a_restart_would_find(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "LINGER_S", 60.0)  # else it has a record of its own as soon as the query is idle
    source, conf = home.stream(), home.spark.sparkContext._conf
    source.add(rows(("a", 1)))
    conf.set("spark.dstl.commit", "with-next")
    try:
        backend = home.backend(parallelism=2)
    finally:
        conf._jconf.remove("spark.dstl.commit")
    with backend:
        counts = backend.groupBy(source.read(), "k").count(outputMode="update", name="counts")
        query = started(counts, backend)
        query.processAllAvailable()
        assert backend.lookup("counts", "aggregates", "a") is None
        source.add(rows(("a", 2)))
        query.processAllAvailable()
        assert backend.lookup("counts", "aggregates", "a") == (1,)
        # What reads a checkpoint makes the commit durable that waits.
        assert [row.value for row in backend.read_state(home.spark, "aggregates").collect()] == [(2,)]
        assert backend.lookup("counts", "aggregates", "a") == (2,)
        query.stop()


def test_a_key_of_a_lost_task_manager_is_unavailable_and_the_query_finds_it_again(home: Home) -> None:
    source = home.stream()
    source.add(rows(("a", 1)))
    with home.backend(parallelism=2, task_managers=1) as backend:
        counts = backend.groupBy(source.read(), "k").count(outputMode="update", name="counts")
        query = started(counts, backend)
        query.processAllAvailable()
        (pid,) = backend.task_manager_pids
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match=r"the TaskManager of key group \d+ does not answer"):
                backend.lookup("counts", "aggregates", "a")
        finally:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            backend.lookup("counts", "aggregates", "a")
        source.add(rows(("a", 2)))
        query.processAllAvailable()
        assert backend.lookup("counts", "aggregates", "a") == (2,)
        query.stop()
