"""A driver program in a process of its own, which tells events and ends when it is told to: for tests and benchmarks.

The process has :class:`DriverProcess`, the program :func:`session`, :func:`tell` and :func:`when_told_to_stop`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Options of every session here: nothing of it is seen from outside of the machine."""

INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Options of sessions of tests: a query of a few rows costs more to compile than to interpret."""

_out = threading.Lock()


def session(name: str, config: Mapping[str, Any]) -> SparkSession:
    """Return a session as the ``master`` and the ``conf`` of a program's configuration say."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(config["master"]).appName(name)
    for key, value in config["conf"].items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def tell(event: str, **fields: Any) -> None:
    """Tell whoever has started this program of an event. Thread-safe."""
    with _out:
        print(json.dumps({"event": event, **fields}), flush=True)


def when_told_to_stop() -> threading.Event:
    """Return what is set when this program is told to stop, or when nobody can tell it any more."""
    stop = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    return stop


class DriverProcess:
    """A driver's process; Python and its JVM are a session.

    Args:
        program: A Python file, which takes its configuration as an argument, in JSON.
        config: The configuration.
        environment: Of the process.
        log: Takes what it writes on its standard error, behind what is there.

    Attributes:
        process: The process.
        events: What it tells, ``{"event": "ended"}`` at last.
        log: The same.
    """

    def __init__(self, program: Path, config: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(program), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=dict(environment),
                start_new_session=True,
            )
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.with_suffix(".out.log").open("a") as copy:
            for line in self.process.stdout:
                copy.write(line)
                copy.flush()
                if line.startswith('{"event"'):
                    self.events.put(json.loads(line))
        self.events.put({"event": "ended"})

    def stop(self) -> None:
        """Tell the program to stop."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("stop\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """Kill Python and its JVM at once, as the loss of their host does. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Kill it where it runs, and let go of its pipes. Idempotent."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
