"""From ``transformWithState`` to DSTL: the processor stays as it is, and this is the whole diff of the job.

::

    +backend = StateBackend("s3://bucket/jobs/visits")
    -visits = clicks.groupBy("page").transformWithState(Visits(), "page string, n long", "update", "none")
    +visits = backend.groupBy(clicks, "page").transformWithState(Visits(), "page string, n long", "update", "none")

State itself moves as initial state: read Spark's with ``spark.read.format("statestore")`` and pass it grouped, as
PySpark takes it; ``handleInitialState`` gets it in the new query's first batch, as it does in Spark.

Run it: ``python examples/migrate.py``
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
OUTPUT = "page string, n long"


class Visits(StatefulProcessor):
    """Counts the clicks on each page."""

    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInitialState(self, key, initialState, timerValues):
        self.n.update((initialState.n,))

    def handleInputRows(self, key, rows, timerValues):
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(page=key[0], n=n)

    def close(self):
        pass


def run(visits: DataFrame, checkpoint: Path) -> list[tuple]:
    latest: dict[str, int] = {}
    query = (
        visits.writeStream.outputMode("update")
        .foreachBatch(lambda df, _: latest.update((row.page, row.n) for row in df.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(latest.items())


def main(spark: SparkSession, work: Path) -> list[tuple]:
    for day, pages in (("monday", ["a", "b", "a"]), ("tuesday", ["a", "c"])):
        (work / day).mkdir(parents=True)
        (work / day / "clicks.json").write_text("\n".join(json.dumps({"page": page}) for page in pages))
    read = spark.readStream.schema("page string").json

    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    monday = read(str(work / "monday")).groupBy("page").transformWithState(Visits(), OUTPUT, "update", "none")
    run(monday, work / "spark")
    stored = spark.read.format("statestore").option("stateVarName", "n").load(str(work / "spark"))
    with StateBackend(str(work / "state"), spark=spark) as backend:
        state = stored.select("key.page", "value.n").groupBy("page")
        tuesday = backend.groupBy(read(str(work / "tuesday")), "page").transformWithState(
            Visits(), OUTPUT, "update", "none", state
        )
        return run(tuesday, work / "checkpoint")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for page, n in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{page}: {n}")
