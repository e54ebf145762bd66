"""Coordinators and hosts' services of ``dstl://`` in a simulated world: real directories, simulated links."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextvars import copy_context
from typing import Any, TypeVar

from dstl.errors import DstlError, TaskManagerLost, Unavailable
from dstl.files.coordinated import own_directory
from dstl.files.file_log import FileLog
from dstl.files.hosted import HostedDirectory
from dstl.files.options import FileOptions
from dstl.options import BatchingOptions
from dstl.rpc.codec import Call, R
from dstl.rpc.file_messages import (
    FileList,
    FileStat,
    FindFile,
    FoundFile,
    LeavingHost,
    ListFiles,
    PersistedFiles,
    ServedRoot,
    ServeRoot,
    StatFile,
    StoredFiles,
)
from dstl.rpc.messages import Done
from dstl.runtime import LoopClock, Runtime
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from dstl.testing.simulation.faults import FaultKind, FaultPlan, draw_plan
from dstl.testing.simulation.process import Process, ProcessLoop
from dstl.testing.simulation.store import SimulatedStore
from handles.segment_handle import SegmentHandle

__all__ = ["ROOT", "FileHostProcess", "FileServices", "FileWorld"]

ROOT = "dstl:///jobs/query"
INLINE = 4 << 10
"""Bytes that a record holds: a few files, so that both ways are taken."""

_HAND_OVER_S = 25.0  # as dstl.files.__main__

T = TypeVar("T")


class _Unaudited:
    """Hears nothing: what must hold is seen in the directory."""

    def sent(self, request: int, name: str, body: bytes) -> None:
        pass

    def landed(self, request: int, name: str, body: bytes) -> None:
        pass

    def dropped(self, request: int) -> None:
        pass

    def deleting(self, name: str) -> None:
        pass


class FileWorld:
    """The store, and the processes around it. All follows from the seed.

    Args:
        loop: The world's.
        seed: Everything follows from it.
        options: When files become durable; both sides of a link have the same.
        plan: Faults other than the seed's own.

    Attributes:
        leaves: Whether hosts are asked to end, and hand over what they have.
        handed_over: How many have.
    """

    def __init__(self, loop: ProcessLoop, seed: int, options: FileOptions, plan: FaultPlan | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.options = options
        self.plan = plan if plan is not None else draw_plan(self.rng("plan"))
        self.fired: Counter[FaultKind] = Counter()
        self.context = copy_context()
        self.own_rng = self.rng("world")
        self.processes: list[Process] = []
        self.violations: list[str] = []
        self.leaves = plan is None and self.rng("leaving").random() < 0.6
        self.handed_over = 0
        self.store = SimulatedStore(
            loop,
            self.rng("store"),
            self.plan,
            _Unaudited(),
            lambda kind: self.fired.update([kind]),
            lambda what, detail: None,
            objects={},
        )

    def rng(self, name: str) -> random.Random:
        """Return a generator of its own for a part of the world."""
        return random.Random(f"files:{self.seed}:{name}")

    def process(self, name: str) -> Process:
        """Return a new process."""
        process = Process(self.loop, name)
        self.processes.append(process)
        return process

    def log(self, process: Process) -> tuple[FileLog, Runtime]:
        """Return the log of one process, and its runtime."""
        rng = self.rng(process.name)
        runtime = Runtime(LoopClock(), rng, self.rng(f"{process.name}:ids"))
        batching = BatchingOptions(inline_threshold=INLINE, preemptive_persist_threshold=64 << 10)
        config = TaskManagerConfig(location="", batching=batching)
        client = self.store.client(process)
        return FileLog(Changelog(config, Components(store=client, runtime=runtime), "files"), runtime, INLINE), runtime

    async def call(self, target: Process, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something in another process and return what it answers, a moment later.

        Raises:
            TaskManagerLost: It has died.
        """
        answer: asyncio.Future[T] = self.loop.create_future()

        def lost() -> None:
            if not answer.done():
                answer.set_exception(TaskManagerLost(f"{target.name} is gone: restart the query"))

        async def answered() -> None:
            try:
                result = await work()
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(result)

        await asyncio.sleep(self.own_rng.uniform(0, 0.002))
        if target.is_dead:
            lost()
        else:
            target.on_death.append(lost)
            target.spawn(answered(), "call")
        result = await answer
        await asyncio.sleep(self.own_rng.uniform(0, 0.002))
        return result


