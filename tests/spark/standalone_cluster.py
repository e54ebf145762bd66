"""A standalone Spark cluster of two hosts on one machine, which are 127.0.0.2 and 127.0.0.3, and drivers for it."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark

HOSTS = ("127.0.0.2", "127.0.0.3")
PATIENCE_S = 150.0
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_MARK = "DSTL_TEST_CLUSTER"


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {PATIENCE_S:g} s in vain for {what}")


class StandaloneCluster:
    """A master and a worker on each host; every process is known by a mark in its environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment = {
            **os.environ,
            _MARK: str(directory),
            "SPARK_HOME": os.path.dirname(pyspark.__file__),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": "",
            "SPARK_NO_DAEMONIZE": "1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK,
            "DSTL_LOG_LEVEL": "DEBUG",
        }
        self._processes: list[subprocess.Popen[str]] = []
        self.master = ""

    def start(self) -> None:
        log = self._spawn("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0")
        found = wait_for(lambda: re.search(r"spark://127\.0\.0\.1:\d+", log.read_text()), "the master")
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
                [f"{self._environment['SPARK_HOME']}/bin/spark-class", role, *arguments, "--webui-port", "0"]
                if role.endswith("Master")
                else [f"{self._environment['SPARK_HOME']}/bin/spark-class", role, "--webui-port", "0", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                text=True,
                env={**self._environment, **local},
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def driver(self, work: Path, **config: Any) -> "Driver":
        conf = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraJavaOptions": QUICK,
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": QUICK,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "4",
            "spark.python.unix.domain.socket.enabled": "true",
            "spark.speculation": "true",
            "spark.speculation.interval": "200ms",
            "spark.speculation.multiplier": "3",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "5s",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{self.directory}",
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            "spark.local.dir": str(self.directory / "local" / "driver"),
        }
        whole = {"master": self.master, "work": str(work), "conf": conf, **config}
        return Driver(whole, self._environment, self.directory / f"driver-{work.name}-{time.monotonic_ns()}.log")

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
        return sorted(self.processes("-m dstl.taskmanager"))

    def executors(self, host: str) -> list[int]:
        return sorted(pid for pid, line in self.processes("ExecutorBackend").items() if f"--hostname {host} " in line)

    def workers(self, host: str) -> list[int]:
        return sorted(pid for pid, line in self.processes("deploy.worker.Worker").items() if f"--host {host} " in line)

    def logs(self) -> Iterator[tuple[Path, bytes]]:
        """Yield everything that the cluster's processes have written about themselves."""
        for path in self.directory.rglob("*"):
            if path.is_file() and (path.suffix == ".log" or path.name in ("stderr", "stdout") or "_app-" in path.name):
                yield path, path.read_bytes()

    def close(self) -> None:
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


class Driver:
    """A driver process, its events, and its log."""

    def __init__(self, config: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("cluster_job.py")), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.seen: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.log.with_suffix(".out.log").open("w") as copy:
            for line in self.process.stdout:
                copy.write(line)
                copy.flush()
                if line.startswith('{"event"'):
                    self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return the next event of this kind with these fields; what fails on the way fails the test."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                got = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} {fields} in time; see {self.log}: {tail(self.log)}") from None
            self.seen.append(got)
            if got["event"] == event and fields.items() <= got.items():
                return got
            assert got["event"] not in ("failed", "ended"), f"{got}; see {self.log}: {tail(self.log)}"

    def stop(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("stop\n")
        self.process.stdin.flush()
        finished = self.until("finished")
        assert self.process.wait(PATIENCE_S) == 0
        return finished

    def kill(self) -> None:
        """Kill the driver: Python and its JVM, which is its child, at once."""
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        os.kill(self.process.pid, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def tail(log: Path) -> str:
    return log.read_text()[-3000:]
