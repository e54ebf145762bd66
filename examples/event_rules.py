"""Rules over sequences of events: a service may be used between a login and a logout, and at no other time.

Run it: ``python examples/event_rules.py``
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend

EVENTS = [
    [("ann", 1, "login"), ("ann", 2, "service"), ("bob", 1, "service")],
    [("ann", 3, "logout"), ("ann", 4, "service"), ("bob", 2, "login")],
    [("bob", 3, "login"), ("bob", 4, "service"), ("bob", 5, "logout")],
]


class Rules(StatefulProcessor):
    """Yields what breaks a rule. The state outlives batches and restarts: who is logged in, since when."""

    def init(self, handle):
        self.login = handle.getValueState("login", "seq long")

    def handleInputRows(self, key, rows, timerValues):
        for event in sorted(rows, key=lambda row: row.seq):  # Spark promises no order within a batch
            since = self.login.get()
            if event.what == "login":
                if since:
                    yield self.broken(event, f"logged in already, at {since[0]}")
                self.login.update((event.seq,))
            elif not since:
                yield self.broken(event, f"{event.what} before login")
            elif event.what == "logout":
                self.login.clear()

    def broken(self, event, why):
        return Row(user=event.user, seq=event.seq, why=why)

    def close(self):
        pass


def broken_rules(backend: StateBackend, events: DataFrame) -> DataFrame:
    return backend.groupBy(events, "user").transformWithState(
        Rules(), "user string, seq long, why string", "append", "none"
    )


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "events").mkdir(parents=True)
    for number, batch in enumerate(EVENTS):
        lines = [json.dumps({"user": user, "seq": seq, "what": what}) for user, seq, what in batch]
        file = work / "events" / f"{number}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (number, number))  # Spark takes the oldest file first
    events = spark.readStream.schema("user string, seq long, what string").option("maxFilesPerTrigger", 1)
    with StateBackend(str(work / "state"), spark=spark) as backend:
        broken = broken_rules(backend, events.json(str(work / "events")))
        query = broken.writeStream.format("json").option("path", str(work / "out"))
        query = query.option("checkpointLocation", backend.checkpoint_location).trigger(availableNow=True).start()
        query.awaitTermination()
    out = spark.read.schema("user string, seq long, why string").json(str(work / "out"))
    return sorted(tuple(row) for row in out.collect())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for user, seq, why in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{user}, event {seq}: {why}")
