"""Drivers for a standalone Spark cluster of two hosts on one machine."""

import queue
import time
from pathlib import Path
from typing import Any

from worlds import standalone_cluster
from worlds.driver_process import INTERPRETED, LOCAL, DriverProcess
from worlds.standalone_cluster import QUICK

PATIENCE_S = 150.0


class StandaloneCluster(standalone_cluster.StandaloneCluster):
    """A cluster whose processes tell everything, and its drivers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, environment={"DSTL_LOG_LEVEL": "DEBUG"})

    def driver(self, work: Path, **config: Any) -> "Driver":
        conf = {
            **LOCAL,
            **INTERPRETED,
            "spark.driver.extraJavaOptions": QUICK,
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": QUICK,
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
        return Driver(whole, self.environment, self.directory / f"driver-{work.name}-{time.monotonic_ns()}.log")


class Driver(DriverProcess):
    """A driver process whose failure fails the test."""

    def __init__(self, config: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        tests = str(Path(__file__).parents[1])
        super().__init__(Path(__file__).with_name("cluster_job.py"), config, {**environment, "PYTHONPATH": tests}, log)
        self.seen: list[dict[str, Any]] = []

    def until(self, event: str, **fields: Any) -> dict[str, Any]:
        """Return the next event of this kind with these fields; what fails on the way fails the test."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                got = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {event} {fields} in time; see {self.log}: {tail(self.log)}") from None
            self.seen.append(got)
            if got["event"] == event and fields.items() <= got.items():
                return got
            assert got["event"] not in ("failed", "ended"), f"{got}; see {self.log}: {tail(self.log)}"

    def finish(self) -> dict[str, Any]:
        """Let it end by itself, and return what it tells at last."""
        self.stop()
        finished = self.until("finished")
        assert self.process.wait(PATIENCE_S) == 0
        return finished


def tail(log: Path) -> str:
    return log.read_text()[-3000:]
