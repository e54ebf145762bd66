"""``memory``: bytes of memory per key in each kind of table against a plain dictionary, and the peak of a restore.

Each of ``heap``, ``rocksdb`` and ``dict`` is filled with the same keys and values in batches, in a process of its own.
``bytes_per_key`` is what the process has grown by, RocksDB's write buffers and caches included; ``disk_bytes_per_key``
what lies in files; ``fetch_us`` the processor time of a fetch, a key of 20,000 random ones asked for together.
``payload_bytes_per_key`` are key and value alone. The restore, too, runs alone: ``restored_mb`` is what its process has
grown by afterwards, ``peak_mb`` by how much at the most. Two longs are a value of 18 bytes.
"""

import argparse
import asyncio
import gc
import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from bench._figures import print_figures
from bench._state_job import (
    GROUPS,
    KEY_BYTES,
    OPERATOR,
    add_job_arguments,
    changes_of,
    in_directory,
    keys_of,
    local_job,
)
from bench.recovery import QUIET, materialize_now
from dstl.checkpoint.assembly import recovery_work
from dstl.runtime import system_runtime
from dstl.store.local import LocalStore
from dstl.system_limits import keep_freed_memory
from dstl.taskmanager.memory_limit import resident_bytes
from dstl.taskmanager.task_manager import table_opener
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from materializer.tables import TableKind
from tests.worlds.restored import restore_tables

BATCH_KEYS = 50_000
FETCHED = 20_000


def filled_alone(kind: TableKind | Literal["dict"], directory: str, keys: int, value_bytes: int) -> dict[str, float]:
    """Fill a table, or a dictionary, in this process, which has done nothing else, and look what it holds."""
    keep_freed_memory()
    rng = np.random.default_rng(1)
    place = Path(directory) / f"{kind}-{os.getpid()}"
    table = None if kind == "dict" else table_opener(kind, place)(OPERATOR)
    plain: dict[bytes, bytes] = {}
    changes_of(rng, np.arange(BATCH_KEYS), value_bytes)  # what Arrow and numpy take once
    before = resident_bytes()
    for start in range(0, keys, BATCH_KEYS):
        part = changes_of(rng, np.arange(start, min(keys, start + BATCH_KEYS)), value_bytes)
        if table is None:
            plain.update(zip(part.column("key").to_pylist(), part.column("value").to_pylist(), strict=True))
        else:
            table.apply(part)
    del part
    gc.collect()
    pa.default_memory_pool().release_unused()
    found = {"bytes_per_key": (resident_bytes() - before) / keys}
    if table is not None:
        asked = changes_of(rng, rng.permutation(keys)[:FETCHED], 0)
        began = time.process_time()
        table.get_values(0, asked.column("key_group").to_numpy(), asked.column("key"))
        found["fetch_us"] = (time.process_time() - began) / asked.num_rows * 1e6
        if place.exists():
            found["disk_bytes_per_key"] = sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) / keys
        table.close()
    return found


def restore_alone(checkpoint: str, directory: str, kind: TableKind) -> dict[str, float]:
    """Restore in this process, which has done nothing else; MB that it grew by, then and at the most."""

    keep_freed_memory()

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
        # One task a process: each starts with an empty one.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
            restored = alone.submit(restore_alone, checkpoint, str(directory), args.table).result()
            tables = {
                kind: alone.submit(filled_alone, kind, str(directory), args.keys, args.value_bytes).result()
                for kind in ("dict", "heap", "rocksdb")
            }
    return {
        "payload_bytes_per_key": KEY_BYTES + job.value_bytes,
        "keys": args.keys,
        **tables,
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
    parser.add_argument("--keys", type=int, default=200_000, help="that each table is filled with")
    add_job_arguments(parser, value_bytes=100)
    args = parser.parse_args(argv)
    figures = in_directory(lambda directory: asyncio.run(measure(args, directory)), args.directory)
    print_figures(figures, as_json=args.json)
    return 0
