"""The local disk of the TaskManagers' host in a simulated world: full for a while, broken, or cut from its power.

The files are real ones in a directory of the world, so that the product's own cache, fetched bases and RocksDB tables
work on them; what fails is the access that the product announces (``materializer.local_disk``).
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dstl.options import RocksDBOptions
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import table_directory, table_opener
from materializer.local_disk import Access, listen
from materializer.tables import RocksDBStateTable, StateTable
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.process import Process
from tests.simulation.scratch import make_directory

_CACHE_BYTES = 1 << 20
# Nothing is merged, and nothing flushed but for a snapshot: the engine does both in threads of its own, whose time is
# not the world's, and its estimate of a table's entries, by which bases are made, is another before and after.
_TABLES = RocksDBOptions(
    block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20, max_runs=10_000, background_jobs=1, max_open_files=16
)
_IN_USE = 0.16
"""Share of the worlds that use one."""
_NEMESIS = (FaultKind.LOCAL_FULL, FaultKind.HOST_RESTART)
_ERRNO = {
    FaultKind.LOCAL_FULL: errno.ENOSPC,
    FaultKind.LOCAL_FULL_IN_BASE: errno.ENOSPC,
    FaultKind.LOCAL_ERROR: errno.EIO,
}


class SimulatedDisk:
    """The disk of one world.

    Args:
        loop: The world's.
        rng: What lies on it, and what happens to it.
        plan: The faults.
        count: Told the kind of each fault that happened.
        trace: Takes a line for each.
        is_used: Whether tables, or copies of bases, lie on it.

    Attributes:
        is_used: As given.
        in_files: Whether tables lie on it.
        full_until: When there is room again.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        plan: FaultPlan,
        count: Callable[[FaultKind], None],
        trace: Callable[[str, str], None],
        *,
        is_used: bool,
    ) -> None:
        self.is_used = is_used
        self.full_until = 0.0
        self.in_files = is_used and rng.random() < 0.5
        self._caches = self.is_used and (not self.in_files or rng.random() < 0.5)
        self._loop = loop
        self._rng = rng
        self._plan = plan
        self._count = count
        self._trace = trace
        self._root: Path | None = None
        self._refusing: set[Path] = set()

    def attach(self, process: Process) -> None:
        """Let a process's accesses to the disk fail from now on."""
        if self.is_used:
            process.context.run(listen, self._access)

    def configure(self, config: TaskManagerConfig) -> TaskManagerConfig:
        """Return the configuration of a TaskManager on this host."""
        if not self.is_used:
            return config
        materialization, batching = config.materialization, config.batching
        if self._caches:
            options = {"cache_bytes": _CACHE_BYTES, "cache_directory": str(self._directory() / "cache")}
            materialization = materialization.model_copy(update=options)
        if self.in_files and batching.byte_budget == 4096:
            # Sizes of files differ from run to run by some bytes; no decision may hang on them.
            batching = batching.model_copy(update={"byte_budget": 600})
        return replace(config, materialization=materialization, batching=batching)

    def opener(self, process: Process) -> Callable[[str], StateTable]:
        """Return what opens the tables of a TaskManager."""
        if not self.in_files:
            return table_opener("heap", Path())
        parent, numbers = self._directory() / process.name, itertools.count()
        opened: list[RocksDBStateTable] = []

        def open_table(operator: str) -> StateTable:
            opened.append(RocksDBStateTable(table_directory(parent, operator, next(numbers)), _TABLES))
            return opened[-1]

        def close() -> None:
            for table in opened:
                table.close()

        process.on_death.append(close)
        return open_table

    def lose_power(self) -> None:
        """Take from the files that outlive their process what was not synced: some of it, or all."""
        cache = self._directory() / "cache" / "dstl-bases"
        for path in sorted(cache.iterdir()) if cache.exists() else ():
            drawn, size = self._rng.random(), path.stat().st_size
            if drawn < 0.2:
                os.truncate(path, self._rng.randrange(size) if size else 0)
            elif drawn < 0.4:
                path.write_bytes(bytes(size))
            elif drawn < 0.6:
                path.unlink()

    def remove(self) -> None:
        """Remove every file, when the world has ended. Idempotent."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    def _directory(self) -> Path:
        if self._root is None:
            self._root = make_directory("disk")
        return self._root

    def _access(self, how: Access, path: Path) -> None:
        kind = None
        writes = how in ("write", "table-write")
        if how == "table-write" and path in self._refusing:
            # As RocksDB does: with room again, too.
            raise OSError(errno.ENOSPC, "the table has failed before (simulated)", str(path))
        if self._plan.healed:
            return
        if writes and self._loop.time() < self.full_until:
            kind = FaultKind.LOCAL_FULL
        elif how == "write" and self._plan.full_in_base and self._rng.random() < self._plan.full_in_base:
            # What is written here beside the tables is bases: fetched, kept, or linked to become one.
            kind, self.full_until = FaultKind.LOCAL_FULL_IN_BASE, self._loop.time() + self._rng.uniform(0.1, 5.0)
        elif self._rng.random() < self._plan.local_errors:
            kind = FaultKind.LOCAL_ERROR
        if kind is None:
            return
        self._count(kind)
        self._trace("disk", f"{kind} {how}")
        if how == "table-write":
            self._refusing.add(path)
        raise OSError(_ERRNO[kind], f"{os.strerror(_ERRNO[kind])} (simulated)", str(path))


def draw_disk(plan: FaultPlan, rng: random.Random) -> bool:
    """Draw whether a world uses its local disk, and what happens to it besides the plan's other faults."""
    if rng.random() >= _IN_USE:
        return False
    plan.local_errors = rng.choice((0.0, 0.01, 0.08))
    plan.full_in_base = rng.choice((0.0, 0.05, 0.3))
    plan.nemesis = (*plan.nemesis, *(kind for kind in _NEMESIS if rng.random() < 0.6))
    return True


def uses_disk(plan: FaultPlan) -> bool:
    """Return whether a plan has faults of the local disk."""
    return plan.local_errors > 0 or plan.full_in_base > 0 or not set(_NEMESIS).isdisjoint(plan.nemesis)
