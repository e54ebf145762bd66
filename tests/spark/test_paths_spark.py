"""Queries whose checkpoint directories are called like Spark's own, that are stopped, and whose coordinator dies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench._files_process import LATENCY, REQUESTS

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("paths_job.py")


def test_queries_go_on_at_any_path_end_when_stopped_and_start_behind_a_dead_coordinator(
    tmp_path: Path, seed: int
) -> None:
    (tmp_path / "in").mkdir()

    def run(number: int) -> dict[str, Any]:
        (tmp_path / "in" / f"{number}.json").write_text('{"k": 1}\n' * (number + 1))
        env = os.environ | {LATENCY: "0.1", REQUESTS: str(tmp_path / "requests")}
        command = [sys.executable, str(JOB), str(tmp_path), str(number), str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
        assert done.returncode == 0, done.stderr[-4000:]
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen

    for number, expected in enumerate(([0, [[1, 1]]], [1, [[1, 3]]])):
        seen = run(number)
        assert seen["there"] == [number > 0] * len(seen["there"])
        assert seen["counted"] == {name: [expected] for name in seen["counted"]}
        assert seen["backend"] == [expected]
        if number == 0:
            assert seen["stopped"] == [""] * len(seen["stopped"]), "stopped queries have failed"
            assert seen["killed"] == 1
            assert seen["failed starts"] == []
            assert seen["after"] == ["_dstl"]
