"""Coordinators and TaskManagers of ``dstl://`` in a simulated world: the product's own, over simulated sockets."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import copy_context
from functools import partial
from typing import Any

from dstl.errors import DstlError
from dstl.files.config import FileConfig
from dstl.files.leader import LeaderDirectory
from dstl.files.namespace import location_of
from dstl.files.options import FileOptions
from dstl.files.process import FileCoordinator, FileHost, OpenStore
from dstl.options import BatchingOptions, CheckpointOptions
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call
from dstl.rpc.file_messages import DeleteFile, EndRun, FileStat, ListFiles, PutFile, ReadFile, StagePart, StatFile
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.runtime import Runtime
from dstl.store.memory import MemoryStore
from tests.simulation.faults import FaultKind, FaultPlan, draw_plan
from tests.simulation.network import Network, NetworkLoop
from tests.simulation.process import Process
from tests.simulation.store import SimulatedStore
from tests.simulation.virtual_time import LoopClock

ROOT = "dstl:///jobs/query"
INLINE = 4 << 10
"""Bytes that a record holds: a few files, so that both ways are taken."""

_STAGED = 4000
"""Bytes of a file that a JVM does not send in one piece."""
_HAND_OVER_S = 25.0  # as dstl.process.lifecycle
_TIMEOUT_S = 2.0
"""Of a commit: its uploads are small, and a host that hangs costs as much and half a minute."""


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
    """The store, the network, and the processes around them. All follows from the seed.

    Args:
        loop: The world's.
        seed: Everything follows from it.
        options: When files become durable; all processes have the same.
        plan: Faults other than the seed's own.

    Attributes:
        leaves: Whether hosts are asked to end, and hand over what they have.
        handed_over: How many have.
    """

    def __init__(self, loop: NetworkLoop, seed: int, options: FileOptions, plan: FaultPlan | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.options = options
        self.config = FileConfig(
            "",
            batching=BatchingOptions(inline_threshold=INLINE, preemptive_persist_threshold=64 << 10),
            checkpoints=CheckpointOptions(timeout_s=_TIMEOUT_S),
            files=options,
        )
        self.plan = plan if plan is not None else draw_plan(self.rng("plan"))
        self.fired: Counter[FaultKind] = Counter()
        self.network = loop.network = Network(
            loop, self.rng("network"), lambda name: self.fired.update([FaultKind(name)])
        )
        self.context = copy_context()
        self.own_rng = self.rng("world")
        self.secret = Secret(self.own_rng.randbytes(32))
        self.processes: list[Process] = []
        self.lines: list[list[AsyncConnection]] = []
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

    def runtime(self, process: Process) -> Runtime:
        """Return the runtime of one process."""
        return Runtime(LoopClock(), self.rng(process.name), self.rng(f"{process.name}:ids"))

    def open_store(self, process: Process) -> OpenStore:
        """Return what opens the directory's location in one process; there are no plain files."""
        return lambda location, *_: self.store.client(process) if location == location_of(ROOT) else MemoryStore()


class JvmFiles:
    """What a JVM asks of its host's file service, each call over a connection of its own, as each of its threads does.

    Args:
        world: The world.
        address: Of the service, once it listens.
    """

    def __init__(self, world: FileWorld, address: asyncio.Future[Address]) -> None:
        self._world = world
        self._address = address
        self._idle: list[AsyncConnection] = []
        world.lines.append(self._idle)  # kept, as tasks are: none is collected before the world has ended

    async def put(self, path: str, run: str, attempt: int, content: bytes, *, overwrite: bool = True) -> None:
        """Write a file; a large one in parts."""
        parts: list[Call[Any]] = []
        if len(content) > _STAGED:
            token = f"{self._world.own_rng.getrandbits(60):x}"
            parts.append(StagePart(token, content[:_STAGED]))
        else:
            token = ""
        rest = content[_STAGED:] if token else content
        await self._call(*parts, PutFile(f"{ROOT}/{path}", run, attempt, overwrite, token, len(content), rest))

    async def delete(self, path: str, run: str) -> None:
        """Delete a file."""
        await self._call(DeleteFile(f"{ROOT}/{path}", run))

    async def read(self, path: str, run: str) -> bytes:
        """Return a file."""
        return bytes((await self._call(ReadFile(f"{ROOT}/{path}", run, 0, 1 << 30))).data)

    async def is_there(self, path: str, run: str) -> bool:
        """Return whether there is a file."""
        stat: FileStat = await self._call(StatFile(f"{ROOT}/{path}", run))
        return stat.size >= 0

    async def listing(self, path: str, run: str) -> list[tuple[str, int]]:
        """Return the names in a directory, each with its size."""
        return [(name, size) for name, size, _ in (await self._call(ListFiles(f"{ROOT}/{path}", run))).entries]

    async def end_run(self, run: str) -> None:
        """Tell the coordinator that a query has ended."""
        await self._call(EndRun(run))

    async def _call(self, *messages: Call[Any]) -> Any:
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = await AsyncConnection.open(await asyncio.shield(self._address), self._world.secret)
        try:
            for message in messages:
                reply = await connection.call(message)
        except DstlError:
            self._idle += [connection] if not connection.is_broken else []
            raise
        except BaseException:
            # Its next answer would be that to this call.
            connection.close()
            raise
        self._idle.append(connection)
        return reply


