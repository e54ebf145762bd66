"""One Spark session for all Spark tests of a run: starting a JVM costs more than most tests."""

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dstl.spark import jar_path


@pytest.fixture(autouse=True)
def random_materialization(seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Materialize at other moments in every Spark test, never or all the time; the printed seed repeats it."""
    rng = random.Random(f"{seed}-{request.node.nodeid}")
    if rng.random() < 0.75:
        monkeypatch.setenv("DSTL_MATERIALIZATION_INTERVAL_S", str(rng.choice([0.1, 0.5, 1.0, 5.0])))
        monkeypatch.setenv("DSTL_MATERIALIZATION_MIN_PAUSE_S", "0")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    work = tmp_path_factory.mktemp("spark")
    # No retries: a task that fails without a fault fails its query, as it does for users.
    builder = SparkSession.builder.master("local[2]")
    if shutil.which("javac") is not None:
        # For the tests of dstl://; the others do not notice.
        builder = builder.config("spark.jars", jar_path()).config("spark.plugins", "dstl.spark.DstlPlugin")
    session = (
        builder.config("spark.dstl.python", sys.executable)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "3")
        .config("spark.sql.session.timeZone", "UTC")
        # A query of a few rows costs more to compile than to interpret; of the two managers of Spark's own checkpoint
        # directory, this one starts no shell for each link that it looks for.
        .config(
            "spark.sql.streaming.checkpointFileManagerClass",
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager",
        )
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .config("spark.local.dir", str(work / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


class Stream:
    """A directory of JSON files that a query reads one by one, and places for its output and checkpoint."""

    def __init__(self, spark: SparkSession, directory: Path, schema: str = "k string, v long") -> None:
        self.spark = spark
        self.directory = directory
        self.schema = schema
        self.files = 0
        (directory / "in").mkdir(parents=True)

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

    def drain(self, df: DataFrame) -> None:
        """Process everything that is there, as one run of the query."""
        query = self.writer(df).start()
        query.awaitTermination()

    def writer(self, df: DataFrame) -> Any:
        return (
            df.writeStream.format("json")
            .option("path", str(self.directory / "out"))
            .option("checkpointLocation", str(self.directory / "checkpoint"))
            .trigger(availableNow=True)
        )

    def collect(
        self, df: DataFrame, name: str, mode: str = "append", batches: int | None = None
    ) -> list[tuple[Any, ...]]:
        """Process everything that is there, with a checkpoint directory of its own; return (batch, column, ...).

        With ``batches``, end after so many: Spark's own timers in processing time keep it making batches for ever.
        """
        got: list[tuple[Any, ...]] = []
        query = (
            df.writeStream.foreachBatch(lambda out, batch: got.extend((batch, *row) for row in out.collect()))
            .option("checkpointLocation", str(self.directory / name))
            .outputMode(mode)
        )
        if batches is None:
            query.trigger(availableNow=True).start().awaitTermination()
            return sorted(got, key=repr)
        running = query.start()
        ended, done = time.monotonic() + 200, -1
        while running.isActive and done < batches - 1 and time.monotonic() < ended:
            time.sleep(0.05)
            done = -1 if running.lastProgress is None else running.lastProgress.batchId
        running.stop()
        assert done >= batches - 1, f"{name} has ended batch {done}, not {batches - 1}: {running.exception()}"
        return sorted((row for row in got if row[0] < batches), key=repr)

    def output(self, schema: str) -> list[tuple[Any, ...]]:
        rows = self.spark.read.schema(schema).json(str(self.directory / "out")).collect()
        return sorted((tuple(row) for row in rows), key=repr)


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[None]:
    """Spark's own transformWithState needs its RocksDB store."""
    prefix = "spark.sql.streaming.stateStore"
    spark.conf.set(
        f"{prefix}.providerClass", "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
    yield
    spark.conf.unset(f"{prefix}.providerClass")
    spark.conf.unset(f"{prefix}.encodingFormat")


@pytest.fixture(scope="session")
def open_stream(spark: SparkSession) -> Callable[..., Stream]:
    return partial(Stream, spark)


@pytest.fixture
def stream(open_stream: Callable[..., Stream], tmp_path: Path) -> Callable[..., Stream]:
    made = 0

    def make(schema: str = "k string, v long") -> Stream:
        nonlocal made
        made += 1
        return open_stream(tmp_path / f"stream-{made}", schema)

    return make
