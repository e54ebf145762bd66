"""Sessions of clicks: a session ends when its user has been quiet for half an hour of event time.

Run it: ``python examples/sessions.py``
"""

import json
import os
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend

GAP_MS = 30 * 60 * 1000
CLICKS = [
    [("ann", "2026-01-01 10:00:00"), ("bob", "2026-01-01 10:05:00"), ("ann", "2026-01-01 10:20:00")],
    [("ann", "2026-01-01 11:30:00")],  # ends ann's first session; bob's when the watermark has moved, without new data
    [("eve", "2026-01-01 12:30:00")],  # ends ann's second one; eve's own stays open
]


class Sessions(StatefulProcessor):
    """Yields a session when it has ended: who, how many clicks, and how many minutes from the first to the last."""

    def init(self, handle):
        self.handle = handle
        self.session = handle.getValueState("session", "first_ms long, last_ms long, clicks int")

    def handleInputRows(self, key, rows, timerValues):
        first, last, clicks = self.session.get() or (0, 0, 0)
        if clicks:
            self.handle.deleteTimer(last + GAP_MS)
        for at in sorted(int(row.at.timestamp() * 1000) for row in rows):
            if clicks and at - last > GAP_MS:  # input comes before the timers of the same batch
                yield self.ended(key, first, last, clicks)
                clicks = 0
            first, last, clicks = at if not clicks else min(first, at), max(last, at), clicks + 1
        self.session.update((first, last, clicks))
        self.handle.registerTimer(last + GAP_MS)

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        ended = self.session.get()
        self.session.clear()
        yield self.ended(key, *ended)

    def ended(self, key, first, last, clicks):
        return Row(user=key[0], clicks=clicks, minutes=(last - first) // 60_000)

    def close(self):
        pass


def sessions(backend: StateBackend, clicks: DataFrame) -> DataFrame:
    return backend.groupBy(clicks.withWatermark("at", "1 minute"), "user").transformWithState(
        Sessions(), "user string, clicks int, minutes long", "append", "eventTime"
    )


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "clicks").mkdir(parents=True)
    for number, batch in enumerate(CLICKS):
        lines = [json.dumps({"user": user, "at": at}) for user, at in batch]
        file = work / "clicks" / f"{number}.json"
        file.write_text("\n".join(lines))
        os.utime(file, (number, number))  # Spark takes the oldest file first
    clicks = spark.readStream.schema("user string, at timestamp").option("maxFilesPerTrigger", 1)
    with StateBackend(str(work / "state"), spark=spark) as backend:
        found = sessions(backend, clicks.json(str(work / "clicks")))
        query = found.writeStream.format("json").option("path", str(work / "out"))
        query = query.option("checkpointLocation", backend.checkpoint_location).trigger(availableNow=True).start()
        query.awaitTermination()
    out = spark.read.schema("user string, clicks int, minutes long").json(str(work / "out"))
    return sorted(tuple(row) for row in out.collect())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for user, clicks, minutes in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{user}: {clicks} clicks in {minutes} minutes")
