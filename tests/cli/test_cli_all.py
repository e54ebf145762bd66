"""What every command of ``dstl`` has: a version, JSON, exit codes in its help."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

COMMANDS = [
    ["demo"],
    ["gc"],
    ["taskmanager"],
    ["ui"],
    *(["checkpoints", verb] for verb in ("list", "show", "verify", "watch")),
    *(["files", verb] for verb in ("list", "verify", "export", "rollback")),
    *(["savepoint", verb] for verb in ("create", "list", "verify", "delete")),
    *(["segment", verb] for verb in ("show", "dump")),
    *(["state", verb] for verb in ("list", "read")),
]


def dstl(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dstl.cli", *words], capture_output=True, text=True, timeout=60, env={"COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_that_of_the_package() -> None:
    assert dstl("--version").strip() == f"dstl {version('dstl-pyspark')}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_json_and_says_its_exit_codes(command: list[str]) -> None:
    shown = " ".join(dstl(*command, "--help").split())
    assert "--json" in shown
    assert "Exit codes: 0 " in shown
