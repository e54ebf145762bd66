"""A job from Kafka into four sinks: ``python sinks_job.py SERVERS DIRECTORY TOTAL BATCH PLACE``.

It ends itself by SIGKILL in its ``BATCH``-th batch of this run: before the sink numbered ``PLACE``, or behind all four.
With ``BATCH`` 0 it ends by itself when the Delta table has ``TOTAL`` rows. ``DIRECTORY`` has the page's sinks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from pyiceberg.catalog.sql import SqlCatalog
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from dstl.spark import StateBackend, batch_stamp

SCHEMA = pa.schema({"page": pa.string(), "n": pa.int64()})


def main(servers: str, directory: str, total: int, batch_of_death: int, place: int) -> None:
    os.chdir(directory)
    sys.path[:0] = [directory, str(Path(__file__).parents[2] / "examples" / "kafka_to_delta")]
    import job
    import sinks  # type: ignore[import-not-found]

    cloudpickle.register_pickle_by_value(job)
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .getOrCreate()
    )
    catalog = SqlCatalog("shop", uri="sqlite:///catalog.db", warehouse=f"file://{directory}/warehouse")
    catalog.create_namespace_if_not_exists("shop")
    iceberg = catalog.create_table_if_not_exists("shop.visits", SCHEMA)
    seen = 0

    def write(batch: Any, number: int) -> None:
        nonlocal seen
        seen += 1
        stamp, rows = batch_stamp(batch), batch.toArrow().cast(SCHEMA)
        steps = [
            lambda: job.append_once("delta", rows, stamp),
            # Beside it another writer appends, without a stamp.
            lambda: (sinks.to_iceberg(iceberg, rows, stamp), iceberg.append(SCHEMA.empty_table())),
            lambda: sinks.to_database("visits.db", rows, stamp),
            lambda: sinks.to_files("files", batch, stamp),
            lambda: None,
        ]
        for at, step in enumerate(steps):
            if (seen, at) == (batch_of_death, place):
                os.kill(os.getpid(), signal.SIGKILL)
            step()

    with StateBackend("state", parallelism=2) as backend:
        visits = job.visits(spark, backend, servers, most=10)
        writer = visits.writeStream.outputMode("append").foreachBatch(write)
        query = writer.option("checkpointLocation", backend.checkpoint_location).start()
        ends = time.monotonic() + 200
        while query.isActive and time.monotonic() < ends:
            if DeltaTable.is_deltatable("delta") and DeltaTable("delta").to_pyarrow_table().num_rows >= total:
                query.processAllAvailable()
                break
            time.sleep(0.2)
        query.stop()
        assert query.exception() is None, query.exception()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
