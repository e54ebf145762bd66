"""A Java job, which has no Python driver, keeps its queries on ``dstl://``; a session elsewhere reads what it keeps."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from home import Home

from dstl.jvm.build import spark_jars
from dstl.spark import jar_path
from worlds.driver_process import INTERPRETED, LOCAL
from worlds.java import compiled

SOURCE = Path(__file__).with_name("java") / "CountJob.java"
BATCHES, ROWS, KEYS = 3, 40, 5


def test_two_queries_of_a_java_job_count_on_over_a_restart_and_are_read_from_another_application(home: Home) -> None:
    classes = home.path / "classes"
    compiled(SOURCE, classes)
    job = Path(shutil.make_archive(str(home.path / "job"), "zip", classes)).rename(home.path / "job.jar")
    source = home.stream("k string, v long")
    rows = [[{"k": f"k{(i + b) % KEYS}", "v": i * b} for i in range(ROWS)] for b in range(BATCHES)]
    source.add(rows[0])
    source.add(rows[1])
    _run(job, source.directory / "in", home.path)
    source.add(rows[2])
    _run(job, source.directory / "in", home.path)
    expected, totals = Counter[str](), Counter[str]()
    for row in (row for batch in rows for row in batch):
        expected[row["k"]] += 1
        totals[row["k"]] += row["v"]
    for provider in ("RocksDB", "HDFSBacked"):
        place = home.path / "queries" / provider
        # A fence for each run, and two records a batch.
        assert len(list((place / "_dstl" / "manifests").iterdir())) == 2 + 2 * BATCHES
        assert [each.name for each in place.iterdir()] == ["_dstl"]
        found = home.spark.read.format("statestore").load(f"dstl://{place}")
        state = {row[0]: (row[1], row[2]) for row in found.select("key.k", "value.count", "value.sum").collect()}
        assert state == {key: (expected[key], totals[key]) for key in expected}


def _run(job: Path, rows: Path, work: Path) -> None:
    """Submit the job as a cluster's user would: no Python but the one that is named."""
    home = spark_jars()
    conf = {
        "spark.plugins": "dstl.spark.DstlPlugin",
        "spark.dstl.python": sys.executable,
        **LOCAL,
        **INTERPRETED,
        "spark.local.dir": str(work / "local"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }
    command = [str(home.parent / "bin" / "spark-submit"), "--master", "local[2]", "--class", "CountJob"]
    command += ["--jars", jar_path(), *(word for name, value in conf.items() for word in ("--conf", f"{name}={value}"))]
    command += [str(job), str(rows), f"dstl://{work}/queries"]
    hidden = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "VIRTUAL_ENV", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PATH": "/usr/bin:/bin", "SPARK_HOME": str(home.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
