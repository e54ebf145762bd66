"""Silence: how long the other side may be without a sign of life before it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

SILENCE_S = 50.0
"""A service that has said nothing for so long hangs, or its host is gone (Flink ``heartbeat.timeout``). A loop that is
busy with a large change set is silent for a second or two; a process that waits for swap, for more."""
_LOOKS = 5  # each is a fifth of the time: what was said in the first is noticed so much later at most


class Silence:
    """Tells one side of a connection that the other is silent: so many looks in a row found that nothing had moved.

    Looks are counted, not seconds: a caller that stood still itself has looked once in all that time, and what came
    meanwhile is read before the next one.

    Attributes:
        look_s: Seconds between two looks; None for no end.

    Args:
        seconds: How long the other side may be silent; None: as long as it likes.
        progress: Returns what is another value once something has moved.
    """

    def __init__(self, seconds: float | None, progress: Callable[[], object] = lambda: None) -> None:
        self.look_s = None if seconds is None else seconds / _LOOKS
        self._progress = progress
        self._seen = progress()
        self._in_vain = 0

    def moved(self) -> None:
        """Something has moved, whatever the progress says."""
        self._in_vain = 0

    def look(self) -> bool:
        """Look once more; True where the other side is silent."""
        now = self._progress()
        self._in_vain = self._in_vain + 1 if now == self._seen else 0
        self._seen = now
        return self._in_vain >= _LOOKS

    async def wait(self, future: asyncio.Future[Any]) -> bool:
        """Return True once a future is done, False where the other side is silent first."""
        while not (await asyncio.wait([future], timeout=self.look_s))[0]:
            if self.look():
                return False
        return True


def no_sign_of_life(seconds: float) -> str:
    """Return what is said of a service that was silent for so many seconds."""
    return f"no sign of life for {seconds:g} s; its process hangs, or its host is gone"
