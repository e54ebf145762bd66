"""``latency``: how old an event is when its batch is committed, over trigger interval and rate.

A local query counts by key. A feeder writes a file of events every ``--tick-ms``, so many that each second has
``--rates`` of them. An event's latency is from its file's appearance to the end of the batch that has read it, whose
commit is its checkpoint: by then sink and state are durable. For each trigger interval (0: the next batch begins at
once) and each rate there is one query for ``--seconds``, behind some that warm up. ``events_per_s`` is what was
committed in that time; where it is below the rate, the query has fallen behind, and its latency is no more than what it
had come to.
"""

import argparse
import bisect
import contextlib
import datetime
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from bench._figures import print_figures
from bench._state_job import percentile
from bench._stream import add_stream_arguments, session
from dstl.spark import StateBackend

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A file of events.

    Attributes:
        at: When it could be read, in seconds of the wall clock.
        events: How many it has.
    """

    at: float
    events: int


@dataclass(frozen=True, slots=True)
class Commit:
    """A batch.

    Attributes:
        at: When it had ended, in seconds of the wall clock.
        events: How many it has read.
    """

    at: float
    events: int


def latencies(arrivals: Sequence[Arrival], commits: Sequence[Commit]) -> list[tuple[float, float, int]]:
    """Return when each file's last event was committed, how long behind its arrival, and its number of events.

    Args:
        arrivals: The files, as they came. The oldest is read first, and a file is read whole.
        commits: The batches in their order, from the query's first.

    Returns:
        One (wall clock, seconds, events) for each file that was committed.
    """
    read = list(itertools.accumulate(each.events for each in commits))
    found = []
    for arrival, offered in zip(arrivals, itertools.accumulate(each.events for each in arrivals), strict=True):
        batch = bisect.bisect_left(read, offered)
        if batch < len(commits):
            found.append((commits[batch].at, commits[batch].at - arrival.at, arrival.events))
    return found


def commit_of(progress: Mapping[str, Any]) -> Commit:
    """Return the batch that Spark reports of."""
    began = datetime.datetime.fromisoformat(progress["timestamp"]).timestamp()
    return Commit(began + progress["durationMs"]["triggerExecution"] / 1e3, progress["numInputRows"])


class Feeder:
    """Writes a file every tick, on a thread of its own, until it is closed.

    Args:
        directory: Where the query reads.
        rate: Events per second.
        keys: They are drawn from so many.
        tick_s: From one file to the next.
        seed: Of the drawing.
    """

    def __init__(self, directory: Path, *, rate: int, keys: int, tick_s: float, seed: int) -> None:
        self.arrivals: list[Arrival] = []
        self._directory, self._tick_s, self._keys = directory, tick_s, keys
        self._events = max(1, round(rate * tick_s))
        self._rng = np.random.default_rng(seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="feeder", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End. Idempotent."""
        self._ending.set()
        self._thread.join()

    def _feed(self) -> None:
        began = time.monotonic()
        for number in itertools.count():
            due = began + number * self._tick_s
            if self._ending.wait(max(0.0, due - time.monotonic())):
                return
            # Not seen by Spark while it is written; Spark takes the oldest first, by milliseconds.
            hidden = self._directory / f".{number:08d}.parquet"
            pq.write_table(pa.table({"k": self._rng.integers(0, self._keys, self._events)}), hidden)
            hidden.rename(self._directory / f"{number:08d}.parquet")
            self.arrivals.append(Arrival(time.time(), self._events))


def measure(
    args: argparse.Namespace, spark: SparkSession, work: Path, *, rate: int, interval_ms: int
) -> dict[str, Any]:
    """Run one query and return its figures."""
    (work / "input").mkdir()
    feeder = Feeder(work / "input", rate=rate, keys=args.keys, tick_s=args.tick_ms / 1e3, seed=args.seed)
    backend = StateBackend(str(work / "state"), parallelism=args.partitions, spark=spark)
    with contextlib.closing(backend):
        source = spark.readStream.schema("k long").parquet(str(work / "input"))
        writer = (
            backend.groupBy(source, "k").agg(F.count("*").alias("n")).writeStream.format("noop").outputMode("update")
        )
        writer = writer.option("checkpointLocation", backend.checkpoint_location)
        query = writer.trigger(processingTime=f"{interval_ms} milliseconds").start()
        try:
            feeder.start()
            with contextlib.closing(feeder):
                if not _wait(query, lambda: len(query.recentProgress) > 1, _PATIENCE_S):
                    raise SystemExit(f"no two batches within {_PATIENCE_S:.0f} s")
                _wait(query, lambda: False, args.warm_up)
                measured_from = time.time()
                _wait(query, lambda: False, args.seconds)
                measured_until = time.time()
            # What came within the time and is on its way counts as well, where it does not take for ever.
            offered = sum(each.events for each in feeder.arrivals)
            _wait(query, lambda: sum(each["numInputRows"] for each in query.recentProgress) >= offered, args.seconds)
            commits = [commit_of(each) for each in query.recentProgress]
        finally:
            query.stop()
    seen = latencies(feeder.arrivals, commits)
    ms = [took * 1e3 for at, took, _ in seen if measured_from <= at - took < measured_until]
    committed = sum(each.events for each in commits if measured_from <= each.at < measured_until)
    figures = {
        "interval_ms": interval_ms,
        "rate": rate,
        "events_per_s": round(committed / (measured_until - measured_from)),
        "latency_ms": {"p50": round(percentile(ms, 0.5), 1), "p99": round(percentile(ms, 0.99), 1)},
        "batches": sum(measured_from <= each.at < measured_until for each in commits),
        "uncommitted_files": len(feeder.arrivals) - len(seen),
    }
    print(json.dumps(figures), file=sys.stderr)
    return figures


def _wait(query: Any, done: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so, or for the time; return whether it is."""
    until = time.monotonic() + seconds
    while not (so := done()) and time.monotonic() < until:
        if not query.isActive:
            raise SystemExit(f"the query has ended: {query.exception()}")
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    return so


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every combination and return the figures."""
    with session("latency", args) as (spark, work):
        spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100000")
        runs = []
        for rate, interval_ms in itertools.product(args.rates, args.interval_ms):
            with tempfile.TemporaryDirectory(dir=work) as place:
                runs.append(measure(args, spark, Path(place), rate=rate, interval_ms=interval_ms))
        return {"runs": runs, "keys": args.keys, "partitions": args.partitions, "seconds": args.seconds}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench latency", description=__doc__)
    parser.add_argument("--rates", type=int, nargs="+", default=[20_000, 200_000], help="events per second")
    parser.add_argument("--interval-ms", type=int, nargs="+", default=[0, 500, 2000], help="of the trigger")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured, of each query")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before them")
    parser.add_argument("--tick-ms", type=float, default=200.0, help="from one file to the next")
    parser.add_argument("--keys", type=int, default=20_000)
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
