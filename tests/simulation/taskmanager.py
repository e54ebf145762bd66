"""A TaskManager process in the simulated world: the product's own TaskManager over simulated sockets and store."""

from __future__ import annotations

import asyncio

from dstl.errors import DstlError
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Register
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components, TaskManager
from tests.simulation.process import Process
from tests.simulation.world import World
from tests.worlds.memory_recorder import MemoryRecorder


class TaskManagerActor:
    """One TaskManager: it registers, serves, and ends when its driver does."""

    def __init__(
        self, world: World, process: Process, member_id: str, config: TaskManagerConfig, secret: Secret
    ) -> None:
        self.process = process
        self._member_id = member_id
        self._world = world
        self._config = world.disk.configure(config, process)
        self._secret = secret
        self._parent_ended = asyncio.Event()

    def parent_ended(self) -> None:
        """Standard input was closed: the driver has ended."""
        self._parent_ended.set()

    async def run(self, coordinator: Address) -> None:
        """Serve until the driver ends."""
        world, stores = self._world, self._world.store
        components = Components(
            store=stores.client(self.process),
            hedge_store=stores.client(self.process),
            runtime=world.runtime(self.process.name),
            recorder=MemoryRecorder(samples=16),
            memory_use=world.memory.use,
        )
        task_manager = TaskManager(
            self._config, components, open_table=world.disk.opener(self.process), secret=self._secret
        )
        try:
            port = await task_manager.service.server.listen_tcp("simulated")
            # It is told as text, as it starts.
            lifeline = await AsyncConnection.open(Address.parse(str(coordinator)), self._secret, role=Role.TASK_MANAGER)
            own = Address("simulated", port, "")
            await lifeline.call(Register(self._member_id, port, own))
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
            await task_manager.close()
        self.process.kill()
