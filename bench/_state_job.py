"""One TaskManager and the coordinator's commit path without Spark: what the state benchmarks drive.

A batch opens an attempt, reads its keys, writes its changes, persists, commits a manifest and completes, as a query's
batch does; sockets and Spark itself are left out.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench._figures import add_json
from bench._models import models
from dstl.changelog.change_set import CHANGE_SCHEMA, OP_DELETE, OP_PUT
from dstl.checkpoint.assembly import assemble, inlined_handles
from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.retained_objects import SharedStateRegistry
from dstl.options import MaterializationOptions
from dstl.process.lifecycle import SWITCH_INTERVAL_S
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.store.local import LocalStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components, QueryState, table_opener
from handles.checkpoint import CompletedCheckpoint, OperatorEntry, referenced_objects
from handles.key_group import KeyGroupRange
from materializer.tables import TableKind
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.worlds.memory_recorder import MemoryRecorder
from tests.worlds.restored import restore_tables

GROUPS = 128
OPERATOR = "bench"
KEY_BYTES = 8
LOADED_TOGETHER = 64_000
DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Milliseconds of one batch.

    Attributes:
        work: Opening, reading, writing: what needs the TaskManager and no store.
        work_cpu: The same on the clock of the loop's thread: without what other threads and processes took.
        checkpoint: From Spark's commit to completion.
        requests: To the store, deletions left out.
        materializing: Whether a materialization ran at its beginning or end.
    """

    work: float
    work_cpu: float
    checkpoint: float
    requests: int
    materializing: bool


def open_store(kind: str, directory: Path, model: str, seed: int) -> ObjectStore:
    """A local directory, or one behind a latency model of ``models.json``."""
    local = LocalStore(str(directory / "objects"))
    if kind == "local":
        return local
    return LatencyStore(local, LatencyModel(LatencyParameters.of(models()[model]), seed))


class StateJob:
    """A job of one operator with a value state: key ``i`` in key group ``i mod 128``."""

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        *,
        table: TableKind = "heap",
        options: MaterializationOptions,
        value_bytes: int = 1000,
        seed: int = 1,
        retained: int = 3,
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a TaskManager process does
        self.runtime = system_runtime()
        self.recorder = MemoryRecorder(1 << 16)
        self.store = InstrumentedStore(store, recorder=self.recorder)
        self.options = options
        self.value_bytes = value_bytes
        self.rng = np.random.default_rng(seed)
        self.open_table = table_opener(table, directory)
        config = TaskManagerConfig(store.location, table, GROUPS, materialization=options)
        components = Components(store=self.store, runtime=self.runtime, recorder=self.recorder)
        self._state = QueryState(config, components, self.open_table, "bench")
        self.storage, self.backend = self._state.changelog.storage, self._state.backend
        self.manager = self._state.manager
        self.log = ManifestLog(self.store, self.runtime)
        self.registry = SharedStateRegistry()
        self.completed: list[CompletedCheckpoint] = []
        self._retained = retained
        self._attempt = 0

    @property
    def newest(self) -> CompletedCheckpoint | None:
        """The last checkpoint."""
        return self.completed[-1] if self.completed else None

    async def begin(self) -> None:
        """Take the location over."""
        await self.log.fence("bench")

    async def resume(self, checkpoint: CompletedCheckpoint) -> None:
        """Go on from a checkpoint that another job has made."""
        owned = KeyGroupRange.all(GROUPS)
        restored = await restore_tables(checkpoint, self.store, owned, self.open_table, self.runtime)
        self.backend.replace_tables(restored.tables, checkpoint.checkpoint_id, owned, bases=restored.bases)
        self.completed.append(checkpoint)
        name = manifest_name(checkpoint.checkpoint_id)
        self.registry.register(checkpoint.checkpoint_id, [*dict.fromkeys(referenced_objects(checkpoint)), name])
        self._attempt = checkpoint.batch_id + 1

    async def close(self) -> None:
        """End everything, tables included."""
        await self._state.close()
        await self.store.close()

    async def batch(self, puts: np.ndarray[Any, Any], deletes: np.ndarray[Any, Any] | None = None) -> BatchTimes:
        """Run one batch that reads and replaces these keys, and deletes those."""
        requests = self._requests()
        busy = self.manager.running is not None
        changes = [self.changes(puts)] if len(puts) else []
        if deletes is not None and len(deletes):
            changes.append(self.changes(deletes, delete=True))
        self._attempt += 1
        key = (OPERATOR, self._attempt)
        parent = self.newest.checkpoint_id if self.newest else None
        began, began_cpu = time.perf_counter(), time.thread_time()
        self.backend.open_attempt(key, self._attempt, parent, 1)
        table = self.backend.table(OPERATOR)
        for part in changes:
            table.get_many(0, part.column("key_group").to_pylist(), part.column("key").to_pylist())
        for part in changes:
            async with self.storage.budget.reserve(part.nbytes):
                self.backend.write(key, 0, part, b"{}")
        self.backend.end_changes(key)
        worked, worked_cpu = time.perf_counter(), time.thread_time()
        winners = {OPERATOR: [self._attempt]}
        part = await self.backend.persist(winners)
        checkpoint, inlined = assemble(
            CompletedCheckpoint(
                checkpoint_id=self.log.next_sequence,
                batch_id=self._attempt - 1,
                query_id="bench",
                run_id="run",
                max_parallelism=GROUPS,
                created_at=self.runtime.clock.wall(),
                operators=(OperatorEntry(uid=OPERATOR, parallelism=1, key_types="bigint"),),
            ),
            self.newest,
            [part],
            self.options.generations,
        )
        await self.log.commit(checkpoint, inlined)
        self.backend.complete(checkpoint.checkpoint_id, winners, inlined_handles([part], checkpoint.checkpoint_id))
        ended = time.perf_counter()
        times = BatchTimes(
            (worked - began) * 1e3,
            (worked_cpu - began_cpu) * 1e3,
            (ended - worked) * 1e3,
            self._requests() - requests,
            busy or self.manager.running is not None,
        )
        self.completed.append(checkpoint)
        name = manifest_name(checkpoint.checkpoint_id)
        self.registry.register(checkpoint.checkpoint_id, [*dict.fromkeys(referenced_objects(checkpoint)), name])
        if len(self.completed) > self._retained:
            await self.store.delete(self.registry.unregister(self.completed.pop(0).checkpoint_id))
        return times

    async def load(self, keys: int) -> None:
        """Write every key once."""
        for start in range(0, keys, LOADED_TOGETHER):
            await self.batch(np.arange(start, min(keys, start + LOADED_TOGETHER)))

    async def settled(self) -> None:
        """Wait until no materialization runs."""
        while self.manager.running is not None:
            await self.runtime.clock.sleep(0.01)

    def changes(self, ids: np.ndarray[Any, Any], *, delete: bool = False) -> pa.RecordBatch:
        """Changes of some keys, key group by key group; values are random hexadecimal digits: they pack to a half."""
        return changes_of(self.rng, ids, 0 if delete else self.value_bytes, delete=delete)

    def _requests(self) -> int:
        return self.store.calls.total() - self.store.calls["delete"]


