"""``windows``: events per second of windowed aggregates and deduplication, through DSTL and through Spark's own state.

All figures of one run come from one session and the same files, one parquet file per micro-batch. Spark's own
operators use RocksDB with changelog checkpointing; every Python task speaks over Spark's unix socket, and takes Arrow
batches that are bounded by rows alone. The first batch of each query is left out. The watermark follows event time at
one minute, and a batch holds one minute: groups come and go.

- ``tumbling``: count and sum by key and window of five minutes; ``sliding``: by windows of five minutes, one a minute.
- ``dedup``: ``dropDuplicatesWithinWatermark`` by key.
- ``cpu``: seconds of processor, as ``bench spark`` gives them.
- ``eviction``: processor time of finding a fixed number of due groups among more and more held ones, on a TaskManager.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bench._figures import print_figures
from bench._stream import Speed, add_stream_arguments, session, speed_of, write_batches
from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.rpc.messages import ExpiryPlace, FetchDue
from dstl.spark import StateBackend
from dstl.taskmanager.reads import TableSource
from materializer.tables import HeapStateTable

SCHEMA = "k long, ts timestamp, v long"
MINUTE_US = 60_000_000
EPOCH_US = 1_700_000_000_000_000 // MINUTE_US * MINUTE_US
PLACE = ExpiryPlace(in_key=True, offset=1)
DUE = 1000
WARM_UP = 100_000


@dataclass(frozen=True)
class Query:
    """One query that both sides run.

    Attributes:
        query: Its name in the figures.
        mode: Output mode.
    """

    query: str
    mode: str

    def spark(self, df: DataFrame) -> DataFrame:
        """Return it with Spark's own operator."""
        if self.query == "dedup":
            return df.dropDuplicatesWithinWatermark(["k"])
        return df.groupBy(self._window(), "k").agg(*self._aggregates())

    def dstl(self, backend: StateBackend, df: DataFrame) -> DataFrame:
        """Return it with ours."""
        if self.query == "dedup":
            return backend.dropDuplicatesWithinWatermark(df, ["k"], name="dedup")
        grouped = backend.groupBy(df, self._window(), "k")
        return grouped.agg(*self._aggregates(), outputMode=self.mode, name="windows")

    def _window(self) -> Any:
        return F.window("ts", "5 minutes", *(["1 minute"] if self.query == "sliding" else []))

    @staticmethod
    def _aggregates() -> list[Any]:
        return [F.count("*").alias("n"), F.sum("v").alias("total")]


QUERIES = (
    Query("tumbling", "append"),
    Query("tumbling", "update"),
    Query("sliding", "append"),
    Query("dedup", "append"),
)


def write_input(directory: Path, args: argparse.Namespace, events: int) -> int:
    """Write a file for each batch, and one more for the warm-up; return the events of the measured ones."""
    rng = np.random.default_rng(args.seed)
    rows = events // args.batches

    def rows_of(batch: int) -> pa.Table:
        ts = EPOCH_US + batch * MINUTE_US + np.sort(rng.integers(0, MINUTE_US, rows))
        late = rng.random(rows) < 0.01
        ts[late] -= rng.integers(0, 5 * MINUTE_US, int(late.sum()))
        columns = {
            "k": rng.integers(0, args.keys, rows),
            "ts": pa.array(ts).cast(pa.timestamp("us", "UTC")),
            "v": rng.integers(0, 1000, rows),
        }
        return pa.table(columns)

    write_batches(directory, args.batches + 1, rows_of)
    return int(rows * args.batches)


