"""``checkpoint``: does the time of a checkpoint depend on the size of the state?

For each size the state is loaded, then batches change ``--changed-mb`` of it each, while the table is materialized
again and again in the background. ``checkpoint_ms`` is from the commit to completion: log stored,
manifest committed. ``put_ms_p50`` is the store's time for one segment, or for one manifest where that has the log in
it. ``sync_part_ms_max`` is the longest snapshot; ``batch_delay_ms_max`` is by how much the slowest batch during a
materialization (opening, reading and writing state, no store) was slower than the median of the batches without one;
``batch_delay_cpu_ms_max`` is the same by the clock of the loop's thread, without what other threads and other processes
of the machine took.
"""

import argparse
import asyncio
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from bench._figures import print_figures
from bench._state_job import (
    KEY_BYTES,
    BatchTimes,
    StateJob,
    add_job_arguments,
    add_store_arguments,
    in_directory,
    keys_of,
    loaded_job,
    percentile,
    store_name,
)
from dstl.options import BatchingOptions, MaterializationOptions


async def measure(args: argparse.Namespace, state_mb: float, directory: Path) -> dict[str, Any]:
    keys = keys_of(args, state_mb)
    changed = min(keys, keys_of(args, args.changed_mb))
    options = MaterializationOptions(
        interval_s=args.materialize_s,
        min_pause_s=args.materialize_s / 2,
        log_to_state_ratio=None,
        replay_s=None,
    )
    times: list[BatchTimes] = []
    async with loaded_job(args, keys, directory, options) as job:
        for _ in range(3):
            await job.batch(job.rng.integers(0, keys, changed))
        job.recorder.samples.clear()
        for _ in range(args.batches):
            times.append(await job.batch(job.rng.integers(0, keys, changed)))
            await job.runtime.clock.sleep(args.pause_s)
        done = job.recorder.counters["completedMaterialization"] + job.recorder.counters["failedMaterialization"]
        running = job.manager.running is not None
    calm = [t.work for t in times if not t.materializing]
    busy = [t.work for t in times if t.materializing]
    typical = statistics.median(calm or busy)
    calm_cpu = [t.work_cpu for t in times if not t.materializing]
    busy_cpu = [t.work_cpu for t in times if t.materializing]
    typical_cpu = statistics.median(calm_cpu or busy_cpu)
    of_segments = _put_ms(job, "uploadSizes", "uploadLatenciesNanos", most=2 * args.changed_mb * 1e6)
    # A batch whose log is in the manifest has no segment: its one PUT is the manifest's.
    inlined = BatchingOptions().inline_threshold
    of_manifests = _put_ms(job, "storeRequestBytes.put", "storeRequestNanos.put", most=inlined)
    checkpoints = [t.checkpoint for t in times]
    figures = {
        "state_mb": state_mb,
        "changed_mb": changed * (args.value_bytes + KEY_BYTES) / 1e6,
        "checkpoint_ms": {"p50": percentile(checkpoints, 0.5), "p99": percentile(checkpoints, 0.99)},
        "put_ms_p50": percentile(of_segments or of_manifests, 0.5),
        "requests_per_checkpoint": percentile([float(t.requests) for t in times], 0.5),
        "sync_part_ms_max": 1e3 * max(job.recorder.samples["materializationSyncSeconds"], default=0.0),
        "batch_delay_ms_max": max(0.0, max(busy, default=typical) - typical),
        "batch_delay_ms_p50": max(0.0, percentile(busy, 0.5) - typical),
        "batch_delay_cpu_ms_max": max(0.0, max(busy_cpu, default=typical_cpu) - typical_cpu),
        "batch_ms_p50": typical,
        "batches_during_materialization": len(busy),
        "materializations": done + running,
    }
    print(json.dumps(figures), file=sys.stderr)
    return figures


def _put_ms(job: StateJob, sizes: str, nanos: str, *, most: float) -> list[float]:
    """Return the milliseconds of the PUTs that had fewer bytes."""
    samples = job.recorder.samples
    return [each / 1e6 for each, size in zip(samples[nanos], samples[sizes], strict=False) if size < most]


async def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    sizes = []
    for state_mb in args.state_mb:
        sizes.append(await asyncio.to_thread(in_directory, partial(_one, args, state_mb), args.directory))
    first, last = sizes[0]["checkpoint_ms"]["p50"], sizes[-1]["checkpoint_ms"]["p50"]
    return {
        "sizes": sizes,
        "ratio_p50": last / first,
        "table": args.table,
        "value_bytes": args.value_bytes,
        "store": store_name(args),
    }


def _one(args: argparse.Namespace, state_mb: float, directory: Path) -> dict[str, Any]:
    return asyncio.run(measure(args, state_mb, directory))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench checkpoint", description=__doc__)
    parser.add_argument("--state-mb", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--changed-mb", type=float, default=1.0, help="keys and values that a batch changes")
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--pause-s", type=float, default=0.05, help="between batches")
    parser.add_argument("--materialize-s", type=float, default=2.0, help="from one materialization to the next")
    add_store_arguments(parser, store="latency")
    add_job_arguments(parser, value_bytes=1000)
    args = parser.parse_args(argv)
    figures = asyncio.run(measure_all(args))
    print_figures(figures, as_json=args.json)
    if not args.json:
        print(f"p50 at the largest state is {figures['ratio_p50']:.2f} x that at the smallest")
    return 0
