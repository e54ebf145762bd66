"""The facts with which a process becomes a TaskManager or the coordinator of files, its answer, and its launch.

Both are one line: base64 of msgpack, on standard input and output. They hold the secret: for a pipe, never for a log.

What a TaskManager must know to reach its coordinator, with the application's secret, goes through its standard input:
it appears in no process list and no environment. A child's pipe is also its lease of life: when the parent ends,
however it ends, the pipe closes and the child stops. A detached one outlives the worker that has started it, and the
executor, and ends when its coordinator's connection does. This module is imported by workers.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import msgpack

from dstl.errors import DstlError, Invalid
from dstl.rpc.client import Address
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret


@dataclass(frozen=True)
class LaunchSpec:
    """Says what a process is to be; a TaskManager is told the rest by its coordinator.

    Attributes:
        member_id: Its name in the fleet; empty for a coordinator of files.
        coordinator: Where it enlists; None for a coordinator of files, which enlists nowhere.
        secret: The application's.
        host: This host as others reach it, and as Spark names it.
        bind: Address of this host at which it listens for others; empty: on its unix socket alone.
        detached: Its standard input is no lease of life.
        retry_s: Seconds for which it tries again when no coordinator answers.
        version: Of the jar whose JVM launches it; empty where none does.
        options: Spark's ``spark.dstl.*`` settings, for a coordinator of files.
    """

    member_id: str
    coordinator: Address | None
    secret: Secret
    host: str = "127.0.0.1"
    bind: str = ""
    detached: bool = False
    retry_s: float = 0.0
    version: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """Return one line of text, secret included."""
        told: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        where = self.coordinator
        told |= {"coordinator": where and [where.host, where.port], "secret": self.secret.reveal()}
        return _line(told)

    @staticmethod
    def from_line(line: bytes) -> LaunchSpec:
        """Read a launch spec; the inverse of :meth:`to_line`. Fields that are missing have their defaults.

        Raises:
            Invalid: It is not a launch spec. What it says is not shown, for it may hold the secret.
        """
        try:
            told: dict[str, Any] = msgpack.unpackb(base64.b64decode(line.strip(), validate=True), raw=False)
            where = told["coordinator"]
            told["coordinator"] = None if where is None else Address(str(where[0]), int(where[1]))
            told["secret"] = Secret(told["secret"])
            told["options"] = {str(name): str(value) for name, value in told.get("options", {}).items()}
            return LaunchSpec(**told)
        except (ValueError, TypeError, LookupError, AttributeError, binascii.Error, msgpack.UnpackException):
            raise Invalid("the first line of standard input is not a launch spec of DSTL") from None


def answer_line(socket: str) -> bytes:
    """Return what a process says of itself once it serves: where it listens."""
    return _line({"socket": socket, "protocol": PROTOCOL_VERSION})


def refusal_line(error: DstlError) -> bytes:
    """Return what a process says that does not serve: why."""
    return _line({"error": f"dstl.errors.{type(error).__name__}: {error}"})


def _line(told: dict[str, Any]) -> bytes:
    return base64.b64encode(msgpack.packb(told)) + b"\n"


_log = logging.getLogger(__name__)
_COMMAND = [sys.executable, "-P", "-m", "dstl.process"]
"""With ``-P`` no module comes from the working directory, which others may write to."""

_detached: list[subprocess.Popen[bytes]] = []
"""Those that this process has started and that may still run; kept, so that an ended one is reaped by the next."""


class TaskManagerProcess:
    """A TaskManager that this process has started.

    Its log goes to this process's standard error. A session of its own keeps a terminal's Ctrl-C from it, so that the
    driver can still make its last checkpoint.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._process = _launch(spec, os.environ)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> bool:
        """Return True when the process has ended, for whatever reason, or False after ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout: float = 10.0) -> None:
        """Close the pipe, wait for the process to end by itself, and kill it when it does not. Idempotent."""
        _close_input(self._process)
        if not self.wait(timeout):
            _log.warning("TaskManager %d does not end: killing it", self._process.pid)
            self._process.kill()
            self._process.wait()


def launch_detached(spec: LaunchSpec) -> int:
    """Start a TaskManager that outlives this process, and return its process id.

    Called in a PySpark worker. It finds the modules where this process does, logs to the executor's standard error
    while the executor lives, and is not handed what Spark has put into the environment for workers to authenticate.
    """
    _detached[:] = [process for process in _detached if process.poll() is None]
    environment = {k: v for k, v in os.environ.items() if not (k.startswith(("PYTHON_", "PYSPARK_")) and "SECRET" in k)}
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    process = _launch(spec, environment, cwd="/")
    _detached.append(process)
    _close_input(process)
    return process.pid


def _launch(spec: LaunchSpec, environment: Mapping[str, str], cwd: str | None = None) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        cwd=cwd,
        env={**environment, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(spec.to_line())
        process.stdin.flush()
    except BrokenPipeError:
        # It has died already, which is reported when its registration does not come.
        _log.warning("TaskManager %s ended at once", spec.member_id)
    return process


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    # What a process that has ended did not read is written once more, in vain.
    with suppress(BrokenPipeError):
        process.stdin.close()
