"""The benchmark of files runs both kinds in one session, and its figures are those that the issue asks for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar of dstl:// cannot be built")
@pytest.mark.long
def test_files(tmp_path: Path) -> None:
    """In a process of its own: this one may have another session."""
    arguments = ["--queries", "count", "--partitions", "3", "--batches", "5", "--latency-ms", "5", "--json"]
    command = [sys.executable, "-m", "bench", "files", *arguments, "--work", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads(done.stdout.strip().splitlines()[-1])["runs"]
    assert [(each["query"], each["partitions"], each["kind"]) for each in runs] == [
        ("count", 3, "spark"),
        ("count", 3, "dstl"),
    ]
    spark, dstl = runs
    assert dstl["requests_per_batch"] == 2
    assert spark["requests_per_batch"] > 2 * 3
    for each in runs:
        assert 0 < each["batch_ms"]["p50"] <= each["batch_ms"]["p99"]
