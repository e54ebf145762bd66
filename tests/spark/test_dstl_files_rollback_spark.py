"""Spark goes on behind a rollback, and behind its own offline repartition of state, with the right sums."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dstl.files.inspection import roll_back
from dstl.options import S3Options
from dstl.runtime import system_runtime

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar of dstl:// cannot be built"),
]

STORE = "spark.sql.streaming.stateStore"
STATE = "org.apache.spark.sql.execution.streaming.state"
KINDS = {"rocksdb": ("RocksDB", 1), "rocksdb-2": ("RocksDB", 2), "hdfs": ("HDFSBacked", 1)}


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Any]:
    """Sets options for the queries that are started next; ends the thread that makes snapshots: it has an interval."""
    names: set[str] = set()

    def choose(kind: str, interval: str, partitions: int = 1) -> None:
        provider, version = KINDS[kind]
        chosen = {
            f"{STORE}.providerClass": f"{STATE}.{provider}StateStoreProvider",
            f"{STORE}.checkpointFormatVersion": str(version),
            f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
            f"{STORE}.minDeltasForSnapshot": "2",
            f"{STORE}.maintenanceInterval": interval,
            "spark.sql.shuffle.partitions": str(partitions),
        }
        names.update(chosen)
        for name, value in chosen.items():
            spark.conf.set(name, value)

    def stop() -> None:
        getattr(getattr(spark._jvm, STATE), "StateStore$").__getattr__("MODULE$").stop()

    choose.stop = stop  # type: ignore[attr-defined]
    stop()
    yield choose
    stop()
    for name in names:
        spark.conf.unset(name)


class Counted:
    """A count of keys, and what it should be."""

    def __init__(self, source: Any, root: str, pause: float = 0.0) -> None:
        self.source, self.root, self.pause = source, root, pause
        self.got: dict[str, int] = {}
        self.want: Counter[str] = Counter()

    def add(self, keys: int = 3) -> None:
        rows = [{"k": f"k{i % keys}", "v": i} for i in range(7 * keys)]
        self.source.add(rows)
        self.want.update(row["k"] for row in rows)

    def start(self) -> Any:
        def take(out: Any, batch: int) -> None:
            self.got.update(out.collect())
            time.sleep(self.pause)

        writer = self.source.read().groupBy("k").count().writeStream.outputMode("update").foreachBatch(take)
        return writer.option("checkpointLocation", self.root).trigger(availableNow=True).start()


def test_sums_after_a_rollback_are_those_of_a_query_that_was_never_rolled_back(
    spark: SparkSession, stream: Any, conf: Any, tmp_path: Path
) -> None:
    queries = {}
    for kind in KINDS:
        queries[kind] = Counted(stream("k string, v long"), f"dstl://{tmp_path}/{kind}", 0.6)
        for _ in range(6):
            queries[kind].add()
    running = []
    for kind, query in queries.items():
        conf(kind, "200ms")
        running.append(query.start())
    for each in running:
        each.awaitTermination()
    conf.stop()
    for query in queries.values():
        gone = asyncio.run(roll_back(query.root, 1, system_runtime(), S3Options()))
        assert any(path.endswith((".zip", ".snapshot")) for path in gone), gone
        query.pause = 0
    for _ in range(6):
        for kind, query in queries.items():
            conf(kind, "1h")
            query.start().awaitTermination()
            assert query.got == query.want, kind
            query.add()
