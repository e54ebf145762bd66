"""A test's own place: its directory, its sources, and backends in the session that all tests have."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.cli.files import app as files_cli
from dstl.errors import MissingState
from dstl.files.inspection import opened_files
from dstl.runtime import system_runtime
from dstl.spark import StateBackend
from dstl.spark.saved_state.reader import read_state
from dstl.store import open_store


def storable(value: Any) -> Any:
    """Return a value for a state of Spark's own: before 4.2 they cannot store a Row within one."""
    if pyspark.__version__ >= "4.2":
        return value
    if isinstance(value, dict):
        return {key: storable(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(storable, value))
    return value


class Stream:
    """A directory of JSON files that a query reads one by one, and places for its output and checkpoint."""

    def __init__(self, spark: SparkSession, directory: Path, schema: str = "k string, v long") -> None:
        self.spark = spark
        self.directory = directory
        self.schema = schema
        self.files = 0
        (directory / "in").mkdir(parents=True, exist_ok=True)

    def add(self, rows: list[dict[str, Any]]) -> None:
        staged = self.directory / "staged"
        staged.write_text("\n".join(json.dumps(row) for row in rows))
        # Spark takes the oldest file first, by milliseconds: without this, two files may change places.
        os.utime(staged, (1_700_000_000 + self.files,) * 2)
        staged.rename(self.directory / "in" / f"{self.files:04d}.json")
        self.files += 1

    def read(self) -> DataFrame:
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        return reader.json(str(self.directory / "in"))

    def drain(self, df: DataFrame, backend: StateBackend) -> None:
        """Process everything that is there, as one run of the query."""
        query = self.writer(df, backend).start()
        query.awaitTermination()

    def writer(self, df: DataFrame, backend: StateBackend) -> Any:
        return (
            df.writeStream.format("json")
            .option("path", str(self.directory / "out"))
            .option("checkpointLocation", backend.checkpoint_location)
            .trigger(availableNow=True)
        )

    def collect(
        self, df: DataFrame, place: str | StateBackend, mode: str = "append", batches: int | None = None
    ) -> list[tuple[Any, ...]]:
        """Process everything that is there; return (batch, column, ...).

        The checkpoint directory is the backend's, or for a query of Spark's own one of this name or URI. With
        ``batches``, end after so many: Spark's own timers in processing time keep it making batches for ever.
        """
        if isinstance(place, str):
            where = place if "://" in place else str(self.directory / place)
        else:
            where = place.checkpoint_location
        got: list[tuple[Any, ...]] = []
        query = (
            df.writeStream.foreachBatch(lambda out, batch: got.extend((batch, *row) for row in out.collect()))
            .option("checkpointLocation", where)
            .outputMode(mode)
        )
        if batches is None:
            query.trigger(availableNow=True).start().awaitTermination()
            return sorted(got, key=repr)
        running = query.trigger(processingTime="1 second").start()  # few more than those
        ended, done = time.monotonic() + 200, -1
        while running.isActive and done < batches - 1 and time.monotonic() < ended:
            time.sleep(0.05)
            done = -1 if running.lastProgress is None else running.lastProgress.batchId
        running.stop()
        assert done >= batches - 1, f"{where} has ended batch {done}, not {batches - 1}: {running.exception()}"
        return sorted((row for row in got if row[0] < batches), key=repr)

    @staticmethod
    def carry_over(old: Path, new: Path) -> None:
        """Put a copy of Spark's directory in the log of a stopped query where a new location takes it over."""
        done = CliRunner().invoke(files_cli, ["export", f"dstl://{old}/_spark", f"{new}/_spark"])
        assert done.exit_code == 0, done.output

    def output(self, schema: str) -> list[tuple[Any, ...]]:
        rows = self.spark.read.schema(schema).json(str(self.directory / "out")).collect()
        return sorted((tuple(row) for row in rows), key=repr)


class Home:
    """What the queries of a test have: the session, a directory of their own, and in it sources and backends."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark = spark
        self.path = path
        self._streams = 0

    def stream(self, schema: str = "k string, v long") -> Stream:
        self._streams += 1
        return Stream(self.spark, self.path / f"stream-{self._streams}", schema)

    def backend(self, name: str = "state", **settings: Any) -> StateBackend:
        return StateBackend(str(self.path / name), spark=self.spark, **settings)

    def commits(self, name: str = "state") -> list[int]:
        """Return the batches that Spark has committed to a backend's location."""

        async def read() -> list[int]:
            try:
                async with opened_files(f"dstl://{self.path / name}/_spark", system_runtime(), open_store) as files:
                    return files.batches
            except MissingState:
                return []

        return asyncio.run(read())

    def checkpointed(self, name: str = "state") -> int:
        """Return the batch of the newest checkpoint."""
        return asyncio.run(choose_checkpoint(open_store(str(self.path / name)), system_runtime())).batch_id

    def stored(self, operator: str, state: str, name: str = "state") -> dict[Any, tuple[Any, ...]]:
        """Return the values of a state in the newest checkpoint by the first column of their keys, without Spark."""

        async def read() -> dict[Any, tuple[Any, ...]]:
            store, runtime = open_store(str(self.path / name)), system_runtime()
            checkpoint = await choose_checkpoint(store, runtime)
            return {row.key[0]: row.value async for row in read_state(store, runtime, checkpoint, operator, state)}

        return asyncio.run(read())
