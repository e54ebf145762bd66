"""A batch that Spark runs again makes what it made before: a sink that goes by the batch's number has it already."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

DUE_MS = 4000


class Reminder(StatefulProcessor):
    """A timer of four seconds for the key "a"; a list of all that the other keys have seen."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.seen = handle.getListState("seen", "i long")
        self.brief = handle.getValueState("brief", "i long", DUE_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.seen.appendValue((row.i,))
        brief, now = self.brief.get(), timerValues.getCurrentProcessingTimeInMs()
        if brief is None:
            self.brief.update((now,))
        if key[0] == "a":
            self.handle.registerTimer(now + DUE_MS)
        yield Row(k=key[0], what=f"{[i for (i,) in self.seen.get()]} {brief}", at=now)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], what="fired", at=timerValues.getCurrentProcessingTimeInMs())


def test_a_timer_that_comes_due_before_a_replay_does_not_fire_into_a_batch_that_the_sink_has(home: Home) -> None:
    source = home.stream("k string, i long")
    source.add([{"k": "a", "i": 1}, {"k": "b", "i": 1}])
    source.add([{"k": "b", "i": 2}, {"k": "b", "i": 3}])
    applied: dict[int, list[Any]] = {}
    ignored: dict[int, list[Any]] = {}

    def sink(out: Any, batch: int) -> None:
        rows = sorted(tuple(row) for row in out.collect())
        if batch in applied:
            ignored[batch] = rows
            return
        applied[batch] = rows
        if batch == 1:
            due = next(at for k, _, at in applied[0] if k == "a") + DUE_MS
            time.sleep(max(0.0, due / 1000 - time.time()) + 0.1)
            raise RuntimeError("the driver dies after the sink's commit and before Spark's")

    def run() -> None:
        with home.backend(parallelism=2) as backend:
            timed = backend.groupBy(source.read(), "k").transformWithState(
                Reminder(), "k string, what string, at long", "append", "processingTime"
            )
            writer = timed.writeStream.foreachBatch(sink).trigger(availableNow=True)
            writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="the driver dies"):
        run()
    source.add([{"k": "b", "i": 4}])
    run()
    assert ignored == {1: applied[1]}
    everything = [row for batch in sorted(applied) for row in applied[batch]]
    assert [row[:2] for row in everything].count(("a", "fired")) == 1
    assert [at for *_, at in everything] == sorted(at for *_, at in everything)
    assert [what.split("]")[0] for k, what, _ in everything if k == "b"] == ["[1", "[1, 2, 3", "[1, 2, 3, 4"]
