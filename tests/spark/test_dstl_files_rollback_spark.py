"""Spark goes on behind a rollback, and behind its own offline repartition of state, with the right sums."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from home import Home
from pyspark.sql import SparkSession

from dstl.files.inspection import roll_back
from dstl.files.records import FRESH_S
from dstl.runtime import system_runtime
from dstl.store import open_store

STORE = "spark.sql.streaming.stateStore"
STATE = "org.apache.spark.sql.execution.streaming.state"
KINDS = {"rocksdb": ("RocksDB", 1), "rocksdb-2": ("RocksDB", 2), "hdfs": ("HDFSBacked", 1)}


@pytest.fixture
def conf(spark: SparkSession, set_conf: Any) -> Iterator[Any]:
    """Sets options of the queries that are started next; ends the thread that makes snapshots at an interval."""

    def choose(kind: str, interval: str, partitions: int = 1) -> None:
        provider, version = KINDS[kind]
        set_conf(
            {
                f"{STORE}.providerClass": f"{STATE}.{provider}StateStoreProvider",
                f"{STORE}.checkpointFormatVersion": str(version),
                f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
                f"{STORE}.minDeltasForSnapshot": "2",
                f"{STORE}.maintenanceInterval": interval,
                "spark.sql.shuffle.partitions": str(partitions),
            }
        )

    def stop() -> None:
        stores = getattr(getattr(spark._jvm, STATE), "StateStore$").__getattr__("MODULE$")
        # First without its lock: a thread that makes a snapshot may wait for it, and would be waited for, for minutes.
        stores.stopMaintenanceTaskWithoutLock()
        stores.stop()

    choose.stop = stop  # type: ignore[attr-defined]
    stop()
    yield choose
    stop()


class Counted:
    """A count of keys, and what it should be."""

    def __init__(self, source: Any, root: str, pause: float = 0.0) -> None:
        self.source, self.root, self.pause = source, root, pause
        self.reads = True
        self.got: dict[str, int] = {}
        self.want: Counter[str] = Counter()

    def add(self, keys: int = 3) -> None:
        rows = [{"k": f"k{i % keys}", "v": i} for i in range(7 * keys)]
        self.source.add(rows)
        self.want.update(row["k"] for row in rows)

    def start(self) -> Any:
        def take(out: Any, batch: int) -> None:
            if self.reads:
                self.got.update(out.collect())
            time.sleep(self.pause)

        writer = self.source.read().groupBy("k").count().writeStream.outputMode("update").foreachBatch(take)
        return writer.option("checkpointLocation", self.root).trigger(availableNow=True).start()


def test_sums_after_a_rollback_are_those_of_a_query_that_was_never_rolled_back(home: Home, conf: Any) -> None:
    queries = {}
    for kind in KINDS:
        queries[kind] = Counted(home.stream("k string, v long"), f"dstl://{home.path}/{kind}", 0.6)
        for _ in range(4):
            queries[kind].add()
    running = []
    for kind, query in queries.items():
        conf(kind, "200ms")
        running.append(query.start())
    for each in running:
        each.awaitTermination()
    conf.stop()
    for query in queries.values():
        gone = asyncio.run(roll_back(query.root, 1, system_runtime(), open_store))
        assert any(path.endswith((".zip", ".snapshot")) for path in gone), gone
        query.pause = 0
    for _ in range(2):
        for kind, query in queries.items():
            conf(kind, "1h")
            query.start().awaitTermination()
            assert query.got == query.want, kind
            query.add()


@pytest.mark.skipif(pyspark.__version__ < "4.2", reason="before 4.2 Spark does not repartition state")
@pytest.mark.drawn(1)
@pytest.mark.parametrize("partitions", [5, 2])
@pytest.mark.parametrize("kind", ["rocksdb", "rocksdb-2"])
def test_state_that_spark_has_repartitioned_is_read_and_counted_on(
    kind: str, partitions: int, home: Home, conf: Any
) -> None:
    query, plain = (
        Counted(home.stream("k string, v long"), f"{scheme}://{home.path}/{scheme}") for scheme in ("dstl", "file")
    )
    both = (query, plain)
    conf(kind, "1h", partitions=3)
    for _ in range(2):
        for each in both:
            each.add(17)
            each.start().awaitTermination()
    for each in both:
        home.spark._streamingCheckpointManager.repartition(each.root, partitions)
        state = home.spark.read.format("statestore").load(each.root).select("key.k", "value.count", "partition_id")
        rows = state.collect()
        assert {row[0]: row[1] for row in rows} == each.want
        assert {row[2] for row in rows} == set(range(partitions))
        each.add(17)
        each.start().awaitTermination()
        assert each.got == each.want
    for start in (2, 3):
        feeds = [changes(home.spark, each.root, start) for each in both]
        assert feeds[0] == feeds[1]
    assert feeds[0], "the last batch has changed something"


def changes(spark: SparkSession, root: str, start: int) -> list[tuple[Any, ...]] | str:
    """Return the changes from a batch on, or what Spark says where it wrote none."""
    reader = spark.read.format("statestore").option("readChangeFeed", "true").option("changeStartBatchId", start)
    try:
        rows = reader.load(root).select("batch_id", "change_type", "key.k", "value.count", "partition_id").collect()
    except Exception as error:
        return str(re.findall(r"\[[A-Z_.]+\]", str(error))[0])
    return sorted(tuple(row) for row in rows)


def test_a_batch_that_foreach_batch_does_not_read_is_run_for_its_state(home: Home, conf: Any) -> None:
    query = Counted(home.stream("k string, v long"), f"dstl://{home.path}/query")
    conf("hdfs", "1h", partitions=2)
    for query.reads in (False, True, False, True):
        query.add()
        query.start().awaitTermination()
    assert query.got == query.want


class Deduplicated:
    """Keys that a query writes into JSON files once each, whose sink commits a batch before Spark does."""

    def __init__(self, source: Any, root: str, directory: Path) -> None:
        self.source, self.root, self.directory = source, root, directory
        self.want: list[str] = []

    def run(self, keys: list[str]) -> None:
        """Give it a batch of keys, new ones and old, and let it take what it has not."""
        self.source.add([{"k": key, "v": 1} for key in keys])
        self.want = sorted({*self.want, *keys})
        self.go_on()

    def go_on(self) -> None:
        writer = self.source.read().dropDuplicates(["k"]).writeStream.format("json").option("path", str(self.directory))
        writer.option("checkpointLocation", self.root).trigger(availableNow=True).start().awaitTermination()

    def crash_before_the_commit(self) -> None:
        """Take away the record of the last commit: the sink's is in its own log already."""
        manifests = Path(self.root.removeprefix("dstl://")) / "_dstl" / "manifests"
        min(manifests.iterdir()).unlink()  # the newest

    def check(self, spark: SparkSession) -> None:
        written = sorted(row[0] for row in spark.read.json(str(self.directory)).select("k").collect())
        state = sorted(row[0] for row in spark.read.format("statestore").load(self.root).select("key.k").collect())
        assert (written, state) == (self.want, self.want)


@pytest.mark.parametrize("kind", ["rocksdb", "hdfs"])
def test_a_batch_that_its_sink_has_and_spark_has_not_is_run_for_its_state(kind: str, home: Home, conf: Any) -> None:
    conf(kind, "1h", partitions=2)
    query = Deduplicated(home.stream("k string, v long"), f"dstl://{home.path}/query", home.path / "out")
    query.run(["a", "b", "c"])
    query.crash_before_the_commit()
    query.run(["a", "d"])
    query.check(home.spark)
    query.run(["b", "e"])
    query.crash_before_the_commit()
    query.run(["c", "d", "e", "f"])
    query.check(home.spark)
    # What the application's coordinator has seen is good for a second.
    time.sleep(FRESH_S)
    asyncio.run(roll_back(query.root, 2, system_runtime(), open_store))
    query.go_on()
    query.run(["d", "e", "f", "g"])
    query.check(home.spark)
