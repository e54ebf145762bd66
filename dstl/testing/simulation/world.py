"""One simulated world: a store, a network, processes, a nemesis, an auditor; everything follows from the seed."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from dstl.options import (
    BatchingOptions,
    CheckpointOptions,
    HedgingOptions,
    MaterializationOptions,
    UploadOptions,
)
from dstl.rpc.protocol import Secret
from dstl.runtime import Runtime
from dstl.taskmanager.config import TaskManagerConfig
from dstl.testing.simulation.audit import Auditor
from dstl.testing.simulation.driver import DriverActor, DriverOptions
from dstl.testing.simulation.faults import FaultKind, FaultPlan, draw_plan
from dstl.testing.simulation.network import Network, NetworkLoop
from dstl.testing.simulation.process import Process
from dstl.testing.simulation.spark import QueryLogs
from dstl.testing.simulation.store import SimulatedStore

__all__ = ["World"]

_SECRET = Secret(b"the secret of a simulated world")
_MAX_PARALLELISM = 8
_MANY = 48


class _Clock:
    """A process's clock: the world's time, and a wall clock that may be wrong."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew: float) -> None:
        self._loop = loop
        self._skew = skew

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._loop.time() + self._skew

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class World:
    """Everything that one seed makes.

    Attributes:
        plan: Its faults.
        logs: Spark's checkpoint directory and the right state.
        check: The auditor.
        violated: Set with the first violation.
        fired: How often each fault has happened.
    """

    def __init__(
        self, loop: NetworkLoop, seed: int, *, plan: FaultPlan | None = None, keep_trace: bool = False
    ) -> None:
        self.seed = seed
        self.loop = loop
        self.began = loop.time()
        self.context = copy_context()
        rng = self.rng("world")
        self.plan = plan if plan is not None else draw_plan(self.rng("plan"))
        self.fired: Counter[FaultKind] = Counter()
        self.lines: list[str] | None = [] if keep_trace else None
        self._digest = hashlib.blake2b(digest_size=16)
        # Many tasks of an operator now and then; drawn apart, so that other seeds stay what they were.
        self.is_crowded = self.rng("crowd").random() < 0.1
        self.logs = QueryLogs(rng.choice((4, 12)), _MANY if self.is_crowded else _MAX_PARALLELISM)
        self.check = Auditor(self)
        self.violated = asyncio.Event()
        self.may_corrupt = FaultKind.SHORT_GET in self.plan.per_request
        self.network = loop.network = Network(loop, self.rng("network"), lambda name: self.count(FaultKind(name)))
        self.store = SimulatedStore(loop, self.rng("store"), self.plan, self.check, self.count, self.trace)
        self.operators = ("one", "two")[: rng.choice((1, 1, 2))]
        self.drivers: list[DriverActor] = []
        self.processes: list[Process] = []
        self.restores = self.replays = self.cleanings = self.materialized = self.given_up = 0
        self.grace_s = 2 * self.plan.longest_delay_s + 180.0
        self._rng = rng
        self._skewed = rng.random() < 0.3
        self._options = self._draw_options(rng)
        loop.set_exception_handler(self._loop_error)

    def rng(self, name: str) -> random.Random:
        """Return a generator of its own for a part of the world, so that parts do not disturb each other."""
        return random.Random(f"{self.seed}:{name}")

    def runtime(self, name: str) -> Runtime:
        """Return the runtime of a process."""
        skew = 0.0
        if self._skewed:
            skew = self.rng(f"{name}:skew").uniform(-3600, 3600)
            self.count(FaultKind.CLOCK_SKEW)
        return Runtime(_Clock(self.loop, skew), self.rng(f"{name}:rng"), self.rng(f"{name}:ids"))

    def process(self, name: str) -> Process:
        """Return a new process."""
        process = Process(self.loop, name)
        self.processes.append(process)
        return process

    def count(self, kind: FaultKind) -> None:
        """Note that a fault has happened."""
        self.fired[kind] += 1

    def trace(self, what: str, detail: str) -> None:
        """Add a line to the trace, whose digest identifies the run."""
        line = f"{self.loop.time() - self.began:.9f} {what} {detail}"
        self._digest.update(line.encode() + b"\n")
        if self.lines is not None:
            self.lines.append(line)

    @property
    def trace_hash(self) -> str:
        """Digest of everything that was traced so far."""
        return self._digest.hexdigest()

    def start_driver(self) -> DriverActor:
        """Start a driver, with a size of its own."""
        rng = self._rng
        process = self.process(f"driver-{len(self.drivers) + 1}")
        options = DriverOptions(
            operators=self.operators,
            parallelism=rng.randrange(1, 4) * (_MANY // 3 if self.is_crowded else 1),
            task_managers=rng.choice((1, 1, 2, 3)),
            secret=_SECRET,
            checkpoints=self._options[0],
            task_manager=self._options[1],
            together=rng.random() < 0.5,
            commit_attempts=rng.choice((8, 8, 3)),
        )
        before = self.drivers[-1].options if self.drivers else options
        if (before.parallelism, before.task_managers) != (options.parallelism, options.task_managers):
            self.count(FaultKind.RESCALE)
        driver = DriverActor(self, process, options)
        self.drivers.append(driver)
        self.trace("driver", f"{process.name} x{options.parallelism} on {options.task_managers}")
        process.spawn(driver.run(), "main")
        return driver

    def running_drivers(self) -> list[DriverActor]:
        """Return the drivers that are neither stopped nor dead."""
        return [driver for driver in self.drivers if driver.process.is_running]

    def running(self, kind: str) -> list[Process]:
        """Return the running processes of a kind: ``tm`` or ``worker``."""
        return [each for each in self.processes if each.is_running and f".{kind}-" in each.name]

    def light_fuse(self, process: Process, most_steps: int, action: Callable[[], None]) -> None:
        """Let something happen to a process between two of its next steps."""
        process.fuse = self._rng.randrange(most_steps)
        process.on_fuse = action

    def _draw_options(self, rng: random.Random) -> tuple[CheckpointOptions, TaskManagerConfig]:
        batching = BatchingOptions(
            persist_delay_s=rng.choice((0.0, 0.010)),
            persist_size_threshold=rng.choice((500, 10 << 20)),
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
            clean_grace_s=self.grace_s,
        )
        materialization = MaterializationOptions(
            enabled=rng.random() < 0.8,
            interval_s=rng.choice((0.2, 1.0, 5.0)),
            min_log_bytes=1,
            min_pause_s=0.1,
            start_jitter_s=rng.choice((0.0, 1.0)),
            backoff_base_s=0.5,
            backoff_cap_s=5.0,
            timeout_s=20.0,
            generations=rng.choice((1, 2)),
            min_live_share=rng.choice((0.0, 0.5, 0.9)),
            publish_within_s=rng.choice((1.0, 30.0)),
        )
        config = TaskManagerConfig(
            "sim://",
            max_parallelism=self.logs.max_parallelism,
            batching=batching,
            upload=upload,
            hedging=hedging,
            materialization=materialization,
        )
        return checkpoints, config

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.check.process_error(str(context.get("message")), context.get("exception"))
