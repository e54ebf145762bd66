"""A TaskManager process in the simulated world: the parts that ``python -m dstl.taskmanager`` puts together."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstl.changelog.object_names import SegmentNames
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.upload.uploader import Uploader
from dstl.errors import DstlError
from dstl.metrics import MemoryRecorder
from dstl.options import BatchingOptions, HedgingOptions, MaterializationOptions, UploadOptions
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.handshake import Role
from dstl.rpc.protocol import Secret
from dstl.runtime import Runtime
from dstl.taskmanager.materializing import materialize
from dstl.taskmanager.service import TaskManagerService
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from dstl.testing.simulation.process import Process
from dstl.testing.simulation.store import ClientStore
from materializer.tables.heap import HeapStateTable

if TYPE_CHECKING:
    from dstl.testing.simulation.world import World

__all__ = ["TaskManagerActor", "TaskManagerOptions"]


@dataclass(frozen=True)
class TaskManagerOptions:
    """What every TaskManager of a driver is given."""

    secret: Secret
    max_parallelism: int
    batching: BatchingOptions
    upload: UploadOptions
    hedging: HedgingOptions
    materialization: MaterializationOptions


class TaskManagerActor:
    """One TaskManager: it registers, serves, and ends when its driver does."""

    def __init__(self, world: World, process: Process, member_id: str, options: TaskManagerOptions) -> None:
        self.process = process
        self.member_id = member_id
        self.recorder = MemoryRecorder(samples=16)
        self.storage: StateChangelogStorage | None = None
        self._world = world
        self._options = options
        self._parent_ended = asyncio.Event()

    def parent_ended(self) -> None:
        """Standard input was closed: the driver has ended."""
        self._parent_ended.set()

    async def run(self, coordinator: Address) -> None:
        """Serve until the driver ends."""
        world, options = self._world, self._options
        runtime = world.runtime(self.process.name)
        store, hedge_store = world.store.client(self.process), world.store.client(self.process)
        uploader = Uploader(
            store,
            runtime=runtime,
            options=options.upload,
            hedging=options.hedging,
            recorder=self.recorder,
            hedge_store=hedge_store,
        )
        service = TaskManagerService(
            lambda query_id: self._open_backend(query_id, uploader, store, runtime),
            store,
            runtime,
            options.secret,
        )
        try:
            port = await service.server.listen_tcp("simulated")
            lifeline = await AsyncConnection.open(coordinator, options.secret, role=Role.TASK_MANAGER)
            own = Address("simulated", port, "")
            await lifeline.call("register", member=self.member_id, address=own.to_wire(), pid=port)
            coordinator_ended = asyncio.ensure_future(lifeline.wait_closed_by_peer())
            stopped = asyncio.ensure_future(self._parent_ended.wait())
            await asyncio.wait({coordinator_ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            coordinator_ended.cancel()
            await asyncio.gather(stopped, coordinator_ended, return_exceptions=True)
            lifeline.close()
        except DstlError as error:
            world.trace("task-manager-gave-up", f"{self.member_id} {type(error).__name__}")
        finally:
            await service.close()
            await uploader.close()
        self.process.kill()

    def _open_backend(
        self, query_id: str, uploader: Uploader, store: ClientStore, runtime: Runtime
    ) -> TaskManagerStateBackend:
        names = SegmentNames(query_id, runtime.new_id(), runtime)
        self.storage = StateChangelogStorage(
            uploader=uploader,
            store=store,
            names=names,
            options=self._options.batching,
            runtime=runtime,
            recorder=self.recorder,
        )
        backend = TaskManagerStateBackend(
            self.storage, lambda _: HeapStateTable(), runtime, max_parallelism=self._options.max_parallelism
        )
        materialize(
            backend,
            uploader=uploader,
            names=names,
            store=store,
            options=self._options.materialization,
            runtime=runtime,
            recorder=self.recorder,
        )
        return backend
