"""``task``: what a task costs before and beside its rows, with state and without: milliseconds of empty and small ones.

Many partitions on few slots pay it again and again. Everything is one session and one run, the series in turns, batches
of as many tasks as there are partitions; the first batches of each query are left out. Milliseconds per task are wall
time (a batch's, by its tasks: what runs beside it counts for less), and processor time by kind of process.

- ``stateless``: repartition by key, then ``mapInArrow`` with the identity, in workers whose heap is frozen as ours is.
- ``vectorised``: ``backend.groupBy(...).agg(...)``; ``processor``: a Row-style ``StatefulProcessor``.

``empty``: all tasks of a batch but one have no row; ``small``: each has about ``--rows`` rows, all of keys of their own
that had a row in every batch before.
"""

import argparse
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import bench.spark
from bench._figures import print_figures
from bench._processor_time import processor_ms
from bench._stream import Plan, add_stream_arguments, session
from bench.spark import frozen_identity

# Workers import this module where they can; by value it works from any directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_PROCESSES = ("workers", "task_managers", "driver", "jvm")


class Runs:
    """Runs queries over batches of some rows and keeps what they cost."""

    def __init__(self, args: argparse.Namespace, spark: SparkSession, work: Path) -> None:
        self._args, self._spark, self._work = args, spark, work
        self._made = 0
        of_spark = bench.spark.Runs(args, spark, work)
        self.plans: dict[str, Plan] = {
            "stateless": of_spark.stateless(frozen_identity),
            "vectorised": of_spark.vectorised,
            "processor": of_spark.processor("row"),
        }

    def measure(self, plan: Plan, rows: int) -> Counter[str]:
        """Run one query; return milliseconds of its counted batches by kind of process, and their ``wall`` time."""
        args = self._args
        self._made += 1
        place = self._work / f"run-{self._made}"
        source = place / "input"
        source.mkdir(parents=True)
        self._add(source, range(args.warm_up), rows)
        stream = self._spark.readStream.schema("k long, v long").option("maxFilesPerTrigger", 1).parquet(str(source))
        with plan(stream, place / "state") as (df, location):
            writer = df.writeStream.format("noop").outputMode("update")
            query = writer.option("checkpointLocation", location).start()
            try:
                query.processAllAvailable()
                before = processor_ms()
                self._add(source, range(args.warm_up, args.warm_up + args.batches), rows)
                query.processAllAvailable()
                spent = processor_ms()
                progress = {each["batchId"]: each for each in query.recentProgress if each["numInputRows"]}
            finally:
                query.stop()
        shutil.rmtree(place, ignore_errors=True)
        counted = [each for batch, each in progress.items() if batch >= args.warm_up]
        if len(counted) != args.batches:
            raise SystemExit(f"{len(counted)} batches of {args.batches} were reported")
        spent.subtract(before)
        spent["wall"] = sum(each["durationMs"]["triggerExecution"] for each in counted)
        return spent

    def _add(self, source: Path, batches: range, rows: int) -> None:
        """Put one file for each batch where the query looks for them, all of them at once."""
        made = source.parent / "made"
        made.mkdir(exist_ok=True)
        keys = np.arange(rows)
        for batch in batches:
            path = made / f"{batch:04d}.parquet"
            pq.write_table(pa.table({"k": keys, "v": keys + batch}), path)
            # Spark takes the oldest file first, by milliseconds.
            os.utime(path, (1_700_000_000 + batch,) * 2)
        for path in sorted(made.iterdir()):
            path.rename(source / path.name)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every series with empty and with small tasks, in turns, and return what a task costs."""
    spent: dict[tuple[str, str], Counter[str]] = {}
    with session("task", args) as (spark, work):
        runs = Runs(args, spark, work)
        for _ in range(args.rounds):
            for load, rows in (("empty", 1), ("small", args.rows * args.partitions)):
                for series, plan in runs.plans.items():
                    found = runs.measure(plan, rows)
                    print(f"{load:6} {series:10} {dict(found)} ms", file=sys.stderr)
                    spent.setdefault((load, series), Counter()).update(found)
    tasks = args.partitions * args.batches * args.rounds
    figures: dict[str, Any] = {"tasks": tasks, "partitions": args.partitions, "slots": args.slots, "rows": args.rows}
    for (load, series), found in spent.items():
        peer = spent[load, "stateless"]
        python = sum(found[kind] for kind in _PROCESSES if kind != "jvm")
        figures[f"{load}_{series}"] = {
            "wall_ms": round(found["wall"] / tasks, 3),
            **{f"{kind}_cpu_ms": round(found[kind] / tasks, 3) for kind in _PROCESSES},
            "workers_ratio": round(found["workers"] / max(1, peer["workers"]), 3),
            "python_ratio": round(python / max(1, sum(peer[kind] for kind in _PROCESSES if kind != "jvm")), 3),
            "wall_ratio": round(found["wall"] / max(1, peer["wall"]), 3),
        }
    return figures


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench task", description=__doc__)
    parser.add_argument("--batches", type=int, default=6, help="measured ones of each query")
    parser.add_argument("--warm-up", type=int, default=3, help="batches before them")
    parser.add_argument("--rows", type=int, default=100, help="of a small task")
    parser.add_argument("--rounds", type=int, default=1, help="times that every series runs (default 1)")
    add_stream_arguments(parser, partitions=64)
    args = parser.parse_args(argv)
    args.key_type = "long"
    print_figures(run(args), as_json=args.json)
    return 0