class FileHostProcess:
    """A TaskManager that has files of one host: it registers, serves, and ends when its coordinator lets it go.

    Args:
        world: The world.
        services: The coordinator's side.
        name: Its own.
    """

    def __init__(self, world: FileWorld, services: FileServices, name: str) -> None:
        self.process = world.process(name)
        self._world = world
        self._services = services
        self._name = name
        self._host: asyncio.Future[FileHost] = world.loop.create_future()
        self._address: asyncio.Future[Address] = world.loop.create_future()
        self.jvm = JvmFiles(world, self._address)
        self.process.spawn(self._live(), "main")

    def terminate(self) -> None:
        """Ask it to end, as ``SIGTERM`` does: it hands over what it has, if it can in time, and is gone."""
        self.process.spawn(self._hand_over(), "hand-over")

    async def _hand_over(self) -> None:
        if self._host.done():
            try:
                async with asyncio.timeout(_HAND_OVER_S):
                    await self._host.result().hand_over()
                self._world.handed_over += 1
            except TimeoutError:
                pass  # it is lost with what it has, as one that was killed
        self.process.kill()

    async def _live(self) -> None:
        world = self._world
        try:
            coordinator = await asyncio.shield(self._services.address)
            lifeline, calls = [
                await AsyncConnection.open(coordinator, world.secret, role=Role.TASK_MANAGER) for _ in range(2)
            ]
            runtime, open_store = world.runtime(self.process), world.open_store(self.process)
            host = FileHost(self._name, world.secret, world.config, runtime, open_store, calls)
            await lifeline.call(Enlist(self._name, 1))
            own = Address("simulated", await host.service.server.listen_tcp("simulated"))
            await lifeline.call(Register(self._name, 1, own))
            self._host.set_result(host)
            self._address.set_result(own)
            await lifeline.wait_closed_by_peer()
        except DstlError:
            pass  # nothing of it is there yet
        self.process.kill()


class FileServices:
    """The coordinator of one driver, and its hosts. They end with it.

    Args:
        world: The world.
        name: The driver's.
    """

    def __init__(self, world: FileWorld, name: str) -> None:
        self.process = world.process(name)
        self.hosts: dict[str, FileHostProcess] = {}
        self.address: asyncio.Future[Address] = world.loop.create_future()
        self._world = world
        self._name = name
        self._count = 0
        runtime, open_store = world.runtime(self.process), world.open_store(self.process)
        self._coordinator = FileCoordinator("driver", world.secret, world.config, runtime, open_store)
        self.directory: LeaderDirectory
        self.jvm = JvmFiles(world, self.address)
        self.process.spawn(self._listen(), "listen")

    async def _listen(self) -> None:
        port = await self._coordinator.service.server.listen_tcp("simulated")
        self.address.set_result(Address("simulated", port))

    async def open(self) -> None:
        """Open the directory."""
        self.directory = await self._coordinator.directories.of(ROOT)

    def host(self) -> FileHostProcess:
        """Start a host's TaskManager."""
        self._count += 1
        name = f"{self._name}.host-{self._count}"
        host = self.hosts[name] = FileHostProcess(self._world, self, name)
        host.process.on_death.append(partial(self.hosts.__delitem__, name))
        return host

    def kill(self) -> None:
        """End the driver, its coordinator and its hosts as ``kill -9`` does."""
        self.process.kill()
        for host in list(self.hosts.values()):
            host.process.kill()
