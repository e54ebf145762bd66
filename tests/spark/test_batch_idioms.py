"""What users do with a batch: each habit works, over batches and a restart, or is refused by name before Spark commits.

The table is that of ``dstl/docs/decisions/batch-idioms.md``.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from home import Home
from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import dstl
from dstl.checkpoint.report import CheckpointReport
from dstl.errors import Invalid

KEYS = 12
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Idiom:
    """One row of the table.

    Attributes:
        each_batch: What foreachBatch does; returns rows to be compared, or None where it reads none.
        shape: What is done to the operator's output before it is written.
        settings: Of the writer.
        refused: What the refusal says; None where it works.
        copies: How often each row of output is seen.
        partial: The output is a part of what the operator has put out.
    """

    each_batch: Callable[[DataFrame, Path], Rows | None] | None = None
    shape: Callable[[DataFrame], DataFrame] = lambda out: out
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    copies: int = 1
    partial: bool = False


def collected(df: DataFrame) -> Rows:
    return [tuple(row) for row in df.collect()]


def written(df: DataFrame, place: Path, *names: str) -> Rows:
    for name in names:
        df.write.mode("append").json(str(place / name))
    frames = [df.sparkSession.read.schema(df.schema).json(str(place / name)) for name in names]
    held = [sorted(collected(frame), key=repr) for frame in frames]
    assert all(rows == held[0] for rows in held)
    return held[0]


def nothing(*_: Any) -> None:
    return None


def in_groups(df: DataFrame, place: Path) -> Rows:
    context = df.sparkSession.sparkContext
    context.setJobGroup("write-orders", "orders")
    rows = collected(df)
    context.setJobGroup("write-audit", "audit")
    assert sorted(collected(df)) == sorted(rows)
    return rows


def tagged(df: DataFrame, place: Path) -> Rows:
    context = df.sparkSession.sparkContext
    context.addJobTag("nightly")
    try:
        return collected(df)
    finally:
        context.removeJobTag("nightly")


def persisted(df: DataFrame, place: Path) -> Rows:
    df.persist()
    try:
        assert df.count() == KEYS
        return written(df, place, f"one-{time.monotonic_ns()}", f"two-{time.monotonic_ns()}")
    finally:
        df.unpersist()


def partly_persisted(df: DataFrame, place: Path) -> None:
    df.persist()
    assert len(df.take(1)) == 1


def counted(df: DataFrame, place: Path) -> Rows:
    assert df.count() == KEYS
    return written(df, place, f"out-{time.monotonic_ns()}")


def twice(df: DataFrame, place: Path) -> Rows:
    return written(df, place, f"one-{time.monotonic_ns()}", f"two-{time.monotonic_ns()}")


def twice_at_once(df: DataFrame, place: Path) -> Rows:
    collect = inheritable_thread_target(df.sparkSession)(lambda: collected(df))
    with ThreadPoolExecutor(2) as pool:
        first, second = (each.result() for each in [pool.submit(collect), pool.submit(collect)])
    assert sorted(first) == sorted(second)
    return first


def asked_first(df: DataFrame, place: Path) -> Rows:
    return [] if df.isEmpty() else collected(df)


def taken_first(df: DataFrame, place: Path) -> Rows:
    return collected(df) if df.take(1) else []


def self_joined(df: DataFrame, place: Path) -> Rows:
    return collected(df.join(df.select("k", F.col("n").alias("m")), "k").select("k", "n", "total"))


def merged(df: DataFrame, place: Path) -> Rows:
    return collected(df.coalesce(1))


def side_by_side(out: DataFrame) -> DataFrame:
    return out.alias("a").join(out.alias("b"), F.expr("a.k = b.k and a.n = b.n")).select("a.*")


IDIOMS: dict[str, Idiom] = {
    "foreachBatch: collect()": Idiom(lambda df, _: collected(df)),
    "foreachBatch: take(1) alone": Idiom(lambda df, _: nothing(df.take(1))),
    "foreachBatch: first() alone": Idiom(lambda df, _: nothing(df.first())),
    "foreachBatch: head(2) alone": Idiom(lambda df, _: nothing(df.head(2))),
    "foreachBatch: limit(2)": Idiom(lambda df, _: nothing(df.limit(2).collect())),
    "foreachBatch: isEmpty() alone": Idiom(lambda df, _: nothing(df.isEmpty())),
    "foreachBatch: isEmpty(), then collect()": Idiom(asked_first),
    "foreachBatch: take(1), then collect()": Idiom(taken_first),
    "foreachBatch: toLocalIterator()": Idiom(lambda df, _: [tuple(row) for row in df.toLocalIterator()]),
    "foreachBatch: count(), then a write": Idiom(counted),
    "foreachBatch: two writes": Idiom(twice),
    "foreachBatch: two actions at once": Idiom(twice_at_once),
    "foreachBatch: two writes of a persisted frame": Idiom(persisted),
    "foreachBatch: persist() and take(1)": Idiom(partly_persisted),
    "foreachBatch: a union with itself": Idiom(lambda df, _: collected(df.union(df)), copies=2),
    "foreachBatch: a join with itself": Idiom(self_joined),
    "foreachBatch: the frame is ignored": Idiom(nothing),
    "foreachBatch: where(false)": Idiom(lambda df, _: nothing(df.where("1 = 0").collect())),
    "foreachBatch: setJobGroup()": Idiom(in_groups),
    "foreachBatch: addJobTag()": Idiom(tagged),
    "foreachBatch: coalesce(1)": Idiom(merged),
    "any sink: trigger(availableNow=True)": Idiom(),
    "any sink: trigger(once=True)": Idiom(settings={"trigger": {"once": True}}),
    "any sink: trigger(processingTime=...)": Idiom(settings={"trigger": {"processingTime": "100 milliseconds"}}),
    "any sink: a union with itself": Idiom(shape=lambda out: out.union(out), copies=2),
    "any sink: a join with itself": Idiom(shape=side_by_side, settings={"mode": "append"}),
    "any sink: repartition(1)": Idiom(shape=lambda out: out.repartition(1)),
    "any sink: coalesce(1)": Idiom(shape=lambda out: out.coalesce(1)),
    "any sink: limit(2)": Idiom(shape=lambda out: out.limit(2), partial=True),
    "any sink: where(false)": Idiom(shape=lambda out: out.where("1 = 0"), copies=0),
    "any sink: asynchronous progress tracking": Idiom(
        settings={"options": {"asyncProgressTrackingEnabled": "true"}, "trigger": None, "format": "noop"},
        refused="asyncProgressTrackingEnabled.*leave the option out",
    ),
    "any sink: trigger(continuous=...)": Idiom(
        settings={"trigger": {"continuous": "1 second"}}, refused="ContinuousTrigger"
    ),
    "any sink: the real-time trigger": Idiom(
        settings={"trigger": None, "real_time": True}, refused="STREAMING_REAL_TIME_MODE"
    ),
    "any sink: an operator that is not written": Idiom(
        settings={"unread": True}, refused="does not read operator 'unread'.*Define what the query writes"
    ),
}


class Job:
    """One query of one operator over a directory of files, and all that it leaves behind."""

    def __init__(self, home: Home, idiom: Idiom) -> None:
        self.home, self.idiom = home, idiom
        self.source = home.stream()
        self.got: dict[int, Rows | None] = {}
        self.checkpointed: list[int] = []
        self.expected: dict[str, tuple[int, int]] = {}
        self.told: Rows = []

    def add(self, batches: int) -> None:
        for _ in range(batches):
            rows = [{"k": f"k{i % KEYS}", "v": self.source.files * 100 + i} for i in range(40)]
            self.source.add(rows)
            for row in rows:
                n, total = self.expected.get(row["k"], (0, 0))
                self.expected[row["k"]] = (n + 1, total + row["v"])
            self.told += [(k, *values) for k, values in self.expected.items()]

    @property
    def last_batch(self) -> int:
        return max(self.home.commits(), default=-1)

    def run(self) -> None:
        settings, place = self.idiom.settings, self.home.path
        with self.home.backend(parallelism=3) as backend:
            backend.add_listener(
                lambda report: (
                    self.checkpointed.append(report.batch_id) if isinstance(report, CheckpointReport) else None
                )
            )
            rows = self.source.read()
            out = backend.groupBy(rows, "k").agg(F.count("*").alias("n"), F.sum("v").alias("total"), name="counts")
            if settings.get("unread"):
                backend.groupBy(rows, "v").agg(F.count("*").alias("n"), name="unread")
            writer = self.idiom.shape(out).writeStream.option("checkpointLocation", backend.checkpoint_location)
            trigger = settings.get("trigger", {"availableNow": True})
            if self.idiom.each_batch is not None:
                each = self.idiom.each_batch

                def keep(df: DataFrame, batch: int) -> None:
                    self.got[batch] = each(df, place)

                writer = writer.foreachBatch(keep)
            else:
                sink = settings.get("format", "json")
                writer = writer.format(sink).options(**({"path": str(place / "out")} if sink == "json" else {}))
            for name, value in settings.get("options", {}).items():
                writer = writer.option(name, value)
            if trigger is not None:
                writer = writer.trigger(**trigger)
            if settings.get("real_time"):
                jvm = self.home.spark._jvm
                assert jvm is not None
                writer._jwrite.trigger(jvm.org.apache.spark.sql.streaming.Trigger.RealTime("5 seconds"))
            query = writer.start()
            try:
                if trigger is None or "processingTime" in trigger:
                    deadline = time.monotonic() + 60
                    while query.isActive and self.last_batch < self.source.files - 1 and time.monotonic() < deadline:
                        time.sleep(0.05)
                    if (failed := query.exception()) is not None:
                        raise failed
                else:
                    query.awaitTermination()
            finally:
                query.stop()

    def stored(self) -> tuple[int, dict[str, tuple[int, int]]]:
        held = self.home.stored("counts", "aggregates")
        return self.home.checkpointed(), {key: (value[0], value[1]) for key, value in held.items()}

    def output(self) -> Rows:
        if self.idiom.each_batch is not None:
            return [row for rows in self.got.values() for row in rows or ()]
        reader = self.home.spark.read.schema("k string, n long, total long")
        return collected(reader.json(str(self.home.path / "out")))


@pytest.mark.drawn(6)
@pytest.mark.usefixtures("one_partition")
@pytest.mark.parametrize("name", IDIOMS)
def test_every_idiom_keeps_state_and_output_or_is_refused_before_spark_commits(home: Home, name: str) -> None:
    idiom = IDIOMS[name]
    job = Job(home, idiom)
    job.add(1)
    if idiom.refused is not None:
        with pytest.raises((PySparkException, Invalid), match=f"(?s){idiom.refused}"):
            job.run()
        assert home.commits() == []
        return
    job.run()
    assert job.stored() == (job.last_batch, job.expected)
    job.add(2)
    job.run()
    assert job.stored() == (job.last_batch, job.expected)
    assert sorted(set(job.checkpointed)) == home.commits()
    if not idiom.partial and "once" not in str(idiom.settings) and None not in job.got.values():
        assert sorted(job.output()) == sorted(job.told * idiom.copies)


def test_the_table_in_the_docs_is_the_one_that_is_walked() -> None:
    record = (Path(dstl.__file__).parent / "docs" / "decisions" / "batch-idioms.md").read_text()
    rows = dict(re.findall(r"^\| `?((?:foreachBatch|any sink): [^|]+?) \| (works|refused)", record, re.MULTILINE))
    assert rows == {name: "refused" if idiom.refused else "works" for name, idiom in IDIOMS.items()}


def test_a_query_that_is_started_in_another_ones_foreachbatch_is_found_again(home: Home) -> None:
    """Its metadata was taken for a file of the other one's run, and lost: from the second start on it was refused."""
    outer, inner = home.stream(), home.stream()
    outer.add([{"k": "a", "v": 1}])
    outer.add([{"k": "a", "v": 2}])
    got: Rows = []

    def start_another(batch: DataFrame, number: int) -> None:
        inner.add([row.asDict() for row in batch.collect()])
        with home.backend("inner", parallelism=1) as backend:
            got.extend(inner.collect(backend.groupBy(inner.read(), "k").sum("v"), backend, "update"))

    with home.backend("outer", parallelism=1) as backend:
        once = backend.dropDuplicates(outer.read(), name="once")
        writer = once.writeStream.foreachBatch(start_another).trigger(availableNow=True)
        writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()
    assert got == [(0, "a", 1), (1, "a", 3)]
