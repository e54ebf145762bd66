"""Running aggregates without Python code per row: DSTL's vectorised operator.

Run it: ``python examples/aggregates.py``
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dstl.spark import StateBackend

READINGS = [
    [("s1", 20.5), ("s1", 21.5), ("s2", 3.0)],
    [("s1", 18.0), ("s3", 7.0)],
]


def statistics(backend: StateBackend, readings: DataFrame) -> DataFrame:
    return backend.groupBy(readings, "sensor").agg(
        F.count("*").alias("n"),
        F.mean("value").alias("mean"),
        F.min("value").alias("low"),
        F.max("value").alias("high"),
    )


def main(spark: SparkSession, work: Path) -> list[tuple]:
    (work / "readings").mkdir(parents=True)
    for number, batch in enumerate(READINGS):
        lines = [json.dumps({"sensor": sensor, "value": value}) for sensor, value in batch]
        (work / "readings" / f"{number}.json").write_text("\n".join(lines))
    readings = spark.readStream.schema("sensor string, value double").option("maxFilesPerTrigger", 1)
    latest: dict[str, tuple] = {}
    with StateBackend(str(work / "state"), spark=spark) as backend:
        found = statistics(backend, readings.json(str(work / "readings")))
        query = (
            found.writeStream.outputMode("update")
            .foreachBatch(lambda df, _: latest.update((row.sensor, tuple(row)) for row in df.collect()))
            .option("checkpointLocation", backend.checkpoint_location)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return sorted(latest.values())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for sensor, n, mean, low, high in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{sensor}: {n} readings, mean {mean}, from {low} to {high}")
