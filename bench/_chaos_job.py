"""The driver of the chaos job: ``python _chaos_job.py CONFIG``; events go to standard output, as JSON lines.

It runs until its standard input says ``stop`` and all files are processed, then writes down the alerts and the states
that it has, and ends.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from bench._state_machine import INITIAL, following
from dstl.checkpoint.report import CheckpointReport
from dstl.options import BatchingOptions, CheckpointOptions, ClusterOptions, MaterializationOptions, S3Options
from dstl.spark import StateBackend
from dstl.spark.restart import FixedDelay, run_with_restarts
from tests.worlds.driver_process import session, tell, when_told_to_stop

ALERT = "address string, number long, state string, event string"
EVENT = "address string, number long, event string"


class Watch(StatefulProcessor):
    """Follows the state of one address, and raises an alert at an event that its state does not know."""

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("machine", "state string")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        held = self.state.get()
        state = held[0] if held else INITIAL
        for row in sorted(rows, key=lambda each: each.number):
            found = following(state, row.event)
            if found is None:
                yield Row(address=key[0], number=row.number, state=state, event=row.event)
            state = found or INITIAL
        self.state.update((state,))

    def close(self) -> None:
        pass


def run(config: dict[str, Any]) -> None:
    work = Path(config["work"])
    spark = session("dstl-chaos", config)
    spark.sparkContext.setLogLevel("ERROR")
    backend = StateBackend(
        config["location"],
        parallelism=4,
        s3=S3Options(endpoint_url=config["endpoint_url"], connect_timeout_s=3.0, read_timeout_s=10.0),
        checkpoints=CheckpointOptions(timeout_s=60.0, task_manager_timeout_s=60.0),
        batching=BatchingOptions(inline_threshold=config["inline_threshold"]),
        materialization=MaterializationOptions(interval_s=10.0, min_pause_s=2.0),
        cluster=ClusterOptions(host="127.0.0.1"),
        spark=spark,
    )
    backend.add_listener(
        lambda report: tell(
            "checkpoint" if isinstance(report, CheckpointReport) else "restore",
            **({"batch": report.batch_id, "seconds": report.seconds} if isinstance(report, CheckpointReport) else {}),
        )
    )
    events = spark.readStream.schema(EVENT).option("maxFilesPerTrigger", config["files"]).parquet(str(work / "in"))
    alerts = backend.groupBy(events, "address").transformWithState(Watch(), ALERT, "append", "none", name="watch")
    writer = (
        alerts.writeStream.format("parquet")
        .option("path", str(work / "out"))
        .option("checkpointLocation", backend.checkpoint_location)
    )
    ending = when_told_to_stop()

    def start() -> Any:
        # Once it ends there is no more input: whatever is there is the last.
        if ending.is_set():
            return writer.trigger(availableNow=True).start()
        query = writer.trigger(processingTime="100 milliseconds").start()
        threading.Thread(target=stop_in_the_end, args=(query,), daemon=True).start()
        return query

    def stop_in_the_end(query: Any) -> None:
        while query.isActive and not ending.wait(0.2):
            pass
        query.stop()

    tell("started")
    restarts = FixedDelay(attempts=10_000, delay_s=0.2)
    while True:
        last = ending.is_set()
        run_with_restarts(
            start,
            restarts,
            on_restart=lambda number, error: tell("restart", why=str(error)[:300]),
            fruitless_runs=1000,
        )
        if last:
            break
    states = [[row.key.address, row.value.state] for row in backend.read_state(spark, "machine").collect()]
    found = spark.read.schema(ALERT).parquet(str(work / "out")).collect() if (work / "out").exists() else []
    (work / "result.json").write_text(json.dumps({"states": states, "alerts": [list(row) for row in found]}))
    backend.close()
    tell("finished")
    spark.stop()


if __name__ == "__main__":
    # Workers need not have this module.
    import bench._state_machine

    cloudpickle.register_pickle_by_value(bench._state_machine)
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    started = time.monotonic()
    run(json.loads(sys.argv[1]))
