"""The driver of the chaos job: ``python _chaos_job.py CONFIG``; events go to standard output, as JSON lines.

It runs until its standard input says ``stop`` and all files are processed, then writes down what came out and the
states that it has, and ends.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StreamingQueryListener

from bench._state_machine import INITIAL, following
from dstl.errors import DstlError
from dstl.options import BatchingOptions, CheckpointOptions, ClusterOptions, MaterializationOptions, S3Options
from dstl.spark import StateBackend
from dstl.spark.restart import FixedDelay, run_with_restarts
from tests.worlds.driver_process import session, tell, when_told_to_stop

ALERT = "address string, number long, state string, event string"
EVENT = "address string, number long, event string"
OUTPUT = "address string, before int, elements array<long>"


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


class Append(StatefulProcessor):
    """Appends the rows of a key to its list, and says how long it was and what has come."""

    def init(self, handle: Any) -> None:
        self.list = handle.getListState("elements", "number long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        come = sorted(row.number for row in rows)
        before = sum(1 for _ in self.list.get())
        self.list.appendList([(number,) for number in come])
        yield Row(address=key[0], before=before, elements=come)

    def close(self) -> None:
        pass


class Progress(StreamingQueryListener):
    """Tells of each batch with rows."""

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        if event.progress.numInputRows:
            tell("batch", number=event.progress.batchId)

    def onQueryTerminated(self, event: Any) -> None:
        pass


class Job:
    """A query of the job's kind: its rows, where its checkpoints are, and what it has in the end.

    Args:
        spark: The session.
        config: As the process was given it.

    Attributes:
        out: Schema of its output.
        checkpoint_location: For Spark.
    """

    def __init__(self, spark: SparkSession, config: dict[str, Any]) -> None:
        self._spark = spark
        self._kind = config["job"]
        self._backend: StateBackend | None = None
        self.out = OUTPUT if self._kind == "lists" else ALERT
        if self._kind == "spark":
            self.checkpoint_location = config["location"].replace("s3://", "dstl://")
            return
        self._backend = StateBackend(
            config["location"],
            parallelism=4,
            s3=S3Options(endpoint_url=config["endpoint_url"], connect_timeout_s=3.0, read_timeout_s=10.0),
            checkpoints=CheckpointOptions(timeout_s=60.0, task_manager_timeout_s=60.0),
            batching=BatchingOptions(inline_threshold=config["inline_threshold"]),
            materialization=MaterializationOptions(interval_s=10.0, min_pause_s=2.0),
            cluster=ClusterOptions(host="127.0.0.1"),
            spark=spark,
        )
        self.checkpoint_location = self._backend.checkpoint_location

    def rows(self, events: DataFrame) -> DataFrame:
        """Return what comes out of its operator."""
        if self._backend is None:
            return events.groupBy("address").transformWithState(Watch(), ALERT, "append", "none")
        processor = Append() if self._kind == "lists" else Watch()
        return self._backend.groupBy(events, "address").transformWithState(
            processor, self.out, "append", "none", name="operator"
        )

    def states(self) -> list[list[Any]]:
        """Return keys and what they have, from the last checkpoint."""
        if self._backend is None:
            reader = self._spark.read.format("statestore").option("stateVarName", "machine")
            found = reader.load(self.checkpoint_location).selectExpr("key.address", "value.state")
            return [list(row) for row in found.collect()]
        if self._kind == "alerts":
            machines = self._backend.read_state(self._spark, "machine")
            return [list(row) for row in machines.selectExpr("key.address", "value.state").collect()]
        lists: dict[str, list[int]] = {}
        elements = self._backend.read_state(self._spark, "elements")
        for row in elements.selectExpr("key.address", "value.number").collect():
            lists.setdefault(row.address, []).append(row.number)
        return [list(each) for each in lists.items()]

    def look_up(self, work: Path, name: str, ending: threading.Event) -> None:
        """Look at lists that grow, and write down when and what was there, until it ends."""
        if self._kind != "lists":
            return
        assert self._backend is not None
        rng = random.Random(name)
        with (work / f"lookups-{name}.jsonl").open("a") as log:
            while not ending.wait(rng.uniform(0.0, 0.1)):
                newest = max((path.name for path in (work / "in").iterdir()), default="")
                keys = pq.read_table(work / "in" / newest, columns=["address"])["address"].to_pylist()[:200]
                for key in rng.sample(keys, min(10, len(keys))):
                    began = time.monotonic()
                    try:
                        found = self._backend.lookup("operator", "elements", (key,))
                    except DstlError:
                        break  # it restarts, or has not begun
                    log.write(json.dumps([began, time.monotonic(), key, [row.number for row in found]]) + "\n")
                    log.flush()

    def close(self) -> None:
        """Close the backend."""
        if self._backend is not None:
            self._backend.close()


def keep_running(start: Callable[[], Any], ending: threading.Event) -> None:
    """Start the query again whenever it fails, until it has ended after it was told to."""
    last = False
    while not last:
        last = ending.is_set()
        run_with_restarts(
            start,
            FixedDelay(attempts=10_000, delay_s=0.2),
            on_restart=lambda number, error: tell("restart", why=str(error)[:300]),
            fruitless_runs=1000,
        )


def run(config: dict[str, Any]) -> None:
    work = Path(config["work"])
    spark = session("dstl-chaos", config)
    spark.sparkContext.setLogLevel("ERROR")
    spark.streams.addListener(Progress())
    job = Job(spark, config)
    events = spark.readStream.schema(EVENT).option("maxFilesPerTrigger", config["files"]).parquet(str(work / "in"))
    writer = job.rows(events).writeStream.format("parquet").option("path", str(work / "out"))
    writer = writer.option("checkpointLocation", job.checkpoint_location)
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
    for number in range(2):
        name = f"{os.getpid()}-{number}"
        threading.Thread(target=job.look_up, args=(work, name, ending), daemon=True).start()
    keep_running(start, ending)
    found = spark.read.schema(job.out).parquet(str(work / "out")).collect() if (work / "out").exists() else []
    (work / "result.json").write_text(json.dumps({"states": job.states(), "out": [list(row) for row in found]}))
    job.close()
    tell("finished")
    spark.stop()


if __name__ == "__main__":
    # Workers need not have this module.
    import bench._state_machine

    cloudpickle.register_pickle_by_value(bench._state_machine)
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    started = time.monotonic()
    run(json.loads(sys.argv[1]))