class FileHostProcess:
    """A host's service, and the coordinator's link to it.

    Args:
        world: The world.
        services: The coordinator's side.
        name: The service's.
    """

    def __init__(self, world: FileWorld, services: FileServices, name: str) -> None:
        self.process = world.process(name)
        self._world = world
        log, runtime = world.log(self.process)
        self._link = _Link(world, services)
        self._name = name
        self.directory = HostedDirectory(
            ROOT,
            name,
            world.store.client(self.process),
            MemoryStore(),
            log,
            self._link,
            runtime,
            stores_at_once=world.options.durability == "task",
            asks_always=world.options.sources == "keep",
        )

    def terminate(self) -> None:
        """Ask it to end, as ``SIGTERM`` does: it hands over what it has, if it can in time, and is gone."""
        self.process.spawn(self._hand_over(), "hand-over")

    async def _hand_over(self) -> None:
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await self.directory.hand_over()
                await self._link.call(LeavingHost(self._name))
            self._world.handed_over += 1
        except (DstlError, TimeoutError):
            pass  # it is lost with what it has, as one that was killed
        self.process.kill()

    async def persist(self, root: str, run: str, version: int) -> PersistedFiles:
        """Make what it has durable, or hand it over."""

        async def work() -> PersistedFiles:
            self.directory.committing(version - 1)
            self.directory.log.end_other_runs(run)
            return await self.directory.log.persist(run, version=version)

        return await self._world.call(self.process, work)

    async def complete(self, root: str, located: Mapping[str, SegmentHandle]) -> None:
        """The record is durable."""

        async def work() -> None:
            self.directory.complete(located)

        await self._world.call(self.process, work)

    async def reset(self, root: str) -> None:
        """The record was certainly not written."""

        async def work() -> None:
            self.directory.log.reset()

        await self._world.call(self.process, work)


class FileServices:
    """The coordinator of one driver, and its hosts. They end with it.

    Args:
        world: The world.
        name: The driver's.
    """

    def __init__(self, world: FileWorld, name: str) -> None:
        self.process = world.process(name)
        self.hosts: dict[str, FileHostProcess] = {}
        self._world = world
        self._name = name
        self._count = 0
        log, runtime = world.log(self.process)
        self.directory = own_directory(
            ROOT, world.store.client(self.process), MemoryStore(), log, self.hosts, runtime, world.options
        )

    def host(self) -> FileHostProcess:
        """Start a host's service."""
        self._count += 1
        name = f"{self._name}.host-{self._count}"
        host = self.hosts[name] = FileHostProcess(self._world, self, name)

        def lost() -> None:
            # The connection's end is noticed a little later.
            self.process.post(self._lost, name, delay=self._world.own_rng.uniform(0, 0.05))

        host.process.on_death.append(lost)
        return host

    def kill(self) -> None:
        """End the driver, its coordinator and its hosts as ``kill -9`` does."""
        self.process.kill()
        for host in list(self.hosts.values()):
            host.process.kill()

    def _lost(self, name: str) -> None:
        if self.hosts.pop(name, None) is not None:
            self.directory.run.lose(name)


class _Link:
    """A host's calls to its coordinator."""

    def __init__(self, world: FileWorld, services: FileServices) -> None:
        self._world = world
        self._services = services

    async def call(self, message: Call[R]) -> R:
        try:
            answer: Any = await self._world.call(self._services.process, lambda: self._answer(message))
        except TaskManagerLost as error:
            if self._services.process.is_dead:
                raise Unavailable(str(error)) from None
            raise
        return answer  # type: ignore[no-any-return]

    async def _answer(self, message: Call[Any]) -> Any:
        directory = self._services.directory
        match message:
            case ServeRoot():
                if message.member not in self._services.hosts:
                    raise TaskManagerLost(f"{message.member} is taken for lost: restart the query")
                return ServedRoot(await directory.serve(message.member, message.run))
            case StoredFiles():
                part = PersistedFiles(message.files, message.segments, False, b"")
                await directory.store(message.member, message.run, part)
                return Done()
            case LeavingHost():
                directory.run.leave(message.member)
                return Done()
            case ListFiles():
                return FileList(tuple(await directory.listing(_inner(message.path), message.run)), False)
            case StatFile():
                found = await directory.find(_inner(message.path), message.run)
                return FileStat(-1, 0, False) if found is None else FileStat(found[1], found[2], found[1] < 0)
            case FindFile():
                entry = await directory.entry(_inner(message.path))
                if entry is None:
                    return FoundFile((), "", 0, -1, 0)
                handle = entry.segment
                place = (handle.name, handle.size, handle.checksum, handle.offset)
                return FoundFile(place, entry.log_id, entry.sqn, entry.size, entry.modified_ms)
        raise TypeError(f"no call of a host: {message}")


def _inner(path: str) -> str:
    return path.removeprefix(f"{ROOT}/")
