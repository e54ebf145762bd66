"""A count on ``dstl://`` that is killed: ``python files_job.py DIRECTORY FORMAT MASTER``; it ends when all is counted.

In format 0 it is counted by a ``StateBackend``, whose checkpoints are Spark's commits.

The query is started again when it fails for what a restart helps with, as a supervisor would.
"""

import os
import sys
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from dstl.spark import StateBackend, count, jar_path

STORE = "spark.sql.streaming.stateStore"
RESTARTS = 8


def main(directory: Path, version: str, master: str) -> int:
    spark = (
        SparkSession.builder.master(master)
        .config("spark.jars", jar_path())
        .config("spark.plugins", "dstl.spark.DstlPlugin")
        .config("spark.dstl.python", sys.executable)
        .config("spark.dstl.commit", os.environ.get("FILES_COMMIT", "now"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(directory / "local"))
        .config("spark.sql.shuffle.partitions", "3")
        .config(f"{STORE}.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider")
        .config(f"{STORE}.rocksdb.changelogCheckpointing.enabled", "true")
        .config(f"{STORE}.checkpointFormatVersion", version if version != "0" else "1")
        .config(f"{STORE}.minDeltasForSnapshot", "3")
        .config(f"{STORE}.maintenanceInterval", "1s")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    source = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).json(str(directory / "in"))
    if version == "0":
        return count_in_backend(spark, source, directory)
    writer = source.groupBy("k").count().writeStream.outputMode("update").format("noop")
    writer = writer.option("checkpointLocation", f"dstl://{directory}/query").trigger(availableNow=True)
    for _ in range(RESTARTS):
        try:
            print("started", flush=True)
            writer.start().awaitTermination()
            break
        except StreamingQueryException as error:
            print(f"restarted: {str(error).splitlines()[0][:300]}", flush=True)
    rows = (
        spark.read.format("statestore").load(f"dstl://{directory}/query").selectExpr("key.k", "value.count").collect()
    )
    print("counted", sorted((row["k"], row["count"]) for row in rows), flush=True)
    spark.stop()
    return 0


def count_in_backend(spark: SparkSession, source: DataFrame, directory: Path) -> int:
    with StateBackend(str(directory / "query"), parallelism=3, spark=spark) as backend:
        out = backend.aggregate(source, by="k", name="counts", n=count())
        writer = out.writeStream.format("noop").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", backend.checkpoint_location)
        for _ in range(RESTARTS):
            try:
                print("started", flush=True)
                writer.start().awaitTermination()
                break
            except StreamingQueryException as error:
                print(f"restarted: {str(error).splitlines()[0][:300]}", flush=True)
        rows = backend.read_state(spark, "aggregates").selectExpr("key.k", "value.n").collect()
        print("counted", sorted((row["k"], row["n"]) for row in rows), flush=True)
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
