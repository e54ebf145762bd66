"""Deletion of unreferenced objects, in the background and within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from dstl.crash_points import reach
from dstl.errors import DstlError
from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock
from dstl.store.base import ObjectStore

_log = logging.getLogger(__name__)
_MAX_TOGETHER = 500  # half of S3's most: a deletion that fails leaves fewer

_Groups = tuple[Sequence[str], ...]


class BackgroundDeleter:
    """Deletes objects one request after the other, a grace after it was told their names.

    What cannot be deleted, or is one name too many, is an orphan, which no handle names and the cleaner finds by its
    age. One event loop.

    Args:
        store: Where the objects are.
        clock: Measures the grace; needed where there is one.
        grace_s: Seconds to wait: a cancelled PUT may still create its object.
        backlog: Names remembered at most.
        recorder: Where the counters go.
        deleted: Counter of names that were deleted.
        left: Counter of names that are left to the cleaner.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        clock: Clock | None = None,
        grace_s: float = 0.0,
        backlog: int = 100_000,
        recorder: Recorder = NullRecorder(),
        deleted: str,
        left: str,
    ) -> None:
        self._store = store
        self._clock = clock
        self._grace_s = grace_s
        self._backlog = backlog
        self._recorder = recorder
        self._deleted = deleted
        self._left = left
        self._waiting: deque[tuple[float, _Groups]] = deque()
        self._names = 0
        self._grace: asyncio.Future[None] | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def delete(self, *groups: Sequence[str]) -> None:
        """Delete these names soon, each group only when the one before it is gone."""
        count = sum(map(len, groups))
        if not count:
            return
        if self._names + count > self._backlog:
            self._recorder.increment(self._left, count)
            return
        now = self._clock.now() if self._clock is not None else 0.0
        self._waiting.append((now + self._grace_s, groups))
        self._names += count
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def settled(self) -> None:
        """Return when nothing is left to be deleted, after the grace."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self, *, finish: bool = True) -> None:
        """Delete at once what is remembered still, or give it up. Idempotent."""
        if self._task is not None and not finish:
            self._task.cancel()
        self._closing = True
        if self._grace is not None:
            self._grace.cancel()
        await self.settled()

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._pass_grace(self._waiting[0][0])
                await self._delete(self._next())
        finally:
            if self._names:  # cancelled
                self._recorder.increment(self._left, self._names)
                self._waiting.clear()
                self._names = 0

    async def _pass_grace(self, due: float) -> None:
        if self._clock is None or self._closing or not self._grace_s:
            return
        # Half a grace more brings several names into one request.
        self._grace = asyncio.ensure_future(self._clock.sleep(max(0.0, due - self._clock.now()) + self._grace_s / 2))
        try:
            await asyncio.wait([self._grace])
        finally:
            self._grace.cancel()
            self._grace = None

    def _next(self) -> _Groups:
        """Return the next names to delete: those of several calls, if none of them has an order."""
        _, groups = self._waiting.popleft()
        if len(groups) > 1:
            return groups
        now = self._clock.now() if self._clock is not None else 0.0
        together = list(groups[0])
        while self._waiting and (self._closing or self._waiting[0][0] <= now):
            (more, *others) = self._waiting[0][1]
            if others or len(together) + len(more) > _MAX_TOGETHER:
                break
            together += more
            self._waiting.popleft()
        return (together,)

    async def _delete(self, groups: _Groups) -> None:
        for at, names in enumerate(groups):
            try:
                if names:
                    await self._store.delete(names)
            except DstlError as error:
                count = sum(map(len, groups[at:]))
                _log.info("%d objects are left to the cleaner: %s", count, error)
                self._recorder.increment(self._left, count)
                self._names -= count
                return
            self._recorder.increment(self._deleted, len(names))
            self._names -= len(names)
            if at + 1 < len(groups):
                reach("C8")
