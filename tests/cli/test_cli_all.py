"""What every command of ``dstl`` has: a version, JSON, exit codes in its help."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dstl.cli import application, console
from dstl.errors import Invalid
from dstl.options import S3Options

COMMANDS = [
    ["demo"],
    ["gc"],
    ["taskmanager"],
    ["ui"],
    *(["checkpoints", verb] for verb in ("list", "show", "verify", "watch")),
    *(["files", verb] for verb in ("list", "verify", "export", "rollback", "fork", "release", "migrate")),
    *(["savepoint", verb] for verb in ("create", "list", "transform", "verify", "delete")),
    *(["segment", verb] for verb in ("show", "dump")),
    *(["state", verb] for verb in ("list", "read", "changes")),
]


def dstl(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dstl.cli", *words], capture_output=True, text=True, timeout=60, env={"COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_that_of_the_package() -> None:
    assert dstl("--version").strip() == f"dstl {version('dstl-pyspark')}"


def leaves(command: Any, *path: str) -> Iterator[tuple[list[str], Any]]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield list(path), command
    for name, each in inner.items():
        yield from leaves(each, *path, name)


def test_these_are_all_commands() -> None:
    assert sorted(COMMANDS) == sorted(path for path, _ in leaves(typer.main.get_command(application())))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_json_and_says_its_exit_codes(command: list[str]) -> None:
    done = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(application(), [*command, "--help"])
    assert done.exit_code == 0
    shown = " ".join(done.output.split())
    assert "--json" in shown
    assert "Exit codes: 0 " in shown
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    # A paragraph's lines are full: the next word would not have fitted.
    for line, after in pairwise(each.strip() for each in lines[: lines.index(next(x for x in lines if "╭" in x))]):
        if line and after and not line.startswith("Usage"):
            assert len(f"{line} {after.split()[0]}") > 78, line


def test_a_command_finds_s3_as_the_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the job's environment it asked AWS, and said that a bucket there does not answer, or is not ours."""
    monkeypatch.setenv("DSTL_S3_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("DSTL_S3_CONNECT_TIMEOUT_S", "2")
    assert console.s3_options(None) == S3Options(endpoint_url="http://127.0.0.1:1", connect_timeout_s=2)
    assert console.s3_options("http://127.0.0.1:3").endpoint_url == "http://127.0.0.1:3"
    monkeypatch.setenv("DSTL_S3_REGOIN", "x")
    with pytest.raises(Invalid, match="DSTL_S3_REGOIN"):
        console.s3_options(None)
