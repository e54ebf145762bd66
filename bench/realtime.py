"""``realtime``: how old a row is when the sink has it, with state of ours on S3 and with Spark's own on a local disk.

Spark's own benchmark of ``transformWithState``: rows at a fixed rate, keys by chance, one get and one update a row, a
trigger of 0 ms. Source and sink are the same for all sides (``Realtime.java``): each row has the time at which it was
due, and a batch's rows are in the sink when the sink commits it. Rows that are due during the warm-up are left out,
and ``missing_pct`` is of rows that had not come some seconds after the end.

- ``dstl``: ours, by ``spark.dstl.commit`` and ``spark.dstl.sources``, on a store with the times of ``--model``; ``now``
  on an express model too, ``dstl_express``. The driver's requests are modelled. So little state changes in a batch that
  a TaskManager's rides in the driver's record.
- ``spark_python``, ``spark_jvm``: Spark's, on RocksDB with changelogs, with its checkpoint in a local directory.
- ``spark_jvm_store``: the same where each file that is written costs ``--put-ms``, and nothing else costs any.

Each side of each round has a session of its own, one after the other; a figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from bench._figures import print_figures
from bench._models import models
from bench._stream import add_stream_arguments, compiled, session
from dstl.checkpoint.report import CheckpointReport
from dstl.spark import StateBackend, backend
from dstl.store import open_store
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore

# Workers import this module where they can; by value it works from any directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
_EXPRESS = "s3-express"
_WITH_NEXT = {"commit": "with-next"}
_SIDES: dict[str, dict[str, str]] = {
    "dstl.now": {},
    "dstl.with_next": _WITH_NEXT,
    "dstl.keep": {**_WITH_NEXT, "sources": "keep"},
    "dstl_express": {},
    "spark_python": {},
    "spark_jvm": {},
    "spark_jvm_store": {},
}
"""Every side, with its options."""


class Count(StatefulProcessor):
    """Counts by key: one get and one update a row."""

    def init(self, handle: Any) -> None:
        self._seen = handle.getValueState("seen", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            n = (self._seen.get() or (0,))[0] + 1
            self._seen.update((n,))
            yield Row(k=key[0], n=n, ts=row.ts)

    def close(self) -> None:
        pass


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run one side's query in this process, and return its figures."""

    def settings(work: Path) -> dict[str, str]:
        return {
            **{f"spark.dstl.{name}": value for name, value in _SIDES[args.side].items()},
            "spark.jars": str(compiled(work, "Realtime.java", "SlowFileSystem.java")),
            "spark.hadoop.fs.slow.impl": "bench.SlowFileSystem",
            "spark.hadoop.fs.slow.put.ms": str(args.put_ms),
        }

    with session("realtime", args, settings) as (spark, work):
        source = spark.readStream.format("bench.Realtime").option("rate", args.rate).option("keys", args.keys)
        rows = source.option("splits", args.partitions).load()
        if args.side.startswith("dstl"):
            with _ours(args, spark, rows, work) as (counted, location, checkpoints):
                return _run(args, spark, counted, location) | _parts_of(checkpoints)
        scheme = "slow" if args.side == "spark_jvm_store" else "file"
        return _run(args, spark, _sparks(args, spark, rows), f"{scheme}://{work}/checkpoint")


@contextlib.contextmanager
def _ours(
    args: argparse.Namespace, spark: SparkSession, rows: DataFrame, work: Path
) -> Iterator[tuple[DataFrame, str, list[CheckpointReport]]]:
    """Make the query with our operator; yields it, its location, and its checkpoints as they come."""
    name = _EXPRESS if args.side == "dstl_express" else args.model
    model = LatencyModel(LatencyParameters.of(models()[name]), args.seed)
    # The driver's stores alone: TaskManagers are other processes.
    backend.open_store = lambda *where, **options: LatencyStore(open_store(*where, **options), model)  # type: ignore[attr-defined]
    reports: list[CheckpointReport] = []
    with StateBackend(work / "state", parallelism=args.partitions, spark=spark) as ours:
        ours.add_listener(lambda each: reports.append(each) if isinstance(each, CheckpointReport) else None)
        counted = ours.groupBy(rows, "k").transformWithState(Count(), "k long, n long, ts long", "append", "none")
        yield counted, ours.checkpoint_location, reports


def _sparks(args: argparse.Namespace, spark: SparkSession, rows: DataFrame) -> DataFrame:
    if args.side == "spark_python":
        schema = "k long, n long, ts long"
        return rows.groupBy("k").transformWithState(Count(), schema, "append", "none")  # type: ignore[arg-type]
    jvm: Any = spark._jvm
    return DataFrame(jvm.bench.Realtime.counted(rows._jdf), spark)


