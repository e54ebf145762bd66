"""The byte budget of all that is not durable yet: appends wait for it, and never fail because of it.

An append reserves its bytes first (``async with budget.reserve(n)``), then the change set's own bytes take the
reservation's place. Bytes leave the budget when they are durable, dropped, or handed to the coordinator; those of a
failed upload are still held in memory, so they stay counted, and the storage stores them again as soon as it may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dstl.errors import Closed
from dstl.metrics import Recorder
from dstl.runtime import Clock


class ByteBudget:
    """Counts bytes against a limit, and lets appends wait for them. One event loop.

    Invariants:
        1. ``used`` is the sum of what was taken or granted and not given back.
        2. Bytes are granted in the order of asking, so that a large append is not starved by small ones.
        3. One that is larger than the whole limit is granted when nothing else is held: it goes through alone.

    Args:
        limit: Bytes.
        clock: Measures the waiting, metric ``backpressureSeconds``.
        recorder: Where that goes.
        changed: Called when the queue or the budget changed, so that the storage drains (or fills) at once.
    """

    def __init__(self, limit: int, clock: Clock, recorder: Recorder, changed: Callable[[], None]) -> None:
        self.limit = limit
        self.used = 0
        self._clock = clock
        self._recorder = recorder
        self._changed = changed
        self._queue: dict[asyncio.Future[None], int] = {}  # who waits, in order, and for how many bytes
        self._closed = False

    @property
    def starving(self) -> bool:
        """True while an append waits."""
        return bool(self._queue)

    def take(self, nbytes: int) -> None:
        """Count bytes that are there already, over the limit if need be."""
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Uncount bytes."""
        self.used -= nbytes
        assert self.used >= 0, "more bytes given back than taken"

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold bytes for the body, which appends them; waits, in order, until they fit.

        ``async with storage.budget.reserve(n): writer.append_batch(batch)``. What is larger than the whole budget goes
        through alone. It waits as long as the store takes, and never fails because of it.

        Raises:
            Closed: The storage was closed, also while waiting.
        """
        if self._closed:
            raise Closed("the changelog storage is closed: the TaskManager is shutting down")
        if self.starving or not self._fits(nbytes):
            await self._wait(nbytes)
        else:
            self.take(nbytes)
        try:
            yield
        finally:
            self.give_back(nbytes)
            self._changed()

    def wake(self) -> None:
        """Let through what fits now, from the head of the queue on."""
        while self._queue and self._fits(self._queue[first := next(iter(self._queue))]):
            self.take(self._queue.pop(first))
            if not first.done():
                first.set_result(None)

    def close(self) -> None:
        """Let every waiter fail with :class:`~dstl.errors.Closed`. Idempotent."""
        self._closed = True
        for waiting in self._queue:
            if not waiting.done():
                waiting.set_exception(Closed("the changelog storage was closed while an append waited for memory"))

    def _fits(self, nbytes: int) -> bool:
        return not self.used or self.used + nbytes <= self.limit

    async def _wait(self, nbytes: int) -> None:
        since = self._clock.now()
        granted = asyncio.get_running_loop().create_future()
        self._queue[granted] = nbytes
        self._recorder.increment("backpressuredAppends")
        self._changed()
        try:
            await granted
        except BaseException:
            # It may have been granted before this runs.
            if self._queue.pop(granted, None) is None:
                self.give_back(nbytes)
            self._changed()
            raise
        finally:
            self._recorder.increment("backpressureSeconds", self._clock.now() - since)
