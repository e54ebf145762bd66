"""What a driver's program asks of its query while that runs, in some worlds: figures, a key's state, a savepoint."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from dstl.checkpoint.savepoint.restore import SavepointRestore
from dstl.checkpoint.service import CoordinatorService
from dstl.errors import CorruptData, DstlError, Invalid
from dstl.runtime import Runtime
from dstl.spark.application.savepoints import SavepointMaker
from dstl.store.base import ObjectStore
from materializer.restore.progress import RestoreStatus
from tests.simulation.process import Process
from tests.simulation.spark import OPERATIONS, decode_value, key_group_of, keys_of
from tests.simulation.world import World

_WATCHED = 0.3
_MOST_SAVEPOINTS = 2


class Watch:
    """Asks one driver's coordinator, in its process.

    Args:
        world: The world.
        process: The driver's.
        service: Its coordinator.
    """

    def __init__(self, world: World, process: Process, service: CoordinatorService) -> None:
        self._world = world
        self._process = process
        self._service = service
        self._rng = world.rng(f"{process.name}:watch")
        self._savepoints = 0
        self._seen: dict[tuple[str, bytes], int] = {}

    async def run(self) -> None:
        """Ask now and then, if this driver's program does."""
        if self._rng.random() >= _WATCHED:
            return
        while True:
            await asyncio.sleep(self._rng.uniform(0.1, 1.5))
            try:
                await self._rng.choice((self._look_up, self._look_up, self._measure, self._save))()
            except DstlError as error:
                may_be = self._world.may_corrupt or self._world.check.damage.names
                corrupt = isinstance(error, CorruptData) and not may_be
                if isinstance(error, Invalid) or corrupt:
                    self._world.check.fail("I21", f"{self._process.name} asked its query: {error!r}")

    async def _look_up(self) -> None:
        """Look a key up: it has the operations up to some committed batch, and never fewer than before (I7)."""
        logs, operator = self._world.logs, self._rng.choice(self._world.operators)
        key = self._rng.choice(keys_of(logs))
        await self._service.lookups.registry(operator)
        groups = logs.max_parallelism
        found = await self._service.lookups.read(operator, OPERATIONS, key_group_of(key, groups), key)
        shown = decode_value(b"".join(found.values))
        right = [each for each in range(shown[-1] + 1 if shown else 0) if logs.key_of(each) == key]
        right = [each for each in right if not any(each in logs.range_of(batch) for batch in logs.lost)]
        if shown != right or len(shown) < self._seen.get((operator, key), 0):
            self._world.check.fail("I7", f"{self._process.name} looked {key!r} of {operator} up and found {shown}")
        self._seen[operator, key] = len(shown)

    async def _measure(self) -> None:
        """Ask for every figure: they are of this query, and of TaskManagers that there are (I12)."""
        service, world = self._service, self._world
        told = await service.task_manager_metrics()
        # Those that hosts launch have the coordinator's names.
        names = {name for each in world.processes for name in (each.name, each.name.partition(".tm-")[2])}
        members = {each.member_id for each in (*service.fleet.all.values(), *(each.member for each in told))}
        numbers = [each.checkpoint_id for each in service.completed]
        if not members <= names or numbers != sorted(numbers) or service.query_id not in ("", "query"):
            world.check.fail("I12", f"{self._process.name} shows {members} with checkpoints {numbers}")
        world.trace("figures", f"{len(members)} {numbers} {len(service.history)} {len(service.worker_pids)}")

    async def _save(self) -> None:
        """Make a savepoint of the checkpoint that the coordinator holds meanwhile, as the driver's program does."""
        world, process = self._world, self._process
        if self._savepoints >= _MOST_SAVEPOINTS or world.plan.healed:
            return
        self._savepoints += 1
        loop: Any = SimpleNamespace(submit=asyncio.ensure_future)
        maker = SavepointMaker(self._service, loop, "sim://", lambda _: world.store.client(process))
        name = f"{process.name}-{self._savepoints}"
        world.savepoints.append(await maker._make("sim://", name, world.runtime(f"{process.name}.{name}"), None))


def check_progress(world: World, driver: str, status: RestoreStatus) -> None:
    """What a driver is told of all restores together never shows more than there is (I12)."""
    is_sound = 0 <= status.done <= status.total and (status.eta_s or 0.0) >= 0
    if not is_sound or (status.finished and status.done != status.total):
        world.check.fail("I12", f"{driver} shows {status}")


async def name_a_savepoint(world: World, store: ObjectStore, service: CoordinatorService, runtime: Runtime) -> None:
    """Name a savepoint to a query that has a checkpoint by now, which comes first, as a program does at each start."""
    if world.savepoints:
        with suppress(DstlError):
            found = await service.runs.start_from(
                SavepointRestore(store, store, world.savepoints[0].name, "claim", runtime)
            )
            if found is not None:
                world.check.fail("I6", f"{found.name} is restored, and the query has checkpoints of its own")
