"""Blocking code in a simulated world: it runs on a stack of its own, in turn with the event loop.

Where the code waits, it hands a coroutine to the loop, and its stack stands still until the loop has run it. Exactly
one of the loop and all that blocks runs at any time, so that a seed stays one schedule. Threads would do as well, but a
seed waits eight hundred times, and two threads take 11 to 40 us to pass the turn on and back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from greenlet import getcurrent, greenlet

T = TypeVar("T")

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the loop and returns its result, while the calling stack stands still."""

_MAX_WAITS = 100


class WorldEnded(BaseException):
    """Raised where blocking code waits when its world ends, so that its stack unwinds."""


class BlockingStacks:
    """What blocks in one world.

    Code that is killed with its process stays where it waits, as nothing of a dead process runs; it unwinds when the
    world ends.
    """

    def __init__(self) -> None:
        # Strong references: one that nobody holds would unwind at once.
        self._running: set[greenlet] = set()
        self._ended = False

    async def run(self, function: Callable[[Wait], T]) -> T:
        """Run blocking code to its end, in the context of the caller, and return its result or raise its error."""
        stack = greenlet(function)
        stack.gr_context = copy_context()
        self._running.add(stack)
        try:
            asked = stack.switch(_wait)
            while not stack.dead:
                try:
                    answer, error = await asked, None
                except Exception as failed:
                    answer, error = None, failed
                if self._ended:
                    raise asyncio.CancelledError
                asked = stack.switch(answer) if error is None else stack.throw(error)
            return asked  # type: ignore[no-any-return]
        finally:
            _unwind(stack)
            self._running.discard(stack)

    def end(self) -> None:
        """Let nothing that waits go on: it unwinds as soon as its task runs."""
        self._ended = True

    def close(self) -> None:
        """Look whether all have ended.

        Raises:
            RuntimeError: One of them has not done its work: the world has leaked it.
        """
        if self._running:
            raise RuntimeError(f"{len(self._running)} stacks of a simulated world never ended")


def _wait(asked: Coroutine[Any, Any, Any]) -> Any:
    loops = getcurrent().parent
    assert loops is not None
    return loops.switch(asked)


def _unwind(stack: greenlet) -> None:
    """End blocking code where it waits, if it does: as its world has ended, whatever it raises is not told."""
    for _ in range(_MAX_WAITS):
        if stack.dead:
            return
        asked = None
        with suppress(Exception, WorldEnded, asyncio.CancelledError):
            asked = stack.throw(WorldEnded())
        if asked is not None and not stack.dead:
            asked.close()
    raise RuntimeError("blocking code does not end when its world has ended")
