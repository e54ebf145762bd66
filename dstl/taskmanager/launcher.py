"""Starting TaskManagers: the driver's own as child processes, an executor's as detached ones.

What a TaskManager must know to reach its coordinator, with the application's secret, goes through its standard input:
it appears in no process list and no environment. A child's pipe is also its lease of life: when the parent ends,
however it ends, the pipe closes and the child stops. A detached one outlives the worker that has started it, and the
executor, and ends when its coordinator's connection does. This module is imported by workers.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import IO, Any

from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret

__all__ = ["Invitation", "TaskManagerProcess", "launch_detached"]

_log = logging.getLogger(__name__)
_COMMAND = [sys.executable, "-P", "-m", "dstl.taskmanager"]
"""With ``-P`` no module comes from the working directory, which others may write to."""

_detached: list[subprocess.Popen[str]] = []
"""Those that this process has started and that may still run; kept, so that an ended one is reaped by the next."""


@dataclass(frozen=True)
class Invitation:
    """The facts with which a process becomes a TaskManager; the coordinator tells it the rest.

    Attributes:
        member_id: Its name in the fleet.
        coordinator: Address to enlist at.
        secret: The application's.
        host: Address of its host as others reach it.
        listen_tcp: Listen on a TCP port as well as on the unix socket.
        detached: Its standard input is no lease of life.
        retry_s: Seconds for which it tries again when no coordinator answers.
    """

    member_id: str
    coordinator: Address
    secret: Secret
    host: str = "127.0.0.1"
    listen_tcp: bool = False
    detached: bool = False
    retry_s: float = 0.0

    def to_json(self) -> str:
        """Return one line of JSON, secret included: for a pipe, never for a log."""
        fields: dict[str, Any] = {
            name: getattr(self, name) for name in ("member_id", "host", "listen_tcp", "detached", "retry_s")
        }
        fields["coordinator"] = asdict(self.coordinator)
        fields["secret"] = base64.b64encode(self.secret.reveal()).decode()
        return json.dumps(fields)

    @staticmethod
    def from_json(line: str) -> Invitation:
        """Rebuild an invitation; the inverse of :meth:`to_json`."""
        fields = json.loads(line)
        fields["coordinator"] = Address(**fields["coordinator"])
        fields["secret"] = Secret(base64.b64decode(fields["secret"]))
        return Invitation(**fields)


class TaskManagerProcess:
    """A TaskManager that this process has started.

    Its log goes to this process's standard error. A session of its own keeps a terminal's Ctrl-C from it, so that the
    driver can still make its last checkpoint.
    """

    def __init__(self, invitation: Invitation) -> None:
        self.invitation = invitation
        self._process: subprocess.Popen[str] = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        _hand_over(self._process, invitation)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def wait(self) -> None:
        """Return when the process has ended, whoever ends it."""
        self._process.wait()

    def stop(self, timeout: float = 10.0) -> None:
        """Close the pipe, wait for the process to end by itself, and kill it when it does not. Idempotent."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.close()
            except BrokenPipeError:
                _log.debug("TaskManager %d had closed its input", self._process.pid)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            _log.warning("TaskManager %d does not end: killing it", self._process.pid)
            self._process.kill()
            self._process.wait()


def launch_detached(invitation: Invitation) -> int:
    """Start a TaskManager that outlives this process, and return its process id.

    Called in a PySpark worker. It finds the modules where this process does, logs to the executor's standard error
    while the executor lives, and is not handed what Spark has put into the environment for workers to authenticate.
    """
    _detached[:] = [process for process in _detached if process.poll() is None]
    environment = {k: v for k, v in os.environ.items() if not (k.startswith(("PYTHON_", "PYSPARK_")) and "SECRET" in k)}
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    process: subprocess.Popen[str] = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd="/",
        env=environment,
    )
    _detached.append(process)
    _hand_over(process, invitation)
    assert process.stdin is not None
    process.stdin.close()
    return process.pid


def _hand_over(process: subprocess.Popen[str], invitation: Invitation) -> None:
    pipe: IO[str] | None = process.stdin
    assert pipe is not None
    try:
        pipe.write(invitation.to_json() + "\n")
        pipe.flush()
    except BrokenPipeError:
        # It has died already; whoever waits for its registration will say so.
        _log.warning("TaskManager %s ended at once", invitation.member_id)
