"""A standalone Spark cluster of two hosts on one machine: for tests and benchmarks that kill its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.worlds.waiting import wait_until

HOSTS = ("127.0.0.2", "127.0.0.3")
"""The hosts' addresses: all of 127.0.0.0/8 is this machine's own, and Spark takes two addresses for two hosts."""

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of JVMs that live for seconds."""

_MARK = "DSTL_TEST_CLUSTER"


class StandaloneCluster:
    """A master and a worker on each host; every process is known by a mark in its environment.

    Args:
        directory: Logs, and what the workers keep.
        daemon_options: Options of the JVMs of master and workers.
        environment: Added to what the processes see.

    Attributes:
        directory: The same.
        environment: Of every process, drivers' included.
        master: The master's address, once it has started.
    """

    def __init__(
        self, directory: Path, daemon_options: str = QUICK, environment: Mapping[str, str] | None = None
    ) -> None:
        import pyspark

        self.directory = directory
        self.environment = {
            **os.environ,
            _MARK: str(directory),
            "SPARK_HOME": os.path.dirname(pyspark.__file__),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": "",
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": daemon_options,
            **(environment or {}),
        }
        self._processes: list[subprocess.Popen[str]] = []
        self.master = ""

    def start(self) -> None:
        """Start the master and the workers."""
        log = self._spawn("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0")
        found = wait_until(lambda: re.search(r"spark://127\.0\.0\.1:\d+", log.read_text()), "the master", 150)
        self.master = found[0]
        for host, cores in zip(HOSTS, ("2", "1"), strict=True):
            self._spawn(
                f"worker-{host}",
                "org.apache.spark.deploy.worker.Worker",
                *("--host", host, "--cores", cores, "--memory", "2g", "--work-dir", str(self.directory / host)),
                self.master,
            )

    def _spawn(self, name: str, role: str, *arguments: str) -> Path:
        log = self.directory / f"{name}.log"
        local = {"SPARK_LOCAL_DIRS": str(self.directory / "local" / name)}
        with log.open("w") as out:
            process = subprocess.Popen(
                [f"{self.environment['SPARK_HOME']}/bin/spark-class", role, *arguments, "--webui-port", "0"]
                if role.endswith("Master")
                else [f"{self.environment['SPARK_HOME']}/bin/spark-class", role, "--webui-port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
                env={**self.environment, **local},
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def processes(self, what: str) -> dict[int, str]:
        """Return the command lines of the cluster's processes that hold ``what``, by process id."""
        found = {}
        for pid in (int(each) for each in os.listdir("/proc") if each.isdigit()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                if what in command and f"{_MARK}={self.directory}".encode() in environment:
                    found[pid] = command
        return found

    def task_managers(self) -> list[int]:
        """Return the process ids of the TaskManagers."""
        return sorted(self.processes("-m dstl.process"))

    def executors(self, host: str) -> list[int]:
        """Return the process ids of a host's executors."""
        return sorted(pid for pid, line in self.processes("ExecutorBackend").items() if f"--hostname {host} " in line)

    def workers(self, host: str) -> list[int]:
        """Return the process ids of a host's Spark workers, which start executors."""
        return sorted(pid for pid, line in self.processes("deploy.worker.Worker").items() if f"--host {host} " in line)

    def logs(self) -> Iterator[tuple[Path, bytes]]:
        """Yield everything that the cluster's processes have written about themselves."""
        for path in self.directory.rglob("*"):
            if path.is_file() and (path.suffix == ".log" or path.name in ("stderr", "stdout") or "_app-" in path.name):
                yield path, path.read_bytes()

    def close(self) -> None:
        """End every process that has the mark."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for pid in self.processes(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait(10)
