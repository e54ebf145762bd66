"""The limit of a TaskManager's memory: state that would outgrow it is refused while there is still memory to say so.

Tables in memory grow with the state, and a host that runs out of memory kills a process without a word: Spark sees a
lost TaskManager, which the next restore makes as large again. So changes are refused before they are taken, and a
restore stops on the way.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dstl.errors import StateTooLarge
from dstl.options import MemoryOptions

_LOOK_BYTES = 1 << 20  # a look takes 50 us, a small part of what the write of so many bytes takes
_UNLIMITED = 1 << 60  # the first version of control groups says "no limit" by a number above it
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Of a control group: the file with its limit, that with its use, and the row of its statistics with what files it has
cached and can give back."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of this process, and of where it runs, in bytes.

    Attributes:
        resident: Of this process.
        available: That the host, or the container where that is less, has left; None where it does not tell.
    """

    resident: int
    available: int | None


class MemoryLimit:
    """Refuses what would outgrow the memory. One event loop.

    Args:
        options: The limits.
        read: Returns the memory in use at this moment.
    """

    def __init__(self, options: MemoryOptions, read: Callable[[], MemoryUse]) -> None:
        self._options = options
        self._read = read
        self._unlooked = _LOOK_BYTES

    def is_due(self, nbytes: int) -> bool:
        """Return whether to look again, now that so many bytes more come: looking at every small write costs more."""
        self._unlooked += nbytes
        return self._unlooked >= _LOOK_BYTES

    def check(self, growth: int, what: str) -> None:
        """Look at the memory.

        Args:
            growth: Bytes that what is about to be taken will need.
            what: What it is, for the error: ``operator visits: changes``.

        Raises:
            StateTooLarge: There is no room for it.
        """
        self._unlooked = 0
        options, use = self._options, self._read()
        if options.limit_bytes is not None and use.resident + growth > options.limit_bytes:
            why = f"memory.limit_bytes allows {_mb(options.limit_bytes)}"
        elif use.available is not None and options.reserve_bytes and use.available - growth < options.reserve_bytes:
            why = (
                f"its host or container has {_mb(use.available)} left, of which memory.reserve_bytes keeps "
                f"{_mb(options.reserve_bytes)}"
            )
        else:
            return
        self._unlooked = _LOOK_BYTES  # whatever comes next is looked at
        raise StateTooLarge(
            f"{what} of {_mb(growth)} would outgrow the TaskManager's memory: it has {_mb(use.resident)}, and {why}. "
            "The last checkpoint is kept. Use table='rocksdb', more TaskManagers on other hosts or a time to live, or "
            "give it more memory"
        )


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return this process's resident memory; where only the highest there was is known, that."""
    try:
        return int((proc / "self" / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return highest if sys.platform == "darwin" else highest * 1024


def read_memory_use(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryUse:
    """Return the memory in use; some 50 us, and as many more for each control group around the process.

    Args:
        proc: Linux's directory of processes.
        cgroups: Its directory of control groups, of version 2 or 1.
    """
    left = [_host_available(proc), *(_group_available(*group) for group in _groups(proc, cgroups))]
    return MemoryUse(resident_bytes(proc), min((each for each in left if each is not None), default=None))


def _host_available(proc: Path) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the control group of the process and those around it, for each may have a limit, and their files' names.

    In a container the host's path of the group may stand there, below which nothing is: its own is then the root.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            yield group, names
            if group == root:
                break


def _group_available(group: Path, names: tuple[str, str, str]) -> int | None:
    """Return what a control group has left; None where it has no limit."""
    limit, current, cached = names
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        if most == "max" or int(most) >= _UNLIMITED:
            return None
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((group / current).read_text(encoding="ascii")) - int(stat.get(cached, 0))
        return int(most) - used
    except (OSError, ValueError):
        return None


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"
