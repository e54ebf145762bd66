"""The byte budget of all that is not durable yet: appends wait for it, and never fail because of it.

:class:`ByteBudget` is the pure accounting; :class:`Throttle` lets coroutines wait for it. An append reserves its bytes
first (``async with throttle.reserve(n)``), then the change set's own bytes take the reservation's place. Bytes leave
the budget when they are durable, dropped, or handed to the coordinator; those of a failed upload are still held in
memory, so they stay counted, and the storage stores them again as soon as it may.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from dstl.errors import Closed
from dstl.metrics import Recorder
from dstl.runtime import Clock

__all__ = ["ByteBudget", "Reservation", "Throttle"]


@dataclass(slots=True, eq=False)
class Reservation:
    """Bytes that were asked for, granted in the order of asking."""

    nbytes: int
    granted: bool = False


class ByteBudget:
    """Counts bytes against a limit and queues who must wait.

    Invariants:
        1. ``used`` is the sum of what was taken or granted and not given back.
        2. Reservations are granted in order, so that a large one is not starved by small ones.
        3. One that is larger than the whole limit is granted when nothing else is held: it goes through alone.

    Not thread-safe.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._queue: deque[Reservation] = deque()

    @property
    def starving(self) -> bool:
        """True while a reservation waits."""
        return bool(self._queue)

    def take(self, nbytes: int) -> None:
        """Count bytes that are there already, over the limit if need be."""
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        """Uncount bytes."""
        self.used -= nbytes
        assert self.used >= 0, "more bytes given back than taken"

    def ask(self, nbytes: int) -> Reservation:
        """Reserve bytes: granted when this returns, or queued behind those that came before."""
        reservation = Reservation(nbytes)
        if not self._queue and self._fits(reservation):
            self._hold(reservation)
        else:
            self._queue.append(reservation)
        return reservation

    def grant(self) -> list[Reservation]:
        """Grant from the head of the queue what fits now, and return it."""
        granted = []
        while self._queue and self._fits(self._queue[0]):
            reservation = self._queue.popleft()
            self._hold(reservation)
            granted.append(reservation)
        return granted

    def end(self, reservation: Reservation) -> None:
        """Give a reservation back, or take it out of the queue. Idempotent."""
        if reservation.granted:
            reservation.granted = False
            self.give_back(reservation.nbytes)
        elif reservation in self._queue:
            self._queue.remove(reservation)

    def _fits(self, reservation: Reservation) -> bool:
        return not self.used or self.used + reservation.nbytes <= self.limit

    def _hold(self, reservation: Reservation) -> None:
        reservation.granted = True
        self.used += reservation.nbytes


class Throttle:
    """Lets appends wait for the budget; one event loop.

    Args:
        budget: Shared with the ledgers.
        clock: Measures the waiting, metric ``backpressureSeconds``.
        recorder: Where that goes.
        changed: Called when the queue or the budget changed, so that the storage drains (or fills) at once.
    """

    def __init__(self, budget: ByteBudget, clock: Clock, recorder: Recorder, changed: Callable[[], None]) -> None:
        self._budget = budget
        self._clock = clock
        self._recorder = recorder
        self._changed = changed
        self._waiting: dict[Reservation, asyncio.Future[None]] = {}
        self._closed = False

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` of the budget for the body, which appends them; waits, in order, until they fit.

        Raises:
            Closed: The storage was closed, also while waiting.
        """
        if self._closed:
            raise Closed("the changelog storage is closed: the TaskManager is shutting down")
        reservation = self._budget.ask(nbytes)
        try:
            if not reservation.granted:
                await self._wait(reservation)
            yield
        finally:
            self._budget.end(reservation)
            self._changed()

    def wake(self) -> None:
        """Let through what fits now."""
        for reservation in self._budget.grant():
            waiting = self._waiting.pop(reservation, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        """Let every waiter fail with :class:`~dstl.errors.Closed`. Idempotent."""
        self._closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Closed("the changelog storage was closed while an append waited for memory"))

    async def _wait(self, reservation: Reservation) -> None:
        since = self._clock.now()
        waiting = self._waiting[reservation] = asyncio.get_running_loop().create_future()
        self._recorder.increment("backpressuredAppends")
        self._changed()
        try:
            await waiting
        finally:
            self._waiting.pop(reservation, None)
            self._recorder.increment("backpressureSeconds", self._clock.now() - since)
