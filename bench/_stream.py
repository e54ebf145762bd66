"""Streaming queries that are timed: session, files, and events per second of the batches behind the first."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

__all__ = ["Plan", "events_per_second", "session", "write_batches"]

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
ROW_GROUPS = 8
"""Of each file, so that all cores can read it."""

Plan = Callable[[DataFrame, Path], AbstractContextManager[DataFrame]]
"""Makes a query of its rows, with a directory for its state, that is there while the query runs."""


def session(args: argparse.Namespace, work: Path) -> SparkSession:
    """Start the one session of the run."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{args.slots}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "4g")
        .config("spark.local.dir", str(work / "local"))
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .config("spark.python.unix.domain.socket.enabled", "true")
        # Spark adds up an Arrow batch's bytes after each row, unless this is the largest number there is.
        .config("spark.sql.execution.arrow.maxBytesPerBatch", str((1 << 31) - 1))
        .config("spark.sql.shuffle.partitions", str(args.partitions))
        .config("spark.sql.streaming.stateStore.providerClass", PROVIDER)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def write_batches(directory: Path, batches: int, rows_of: Callable[[int], pa.Table]) -> None:
    """Write one parquet file for each micro-batch."""
    directory.mkdir(parents=True)
    for batch in range(batches):
        path = directory / f"{batch:04d}.parquet"
        table = rows_of(batch)
        pq.write_table(table, path, row_group_size=max(1, -(-table.num_rows // ROW_GROUPS)))
        # Spark takes the oldest file first, by milliseconds.
        os.utime(path, (1_700_000_000 + batch,) * 2)


def events_per_second(
    spark: SparkSession, schema: str, data: Path, place: Path, plan: Plan, *, events: int, mode: str = "update"
) -> float:
    """Run one query over all files, into nothing, and return events per second of the batches after the first.

    Args:
        spark: The session.
        schema: Of the files.
        data: Their directory.
        place: A directory for state and checkpoint, which is removed.
        plan: Makes the query.
        events: Of all batches but the first: a run that has read others is no run.
        mode: The sink's output mode.
    """
    source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(data))
    with plan(source, place / "state") as df:
        writer = df.writeStream.format("noop").outputMode(mode)
        query = writer.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            progress = {each["batchId"]: each for each in query.recentProgress if each["numInputRows"]}
        finally:
            query.stop()
    shutil.rmtree(place, ignore_errors=True)
    counted = [each for batch, each in progress.items() if batch > 0]
    rows = sum(each["numInputRows"] for each in counted)
    if rows != events:
        raise SystemExit(f"{rows} events of {events} were read")
    return float(rows / (sum(each["durationMs"]["triggerExecution"] for each in counted) / 1000))
