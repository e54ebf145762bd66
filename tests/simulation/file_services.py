"""Coordinators and TaskManagers of ``dstl://`` in a simulated world: the product's own, over simulated sockets."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dstl.errors import DstlError, TaskManagerLost, Unavailable
from dstl.files.config import FileConfig
from dstl.files.leader import LeaderDirectory
from dstl.files.namespace import location_of
from dstl.files.process import FileCoordinator, FileHost, OpenStore
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.codec import Call
from dstl.rpc.file_messages import (
    DeleteFile,
    EndRun,
    FileStat,
    ListFiles,
    PlacedFiles,
    PlaceFiles,
    PutFile,
    ReadFile,
    StagePart,
    StatFile,
)
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.runtime import Runtime
from tests.simulation.faults import FaultKind, FaultPlan, draw_plan
from tests.simulation.network import Network, NetworkLoop
from tests.simulation.process import Process
from tests.simulation.store import SimulatedStore
from tests.simulation.virtual_time import LoopClock

ROOT = "dstl:///jobs/query"
DRIVERS_HOST = "driver-host"
_CONF = {
    # A record holds a few files, so that both ways are taken; uploads of a commit are small, and a host that hangs
    # costs as much and half a minute.
    "spark.dstl.batching.inline_threshold": f"{4 << 10}",
    "spark.dstl.batching.preemptive_persist_threshold": f"{64 << 10}",
    "spark.dstl.checkpoints.timeout_s": "2",
}
"""Spark's configuration of the application."""

_STAGED = 4000
"""Bytes of a file that a JVM does not send in one piece."""
_HAND_OVER_S = 25.0  # as dstl.process.lifecycle
_PLACING_S = 60.0
"""How long a JVM looks for its host's service."""


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


@dataclass
class Outside:
    """Everything that outlives the query's processes: sink, source, and what each run's tasks have ended with."""

    query_id: bytes = b""
    sink: dict[int, bytes] = field(default_factory=dict)
    told: int = -1
    ended: dict[tuple[int, str], dict[str, bytes]] = field(default_factory=dict)
    attempt: int = 0
    committed: int = 0
    runs: int = 0


