"""One Spark session for all Spark tests of a run: starting a JVM costs more than most tests."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from dstl.cli.files import app as files_cli
from dstl.spark import StateBackend, jar_path
from worlds import driver_process
from worlds.driver_process import LOCAL


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
    conf = {
        **LOCAL,
        # For the tests of queries without a StateBackend; the others do not notice.
        "spark.jars": jar_path(),
        "spark.plugins": "dstl.spark.DstlPlugin",
        "spark.dstl.python": sys.executable,
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.session.timeZone": "UTC",
        # A query of a few rows costs more to compile than to interpret; of the two managers of Spark's own checkpoint
        # directory, this one starts no shell for each link that it looks for.
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.warehouse.dir": str(work / "warehouse"),
        "spark.local.dir": str(work / "local"),
    }
    # No retries: a task that fails without a fault fails its query, as it does for users.
    session = driver_process.session("tests", {"master": "local[2]", "conf": conf})
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

        The checkpoint directory is the backend's, or for a query of Spark's own one of this name. With ``batches``,
        end after so many: Spark's own timers in processing time keep it making batches for ever.
        """
        where = str(self.directory / place) if isinstance(place, str) else place.checkpoint_location
        got: list[tuple[Any, ...]] = []
        query = (
            df.writeStream.foreachBatch(lambda out, batch: got.extend((batch, *row) for row in out.collect()))
            .option("checkpointLocation", where)
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


Options = Callable[[dict[str, str]], None]


@pytest.fixture
def set_conf(spark: SparkSession) -> Iterator[Options]:
    """Sets options of the session, until the test ends."""
    before: dict[str, str | None] = {}

    def choose(values: dict[str, str]) -> None:
        for name, value in values.items():
            before.setdefault(name, spark.conf.get(name, None))
            spark.conf.set(name, value)

    yield choose
    for name, earlier in before.items():
        if earlier is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, earlier)


@pytest.fixture
def rocksdb(set_conf: Options) -> None:
    """Spark's own transformWithState needs its RocksDB store."""
    store = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    set_conf({"spark.sql.streaming.stateStore.providerClass": store})


@pytest.fixture
def one_partition(set_conf: Options) -> None:
    """Spark's own operators start a Python worker, and open a store, for each of their partitions."""
    set_conf({"spark.sql.shuffle.partitions": "1"})


@pytest.fixture
def same_batches(set_conf: Options) -> None:
    """Spark makes no batches of its own accord: where it has the same, everything else must be the same, too."""
    set_conf({"spark.sql.streaming.noDataMicroBatches.enabled": "false"})


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
