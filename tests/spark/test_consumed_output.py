"""The ways in which a sink may use a batch's output: whole, twice, piece by piece, under job groups of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle, inheritable_thread_target
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StatefulProcessor

from dstl.checkpoint.service import CheckpointReport
from dstl.spark import StateBackend

pytestmark = pytest.mark.spark

cloudpickle.register_pickle_by_value(sys.modules[__name__])

COUNT = "k string, n long"
Sink = Callable[[DataFrame], list[Row]]


class Counts(StatefulProcessor):
    """Counts the rows of each key; keys whose name begins with q are quiet."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + len(list(rows))
        self.n.update((n,))
        if not key[0].startswith("q"):
            yield Row(k=key[0], n=n)

    def close(self) -> None:
        pass


def twice(out: DataFrame) -> list[Row]:
    first, second = out.collect(), out.collect()
    assert sorted(first) == sorted(second)
    return first


def twice_at_once(out: DataFrame) -> list[Row]:
    collect = inheritable_thread_target(out.sparkSession)(out.collect)
    with ThreadPoolExecutor(2) as pool:
        first, second = (each.result() for each in [pool.submit(collect), pool.submit(collect)])
    assert sorted(first) == sorted(second)
    return first


def take_and_collect(out: DataFrame) -> list[Row]:
    return out.collect() if out.take(1) else []


def count_and_collect(out: DataFrame) -> list[Row]:
    rows = out.collect()
    assert out.count() == len(rows)
    return rows


def union_with_itself(out: DataFrame) -> list[Row]:
    return out.where("n % 2 = 0").union(out.where("n % 2 = 1")).collect()


def in_a_job_group(out: DataFrame) -> list[Row]:
    context = out.sparkSession.sparkContext
    context.setJobGroup("orders", "write the orders")
    first = out.collect()
    context.setJobGroup("audit", "write them again")
    assert sorted(first) == sorted(out.collect())
    return first


def without_a_job_group(out: DataFrame) -> list[Row]:
    out.sparkSession.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    return out.collect()


def tagged(out: DataFrame) -> list[Row]:
    out.sparkSession.addTag("a-session-tag")
    out.sparkSession.sparkContext.addJobTag("a-job-tag")
    return out.collect()


IDIOMS: list[Sink] = [
    twice,
    twice_at_once,
    lambda out: list(out.toLocalIterator()),
    take_and_collect,
    lambda out: [] if out.isEmpty() else out.collect(),
    count_and_collect,
    union_with_itself,
    tagged,
    in_a_job_group,
    # From here on Spark's tasks name the group that the batch before has left.
    lambda out: out.collect(),
    without_a_job_group,
    lambda out: list(out.toLocalIterator()),
]


@pytest.mark.drawn(1, group="output")
def test_every_way_of_using_the_whole_output_is_one_checkpoint(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream("k string")
    # All rows; rows without output; and few keys, so that partitions are empty.
    names = [[f"k{n}" for n in range(20)], [f"q{n}" for n in range(20)], ["k1"], ["q1", "q2"]]
    inputs: list[list[str]] = []
    got: dict[int, list[tuple[str, int]]] = {}
    reports: list[Any] = []
    failing: list[int] = []

    def use(out: DataFrame, batch: int) -> None:
        rows = IDIOMS[batch % len(IDIOMS)](out)
        if batch in failing:
            failing.remove(batch)
            raise RuntimeError("the sink has failed after all its work")
        got[batch] = sorted((row.k, row.n) for row in rows)

    with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
        backend.add_listener(reports.append)
        counts = backend.groupBy(source.read(), "k").transformWithState(Counts(), COUNT, "append", "none")

        def run() -> None:
            writer = counts.writeStream.foreachBatch(use).option("checkpointLocation", str(tmp_path / "checkpoint"))
            writer.trigger(availableNow=True).start().awaitTermination()

        for _ in range(len(IDIOMS)):
            inputs.append(names[len(inputs) % len(names)])
            source.add([{"k": k} for k in inputs[-1]])
        # A restart in the same driver, at a batch that names a group of the user's before and after.
        failing.append(len(IDIOMS) - 3)
        with pytest.raises(StreamingQueryException, match="the sink has failed"):
            run()
        run()
        inputs.append(names[0])
        source.add([{"k": k} for k in names[0]])
        run()
    made = [report.batch_id for report in reports if isinstance(report, CheckpointReport)]
    assert made == sorted([*range(len(inputs)), len(IDIOMS) - 3]), "one for each time that a batch has run"
    totals: dict[str, int] = {}
    for batch, keys in enumerate(inputs):
        for key in keys:
            totals[key] = totals.get(key, 0) + 1
        assert got[batch] == sorted((k, totals[k]) for k in keys if not k.startswith("q")), batch


@pytest.mark.drawn(1, group="output")
def test_a_sink_that_leaves_tasks_out_is_told_how_to_lose_nothing(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    """The way out was to throw the state away. Now it is tried here: Spark runs the batch again."""
    source = stream("k string")
    keys = [f"k{n}" for n in range(20)]
    for _ in range(3):
        source.add([{"k": k} for k in keys])
    got: dict[int, list[tuple[str, int]]] = {}
    mended: list[bool] = []

    def use(out: DataFrame, batch: int) -> None:
        rows = out.collect() if batch != 1 or mended else out.limit(1).collect()
        got[batch] = sorted((row.k, row.n) for row in rows)

    def run() -> None:
        with StateBackend(str(tmp_path / "state"), parallelism=3, spark=spark) as backend:
            counts = backend.groupBy(source.read(), "k").transformWithState(Counts(), COUNT, "append", "none")
            # As a sink of another language has it: nothing of ours comes between its return and Spark's commit.
            writer = DataStreamWriter.foreachBatch.__wrapped__(counts.writeStream, use)
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            writer.trigger(availableNow=True).start().awaitTermination()

    for _ in range(2):
        with pytest.raises(
            StreamingQueryException, match=r"remove commits/1 and offsets/2 .* Spark runs batch 1 again"
        ):
            run()
    mended.append(True)
    for entry in ("commits/1", "commits/.1.crc", "offsets/2", "offsets/.2.crc"):
        (tmp_path / "checkpoint" / entry).unlink()
    run()
    assert got == {batch: sorted((k, batch + 1) for k in keys) for batch in range(3)}
