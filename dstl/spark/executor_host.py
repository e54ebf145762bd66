"""The host of a Python worker, by the name that Spark has for its executor."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path

__all__ = ["executor_host"]

_MOST_ANCESTORS = 8
_ENVIRONMENT = ("SPARK_EXECUTOR_POD_IP", "NM_HOST", "SPARK_LOCAL_HOSTNAME", "SPARK_LOCAL_IP")


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