def changes_of(
    rng: np.random.Generator, ids: np.ndarray[Any, Any], value_bytes: int, *, delete: bool = False
) -> pa.RecordBatch:
    """Changes of some keys with such values: key ``i`` in key group ``i mod 128``."""
    ids = ids[np.argsort(ids % GROUPS, kind="stable")]
    values = DIGITS[rng.integers(0, 16, (len(ids), value_bytes), np.uint8)]
    keys = ids.astype(">i8").view(np.uint8).reshape(-1, KEY_BYTES)
    return pa.RecordBatch.from_arrays(
        [
            pa.array((ids % GROUPS).astype(np.uint16)),
            pa.array(np.zeros(len(ids), np.uint16)),
            pa.array(np.full(len(ids), OP_DELETE if delete else OP_PUT, np.uint8)),
            fixed_width(keys),
            fixed_width(np.empty((len(ids), 0), np.uint8)),
            fixed_width(values),
        ],
        schema=CHANGE_SCHEMA,
    )


@asynccontextmanager
async def loaded_job(
    args: argparse.Namespace, keys: int, directory: Path, options: MaterializationOptions
) -> AsyncIterator[StateJob]:
    """Write every key once, without materializations, and go on behind the measured store in another job.

    Loading through a slow store would only take time.
    """

    def job(store: str, seed: int, options: MaterializationOptions) -> StateJob:
        behind = open_store(store, directory, args.model, args.seed)
        return StateJob(behind, directory, table=args.table, options=options, value_bytes=args.value_bytes, seed=seed)

    loading = job("local", args.seed, options.model_copy(update={"enabled": False}))
    try:
        await loading.begin()
        await loading.load(keys)
    finally:
        await loading.close()
    assert loading.newest is not None
    going_on = job(args.store, args.seed + 1, options)
    try:
        await going_on.begin()
        await going_on.resume(loading.newest)
        yield going_on
    finally:
        await going_on.close()


@asynccontextmanager
async def local_job(
    args: argparse.Namespace, directory: Path, options: MaterializationOptions
) -> AsyncIterator[StateJob]:
    """A job over a local directory that it has taken over."""
    job = StateJob(
        open_store("local", directory, "", args.seed),
        directory,
        table=args.table,
        options=options,
        value_bytes=args.value_bytes,
        seed=args.seed,
    )
    try:
        await job.begin()
        yield job
    finally:
        await job.close()


def keys_of(args: argparse.Namespace, megabytes: float) -> int:
    """Return how many keys and values have so many MB of 1e6 bytes; at least one."""
    return max(1, int(megabytes * 1e6) // (args.value_bytes + KEY_BYTES))


def fixed_width(rows: np.ndarray[Any, Any]) -> pa.Array:
    """Rows of bytes as a binary column."""
    count, width = rows.shape
    offsets = (np.arange(count + 1) * width).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    )


def add_job_arguments(parser: argparse.ArgumentParser, *, value_bytes: int) -> None:
    """Add what every benchmark of such a job can be told; ``value_bytes`` is the default."""
    parser.add_argument("--table", choices=("heap", "rocksdb"), default="heap")
    parser.add_argument("--value-bytes", type=int, default=value_bytes)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", help="where to put everything; by default the system's temporary directory")
    add_json(parser)


def add_store_arguments(parser: argparse.ArgumentParser, *, store: str) -> None:
    """Add which store is measured; ``store`` is the default."""
    parser.add_argument("--store", choices=("latency", "local"), default=store)
    parser.add_argument("--model", default="s3-standard-small", help="of bench/models.json, for the latency store")


def store_name(args: argparse.Namespace) -> str:
    """Return the name of the measured store for a benchmark's output."""
    return f"latency model {args.model} over a local directory" if args.store == "latency" else "local directory"


def in_directory(work: Callable[[Path], dict[str, Any]], place: str | None) -> dict[str, Any]:
    """Run with a directory that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="dstl-bench-", dir=place) as name:
        return work(Path(name))


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that so large a share is not above."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
