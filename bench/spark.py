"""``spark``: events per second of a keyed aggregation, through DSTL and through Spark's own state.

All figures of one run come from one session and the same files, one parquet file per micro-batch: for each key the
number of its events and the sum of a value, kept over batches. Spark's own operators use RocksDB with changelog
checkpointing; every Python task speaks over Spark's unix socket, and takes Arrow batches that are bounded by rows
alone. The first batch of each query is left out.

- ``stateless``: repartition by key, then ``mapInArrow`` with the identity: what a Python task costs without state.
- ``stateless_frozen``: the same, its workers frozen by the code that freezes those of DSTL (``WorkerOptions.freeze``):
  the limit of ``dstl_vectorised``. Without it the collection that PySpark forces after every task is most of a worker's
  time where there are many partitions.
- ``spark_native``: ``groupBy(k).agg(count, sum)``.
- ``dstl_vectorised``: ``backend.groupBy(...).agg(...)``; ``dstl_processor``: a Row-style ``StatefulProcessor``.
- ``spark_tws_row``, ``spark_tws_pandas``: ``transformWithState`` and ``transformWithStateInPandas``, small input.
- ``dstl_processor_small``, ``dstl_pandas_small``: the same two classes, unchanged, on the same small input.
- ``stateless_small``, ``stateless_frozen_small``: the two on it. Its batches are short, so this, what Spark takes for a
  batch of Python tasks, bounds what any state backend can reach there.

Those that freeze their workers share them, and so do those that do not: no worker is frozen for a peer that would not
have done it.

``cpu`` has seconds of processor for a million events by kind of process (``jvm``, ``workers``, ``task_managers``,
``driver``) of each whole query of the last round, start and warm-up included: comparable on a busy machine. The start
of a TaskManager is 0.4 s. ``ratio_python_to_jvm`` is all but the JVM's by the JVM's. Workers' and JVM's by
the TaskManager's is the number of busy slots at which its one core is full.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from bench._figures import print_figures
from bench._stream import Plan, Speed, add_stream_arguments, session, speed_of, write_batches
from dstl.spark import StateBackend
from dstl.spark.worker_process import count_task
from dstl.system_limits import keep_freed_memory

# Workers import this module where they can; by value it works from any directory.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RESULT = "k {key}, n long, total long"


class CountAndSum(StatefulProcessor):
    """Row style: one read and one write of one value state per key and batch."""

    def init(self, handle: Any) -> None:
        self.seen = handle.getValueState("seen", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, total = self.seen.get() or (0, 0)
        for row in rows:
            n += 1
            total += row.v
        self.seen.update((n, total))
        yield Row(k=key[0], n=n, total=total)


class PandasCountAndSum(CountAndSum):
    """The same in pandas style."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n, total = self.seen.get() or (0, 0)
        for frame in rows:
            n += len(frame)
            total += int(frame["v"].sum())
        self.seen.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})


@dataclass(frozen=True)
class Input:
    """Files of one input.

    Attributes:
        directory: One parquet file per batch, read in the order of their names.
        events: Of all batches but the warm-up.
    """

    directory: Path
    events: int


def write_input(directory: Path, events: int, keys: int, batches: int, key_type: str, seed: int) -> Input:
    """Write ``batches`` files with ``events`` events together, and one more for the warm-up."""
    rng = np.random.default_rng(seed)
    rows = events // batches

    def rows_of(_: int) -> pa.Table:
        k = rng.integers(0, keys, rows)
        column = pa.array(k) if key_type == "long" else pa.array([f"device-{each:08d}" for each in k.tolist()])
        return pa.table({"k": column, "v": rng.integers(0, 1000, rows)})

    write_batches(directory, batches + 1, rows_of)
    return Input(directory, rows * batches)


def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return every row as it is."""
    yield from batches


def frozen_identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return every row as it is, and keep and freeze the worker's heap as a task of DSTL's does."""
    keep_freed_memory()
    yield from batches
    count_task()


