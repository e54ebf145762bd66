"""The nemesis of a simulated world: it crashes and stops processes, starts second drivers, cuts network and store."""

from __future__ import annotations

import asyncio

from tests.simulation.cluster_manager import ClusterManager
from tests.simulation.damage import damage_base, damage_segment
from tests.simulation.faults import FaultKind
from tests.simulation.process import Process
from tests.simulation.world import World

_MOST_DRIVERS = 12
_HOST_RESTARTS = 0.15
"""Of those that are drawn: each ends every TaskManager, and none would come to anything."""
_MOST_ASLEEP = 2
_STEPS = {"driver": 600, "tm": 150, "worker": 60}


class Nemesis:
    """Strikes now and then until it is told to stop.

    Args:
        world: The world.
        cluster: Its drivers.
    """

    def __init__(self, world: World, cluster: ClusterManager) -> None:
        self._world = world
        self._cluster = cluster
        self._rng = world.rng("nemesis")

    async def run(self) -> None:
        """Strike for ever."""
        world = self._world
        if not world.plan.nemesis:
            return
        while True:
            await asyncio.sleep(self._rng.expovariate(1.0 / world.plan.nemesis_mean_s))
            self._strike(self._rng.choice(world.plan.nemesis))

    def _strike(self, kind: FaultKind) -> None:
        world, cluster, rng = self._world, self._cluster, self._rng
        match kind:
            case FaultKind.DRIVER_CRASH:
                self._crash([d.process for d in cluster.running_drivers()], "driver", kind)
            case FaultKind.DRIVER_PAUSE:
                self._pause([d.process for d in cluster.running_drivers()], "driver", kind)
            case FaultKind.TASK_MANAGER_CRASH:
                self._crash(world.running("tm"), "tm", kind)
            case FaultKind.TASK_MANAGER_PAUSE:
                self._pause(world.running("tm"), "tm", kind)
            case FaultKind.WORKER_CRASH:
                self._crash(world.running("worker"), "worker", kind)
            case FaultKind.WORKER_PAUSE:
                self._pause(world.running("worker"), "worker", kind)
            case FaultKind.SECOND_DRIVER:
                if cluster.running_drivers() and len(cluster.drivers) < _MOST_DRIVERS:
                    world.count(kind)
                    cluster.start_driver()
            case FaultKind.CONNECTION_RESET:
                if world.network.reset_one():
                    world.count(kind)
            case FaultKind.CLOCK_JUMP:
                world.jump_clock(rng)
            case FaultKind.CLOCK_YEAR:
                world.lose_a_year(rng, self._seconds())
            case FaultKind.HANG:
                self._sleep(world.running("tm"), "tm", kind)
            case FaultKind.LEASE_PAUSE:
                self._sleep([d.process for d in cluster.running_drivers()], "driver", kind)
            case FaultKind.PARTITION:
                living = [each for each in world.processes if not each.is_dead]
                if len(living) >= 2:
                    first, second = rng.sample(living, 2)
                    world.network.partition(first, second, self._seconds())
            case FaultKind.OUTAGE:
                world.store.outage_until = world.loop.time() + self._seconds() / 3
            case FaultKind.LOCAL_FULL:
                world.disk.full_until = world.loop.time() + self._seconds()
            case FaultKind.MEMORY_FULL:
                world.memory.full_until = world.loop.time() + self._seconds()
            case FaultKind.HOST_RESTART:
                if rng.random() < _HOST_RESTARTS:
                    world.count(kind)
                    world.trace("host-restarted", "")
                    world.restart_host()
            case FaultKind.DAMAGED_BASE:
                damage_base(world, rng)
            case FaultKind.DAMAGED_SEGMENT:
                damage_segment(world, rng, self._seconds())
            case FaultKind.FULL:
                world.store.full_until = world.loop.time() + self._seconds()

    def _crash(self, victims: list[Process], what: str, kind: FaultKind) -> None:
        if not victims:
            return
        victim = self._rng.choice(victims)

        def kill() -> None:
            if not self._world.plan.healed:
                self._world.count(kind)
                self._world.trace("killed", victim.name)
                victim.kill()

        self._world.light_fuse(victim, _STEPS[what], kill)

    def _pause(self, victims: list[Process], what: str, kind: FaultKind) -> None:
        if not victims:
            return
        world, victim, seconds = self._world, self._rng.choice(victims), self._seconds()
        dies = self._rng.random() < 0.2

        def stop() -> None:
            if not world.plan.healed:
                world.count(kind)
                world.trace("stopped", victim.name)
                victim.stop()
                world.loop.call_later(seconds, victim.kill if dies else victim.go_on, context=world.context)

        world.light_fuse(victim, _STEPS[what], stop)

    def _sleep(self, victims: list[Process], what: str, kind: FaultKind) -> None:
        """Stop a process for longer than the faults last; only few of a world."""
        world = self._world
        if not victims or len(world.asleep) >= _MOST_ASLEEP:
            return
        victim = self._rng.choice(victims)

        def stop() -> None:
            if not world.plan.healed:
                world.count(kind)
                world.trace("asleep", victim.name)
                victim.stop()
                world.asleep.append(victim)

        world.light_fuse(victim, _STEPS[what], stop)

    def _seconds(self) -> float:
        return self._rng.uniform(0.1, self._world.plan.longest_delay_s)
