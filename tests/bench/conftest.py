"""Benchmarks with a session of Spark's run in processes of their own: this one may have another."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_bench() -> Callable[..., dict[str, Any]]:
    """Runs ``python -m bench``, and returns the figures on its last line."""

    def run(*words: object) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench", *map(str, words), "--json"]
        env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return figures

    return run
