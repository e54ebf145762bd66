"""``checkpoint_location``: Spark's commits are the checkpoints. Failures, restarts, savepoints, bad input.

What users do with a batch is walked in ``test_batch_idioms.py``, kills of whole processes in
``test_dstl_files_kills_spark.py`` (the long form has it as version 0).
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from home import Home
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

from dstl.checkpoint.assembly import recovery_work
from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.report import CheckpointReport
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import CheckpointDeclined, Fenced, Invalid, MissingState, TaskManagerLost
from dstl.files.inspection import roll_back
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.runtime import system_runtime
from dstl.spark import StateBackend, cause
from dstl.store import open_store
from worlds import driver_process


class Job:
    """A count per key whose checkpoint directory lies in the backend's log."""

    def __init__(self, home: Home, name: str) -> None:
        self.home, self.name = home, name
        self.source = Numbered(home.stream)
        self.location = home.path / name
        self.root = f"dstl://{self.location}/_spark"
        self.expected: Counter[str] = Counter()
        self.got: dict[int, dict[str, int]] = {}
        self.reports: list[CheckpointReport] = []

    def add(self, batches: int = 1) -> None:
        for _ in range(batches):
            rows = [{"k": f"k{i % 7}", "v": i} for i in range(30 + self.source.files)]
            self.source.add(rows)
            self.expected.update(row["k"] for row in rows)

    def run(
        self,
        fail_at: int = -1,
        kill_at: int = -1,
        meanwhile: Mapping[int, Callable[[], object]] = {},
        savepoint: str = "",
        parallelism: int = 3,
        **settings: Any,
    ) -> None:
        def each(df: DataFrame, batch: int) -> None:
            df.count()
            rows = {row["k"]: row["n"] for row in df.collect()}
            if batch == fail_at:
                raise RuntimeError("the sink is gone")
            if batch == kill_at:
                os.kill(backend.task_manager_pids[-1], signal.SIGKILL)
            if batch in meanwhile:
                meanwhile[batch]()
            self.got[batch] = rows

        with self.home.backend(self.name, parallelism=parallelism, **settings) as backend:
            backend.add_listener(lambda r: self.reports.append(r) if isinstance(r, CheckpointReport) else None)
            self.writer(backend, each).trigger(availableNow=True).start().awaitTermination()
            if savepoint:
                backend.savepoint(savepoint)

    def writer(self, backend: StateBackend, each: Callable[[DataFrame, int], None]) -> DataStreamWriter:
        # An operator of Spark's own in the same query: its state rides in the same record.
        distinct = self.source.read().dropDuplicates(["k", "v", "file"])
        out = backend.groupBy(distinct, "k").agg(F.count("*").alias("n"), name="counts")
        return out.writeStream.foreachBatch(each).option("checkpointLocation", backend.checkpoint_location)


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


def test_behind_a_damaged_record_starts_are_ordinary_again_once_its_checkpoint_would_be_subsumed(home: Home) -> None:
    job = Job(home, "job")
    job.add(3)
    job.run()
    newest = min((job.location / "manifests").iterdir())  # names count down
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(Py4JJavaError, match="is damaged"):
        job.run()
    for _ in range(2):
        job.add()
        job.run(restore="previous", checkpoints=CheckpointOptions(retained=2))
    job.add()
    job.run(checkpoints=CheckpointOptions(retained=2))
    assert home.commits("job")[-1] == 5
    assert job.got[5] == job.expected


