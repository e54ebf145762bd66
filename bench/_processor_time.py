"""Processor time of this process and all that it has started, by what they are for."""

import os
import threading
import time
from collections import Counter
from pathlib import Path

_TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


def processor_ms() -> Counter[str]:
    """Return milliseconds so far by kind: ``jvm``, Python ``workers``, ``task_managers``, ``driver`` and ``others``.

    The driver is this process. Children that have ended count for the process that has waited for them. Linux only.
    """
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold blanks and parentheses itself.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = sum(map(int, fields[11:15])) * _TICK_MS
    found: Counter[str] = Counter()
    for pid, milliseconds in spent.items():
        if _descends(pid, parents):
            found[_kind(pid)] += milliseconds
    return found


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid and pid != os.getpid():
        pid = parents.get(pid, 0)
    return bool(pid)


def _kind(pid: int) -> str:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return "ended"
    if pid == os.getpid():
        return "driver"
    # First: a JVM's options may name the others.
    if "java" in command.partition("\0")[0]:
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
