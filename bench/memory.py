"""``memory``: bytes of memory per key in the heap table against a plain dictionary, and the peak of a restore.

``heap_bytes_per_key`` and ``dict_bytes_per_key`` are what Python's allocators hold (tracemalloc) for the same keys and
values, once filled batch by batch; ``payload`` are the bytes of key and value alone. The restore runs in a process of
its own: ``restored_mb`` is what it has grown by afterwards, ``peak_mb`` by how much at the most.
"""

import argparse
import asyncio
import gc
import os
import resource
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bench._figures import print_figures
from bench._state_job import GROUPS, KEY_BYTES, StateJob, add_job_arguments, in_directory, keys_of, local_job
from bench.recovery import QUIET, materialize_now
from dstl.checkpoint.assembly import recovery_work
from dstl.runtime import system_runtime
from dstl.store.local import LocalStore
from dstl.taskmanager.memory_limit import resident_bytes
from dstl.taskmanager.task_manager import table_opener
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from materializer.restore.restore import restore_tables
from materializer.tables import HeapStateTable, TableKind

BATCH_KEYS = 10_000


def bytes_per_key(job: StateJob, keys: int) -> dict[str, float]:
    """Fill a table and a dictionary with the same changes, and look what each holds."""

    def table() -> object:
        filled = HeapStateTable()
        for start in range(0, keys, BATCH_KEYS):
            filled.apply(job.changes(np.arange(start, min(keys, start + BATCH_KEYS))))
        return filled

    def plain() -> object:
        filled: dict[bytes, bytes] = {}
        for start in range(0, keys, BATCH_KEYS):
            part = job.changes(np.arange(start, min(keys, start + BATCH_KEYS)))
            filled.update(zip(part.column("key").to_pylist(), part.column("value").to_pylist(), strict=True))
        return filled

    heap, dictionary = held(table) / keys, held(plain) / keys
    return {
        "heap_bytes_per_key": heap,
        "dict_bytes_per_key": dictionary,
        "payload_bytes_per_key": KEY_BYTES + job.value_bytes,
        "ratio_heap_to_dict": heap / dictionary,
    }


def held(make: Callable[[], object]) -> int:
    """Return the bytes that what is made holds."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        made = make()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        del made
    finally:
        tracemalloc.stop()
    return after - before


def restore_alone(checkpoint: str, directory: str, kind: TableKind) -> dict[str, float]:
    """Restore in this process, which has done nothing else; MB that it grew by, then and at the most."""

    async def run() -> dict[str, float]:
        runtime, store = system_runtime(), LocalStore(str(Path(directory) / "objects"))
        opener = table_opener(kind, Path(directory) / f"tables-{os.getpid()}")
        parsed = CompletedCheckpoint.model_validate_json(checkpoint)
        before = resident_bytes()
        restored = await restore_tables(
            parsed, store, KeyGroupRange.all(GROUPS), opener, runtime, on_progress=lambda _: None
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found = {"restored_mb": (resident_bytes() - before) / 1e6, "peak_mb": (peak - before) / 1e6}
        for table in restored.tables.values():
            table.close()
        return found

    return asyncio.run(run())


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Count what tables take, then restore one."""
    keys = keys_of(args, args.state_mb)
    async with local_job(args, directory, QUIET) as job:
        await job.load(keys)
        await materialize_now(job)
        changed = int(keys * args.log_share)
        for start in range(0, changed, BATCH_KEYS):
            await job.batch(job.rng.integers(0, keys, min(BATCH_KEYS, changed - start)))
        assert job.newest is not None
        work, checkpoint = recovery_work(job.newest), job.newest.model_dump_json()
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            restored = alone.submit(restore_alone, checkpoint, str(directory), args.table).result()
        per_key = bytes_per_key(job, min(keys, args.keys))
    return {
        **per_key,
        "restore": {
            "state_mb": args.state_mb,
            "log_mb": work.log_bytes / 1e6,
            "base_mb": work.base_bytes / 1e6,
            **restored,
            "ratio_peak_to_state": restored["peak_mb"] / args.state_mb,
            "ratio_peak_to_restored": restored["peak_mb"] / max(1e-9, restored["restored_mb"]),
        },
        "table": args.table,
        "value_bytes": args.value_bytes,
    }


def main(argv: list[str]) -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench memory", description=__doc__)
    parser.add_argument("--state-mb", type=float, default=200.0, help="keys and values that are restored")
    parser.add_argument("--log-share", type=float, default=0.1, help="log after the base, by state")
    parser.add_argument("--keys", type=int, default=200_000, help="most keys that are counted per key")
    add_job_arguments(parser, value_bytes=100)
    args = parser.parse_args(argv)
    figures = in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory)
    print_figures(figures, as_json=args.json)
    return 0
