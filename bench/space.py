"""``space``: how much a full checkpoint takes, against the state that lives.

``value`` replaces random values of a fixed set of keys; ``window`` adds keys and deletes those that are a window older,
so that the log holds many times the state. ``live_mb`` is the live state written as base files and nothing else.
``full_checkpoint_mb_max`` is the most that any checkpoint needed to be restored, base and log; its ratio to ``live_mb``
is the figure. ``stored_mb_max`` counts everything that a checkpoint refers to: the older generation of bases, which is
kept against damage, and the log back to it as well. Checkpoints before the first base are not counted.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench._figures import print_figures
from bench._state_job import GROUPS, OPERATOR, StateJob, add_job_arguments, in_directory, keys_of, local_job
from dstl.checkpoint.assembly import recovery_work
from dstl.options import MaterializationOptions
from materializer.bases.key_group_file import encode_key_group
from tests.worlds.demand import demand


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    options = MaterializationOptions(min_pause_s=0, interval_s=1e9, min_log_bytes=args.min_log_mb * 1_000_000)
    keys = keys_of(args, args.state_mb)
    per_batch = max(1, keys // args.batches_per_state)
    restore_max = stored_max = live_max = log_max = 0
    oldest, newest = 0, keys
    async with local_job(args, directory, options) as job:
        await job.load(keys)
        await job.batch(np.arange(0))
        demand(job.manager)
        await job.settled()
        await job.batch(np.arange(0))
        await job.batch(np.arange(0))
        for number in range(args.batches_per_state * args.rounds):
            if args.workload == "value":
                await job.batch(job.rng.integers(0, keys, per_batch))
            else:
                added = np.arange(newest, newest + per_batch)
                await job.batch(added, np.arange(oldest, oldest + per_batch))
                oldest, newest = oldest + per_batch, newest + per_batch
            if args.wait:
                await job.settled()
            assert job.newest is not None
            work = recovery_work(job.newest)
            restore_max, log_max = max(restore_max, work.bytes), max(log_max, work.log_bytes)
            stored_max = max(stored_max, job.newest.full_bytes)
            if number % args.batches_per_state == 0:
                live_max = max(live_max, live_bytes(job))
                print(f"batch {number}: restore needs {work.bytes / 1e6:.1f} MB", file=sys.stderr)
        materializations = job.recorder.counters["completedMaterialization"]
        uploaded = job.recorder.counters["materializedBytes"]
    return {
        "live_mb": live_max / 1e6,
        "full_checkpoint_mb_max": restore_max / 1e6,
        "ratio": restore_max / live_max,
        "stored_mb_max": stored_max / 1e6,
        "stored_ratio": stored_max / live_max,
        "log_mb_max": log_max / 1e6,
        "materializations": materializations,
        "uploaded_bases_mb": uploaded / 1e6,
        "workload": args.workload,
        "table": args.table,
        "value_bytes": args.value_bytes,
        "store": "local directory",
    }


def live_bytes(job: StateJob) -> int:
    """Bytes of the table as base files."""
    snapshot = job.backend.table(OPERATOR).snapshot()
    try:
        return sum(len(encode_key_group(snapshot, group).data) for group in range(GROUPS))
    finally:
        snapshot.close()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench space", description=__doc__)
    parser.add_argument("--workload", choices=("value", "window"), default="value")
    parser.add_argument("--state-mb", type=float, default=64.0)
    parser.add_argument("--batches-per-state", type=int, default=50, help="batches that change as much as there is")
    parser.add_argument("--rounds", type=int, default=6, help="how often as much as there is is changed")
    parser.add_argument("--min-log-mb", type=int, default=4, help="log below which nothing is materialized")
    parser.add_argument("--no-wait", dest="wait", action="store_false", help="batches go on while a base is written")
    add_job_arguments(parser, value_bytes=200)
    args = parser.parse_args(argv)
    figures = in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory)
    print_figures(figures, as_json=args.json)
    return 0
