"""Stateful processors over batch DataFrames: what Spark's own makes of them, and nothing is stored."""

import random
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from home import Home, storable
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructField, StructType

from dstl.errors import Invalid
from dstl.spark import StateBackend

OUTPUT = "k string, f double, what string"
FAR = 9_000_000_000_000


class Ledger(StatefulProcessor):
    """Uses every kind of state; with timers, says which fire. Yields what does not depend on the clock or the order."""

    style = "row"
    mode = "none"

    def init(self, handle: Any) -> None:
        self.handle = handle
        handle.getListState("gone", "n long")
        handle.deleteIfExists("gone")
        self.sum = handle.getValueState("sum", "n long, given long")
        self.all = handle.getListState("all", "v long")
        self.by = handle.getMapState("by", "v long", "n long")
        if self.mode == "processingTime":
            self.brief = handle.getValueState("brief", "n long", 60_000)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        starts = [int(n) for n in initialState["start"]] if self.style == "pandas" else [initialState.start]
        n, given = self.sum.get() or (0, 0)
        self.sum.update((n + sum(starts), given + len(starts)))
        if self.mode != "none":
            self.handle.registerTimer(7)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        if self.style == "pandas":
            values = [None if pd.isna(v) else int(v) for frame in rows for v in frame["v"]]
        else:
            values = [row.v for row in rows]
        held = [v for v in values if v is not None]
        n, given = self.sum.get() or (0, 0)
        self.sum.update((n + sum(held), given))
        if held:
            self.all.appendList([(v,) for v in sorted(held)])
        for v in held:
            before = self.by.getValue((v % 7,))
            self.by.updateValue((v % 7,), ((before[0] if before else 0) + 1,))
        what = [len(values), self.sum.get(), sum(v for (v,) in self.all.get()), sorted(self.by.iterator())]
        what.append(timerValues.getCurrentWatermarkInMs())
        if self.mode == "none":
            what.append(timerValues.getCurrentProcessingTimeInMs())
        elif self.mode == "processingTime":
            self.brief.update((n,))
            now = timerValues.getCurrentProcessingTimeInMs()
            for at in (5, 7, now, now + 1, FAR):
                self.handle.registerTimer(at)
            self.handle.deleteTimer(5)
        else:
            assert timerValues.getCurrentProcessingTimeInMs() > 1_700_000_000_000
            for at in (-5, -1, 0, 7):
                self.handle.registerTimer(at)
        yield self.row(key, repr(what))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        if self.mode == "processingTime":
            assert at <= timerValues.getCurrentProcessingTimeInMs()
            self.handle.registerTimer(at + 1)
            at = at if at < 10 else "now"
        yield self.row(key, f"fired {at} {self.sum.get()}")

    def row(self, key: Any, what: str) -> Any:
        one = {"k": key[0], "f": key[1], "what": what}
        return Row(**one) if self.style == "row" else pd.DataFrame([one], columns=list(one))


def ledger(style: str, mode: str) -> Ledger:
    made = Ledger()
    made.style, made.mode = style, mode
    return made


def table(spark: SparkSession, seed: int, rows: int = 400) -> DataFrame:
    """Rows of few keys that come in any order; keys with nulls.

    No NaNs, null numbers and zeros of two signs among the keys: Spark's own gives the rows of the first two to a
    processor one by one, as if each were a key of its own, and does not find the initial state of the third.
    """
    rng = random.Random(seed)
    keys = ["a", "b", "", None, *(f"k{i}" for i in range(20))]
    numbers = [0.0, -2.5, 1.5]
    made = [(rng.choice(numbers), rng.choice([None, *range(50)]), rng.choice(keys)) for _ in range(rows)]
    return spark.createDataFrame(made, "f double, v long, k string").repartition(3)


def initial(spark: SparkSession) -> DataFrame:
    rows = [(100, "a", 0.0), (1, "a", 0.0), (5, None, 1.5), (7, "only here", 1.5)]
    return spark.createDataFrame(rows, "start long, k string, f double")


def collected(df: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in df.collect()), key=repr)


@pytest.mark.usefixtures("rocksdb")
@pytest.mark.drawn(2)
@pytest.mark.parametrize("style", ["row", "pandas"])
@pytest.mark.parametrize("mode", ["none", "processingTime", "eventTime"])
def test_a_batch_query_is_sparks_own_and_stores_nothing(home: Home, seed: int, style: str, mode: str) -> None:
    df, start = table(home.spark, seed), initial(home.spark)
    method = "transformWithState" if style == "row" else "transformWithStateInPandas"
    where = home.path / "state"
    with StateBackend(str(where), parallelism=3, spark=home.spark) as backend:
        before = sorted(where.rglob("*"))
        for given in (start.groupBy("k", "f"), None)[: 2 if (style, mode) == ("row", "none") else 1]:
            arguments = (ledger(style, mode), OUTPUT, "update", mode, given)
            want = collected(getattr(df.groupBy("k", "f"), method)(*arguments))
            ours = getattr(backend.groupBy(df, "k", "f"), method)(*arguments)
            assert not ours.isStreaming
            assert collected(ours) == want
            assert collected(ours) == want, "state has ended with the query"
            assert any("fired" in row[2] for row in want) == (mode != "none")
        assert sorted(where.rglob("*")) == before
        assert list(backend.task_manager_pids) == []
        assert "operators=[]" in repr(backend)