def _run(args: argparse.Namespace, spark: SparkSession, counted: DataFrame, location: str) -> dict[str, Any]:
    """Run the query for the time, and return what the sink and Spark say."""
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100000")
    writer = counted.writeStream.format("bench.Realtime").outputMode("append").option("checkpointLocation", location)
    query = writer.trigger(processingTime="0 seconds").start()
    try:
        _live(query, args.warm_up)
        began = int(time.time() * 1e3)
        load = os.getloadavg()[0]
        _live(query, args.seconds)
        until = int(time.time() * 1e3)
        # What was due within the time and is on its way counts as well.
        _live(query, args.patience)
        progress = [each for each in query.recentProgress if began <= _at_ms(each) < until]
    finally:
        query.stop()
    jvm: Any = spark._jvm
    *found, rows = jvm.bench.Realtime.summary(began, until, list(_SHARES.values()))
    if not rows:
        raise SystemExit(f"{args.side}: no row of {args.seconds:g} s has come: it has fallen behind")
    parts = {name for each in progress for name in each["durationMs"]}
    return {
        **dict(zip(_SHARES, found, strict=True)),
        "batches": len(progress),
        "missing_pct": round(100 * max(0.0, 1 - rows / (args.rate * (until - began) / 1e3)), 2),
        "parts_ms": {
            name: statistics.median(each["durationMs"].get(name, 0) for each in progress) for name in sorted(parts)
        },
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
    }


def _parts_of(reports: Sequence[CheckpointReport]) -> dict[str, Any]:
    """Return the parts of a checkpoint, medians in milliseconds."""
    names = ("seconds", "persist_s", "assemble_s", "commit_s", "notify_s")
    half = reports[len(reports) // 2 :]
    parts = {name: [getattr(each, name) * 1e3 for each in half] for name in names}
    return {"checkpoint_ms": {name.removesuffix("_s"): round(statistics.median(ms), 1) for name, ms in parts.items()}}


def _live(query: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not query.isActive:
            raise SystemExit(f"the query has ended: {query.exception()}")
        time.sleep(min(0.2, left))


def _at_ms(progress: Any) -> float:
    return datetime.datetime.fromisoformat(progress["timestamp"]).timestamp() * 1e3


def run(args: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Run every side in every round, in turns, and return the medians."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in args.sides}
    for number in range(args.rounds):
        # Each round begins with another side.
        for at in range(len(args.sides)):
            side = args.sides[(at + number) % len(args.sides)]
            program = [sys.executable, "-m", "bench", "realtime", *arguments, "--side", side, "--seed", str(number + 1)]
            done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
            figures = json.loads(done.stdout.splitlines()[-1])
            print(json.dumps({"round": number, "side": side, **figures}), file=sys.stderr)
            found[side].append(figures)
    figures: dict[str, Any] = {}
    for side, rounds in found.items():
        first, _, second = side.partition(".")
        names = (*_SHARES, "batches", "missing_pct")
        medians: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in names}
        medians |= {name: rounds[-1][name] for name in ("parts_ms", "checkpoint_ms") if name in rounds[-1]}
        if second:
            figures.setdefault(first, {})[second] = medians
        else:
            figures[first] = medians
    load = max(max(each["load_before"], each["load_after"]) for rounds in found.values() for each in rounds)
    batches = {side: [each["batches"] for each in rounds] for side, rounds in found.items()}
    return {**figures, "batches": batches, "load": load}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench realtime", description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=list(_SIDES))
    parser.add_argument("--side", choices=_SIDES, help="one alone, once, in this very process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=180.0, help="measured, of each side and round")
    parser.add_argument("--warm-up", type=float, default=40.0, help="seconds before them")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds behind them, for rows on their way")
    parser.add_argument("--rate", type=int, default=1000, help="rows per second")
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--model", choices=sorted(models()), default="turbopuffer", help="of the store that ours is on")
    parser.add_argument("--put-ms", type=int, default=100, help="of each file of spark_jvm_store")
    add_stream_arguments(parser, partitions=5)
    parser.set_defaults(slots=5)
    args = parser.parse_args(argv)
    if shutil.which("javac") is None:
        raise SystemExit("bench realtime needs javac: install a JDK of Java 17 or newer")
    if args.side is not None:
        print(json.dumps(measure(args)))
        return 0
    print_figures(run(args, argv), as_json=args.json)
    return 0
