"""``parts``: where the time of a batch goes, by part: one row, one in each partition, and none.

A row-style ``StatefulProcessor``, one get and one update a row, over batches that follow each other at once. Medians of
the measured batches, in ms of wall time; the store is a local directory, and its requests have a line of their own.

- ``offsets`` and ``commit``: what Spark waited in ``walCommit`` and ``commitOffsets``. Of the second, ``persist``,
  ``assemble``, ``record`` and ``notify`` are the checkpoint's; the rest is Spark's own and the call.
- ``begin``, ``fetch``, ``write``, ``acknowledge``: what the tasks waited for our calls; ``worker``: what they did
  themselves, the processor's work included. Sums of all tasks, divided by those that run at once.
- ``ours``: all of these. ``stateless_add_batch``: Spark's ``addBatch`` of the same rows through ``mapInArrow`` without
  state, to compare with ``add_batch``.
- ``cpu_ms``: processor time for a batch, by process; ``driver_loop`` is the coordinator's thread. ``tasks_cpu_ms``: of
  all tasks, from the first row to the end.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import bench.spark
from bench import _timed_worker_daemon
from bench._figures import add_json, print_figures
from bench._processor_time import processor_ms, thread_ms
from bench._stream import session
from dstl.checkpoint.report import CheckpointReport
from dstl.spark import StateBackend, backend
from dstl.store import open_store
from dstl.store.instrumented import InstrumentedStore
from handles.key_group import partition_of
from tests.worlds.memory_recorder import MemoryRecorder

# Workers import this module where they can; by value it works from any directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOADS = ("none", "one", "each")
_LOOP = "dstl-coordinator"
_KEY_GROUPS = 128
_TASK_PARTS = ("begin", "fetch", "write", "acknowledge", "worker")
_CHECKPOINT_PARTS = {"persist": "persist_s", "assemble": "assemble_s", "record": "commit_s", "notify": "notify_s"}


class Batches:
    """Runs one query at a time in a session, and keeps what its measured batches took."""

    def __init__(self, args: argparse.Namespace, spark: SparkSession, work: Path) -> None:
        self._args, self._spark, self._work = args, spark, work
        self._made = 0
        self._puts = MemoryRecorder(1 << 16)
        self._tasks = work / "tasks"
        spark.sparkContext.environment[_timed_worker_daemon.FILE] = str(self._tasks)
        # The driver's stores alone: so little changes in a batch that it rides in the driver's record.
        backend.open_store = lambda *where, **options: InstrumentedStore(  # type: ignore[attr-defined]
            open_store(*where, **options), recorder=self._puts
        )

    def measure(self, partitions: int, load: str) -> dict[str, Any]:
        """Run the query with state and the one without, and return the figures."""
        place = self._place()
        reports: list[CheckpointReport] = []
        stored: list[float] = []

        def note(report: object) -> None:
            if isinstance(report, CheckpointReport):
                reports.append(report)
                # Of the offsets, and of the commit.
                stored.append(sum(list(self._puts.samples["storeRequestNanos.put"])[-2:]) / 1e6)

        with StateBackend(place / "state", parallelism=partitions, spark=self._spark) as ours:
            ours.add_listener(note)
            rows = self._rows(partitions, load)
            counted = ours.groupBy(rows, "k").transformWithState(
                bench.spark.CountAndSum(), "k long, n long, total long", "append", "none"
            )
            progress, spent, query = self._run(counted, ours.checkpoint_location)
        without, _, _ = self._run(
            self._rows(partitions, load)
            .repartition(partitions, "k")
            .mapInArrow(bench.spark.frozen_identity, "k long, v long"),
            str(place / "checkpoint"),
        )
        measured = {each["batchId"] for each in progress}
        tasks = [each for each in self._task_times() if each["query"] == query and each["batch"] in measured]
        kept = [(report, ms) for report, ms in zip(reports, stored, strict=True) if report.batch_id in measured]
        figures = {
            "partitions": partitions,
            "rows": load,
            **summary(progress, kept, tasks, min(self._args.slots, partitions)),
            "stateless_add_batch_ms": _median(without, "addBatch"),
            "cpu_ms": {kind: round(ms / len(progress), 2) for kind, ms in sorted(spent.items()) if ms > 0},
        }
        print(json.dumps(figures), file=sys.stderr)
        return figures

    def _place(self) -> Path:
        self._made += 1
        place = self._work / f"run-{self._made}"
        place.mkdir()
        return place

    def _rows(self, partitions: int, load: str) -> DataFrame:
        keys = self._keys(partitions)
        source = self._spark.readStream.format("rate-micro-batch").option("numPartitions", 1)
        rows = source.option("rowsPerBatch", partitions if load == "each" else 1).load()
        if load == "none":
            rows = rows.where("value < 0")
        at = F.element_at(F.array(*map(F.lit, keys)), (F.col("value") % partitions + 1).cast("int"))
        return rows.select(at.cast("long").alias("k"), F.col("value").alias("v"))

    def _keys(self, partitions: int) -> list[int]:
        """Return one key of each partition."""
        found: dict[int, int] = {}
        rows = self._spark.range(100 * partitions).select("id", F.expr(f"pmod(hash(id), {_KEY_GROUPS})").alias("g"))
        for row in rows.collect():
            found.setdefault(partition_of(row.g, _KEY_GROUPS, partitions), row.id)
        return [found[partition] for partition in range(partitions)]

    def _run(self, df: DataFrame, location: str) -> tuple[list[Mapping[str, Any]], Counter[str], str]:
        """Run a query until its batches are there; returns them, the processor time of them all, and its id."""
        writer = df.writeStream.format("noop").outputMode("append").option("checkpointLocation", location)
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            _wait(query, self._args.warm_up)
            first, before = len(query.recentProgress), processor_ms() + Counter(driver_loop=thread_ms(_LOOP))
            _wait(query, first + self._args.batches)
            after = processor_ms() + Counter(driver_loop=thread_ms(_LOOP))
            seen = query.recentProgress
        finally:
            query.stop()
        after.subtract(before)
        return seen[first:], after, str(query.id)

    def _task_times(self) -> Iterator[dict[str, Any]]:
        for line in self._tasks.read_text().splitlines():
            yield json.loads(line)


def _wait(query: Any, batches: int) -> None:
    until = time.monotonic() + 600.0
    while len(query.recentProgress) < batches:
        if not query.isActive or time.monotonic() > until:
            raise SystemExit(f"the query has ended, or takes too long: {query.exception()}")
        time.sleep(0.2)


def _median(progress: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(statistics.median(each["durationMs"].get(name, 0) for each in progress))


def summary(
    progress: Sequence[Mapping[str, Any]],
    checkpoints: Sequence[tuple[CheckpointReport, float]],
    tasks: Sequence[Mapping[str, Any]],
    at_once: int,
) -> dict[str, Any]:
    """Return the parts of a batch.

    Args:
        progress: What Spark reports of the batches.
        checkpoints: Theirs, each with the milliseconds that the store took for offsets and commit.
        tasks: Seconds by part, a line for each.
        at_once: Tasks that run at the same time.
    """
    by_batch: dict[int, Counter[str]] = {each["batchId"]: Counter() for each in progress}
    for each in tasks:
        by_batch[each["batch"]].update({part: each.get(part, 0) * 1e3 / at_once for part in _TASK_PARTS})
        by_batch[each["batch"]]["calls"] += each["calls"]
        by_batch[each["batch"]]["cpu"] += each["cpu"] * 1e3
        by_batch[each["batch"]]["tasks"] += 1
    of_tasks = {part: statistics.median(each[part] for each in by_batch.values()) for part in _TASK_PARTS}
    of_checkpoint = {
        part: round(statistics.median(getattr(report, name) * 1e3 for report, _ in checkpoints), 2)
        for part, name in _CHECKPOINT_PARTS.items()
    }
    store = statistics.median(ms for _, ms in checkpoints)
    spark = {name: _median(progress, name) for name in ("walCommit", "commitOffsets", "addBatch", "triggerExecution")}
    logs = max(0.0, spark["walCommit"] + spark["commitOffsets"] - store)
    return {
        "batches": len(progress),
        "tasks_of_a_batch": statistics.median(each["tasks"] for each in by_batch.values()),
        "calls_of_a_batch": statistics.median(each["calls"] for each in by_batch.values()),
        "tasks_cpu_ms": round(statistics.median(each["cpu"] for each in by_batch.values()), 2),
        "batch_ms": spark["triggerExecution"],
        "add_batch_ms": spark["addBatch"],
        "offsets_and_commit_ms": round(logs, 2),
        "store_ms": round(store, 2),
        "parts_ms": {
            **{part: round(ms, 2) for part, ms in of_tasks.items()},
            "offsets": spark["walCommit"],
            "commit": spark["commitOffsets"],
            **of_checkpoint,
        },
        "ours_ms": round(sum(of_tasks.values()) + logs, 2),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every number of partitions with every load, and return the figures."""
    settings = {"spark.python.daemon.module": _timed_worker_daemon.__name__}
    of_session = argparse.Namespace(slots=args.slots, partitions=1, work=args.work)
    with session("parts", of_session, lambda _: settings) as (spark, work):
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100000")
        batches = Batches(args, spark, work)
        before = os.getloadavg()[0]
        runs = [batches.measure(partitions, load) for partitions in args.partitions for load in args.rows]
        return {"runs": runs, "slots": args.slots, "load_before": before, "load_after": os.getloadavg()[0]}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench parts", description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=LOADS, default=list(LOADS), help="rows of a batch")
    parser.add_argument("--batches", type=int, default=40, help="measured ones of each query")
    parser.add_argument("--warm-up", type=int, default=20, help="batches before them")
    parser.add_argument("--partitions", type=int, nargs="+", default=[5, 64], help="tasks of a batch")
    parser.add_argument("--slots", type=int, default=os.cpu_count(), help="tasks at once (default: cores)")
    parser.add_argument("--work", help="directory for input and state (default: TMPDIR)")
    add_json(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
