"""Giving a TaskManager's state backend its materialization manager."""

from __future__ import annotations

import asyncio

from dstl.changelog.names import SegmentNames
from dstl.changelog.uploader import Uploader
from dstl.errors import DstlError
from dstl.metrics import NullRecorder, Recorder
from dstl.options import MaterializationOptions
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from materializer.base_cache import BaseCache
from materializer.manager import PeriodicMaterializationManager
from materializer.materialization import BaseWriter

__all__ = ["Discarder", "materialize"]


class Discarder:
    """Deletes objects that nobody refers to, in the background; what it cannot delete is left to the cleaner.

    Args:
        store: Where they are.
        recorder: ``basesDiscarded``, ``basesLeftToCleaner``.
    """

    def __init__(self, store: ObjectStore, recorder: Recorder = NullRecorder()) -> None:
        self._store = store
        self._recorder = recorder
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, names: list[str]) -> None:
        """Delete these soon."""
        if names:
            task = asyncio.get_running_loop().create_task(self._delete(names))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _delete(self, names: list[str]) -> None:
        try:
            await self._store.delete(names)
        except DstlError:
            self._recorder.increment("basesLeftToCleaner", len(names))
        else:
            self._recorder.increment("basesDiscarded", len(names))


def materialize(
    backend: TaskManagerStateBackend,
    *,
    uploader: Uploader,
    names: SegmentNames,
    store: ObjectStore,
    options: MaterializationOptions,
    runtime: Runtime,
    recorder: Recorder = NullRecorder(),
) -> PeriodicMaterializationManager:
    """Materialize a backend's tables from now on; the backend closes what this starts.

    Args:
        backend: The state.
        uploader: The log's own.
        names: The log's own.
        store: The same location, for deletions.
        options: When, and how.
        runtime: Clock and jitter.
        recorder: See :class:`PeriodicMaterializationManager` and :class:`BaseCache`.
    """
    cache = BaseCache.of(options, store.location, recorder)
    backend.tracker.cache, backend.tracker.recorder = cache, recorder
    writer = BaseWriter(
        uploader=uploader,
        names=names,
        reserve=backend.storage.reserve,
        discard=Discarder(store, recorder),
        options=options,
        cache=cache,
    )
    manager = PeriodicMaterializationManager(backend, writer, options=options, runtime=runtime, recorder=recorder)
    backend.tracker.attach(manager, options.generations)
    return manager