EVERY_TYPE = [
    "if(id % 5 = 0, null, concat('k', id % 5)) k",
    "if(id % 2 = 0, null, cast(id % 3 as string)) k2",
    "id",
    "cast(id as float) / 3 f",
    "if(id % 3 = 0, null, id % 2 = 0) b",
    "date'2020-01-01' d",
    "cast(id as short) sh",
    "timestamp'2020-11-01 01:30:00' + make_interval(0, 0, 0, 0, cast(id as int)) t",
    "timestamp_ntz'2020-01-01 00:00:00.5' n",
    "named_struct('a', 1, 't', timestamp'2020-01-01 00:00:00') st",
    "map('x', named_struct('y', 2)) m",
    "array(1, null) l",
    "cast(id as decimal(20, 4)) / 3 dec",
    "cast('ab' as binary) bin",
    "interval '1' day dt",
]


class Reports(StatefulProcessor):
    """Says all that it sees of rows or frames of every type, and of states that have them."""

    def __init__(self, style: str, schema: StructType) -> None:
        self.style, self.schema = style, schema

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("v", self.schema)
        self.list = handle.getListState("l", "x int, s struct<a int>")
        self.map = handle.getMapState("m", "a string, t timestamp", "x double, l array<string>")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        names = self.schema.names
        if self.style == "row":
            found = sorted(rows, key=lambda row: row.id)
            seen = [repr(row) for row in found]
            value = tuple(dict(found[-1].m) if name == "m" else found[-1][name] for name in names)
        else:
            frame = pd.concat(list(rows), ignore_index=True).sort_values("id", ignore_index=True)
            seen = [repr(frame.dtypes.to_dict()), repr(frame.to_dict("split"))]
            # Spark itself cannot keep an interval or an array that comes from pandas.
            value = tuple(None if name in ("dt", "l") else frame.iloc[-1][name] for name in names)
        self.value.update(storable(value))
        self.list.appendList(storable([(1, Row(a=2)), (None, None)]))
        self.list.appendValue(storable((3, Row(a=None))))
        self.map.updateValue(("q", None), (1.5, ["a", None]))
        self.map.updateValue((None, value[names.index("t")]), (None, None))
        times = [timerValues.getCurrentProcessingTimeInMs(), timerValues.getCurrentWatermarkInMs()]
        states = [self.value.get(), list(self.list.get()), sorted(map(repr, self.map.iterator()))]
        what = [*times, seen, *states, self.map.getValue(("q", None)), self.map.containsKey(("z", None))]
        one = {"k": repr(key), "what": repr(what)}
        yield Row(**one) if self.style == "row" else pd.DataFrame([one])


@pytest.mark.usefixtures("rocksdb")
@pytest.mark.parametrize("style", ["row", "pandas"])
def test_a_processor_sees_what_it_sees_in_spark(home: Home, set_conf: Any, style: str) -> None:
    set_conf({"spark.sql.session.timeZone": "America/New_York"})
    rows = home.spark.range(0, 40).selectExpr(*EVERY_TYPE)
    kept = StructType([StructField(field.name, field.dataType) for field in rows.schema][2:])
    method = "transformWithState" if style == "row" else "transformWithStateInPandas"
    arguments = (Reports(style, kept), "k string, what string", "Update", "None")
    theirs = dict(collected(getattr(rows.groupBy("k", "k2"), method)(*arguments)))
    # Before 4.2 Spark makes floats of integers that have a null beside them in an array.
    theirs = {key: what.replace("array([ 1., nan])", "array([1, None], dtype=object)") for key, what in theirs.items()}
    with home.backend(parallelism=1) as backend:
        ours = dict(collected(getattr(backend.groupBy(rows, "k", "k2"), method)(*arguments)))
    assert ours == theirs
    assert len(theirs) == 20


