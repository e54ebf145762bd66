"""This process and all that it has started, by what they are for, and their processor time and memory."""

import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
_PROC = Path("/proc")


def processor_ms() -> Counter[str]:
    """Return milliseconds so far by kind, as of :func:`processes`.

    Children that have ended count for the process that has waited for them.
    """
    found: Counter[str] = Counter()
    for kind, pids in processes().items():
        for pid in pids:
            with suppress(OSError):
                found[kind] += sum(map(int, _fields(pid)[11:15])) * _TICK_MS
    return found


def processes() -> dict[str, list[int]]:
    """Return those that are there by kind: ``jvm``, Python ``workers``, ``task_managers``, ``driver`` and ``others``.

    The driver is this process.
    """
    found = {"driver": [os.getpid()]}
    for pid, command in descendants(os.getpid()).items():
        found.setdefault(_kind(command), []).append(pid)
    return found


def resident_mb(pid: int) -> float:
    """Return a process's resident memory; 0 where it has ended."""
    try:
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_MB
    except OSError:
        return 0.0


def descendants(pid: int) -> dict[int, str]:
    """Return the commands of all that a process has started, and what those have, by pid. Linux only."""
    children: dict[int, dict[int, str]] = {}
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            children.setdefault(int(_fields(int(entry.name))[1]), {})[int(entry.name)] = command
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), {})
        found |= below
        waiting += below
    return found


def _fields(pid: int) -> list[str]:
    """Return a process's figures behind its name, which may hold blanks and parentheses itself."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _kind(command: str) -> str:
    # First: a JVM's options may name the others.
    if "java" in command.partition(" ")[0]:
        return "jvm"
    if "pyspark" in command and "daemon" in command:
        return "workers"
    return "task_managers" if "dstl.process" in command else "others"


def thread_ms(name: str) -> float:
    """Return milliseconds of processor time so far of this process's threads of a name."""
    clocks = [
        time.pthread_getcpuclockid(each.ident) for each in threading.enumerate() if each.name == name and each.ident
    ]
    return sum(map(time.clock_gettime, clocks)) * 1e3
