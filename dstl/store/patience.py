"""Attempts at a store that does not answer, with growing pauses between them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dstl.errors import CorruptData, Unavailable
from dstl.runtime import Runtime

__all__ = ["Patience"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_FIRST_S = 0.05


class Patience:
    """Repeats what may be repeated safely while a store is unavailable.

    Args:
        runtime: Clock, jitter.
        attempts: How often in all.
        longest_s: No pause is longer than so many seconds.

    Attributes:
        attempts: As given; for writers, whose attempts are not all alike.
    """

    def __init__(self, runtime: Runtime, *, attempts: int = 6, longest_s: float = 2.0) -> None:
        self.attempts = attempts
        self._runtime = runtime
        self._longest_s = longest_s

    async def repeat(self, call: Callable[[], Awaitable[T]], what: str) -> T:
        """Return what a call gives that is sound to repeat, such as a read; ``what`` is for the log.

        Raises:
            Unavailable: It was, at every attempt.
        """
        for attempt in range(1, self.attempts):
            try:
                return await call()
            except Unavailable as error:
                _log.warning("%s: %s", what, error)
                await self.pause(attempt)
        return await call()

    async def read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read that checks what it returns, once also where it found damage, which may be the network's.

        Raises:
            Unavailable: It was, at every attempt.
            CorruptData: Damage was found twice, so it is in the store.
        """
        damaged = False
        for attempt in range(1, self.attempts):
            try:
                return await call()
            except CorruptData:
                if damaged:
                    raise
                damaged = True
            except Unavailable:
                pass
            await self.pause(attempt)
        return await call()

    async def pause(self, attempt: int) -> None:
        """Wait after an attempt, the first being 1."""
        longest = min(self._longest_s, _FIRST_S * 2.0**attempt)
        await self._runtime.clock.sleep(longest * self._runtime.rng.uniform(0.5, 1.0))
