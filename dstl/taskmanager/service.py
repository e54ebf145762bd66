"""The TaskManager's calls: what workers ask of it, and what the coordinator tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from dstl.changelog.change_set import CHANGE_SCHEMA
from dstl.crash_points import reach
from dstl.errors import DstlError, Invalid, Unavailable, brief
from dstl.metrics import NullRecorder, Recorder
from dstl.rpc.codec import R
from dstl.rpc.fleet_messages import (
    Abort,
    Complete,
    Content,
    LookUp,
    Measured,
    Persist,
    Persisted,
    ReadMetrics,
    ReadRestoreStatus,
    ReadUnnamedBases,
    Restore,
    Restored,
    RestoreStatusReply,
    Resume,
    Resumed,
    UnnamedBases,
)
from dstl.rpc.messages import AttemptCall, Done, EndOfChanges, FetchDue, OpenAttempt, Write, read_batch
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.taskmanager.background_load import replaced
from dstl.taskmanager.process_metrics import note_state, process_sample
from dstl.taskmanager.reads import READS, REPLY_BYTES
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from handles.checkpoint import CompletedCheckpoint
from materializer.bases.table_directory import FileBases
from materializer.restore.progress import LogLine, ProgressListener, RestoreStatus, record_progress
from materializer.restore.restore import TableRestore

_FOLDED_ROWS = 100_000
"""Others are served behind so many folded rows, of which RocksDB takes 2.8 us each: soon enough for a sign of life
(``BEAT_S``), also where one batch changes all of a large state."""


class TaskManagerService:
    """Serves one TaskManager's state over sockets. One event loop.

    Args:
        open_backend: Makes the state of a query, on the coordinator's first call.
        store: The object store, for restores.
        runtime: Clock and jitter.
        secret: Who does not know it is refused.
        reply_bytes: A reply holds about so many bytes of values; the client asks for the rest.
        recorder: Of all its parts.
    """

    def __init__(
        self,
        open_backend: Callable[[str], TaskManagerStateBackend],
        store: ObjectStore,
        runtime: Runtime,
        secret: Secret,
        reply_bytes: int = REPLY_BYTES,
        recorder: Recorder = NullRecorder(),
    ) -> None:
        self._open_backend = open_backend
        self._claimed: TaskManagerStateBackend | None = None
        self._store = store
        self._runtime = runtime
        self._recorder = recorder
        self._reply_bytes = reply_bytes
        self._turn = asyncio.Lock()
        self._building = asyncio.Lock()
        self._counted = self._hedges = 0
        self._restoring: RestoreStatus | None = None
        self.server = RpcServer(
            secret,
            {
                OpenAttempt: self._open_attempt,
                **dict.fromkeys(READS, self._read),
                Write: self._write,
                EndOfChanges: self._end_of_changes,
                Resume: self._resume,
                Restore: self._restore,
                ReadRestoreStatus: self._restore_status,
                Persist: self._persist,
                Complete: self._complete,
                Abort: self._abort,
                ReadUnnamedBases: self._unnamed_bases,
                ReadMetrics: self._read_metrics,
                LookUp: self._look_up,
            },
        )

    @property
    def _backend(self) -> TaskManagerStateBackend:
        if self._claimed is None:
            raise Unavailable("this TaskManager serves no query yet: its coordinator has not prepared it")
        return self._claimed

    async def _open_attempt(self, peer: Peer, call: OpenAttempt) -> Done:
        backend = self._backend
        backend.open_attempt(call.who, call.batch, call.parent, call.parallelism)
        # While the worker groups its rows; the first read waits for what is left.
        asyncio.get_running_loop().call_soon(_fold_ahead, backend)
        return Done()

    async def _read(self, peer: Peer, call: AttemptCall[R]) -> R:
        backend = self._backend
        backend.check_attempt(call.who)
        while backend.committed.fold(_FOLDED_ROWS):
            await self._runtime.clock.sleep(0)
            # Whatever has taken the tables from here has ended the attempt.
            backend.check_attempt(call.who)
        source = backend.committed.source(call.operator)
        await self._bring(backend, call)
        # An index is made one at a time, and others are served meanwhile: many millions of entries take a minute.
        if isinstance(call, FetchDue):
            async with self._building:
                await self._bring(backend, call)
                with closing(source.build(call)) as pieces:
                    for _ in pieces:
                        await self._runtime.clock.sleep(0)
                        self._backend.check_attempt(call.who)
            self._backend.check_attempt(call.who)
        return source.answer(call, self._reply_bytes)

    async def _bring(self, backend: TaskManagerStateBackend, call: AttemptCall[Any]) -> None:
        """Have the tables show what a read asks for, where they are not loaded yet."""
        if backend.loading is None:
            return
        try:
            await backend.loading.ready(call.operator, call)
        finally:
            backend.check_attempt(call.who)

    async def _write(self, peer: Peer, call: Write) -> Done:
        self._backend.check_attempt(call.who)
        # Back-pressure: a worker whose changes do not fit the budget waits here, and its task with it.
        async with self._backend.storage.budget.reserve(len(call.changes)):
            # It keeps the frame it lies in alive.
            changes = read_batch(memoryview(call.changes), CHANGE_SCHEMA)
            self._backend.write(call.who, call.partition, changes, call.metadata, call.expiring)
            reach("T1")
        return Done()

    async def _end_of_changes(self, peer: Peer, call: EndOfChanges) -> Done:
        self._backend.end_changes(call.who)
        return Done()

    async def _resume(self, peer: Peer, call: Resume) -> Resumed:
        async with self._turn:
            if self._claimed is None:
                self._claimed = self._open_backend(call.query)
            possible = self._backend.can_resume(call.parent) and call.key_groups == self._backend.key_groups
            if possible:
                self._backend.resume(call.parent)
        return Resumed(possible, self._backend.storage.names.writer_id)

    async def _restore(self, peer: Peer, call: Restore) -> Restored:
        started = self._runtime.clock.now()
        async with self._turn:
            owned = call.key_groups
            checkpoint = _checkpoint_of(call)
            # What was here is of no use any more, and need not lie in memory beside what comes.
            await self._backend.end_loading()
            self._backend.replace_tables({}, None, owned)
            files = FileBases(self._store, self._runtime, self._backend.tracker.cache)
            restore = TableRestore(
                checkpoint, files, owned, self._backend.committed.open_table, self._progress_listener()
            )
            try:
                await restore.open(serves=True)
            except BaseException:
                await restore.close()
                restore.close_tables()
                await files.close()
                raise
            restored = restore.restored
            base = checkpoint.checkpoint_id if checkpoint else None
            self._backend.replace_tables(
                restored.tables,
                base,
                owned,
                bases=restored.bases,
                registries={entry.uid: entry.registry for entry in checkpoint.operators} if checkpoint else None,
            )
            loading = self._backend.load_behind(restore, files)
            if restore.is_loaded:
                await loading.ended()
        reach("R4")
        return Restored(self._runtime.clock.now() - started, restored.bytes, restored.changes, self._restoring)

    def _progress_listener(self) -> ProgressListener:
        line = LogLine()
        self._restoring = None

        def take(status: RestoreStatus, /) -> None:
            self._restoring = status
            line(status)
            record_progress(self._recorder, status)
            self._backend.check_memory()

        return take

    async def _restore_status(self, peer: Peer, call: ReadRestoreStatus) -> RestoreStatusReply:
        return RestoreStatusReply(self._restoring)

    async def _persist(self, peer: Peer, call: Persist) -> Persisted:
        async with self._turn:
            # What was uploaded ahead of its checkpoint belongs to it as well.
            before, hedges, storage = self._counted, self._hedges, self._backend.storage
            try:
                async with asyncio.timeout(call.timeout_s):
                    persisted = await self._backend.persist(call.winners)
            except TimeoutError:
                raise Unavailable(f"the store did not take the changes within {call.timeout_s:g} s") from None
            self._counted, self._hedges = storage.seals.upload_attempts, storage.seals.hedges
            state = note_state(self._recorder, self._backend)
        reach("T7")
        return replace(persisted, requests=self._counted - before, hedges=self._hedges - hedges, state=state)

    async def _complete(self, peer: Peer, call: Complete) -> Done:
        reach("T8")
        async with self._turn:
            self._backend.complete(call.checkpoint, call.winners, call.located, call.time_ms)
        return Done()

    async def _abort(self, peer: Peer, call: Abort) -> Done:
        async with self._turn:
            self._backend.abort()
        return Done()

    async def _unnamed_bases(self, peer: Peer, call: ReadUnnamedBases) -> UnnamedBases:
        manager = self._backend.tracker.manager
        waited = manager.waiting()
        loading = self._backend.loading
        is_coming = manager.is_held_up and loading is not None and loading.failure is None
        running = manager.running is not None or is_coming
        return UnnamedBases(int(running), len(waited), max(waited, default=0.0))

    async def _read_metrics(self, peer: Peer, call: ReadMetrics) -> Measured:
        # Without the turn: a restore or an upload that takes long is when metrics are looked at.
        if self._claimed is not None:
            note_state(self._recorder, self._claimed)
        return Measured(process_sample(self._recorder))

    async def _look_up(self, peer: Peer, call: LookUp) -> Content:
        backend = self._backend
        if backend.loading is not None and call.key_group in backend.key_groups:
            table = backend.table(call.operator)
            await backend.loading.bring(call.operator, {call.key_group: [(call.state, call.key)]})
            if backend.table(call.operator) is not table:
                # The key was brought into a table that nobody reads any more.
                raise replaced()
        place = call.checkpoint, call.operator, call.state, call.key_group, call.key
        found = backend.look_up(*place, call.user_keys)
        ordered = sorted(found.items())
        return Content(tuple(user_key for user_key, _ in ordered), tuple(value for _, value in ordered))


def _fold_ahead(backend: TaskManagerStateBackend) -> None:
    # What is wrong with a table, the first read is told.
    with suppress(DstlError):
        if backend.committed.fold(_FOLDED_ROWS):
            asyncio.get_running_loop().call_soon(_fold_ahead, backend)


def _checkpoint_of(call: Restore) -> CompletedCheckpoint | None:
    """Return the checkpoint that is to be restored.

    Raises:
        Invalid: The request holds no valid checkpoint.
    """
    try:
        return CompletedCheckpoint.model_validate_json(bytes(call.checkpoint)) if call.checkpoint else None
    except ValueError as error:
        raise Invalid(f"the request to restore holds no valid checkpoint: {brief(str(error))}") from None