class Counts(StatefulProcessor):
    """Counts rows in its state, and its own calls; refuses to see a key twice."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")
        self.blob = handle.getListState("blob", "b string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        assert not self.n.exists(), "a key has come twice"
        for n, _ in enumerate(rows, start=1):
            self.n.update((n,))
            if n % 500 == 1:
                self.blob.appendValue(("x" * 10_000,))
        yield Row(k=key[0], n=self.n.get()[0], blobs=len(list(self.blob.get())))


def test_a_key_of_many_arrow_batches_is_one_call_and_keeps_what_it_has_written(home: Home, set_conf: Any) -> None:
    # 20 MB of state in a partition: more than the part size at which a streaming task sends what it has written.
    set_conf({"spark.sql.execution.arrow.maxRecordsPerBatch": "700"})
    df = home.spark.range(120_000).select((F.col("id") % 7).cast("string").alias("k"))
    with home.backend(parallelism=2) as backend:
        out = backend.groupBy(df, "k").transformWithState(Counts(), "k string, n long, blobs int", "append", "none")
        per_key = {str(k): 120_000 // 7 + (k < 120_000 % 7) for k in range(7)}
        want = sorted((k, n, -(-n // 500)) for k, n in per_key.items())
        assert collected(out) == want
        # What follows is planned over it as over any DataFrame: it is scanned twice, joined and aggregated.
        set_conf({"spark.sql.adaptive.enabled": "true"})
        joined = out.join(out.select("k", F.col("n").alias("again")), "k").where("n = again")
        assert joined.agg(F.sum("n")).first()[0] == 120_000


def test_a_batch_query_beside_a_stream_of_the_same_backend_leaves_its_checkpoints_alone(home: Home) -> None:
    source = home.stream("k string, v long")
    output = "k string, n long, blobs int"
    seen: list[tuple[Any, ...]] = []
    with home.backend(parallelism=2) as backend:
        static = home.spark.createDataFrame([("a", 1), ("a", 2)], "k string, v long")
        before = backend.groupBy(static, "k").transformWithState(Counts(), output, "append", "none")
        streaming = backend.groupBy(source.read(), "k").transformWithState(Once(), output, "append", "none")

        def write(rows: DataFrame, batch: int) -> None:
            # A batch frame of the batch itself: its state begins empty each time, as in Spark.
            inner = backend.groupBy(rows, "k").transformWithState(Counts(), output, "append", "none", name="inner")
            seen.extend((batch, *row) for row in inner.collect())

        for _ in range(2):
            source.add([{"k": "a", "v": 1}])
        query = streaming.writeStream.foreachBatch(write).option("checkpointLocation", backend.checkpoint_location)
        query.trigger(availableNow=True).start().awaitTermination()
        assert seen == [(0, "a", 1, 1), (1, "a", 1, 1)]
        assert collected(before) == [("a", 2, 1)]
        assert "operators=['operator-1']" in repr(backend)
        assert [tuple(row.value) for row in backend.read_state(home.spark, "total").collect()] == [(2,)]
    assert collected(before) == [("a", 2, 1)], "it needs no backend"


class Grouped(StatefulProcessor):
    """Says how many rows a key of any type has."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        assert not self.n.exists(), "a key has come twice"
        self.n.update((len(list(rows)),))
        yield Row(k=repr(key[0]).replace("-0.0", "0.0"), n=self.n.get()[0])


@pytest.mark.parametrize(
    "key",
    [
        "element_at(array(0.0d, -0.0d, double('NaN'), null, 1.5d), i)",
        "array(element_at(array(0.0d, -0.0d, double('NaN'), null, 1.5d), i))",
        "named_struct('x', element_at(array(0.0f, -0.0f, float('NaN'), null, 1.5f), i), 'y', null)",
        "element_at(array('a', null, 'c', '', 'a'), i)",
        "element_at(array(date'1969-12-31', null, date'2024-01-01', date'1970-01-01', null), i)",
    ],
)
def test_rows_that_spark_groups_together_are_one_call(home: Home, key: str) -> None:
    df = home.spark.range(0, 700, 1, 5).selectExpr("cast(id % 5 + 1 as int) i").selectExpr(f"{key} k")
    with home.backend(parallelism=2) as backend:
        out = collected(backend.groupBy(df, "k").transformWithState(Grouped(), "k string, n long", "append", "none"))
    assert sorted(n for _, n in out) == sorted(row["count"] for row in df.groupBy("k").count().collect())


class Once(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.total.get() or (0,))[0] + len(list(rows))
        self.total.update((n,))
        yield Row(k=key[0], n=n, blobs=0)


def test_what_a_batch_query_cannot_be_is_refused_when_defined(home: Home) -> None:
    df = home.spark.createDataFrame([("a", 1)], "k string, v long")
    output = "k string, n long, blobs int"
    with home.backend(parallelism=2) as backend:
        grouped = backend.groupBy(df, "k")
        assert grouped.transformWithState(Once(), output, "Complete", "None").collect() == [Row(k="a", n=1, blobs=0)]
        for wrong, why in (
            (lambda: grouped.transformWithState(Once(), output, "often", "none"), "append, update, complete"),
            (lambda: grouped.transformWithState(Once(), output, "append", "processingTime", tick="1 second"), "tick"),
            (lambda: grouped.transformWithState(len, output, "append", "none"), "not a StatefulProcessor"),
            (lambda: grouped.transformWithState(Once(), output, "append", "none", df.drop("k")), "grouping column k"),
        ):
            with pytest.raises(Invalid, match=why):
                wrong()
