"""``trigger``: batches of a short processing-time trigger over a large state, and which of them came late.

A local query with ``trigger(processingTime=...)`` counts by key and keeps ``--value-bytes`` with each count. Its first
batches write every key once (``--state-mb`` of them together); each of the others, which alone are measured, changes
``--changed`` keys that are drawn anew. All is as a user has it: a materialization begins whenever its trigger says so,
and Spark's commit of each batch is its checkpoint.

A trigger is due at each multiple of its interval, and Spark leaves out those that a long batch has overrun. A batch is
*late* where it began more than an interval after the first trigger that was due behind the batch before; it is *over*
where it took longer than the interval itself, which Spark warns of.
"""

import argparse
import contextlib
import datetime
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench._figures import print_figures
from bench._processor_time import processes, resident_mb
from bench._state_job import percentile
from bench._stream import add_stream_arguments, session, write_batches
from dstl.checkpoint.report import CheckpointReport
from dstl.spark import StateBackend

# Workers import this module where they can; by value it works from any directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_KEY_BYTES = 8
_LOADED_TOGETHER = 50_000
_WAIT_S = 600.0


class CountWithPayload(StatefulProcessor):
    """Counts events by key, and keeps some bytes beside the count.

    Args:
        value_bytes: How many.
    """

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes

    def init(self, handle: Any) -> None:
        self._seen = handle.getValueState("seen", "n long, payload binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, _ = self._seen.get() or (0, b"")
        n += sum(1 for _ in rows)
        # Another for each count, the same if the batch is run again.
        self._seen.update((n, random.Random(key[0] << 20 | n).randbytes(self._value_bytes)))
        yield Row(k=key[0], n=n)


def lateness(starts: Sequence[float], interval: float) -> list[float]:
    """Return how much later than it was due each batch but the first began, in the unit of the arguments.

    Args:
        starts: When each batch began.
        interval: Of the trigger, which is due at its multiples.
    """
    due = [(begin // interval + 1) * interval for begin in starts]
    return [begin - expected for begin, expected in zip(starts[1:], due, strict=False)]


def summary(progress: Sequence[Mapping[str, Any]], interval_ms: float) -> dict[str, Any]:
    """Return the figures of batches that follow each other, out of what Spark reports of each."""
    starts = [datetime.datetime.fromisoformat(each["timestamp"]).timestamp() * 1e3 for each in progress]
    # The first has a batch before it that is not measured: it shows when the second is due.
    took = [float(each["durationMs"]["triggerExecution"]) for each in progress[1:]]
    behind = lateness(starts, interval_ms)
    return {
        "batches": len(took),
        "late": sum(each > interval_ms for each in behind),
        "over": sum(each > interval_ms for each in took),
        "worst_start_ms": round(max(behind), 1),
        "batch_ms": {"p50": percentile(took, 0.5), "p99": percentile(took, 0.99), "max": max(took)},
    }


def write_input(directory: Path, args: argparse.Namespace) -> tuple[int, int]:
    """Write one file for each batch; returns the keys, and how many batches load them."""
    keys = max(args.changed, int(args.state_mb * 1e6) // (args.value_bytes + _KEY_BYTES))
    loads = -(-keys // _LOADED_TOGETHER)
    rng = np.random.default_rng(args.seed)

    def rows_of(batch: int) -> pa.Table:
        if batch < loads:
            return pa.table({"k": np.arange(batch * _LOADED_TOGETHER, min(keys, (batch + 1) * _LOADED_TOGETHER))})
        return pa.table({"k": rng.choice(keys, args.changed, replace=False)})

    # One more than is measured: the query stops at the end of its input.
    write_batches(directory, loads + args.settle + args.batches + 1, rows_of)
    return keys, loads


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load the state, run the batches and return the figures."""
    with session("trigger", args) as (spark, work):
        keys, loads = write_input(work / "input", args)
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100000")
        return _measure(args, spark, work, keys, loads)


def _measure(args: argparse.Namespace, spark: Any, work: Path, keys: int, loads: int) -> dict[str, Any]:
    first = loads + args.settle
    reports: list[CheckpointReport] = []

    def keep(report: object) -> None:
        if isinstance(report, CheckpointReport):  # and not that of a restore
            reports.append(report)

    load = os.getloadavg()[0]
    with contextlib.closing(
        StateBackend(
            str(work / "state"),
            parallelism=args.partitions,
            table=args.table,
            task_managers=args.task_managers,
            spark=spark,
        )
    ) as backend:
        backend.add_listener(keep)
        source = spark.readStream.schema("k long").option("maxFilesPerTrigger", 1).parquet(str(work / "input"))
        counted = backend.groupBy(source, "k").transformWithState(
            CountWithPayload(args.value_bytes), "k long, n long", "append", "none"
        )
        writer = counted.writeStream.format("noop").outputMode("update")
        writer = writer.option("checkpointLocation", backend.checkpoint_location)
        query = writer.trigger(processingTime=f"{args.interval_ms} milliseconds").start()
        began, loaded = time.monotonic(), None
        try:
            while not reports or reports[-1].batch_id < first + args.batches:
                if not query.isActive or time.monotonic() - began > _WAIT_S:
                    raise SystemExit(f"the query has ended, or takes too long: {query.exception()}")
                if loaded is None and reports and reports[-1].batch_id >= loads:
                    loaded = time.monotonic()
                    print(f"{keys:,} keys loaded in {loaded - began:.0f} s", file=sys.stderr)
                time.sleep(0.2)
            resident = sum(resident_mb(pid) for pid in processes().get("task_managers", []))
            seen = {each["batchId"]: each for each in query.recentProgress if each["numInputRows"]}
        finally:
            query.stop()
    measured = [seen[batch] for batch in range(first - 1, first + args.batches) if batch in seen]
    if len(measured) != args.batches + 1:
        raise SystemExit(f"Spark reports {len(measured)} of {args.batches + 1} batches")
    held = [report for report in reports if first <= report.batch_id < first + args.batches]
    return {
        "state_mb": round(sum(held[-1].state_bytes.values()) / 1e6, 1),
        "keys": keys,
        "changed_keys": args.changed,
        "interval_ms": args.interval_ms,
        **summary(measured, args.interval_ms),
        "checkpoint_ms_p50": round(percentile([report.seconds * 1e3 for report in held], 0.5), 1),
        "materializations": sum(report.materializations for report in held),
        "taskmanager_mb": round(resident, 1),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "table": args.table,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench trigger", description=__doc__)
    parser.add_argument("--state-mb", type=float, default=1000.0, help="keys and values, MB of 1e6 bytes")
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument("--changed", type=int, default=2000, help="keys that a batch changes")
    parser.add_argument("--batches", type=int, default=100, help="measured ones")
    parser.add_argument("--settle", type=int, default=10, help="batches between loading and measuring")
    parser.add_argument("--interval-ms", type=int, default=500, help="of the trigger")
    parser.add_argument("--task-managers", type=int, default=1)
    parser.add_argument("--table", choices=("heap", "rocksdb"), default="heap")
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
