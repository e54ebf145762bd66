"""An event loop whose clock jumps to the next timer: an hour of waiting takes no time, and always the same way.

Ordinary asyncio code runs on it unchanged; ``loop.time()``, :class:`LoopClock` and ``asyncio.sleep`` all
follow the virtual clock. Nothing outside the process is awaited: no sockets, no threads, no subprocesses.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, copy_context
from typing import Any, TypeVar

from dstl.runtime import Clock, Runtime

T = TypeVar("T")


class LoopClock:
    """The running event loop's own time: virtual when the loop is a simulated one."""

    def now(self) -> float:
        """The loop's time in seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """The loop's time again: a simulated world has no other."""
        return self.now()

    async def sleep(self, seconds: float) -> None:
        """Sleep in the loop's time."""
        await asyncio.sleep(seconds)


def seeded_runtime(seed: int, clock: Clock | None = None) -> Runtime:
    """Return a runtime in which everything follows from the seed, by the loop's clock unless another is given."""
    return Runtime(clock or LoopClock(), random.Random(seed), random.Random(f"ids-{seed}"))


class _Due(asyncio.TimerHandle):
    """A callback and when it is due; lighter than asyncio's own, which formats and compares in Python."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when: float = 0.0
    ) -> None:
        self._callback = callback  # None once cancelled
        self._args = args
        self._context = context if context is not None else copy_context()
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]

    def when(self) -> float:
        return self._when

    def __repr__(self) -> str:
        return f"<due at {self._when:.6f}: {self._callback!r}>"


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Deterministic asyncio loop in virtual time.

    Invariants:
        1. Time moves only when nothing is ready, and then exactly to the next timer; timers of the same time fire in
           the order in which they were set.
        2. Without ``shuffle``, what is ready runs in asyncio's order; with it, in an order that follows from its seed,
           so that one seed is one schedule.
        3. When nothing is ready, no timer is set and the awaited work is not done, it raises instead of hanging.

    ``run_in_executor`` calls the function at once, on the loop. Not thread-safe.

    Args:
        start: The clock's first reading, in seconds.
        shuffle: Picks the next callback among those that are ready; None keeps their order.
    """

    def __init__(self, *, start: float = 0.0, shuffle: random.Random | None = None) -> None:
        super().__init__()
        self._now = start
        self._shuffle = shuffle
        self._timers: list[tuple[float, int, _Due]] = []
        self._queue: deque[_Due] = deque()
        self._order = 0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass without running anything: what a busy loop looks like to its timers."""
        self._now += seconds

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        """Run a callback in this instant."""
        due = _Due(callback, args, context)
        self._queue.append(due)
        return due

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        """Run a callback when the clock shows ``when``."""
        due = _Due(callback, args, context, when)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, due))
        return due

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        """Run a callback ``delay`` seconds from now."""
        when = self._now + delay
        due = _Due(callback, args, context, when)
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, due))
        return due

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Due:
        """The same as :meth:`call_soon`: a simulated world has one thread."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call the function here and now; the future is done when this returns."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        """One round: everything that is ready; asyncio calls it until it is told to stop."""
        queue = self._queue
        if not queue:
            self._jump()
        if self._shuffle is not None and len(queue) > 1:
            waiting = list(queue)
            queue.clear()
            self._shuffle.shuffle(waiting)
            queue.extend(waiting)
        for _ in range(len(queue)):
            due = queue.popleft()
            if not due._cancelled:
                self._run(due)

    def _run(self, due: _Due) -> None:
        """Run one callback, as asyncio's own handles do."""
        try:
            due._context.run(due._callback, *due._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._failed(due, error)

    def _failed(self, due: _Due, error: BaseException) -> None:
        self.call_exception_handler({"message": f"exception in callback {due!r}", "exception": error, "handle": due})

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise RuntimeError("deadlock in virtual time: nothing is ready and no timer is set")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
        now, queue = self._now, self._queue
        while timers and timers[0][0] <= now:
            due = heapq.heappop(timers)[2]
            if not due._cancelled:
                queue.append(due)

    # What BaseEventLoop asks of a loop with a selector.

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        """Nobody has to be woken."""


def run_in_virtual_time(work: Coroutine[Any, Any, T], *, start: float = 0.0, shuffle: random.Random | None = None) -> T:
    """Run a coroutine to its end on a new :class:`VirtualTimeLoop`, cancel what it left running, return its result."""
    loop = VirtualTimeLoop(start=start, shuffle=shuffle)
    try:
        events.set_event_loop(loop)
        try:
            return loop.run_until_complete(work)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        events.set_event_loop(None)
        loop.close()


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in virtual time, where delays cost nothing; its arguments stay pytest's."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        run_in_virtual_time(test(*args, **kwargs))

    return run
