"""The examples run, all in one Spark session of their own, and say what their texts promise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN = """
import importlib, json, sys
from pathlib import Path
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.python.unix.domain.socket.enabled", "true")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
found = {name: importlib.import_module(name).main(spark, Path(name)) for name in sys.argv[1:]}
spark.stop()
print(json.dumps(found))
"""
SAID = {
    "aggregates": [["s1", 3, 20.0, 18.0, 21.5], ["s2", 1, 3.0, 3.0, 3.0], ["s3", 1, 7.0, 7.0, 7.0]],
    "deduplicate": [["e1", 5], ["e2", 7], ["e3", 9], ["remembered", 3]],
    "event_rules": [
        ["ann", 4, "service before login"],
        ["bob", 1, "service before login"],
        ["bob", 3, "logged in already, at 2"],
    ],
    "migrate": [["a", 3], ["c", 1]],
    "sessions": [["ann", 2, 20], ["bob", 1, 0]],
    "top_products": [["north", "tea 6, jam 5, oil 4"], ["south", "tea 2, jam 1"]],
}


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
def test_every_example_runs_and_says_what_it_promises(tmp_path: Path) -> None:
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *SAID],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == SAID


def test_every_example_is_run_and_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert [file.stem for file in files] == sorted(SAID)
    assert {file.name: n for file in files if (n := len(file.read_text().splitlines())) >= 100} == {}
