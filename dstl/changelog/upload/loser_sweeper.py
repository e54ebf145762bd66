"""Deletes what losing attempts leave behind, in the background and within bounds."""

from __future__ import annotations

import asyncio
from collections import deque

from dstl.errors import DstlError
from dstl.metrics import Recorder
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore

__all__ = ["LoserSweeper"]

_BATCH = 500


class LoserSweeper:
    """Remembers the names of attempts that lost and deletes their objects a grace later.

    A cancelled PUT may still create its object, so the deletion waits a grace; what is created later still, or cannot
    be deleted, is an orphan, which no handle names and the cleaner finds by its age. Deleting is safe at any time:
    the name was unique to the attempt and only a winner's name is ever handed out.

    Not thread-safe; belongs to one loop.

    Args:
        store: Where the attempts went.
        runtime: Clock.
        grace_s: Seconds between the loss and the deletion.
        backlog: Names remembered at most; a further one is left to the cleaner.
        recorder: Counts ``losersDeleted`` and ``losersLeftToCleaner``.
    """

    def __init__(
        self, store: ObjectStore, *, runtime: Runtime, grace_s: float, backlog: int, recorder: Recorder
    ) -> None:
        self._store = store
        self._clock = runtime.clock
        self._grace = grace_s
        self._backlog = backlog
        self._recorder = recorder
        self._waiting: deque[tuple[float, str]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str) -> None:
        """Delete this name after the grace."""
        if len(self._waiting) >= self._backlog:
            self._recorder.increment("losersLeftToCleaner")
            return
        self._waiting.append((self._clock.now() + self._grace, name))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._sweep())

    async def close(self) -> None:
        """Delete once, without waiting for the grace, what is still remembered. Idempotent."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        while self._waiting:
            await self._delete([self._waiting.popleft()[1] for _ in range(min(_BATCH, len(self._waiting)))])

    async def _sweep(self) -> None:
        while self._waiting:
            # Half a grace more gathers several losers into one request.
            await self._clock.sleep(max(0.0, self._waiting[0][0] - self._clock.now()) + self._grace / 2)
            now = self._clock.now()
            names: list[str] = []
            while self._waiting and self._waiting[0][0] <= now and len(names) < _BATCH:
                names.append(self._waiting.popleft()[1])
            if names:
                await self._delete(names)

    async def _delete(self, names: list[str]) -> None:
        try:
            await self._store.delete(names)
        except DstlError:
            self._recorder.increment("losersLeftToCleaner", len(names))
        else:
            self._recorder.increment("losersDeleted", len(names))
