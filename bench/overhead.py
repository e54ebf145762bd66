"""``overhead``: throughput with and without checkpoints of a stateless filter and of keyed counting.

Spark's streams end a micro-batch with every checkpoint, so *off* is the same query over the same events as one
micro-batch, in which no checkpoint falls, and *on* is as many micro-batches as take about ``--interval`` seconds each.
The cost of a boundary is all that it costs: Spark's planning and offsets, and for the counting the commit of the
state. Events per second of the batches after the first, which warms up; medians over ``--rounds``.

- ``grep``: a filter of strings, without state; Spark's checkpoint directory alone.
- ``keyed``: ``backend.groupBy(df, "k").agg(F.count("*"))``; ours as well.

Published for Flink, with a checkpoint every 5 s: ratios of 0.98 and 0.958.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bench._figures import print_figures
from bench._stream import add_stream_arguments, session
from bench.spark import Runs, write_input

_LEAST_BATCHES = 2


@contextlib.contextmanager
def _grep(df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
    yield df.where(F.col("k").contains("77")), f"{place}-checkpoint"


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run every pipeline ``rounds`` times in turn, and return the medians and their ratios."""
    figures: dict[str, list[float]] = {}
    with session("overhead", args) as (spark, work):
        whole = write_input(work / "whole", args.events, args.keys, 1, "string", args.seed)
        runs = Runs(args, spark, work)

        @contextlib.contextmanager
        def keyed(df: DataFrame, place: Path) -> Iterator[tuple[DataFrame, str]]:
            with runs.backend(place) as backend:
                yield backend.groupBy(df, "k").agg(F.count("*").alias("n")), backend.checkpoint_location

        plans = {"grep": _grep, "keyed": keyed}
        for name, plan in plans.items():
            # Twice: a JVM that is cold would make too few batches.
            rate = [runs.measure(plan, whole) for _ in range(2)][-1]
            batches = max(_LEAST_BATCHES, round(args.events / rate / args.interval))
            cut = write_input(work / name, args.events, args.keys, batches, "string", args.seed)
            figures[f"{name}_batches"] = [batches]
            for number in range(args.rounds):
                order = [("off", whole), ("on", cut)]
                for kind, data in order if number % 2 == 0 else reversed(order):
                    rate = runs.measure(plan, data)
                    print(f"{name}_{kind:4} {rate:12,.0f}/s", file=sys.stderr)
                    figures.setdefault(f"{name}_{kind}", []).append(rate)
    medians: dict[str, Any] = {name: round(statistics.median(each)) for name, each in figures.items()}
    for name in plans:
        medians[f"{name}_ratio"] = round(medians[f"{name}_on"] / medians[f"{name}_off"], 4)
    return medians


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench overhead", description=__doc__)
    parser.add_argument("--events", type=int, default=20_000_000, help="of all measured batches")
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between checkpoints (default 5)")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (default 3)")
    add_stream_arguments(parser)
    args = parser.parse_args(argv)
    args.key_type = "string"
    print_figures(run(args), as_json=args.json)
    return 0