class Runs:
    """Runs the queries over the input."""

    def __init__(self, args: argparse.Namespace, spark: SparkSession, work: Path) -> None:
        self._args, self._spark, self._work = args, spark, work
        self._made = 0

    def measure(self, query: Query, place_of_input: Path, events: int, *, ours: bool) -> Speed:
        """Run a query over all files."""
        self._made += 1
        place = self._work / f"run-{self._made}"

        def plan(df: DataFrame, state: Path) -> contextlib.AbstractContextManager[tuple[DataFrame, str]]:
            return self._plan(query, df.withWatermark("ts", "1 minute"), state, ours=ours)

        return speed_of(self._spark, SCHEMA, place_of_input, place, plan, events=events, mode=query.mode)

    @contextlib.contextmanager
    def _plan(self, query: Query, df: DataFrame, place: Path, *, ours: bool) -> Iterator[tuple[DataFrame, str]]:
        if not ours:
            yield query.spark(df), f"{place}-checkpoint"
            return
        place.mkdir(parents=True)
        with StateBackend(str(place), parallelism=self._args.partitions, spark=self._spark) as backend:
            yield query.dstl(backend, df), backend.checkpoint_location


def eviction(held: int, rounds: int = 20) -> dict[str, Any]:
    """Measure what it takes to find ``DUE`` groups among so many."""
    table = HeapStateTable()
    names = np.arange(held, dtype="<i8")
    keys = np.zeros((held, 17), np.uint8)
    keys[:, 1:9] = (EPOCH_US + names).astype("<i8").view(np.uint8).reshape(-1, 8)
    keys[:, 9:] = names.view(np.uint8).reshape(-1, 8)
    offsets = pa.py_buffer((np.arange(held + 1) * 17).astype(np.int32))
    column = pa.Array.from_buffers(pa.binary(), held, [None, offsets, pa.py_buffer(keys)])
    nothing = pa.array([b""] * held, pa.binary())
    values = pa.array([b"0123456789abcdef"] * held, pa.binary())
    numbers = [pa.array(np.full(held, n, t)) for n, t in ((0, np.uint16), (0, np.uint16), (OP_PUT, np.uint8))]
    table.apply(pa.RecordBatch.from_arrays([*numbers, column, nothing, values], schema=CHANGE_SCHEMA))
    source, asked = TableSource(table), FetchDue("", 0, 0, PLACE, EPOCH_US + DUE - 1, 0, True, (0,))
    times = []
    for _ in range(rounds):
        began = time.process_time()
        source.answer(asked)
        times.append((time.process_time() - began) * 1e3)
    return {"held": held, "due": DUE, "cpu_ms": round(statistics.median(times), 3)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every query ``rounds`` times on both sides, in turns, and return the medians."""
    figures: dict[tuple[Query, str], list[float]] = {}
    cpu: dict[str, dict[str, float]] = {}
    with session("windows", args) as (spark, work):
        events = write_input(work / "input", args, args.events)
        few = write_input(work / "few", args, min(args.events, WARM_UP))
        runs = Runs(args, spark, work)
        for ours in (True, False):
            runs.measure(QUERIES[0], work / "few", few, ours=ours)  # for the JVM, which is slow at first
        chosen = [each for each in QUERIES if not args.only or each.query in args.only.split(",")]
        for _ in range(args.rounds):
            for query in chosen:
                for side in ("dstl", "spark"):
                    speed = runs.measure(query, work / "input", events, ours=side == "dstl")
                    print(f"{query.query:9} {query.mode:7} {side:6} {speed}", file=sys.stderr)
                    figures.setdefault((query, side), []).append(speed.rate)
                    cpu[f"{query.query} {query.mode} {side}"] = speed.cpu  # of the last round
    medians = {where: round(statistics.median(rates)) for where, rates in figures.items()}
    return {
        "runs": [
            {"query": q.query, "mode": q.mode, "dstl": medians[q, "dstl"], "spark": medians[q, "spark"]} for q in chosen
        ],
        "cpu": cpu,
        "eviction": [eviction(held) for held in args.held],
        "events": events,
        "partitions": args.partitions,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench windows", description=__doc__)
    parser.add_argument("--events", type=int, default=4_000_000, help="of all measured batches")
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=8, help="measured ones; a warm-up of the same size comes first")
    parser.add_argument("--held", type=int, nargs="*", default=[10_000, 100_000, 1_000_000], help="held groups")
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many (default 1)")
    parser.add_argument("--only", help="names of queries, joined by commas")
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
