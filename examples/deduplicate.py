"""Deduplication: an event passes once; its id is remembered for a day and then forgotten, so that state stays small.

Run it: ``python examples/deduplicate.py``
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend

DAY_MS = 24 * 60 * 60 * 1000
EVENTS = [
    [{"id": "e1", "amount": 5}, {"id": "e2", "amount": 7}, {"id": "e1", "amount": 5}],
    [{"id": "e2", "amount": 7}, {"id": "e3", "amount": 9}],
]


class Once(StatefulProcessor):
    """Lets the first row of each id through."""

    def init(self, handle):
        self.seen = handle.getValueState("seen", "yes boolean", ttlDurationMs=DAY_MS)

    def handleInputRows(self, key, rows, timerValues):
        if not self.seen.exists():
            self.seen.update((True,))
            yield next(rows)

    def close(self):
        pass


def deduplicated(backend: StateBackend, events: DataFrame) -> DataFrame:
    # Times to live follow the clock, hence processingTime.
    return backend.groupBy(events, "id").transformWithState(Once(), events.schema, "append", "processingTime")


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "events").mkdir(parents=True)
    for number, batch in enumerate(EVENTS):
        (work / "events" / f"{number}.json").write_text("\n".join(map(json.dumps, batch)))
    events = spark.readStream.schema("id string, amount long").option("maxFilesPerTrigger", 1)
    with StateBackend(str(work / "state"), spark=spark) as backend:
        passed = deduplicated(backend, events.json(str(work / "events")))
        query = passed.writeStream.format("json").option("path", str(work / "out"))
        query = query.option("checkpointLocation", backend.checkpoint_location).trigger(availableNow=True).start()
        query.awaitTermination()
        remembered = backend.read_state(spark, "seen").count()
    out = spark.read.schema("id string, amount long").json(str(work / "out"))
    return [*sorted(tuple(row) for row in out.collect()), ("remembered", remembered)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for row in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(*row)
