"""Streaming queries that are timed: session, files, and events per second of the batches behind the first."""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from bench._figures import add_json
from bench._processor_time import processor_ms
from dstl.jvm.build import spark_jars
from tests.worlds import driver_process
from tests.worlds.driver_process import LOCAL

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
ROW_GROUPS = 8
"""Of each file, so that all cores can read it."""

Plan = Callable[[DataFrame, Path], AbstractContextManager[tuple[DataFrame, str]]]
"""Makes a query of its rows, with a directory for its state; tells its ``checkpointLocation``; is there meanwhile."""


class Speed(NamedTuple):
    """How fast a query was.

    Attributes:
        rate: Events per second of the batches after the first.
        cpu: Seconds of processor for a million events by kind of process (``jvm``, ``workers``, ``task_managers``,
            ``driver``) of the whole query, and ``ratio_python_to_jvm``: all but the JVM's by the JVM's.
    """

    rate: float
    cpu: dict[str, float]

    def __str__(self) -> str:
        return f"{self.rate:12,.0f}/s  cpu {self.cpu}"


def compiled(work: Path, *sources: str) -> Path:
    """Return a jar of Java sources beside this file, compiled against Spark's."""
    classes = work / "classes"
    paths = [str(Path(__file__).with_name(each)) for each in sources]
    subprocess.run(["javac", "--release", "17", "-cp", f"{spark_jars()}/*", "-d", str(classes), *paths], check=True)
    return Path(shutil.make_archive(str(work / "bench"), "zip", classes)).rename(work / "bench.jar")


@contextlib.contextmanager
def session(
    name: str, args: argparse.Namespace, settings: Callable[[Path], Mapping[str, str]] = lambda _: {}
) -> Iterator[tuple[SparkSession, Path]]:
    """Start the one session of a benchmark's run; its directory, for input and state, is gone at the end.

    Args:
        name: The benchmark's.
        args: What :func:`add_stream_arguments` has added.
        settings: Returns further ones, given the directory.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Where this is set, every process that starts compiles all it imports: an installed package is compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(
        prefix=f"dstl-bench-{name}-", dir=args.work, ignore_cleanup_errors=True
    ) as directory:
        conf = {
            **LOCAL,
            "spark.driver.memory": "4g",
            "spark.local.dir": f"{directory}/local",
            "spark.sql.warehouse.dir": f"{directory}/warehouse",
            "spark.python.unix.domain.socket.enabled": "true",
            # Spark adds up an Arrow batch's bytes after each row, unless this is the largest number there is.
            "spark.sql.execution.arrow.maxBytesPerBatch": str((1 << 31) - 1),
            "spark.sql.streaming.stateStore.providerClass": PROVIDER,
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
            "spark.sql.shuffle.partitions": str(args.partitions),
            **settings(Path(directory)),
        }
        spark = driver_process.session(name, {"master": f"local[{args.slots}]", "conf": conf})
        spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark, Path(directory)
        finally:
            spark.stop()


def add_stream_arguments(parser: argparse.ArgumentParser, *, partitions: int = 4) -> None:
    """Add what every benchmark of streams can be told; ``partitions`` is the default."""
    parser.add_argument("--partitions", type=int, default=partitions, help="tasks of a batch")
    parser.add_argument("--slots", type=int, default=os.cpu_count(), help="tasks at once (default: cores)")
    parser.add_argument("--work", help="directory for input and state (default: TMPDIR)")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)


def write_batches(directory: Path, batches: int, rows_of: Callable[[int], pa.Table]) -> None:
    """Write one parquet file for each micro-batch."""
    directory.mkdir(parents=True)
    for batch in range(batches):
        path = directory / f"{batch:04d}.parquet"
        table = rows_of(batch)
        pq.write_table(table, path, row_group_size=max(1, -(-table.num_rows // ROW_GROUPS)))
        # Spark takes the oldest file first, by milliseconds.
        os.utime(path, (1_700_000_000 + batch,) * 2)


def speed_of(
    spark: SparkSession, schema: str, data: Path, place: Path, plan: Plan, *, events: int, mode: str = "update"
) -> Speed:
    """Run one query over all files, into nothing, and return how fast it was.

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
    before = processor_ms()
    with plan(source, place / "state") as (df, location):
        writer = df.writeStream.format("noop").outputMode(mode)
        query = writer.option("checkpointLocation", location).trigger(availableNow=True).start()
        try:
            query.awaitTermination()
            progress = {each["batchId"]: each for each in query.recentProgress if each["numInputRows"]}
        finally:
            query.stop()
        # While its processes are there: what has ended counts for whoever has waited for it.
        spent = processor_ms()
    spent.subtract(before)
    shutil.rmtree(place, ignore_errors=True)
    counted = [each for batch, each in progress.items() if batch > 0]
    rows = sum(each["numInputRows"] for each in counted)
    if rows != events:
        raise SystemExit(f"{rows} events of {events} were read")
    thousands = sum(each["numInputRows"] for each in progress.values()) / 1e3
    cpu = {kind: round(ms / thousands, 3) for kind, ms in spent.items() if ms > 0}
    cpu["ratio_python_to_jvm"] = round((sum(cpu.values()) - cpu["jvm"]) / cpu["jvm"], 3)
    return Speed(rows / (sum(each["durationMs"]["triggerExecution"] for each in counted) / 1000), cpu)