def test_commits_are_checkpoints_through_a_failure_another_parallelism_a_savepoint_and_a_rollback(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every record is counted, and the end of a run may make one for its bases.
    monkeypatch.setenv("DSTL_MATERIALIZATION_ENABLED", "false")
    job = Job(home, "job")
    job.add(3)
    with pytest.raises(StreamingQueryException, match="the sink is gone"):
        job.run(fail_at=1)
    # Both actions of batch 1 were run and acknowledged, and Spark has not committed it.
    assert home.commits("job") == [0]
    assert home.checkpointed("job") == 0
    with pytest.raises(StreamingQueryException) as stopped:
        job.run(kill_at=1)
    # The TaskManager had all that the commit needs.
    assert isinstance(cause(stopped.value), TaskManagerLost | CheckpointDeclined), stopped.value
    assert home.commits("job") == [0]
    job.run(parallelism=5, savepoint="kept")
    assert home.commits("job") == [0, 1, 2]
    assert home.checkpointed("job") == 2
    assert job.got[2] == dict(job.expected)
    assert [(each.batch_id, each.requests) for each in job.reports] == [(0, 1), (1, 1), (2, 1)]
    records = list((home.path / "job" / "manifests").iterdir())
    assert len(records) == 3 + 6, (
        "a fence for each driver, and two records a batch: offsets/N, and commits/N with all else"
    )

    asyncio.run(roll_back(job.root, 1, system_runtime(), open_store))
    job.run()
    assert home.commits("job") == [0, 1, 2]
    assert job.got[2] == dict(job.expected)
    with pytest.raises(MissingState, match="keeps the commit of batches 0 to 2"):
        asyncio.run(roll_back(job.root, 7, system_runtime(), open_store))

    other = Job(home, "other")
    other.expected = Counter(job.expected)
    other.add()
    other.run(restore_from=home.path / "job" / "savepoints" / "kept", parallelism=2)
    assert other.got[0] == dict(other.expected)


def test_of_two_drivers_in_two_processes_one_commits_and_the_other_is_told_to_stop(home: Home) -> None:
    job = Job(home, "job")
    job.add(2)
    seen: list[str] = []

    def run_another() -> None:
        command = [sys.executable, __file__, str(home.path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
        seen.append(done.stdout + done.stderr[-2000:])

    with pytest.raises(StreamingQueryException) as stopped:
        job.run(meanwhile={1: run_another})
    error = cause(stopped.value)
    assert isinstance(error, Fenced), (error, seen)
    assert re.match(rf"{job.location} was taken over: .*; this driver \(epoch 1\) must stop", str(error))
    assert seen[0].startswith(json.dumps({"1": job.expected}, sort_keys=True) + "\n")
    job.add()
    job.run()
    assert (home.commits("job"), job.got[2]) == ([0, 1, 2], job.expected)


def test_a_second_backend_in_the_same_session_takes_over_from_a_run_that_spark_stops(home: Home) -> None:
    job = Job(home, "job")
    job.add(2)
    with home.backend("job", parallelism=3) as first:
        query = job.writer(first, lambda df, batch: df.count() and None).start()
        query.processAllAvailable()
        job.add()
        job.run()
        assert (query.isActive, query.exception()) == (False, None)
    job.add()
    job.run()
    assert (home.commits("job"), sorted(job.got), job.got[3]) == ([0, 1, 2, 3], [2, 3], job.expected)


@pytest.mark.parametrize("runs", [4, pytest.param(50, marks=pytest.mark.long)])
def test_runs_of_one_batch_keep_log_and_restore_short(home: Home, runs: int) -> None:
    """Prevents that a job that a scheduler starts reads all changes since its first run at each start."""
    job = Job(home, "job")
    often = MaterializationOptions(min_log_bytes=1)
    work = []
    for run in range(runs):
        job.add()
        job.run(materialization=often)
        newest = asyncio.run(ManifestReader(open_store(str(job.location)), system_runtime()).scan()).retained[-1]
        assert (newest.batch_id, job.got[run]) == (run, dict(job.expected))
        work.append(recovery_work(newest))
        assert len(newest.segments) <= 3, "two generations and the batch behind them"
    assert work[-1].base_bytes > 0
    assert max(each.log_bytes for each in work) < 3 * work[0].log_bytes
    assert {report.batch_id for report in job.reports} == set(range(runs))
    assert not asyncio.run(verify_location(open_store(str(job.location)), system_runtime())).problems


def test_a_checkpoint_directory_elsewhere_or_nowhere_is_refused_with_the_line_to_write(home: Home) -> None:
    source = home.stream()
    source.add([{"k": "a", "v": 1}])
    # Of several locations the first has Spark's half.
    with StateBackend(f"{home.path}/a,{home.path}/b", parallelism=2, spark=home.spark) as backend:
        out = backend.groupBy(source.read(), "k").agg(F.count("*").alias("n"), name="counts")
        root = backend.checkpoint_location
        assert root == backend.checkpoint_location == f"dstl://{home.path}/a/_spark"
        for given in ({"checkpointLocation": str(home.path / "elsewhere")}, {}):
            writer = out.writeStream.format("noop").options(**given).trigger(availableNow=True)
            with pytest.raises(StreamingQueryException) as refused:
                writer.start().awaitTermination()
            error = cause(refused.value)
            assert isinstance(error, Invalid)
            assert '\n    .option("checkpointLocation", backend.checkpoint_location)\n' in str(error)
        # Nothing is taken over by a query that is refused.
        assert not (home.path / "a" / "manifests").exists()
        source.drain(out.select("k", "n"), backend)
    assert source.output("k string, n long") == [("a", 1)]


if __name__ == "__main__":
    conf = {**driver_process.LOCAL, **driver_process.INTERPRETED, "spark.sql.shuffle.partitions": "3"}
    other = Job(Home(driver_process.session("another", {"master": "local[2]", "conf": conf}), Path(sys.argv[1])), "job")
    other.run()
    print(json.dumps(other.got, sort_keys=True))
