"""One simulated world: a store, a network, processes, what blocks and an auditor; all follows from the seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from dstl.runtime import Runtime
from tests.simulation.audit import Auditor
from tests.simulation.blocking import BlockingStacks
from tests.simulation.faces import BRIEF
from tests.simulation.faults import FaultKind, FaultPlan, Strike
from tests.simulation.host_memory import HostMemory, draw_memory
from tests.simulation.local_disk import SimulatedDisk, draw_disk, uses_disk
from tests.simulation.network import Network, NetworkLoop
from tests.simulation.process import Process
from tests.simulation.spark import WALL_CLOCK
from tests.simulation.stage import Stage
from tests.simulation.store import SimulatedStore, Stored

_YEAR_S = 366 * 86400.0
_DAMAGED = 0.8
"""Share of the worlds in which bases are damaged: it strikes where one is there, and is read before all heals."""
_DAMAGED_SEGMENTS = 0.3
"""Share of those in which segments are, until a replica helps."""
_EXPIRES = 0.5
"""Share of those with tables in files that have an operator whose values expire, and are swept out of them."""
_BRIEF = 0.3
"""Share of the worlds that have an operator over columns whose values expire."""
_THREADED = 0.5
"""Share of the worlds in which work in a thread takes time."""


class _Clock:
    """A process's clock: the world's time, and a wall clock that may be wrong; told whenever somebody reads that."""

    def __init__(self, loop: asyncio.AbstractEventLoop, skew: float, count: Callable[[FaultKind], None]) -> None:
        self._loop = loop
        self._count = count
        self._began_off = bool(skew)
        self.skew = skew
        self.jumped = False
        self.years = 0

    def now(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        wrong = (self._began_off, self.jumped, bool(self.years))
        for kind, is_wrong in zip(
            (FaultKind.CLOCK_SKEW, FaultKind.CLOCK_JUMP, FaultKind.CLOCK_YEAR), wrong, strict=True
        ):
            if is_wrong:
                self._count(kind)
        # No clock is before 1970, where one begins that has lost its battery.
        return max(0.0, self._loop.time() + self.skew + self.years * _YEAR_S)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class World(Stage):
    """Everything that one seed makes, but for the drivers.

    Attributes:
        check: The auditor.
        network: All connections.
        store: All objects.
        disk: The local disk of the TaskManagers' host.
        memory: Its memory.
        stacks: Run blocking code.
        processes: All processes that there have been.
    """

    def __init__(
        self,
        loop: NetworkLoop,
        seed: int,
        *,
        plan: FaultPlan | None = None,
        keep_trace: bool = False,
    ) -> None:
        super().__init__(loop, seed, plan=plan, keep_trace=keep_trace)
        objects: dict[str, Stored] = {}
        self.check = Auditor(self, objects)
        self.network = loop.network = Network(loop, self.rng("network"), lambda name: self.count(FaultKind(name)))
        self.store = SimulatedStore(
            loop, self.rng("store"), self.plan, self.check, self.count, self.trace, objects=objects
        )
        if self.plan.strike is not None and self.plan.strike.where in ("connection", "message"):
            self.network.strike = self.plan.strike
        disk = self.rng("disk")
        is_used = draw_disk(self.plan, disk) if plan is None else uses_disk(plan)
        self.store.damaged = self.damaged
        self.disk = SimulatedDisk(loop, disk, self.plan, self.count, self.trace, is_used=is_used)
        if self.disk.in_files and WALL_CLOCK not in self.faces and self.rng("expiry").random() < _EXPIRES:
            self.faces.append(WALL_CLOCK)
        if plan is None:
            draw_memory(self.plan, self.rng("memory"))
            if self.rng("damaged-bases").random() < _DAMAGED:
                self.plan.nemesis = (*self.plan.nemesis, FaultKind.DAMAGED_BASE)
            if self.rng("damaged-segments").random() < _DAMAGED_SEGMENTS:
                self.plan.nemesis = (*self.plan.nemesis, FaultKind.DAMAGED_SEGMENT)
        self.memory = HostMemory(loop, self.plan, self.rng("memory-of"), self.count, self.trace)
        self.stacks = BlockingStacks()
        self.processes: list[Process] = []
        self._clocks: list[_Clock] = []
        threads = self.rng("threads")
        loop.thread_rng = threads if threads.random() < _THREADED else None
        self._skewed = self.own_rng.random() < 0.3
        self.clocks_set += self._skewed
        brief = self.rng("brief")
        if brief.random() < _BRIEF and not self.is_crowded:
            self.faces.append(brief.choice(BRIEF))
        loop.set_exception_handler(self._loop_error)

    @property
    def stores(self) -> list[SimulatedStore]:
        """Every store there is: one."""
        return [self.store]

    def runtime(self, name: str) -> Runtime:
        """Return the runtime of a process."""
        skew = 0.0
        if self._skewed:
            skew = self.rng(f"{name}:skew").uniform(-3600, 3600)
        clock = _Clock(self.loop, skew, self.count)
        self._clocks.append(clock)
        return Runtime(clock, self.rng(f"{name}:rng"), self.rng(f"{name}:ids"))

    def jump_clock(self, rng: random.Random) -> None:
        """Set the wall clock of one process, any one, up to an hour forward or back."""
        if self._clocks:
            clock, jump_s = rng.choice(self._clocks), rng.uniform(-3600, 3600)
            clock.skew, clock.jumped = clock.skew + jump_s, True
            self.clocks_set += 1

    def lose_a_year(self, rng: random.Random, seconds: float) -> None:
        """Set the wall clock of one process a year forward or back, and right again after some seconds."""
        if not self._clocks:
            return
        clock = rng.choice(self._clocks)

        def set_years(years: int) -> None:
            clock.years = years
            self.clocks_set += 1

        set_years(rng.choice((-1, 1)))
        self.loop.call_later(seconds, set_years, 0, context=self.context)

    def process(self, name: str) -> Process:
        """Return a new process."""
        process = Process(self.loop, name)
        strike = self.plan.strike
        if strike is not None and strike.where == name:
            process.fuse, process.on_fuse = strike.nth - 1, lambda: self._strike(process, strike)
        self.processes.append(process)
        return process

    def running(self, kind: str) -> list[Process]:
        """Return the running processes of a kind: ``tm`` or ``worker``."""
        return [each for each in self.processes if each.is_running and f".{kind}-" in each.name]

    def restart_host(self) -> None:
        """End every TaskManager at once, and with them what their host's disk had not synced."""
        for each in self.processes:
            if ".tm-" in each.name:
                each.kill()
        self.disk.lose_power()

    def light_fuse(self, process: Process, most_steps: int, action: Callable[[], None]) -> None:
        """Let something happen to a process between two of its next steps."""
        process.fuse = self.own_rng.randrange(most_steps)
        process.on_fuse = action

    def _strike(self, process: Process, strike: Strike) -> None:
        strike.steps = strike.nth
        self.trace("strike", f"{process.name} {strike.what}")
        if strike.what is FaultKind.TASK_MANAGER_PAUSE:
            process.stop()
            self.loop.call_later(self.plan.longest_delay_s, process.go_on, context=self.context)
        else:
            process.kill()

    def _loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.check.process_error(str(context.get("message")), context.get("exception"))
