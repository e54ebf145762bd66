"""A count on ``dstl://`` that is killed: ``python files_job.py DIRECTORY FORMAT MASTER``; it ends when all is counted.

In format 0 it is counted by a ``StateBackend``, whose checkpoints are Spark's commits.

The query is started again when it fails for what a restart helps with, as a supervisor would.
"""

import os
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dstl.spark import StateBackend, jar_path
from tests.worlds.driver_process import INTERPRETED, LOCAL, session

STORE = "spark.sql.streaming.stateStore"
RESTARTS = 8


def main(directory: Path, version: str, master: str) -> int:
    conf = {
        **LOCAL,
        **INTERPRETED,
        "spark.jars": jar_path(),
        "spark.plugins": "dstl.spark.DstlPlugin",
        "spark.dstl.python": sys.executable,
        "spark.dstl.commit": os.environ.get("FILES_COMMIT", "now"),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.shuffle.partitions": "3",
        f"{STORE}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
        f"{STORE}.checkpointFormatVersion": version if version != "0" else "1",
        f"{STORE}.minDeltasForSnapshot": "3",
        f"{STORE}.maintenanceInterval": "1s",
    }
    spark = session("files", {"master": master, "conf": conf})
    spark.sparkContext.setLogLevel("OFF")
    source = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).json(str(directory / "in"))
    place = f"dstl://{directory}/query"
    if version == "0":
        with StateBackend(str(directory / "query"), parallelism=3, spark=spark) as backend:
            counts = backend.groupBy(source, "k").agg(F.count("*").alias("n"), name="counts")
            run(counts, backend.checkpoint_location)
            tell(backend.read_state(spark, "aggregates").selectExpr("key.k", "value.n"))
    else:
        run(source.groupBy("k").count(), place)
        tell(spark.read.format("statestore").load(place).selectExpr("key.k", "value.count"))
    spark.stop()
    return 0


def run(counts: DataFrame, place: str) -> None:
    writer = counts.writeStream.outputMode("update").format("noop").option("checkpointLocation", place)
    for _ in range(RESTARTS):
        try:
            print("started", flush=True)
            writer.trigger(availableNow=True).start().awaitTermination()
            return
        except StreamingQueryException as error:
            print(f"restarted: {str(error).splitlines()[0][:300]}", flush=True)


def tell(state: DataFrame) -> None:
    print("counted", sorted(map(tuple, state.collect())), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
