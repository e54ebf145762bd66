"""From ``transformWithState`` to DSTL: the processor stays as it is, and this is the whole diff of the job.

::

    +backend = StateBackend("s3://bucket/jobs/visits")
    -visits = clicks.groupBy("page").transformWithState(Visits(), "page string, n long", "update", "none")
    +visits = backend.groupBy(clicks, "page").transformWithState(Visits(), "page string, n long", "update", "none")

State moves as a savepoint, and the sources go on where they were: ``migrate_state``, or ``dstl files migrate``.

Run it: ``python examples/migrate.py``
"""

import json
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.spark import StateBackend, migrate_state

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
OUTPUT = "page string, n long"


class Visits(StatefulProcessor):
    """Counts the clicks on each page."""

    def init(self, handle):
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key, rows, timerValues):
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(page=key[0], n=n)

    def close(self):
        pass


def run(visits: DataFrame, checkpoint: str) -> list[tuple]:
    latest: dict[str, int] = {}
    query = (
        visits.writeStream.outputMode("update")
        .foreachBatch(lambda df, _: latest.update((row.page, row.n) for row in df.collect()))
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(latest.items())


def click(work: Path, day: str, pages: list[str]) -> None:
    (work / "clicks").mkdir(parents=True, exist_ok=True)
    (work / "clicks" / f"{day}.json").write_text("\n".join(json.dumps({"page": page}) for page in pages))


def main(spark: SparkSession, work: Path) -> list[tuple]:
    click(work, "monday", ["a", "b", "a"])
    clicks = spark.readStream.schema("page string").json(str(work / "clicks"))
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    run(clicks.groupBy("page").transformWithState(Visits(), OUTPUT, "update", "none"), str(work / "spark"))

    moved = migrate_state(
        str(work / "spark"), work / "state", operators={0: "visits"}, new_checkpoint=str(work / "state" / "_spark")
    )
    click(work, "tuesday", ["a", "c"])
    with StateBackend(work / "state", restore_from=moved.savepoint, parallelism=5, spark=spark) as backend:
        visits = backend.groupBy(clicks, "page").transformWithState(Visits(), OUTPUT, "update", "none", name="visits")
        return run(visits, backend.checkpoint_location)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        for page, n in main(SparkSession.builder.getOrCreate(), Path(directory)):
            print(f"{page}: {n}")
