"""The Python worker that a task runs in: its host, by the name that Spark has for its executor, and its heap.

PySpark calls :func:`gc.collect` after each task. In a worker that has imported pyspark, pyarrow and pandas it walks all
that they have left, which never becomes garbage: it is frozen out of those collections.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_MOST_ANCESTORS = 8
"""Processes above a worker that are looked at: PySpark's daemon and the executor, with room for wrappers of either."""
_ENVIRONMENT = ("SPARK_EXECUTOR_POD_IP", "NM_HOST", "SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")

_LAST_FREEZE = 64
"""Number of the last task after which a worker freezes in any case: by then it has made what it keeps from task to
task."""

_tasks = 0
"""Tasks that this process has ended; a worker is forked before its first."""
_modules = 0
"""Modules that were there at the last freeze."""


@functools.cache
def executor_host() -> str:
    """Return the ``--hostname`` of the executor that has forked this process.

    Standalone masters, YARN and Kubernetes all pass it on the executor's command line. Where that cannot be read, it is
    what they put into the environment, and at last the machine's own name. Two workers on one machine that Spark knows
    by different addresses are two hosts.
    """
    for arguments in _ancestors(Path("/proc"), os.getpid()):
        if any(argument.endswith("ExecutorBackend") for argument in arguments) and "--hostname" in arguments[:-1]:
            return arguments[arguments.index("--hostname") + 1]
    return next((os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)), None) or socket.gethostname()


def _ancestors(proc: Path, pid: int) -> Iterator[list[str]]:
    """Yield the command lines of a process and those above it, as far as they may be read."""
    for _ in range(_MOST_ANCESTORS):
        try:
            yield (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # The name, in parentheses, may hold blanks and parentheses itself.
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 1:
            return


def count_task() -> None:
    """Count a task that has ended, and freeze the heap after the first, second, fourth and so on up to the 64th.

    Also after every task that has imported something, whichever it is: workers outlive queries. What is garbage is
    collected before, so that nothing of the task itself is kept. To be called at the task's end, in the thread that
    ran it.
    """
    global _tasks, _modules
    _tasks += 1
    if (_tasks <= _LAST_FREEZE and _tasks.bit_count() == 1) or len(sys.modules) > _modules:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)
