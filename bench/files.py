"""``files``: requests and duration of a micro-batch of Spark's own stateful operators, with and without ``dstl://``.

Both kinds run in one session on the same input, with RocksDB and changelog checkpoints. ``dstl`` is a coordinator over
a store whose every request takes ``--latency-ms``; all of its requests are counted. ``spark`` is stock Spark on a file
system where a file takes as long once and nothing else takes any time, and where each call of Hadoop's API counts as
one request: less than s3a needs for both (sixteen requests a file that is written and renamed).

Queries: ``count``, ``session`` (session windows), ``join`` (stream-stream), ``dedup``, ``tws`` (transformWithState in
Python).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from bench._figures import add_json
from bench._files_process import LATENCY, REQUESTS, interpreter
from bench._stateful_queries import stateful_queries
from bench._stream import compiled
from dstl.spark import jar_path

PROVIDER = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WARM_UP = 2
SCHEMA = "k long, t timestamp, v long"


QUERIES = stateful_queries("long", delay="1 minute", gap="10 seconds")


def write_input(directory: Path, batches: int, rows: int, seed: int) -> None:
    """Write one JSON file for each batch."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for batch in range(batches):
        lines = [
            json.dumps({"k": int(k), "t": f"2026-01-01 00:{batch:02d}:{i % 60:02d}", "v": i})
            for i, k in enumerate(rng.integers(0, max(1, rows // 2), rows))
        ]
        path = directory / f"{batch:04d}.json"
        path.write_text("\n".join(lines))
        os.utime(path, (1_700_000_000 + batch,) * 2)


def session(work: Path, latency_ms: int, slots: int) -> SparkSession:
    """Start the session of both kinds."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ[LATENCY] = str(latency_ms / 1000)
    os.environ[REQUESTS] = str(work / "requests")
    (work / "requests").touch()
    slow = compiled(work, "SlowFileSystem.java")
    spark = (
        SparkSession.builder.master(f"local[{slots}]")
        .config("spark.jars", f"{jar_path()},{slow}")
        .config("spark.plugins", "dstl.spark.DstlPlugin")
        .config("spark.dstl.python", interpreter(work))
        .config("spark.hadoop.fs.slow.impl", "bench.SlowFileSystem")
        .config("spark.hadoop.fs.slow.put.ms", str(latency_ms))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.local.dir", str(work / "local"))
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.streaming.stateStore.providerClass", PROVIDER)
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


class Runs:
    """Runs queries of both kinds and keeps their figures."""

    def __init__(self, spark: SparkSession, work: Path, batches: int) -> None:
        self._spark = spark
        self._work = work
        self._batches = batches

    def warm_up(self, query: str, partitions: int) -> None:
        """Run a query in both kinds, unmeasured: the JVM compiles what all of them run, at nobody's expense."""
        for kind in ("spark", "dstl"):
            self.measure(query, partitions, kind, place="warm-up")

    def measure(self, query: str, partitions: int, kind: str, place: str = "") -> dict[str, Any]:
        """Run one query over the input and return its figures of the batches behind the warm-up."""
        self._spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
        stateful = QUERIES[query]
        scheme = "dstl" if kind == "dstl" else "slow"
        location = f"{scheme}://{self._work}/{place or f'{query}-{partitions}'}-{kind}"
        counts: dict[int, int] = {}

        def note(batch: DataFrame, number: int) -> None:
            batch.write.format("noop").mode("append").save()
            counts[number] = self._requests(kind)

        source = self._spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self._work / "in"))
        writer = stateful.plan(source).writeStream.outputMode(stateful.mode).foreachBatch(note)
        running = writer.option("checkpointLocation", location).trigger(availableNow=True).start()
        try:
            running.awaitTermination()
            progress = {each["batchId"]: each["durationMs"]["triggerExecution"] for each in running.recentProgress}
        finally:
            running.stop()
        numbers = sorted(counts)
        if len(numbers) < WARM_UP + 2:
            raise SystemExit(f"{query} made {len(numbers)} batches: give more with --batches")
        # Between the same points of two batches lies one batch's worth: the commit of one, the offsets of the next.
        requests = counts[numbers[-1]] - counts[numbers[WARM_UP - 1]]
        times = [progress[number] for number in numbers[WARM_UP:] if number in progress]
        return {
            "query": query,
            "partitions": partitions,
            "kind": kind,
            "requests_per_batch": requests / (len(numbers) - WARM_UP),
            "batch_ms": {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))},
        }

    def _requests(self, kind: str) -> int:
        if kind == "dstl":
            return len((self._work / "requests").read_bytes().splitlines())
        return int(self._spark._jvm.bench.SlowFileSystem.requests())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench files", description=__doc__)
    parser.add_argument("--queries", nargs="+", choices=sorted(QUERIES), default=["count", "join"])
    parser.add_argument("--partitions", nargs="+", type=int, default=[4, 64])
    parser.add_argument("--batches", type=int, default=10, help=f"the first {WARM_UP} are not measured")
    parser.add_argument("--rows", type=int, default=2000, help="of a batch")
    parser.add_argument("--latency-ms", type=int, default=50, help="of the store")
    parser.add_argument("--slots", type=int, default=2, help="tasks at once")
    parser.add_argument("--work", help="directory for input and checkpoints (default: TMPDIR)")
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser)
    args = parser.parse_args(argv)
    if shutil.which("javac") is None:
        raise SystemExit("bench files needs javac: install a JDK of Java 17 or newer")
    work = Path(tempfile.mkdtemp(prefix="dstl-bench-files-", dir=args.work))
    found = []
    try:
        write_input(work / "in", args.batches, args.rows, args.seed)
        spark = session(work, args.latency_ms, args.slots)
        try:
            runs = Runs(spark, work, args.batches)
            runs.warm_up(args.queries[0], min(args.partitions))
            for query in args.queries:
                for partitions in args.partitions:
                    for kind in ("spark", "dstl"):
                        figures = runs.measure(query, partitions, kind)
                        print(json.dumps(figures), file=sys.stderr)
                        found.append(figures)
        finally:
            spark.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if args.json:
        print(json.dumps({"runs": found}))
    return 0
