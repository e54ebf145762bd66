"""The memory of the TaskManagers' host in a simulated world, which its other processes take for a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from dstl.taskmanager.memory_limit import MemoryUse
from tests.simulation.faults import FaultKind, FaultPlan

_SHORT = 0.12
"""Share of the worlds in which it runs short."""


class HostMemory:
    """The memory that TaskManagers read the use of. No world's state is large, so it is others that take it.

    Args:
        loop: The world's.
        plan: The faults.
        count: Told whenever somebody finds that there is none left.
        trace: Takes a line for each.

    Attributes:
        full_until: When there is memory again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        plan: FaultPlan,
        count: Callable[[FaultKind], None],
        trace: Callable[[str, str], None],
    ) -> None:
        self.full_until = 0.0
        self._loop = loop
        self._plan = plan
        self._count = count
        self._trace = trace

    def use(self) -> MemoryUse:
        """Return what is in use now: everything, or nothing that matters."""
        if self._plan.healed or self._loop.time() >= self.full_until:
            return MemoryUse(0, None)
        self._count(FaultKind.MEMORY_FULL)
        self._trace("memory", "none is left")
        return MemoryUse(0, 0)


def draw_memory(plan: FaultPlan, rng: random.Random) -> None:
    """Draw whether the host's memory runs short in a world, besides the plan's other faults."""
    if rng.random() < _SHORT:
        plan.nemesis = (*plan.nemesis, FaultKind.MEMORY_FULL)
