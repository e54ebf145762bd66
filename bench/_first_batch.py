"""The first batch behind a restore, for ``bench recovery --first-batch``: a TaskManager is started on a large state.

The state is written as a materialization would have written it, without a table, so only the TaskManager needs memory
for it. Behind it is a log of ``--log-mb``. Reads of the store take what the model says: 63 ms in the median, 78 in the
99th percentile, and 90 MB/s a connection, of which there are 64.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from bench._state_job import DIGITS, GROUPS, KEY_BYTES, OPERATOR, fixed_width, models
from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT, ChangeSet
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.options import MaterializationOptions, S3Options
from dstl.process.lifecycle import SWITCH_INTERVAL_S
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import ReadRestoreStatus, Restore, Resume
from dstl.rpc.handshake import Role
from dstl.rpc.messages import FetchMany, OpenAttempt
from dstl.rpc.protocol import Secret
from dstl.runtime import system_runtime
from dstl.store import LocalStore
from dstl.store.base import ByteRange
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components, TaskManager, table_opener
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import MaterializedStateHandle
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import ENTRY_SCHEMA
from tests.simulation.latency import LatencyModel, LatencyParameters

_PAGE_ROWS = 4000
_READS = {"body_med": 63.0, "body_sig": 0.0918, "bw_med": 90.0, "bw_sig": 0.0}
_PATIENCE_S = 3600.0


class ModelledStore(LocalStore):
    """A local directory whose reads take as long as the model says; counts them."""

    def __init__(self, location: str, seed: int) -> None:
        super().__init__(location)
        parameters = LatencyParameters.of(models()["s3-standard-small"])
        self._model = LatencyModel(replace(parameters, **_READS), seed)  # type: ignore[arg-type]
        self._connections = asyncio.Semaphore(S3Options().max_connections)
        self.reads = 0

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes after the model's time."""
        self.reads += 1
        async with self._connections:
            data = await super().get(name, byte_range)
            await asyncio.sleep(self._model.read(len(data)))
        return data


class GeneratedState:
    """Keys ``g, g + 128, ...`` of each key group ``g``, with values of random hexadecimal digits; a snapshot."""

    versions: Mapping[KeyGroup, int] = {}

    def __init__(self, keys: int, value_bytes: int, rng: np.random.Generator) -> None:
        self._keys = keys
        self._pool = DIGITS[rng.integers(0, 16, (_PAGE_ROWS + 997, value_bytes), np.uint8)]
        self._rng = rng

    def entries(self, key_group: KeyGroup, **_: int) -> Iterator[pa.RecordBatch]:
        """Yield the key group's pages."""
        ids = np.arange(key_group, self._keys, GROUPS)
        for start in range(0, len(ids), _PAGE_ROWS):
            part = ids[start : start + _PAGE_ROWS]
            at = int(self._rng.integers(0, 997))
            columns = [keys_of(part), fixed_width(np.empty((len(part), 0), np.uint8)), self.values(len(part), at)]
            yield pa.RecordBatch.from_arrays([pa.array(np.zeros(len(part), np.uint16)), *columns], schema=ENTRY_SCHEMA)

    def values(self, count: int, at: int = 0) -> pa.Array:
        """Return so many values."""
        return fixed_width(self._pool[at : at + count])

    def close(self) -> None:
        """There is nothing to release."""


def keys_of(ids: np.ndarray[Any, Any]) -> pa.Array:
    """Return keys as the table has them."""
    return fixed_width(ids.astype(">i8").view(np.uint8).reshape(-1, KEY_BYTES))


