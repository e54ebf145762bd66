"""Smoothed readings of sensors in pandas style: frames in, frames out, and the processor tried without Spark first.

Run it: ``python examples/means_in_pandas.py``
"""

import json
import tempfile
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend
from dstl.testing.processor_tester import ProcessorTester

INPUT = "sensor string, value double"
OUTPUT = "sensor string, mean double"
READINGS = [("s1", 20.0), ("s1", 22.0), ("s2", 5.0), ("s1", 24.0)]


class Smoothed(StatefulProcessor):
    """Yields the mean of each sensor's last three readings."""

    def init(self, handle):
        self.last = handle.getListState("last", "value double")

    def handleInputRows(self, key, rows, timerValues):
        values = [value for (value,) in self.last.get()]
        for frame in rows:
            values += frame["value"].tolist()
        self.last.put([(value,) for value in values[-3:]])
        yield pd.DataFrame({"sensor": [key[0]], "mean": [sum(values[-3:]) / len(values[-3:])]})


def main(spark: SparkSession, work: Path) -> list[tuple]:
    tester = ProcessorTester(Smoothed(), key="sensor string", input=INPUT, output=OUTPUT, style="pandas")
    assert tester.process([("s1", 1.0), ("s1", 3.0)])["mean"].tolist() == [2.0]

    (work / "readings").mkdir(parents=True)
    lines = [json.dumps({"sensor": sensor, "value": value}) for sensor, value in READINGS]
    (work / "readings" / "1.json").write_text("\n".join(lines))
    found: list[tuple] = []
    with StateBackend(str(work / "state"), spark=spark) as backend:
        readings = spark.readStream.schema(INPUT).json(str(work / "readings"))
        means = backend.groupBy(readings, "sensor").transformWithStateInPandas(
            Smoothed(), OUTPUT, "update", "none", name="smoothed"
        )
        writer = means.writeStream.outputMode("update").trigger(availableNow=True)
        writer = writer.foreachBatch(lambda batch, number: found.extend(map(tuple, batch.collect())))
        writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()
    return sorted(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for sensor, mean in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{sensor}: {mean}")
