"""Real-time mode on ``dstl://``: both barriers come at a batch's end, and the state is exact over a restart."""

import asyncio
import time
from typing import Any

import pytest
from home import Home
from pyspark.sql import DataFrame, SparkSession

from dstl.files.inspection import opened_files
from dstl.runtime import system_runtime
from dstl.store import open_store

pytestmark = pytest.mark.long

STORE = "spark.sql.streaming.stateStore"
SETTINGS = {
    f"{STORE}.checkpointFormatVersion": "2",
    f"{STORE}.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.realTimeMode.minBatchDuration": "500ms",
    # All stages of a batch run at once, and the session has two slots.
    "spark.sql.shuffle.partitions": "1",
}
LIMIT_S = 60.0


@pytest.fixture
def real_time(spark: SparkSession, set_conf: Any, rocksdb: None) -> Any:
    """The JVM, set up for stateful queries in real-time mode, which are there since Spark 4.3."""
    if tuple(map(int, spark.version.split(".")[:2])) < (4, 3):
        pytest.skip(f"Spark {spark.version} has no stateful operators in real-time mode")
    set_conf(SETTINGS)
    return spark._jvm


def test_a_count_in_real_time_mode_is_exact_over_a_restart(real_time: Any, home: Home) -> None:
    sources = real_time.org.apache.spark.sql.execution.streaming.sources
    make = getattr(sources, "LowLatencyMemoryStream$").__getattr__("MODULE$").singlePartition
    memory = make(home.spark._jsparkSession, real_time.org.apache.spark.sql.Encoders.STRING())
    place = f"dstl://{home.path}/query"
    writer = DataFrame(memory.toDF(), home.spark).groupBy("value").count().writeStream.outputMode("update")
    writer = writer.format("console").option("numRows", 1).option("checkpointLocation", place)
    writer._jwrite.trigger(real_time.org.apache.spark.sql.streaming.Trigger.RealTime("1 second"))
    for round_ in (1, 2):
        query = writer.start()
        for _ in range(5):
            memory.addData(real_time.PythonUtils.toSeq(["a", "b", "a"]))
            time.sleep(0.2)
        # What was added is in the batch that runs now, or in the next one.
        ended, deadline = len(query.recentProgress), time.monotonic() + LIMIT_S
        while len(query.recentProgress) < ended + 2 and time.monotonic() < deadline and query.isActive:
            time.sleep(0.1)
        query.stop()
        rows = home.spark.read.format("statestore").load(place).select("key.value", "value.count").collect()
        assert dict(map(tuple, rows)) == {"a": 10 * round_, "b": 5 * round_}
    barriers = asyncio.run(_barriers(place))
    assert "commits/3" in barriers
    records = list((home.path / "query" / "_dstl" / "manifests").iterdir())
    assert len(records) == 2 + len(barriers), "a fence for each run, and a record for each barrier"


async def _barriers(place: str) -> list[str]:
    async with opened_files(place, system_runtime(), open_store) as files:
        return [path for path in files.entries if path.startswith(("offsets/", "commits/"))]
