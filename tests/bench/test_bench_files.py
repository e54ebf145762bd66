"""The benchmark of files runs both kinds in one session, and its figures are those that the issue asks for."""

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.spark
@pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar of dstl:// cannot be built")
@pytest.mark.long
def test_files(tmp_path: Path, run_bench: Any) -> None:
    arguments = ["--queries", "count", "--partitions", 3, "--batches", 5, "--latency-ms", 5]
    runs = run_bench("files", *arguments, "--work", tmp_path)["runs"]
    assert [(each["query"], each["partitions"], each["kind"]) for each in runs] == [
        ("count", 3, "spark"),
        ("count", 3, "dstl"),
    ]
    spark, dstl = runs
    assert dstl["requests_per_batch"] == 2
    assert spark["requests_per_batch"] > 2 * 3
    for each in runs:
        assert 0 < each["batch_ms"]["p50"] <= each["batch_ms"]["p99"]
