"""Initial state: given once, before the first input, as Spark's own gives it, over replays and restarts."""

from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid

INPUT = "k string, k2 int, v long"
OUTPUT = "k string, k2 int, what string"


class Balance(StatefulProcessor):
    """Starts from the initial state's balance; keeps what it was given, in the order of the calls."""

    def init(self, handle: Any) -> None:
        self.balance = handle.getValueState("balance", "v long, given int")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        before = self.balance.get() or (0, 0)
        self.balance.update((before[0] + initialState.start, before[1] + 1))
        assert (initialState.k, initialState.k2) == tuple(key)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.balance.get() or (0, 0)
        taken = sorted(row.v for row in rows)
        self.balance.update((before[0] + sum(taken), before[1]))
        yield Row(k=key[0], k2=key[1], what=f"{before} {taken}")


def initial(spark: SparkSession) -> DataFrame:
    """Keys with input in batch 0, with input later, and without any; one has a null.

    They are few: each call of Spark's own waits for 40 ms on its socket.
    """
    rows = [(f"k{i}", i % 2, 100 + i, "x") for i in range(8)] + [("k3", None, 7, "y"), (None, None, 8, "z")]
    return spark.createDataFrame(rows, "k string, k2 int, start long, more string")


FILES = [
    [{"k": f"k{i}", "k2": i % 2, "v": i} for i in range(0, 12, 3)] + [{"k": None, "k2": None, "v": 1}],
    [{"k": f"k{i}", "k2": i % 2, "v": i} for i in range(0, 12, 2)] + [{"k": "k3", "k2": None, "v": 1}],
    [{"k": "k7", "k2": 1, "v": 1}],
]


@pytest.mark.usefixtures("rocksdb")
def test_initial_state_is_as_in_spark_and_given_once_over_replay_restart_and_rescaling(home: Home) -> None:
    source, start = home.stream(INPUT), initial(home.spark)
    df = source.read()
    got: dict[int, list[tuple[Any, ...]]] = {}
    first: list[tuple[Any, ...]] = []

    def dies(out: DataFrame, batch: int) -> None:
        first.extend((batch, *row) for row in out.collect() if row.what)
        raise RuntimeError("the driver dies before Spark's commit")

    for parallelism, rows in zip((3, 5, 2), FILES, strict=True):
        source.add(rows)
        with home.backend(parallelism=parallelism) as backend:
            ours = backend.groupBy(df, "k", "k2").transformWithState(
                Balance(), OUTPUT, "append", "none", initialState=start.groupBy("k", "k2")
            )
            # Another branch shifts this operator's tasks in the stage.
            both = df.select("k", "k2", F.lit("").alias("what")).union(ours)
            if parallelism == 3:
                # The sink has the batch when the driver dies: the next one, with more partitions, runs batch 0 again.
                writer = both.writeStream.foreachBatch(dies).option("checkpointLocation", backend.checkpoint_location)
                with pytest.raises(StreamingQueryException, match="before Spark's commit"):
                    writer.trigger(availableNow=True).start().awaitTermination()
                continue
            for row in source.collect(both, backend):
                if row[3]:
                    got.setdefault(row[0], []).append(row)
            held = {tuple(row.key): tuple(row.value) for row in backend.read_state(home.spark, "balance").collect()}
    assert got[0] == sorted(first, key=repr)
    native = df.groupBy("k", "k2").transformWithState(Balance(), OUTPUT, "append", "none", start.groupBy("k", "k2"))
    assert source.collect(native, "native") == sorted((row for rows in got.values() for row in rows), key=repr)
    assert {given for _, given in held.values()} == {0, 1}
    assert held["k7", 1] == (100 + 7 + 1, 1)
    assert held["k3", None] == (8, 1)
    assert len(held) == 10 + len([i for i in range(8, 12) if i % 3 == 0 or i % 2 == 0])


def test_initial_state_that_cannot_be_is_refused_when_defined(home: Home) -> None:
    df = home.stream(INPUT).read()
    with home.backend(parallelism=2) as backend:
        for wrong, why in (
            (df, "a stream"),
            (home.spark.range(1), "needs the grouping column k string"),
            (home.spark.createDataFrame([("a", "b")], "k string, k2 string"), "needs the grouping column k2 int"),
            ([("a", 1)], "not a DataFrame"),
        ):
            with pytest.raises(Invalid, match=why):
                backend.groupBy(df, "k", "k2").transformWithState(
                    Balance(), OUTPUT, "append", "none", initialState=wrong
                )


def test_initial_state_s_columns_may_have_the_names_of_a_source_s(home: Home) -> None:
    """Those of the source that says when it is given: Spark found them ambiguous."""
    df = home.stream("value string, v long").read()
    start = home.spark.sql("select 'a' as value, 1 as offset, now() as Timestamp")
    with home.backend(parallelism=2) as backend:
        grouped = backend.groupBy(df, "value")
        given = grouped.transformWithState(Balance(), OUTPUT, "append", "none", initialState=start)
        assert given.isStreaming
