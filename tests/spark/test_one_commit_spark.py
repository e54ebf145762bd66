"""``checkpoint_location``: Spark's commits are the checkpoints. Failures, restarts, savepoints, bad input.

What users do with a batch is walked in ``test_batch_idioms.py``, kills of whole processes in
``test_dstl_files_kills_spark.py`` (the long form has this mode as version 0).
"""

import asyncio
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.report import CheckpointReport
from dstl.errors import CheckpointDeclined, Invalid, MissingState, TaskManagerLost
from dstl.files.inspection import opened_files, roll_back
from dstl.runtime import system_runtime
from dstl.spark import StateBackend, cause, count
from dstl.store import open_store

pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar of dstl:// cannot be built"),
]


class Job:
    """A count per key whose checkpoint directory lies in the backend's log."""

    def __init__(self, spark: SparkSession, source: Any, location: Path) -> None:
        self.spark, self.source, self.location = spark, source, location
        self.root = f"dstl://{location}/_spark"
        self.expected: Counter[str] = Counter()
        self.got: dict[int, dict[str, int]] = {}
        self.reports: list[CheckpointReport] = []

    def add(self, batches: int = 1) -> None:
        for _ in range(batches):
            rows = [{"k": f"k{i % 7}", "v": i} for i in range(30 + self.source.files)]
            self.source.add(rows)
            self.expected.update(row["k"] for row in rows)

    def run(
        self, fail_at: int = -1, kill_at: int = -1, savepoint: str = "", parallelism: int = 3, **settings: Any
    ) -> None:
        def each(df: DataFrame, batch: int) -> None:
            df.count()
            rows = {row["k"]: row["n"] for row in df.collect()}
            if batch == fail_at:
                raise RuntimeError("the sink is gone")
            if batch == kill_at:
                os.kill(backend.task_manager_pids[-1], signal.SIGKILL)
            self.got[batch] = rows

        with StateBackend(self.location, parallelism=parallelism, spark=self.spark, **settings) as backend:
            backend.add_listener(lambda r: self.reports.append(r) if isinstance(r, CheckpointReport) else None)
            # An operator of Spark's own in the same query: its state rides in the same record.
            distinct = self.source.read().dropDuplicates(["k", "v", "file"])
            out = backend.aggregate(distinct, by="k", name="counts", n=count())
            writer = out.writeStream.foreachBatch(each).option("checkpointLocation", backend.checkpoint_location)
            writer.trigger(availableNow=True).start().awaitTermination()
            if savepoint:
                backend.savepoint(savepoint)

    def commits(self) -> list[int]:
        async def read() -> list[int]:
            async with opened_files(self.root, system_runtime(), open_store) as files:
                return files.batches

        return asyncio.run(read())

    def checkpointed(self) -> int:
        async def read() -> int:
            return (await ManifestReader(open_store(str(self.location)), system_runtime()).scan()).retained[-1].batch_id

        return asyncio.run(read())


class Numbered:
    """A source whose rows name their file, so that none is another's duplicate."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream(schema="k string, v long, file long")

    @property
    def files(self) -> int:
        return int(self._stream.files)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self._stream.add([{**row, "file": self.files} for row in rows])

    def read(self) -> DataFrame:
        frame: DataFrame = self._stream.read()
        return frame


def test_commits_are_checkpoints_through_a_failure_another_parallelism_a_savepoint_and_a_rollback(
    spark: SparkSession, stream: Any, tmp_path: Path
) -> None:
    job = Job(spark, Numbered(stream), tmp_path / "job")
    job.add(3)
    with pytest.raises(StreamingQueryException, match="the sink is gone"):
        job.run(fail_at=1)
    # Both actions of batch 1 were run and acknowledged, and Spark has not committed it.
    assert job.commits() == [0]
    assert job.checkpointed() == 0
    with pytest.raises(StreamingQueryException) as stopped:
        job.run(kill_at=1)
    # The TaskManager had all that the commit needs.
    assert isinstance(cause(stopped.value), TaskManagerLost | CheckpointDeclined), stopped.value
    assert job.commits() == [0]
    job.run(parallelism=5, savepoint="kept")
    assert job.commits() == [0, 1, 2]
    assert job.checkpointed() == 2
    assert job.got[2] == dict(job.expected)
    assert [(each.batch_id, each.requests) for each in job.reports] == [(0, 1), (1, 1), (2, 1)]
    records = list((tmp_path / "job" / "manifests").iterdir())
    assert len(records) == 3 + 6, (
        "a fence for each driver, and two records a batch: offsets/N, and commits/N with all else"
    )

    asyncio.run(roll_back(job.root, 1, system_runtime(), open_store))
    job.run()
    assert job.commits() == [0, 1, 2]
    assert job.got[2] == dict(job.expected)
    with pytest.raises(MissingState, match="keeps the commit of batches 0 to 2"):
        asyncio.run(roll_back(job.root, 7, system_runtime(), open_store))

    other = Job(spark, Numbered(stream), tmp_path / "other")
    other.expected = Counter(job.expected)
    other.add()
    other.run(restore_from=tmp_path / "job" / "savepoints" / "kept", parallelism=2)
    assert other.got[0] == dict(other.expected)


def test_another_query_s_location_and_several_places_are_refused(
    spark: SparkSession, stream: Any, tmp_path: Path
) -> None:
    source = stream()
    source.add([{"k": "a", "v": 1}])
    with StateBackend(tmp_path / "job", parallelism=2, spark=spark) as backend:
        out = backend.aggregate(source.read(), by="k", name="counts", n=count())
        elsewhere = out.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "elsewhere"))
        elsewhere.trigger(availableNow=True).start().awaitTermination()
        root = backend.checkpoint_location
        assert root == backend.checkpoint_location == f"dstl://{tmp_path}/job/_spark"
        held = sorted((tmp_path / "job" / "manifests").iterdir())
        with pytest.raises(
            Exception, match=r"belongs to query .*; this is query .*Give this query a location of its own"
        ):
            out.writeStream.format("noop").option("checkpointLocation", root).start()
        assert sorted((tmp_path / "job" / "manifests").iterdir()) == held
    with (
        StateBackend(f"{tmp_path}/a,{tmp_path}/b", spark=spark) as backend,
        pytest.raises(Invalid, match="cannot hold Spark's checkpoint directory as well"),
    ):
        backend.checkpoint_location  # noqa: B018
