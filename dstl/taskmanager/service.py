"""The TaskManager's calls: what workers ask of it, and what the coordinator tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import pyarrow as pa

from dstl.changelog.ledger import InlineSegment
from dstl.errors import Invalid, Unavailable
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, Reply, RpcServer
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.taskmanager.reads import REPLY_BYTES, bounded_entries, entries_after, fitting, values_of
from dstl.taskmanager.state_backend import AttemptKey, Contribution, TaskManagerStateBackend
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from handles.segment_handle import SegmentHandle
from materializer.restore.progress import LogLine, ProgressListener, ProgressMetrics, RestoreStatus, status_to_wire
from materializer.restore.restore import restore_tables
from materializer.tables import StateTable

__all__ = ["TaskManagerService"]

_OF_WORKERS = frozenset(
    {
        "open_attempt",
        "fetch_many",
        "fetch_values",
        "fetch_entries",
        "fetch_entry",
        "scan_entries",
        "scan_timers",
        "write",
    }
)
_OF_THE_COORDINATOR = frozenset({"resume", "restore", "restore_progress", "persist", "complete", "abort", "size"})


class TaskManagerService:
    """Serves one TaskManager's state over sockets. One event loop.

    Args:
        open_backend: Makes the state of a query, on the coordinator's first call.
        store: The object store, for restores.
        runtime: Clock and jitter.
        secret: Who does not know it is refused.
        reply_bytes: A reply holds about so many bytes of values; the client asks for the rest.
    """

    def __init__(
        self,
        open_backend: Callable[[str], TaskManagerStateBackend],
        store: ObjectStore,
        runtime: Runtime,
        secret: Secret,
        reply_bytes: int = REPLY_BYTES,
    ) -> None:
        self._open_backend = open_backend
        self._claimed: TaskManagerStateBackend | None = None
        self._store = store
        self._runtime = runtime
        self._reply_bytes = reply_bytes
        self._turn = asyncio.Lock()
        self._counted = 0
        self._restoring: RestoreStatus | None = None
        self.server = RpcServer(
            secret,
            {
                "open_attempt": self._open_attempt,
                "fetch_many": self._fetch_many,
                "fetch_values": self._fetch_values,
                "fetch_entries": self._fetch_entries,
                "fetch_entry": self._fetch_entry,
                "scan_entries": self._scan_entries,
                "scan_timers": self._scan_timers,
                "write": self._write,
                "resume": self._resume,
                "restore": self._restore,
                "restore_progress": self._restore_progress,
                "persist": self._persist,
                "complete": self._complete,
                "abort": self._abort,
                "size": self._size,
            },
            callers={Role.WORKER: _OF_WORKERS, Role.COORDINATOR: _OF_THE_COORDINATOR},
        )

    @property
    def _backend(self) -> TaskManagerStateBackend:
        if self._claimed is None:
            raise Unavailable("this TaskManager serves no query yet: its coordinator has not prepared it")
        return self._claimed

    async def _open_attempt(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        backend = self._backend
        backend.open_attempt(_key(call), int(call["batch"]), call["parent"], int(call["parallelism"]))
        # While the worker groups its rows; the first read waits for what is left.
        asyncio.get_running_loop().call_soon(backend.fold)
        return {}, b""

    def _table_of(self, call: dict[str, Any]) -> StateTable:
        key = _key(call)
        self._backend.check_attempt(key)
        return self._backend.table(key[0])

    async def _fetch_many(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        table = self._table_of(call)
        key_groups, keys = _unpack(payload)
        found = [table.get_many(state, key_groups, keys) for state in call["states"]]
        count = fitting(found, self._reply_bytes)
        return {}, msgpack.packb(found if count == len(keys) else [column[:count] for column in found])

    async def _fetch_values(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        table = self._table_of(call)
        return {}, values_of(table, int(call["state"]), payload, self._reply_bytes)

    async def _fetch_entries(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        table = self._table_of(call)
        key_groups, keys = _unpack(payload)
        found = table.get_entries(int(call["state"]), key_groups, keys)
        return {}, msgpack.packb(bounded_entries(found, int(call["max_bytes"])))

    async def _fetch_entry(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        table = self._table_of(call)
        key, user_keys = _unpack(payload)
        return {}, msgpack.packb(table.get_entry(int(call["state"]), int(call["key_group"]), key, user_keys))

    async def _scan_entries(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        table = self._table_of(call)
        key, after = _unpack(payload)
        page = entries_after(table, int(call["state"]), int(call["key_group"]), key, after, int(call["max_bytes"]))
        return {}, msgpack.packb(page)

    async def _scan_timers(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        self._table_of(call)
        key_groups, until, after = _unpack(payload)
        timers = self._backend.timers(str(call["operator"]))
        found = timers.due(int(call["state"]), key_groups, until, tuple(after) if after else None, int(call["limit"]))
        return {}, msgpack.packb(found)

    async def _write(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        key = _key(call)
        self._backend.check_attempt(key)
        # Back-pressure: a worker whose changes do not fit the budget waits here, and its task with it.
        async with self._backend.storage.reserve(len(payload)):
            for changes in _changes(payload):
                self._backend.write(key, int(call["partition"]), changes, bytes(call["metadata"]))
        return {}, b""

    async def _resume(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        async with self._turn:
            if self._claimed is None:
                self._claimed = self._open_backend(str(call["query"]))
            possible = self._backend.can_resume(call["parent"]) and _range(call) == self._backend.key_groups
            if possible:
                self._backend.resume(call["parent"])
        return {"resumed": possible, "writer": self._backend.storage.writer_id}, b""

    async def _restore(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        started = self._runtime.clock.now()
        async with self._turn:
            owned = _range(call)
            checkpoint = CompletedCheckpoint.model_validate_json(bytes(payload)) if payload else None
            # What was here is of no use any more, and need not lie in memory beside what comes.
            self._backend.replace_tables({}, None, owned)
            restored = await restore_tables(
                checkpoint,
                self._store,
                owned,
                self._backend.open_table,
                self._runtime,
                on_progress=self._progress_listener(),
                cache=self._backend.tracker.cache,
            )
            base = checkpoint.checkpoint_id if checkpoint else None
            self._backend.replace_tables(
                restored.tables,
                base,
                owned,
                bases=restored.bases,
                registries={entry.uid: entry.registry for entry in checkpoint.operators} if checkpoint else None,
                replay_bytes_per_s=restored.replay_bytes_per_s,
            )
        return {
            "seconds": self._runtime.clock.now() - started,
            "bytes": restored.bytes,
            "changes": restored.changes,
            "progress": status_to_wire(self._restoring) if self._restoring is not None else None,
        }, b""

    def _progress_listener(self) -> ProgressListener:
        line, gauges = LogLine(), ProgressMetrics(self._backend.tracker.recorder)
        self._restoring = None

        def take(status: RestoreStatus, /) -> None:
            self._restoring = status
            line(status)
            gauges(status)

        return take

    async def _restore_progress(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        return {"progress": status_to_wire(self._restoring) if self._restoring is not None else None}, b""

    async def _persist(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        async with self._turn:
            # What was uploaded ahead of its checkpoint belongs to it as well.
            before, storage = self._counted, self._backend.storage
            seconds = float(call["timeout_s"])
            try:
                async with asyncio.timeout(seconds):
                    contribution = await self._backend.persist(call["winners"])
            except TimeoutError:
                raise Unavailable(f"the store did not take the changes within {seconds:g} s") from None
            fields, data = _contribution_to_wire(contribution)
            self._counted = storage.upload_attempts
        return {**fields, "requests": self._counted - before}, data

    async def _complete(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        async with self._turn:
            located = {str(seal): SegmentHandle.from_wire(where) for seal, where in call["located"].items()}
            self._backend.complete(int(call["checkpoint"]), call["winners"], located, call.get("time_ms"))
        return {}, b""

    async def _abort(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        async with self._turn:
            self._backend.abort()
        return {}, b""

    async def _size(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        sizes = [table.size() for table in self._backend.tables.values()]
        return {"entries": sum(s.entries for s in sizes), "bytes": sum(s.bytes for s in sizes)}, b""


def _key(call: dict[str, Any]) -> AttemptKey:
    return str(call["operator"]), int(call["attempt"])


def _range(call: dict[str, Any]) -> KeyGroupRange:
    return KeyGroupRange(int(call["first_key_group"]), int(call["last_key_group"]))


def _unpack(payload: memoryview) -> Any:
    try:
        return msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise Invalid(f"a request's payload is not msgpack: {error}") from None


def _changes(payload: memoryview) -> list[pa.RecordBatch]:
    """Return the batches of a write, which keep the frame they lie in alive."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            return list(reader)
    except (pa.ArrowException, OSError) as error:
        raise Invalid(f"a write's payload is not an Arrow stream: {error}") from None


