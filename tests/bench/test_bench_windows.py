"""The benchmark of windows, in its short form: both sides of a query, and the cost of eviction."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import windows

ROOT = Path(__file__).parents[2]


def test_finding_what_is_due_does_not_cost_more_where_more_is_held():
    few, many = (min(windows.eviction(held, rounds=9)["cpu_ms"] for _ in range(3)) for held in (5_000, 250_000))
    assert many < 5 * few + 1


@pytest.mark.spark
@pytest.mark.long
def test_command_line_prints_one_json_object_last():
    command = [sys.executable, "-m", "bench", "windows", "--partitions", "2", "--events", "20000", "--batches", "2"]
    command += ["--keys", "500", "--held", "1000", "--json"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True, env=environment)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [(each["query"], each["mode"]) for each in figures["runs"]] == [
        ("tumbling", "append"),
        ("tumbling", "update"),
        ("sliding", "append"),
        ("dedup", "append"),
    ]
    assert all(each["dstl"] > 0 and each["spark"] > 0 for each in figures["runs"])
    assert figures["eviction"][0]["held"] == 1000
