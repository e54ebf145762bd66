"""Blocking code in a simulated world: it runs in threads of its own, strictly in turn with the event loop.

Where the code waits, it hands a coroutine to the loop, and its thread stands still until the loop has run it. Exactly
one of the loop and all threads runs at any time, so that a seed stays one schedule.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

Wait = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the loop and returns its result, while the calling thread stands still."""

_MAX_WAITS = 100
_JOIN_S = 10.0


class WorldEnded(BaseException):
    """Raised where blocking code waits when its world ends, so that its thread unwinds."""


class BlockingThreads:
    """The threads of one world. A thread that has done its work takes the next.

    Code that is killed with its process stays where it waits, as nothing of a dead process runs; it unwinds when the
    world ends.
    """

    def __init__(self) -> None:
        self._threads: list[_Thread] = []
        self._idle: list[_Thread] = []
        self._ended = False

    async def run(self, function: Callable[[Wait], T]) -> T:
        """Run blocking code to its end, in the context of the caller, and return its result or raise its error."""
        if not self._idle:
            self._idle.append(_Thread(f"simulated-{len(self._threads)}"))
            self._threads.append(self._idle[-1])
        thread = self._idle.pop()
        asked = thread.begin(function, copy_context())
        try:
            while asked is not None:
                try:
                    answer, error = await asked, None
                except Exception as failed:
                    answer, error = None, failed
                if self._ended:
                    raise asyncio.CancelledError
                asked = thread.go_on(answer, error)
        except BaseException:
            for _ in range(_MAX_WAITS):
                asked = thread.go_on(None, WorldEnded())
                if asked is None:
                    break
                asked.close()
            else:
                raise RuntimeError("blocking code does not end when its world has ended") from None
            self._idle.append(thread)
            raise
        self._idle.append(thread)
        return thread.result()  # type: ignore[no-any-return]

    def end(self) -> None:
        """Let nothing that waits go on: it unwinds as soon as its task runs."""
        self._ended = True

    def close(self) -> None:
        """End all threads.

        Raises:
            RuntimeError: One of them has not done its work: the world has leaked it.
        """
        for thread in self._idle:
            thread.stop()
        leaked = len(self._threads) - len(self._idle)
        if leaked:
            raise RuntimeError(f"{leaked} threads of a simulated world never ended")


class _Thread:
    def __init__(self, name: str) -> None:
        self._turn, self._loops_turn = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._loops_turn.acquire()
        self._work: tuple[Callable[[Wait], Any], Context] | None = None
        self._asked: Coroutine[Any, Any, Any] | None = None
        self._answer: tuple[Any, BaseException | None] = None, None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, function: Callable[[Wait], Any], context: Context) -> Coroutine[Any, Any, Any] | None:
        """Start work and return what it waits for; None where it has ended."""
        self._work = function, context
        return self.go_on(None, None)

    def go_on(self, answer: Any, error: BaseException | None) -> Coroutine[Any, Any, Any] | None:
        """Answer what the work waits for, and return what it waits for next; None where it has ended."""
        self._answer = answer, error
        self._turn.release()
        self._loops_turn.acquire()
        asked, self._asked = self._asked, None
        return asked

    def result(self) -> Any:
        """Return what the work has returned, or raise what it has raised."""
        (answer, error), self._answer = self._answer, (None, None)
        if error is not None:
            raise error
        return answer

    def stop(self) -> None:
        """End the thread, which must be idle."""
        self._work = None
        self._turn.release()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            self._turn.acquire()
            if self._work is None:
                return
            function, context = self._work
            try:
                self._answer = context.run(function, self._wait), None
            except BaseException as error:
                self._answer = None, error
            self._loops_turn.release()

    def _wait(self, asked: Coroutine[Any, Any, Any]) -> Any:
        self._asked = asked
        self._loops_turn.release()
        self._turn.acquire()
        return self.result()
