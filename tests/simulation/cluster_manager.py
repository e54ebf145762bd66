"""The cluster manager of a simulated world: it starts drivers, each with a size of its own, and replaces lost ones."""

from __future__ import annotations

import asyncio
import random

from dstl.checkpoint.fleet.resource_manager import ExecutorHosts
from dstl.options import (
    BatchingOptions,
    CheckpointOptions,
    HedgingOptions,
    MaterializationOptions,
    UploadOptions,
)
from dstl.rpc.protocol import Secret
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.clocked_model import CLOCK_HOLD_MS
from tests.simulation.driver import DriverActor, DriverOptions
from tests.simulation.faults import FaultKind
from tests.simulation.stage import CROWD
from tests.simulation.world import World

_SECRET = Secret.from_text("the secret of a simulated world\n")


_SLOTS = (1, 4, 12)
"""Of an executor's host; one is drawn."""
_SEEN_S = 5.0
"""How long a program that is refused is let run."""


class ClusterManager:
    """Starts the drivers of a world.

    Attributes:
        drivers: All that there have been.
    """

    def __init__(self, world: World) -> None:
        self.drivers: list[DriverActor] = []
        self._world = world
        self._checkpoints, self._task_manager = _draw_options(world.own_rng, world.grace_s, world.logs.max_parallelism)
        batching = self._task_manager.batching
        bases = self._task_manager.materialization
        # A run that waits for a second alone may end before all that its tables restore is there, and says so.
        world.materializes = bases.enabled and bases.publish_within_s > 1.0
        world.generations = bases.generations
        # Segments, what a log holds unasked, and all logs together: more than any world's changes.
        sizes = (batching.segment_size, batching.preemptive_persist_threshold, batching.byte_budget)
        world.is_roomy = min(sizes) >= 1 << 20

    def start_driver(self, batches: int | None = None, *, goes_back: bool = False) -> DriverActor:
        """Start a driver, whose query ends well after so many batches where a number is given.

        Args:
            batches: Their number.
            goes_back: It goes on from an older checkpoint where the newest one is damaged.
        """
        world, rng = self._world, self._world.own_rng
        process = world.process(f"driver-{len(self.drivers) + 1}")
        hosts = world.rng(f"{process.name}:hosts")
        slots = tuple(hosts.choice(_SLOTS) for _ in range(hosts.choice((1, 2, 2, 3)))) if world.launches else ()
        parallelism = rng.randrange(1, 4) * (CROWD if world.is_crowded else 3) // 3
        task_managers = rng.choice((1, 1, 2, 3))
        follows = bool(slots) and hosts.random() < 0.5
        world.task_managers = ExecutorHosts(len(slots), 0.0, slots).task_managers if follows else task_managers
        options = DriverOptions(
            operators=(*world.operators, *world.faces),
            parallelism=parallelism,
            task_managers=None if follows else task_managers,
            secret=_SECRET,
            checkpoints=self._checkpoints,
            task_manager=self._task_manager,
            together=rng.random() < 0.5,
            commit_attempts=rng.choice((8, 8, 3)),
            version=world.deploy(process.name),
            batches=batches,
            slots=slots,
            goes_back=goes_back,
        )
        before = self.drivers[-1].options if self.drivers else options
        if (before.parallelism, before.task_managers) != (options.parallelism, options.task_managers):
            world.count(FaultKind.RESCALE)
        driver = DriverActor(world, process, options)
        self.drivers.append(driver)
        world.drivers_started += 1
        world.trace("driver", f"{process.name} x{options.parallelism} on {world.task_managers}")
        process.spawn(driver.run(), "main")
        return driver

    def running_drivers(self) -> list[DriverActor]:
        """Return the drivers that are neither stopped nor dead."""
        return [driver for driver in self.drivers if driver.process.is_running]

    async def supervise(self) -> None:
        """Keep a driver running; a stopped one counts as lost after a while, and one whose program is outdated ends.

        Where it should not have been deployed at all, somebody has to see that first.
        """
        world, rng = self._world, self._world.rng("supervisor")
        while True:
            for driver in self.running_drivers():
                if world.is_outdated(driver.process.name):
                    seen_s = 0.0 if driver.options.version >= 0 else _SEEN_S
                    world.loop.call_later(seen_s, driver.process.kill, context=world.context)
            if not self.running_drivers():
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                if not self.running_drivers():
                    self.start_driver()
            await asyncio.sleep(1.0)


def _draw_options(
    rng: random.Random, grace_s: float, max_parallelism: int
) -> tuple[CheckpointOptions, TaskManagerConfig]:
    batching = BatchingOptions(
        segment_size=rng.choice((300, 5 << 20, 5 << 20)),
        preemptive_persist_threshold=rng.choice((150, 5 << 20, 5 << 20)),
        byte_budget=rng.choice((600, 4096, 1 << 20)),
        inline_threshold=rng.choice((0, 0, 900, 64 << 10)),
    )
    upload = UploadOptions(
        max_attempts=rng.choice((2, 5)),
        attempt_timeout_s=rng.choice((1.0, 5.0)),
        deadline_s=rng.choice((5.0, 20.0)),
    )
    hedging = HedgingOptions(enabled=rng.random() < 0.8, cold_delay_s=rng.choice((0.05, 0.5)))
    checkpoints = CheckpointOptions(
        timeout_s=rng.choice((10.0, 40.0, 200.0)),
        retained=rng.choice((2, 2, 3, 5)),
        task_manager_timeout_s=30.0,
        clean_interval_s=rng.choice((0.0, 10.0, 60.0)),
        clean_grace_s=grace_s,
        clock_hold_s=CLOCK_HOLD_MS / 1000,
        history=3,  # each record is read many times, and decides nothing by its history
    )
    materialization = MaterializationOptions(
        enabled=rng.random() < 0.8,
        interval_s=rng.choice((0.2, 1.0, 5.0)),
        min_log_bytes=1,
        min_pause_s=0.1,
        backoff_base_s=0.5,
        backoff_cap_s=5.0,
        timeout_s=20.0,
        generations=rng.choice((1, 2)),
        min_live_share=rng.choice((0.0, 0.5, 0.9)),
        publish_within_s=rng.choice((1.0, 30.0)),
    )
    given = {"batching": batching, "upload": upload, "hedging": hedging, "materialization": materialization}
    return checkpoints, TaskManagerConfig.resolve("sim://", "heap", max_parallelism, given, {}, {})
