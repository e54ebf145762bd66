"""Starting a TaskManager as a child process, and the configuration it is given.

The configuration, with the application's secret, goes through the child's standard input: it appears in no process
list and no environment. The pipe is also the child's lease of life: when the parent ends, however it ends, the pipe
closes and the child stops.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from dstl.options import BatchingOptions, HedgingOptions, MaterializationOptions, S3Options, UploadOptions
from dstl.taskmanager.client import Address
from dstl.taskmanager.protocol import Secret
from materializer.tables import TableKind

__all__ = ["TaskManagerConfig", "TaskManagerProcess"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskManagerConfig:
    """Everything that a TaskManager process needs to know.

    Attributes:
        member_id: Its name in the fleet.
        location: Where state is stored.
        coordinator: Where to register.
        secret: The application's.
        table: ``heap`` or ``rocksdb``.
        max_parallelism: Number of key groups.
        host: Address of this host as others reach it.
        listen_tcp: Listen on a TCP port as well as on the unix socket.
        batching: When the log is sealed.
        upload: How objects get into the store.
        hedging: When a second request is sent.
        materialization: When tables are written as base files.
        s3: How S3 is reached.
    """

    member_id: str
    location: str
    coordinator: Address
    secret: Secret
    table: TableKind = "heap"
    max_parallelism: int = 128
    host: str = "127.0.0.1"
    listen_tcp: bool = False
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    upload: UploadOptions = field(default_factory=UploadOptions)
    hedging: HedgingOptions = field(default_factory=HedgingOptions)
    materialization: MaterializationOptions = field(default_factory=MaterializationOptions)
    s3: S3Options = field(default_factory=S3Options)

    def to_json(self) -> str:
        """Return one line of JSON, secret included: for a pipe, never for a log."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("member_id", "location", "table", "max_parallelism", "host", "listen_tcp")
        }
        fields["coordinator"] = asdict(self.coordinator)
        fields["secret"] = base64.b64encode(self.secret.reveal()).decode()
        for name in ("batching", "upload", "hedging", "materialization", "s3"):
            fields[name] = getattr(self, name).model_dump(mode="json")
        return json.dumps(fields)

    @staticmethod
    def from_json(line: str) -> TaskManagerConfig:
        """Rebuild a configuration; the inverse of :meth:`to_json`."""
        fields = json.loads(line)
        fields["coordinator"] = Address(**fields["coordinator"])
        fields["secret"] = Secret(base64.b64decode(fields["secret"]))
        fields["batching"] = BatchingOptions.model_validate(fields["batching"])
        fields["upload"] = UploadOptions.model_validate(fields["upload"])
        fields["hedging"] = HedgingOptions.model_validate(fields["hedging"])
        fields["materialization"] = MaterializationOptions.model_validate(fields["materialization"])
        fields["s3"] = S3Options.model_validate(fields["s3"])
        return TaskManagerConfig(**fields)


class TaskManagerProcess:
    """A TaskManager that this process has started.

    Its log goes to this process's standard error. A session of its own keeps a terminal's Ctrl-C from it, so that the
    driver can still make its last checkpoint.
    """

    def __init__(self, config: TaskManagerConfig) -> None:
        self.config = config
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "dstl.taskmanager"],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        pipe: IO[str] | None = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(config.to_json() + "\n")
            pipe.flush()
        except BrokenPipeError:
            # It has died already; whoever waits for its registration will say so.
            _log.warning("TaskManager %s ended at once", config.member_id)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

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
