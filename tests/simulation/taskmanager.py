"""A TaskManager process in the simulated world: the product's own TaskManager over simulated sockets and store."""

from __future__ import annotations

import asyncio

from dstl.errors import DstlError, Invalid
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.store.probe import check_place
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components, TaskManager
from tests.simulation.process import Process
from tests.simulation.world import World
from tests.worlds.memory_recorder import MemoryRecorder


class TaskManagerActor:
    """One TaskManager: it registers, serves, and ends when its driver does.

    Args:
        world: The world.
        process: Its own.
        place: Its host, and its name in the fleet.
        config: Its configuration; None: its coordinator tells it, when it enlists.
        secret: The application's.
    """

    def __init__(
        self,
        world: World,
        process: Process,
        place: tuple[str, str],
        config: TaskManagerConfig | None,
        secret: Secret,
    ) -> None:
        self.process = process
        self._host, self._member_id = place
        self._world = world
        self._config = config
        self._secret = secret
        self._parent_ended = asyncio.Event()
        world.disk.attach(process)

    def parent_ended(self) -> None:
        """Standard input was closed: the driver has ended."""
        self._parent_ended.set()

    async def run(self, coordinator: Address) -> None:
        """Serve until the driver ends."""
        world = self._world
        # It is told as text, as it starts.
        where, config = Address.parse(str(coordinator)), self._config
        lifeline: AsyncConnection | None = None
        task_manager: TaskManager | None = None
        try:
            if config is None:
                lifeline = await self._connect(where)
                config = await self._enlist(lifeline)
            task_manager = self._make(config)
            port = await task_manager.service.server.listen_tcp(self._host)
            lifeline = lifeline or await self._connect(where)
            await lifeline.call(Register(self._member_id, port, Address(self._host, port)))
            coordinator_ended = asyncio.ensure_future(lifeline.wait_closed_by_peer())
            stopped = asyncio.ensure_future(self._parent_ended.wait())
            await asyncio.wait({coordinator_ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            coordinator_ended.cancel()
            await asyncio.gather(stopped, coordinator_ended, return_exceptions=True)
            lifeline.close()
        except DstlError as error:
            world.trace("task-manager-gave-up", f"{self._member_id} {type(error).__name__}")
        finally:
            if task_manager is not None:
                await task_manager.close()
        self.process.kill()

    async def _connect(self, coordinator: Address) -> AsyncConnection:
        return await AsyncConnection.open(coordinator, self._secret, role=Role.TASK_MANAGER)

    async def _enlist(self, lifeline: AsyncConnection) -> TaskManagerConfig:
        told = await lifeline.call(Enlist(self._member_id, 1))
        try:
            await check_place(self._world.store.client(self.process), told.marks, self._host)
        except Invalid as error:
            await lifeline.call(Register(self._member_id, 1, None, str(error)))
            raise
        return TaskManagerConfig.from_json(bytes(told.config))

    def _make(self, config: TaskManagerConfig) -> TaskManager:
        world, store, process = self._world, self._world.store, self.process
        components = Components(
            store=store.client(process),
            hedge_store=store.client(process),
            runtime=world.runtime(process.name),
            recorder=MemoryRecorder(samples=16),
            memory_use=world.memory.use,
        )
        opener = world.disk.opener(process)
        return TaskManager(world.disk.configure(config), components, open_table=opener, secret=self._secret)
