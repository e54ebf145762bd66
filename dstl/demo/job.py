"""The demo's driver process: one PySpark program, as a user would write it, that tells its parent what happens.

``python -m dstl.demo.job CONFIG`` runs until every input file is processed. Events go to standard output, one JSON
object a line; the parent kills this process, its workers and its TaskManager, and starts it again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.demo.aircraft import ALERT_SCHEMA, AircraftProcessor
from dstl.demo.flights import FLIGHT_SCHEMA
from dstl.errors import DstlError
from dstl.options import S3Options
from dstl.spark import StateBackend
from dstl.spark.restart import FixedDelay, run_with_restarts
from materializer.restore.progress import describe

OPERATOR = "aircraft"


@dataclass(frozen=True)
class JobConfig:
    """The demo's settings, as its parent process gives them to the driver.

    Attributes:
        work: Directory with ``input/``; ``output/``, Spark's ``checkpoint/`` and at the end
            ``alerts.parquet``, the sink's rows, are made in it.
        location: Where state goes.
        endpoint_url: Of an S3 other than AWS's; None for AWS.
        partitions: Partitions of the operator.
        task_managers: TaskManager processes.
        master: Spark's master; None for this machine.
    """

    work: str
    location: str
    endpoint_url: str | None
    partitions: int
    task_managers: int = 1
    master: str | None = None

    def to_json(self) -> str:
        """Return the configuration as one argument of a command line; it holds no secret."""
        return json.dumps(asdict(self))


def _spark_session(work: Path, master: str | None) -> SparkSession:
    """Return a session that may retry a task, quiet enough for a demo; a local one where no master is given."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(master or "local[*,4]")
        .appName("dstl-demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "4")
        # Saves about 40 ms of every Python task (delayed acknowledgements on the worker's TCP socket).
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
    )
    if master is None:
        builder = (
            builder.config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.local.dir", str(work / "spark"))
        )
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    return session


def run(config: JobConfig) -> None:
    """Run the query until its input ends, restarting it when it fails."""
    work = Path(config.work)
    spark = _spark_session(work, config.master)
    backend = StateBackend(
        config.location,
        parallelism=config.partitions,
        task_managers=config.task_managers,
        s3=S3Options(endpoint_url=config.endpoint_url),
        spark=spark,
    )

    def report(event: CheckpointReport | RestoreReport) -> None:
        kind = "checkpoint" if isinstance(event, CheckpointReport) else "restore"
        _tell(kind, **asdict(event), workers=list(backend.worker_pids), taskmanagers=list(backend.task_manager_pids))

    backend.add_listener(report)
    backend.add_progress_listener(lambda status: _tell("restoring", line=describe(status), **asdict(status)))
    flights = spark.readStream.schema(FLIGHT_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(work / "input"))
    alerts = backend.groupBy(flights, "tail").transformWithState(
        AircraftProcessor(), ALERT_SCHEMA, "append", "none", name=OPERATOR
    )
    writer = (
        alerts.writeStream.format("parquet")
        .option("path", str(work / "output"))
        .option("checkpointLocation", backend.checkpoint_location)
        .trigger(availableNow=True)
    )
    _tell("started", pid=os.getpid())
    run_with_restarts(
        writer.start,
        FixedDelay(attempts=5, delay_s=0.2),
        on_restart=lambda number, error: _tell("restart", number=number, why=str(error)[:2000]),
    )
    backend.close()
    # Read as any reader of the sink sees it: by the sink's own log of committed files.
    pq.write_table(spark.read.parquet(str(work / "output")).toArrow(), work / "alerts.parquet")
    _tell("finished")
    spark.stop()


_out = threading.Lock()


def _tell(event: str, **fields: Any) -> None:
    with _out:
        print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


if __name__ == "__main__":
    try:
        run(JobConfig(**json.loads(sys.argv[1])))
    except DstlError as refused:
        _tell("refused", kind=type(refused).__name__, why=str(refused))
        sys.exit(2)
