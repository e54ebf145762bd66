"""``dstl taskmanager``: a TaskManager by hand; where its secret comes from, and how it ends."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dstl.checkpoint.fleet.resource_manager import ExecutorHosts
from dstl.checkpoint.service import CoordinatorService
from dstl.cli import application
from dstl.errors import Invalid
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.virtual_time import seeded_runtime
from worlds.service import coordinator

CANARY = "canary-0123456789abcdef"


async def one_host() -> ExecutorHosts:
    return ExecutorHosts(1, 60.0)


@contextlib.asynccontextmanager
async def coordinating(location: Path, seed: int) -> AsyncIterator[CoordinatorService]:
    service = coordinator(
        MemoryStore(),
        seeded_runtime(seed, SystemClock()),
        Secret(CANARY.encode()),
        {"executor_hosts": one_host},
        task_manager_config=TaskManagerConfig(str(location)).to_json(),
    )
    await service.start()
    try:
        yield service
    finally:
        await service.close()


def start(coordinator: object, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "dstl.cli", "taskmanager", "--coordinator", str(coordinator), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def ended(process: "subprocess.Popen[str]", given: str | None = None) -> tuple[int, str, str]:
    """Wait for the end; return its code, and what it has written on standard output and error."""

    def wait() -> tuple[int, str, str]:
        try:
            told, said = process.communicate(given, timeout=60)
        finally:
            process.kill()
        return process.returncode, told, said

    return await asyncio.to_thread(wait)


async def registered(service: CoordinatorService, ending: "asyncio.Future[tuple[int, str, str]] | None" = None) -> None:
    async with asyncio.timeout(60):
        while not service.fleet.is_complete:
            await service.fleet.changed(0.1)
            assert ending is None or not ending.done(), ending.result()


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_text(f"{CANARY}\n")
    return path


@pytest.mark.parametrize("how", ["file", "environment", "stdin"])
async def test_it_serves_until_its_application_ends(how: str, tmp_path: Path, secret_file: Path, seed: int) -> None:
    given: dict[str, tuple[list[str], dict[str, str], str | None]] = {
        "file": (["--secret-file", str(secret_file), "--json"], {}, None),
        "environment": (["--host", "127.0.0.7"], {"DSTL_SECRET": CANARY}, None),
        "stdin": (["--secret-file", "-"], {}, f"{CANARY}\n"),
    }
    arguments, environment, line = given[how]
    async with coordinating(tmp_path, seed) as service:
        process = start(f"127.0.0.1:{service.address.port}", *arguments, **environment)
        ending = asyncio.ensure_future(ended(process, line))
        await registered(service, ending)
        assert list(service.fleet.member_hosts) == ["127.0.0.7" if how == "environment" else "127.0.0.1"]
        assert list(service.fleet.pids) == [process.pid]
        assert CANARY not in command_line(process.pid)
    code, told, said = await ending
    assert code == 0, said
    assert "Traceback" not in said
    assert CANARY not in said
    if how == "file":
        started, done = map(json.loads, told.splitlines())
        assert (started["event"], done["event"], started["pid"]) == ("started", "ended", process.pid)
        assert started["member"] == done["member"]


async def test_a_signal_ends_it_well(tmp_path: Path, secret_file: Path, seed: int) -> None:
    async with coordinating(tmp_path, seed) as service:
        process = start(f"127.0.0.1:{service.address.port}", "--secret-file", str(secret_file))
        await registered(service)
        process.send_signal(signal.SIGTERM)
        code, _, said = await ended(process)
        assert code == 0, said


async def test_a_service_may_open_as_many_files_as_its_host_has(tmp_path: Path, secret_file: Path, seed: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with coordinating(tmp_path, seed) as service:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        try:
            process = start(f"127.0.0.1:{service.address.port}", "--secret-file", str(secret_file))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await registered(service)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    await ended(process)


async def test_another_applications_secret_is_refused_and_not_repeated(tmp_path: Path, seed: int) -> None:
    async with coordinating(tmp_path, seed) as service:
        other = start(f"127.0.0.1:{service.address.port}", DSTL_SECRET="another-canary-0123456789")
        code, _, said = await ended(other)
        assert code == 2
        assert "AccessDenied" in said
        assert "canary" not in said


async def test_without_a_coordinator_it_says_so_after_its_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    code, _, said = await ended(start(f"127.0.0.1:{port}", "--wait", "1s", DSTL_SECRET=CANARY))
    assert code == 3
    assert f"nothing answers at 127.0.0.1:{port}" in said


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (["--secret-file", "/nowhere/secret"], {}, "the secret file /nowhere/secret cannot be read"),
        ([], {}, "no secret"),
        ([], {"DSTL_SECRET": "short-canary"}, "at least 16 bytes"),
        (["--wait", "soon"], {"DSTL_SECRET": CANARY}, "not a duration"),
    ],
)
def test_what_is_wrong_is_refused_without_a_secret_in_sight(
    arguments: list[str], environment: dict[str, Any], reason: str
) -> None:
    command = ["taskmanager", "--coordinator", "127.0.0.1:1", *arguments]
    done = CliRunner(env={"DSTL_SECRET": "", **environment}).invoke(application(), command)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert "canary" not in done.output


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_secret_file_that_others_may_read_is_refused(mode: int, secret_file: Path) -> None:
    secret_file.chmod(mode)
    with pytest.raises(Invalid, match=f"mode {mode:03o}.*chmod 600") as refused:
        Secret.from_file(str(secret_file))
    assert CANARY not in str(refused.value)


def test_a_secret_file_is_read_without_the_white_space_around_it(secret_file: Path) -> None:
    assert Secret.from_file(str(secret_file)).reveal() == CANARY.encode()
    secret_file.write_bytes(b"\xff" * 20)
    with pytest.raises(Invalid, match="it is not text"):
        Secret.from_file(str(secret_file))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("driver:7077", "driver", 7077), ("[::1]:1", "::1", 1), ("10.0.0.1:65535", "10.0.0.1", 65535)],
)
def test_addresses_are_read_as_people_write_them(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize("text", ["", "driver", "driver:", ":1", "driver:x", "driver:65536", "driver:-1", "driver:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="write HOST:PORT"):
        Address.parse(text)
