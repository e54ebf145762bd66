"""One Spark session for all Spark tests of a run: starting a JVM costs more than most tests."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from home import Home
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from dstl.spark import jar_path
from worlds import driver_process
from worlds.driver_process import INTERPRETED, LOCAL

# Of the session and of the programs that tests start, whichever comes first.
os.environ["PYSPARK_PYTHON"] = sys.executable


@pytest.fixture(autouse=True)
def random_materialization(seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Materialize at other moments in every Spark test, never or all the time; the printed seed repeats it."""
    rng = random.Random(f"{seed}-{request.node.nodeid}")
    if rng.random() < 0.75:
        monkeypatch.setenv("DSTL_MATERIALIZATION_INTERVAL_S", str(rng.choice([0.1, 0.5, 1.0, 5.0])))
        monkeypatch.setenv("DSTL_MATERIALIZATION_MIN_PAUSE_S", "0")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    work = tmp_path_factory.mktemp("spark")
    conf = {
        **LOCAL,
        **INTERPRETED,
        # For the tests of queries without a StateBackend; the others do not notice.
        "spark.jars": jar_path(),
        "spark.plugins": "dstl.spark.DstlPlugin",
        "spark.dstl.python": sys.executable,
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.session.timeZone": "UTC",
        # Of the two managers of Spark's own checkpoint directory, this one starts no shell for each link that it looks
        # for. A query that waits for rows lists its directory at each look.
        "spark.sql.streaming.pollingDelay": "100ms",
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        ),
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


HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the session, and let the classes of these modules travel by value, as those of ``__main__`` do.

    Spark's workers cannot import a test module.
    """
    cloudpickle.register_pickle_by_value(sys.modules[Home.__module__])
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == HERE:
            cloudpickle.register_pickle_by_value(item.module)
            if "spark" in item.fixturenames:
                item.add_marker(pytest.mark.spark)


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
def rocksdb(spark: SparkSession, set_conf: Options, one_partition: None) -> None:
    """Spark's own transformWithState needs its RocksDB store."""
    _ = spark.streams  # makes what a batch query's stores look for, which 4.1 makes for the first streaming query
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


@pytest.fixture
def home(spark: SparkSession, tmp_path: Path) -> Home:
    return Home(spark, tmp_path)
