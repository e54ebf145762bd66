"""``cost``: dollars a day of a stated job's checkpoints in S3, ours against Spark's own state store.

Ours is measured: the requests of one TaskManager and the coordinator over ``--batches`` batches, bases included, and
what the last checkpoint refers to. The log is materialized by its size alone. Spark's is a formula: one changelog
object for each partition and store, and two objects of its own, each batch, times the requests of one object, as the
log of an S3 server had them for Spark with S3A of Hadoop 3.3 (4 and 16 partitions: 2 PUT or COPY, 5 HEAD, 8 GET or
LIST, 1 DELETE). Another S3A, or a committer without renames, needs fewer. All of the 8 count as GETs, the cheaper kind,
and Spark's snapshots and storage are left out. Prices: ``dstl/monitoring/cost.py``.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from bench._figures import print_figures
from bench._state_job import add_job_arguments, in_directory, keys_of, local_job
from dstl.monitoring.cost import PRICES, cost_of_day
from dstl.options import MaterializationOptions

DAY_S = 86_400.0
SPARK_PUTS, SPARK_GETS = 2, 13
"""Requests of one object of Spark's: PUT and COPY; GET, HEAD and LIST."""
SPARK_OBJECTS = 2
"""Objects of a batch beside those of its stores: ``offsets`` and ``commits``."""


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the job's batches, and count."""
    keys = keys_of(args, args.state_mb)
    async with local_job(args, directory, MaterializationOptions(min_pause_s=0, interval_s=1e9)) as job:
        await job.load(keys)
        job.manager.demand()
        await job.settled()
        before = job.store.totals
        for _ in range(args.batches):
            await job.batch(job.rng.integers(0, keys, args.changed_keys))
            await job.settled()
        spent = job.store.totals - before
        assert job.newest is not None
        stored = job.newest.full_bytes
    batches_a_day = DAY_S / args.trigger_s
    puts, gets = (
        (spent.put.calls + spent.list.calls) / args.batches,
        (spent.get.calls + spent.head.calls) / args.batches,
    )
    ours = cost_of_day(puts * batches_a_day, stored, PRICES, gets=gets * batches_a_day)
    objects = args.partitions * args.stores + SPARK_OBJECTS
    spark = cost_of_day(SPARK_PUTS * objects * batches_a_day, 0, PRICES, gets=SPARK_GETS * objects * batches_a_day)
    print(f"ours:  {ours.formula}\nSpark: {spark.formula}", file=sys.stderr)
    return {
        "job": f"{args.partitions} partitions, {args.stores} stores, a batch each {args.trigger_s:g} s that changes "
        f"{args.changed_keys:,} keys of {keys:,} with {args.value_bytes} bytes each",
        "dstl": {
            "usd_a_day": ours.total,
            "requests_usd": ours.requests,
            "storage_usd": ours.storage,
            "puts_a_batch": puts,
            "gets_a_batch": gets,
            "stored_mb": stored / 1e6,
            "formula": ours.formula,
        },
        "spark": {
            "usd_a_day": spark.total,
            "puts_a_batch": SPARK_PUTS * objects,
            "gets_a_batch": SPARK_GETS * objects,
            "formula": spark.formula,
        },
        "ratio_spark_to_dstl": spark.total / ours.total,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench cost", description=__doc__)
    parser.add_argument("--partitions", type=int, default=200, help="Spark's default; ours do not depend on it")
    parser.add_argument("--stores", type=int, default=1, help="state stores of each of Spark's partitions")
    parser.add_argument("--trigger-s", type=float, default=10.0, help="from one batch to the next")
    parser.add_argument("--state-mb", type=float, default=100.0, help="keys and values, MB of 1e6 bytes")
    parser.add_argument("--changed-keys", type=int, default=10_000, help="of one batch")
    parser.add_argument("--batches", type=int, default=60, help="measured ones")
    add_job_arguments(parser, value_bytes=100)
    args = parser.parse_args(argv)
    figures = in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory)
    print_figures(figures, as_json=args.json)
    return 0
