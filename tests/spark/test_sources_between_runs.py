"""Sources that event time, ticks and initial state bring: they come and go between runs, and Spark counts them."""

from collections.abc import Iterator
from typing import Any

import pyspark
import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from dstl.errors import Invalid
from dstl.spark import cause
from dstl.spark.query.offsets import fitted_offsets


class Counts(StatefulProcessor):
    """Counts a key's rows, from the initial state on."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.n.update((initialState.n,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + len(list(rows))
        self.n.update((n,))
        yield Row(k=key[0], n=n)


def test_what_brings_a_source_may_come_and_go_between_runs(home: Home) -> None:
    """It ended with Spark's assertion about sources."""
    source = home.stream("k string, t timestamp")
    start = home.spark.createDataFrame([("a", 100)], "k string, n long")
    got = []
    runs: list[tuple[bool, str, dict[str, Any]]] = [
        (False, "counts", {"initialState": start}),
        (True, "counts", {"tick": "1 hour", "initialState": start}),
        (True, "counts", {"initialState": start}),
        (True, "others", {"initialState": start}),
        (False, "counts", {"tick": "1 hour"}),
        (False, "counts", {}),
    ]
    for run, (in_front, name, brought) in enumerate(runs):
        if name == "counts":
            source.add([{"k": "a", "t": f"2026-03-01T10:{10 * run}:00"}])
        with home.backend(parallelism=1, allow_non_restored_state=True) as backend:
            df = source.read().withWatermark("t", "1 minute")
            if in_front:  # an operator with event time
                df = backend.dropDuplicatesWithinWatermark(df, ["k", "t"], name="once")
            counts = backend.groupBy(df, "k").transformWithState(
                Counts(), "k string, n long", "update", "processingTime", name=name, **brought
            )
            if name == "counts":
                got += source.collect(counts, backend)
                continue
            with pytest.raises(StreamingQueryException) as raised:  # silently without its initial state, it was
                source.collect(counts, backend)
            assert "operator 'others': initialState is given in a query's first batch" in str(cause(raised.value))
    assert [row[1:] for row in got] == [("a", n) for n in range(101, 106)]


def test_initial_state_is_not_given_over_a_savepoint_s(home: Home) -> None:
    """In a new checkpoint directory it was: what a processor keeps took the place of what the savepoint had."""
    source = home.stream("k string, t timestamp")
    source.add([{"k": "a", "t": "2026-03-01T10:00:00"}])
    start = home.spark.createDataFrame([("a", 100)], "k string, n long")

    def run(place: str, saved: str | None, **brought: Any) -> list[tuple[Any, ...]]:
        with home.backend(place, parallelism=1, restore_from=saved) as backend:
            counts = backend.groupBy(source.read(), "k").transformWithState(
                Counts(), "k string, n long", "update", "processingTime", name="counts", **brought
            )
            got = source.collect(counts, backend)
            if saved is None:
                backend.savepoint("saved")
            return got

    assert run("state", None, initialState=start) == [(0, "a", 101)]
    source.carry_over(home.path / "state", home.path / "copied")
    source.add([{"k": "a", "t": "2026-03-01T10:00:00"}])
    saved = f"{home.path}/state/savepoints/saved"
    assert run("copied", saved, initialState=start) == [(1, "a", 102)]
    with pytest.raises(StreamingQueryException, match="'counts': its initialState would be given over its state from"):
        run("new", saved, initialState=start)
    # Its sources are read from their start, as is said.
    assert run("new", saved) == [(0, "a", 102), (1, "a", 103)]


def test_a_source_of_the_user_s_that_comes_is_refused_in_our_words(home: Home) -> None:
    source, other = home.stream("k string, t timestamp"), home.stream("k string, t timestamp")
    source.add([{"k": "a", "t": "2026-03-01T10:00:00"}])
    for run in range(2):
        with home.backend(parallelism=1) as backend:
            df = source.read().withWatermark("t", "1 minute")
            df = df.union(other.read()) if run else df
            query = source.writer(backend.groupBy(df, "k").agg(F.count("*").alias("n"), name="counts"), backend)
            if not run:
                query.outputMode("append").start().awaitTermination()
                continue
            with pytest.raises(StreamingQueryException) as raised:
                query.start().awaitTermination()
    found = cause(raised.value)
    assert isinstance(found, Invalid)
    assert "the offsets of this query are of [a source], and it has [a source, a source] now" in str(found)