class Runs:
    """Runs the pipelines over the inputs and keeps their figures."""

    def __init__(self, args: argparse.Namespace, spark: SparkSession, work: Path) -> None:
        self._args = args
        self._spark = spark
        self._work = work
        self._made = 0
        self._result = RESULT.format(key=args.key_type)
        self.plans: dict[str, tuple[Plan, bool]] = {
            "stateless": (self.stateless(identity), False),
            "stateless_frozen": (self.stateless(frozen_identity), False),
            "spark_native": (self.native, False),
            "dstl_vectorised": (self.vectorised, False),
            "dstl_processor": (self.processor("row"), False),
            "stateless_small": (self.stateless(identity), True),
            "stateless_frozen_small": (self.stateless(frozen_identity), True),
            "spark_tws_row": (self.transform_with_state("row"), True),
            "dstl_processor_small": (self.processor("row"), True),
            "spark_tws_pandas": (self.transform_with_state("pandas"), True),
            "dstl_pandas_small": (self.processor("pandas"), True),
        }

    def measure(self, name: str, data: Input) -> Speed:
        """Run a plan's query over all files."""
        self._made += 1
        # Spark gives a worker only to queries with the environment that it was started with.
        frozen = name.startswith(("dstl", "stateless_frozen"))
        self._spark.sparkContext.environment["DSTL_BENCH_WORKERS"] = "frozen" if frozen else "plain"
        place = self._work / f"run-{self._made}"
        schema = f"k {self._args.key_type}, v long"
        return speed_of(self._spark, schema, data.directory, place, self.plans[name][0], events=data.events)

    def stateless(self, function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> Plan:
        @contextlib.contextmanager
        def plan(df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
            yield df.repartition(self._args.partitions, "k").mapInArrow(function, df.schema), f"{place}-checkpoint"

        return plan

    @contextlib.contextmanager
    def native(self, df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
        made = df.groupBy("k").agg(F.count(F.lit(1)).alias("n"), F.sum("v").alias("total"))
        yield made, f"{place}-checkpoint"

    @contextlib.contextmanager
    def vectorised(self, df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
        with self.backend(place) as backend:
            yield (
                backend.groupBy(df, "k").agg(F.count("*").alias("n"), F.sum("v").alias("total")),
                backend.checkpoint_location,
            )

    def processor(self, style: str) -> Plan:
        @contextlib.contextmanager
        def plan(df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
            with self.backend(place) as backend:
                if style == "row":
                    made = backend.groupBy(df, "k").transformWithState(CountAndSum(), self._result, "append", "none")
                else:
                    made = backend.groupBy(df, "k").transformWithStateInPandas(
                        PandasCountAndSum(), self._result, "append", "none"
                    )
                yield made, backend.checkpoint_location

        return plan

    def transform_with_state(self, style: str) -> Plan:
        @contextlib.contextmanager
        def plan(df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
            grouped = df.groupBy("k")
            if style == "row":
                made = grouped.transformWithState(CountAndSum(), self._result, "update", "none")
            else:
                made = grouped.transformWithStateInPandas(PandasCountAndSum(), self._result, "update", "none")
            yield made, f"{place}-checkpoint"

        return plan

    def backend(self, place: Path) -> StateBackend:
        place.mkdir(parents=True)
        return StateBackend(str(place), parallelism=self._args.partitions, spark=self._spark)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write the inputs, run every pipeline ``rounds`` times in turn, and return the medians."""
    figures: dict[str, list[float]] = {}
    cpu: dict[str, dict[str, float]] = {}
    with session("spark", args) as (spark, work):
        large = write_input(work / "large", args.events, args.keys, args.batches, args.key_type, args.seed)
        small = write_input(
            work / "small", args.small_events, args.small_keys, args.small_batches, args.key_type, args.seed
        )
        runs = Runs(args, spark, work)
        chosen = [name for name in runs.plans if not args.only or name in args.only.split(",")]
        runs.measure("stateless", small)  # for the JVM, which is slow at first
        for _ in range(args.rounds):
            for name in chosen:
                started = time.perf_counter()
                speed = runs.measure(name, small if runs.plans[name][1] else large)
                print(f"{name:22} {speed}  ({time.perf_counter() - started:.1f} s)", file=sys.stderr)
                figures.setdefault(name, []).append(speed.rate)
                cpu[name] = speed.cpu  # of the last round
    medians: dict[str, Any] = {name: round(statistics.median(each)) for name, each in figures.items()}
    medians["cpu"] = cpu
    medians["small_input"] = {"events": small.events, "keys": args.small_keys, "batches": args.small_batches}
    return medians


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench spark", description=__doc__)
    parser.add_argument("--events", type=int, default=4_000_000, help="of all measured batches")
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=8, help="measured ones; a warm-up of the same size comes first")
    parser.add_argument("--small-events", type=int, default=200_000, help="input of the slow peers")
    parser.add_argument("--small-keys", type=int, default=20_000)
    parser.add_argument("--small-batches", type=int, default=4)
    parser.add_argument("--key-type", choices=("long", "string"), default="long")
    parser.add_argument("--rounds", type=int, default=1, help="medians of so many (default 1)")
    parser.add_argument("--only", help="names of figures, joined by commas")
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    print_figures(run(args), as_json=args.json)
    return 0
