"""PySpark's own call, on ours: names and places of the arguments, what groups, what is refused."""

import inspect
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
from home import Home
from pyspark.sql import GroupedData, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark.operators.grouped_stream import GroupedStream


class Latest(StatefulProcessor):
    """Passes the latest time of each key on, and how many rows came."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        n = (self.n.get() or (0,))[0] + len(held)
        self.n.update((n,))
        yield Row(k=key[0], t=max(row.t for row in held), n=n, watermark=timerValues.getCurrentWatermarkInMs())


@pytest.mark.parametrize(
    "method", ["transformWithState", "transformWithStateInPandas", "agg", "count", "sum", "avg", "mean", "min", "max"]
)
def test_arguments_have_pysparks_names_places_and_defaults(method: str) -> None:
    theirs = inspect.signature(getattr(GroupedData, method)).parameters.values()
    ours = inspect.signature(getattr(GroupedStream, method)).parameters.values()
    assert [(p.name, p.default) for p in ours if p.kind is not p.VAR_KEYWORD] == [(p.name, p.default) for p in theirs]


def visits_of_a_user(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    """Counts rows until a user has been quiet for ten seconds of event time."""
    if state.hasTimedOut:
        (n,) = state.get
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "n": [n], "what": [f"over at {state.getCurrentWatermarkMs()}"]})
        return
    frames = list(frames)
    (n,) = state.getOption or (0,)
    state.update((n + sum(len(frame) for frame in frames),))
    latest = max(frame["t"].max() for frame in frames)
    state.setTimeoutTimestamp(max(int(latest.timestamp() * 1000), state.getCurrentWatermarkMs()) + 10_000)
    yield pd.DataFrame({"k": [key[0]], "n": [state.get[0]], "what": ["goes on"]})


@pytest.mark.usefixtures("one_partition")
def test_a_function_with_one_state_is_called_as_spark_calls_it(home: Home) -> None:
    source = home.stream("k string, s long")
    for rows in ([("a", 0), ("a", 3)], [("b", 12), ("a", 14)], [("a", 1), ("c", 40)], [("c", 41)]):
        source.add([{"k": k, "s": each} for k, each in rows])
    df = source.read().withColumn("t", F.timestamp_seconds("s")).withWatermark("t", "1 second")
    arguments = visits_of_a_user, "k string, n long, what string", "n long", "update", "EventTimeTimeout"
    want = source.collect(df.groupBy("k").applyInPandasWithState(*arguments), "native", "update")
    with home.backend(parallelism=2) as backend:
        for wrong in ("eventTime", None):
            with pytest.raises(Invalid, match="is not one of NoTimeout, ProcessingTimeTimeout, EventTimeTimeout"):
                backend.groupBy(df, "k").applyInPandasWithState(*arguments[:4], wrong)
        ours = backend.groupBy(df, "k").applyInPandasWithState(*arguments, name="visits")
        got = source.collect(ours, backend, "update")
    assert sorted(row[1:] for row in got) == sorted(row[1:] for row in want)
    assert sum("over" in row[3] for row in got) >= 2
    # State and timeouts move: the user who is still there ends in another location.
    held = home.spark.read.format("statestore").load(str(source.directory / "native"))
    held = held.select("key.*", "value.groupState.*", "value.timeoutTimestamp")
    later = home.stream("k string, s long")
    for second in (50, 61):
        later.add([{"k": "d", "s": second}])
    df = later.read().withColumn("t", F.timestamp_seconds("s")).withWatermark("t", "1 second")
    with home.backend("again", parallelism=1) as backend:
        ours = backend.groupBy(df, "k").applyInPandasWithState(*arguments, initialState=held.groupBy("k"))
        got = later.collect(ours, backend, "update")
    assert ("c", 2) in {row[1:3] for row in got if "over" in row[3]}


def test_an_operator_with_event_time_may_follow_another_with_a_watermark_of_its_own(home: Home, set_conf: Any) -> None:
    source = home.stream("k string, t long")
    for second in (10, 20, 30):
        source.add([{"k": "a", "t": second}, {"k": "b", "t": second}])
    df = source.read().withColumn("t", F.timestamp_seconds("t")).withWatermark("t", "1 second")
    output = "k string, t timestamp, n long, watermark long"
    with home.backend(parallelism=2) as backend:
        grouped = backend.groupBy(df, F.col("k"))
        first = grouped.transformWithState(Latest(), output, "Append", "EventTime", name="first")
        again = first.withWatermark("t", "2 seconds")
        second = backend.groupBy(again, ["k"]).transformWithState(
            Latest(), output, "append", "eventTime", name="second", parallelism=1
        )
        set_conf({"spark.sql.streaming.statefulOperator.allowMultiple": "false"})
        got = source.collect(second.select("k", "n", "watermark"), backend)
    # Each operator follows the batch before with its own delay.
    assert got == [(b, k, b + 1, mark) for b, mark in enumerate((0, 8_000, 18_000)) for k in "ab"]


def test_a_column_with_a_dot_groups_an_aggregation_as_spark_s_does(home: Home) -> None:
    """It was refused as what Spark does not take."""
    source = home.stream("`a.b` string, n long")
    source.add([{"a.b": "x", "n": 1}, {"a.b": "x", "n": 2}])
    with home.backend() as backend:
        sums = backend.groupBy(source.read(), F.col("`a.b`")).agg(F.sum("n").alias("n"))
        assert [tuple(row)[1:] for row in source.collect(sums, backend, "update")] == [("x", 3)]


def test_only_columns_of_the_stream_can_group(home: Home) -> None:
    df = home.stream("k string, `a b` long, s struct<k: string>").read()
    with home.backend() as backend:
        for cols in (("k", "a b"), (df.k, F.col("`a b`")), (1, 2), (["k", df["a b"]],), ((F.col("k"), 2),)):
            assert repr(backend.groupBy(df, *cols)) == "GroupedStream[k, a b]"
        for wrong in (0, 4, True, None):
            with pytest.raises(Invalid, match="groupBy"):
                backend.groupBy(df, wrong)  # type: ignore[arg-type]
        for expression in (F.col("s.k"), F.upper("k"), F.col("k").alias("k"), F.lit("k"), F.window("t", "1 second")):
            grouped = backend.groupBy(df, expression)
            with pytest.raises(Invalid, match="not a column of the stream, which the key of a state must be: add it"):
                grouped.transformWithState(Latest(), "k string", "append", "none")


def test_a_quoted_name_that_an_aggregation_takes_is_taken_of_a_processors_key(home: Home) -> None:
    """There was no such column, it said, and of one with a dot that it was none or had a dot."""
    df = home.stream("k string, `a b` long, `a.b` long, `a``b` long").read()
    with home.backend() as backend:
        plain = df.drop("a.b", "a`b")
        backend.groupBy(plain, "`k`", "`a b`").transformWithState(Latest(), "k string", "append", "none")
        for name in ("a.b", "a`b"):
            quoted = f"`{name.replace('`', '``')}`"
            for by in (quoted, F.col(quoted)):
                assert name in backend.groupBy(df, by).count().columns
                with pytest.raises(Invalid, match=f"column '{name}' has a dot or a backtick in its name, which"):
                    backend.groupBy(df.select("k", quoted), by).transformWithState(
                        Latest(), "k string", "append", "none"
                    )
