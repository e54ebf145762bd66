"""The part of a TaskManager's resources that background work may take: bytes of the log's budget, and deletions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dstl.changelog.storage import StateChangelogStorage
from dstl.errors import DstlError
from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock
from dstl.store.base import ObjectStore

__all__ = ["BackgroundShare", "Discarder"]

_LOOK_S = 0.02
_PATIENCE_S = 60.0


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


class BackgroundShare:
    """The part of the log's byte budget that base files may hold: half of it, and what nobody waits for.

    Reservations are granted in the order of asking, so a large file that waited among them would hold up the appends
    behind it, and two of them could hold all of the budget for as long as the store takes. Where there is no room for a
    minute it waits among them all the same, for a log that is never materialized is worse.

    Args:
        storage: Whose budget it is.
        clock: Waits.
    """

    def __init__(self, storage: StateChangelogStorage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._held = 0

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold so many bytes, or half of the budget where that is less, for the body; waits until they are free.

        Raises:
            Closed: The storage was closed.
        """
        budget = self._storage.budget
        share = budget.limit // 2
        nbytes = min(nbytes, share)
        patient_until = self._clock.now() + _PATIENCE_S
        while self._held + nbytes > share or (
            (budget.starving or budget.used + nbytes > budget.limit) and self._clock.now() < patient_until
        ):
            await self._clock.sleep(_LOOK_S)
        self._held += nbytes
        try:
            async with self._storage.reserve(nbytes):
                yield
        finally:
            self._held -= nbytes