@pytest.mark.parametrize(
    ("recorded", "sources", "read"),
    [
        (["{}"], ["Kafka", "dstl_watermark", "dstl_ticks"], ["{}", "-", "-"]),
        (
            ['{"a": {"0": 5}}', '{"dstl_ticks": 7}', "-"],
            ["Kafka", "dstl_watermark", "file"],
            ['{"a": {"0": 5}}', "-", "-"],
        ),
        (
            ["-", '{"dstl_watermark": 5, "sparks": 3}', '{"dstl_watermark": 9}'],
            ["file", "dstl_ticks", "dstl_watermark"],
            ["-", "-", '{"dstl_watermark": 5, "sparks": 3}'],
        ),
        (['{"tick": 5}', '{"dstl_once counts": 1}'], ["mine"], ['{"tick": 5}']),
        (["{mine", "7", "5"], ["mine", "rate", "rate", "dstl_ticks"], ["{mine", "7", "5", "-"]),
        (['{"dstl_ticks": {"0": 5}}'], ["Kafka", "dstl_ticks"], ['{"dstl_ticks": {"0": 5}}', "-"]),
    ],
)
def test_offsets_are_read_by_the_sources_that_a_query_has(
    recorded: list[str], sources: list[str], read: list[str]
) -> None:
    head = ["v1", '{"batchWatermarkMs":0}']
    fitted = fitted_offsets("\n".join(head + recorded).encode(), sources)
    assert fitted.decode().split("\n") == head + read


@pytest.mark.parametrize("sources", [["file", "dstl_watermark"], ["dstl_watermark", "file", "file"], ["file"] * 3])
def test_offsets_never_become_those_of_another_source(sources: list[str]) -> None:
    """A file source also keeps by its place what it has read."""
    with pytest.raises(Invalid, match=r"are of \[a source, a source, dstl_watermark\]"):
        fitted_offsets(b'v1\n{}\n{"logOffset":1}\n{"logOffset":2}\n{"dstl_watermark": 5}', sources)


def test_initial_state_is_not_given_to_nobody_where_the_query_has_begun() -> None:
    record = b'v1\n{}\n{"logOffset":1}\n{"dstl_once wins": 1}\n{"dstl_ticks": 5}'
    with pytest.raises(Invalid, match="operator 'counts': initialState is given in a query's first batch, and this"):
        fitted_offsets(record, ["file", "dstl_once counts", "dstl_ticks"])
    assert fitted_offsets(record, ["file", "dstl_ticks", "dstl_once wins"]).endswith(b'5}\n{"dstl_once wins": 1}')


@pytest.mark.skipif(pyspark.__version__ < "4.2", reason="before Spark 4.2 offsets have no numbers")
def test_offsets_with_numbers_are_refused_where_they_would_be_another_source_s(home: Home, set_conf: Any) -> None:
    """A tick's offset was taken for that of initial state, which was given again, over what had been counted."""
    set_conf({"spark.sql.streaming.offsetLog.formatVersion": "2"})
    source = home.stream("k string, t timestamp")
    start = home.spark.createDataFrame([("a", 100)], "k string, n long")
    for brought in ({"tick": "1 hour"}, {"tick": "1 hour"}, {"initialState": start}):
        source.add([{"k": "a", "t": "2026-03-01T10:00:00"}])
        with home.backend(parallelism=1) as backend:
            rows = source.read().union(source.read())
            rows = rows.union(rows)  # of four relations two sources
            counts = backend.groupBy(rows, "k").transformWithState(
                Counts(), "k string, n long", "update", "processingTime", name="counts", **brought
            )
            if "tick" in brought:
                got = source.collect(counts, backend)
                continue
            with pytest.raises(StreamingQueryException) as raised:
                source.collect(counts, backend)
    assert [row[1:] for row in got] == [("a", 8)]
    assert "formatVersion=2, with which event time, tick= and initialState can neither come" in str(cause(raised.value))
