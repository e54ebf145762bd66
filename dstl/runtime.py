"""Clock, randomness, identifiers and the io loop: the only module that touches them.

Whatever decides takes a :class:`Runtime` (or one of its parts) as an argument, so that a test or a simulation can
hand in a manual clock and a seeded generator. Lint bans ``time``, ``random``, ``uuid`` and ``asyncio.sleep``
elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Clock(Protocol):
    """Tells the time and waits.

    ``now`` is monotonic seconds and decides everything; ``wall`` is Unix seconds and is only ever shown.
    """

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything."""

    def wall(self) -> float:
        """Unix seconds, for people and for stored time stamps. No safety property may depend on it."""

    async def sleep(self, seconds: float) -> None:
        """Wait on this clock."""


class SystemClock:
    """The machine's clock. Safe to share between threads."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running loop."""
        await asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts that fail: each twice as long as the one before it.

    Attributes:
        first_s: Seconds after the first failure.
        longest_s: Where the doubling ends.
    """

    first_s: float
    longest_s: float

    def ceiling(self, failures: int) -> float:
        """Return the longest wait after so many failures in a row, from 1."""
        # The exponent is bounded, so that years of failures do not overflow a float.
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60))

    def after(self, failures: int, rng: random.Random) -> float:
        """Return a wait after so many failures in a row, drawn so that many that failed together do not return so.

        Args:
            failures: In a row, from 1.
            rng: Draws, from half of the longest wait on.
        """
        return self.ceiling(failures) * rng.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Runtime:
    """Clock and randomness, given to components in place of the globals.

    Attributes:
        clock: Time.
        rng: Randomness for jitter and sampling; seeded in tests.
        entropy: Randomness for names; differs between processes (and forks) in production, seeded in simulation.
    """

    clock: Clock
    rng: random.Random
    entropy: random.Random

    def new_id(self) -> str:
        """Return 32 hexadecimal digits that are unique."""
        return f"{self.entropy.getrandbits(128):032x}"


def system_runtime() -> Runtime:
    """Return the runtime of a real process; make it after any fork."""
    return Runtime(SystemClock(), random.Random(secrets.randbits(64)), secrets.SystemRandom())


class _Opened(Protocol):
    async def close(self) -> None: ...


class IoLoop:
    """One asyncio loop on a daemon thread, made on first use: how synchronous code calls the asynchronous core.

    Thread-safe. Not usable in a forked child: there a new one must be made (a child's first call fails at once
    instead of hanging).
    """

    def __init__(self, name: str = "dstl-io") -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop and return its future at once."""
        return asyncio.run_coroutine_threadsafe(work, self._start())

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine to its end and return its result.

        Raises:
            RuntimeError: Called from the loop's own thread, where it would wait for itself.
            TimeoutError: ``timeout`` seconds passed; the coroutine is cancelled.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("IoLoop.run would wait for itself: await the coroutine instead")
        future = self.submit(work)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs, stop the loop and join its thread. Idempotent."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

    @contextmanager
    def closing(self, *opened: _Opened) -> Iterator[None]:
        """Close all of these at the end of a block, on the loop, and then the loop, whatever has happened."""
        try:
            yield
        finally:
            try:
                for each in opened:
                    self.run(each.close())
            finally:
                self.close()

    def _start(self) -> asyncio.AbstractEventLoop:
        if os.getpid() != self._pid:
            raise RuntimeError("an IoLoop does not survive a fork: make a new one in the child")
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def call_before_exit(work: Callable[[], object]) -> None:
    """Call something when the program ends, while threads still take work.

    Where ``atexit`` and finalizers have their turn, the threads of every executor have ended, and no object can be put
    into a directory any more. What it raises is logged. CPython has no public hook that is early enough; this one is
    there from 3.9 on, and was tried with 3.11 and 3.13.
    """

    def call() -> None:
        try:
            work()
        except Exception:
            _log.exception("what was to be done at the end of the program has failed")

    threading._register_atexit(call)  # type: ignore[attr-defined]


async def call_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something in one of the loop's threads; a cancelled caller waits for it all the same.

    So what the thread writes to (a table) or reads from (a snapshot) may be closed as soon as this has ended.
    """
    return await to_its_end(asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **kwargs)))


async def to_its_end(work: Awaitable[T]) -> T:
    """Wait for something; a cancelled caller waits for it all the same."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that asyncio does not report it as lost
        raise


@asynccontextmanager
async def closed_after(*opened: _Opened) -> AsyncIterator[None]:
    """Close all of these at the end of a block, the last one first, whatever has happened."""
    async with AsyncExitStack() as stack:
        for each in opened:
            stack.push_async_callback(each.close)
        yield


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is not told."""
    ended = list(tasks)
    for task in ended:
        task.cancel()
    await asyncio.gather(*ended, return_exceptions=True)


async def all_of(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all; when one fails, cancel the others, wait for them too, and raise what failed first."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def few_turns() -> None:
    """Let the loop turn as often as asyncio needs to make a connection of a socket, or to let go of a closed one's."""
    for _ in range(5):
        await asyncio.sleep(0)


async def _cancel_all() -> None:
    # A task that is cancelled before its first step never runs, and what it was given to close stays open.
    await few_turns()
    await end_tasks(t for t in asyncio.all_tasks() if t is not asyncio.current_task())
    # A transport that was closed lets go of its socket some turns later, and the loop ends after this.
    await few_turns()
