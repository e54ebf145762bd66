"""An application with queries at odd places, ``python paths_job.py DIRECTORY RUN``; it says in one line what it saw.

Run 0 also stops queries at random moments, and goes on after its coordinator of files was killed. ``DIRECTORY`` has a
program that stands for the coordinator's Python, and the input.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamReader, StreamingQuery

from bench._files_process import interpreter
from dstl.spark import StateBackend, jar_path
from tests.worlds.driver_process import INTERPRETED, LOCAL, session

ODD = ["state/2024/11/job", "sources/1/x", "offsets/5/q", "state/0/0"]
STOPPED = 5


class Application:
    """One session, and what it has seen."""

    def __init__(self, directory: Path, run: int) -> None:
        self.directory, self.run = directory, run
        conf = {
            **LOCAL,
            **INTERPRETED,
            "spark.jars": jar_path(),
            "spark.plugins": "dstl.spark.DstlPlugin",
            "spark.dstl.python": interpreter(directory),
            "spark.local.dir": str(directory / "local"),
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
        }
        self.spark = session("paths", {"master": "local[4]", "conf": conf})
        self.spark.sparkContext.setLogLevel("OFF")
        self.seen: dict[str, Any] = {}

    def read(self, name: str) -> DataStreamReader:
        reader = self.spark.readStream
        return reader.name(name) if hasattr(reader, "name") else reader  # before Spark 4.2 sources have none

    def rows(self, name: str) -> DataFrame:
        reader = self.read(name).schema("k long").option("maxFilesPerTrigger", 1)
        return reader.json(str(self.directory / "in"))

    def counted(self, location: str, name: str = "clicks") -> tuple[Any, list[Any]]:
        """Start a count; returns the query, and the batches that its sink gets."""
        got: list[Any] = []

        def take(out: DataFrame, batch: int) -> None:
            got.append([batch, sorted(map(list, out.collect()))])

        writer = self.rows(name).groupBy("k").count().writeStream.outputMode("update").foreachBatch(take)
        return writer.option("checkpointLocation", location).trigger(availableNow=True).start(), got

    def at_odd_places(self) -> None:
        places = {each: f"dstl://{self.directory}/{each}" for each in ODD}
        files, paths = self.spark._jvm.org.apache.hadoop.fs.FileSystem, self.spark._jvm.org.apache.hadoop.fs.Path  # type: ignore[union-attr]
        conf = self.spark._jsc.hadoopConfiguration()
        self.seen["there"] = [files.get(paths(each).toUri(), conf).exists(paths(each)) for each in places.values()]
        # A directory of sources with names that plain Spark has begun is taken over.
        places["plain"] = f"dstl://{self.directory}/plain" if self.run else f"file://{self.directory}/plain"
        # A source may be called like a directory of Spark's own.
        sources = {name: "offsets" if name == ODD[0] else "clicks" for name in places}
        started = {name: self.counted(place, sources[name]) for name, place in places.items()}
        for query, _ in started.values():
            query.awaitTermination()
        self.seen["counted"] = {name: got for name, (_, got) in started.items()}

    def in_a_backend(self) -> None:
        got: list[Any] = []

        def take(out: DataFrame, batch: int) -> None:
            got.append([batch, sorted(map(list, out.select("k", "n").collect()))])

        with StateBackend(str(self.directory / "state/1/2/backend"), parallelism=2, spark=self.spark) as backend:
            out = backend.groupBy(self.rows("clicks"), "k").agg(F.count("*").alias("n"), name="counts")
            writer = out.writeStream.foreachBatch(take).trigger(availableNow=True)
            writer.option("checkpointLocation", backend.checkpoint_location).start().awaitTermination()
        self.seen["backend"] = got

    def stop(self, rng: random.Random) -> None:
        """Stop queries while they are within a call of ``dstl://``, more often than not."""
        rate = self.read("rate").format("rate").option("rowsPerSecond", 20).load().selectExpr("value % 3 AS k")

        def start(number: int) -> StreamingQuery:
            writer = rate.groupBy("k").count().writeStream.outputMode("update").format("noop")
            return writer.option("checkpointLocation", f"dstl://{self.directory}/stopped-{number}").start()

        with ThreadPoolExecutor(STOPPED) as threads:
            started = list(threads.map(start, range(STOPPED)))
        for query in started:
            time.sleep(rng.uniform(0, 0.6))
            query.stop()
        self.seen["stopped"] = [str(each.exception() or "") for each in started]

    def lose_the_coordinator(self) -> None:
        self.seen["killed"] = killed = _kill_services(os.getpid())
        self.seen["failed starts"] = []
        for _ in range(2 if killed else 0):
            try:
                self.counted(f"dstl://{self.directory}/after")[0].awaitTermination()
            except Exception as error:
                self.seen["failed starts"].append(str(error).splitlines()[0])
        self.seen["after"] = [each.name for each in (self.directory / "after").iterdir()]


def _kill_services(parent: int) -> int:
    """Kill the coordinators below a process; returns their number."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    below, killed = {parent}, set[int]()
    for line in listed.splitlines() * 2:
        pid, above, command = line.split(maxsplit=2)
        if int(above) in below:
            below.add(int(pid))
            if "_files_process" in command:
                killed.add(int(pid))
    for each in killed:
        os.kill(each, signal.SIGKILL)
    return len(killed)


def main(directory: Path, run: int, seed: int) -> int:
    application = Application(directory, run)
    application.at_odd_places()
    application.in_a_backend()
    if run == 0:
        application.stop(random.Random(seed))
        application.lose_the_coordinator()
    print(json.dumps(application.seen), flush=True)
    application.spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
