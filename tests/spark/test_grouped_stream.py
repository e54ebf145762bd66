"""PySpark's own call, on ours: names and places of the arguments, what groups, what is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import GroupedData, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark import StateBackend
from dstl.spark.operators.grouped_stream import GroupedStream

pytestmark = pytest.mark.spark
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Latest(StatefulProcessor):
    """Passes the latest time of each key on, and how many rows came."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = list(rows)
        n = (self.n.get() or (0,))[0] + len(held)
        self.n.update((n,))
        yield Row(k=key[0], t=max(row.t for row in held), n=n, watermark=timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        pass


@pytest.mark.parametrize("method", ["transformWithState", "transformWithStateInPandas"])
def test_arguments_have_pysparks_names_places_and_defaults(method: str) -> None:
    theirs = inspect.signature(getattr(GroupedData, method)).parameters.values()
    ours = inspect.signature(getattr(GroupedStream, method)).parameters.values()
    assert [(p.name, p.default) for p in ours if p.kind is not p.VAR_KEYWORD] == [(p.name, p.default) for p in theirs]


def test_both_styles_take_the_same_arguments() -> None:
    row = inspect.signature(StateBackend.transform_with_state).parameters
    pandas = inspect.signature(StateBackend.transform_with_state_in_pandas).parameters
    assert list(pandas) == [name for name in row if name != "style"]


def test_an_operator_with_event_time_may_follow_another_with_a_watermark_of_its_own(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    conf = "spark.sql.streaming.statefulOperator.allowMultiple"
    source = stream("k string, t long")
    for second in (10, 20, 30):
        source.add([{"k": "a", "t": second}, {"k": "b", "t": second}])
    df = source.read().withColumn("t", F.timestamp_seconds("t")).withWatermark("t", "1 second")
    output = "k string, t timestamp, n long, watermark long"
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        grouped = backend.groupBy(df, F.col("k"))
        first = grouped.transformWithState(Latest(), output, "Append", "EventTime", name="first")
        again = first.withWatermark("t", "2 seconds")
        second = backend.groupBy(again, ["k"]).transformWithState(
            Latest(), output, "append", "eventTime", name="second", parallelism=1
        )
        spark.conf.set(conf, "false")
        try:
            got = source.collect(second.select("k", "n", "watermark"), "ours")
        finally:
            spark.conf.unset(conf)
    # Each operator follows the batch before with its own delay.
    assert got == [(b, k, b + 1, mark) for b, mark in enumerate((0, 8_000, 18_000)) for k in "ab"]


def test_only_columns_of_the_stream_can_group(spark: SparkSession, stream: Callable[..., Any], tmp_path: Path) -> None:
    df = stream("k string, `a b` long, s struct<k: string>").read()
    with StateBackend(str(tmp_path / "state"), spark=spark) as backend:
        for cols in (("k", "a b"), (df.k, F.col("`a b`")), (1, 2), (["k", df["a b"]],), ((F.col("k"), 2),)):
            assert repr(backend.groupBy(df, *cols)) == "GroupedStream[k, a b]"
        for wrong in (0, 4, True, None):
            with pytest.raises(Invalid, match="groupBy"):
                backend.groupBy(df, wrong)  # type: ignore[arg-type]
        for expression in (F.col("s.k"), F.upper("k"), F.col("k").alias("k"), F.lit("k"), F.window("t", "1 second")):
            grouped = backend.groupBy(df, expression)
            with pytest.raises(Invalid, match="no column of the stream, which a processor's key must be"):
                grouped.transformWithState(Latest(), "k string", "append", "none")