async def write_state(store: LocalStore, keys: int, args: argparse.Namespace) -> CompletedCheckpoint:
    """Write bases and a log; return the checkpoint that names them."""
    rng = np.random.default_rng(args.seed)
    state, file_bytes = GeneratedState(keys, args.value_bytes, rng), MaterializationOptions().file_bytes
    handles: list[MaterializedStateHandle] = []
    parts: list[tuple[int, int, int]] = []
    pieces: list[bytes] = []
    size = 0
    for group in range(GROUPS):
        encoded = encode_key_group(state, group).pieces
        length = sum(map(len, encoded))
        parts.append((group, size, length))
        pieces += encoded
        size += length
        if size >= file_bytes or group == GROUPS - 1:
            data, name = b"".join(pieces), f"00/bench/{len(handles)}.base"
            await store.put(name, data)
            found = {"name": name, "size": size, "checksum": google_crc32c.value(data), "parts": tuple(parts)}
            handles.append(MaterializedStateHandle(operator=OPERATOR, materialization_id=1, checkpoint=1, **found))
            parts, pieces, size = [], [], 0
    count = min(keys, max(1, int(args.log_mb * 1e6) // (args.value_bytes + KEY_BYTES)))
    changed = ChangeSet()
    changed.append_metadata(b"{}")
    ids = rng.choice(keys, count, replace=False)
    ids = ids[np.argsort(ids % GROUPS, kind="stable")]
    for start in range(0, count, _PAGE_ROWS):
        part = ids[start : start + _PAGE_ROWS]
        groups, of = pa.array((part % GROUPS).astype(np.uint16)), len(part)
        zeros, ops = pa.array(np.zeros(of, np.uint16)), pa.array(np.full(of, OP_PUT, np.uint8))
        columns = [groups, zeros, ops, keys_of(part), fixed_width(np.empty((of, 0), np.uint8)), state.values(of)]
        changed.append_batch(pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA))
    segment = encode_segment([("log", 0, changed)], writer_id="w", metadata={}, compression_level=1)
    await store.put("00/bench/0.seg", segment)
    return CompletedCheckpoint(
        checkpoint_id=2,
        batch_id=1,
        query_id="bench",
        run_id="run",
        max_parallelism=GROUPS,
        created_at=0.0,
        operators=(OperatorEntry(uid=OPERATOR, parallelism=1, key_types="bigint"),),
        materialized=tuple(handles),
        logs=(LogEntry(log_id="log", operator=OPERATOR, first_key_group=0, last_key_group=GROUPS - 1),),
        segments=(
            SegmentEntry(
                segment=("00/bench/0.seg", len(segment), segment_checksum(segment), 0),
                first_key_group=0,
                last_key_group=GROUPS - 1,
                checkpoint=2,
                ranges=((0, 0, 1),),
            ),
        ),
    )


async def start(args: argparse.Namespace, directory: Path, state_mb: float) -> dict[str, Any]:
    """Start a TaskManager on its share of a state; return the seconds until it answers and has loaded all."""
    keys = max(args.lookups, int(state_mb * 1e6) // (args.value_bytes + KEY_BYTES))
    location = str(directory / f"objects-{state_mb:g}")
    writing = LocalStore(location)
    checkpoint = await write_state(writing, keys, args)
    await writing.close()
    print(f"{keys:,} keys written", file=sys.stderr)
    owned = KeyGroupRange(0, max(1, GROUPS // args.task_managers) - 1)
    mine = np.flatnonzero(np.arange(keys) % GROUPS <= owned.end)
    ids = np.random.default_rng(args.seed + 1).choice(mine, min(len(mine), args.lookups), replace=False)
    ids = ids[np.argsort(ids % GROUPS, kind="stable")]
    wanted = tuple((ids % GROUPS).tolist()), tuple(keys_of(ids).to_pylist())
    body, store, secret = checkpoint.model_dump_json().encode(), ModelledStore(location, args.seed), Secret(bytes(16))
    cpu, began = time.process_time(), time.perf_counter()
    task_manager = TaskManager(
        TaskManagerConfig(location, args.table, GROUPS, materialization=MaterializationOptions(enabled=False)),
        Components(store=store, runtime=system_runtime()),
        open_table=table_opener(args.table, directory),
        secret=secret,
    )
    try:
        address = Address("127.0.0.1", await task_manager.service.server.listen_tcp("127.0.0.1"), "")
        coordinator = await AsyncConnection.open(address, secret, role=Role.COORDINATOR)
        await coordinator.call(Resume("bench", checkpoint.checkpoint_id, owned))
        await coordinator.call(Restore(owned, body))
        opened = time.perf_counter() - began
        worker = await AsyncConnection.open(address, secret, role=Role.WORKER)
        await worker.call(OpenAttempt(OPERATOR, 1, batch=2, parent=checkpoint.checkpoint_id, parallelism=1))
        found: list[bytes | None] = []
        while len(found) < len(ids):
            at = len(found)
            reply = await worker.call(FetchMany(OPERATOR, 1, (0,), wanted[0][at:], wanted[1][at:]))
            found += reply.columns[0]
        first, reads, first_cpu = time.perf_counter() - began, store.reads, time.process_time() - cpu
        if any(value is None or len(value) != args.value_bytes for value in found):
            raise SystemExit("a key was not found")
        while time.perf_counter() < began + _PATIENCE_S:
            status = (await coordinator.call(ReadRestoreStatus())).status
            if status is not None and status.finished:
                break
            await asyncio.sleep(0.01)
        loaded = time.perf_counter() - began
        worker.close()
        coordinator.close()
    finally:
        await task_manager.close()
        await store.close()
    return {
        "open_s": opened,
        "first_batch_s": first,
        "all_loaded_s": loaded,
        "requests": reads,
        "cpu_first_s": first_cpu,
        "cpu_all_s": time.process_time() - cpu,
    }


def measure(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Return the figures of all sizes, each a map by megabytes of state."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a TaskManager process does
    found = {f"{size:g}": asyncio.run(start(args, directory, size)) for size in args.state_mb}
    names = next(iter(found.values()))
    return {name: {size: each[name] for size, each in found.items()} for name in names} | {
        "lookups": args.lookups,
        "table": args.table,
        "value_bytes": args.value_bytes,
        "log_mb": args.log_mb,
    }
