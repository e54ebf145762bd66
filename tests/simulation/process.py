"""Simulated processes on one event loop: each can be killed or stopped between any two steps of its code.

A process is a context variable. Every callback of the loop carries the context of the process that asked for it, so
the loop knows whose it is: a stopped process's callbacks are kept until it goes on, a dead one's never run. Nothing
of a killed process runs again, no ``finally`` either, as after ``kill -9``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, TypeVar

from tests.simulation.virtual_time import VirtualTimeLoop, _Due

T = TypeVar("T")


class State(Enum):
    """The state of a simulated process."""

    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class Process:
    """One simulated process.

    Attributes:
        name: For the trace; unique in a world.
        state: Running, stopped (``SIGSTOP``) or dead.
        fuse: Steps left until :attr:`on_fuse` is called before the next one; None for no fuse. So a crash or a stop
            falls between any two steps, not only at waits of our choosing.
        on_death: Called once when it dies; whoever holds a resource of it (connections, listeners) appends here.
    """

    __slots__ = ("context", "ending", "fuse", "held", "loop", "name", "on_death", "on_fuse", "state", "tasks")

    def __init__(self, loop: ProcessLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.state = State.RUNNING
        self.fuse: int | None = None
        self.on_fuse: Callable[[], None] | None = None
        self.on_death: list[Callable[[], None]] = []
        self.held: list[_Due] = []
        self.ending = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.context: Context = copy_context()
        self.context.run(_CURRENT.set, self)

    def __repr__(self) -> str:
        return f"<process {self.name}, {self.state.value}>"

    @property
    def is_running(self) -> bool:
        """True while it is neither stopped nor dead."""
        return self.state is State.RUNNING

    @property
    def is_dead(self) -> bool:
        """True once it was killed or has ended."""
        return self.state is State.DEAD

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        """Start a coroutine in this process."""
        return self.loop.create_task(work, name=f"{self.name}:{name}", context=self.context.copy())

    def post(self, callback: Callable[..., object], *args: Any, delay: float = 0.0) -> None:
        """Let a callback run in this process: how the world's events reach it."""
        self.loop.call_later(delay, callback, *args, context=self.context)

    def stop(self) -> None:
        """Stop it as ``SIGSTOP`` does: nothing of it runs until :meth:`go_on`."""
        if self.state is State.RUNNING and not self.ending:
            self.state = State.STOPPED

    def go_on(self) -> None:
        """Let a stopped process run on, with everything that fell due meanwhile."""
        if self.state is State.STOPPED:
            self.state = State.RUNNING
            held, self.held = self.held, []
            self.loop.requeue(held)

    def kill(self) -> None:
        """End it as ``kill -9`` does. Idempotent."""
        if self.state is State.DEAD or self.ending:
            return
        self.state = State.DEAD
        callbacks, self.on_death = self.on_death, []
        for callback in callbacks:
            callback()

    async def wait_dead(self, seconds: float) -> None:
        """Wait until it is dead, for so many seconds at most."""
        if not self.is_dead:
            died = asyncio.Event()
            self.on_death.append(died.set)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await died.wait()

    def revive(self) -> None:
        """Let even a dead process run, when its world has ended: so that its tasks can be ended properly."""
        self.fuse, self.ending = None, True
        self.state = State.STOPPED
        self.go_on()


_CURRENT: ContextVar[Process | None] = ContextVar("dstl-simulated-process", default=None)


class ProcessLoop(VirtualTimeLoop):
    """A virtual-time loop whose callbacks belong to processes.

    Within a process callbacks keep asyncio's order, which real code may rely on; between processes the order follows
    from the latencies of network and store.
    """

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__(start=start)
        self.callbacks = 0
        self.slow_callback_duration = 1e9
        self.tasks: list[asyncio.Task[Any]] = []
        self._most_tasks = 2048
        self.set_task_factory(self._task)

    @staticmethod
    def current() -> Process | None:
        """Return the process whose callback is running; None for the world's own."""
        return _CURRENT.get()

    def requeue(self, held: list[_Due]) -> None:
        """Run callbacks that were kept for a stopped process, in their order."""
        self._queue.extend(held)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        # Strong references, so that no task of a killed process is collected (and runs its finally) at a random time.
        task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
        self.tasks.append(task)
        if len(self.tasks) > self._most_tasks:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._most_tasks = max(2048, 2 * len(self.tasks))
        return task

    def _run_once(self) -> None:
        """One round, as the loop above has it, without a call more for each step: a world has ten thousand."""
        queue, process_of = self._queue, _CURRENT
        if not queue:
            self._jump()
        for _ in range(len(queue)):
            due = queue.popleft()
            if due._cancelled:
                continue
            context = due._context
            process = context.get(process_of)
            if process is not None:
                if process.fuse is not None and process.state is State.RUNNING:
                    process.fuse -= 1
                    if process.fuse < 0:
                        process.fuse = None
                        if process.on_fuse is not None:
                            process.on_fuse()
                if process.state is not State.RUNNING:
                    process.held.append(due)
                    continue
            self.callbacks += 1
            try:
                context.run(due._callback, *due._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._failed(due, error)
