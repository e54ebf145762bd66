"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

_TURNS = 50


class ManualClock:
    """Time in a test's hands: a :class:`~dstl.runtime.Clock` whose sleepers wake when ``advance`` passes them.

    Invariants:
        1. Sleepers wake in the order of their times, equal times in the order in which they went to sleep, and each
           sees ``now()`` at the time for which it asked.
        2. Before time moves on, the loop turns often enough (50 times) for what woke to go to sleep again.

    Belongs to one loop; ``now`` and ``wall`` may be read anywhere.

    Args:
        now: Monotonic seconds at the beginning.
        wall: Unix seconds at the beginning; moves along.
    """

    def __init__(self, now: float = 0.0, *, wall: float = 1_600_000_000.0) -> None:
        self._now = now
        self._offset = wall - now
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Monotonic seconds."""
        return self._now

    def wall(self) -> float:
        """Unix seconds: as far from ``now`` as at the beginning."""
        return self._now + self._offset

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was moved on by this many seconds; 0 or less only lets the others run once."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Move on, waking everybody on the way.

        Raises:
            ValueError: Backwards.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not go back: {seconds}")
        target = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
                await self.settle()
        self._now = target

    async def settle(self) -> None:
        """Let the loop turn without moving time."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
