"""The TaskManagers of one driver in a simulated world: its own children, or those that tasks launch on their hosts."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from random import Random

from dstl.checkpoint.fleet.resource_manager import ExecutorHosts
from dstl.checkpoint.service import CoordinatorService
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.spark.application.fleet_launcher import START_S
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.faults import FaultKind
from tests.simulation.process import Process
from tests.simulation.taskmanager import TaskManagerActor
from tests.simulation.world import World

DRIVERS_HOST = "simulated"
_MOST_REPLACEMENTS = 100  # then something ends every one
_BETWEEN_EXECUTORS_S = (0.0, 0.8)
"""One is drawn: all executors are there, or come one by one."""
_COMES_TO_NOTHING = 0.25
"""Share of the launches on hosts that end at once, as where an interpreter is missing."""


class SimulatedFleet:
    """Starts TaskManagers, and ends those that are its driver's children with it.

    Args:
        world: The world.
        driver: The driver's process.
        rng: The driver's.
        secret: The application's.
        slots: Of each host with an executor, how many tasks it runs at once; none: the driver starts TaskManagers.
    """

    def __init__(self, world: World, driver: Process, rng: Random, secret: Secret, slots: tuple[int, ...]) -> None:
        self._world = world
        self._driver = driver
        self._rng = rng
        self._secret = secret
        self._slots = slots
        self._began = world.loop.time()
        self._children: dict[str, TaskManagerActor] = {}
        self._started = 0
        self._registered: Container[str] = ()
        self._config: TaskManagerConfig | None = None
        self._coordinator: Address | None = None
        self._forgetful = world.rng(f"{driver.name}:given-up")
        self._launches = world.rng(f"{driver.name}:launches")
        self._between_s = self._launches.choice(_BETWEEN_EXECUTORS_S)

    def start(self, service: CoordinatorService, config: TaskManagerConfig, count: int) -> None:
        """Start so many for a coordinator, unless hosts do that."""
        self._coordinator, self._config, self._registered = service.address, config, service.fleet.all
        for _ in range(0 if self._slots else count):
            self._start()

    def replace(self, member_id: str) -> None:
        """Start another child in place of one that is gone; of a host's its lifeline alone tells it."""
        gone = self._children.pop(member_id, None)
        if gone is None:
            return
        world = self._world
        if not gone.process.is_dead and not world.plan.healed and self._forgetful.random() < world.plan.lives_on:
            # Only its lifeline tells it, as soon as it runs and can be reached.
            world.count(FaultKind.TASK_MANAGER_LIVES_ON)
            world.trace("given-up", member_id)
        else:
            gone.process.kill()
        if self._started < _MOST_REPLACEMENTS:
            self._start()
        else:
            # Every query of this driver fails, for as long as somebody restarts it.
            self._driver.post(self._driver.kill)

    async def hosts(self) -> ExecutorHosts:
        """Return the hosts of the executors that have come so far, as Spark counts them."""
        seconds = self._world.loop.time() - self._began
        here = len(self._here)
        return ExecutorHosts(here, seconds - (here - 1) * self._between_s, self._slots[:here])

    def host(self) -> str:
        """Return the host that a new worker is on."""
        return f"host-{self._launches.randrange(len(self._here))}" if self._slots else DRIVERS_HOST

    def launch(self, host: str, member_id: str) -> None:
        """Start a TaskManager that no process is the parent of, as a task on a host does that is told to."""
        world, rng = self._world, self._launches
        world.trace("launch", f"{member_id} on {host}")
        if not world.plan.healed and rng.random() < _COMES_TO_NOTHING:
            world.count(FaultKind.LAUNCH_FAILURE)
            return
        self._make(f"{self._driver.name}.tm-{member_id}", member_id, host, rng)

    def driver_died(self) -> None:
        """Do what the operating system does after a driver: its children see their input closed."""
        for actor in self._children.values():
            actor.process.post(actor.parent_ended, delay=self._rng.uniform(0.0, 0.1))

    @property
    def _here(self) -> tuple[int, ...]:
        """The slots of those hosts whose executors have come."""
        seconds = self._world.loop.time() - self._began
        return self._slots[: 1 + int(seconds / self._between_s)] if self._between_s else self._slots

    def _start(self) -> None:
        self._started += 1
        member_id = f"{self._driver.name}.tm-{self._started}"
        actor = self._children[member_id] = self._make(member_id, member_id, DRIVERS_HOST, self._rng)
        # The launcher sees its children end, also those that have never registered.
        actor.process.on_death.append(lambda: self._driver.post(self.replace, member_id, delay=1.0))
        self._driver.post(self._look_whether_late, member_id, delay=START_S)

    def _look_whether_late(self, member_id: str) -> None:
        if member_id not in self._registered:
            self.replace(member_id)

    def _make(self, name: str, member_id: str, host: str, rng: Random) -> TaskManagerActor:
        assert self._coordinator is not None
        assert self._config is not None
        process = self._world.process(name)
        config = None if self._slots else self._config
        actor = TaskManagerActor(self._world, process, (host, member_id), config, self._secret)
        run = partial(actor.run, self._coordinator)
        process.post(lambda: process.spawn(run(), "main"), delay=rng.uniform(0.01, 0.5))
        return actor
