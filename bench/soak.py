"""``soak``: memory and descriptors of every process of a query that runs for long over the same keys.

A local query counts by key, at a steady rate, with a checkpoint for each batch and a materialization every few seconds.
Once a second the resident memory and the open descriptors of the driver's Python, its JVM, the TaskManager and the
Python workers are noted. The first third is warming up; over the rest a line is fitted: a process whose memory grows
for ever shows as a slope, and one that leaks descriptors as a last count above the first.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from pyspark.sql import functions as F

from bench._figures import print_figures
from bench._processor_time import processes, resident_mb
from bench._stream import add_stream_arguments, session
from dstl.options import BatchingOptions, CheckpointOptions, MaterializationOptions
from dstl.spark import StateBackend


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has open; 0 where it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the least squares slope, per second."""
    return statistics.linear_regression(times, values).slope if len(times) > 1 else 0.0


class Curves:
    """Memory and descriptors by kind of process, over time."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}
        self._memory: dict[str, list[float]] = {}
        self._descriptors: dict[str, list[int]] = {}

    def sample(self, at: float) -> None:
        """Note what all processes have now."""
        for kind, pids in processes().items():
            self._times.setdefault(kind, []).append(at)
            self._memory.setdefault(kind, []).append(sum(map(resident_mb, pids)))
            self._descriptors.setdefault(kind, []).append(sum(map(descriptors, pids)))

    def figures(self) -> dict[str, Any]:
        """Return where each begins and ends after the warm-up, with its slope and ten points of its curve."""
        made: dict[str, Any] = {}
        for kind, times in self._times.items():
            at = len(times) // 3
            times, memory, opened = times[at:], self._memory[kind][at:], self._descriptors[kind][at:]
            tenth = max(1, len(times) // 10)
            made[kind] = {
                "first_mb": round(statistics.mean(memory[:tenth]), 1),
                "last_mb": round(statistics.mean(memory[-tenth:]), 1),
                "mb_per_hour": round(3600 * slope(times, memory), 1),
                "first_descriptors": round(statistics.mean(opened[:tenth]), 1),
                "last_descriptors": round(statistics.mean(opened[-tenth:]), 1),
                "curve_mb": [round(each, 1) for each in memory[::tenth]],
            }
        return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the query for ``--minutes`` and return the curves."""
    curves, reports = Curves(), []
    with session("soak", args) as (spark, work):
        backend = StateBackend(
            str(work / "state"),
            parallelism=args.partitions,
            checkpoints=CheckpointOptions(clean_interval_s=30.0),
            batching=BatchingOptions(inline_threshold=0),
            materialization=MaterializationOptions(interval_s=10.0, min_pause_s=1.0),
            spark=spark,
        )
        backend.add_listener(reports.append)
        rows = spark.readStream.format("rate").option("rowsPerSecond", args.rate).load()
        keyed = rows.select((F.col("value") % args.keys).alias("k"), F.col("value").alias("v"))
        counted = backend.groupBy(keyed, "k").agg(F.count("*").alias("n"), F.sum("v").alias("total"))
        writer = counted.writeStream.format("noop").outputMode("update")
        query = writer.option("checkpointLocation", backend.checkpoint_location).start()
        began = time.monotonic()
        try:
            while (now := time.monotonic() - began) < 60 * args.minutes and query.isActive:
                curves.sample(now)
                time.sleep(1.0)
            if not query.isActive:
                raise SystemExit(f"the query has failed: {query.exception()}")
        finally:
            query.stop()
            backend.close()
        objects = sum(path.is_file() for path in (work / "state").rglob("*"))
    return {"minutes": round(now / 60, 2), "checkpoints": len(reports), "objects": objects, **curves.figures()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="(default 30)")
    parser.add_argument("--rate", type=int, default=2000, help="rows per second")
    parser.add_argument("--keys", type=int, default=20_000)
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    print(f"until {time.strftime('%H:%M:%S', time.localtime(time.time() + 60 * args.minutes))}", file=sys.stderr)
    print_figures(run(args), as_json=args.json)
    return 0
