"""``changelog``: time and number of checkpoints with the log of changes, and with whole tables instead of it.

For each size the state is loaded, then batches change ``--changed-mb`` of it each. *On*: a checkpoint is the log of its
batch and a manifest, as the product makes it. *Off*, as a backend without a log: a checkpoint is a materialization of
the table behind the batch, and the manifest that names it; the log that is written all the same is not in its time. The
heap table writes the key groups that have changed (all of them, where changes are drawn from all keys), RocksDB the
files that are new.

``checkpoint_ms`` is from the commit to completion. ``completed`` is how many checkpoints a trigger of
``--interval-s`` completes in ``--minutes`` if each takes as long as those that were seen: a trigger that finds a
checkpoint still on its way passes.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench._figures import print_figures
from bench._state_job import (
    StateJob,
    add_job_arguments,
    add_store_arguments,
    in_directory,
    keys_of,
    loaded_job,
    percentile,
    store_name,
)
from dstl.options import MaterializationOptions
from tests.worlds.demand import demand

_WARM_UP = 2
_NO_KEYS = np.empty(0, np.int64)


def completed(took_s: Sequence[float], interval_s: float, duration_s: float) -> int:
    """Return how many checkpoints a trigger completes in a time.

    Args:
        took_s: What checkpoints took, in seconds; they are taken in turn.
        interval_s: From one trigger to the next. One that comes while a checkpoint is on its way passes.
        duration_s: The time.
    """
    count, now = 0, 0.0
    while now + took_s[count % len(took_s)] <= duration_s:
        took = took_s[count % len(took_s)]
        now += interval_s * max(1, math.ceil(took / interval_s))
        count += 1
    return count


async def _snapshot(job: StateJob) -> float:
    """Checkpoint the tables as they are; return the milliseconds that it took."""
    began = time.perf_counter()
    done = job.recorder.counters["completedMaterialization"]
    demand(job.manager)
    await job.settled()
    if job.recorder.counters["completedMaterialization"] == done:
        raise SystemExit("a materialization failed: nothing is measured")
    took = (time.perf_counter() - began) * 1e3
    return took + (await job.batch(_NO_KEYS)).checkpoint


async def measure(args: argparse.Namespace, state_mb: float, on: bool, directory: Path) -> dict[str, Any]:
    """Return the figures of one size, with the log or without."""
    keys = keys_of(args, state_mb)
    changed = min(keys, keys_of(args, args.changed_mb))
    # Only when it is asked for.
    options = MaterializationOptions(
        interval_s=1e9, min_pause_s=0, log_to_state_ratio=None, replay_s=None, generations=1
    )
    took: list[float] = []
    requests: list[float] = []
    async with loaded_job(args, keys, directory, options) as job:
        for number in range(_WARM_UP + args.checkpoints):
            times = await job.batch(job.rng.integers(0, keys, changed))
            before = job.store.calls["put"]
            each = times.checkpoint if on else await _snapshot(job)
            if number >= _WARM_UP:
                took.append(each)
                requests.append(times.requests if on else job.store.calls["put"] - before)
    figures = {
        "state_mb": state_mb,
        "changelog": "on" if on else "off",
        "checkpoint_ms": {"p50": percentile(took, 0.5), "p99": percentile(took, 0.99), "max": max(took)},
        "requests_p50": percentile(requests, 0.5),
        "completed": completed([each / 1e3 for each in took], args.interval_s, args.minutes * 60),
    }
    print(json.dumps(figures), file=sys.stderr)
    return figures


def _one(args: argparse.Namespace, state_mb: float, on: bool, directory: Path) -> dict[str, Any]:
    return asyncio.run(measure(args, state_mb, on, directory))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench changelog", description=__doc__)
    parser.add_argument("--state-mb", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--changed-mb", type=float, default=1.0, help="keys and values that a batch changes")
    parser.add_argument("--checkpoints", type=int, default=10, help="measured ones of each arm")
    parser.add_argument("--interval-s", type=float, default=1.0, help="of the trigger, for the number completed")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the number completed")
    add_store_arguments(parser, store="latency")
    add_job_arguments(parser, value_bytes=1000)
    args = parser.parse_args(argv)
    sizes = [
        in_directory(partial(_one, args, state_mb, on), args.directory)
        for state_mb in args.state_mb
        for on in (True, False)
    ]
    figures = {
        "sizes": sizes,
        "interval_s": args.interval_s,
        "minutes": args.minutes,
        "changed_mb": args.changed_mb,
        "table": args.table,
        "store": store_name(args),
    }
    print_figures(figures, as_json=args.json)
    return 0
