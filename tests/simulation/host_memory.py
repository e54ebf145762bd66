"""The memory of the TaskManagers' host in a simulated world, which its other processes take for a while."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from dstl.taskmanager.memory_limit import MemoryUse, read_memory_use
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.scratch import make_directory

_SHORT = 0.12
"""Share of the worlds in which it runs short."""
_CONTAINER = 8 << 30
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class HostMemory:
    """The memory that TaskManagers read the use of. No world's state is large, so it is others that take it.

    It is read as the product reads it: from files of a host, and of a container on it, which are the world's.

    Args:
        loop: The world's.
        plan: The faults.
        rng: Whose memory runs short.
        count: Told whenever somebody finds that there is none left.
        trace: Takes a line for each.

    Attributes:
        full_until: When there is memory again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        plan: FaultPlan,
        rng: random.Random,
        count: Callable[[FaultKind], None],
        trace: Callable[[str, str], None],
    ) -> None:
        self.full_until = 0.0
        self._loop = loop
        self._plan = plan
        self._is_containers, self._is_v1 = rng.random() < 0.5, rng.random() < 0.5
        self._count = count
        self._trace = trace
        self._root: Path | None = None
        self._was_full: bool | None = None

    def use(self) -> MemoryUse:
        """Return what is in use now: everything, or nothing that matters."""
        if FaultKind.MEMORY_FULL not in self._plan.nemesis:
            return MemoryUse(0, None)
        is_full = not self._plan.healed and self._loop.time() < self.full_until
        if is_full:
            self._count(FaultKind.MEMORY_FULL)
            self._trace("memory", "none is left")
        root = self._root = self._root or make_directory("memory")
        if is_full != self._was_full:
            self._write(root, is_full)
        return read_memory_use(root / "proc", root / "groups")

    def remove(self) -> None:
        """Remove every file, when the world has ended. Idempotent."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _write(self, root: Path, is_full: bool) -> None:
        """Write what Linux shows: the host has less left, or the container, whose cached files can be given back."""
        self._was_full = is_full
        host, container = is_full and not self._is_containers, is_full and self._is_containers
        group = root / "groups" / ("memory/of-dstl" if self._is_v1 else "of-dstl")
        limit, current, cached = _V1 if self._is_v1 else _V2
        files = {
            root / "proc/meminfo": f"MemTotal: 67108864 kB\nMemAvailable: {0 if host else 33554432} kB\n",
            root / "proc/self/statm": "1000 100 10 1 0 50 0\n",
            root / "proc/self/cgroup": "4:cpu,memory:/of-dstl\n" if self._is_v1 else "0::/of-dstl\n",
            group / limit: f"{_CONTAINER}\n",
            group / current: f"{_CONTAINER}\n",
            group / "memory.stat": f"anon 4096\n{cached} {0 if container else _CONTAINER}\n",
        }
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def draw_memory(plan: FaultPlan, rng: random.Random) -> None:
    """Draw whether the host's memory runs short in a world, besides the plan's other faults."""
    if rng.random() < _SHORT:
        plan.nemesis = (*plan.nemesis, FaultKind.MEMORY_FULL)