class FileWorld:
    """The stores, the network, and the processes around them. All follows from the seed.

    Args:
        loop: The world's.
        seed: Everything follows from it.
        options: When files become durable, as Spark's configuration says it; all processes have the same.
        plan: Faults other than the seed's own.

    Attributes:
        leaves: Whether hosts are asked to end, and hand over what they have.
        handed_over: How many have.
        sockets: Where what listens at a unix socket is reached, by its path.
    """

    def __init__(self, loop: NetworkLoop, seed: int, options: Mapping[str, str], plan: FaultPlan | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self._options = {**_CONF, **options}
        self.config = self.configured({})
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
        self.sockets: dict[str, Address] = {}
        self._stores = {location_of(ROOT): self._new_store("store")}

    @property
    def stores(self) -> list[SimulatedStore]:
        """Every store there is, one for each location."""
        return list(self._stores.values())

    def configured(self, options: Mapping[str, str]) -> FileConfig:
        """Return what processes are told whose Spark has more options."""
        return FileConfig.of({**self._options, **options}, {})

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

    def store_of(self, location: str) -> SimulatedStore:
        """Return the store of a location: that of a directory's objects, or of its plain files."""
        found = self._stores.get(location)
        if found is None:
            # Its answers are no process's, whoever opens it first.
            found = self._stores[location] = self.context.run(self._new_store, f"store:{location}")
        return found

    def open_store(self, process: Process) -> OpenStore:
        """Return what opens a location in one process."""
        return lambda location, *_: self.store_of(location).client(process, location)

    def _new_store(self, name: str) -> SimulatedStore:
        return SimulatedStore(
            self.loop,
            self.rng(name),
            self.plan,
            _Unaudited(),
            lambda kind: self.fired.update([kind]),
            lambda what, detail: None,
            objects={},
        )


Find = Callable[[str], Awaitable[Address]]
"""Finds a service, given the socket that does not answer any more; empty for none."""


class JvmFiles:
    """What a JVM asks of its host's file service, each call over a connection of its own, as each of its threads does.

    Args:
        world: The world.
        root: The query's directory.
        find: Returns where the service listens.
    """

    def __init__(self, world: FileWorld, root: str, find: Find) -> None:
        self._world = world
        self._root = root
        self._find = find
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
        await self._call(*parts, PutFile(f"{self._root}/{path}", run, attempt, overwrite, token, len(content), rest))

    async def delete(self, path: str, run: str) -> None:
        """Delete a file."""
        await self._call(DeleteFile(f"{self._root}/{path}", run))

    async def read(self, path: str, run: str) -> bytes:
        """Return a file."""
        return bytes((await self._call(ReadFile(f"{self._root}/{path}", run, 0, 1 << 30))).data)

    async def open(self, path: str, run: str) -> bytes:
        """Return a file as Spark reads one: its size, and then so many bytes."""
        stat: FileStat = await self._call(StatFile(f"{self._root}/{path}", run))
        return bytes((await self._call(ReadFile(f"{self._root}/{path}", run, 0, stat.size))).data)

    async def is_there(self, path: str, run: str) -> bool:
        """Return whether there is a file."""
        stat: FileStat = await self._call(StatFile(f"{self._root}/{path}", run))
        return stat.size >= 0

    async def listing(self, path: str, run: str) -> list[tuple[str, int]]:
        """Return the names in a directory, each with its size."""
        return [(name, size) for name, size, _ in (await self._call(ListFiles(f"{self._root}/{path}", run))).entries]

    async def end_run(self, run: str) -> None:
        """Tell the coordinator that a query has ended."""
        await self._call(EndRun(run))

    async def _call(self, *messages: Call[Any]) -> Any:
        connection = self._idle.pop() if self._idle else await self._open()
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

    async def _open(self) -> AsyncConnection:
        """Connect; where nothing answers, look once more for the service."""
        where = await self._find("")
        try:
            return await AsyncConnection.open(where, self._world.secret)
        except Unavailable:
            return await AsyncConnection.open(await self._find(where.path), self._world.secret)


class FileHostProcess:
    """A TaskManager that has files of one host: it registers, serves, and ends when its coordinator lets it go.

    Args:
        world: The world.
        services: The coordinator's side.
        host: The executor's.
        name: Its own.
    """

    def __init__(self, world: FileWorld, services: FileServices, host: str, name: str) -> None:
        self.process = world.process(f"{services.name}.{name}")
        self._world = world
        self._services = services
        self._place = host
        self._name = name
        self._host: asyncio.Future[FileHost] = world.loop.create_future()
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
            config = FileConfig.from_json(bytes((await lifeline.call(Enlist(self._name, 1))).config))
            # They break where the coordinator was silent: then this host is not its own any more.
            broken = asyncio.ensure_future(calls.wait_closed())
            broken.add_done_callback(lambda _: lifeline.close())
            host = FileHost(self._name, world.secret, config, runtime, open_store, calls)
            path = f"/of/{self.process.name}"
            own = Address(self._place, await host.service.server.listen_tcp(self._place), path)
            world.sockets[path] = own
            await lifeline.call(Register(self._name, 1, own))
            self._host.set_result(host)
            await lifeline.wait_closed_by_peer()
            broken.cancel()
            await host.close()
        except DstlError:
            pass  # nothing of it is there yet
        self.process.kill()


class FileServices:
    """The coordinator of one driver, and its hosts. They end with it.

    Args:
        world: The world.
        name: The driver's.
        root: The query's directory.
        hosts: How many hosts its executors run on.
        also: Directories elsewhere that it may use.
    """

    def __init__(
        self, world: FileWorld, name: str, *, root: str = ROOT, hosts: int = 0, also: Sequence[str] = ()
    ) -> None:
        self.process = world.process(name)
        self.name = name
        self.root = root
        self.hosts: dict[str, FileHostProcess] = {}
        self.address: asyncio.Future[Address] = world.loop.create_future()
        self._world = world
        runtime, open_store = world.runtime(self.process), world.open_store(self.process)
        config = world.configured({"spark.dstl.also": ",".join(also)})
        self._coordinator = FileCoordinator(DRIVERS_HOST, world.secret, config, runtime, open_store)
        self.directory: LeaderDirectory
        self.jvm = JvmFiles(world, root, lambda lost: asyncio.shield(self.address))
        self.executors = {
            host: JvmFiles(world, root, partial(self._find, host))
            for host in (f"executor-host-{number + 1}" for number in range(hosts))
        }
        self.process.spawn(self._listen(), "listen")

    async def _listen(self) -> None:
        port = await self._coordinator.service.server.listen_tcp(DRIVERS_HOST)
        self._coordinator.address = Address(DRIVERS_HOST, port)
        self.address.set_result(self._coordinator.address)

    async def open(self) -> None:
        """Open the directory."""
        self.directory = await self._coordinator.directories.of(self.root)

    async def close(self) -> None:
        """End well, as an application does that has stopped its queries; then the driver's process is gone."""
        await self._coordinator.close()
        self.process.kill()

    def kill(self) -> None:
        """End the driver, its coordinator and its hosts as ``kill -9`` does."""
        self.process.kill()
        for host in list(self.hosts.values()):
            host.process.kill()

    def _ended(self, member: str) -> None:
        self.hosts.pop(member, None)

    async def _find(self, host: str, lost: str) -> Address:
        """Return where the service of an executor's host listens; start it where the coordinator wants that."""
        world, rng = self._world, self._world.rng(f"{self.name}:{host}")
        deadline = world.loop.time() + _PLACING_S
        connection = await AsyncConnection.open(await asyncio.shield(self.address), world.secret)
        try:
            while world.loop.time() < deadline:
                placed: PlacedFiles = await connection.call(PlaceFiles(host, lost))
                if placed.socket:
                    return world.sockets[placed.socket]
                if placed.member:
                    started = self.hosts[placed.member] = FileHostProcess(world, self, host, placed.member)
                    started.process.on_death.append(partial(self._ended, placed.member))
                await asyncio.sleep(rng.uniform(0.02, 0.2))
        finally:
            connection.close()
        raise TaskManagerLost(f"there is no file service on {host}")
