"""Savepoints of a driver program: made while its query runs, and restored by a new query."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from dstl.checkpoint.report import SavepointReport
from dstl.checkpoint.savepoint.creation import OnProgress, save_checkpoint, save_newest
from dstl.checkpoint.savepoint.format import Savepoint, parse_savepoint_location, savepoint_location
from dstl.checkpoint.savepoint.restore import RestoreMode, SavepointRestore
from dstl.checkpoint.service import CoordinatorService
from dstl.runtime import IoLoop, Runtime, closed_after, system_runtime
from dstl.store.base import ObjectStore
from dstl.store.location import absolute_location, shared_location
from handles.checkpoint import CompletedCheckpoint

T = TypeVar("T")

OpenAt = Callable[[str], ObjectStore]


class SavepointMaker:
    """Makes savepoints of a query that may be running. Thread-safe.

    Args:
        service: The query's coordinator.
        service_loop: Its loop.
        location: The query's location.
        open_at: Opens the store of a location.
    """

    def __init__(self, service: CoordinatorService, service_loop: IoLoop, location: str, open_at: OpenAt) -> None:
        self._service = service
        self._service_loop = service_loop
        self._location = location
        self._open_at = open_at

    def make(self, name: str, to: str | os.PathLike[str] | None, on_progress: OnProgress | None) -> SavepointReport:
        """Copy the last completed checkpoint, on a loop of its own, so that no checkpoint waits for it.

        The checkpoint's objects are held meanwhile. Where another process has deleted some all the same, and the
        checkpoint is subsumed, the newest one is taken anew.

        Raises:
            DstlError: As :func:`~dstl.checkpoint.savepoint.creation.save_checkpoint`.
        """
        runtime = system_runtime()
        target = shared_location(to or self._location)
        started = runtime.clock.now()
        loop = IoLoop("dstl-savepoint")
        with loop.closing():
            made = loop.run(self._make(target, name, runtime, on_progress))
        where, seconds = savepoint_location(target, name), runtime.clock.now() - started
        return SavepointReport(where, made.checkpoint_id, made.batch_id, made.bytes, made.entries, seconds)

    async def _make(self, target: str, name: str, runtime: Runtime, on_progress: OnProgress | None) -> Savepoint:
        source, store = self._open_at(self._location), self._open_at(target)
        async with closed_after(store, source):
            return await save_newest(
                self._held,
                lambda checkpoint: save_checkpoint(source, store, runtime, name, checkpoint, on_progress=on_progress),
                self._is_retained,
            )

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[CompletedCheckpoint]:
        checkpoint, hold = await self._ask(self._service.hold)
        try:
            yield checkpoint
        finally:
            await self._ask(lambda: self._service.release(hold))

    async def _is_retained(self, checkpoint: CompletedCheckpoint) -> bool:
        completed = await self._ask(lambda: self._service.completed)
        return any(each.checkpoint_id == checkpoint.checkpoint_id for each in completed)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Return what the service answers, asked on its own loop."""

        async def ask() -> T:
            return question()

        return await asyncio.wrap_future(self._service_loop.submit(ask()))


async def start_from_savepoint(
    service: CoordinatorService,
    store: ObjectStore,
    location: str,
    restore_from: str | os.PathLike[str],
    mode: RestoreMode,
    open_at: OpenAt,
) -> list[ObjectStore]:
    """Let a query that has no checkpoint yet begin with a savepoint.

    Args:
        service: The query's coordinator.
        store: The query's store.
        location: The query's location, as it was given, with directories made absolute.
        restore_from: ``LOCATION/savepoints/NAME``.
        mode: ``no_claim`` or ``claim``.
        open_at: Opens the store of a location.

    Returns:
        The savepoint's store, where it is another than the query's: to be closed with the query's.

    Raises:
        Invalid: No such form or mode, another number of key groups, or a claim from another location.
        MissingState: There is no such savepoint.
        CorruptData: Its descriptor is damaged.
    """
    where, name = parse_savepoint_location(restore_from)
    where = absolute_location(where).rstrip("/")
    opened = [] if where == location.rstrip("/") else [open_at(where)]
    try:
        source = opened[0] if opened else store
        await service.runs.start_from(SavepointRestore(source, store, name, mode, system_runtime()))
    except BaseException:
        for each in opened:
            await each.close()
        raise
    return opened
