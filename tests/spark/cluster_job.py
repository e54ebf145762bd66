"""The driver process of the cluster's tests: ``python cluster_job.py CONFIG``.

Events go to standard output as JSON lines. It runs until its standard input says ``stop`` (or ends), then tells the
state and closes everything.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from dstl.checkpoint.report import CheckpointReport
from dstl.options import ClusterOptions
from dstl.spark import StateBackend, transform_savepoint
from worlds.driver_process import session, tell, when_told_to_stop


class Totals(StatefulProcessor):
    """Adds up v by key. Some keys misbehave, once: ``fail`` raises, ``slow`` hangs, ``pause`` takes its time.

    It is the first attempt to reach such a key that does, whatever its number: on a busy machine a speculative copy may
    have overtaken the one before it.
    """

    def __init__(self, marks: str) -> None:
        self.marks = marks

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        total = (self.total.get() or (0,))[0] + sum(row.v for row in rows)
        self.total.update((total,))
        if key[0].startswith(("fail", "slow", "pause")):
            path = os.path.join(self.marks, key[0])
            first = True
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                first = False
            with open(path, "a") as mark:
                mark.write(f"{os.getpid()}\n")
            if first and key[0].startswith("fail"):
                raise RuntimeError("this attempt fails")
            if first:
                time.sleep(60 if key[0].startswith("slow") else 3)
        yield Row(k=key[0], total=total)


def warm_up(spark: SparkSession, hosts: list[str]) -> None:
    """Run Python tasks until each host has had one: a host whose first task is late finds its TaskManager elsewhere."""

    def where(_: int) -> str:
        import dstl.spark.task  # noqa: F401 - what takes longest
        from dstl.spark.worker_process import executor_host

        time.sleep(0.2)
        return executor_host()

    seen: set[str] = set()
    deadline = time.monotonic() + 100
    while not seen.issuperset(hosts):
        if time.monotonic() > deadline:
            raise TimeoutError(f"tasks ran on {sorted(seen)} only")
        seen.update(spark.sparkContext.parallelize(range(12), 12).map(where).collect())


def _same(rows: DataFrame) -> DataFrame:
    return rows.where(rows.key.k.isNotNull())


def run(config: dict[str, Any]) -> None:
    work = Path(config["work"])
    spark = session("dstl-cluster", config)
    spark.sparkContext.setLogLevel("INFO")
    warm_up(spark, config.get("hosts", []))
    backend = StateBackend(
        str(work / "state"), parallelism=4, cluster=ClusterOptions(secret_file=config["secret_file"]), spark=spark
    )

    def on_event(report: Any) -> None:
        fleet = backend._service.fleet
        tell(
            "checkpoint" if isinstance(report, CheckpointReport) else "restore",
            members=[asdict(each.address) for each in fleet.assignments],
            pids=list(fleet.pids),
            member_hosts=list(fleet.member_hosts),
        )

    backend.add_listener(on_event)
    rows = spark.readStream.schema("k string, v long").option("maxFilesPerTrigger", 1).json(str(work / "in"))
    totals = backend.groupBy(rows, "k").transformWithState(
        Totals(str(work / "marks")), "k string, total long", "append", "none", name="totals"
    )
    totals.explain(True)
    query = (
        totals.writeStream.format("json")
        .option("path", str(work / "out"))
        .option("checkpointLocation", backend.checkpoint_location)
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    stop = when_told_to_stop()
    seen = -1
    while not stop.is_set():
        if query.exception() is not None:
            tell("failed", why=str(query.exception())[:4000])
            sys.exit(1)
        progress = query.lastProgress
        if progress is not None and progress["numInputRows"] and progress["batchId"] > seen:
            seen = progress["batchId"]
            tell("batch", batch=seen, pids=list(backend.task_manager_pids))
        time.sleep(0.02)
    output = sorted([row.k, row.total] for row in spark.read.json(str(work / "out")).collect())
    looked_up = {key: backend.lookup("totals", "total", (key,)).total for key in dict(output)}
    query.stop()
    state = {row.key.k: row.value.total for row in backend.read_state(spark, "total").collect()}
    saved = backend.savepoint("last")
    changed = transform_savepoint(
        saved.location, f"{saved.location}-rekeyed", {"totals": {"total": _same}}, max_parallelism=48, spark=spark
    )
    backend.close()
    spark.stop()
    tell("finished", state=state, output=output, looked_up=looked_up, saved=[saved.entries, changed.entries])


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