def _contribution_to_wire(contribution: Contribution) -> tuple[dict[str, Any], bytes]:
    """Return a contribution as plain fields; inlined segments go back to back into the payload."""
    segments: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    inlined: list[bytes] = []
    logs: list[dict[str, Any]] = []
    for attempt in contribution.attempts:
        pieces = []
        for piece in contribution.result.segments[attempt.log_id]:
            where = piece.location
            name = where.id if isinstance(where, InlineSegment) else f"{where.name}@{where.offset}"
            if name not in segments:
                segments[name] = len(rows)
                rows.append({"first": attempt.key_groups.start, "last": attempt.key_groups.end})
                if isinstance(where, InlineSegment):
                    rows[-1]["seal"], rows[-1]["size"], rows[-1]["checksum"] = where.id, where.size, where.checksum
                    inlined.append(where.data)
                else:
                    rows[-1]["handle"] = where.to_wire()
            row = rows[segments[name]]
            row["first"] = min(row["first"], attempt.key_groups.start)
            row["last"] = max(row["last"], attempt.key_groups.end)
            pieces.append([piece.range.from_sqn, piece.range.to_sqn, segments[name]])
        logs.append(
            {
                "log": attempt.log_id,
                "operator": attempt.operator,
                "first": attempt.key_groups.start,
                "last": attempt.key_groups.end,
                "pieces": pieces,
            }
        )
    fields = {
        "segments": rows,
        "logs": logs,
        "materializations": [report.model_dump() for report in contribution.pending.reports],
        "open_logs": contribution.open_logs,
    }
    return fields, b"".join(inlined)
