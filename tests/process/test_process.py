"""``python -m dstl.process`` as a process: how it begins, how it ends, and what it leaves behind."""

import asyncio
import base64
import contextlib
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstl.errors import AccessDenied
from dstl.process import launch_spec
from dstl.process.launch_spec import LaunchSpec, TaskManagerProcess, launch_detached
from dstl.process.lifecycle import ProcessLife
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Enlist, Enlisted, ReadMetrics, Register
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import TaskManager
from worlds.waiting import until

CANARY = b"canary-0123456789abcdef-canary"
PATIENCE_S = 30.0


class Coordinator:
    """As much of one as a TaskManager needs: it tells the configuration and takes the registration."""

    def __init__(self, secret: Secret, location: str) -> None:
        self.location = Path(location)
        self.server = RpcServer(secret, {Enlist: self._enlist, Register: self._register})
        self.registered: asyncio.Queue[tuple[Address, int]] = asyncio.Queue()
        self.lost = asyncio.Event()

    async def _enlist(self, peer: Peer, call: Enlist) -> Enlisted:
        return Enlisted((), TaskManagerConfig(str(self.location)).to_json())

    async def _register(self, peer: Peer, call: Register) -> Done:
        assert call.address is not None
        peer.on_lost = self.lost.set
        await self.registered.put((call.address, call.pid))
        return Done()

    async def member(self) -> tuple[Address, int]:
        async with asyncio.timeout(PATIENCE_S):
            return await self.registered.get()


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short directory (socket paths are) that is the children's TMPDIR."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def coordinating() -> AsyncIterator[tuple[Coordinator, LaunchSpec]]:
    with tempfile.TemporaryDirectory() as location:
        coordinator = Coordinator(Secret(CANARY), location)
        port = await coordinator.server.listen_tcp("127.0.0.1")
        yield coordinator, LaunchSpec("tm-1", Address("127.0.0.1", port), Secret(CANARY))
        await coordinator.server.close()


def in_thread(work: Callable[[], Any]) -> Any:
    return asyncio.get_running_loop().run_in_executor(None, work)


def leftovers(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything_to_be_seen(pid: int, *directories: Path) -> bytes:
    """Return what others can see of a process: the process list, its own entry, and its files."""
    seen = [subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, check=True).stdout]
    seen += [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    seen += [file.read_bytes() for each in directories for file in each.rglob("*") if file.is_file()]
    return b"\n".join(seen)


def is_gone(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


async def test_it_registers_serves_its_own_socket_shows_no_secret_and_ends_with_its_pipe(scratch: Path) -> None:
    async with coordinating() as (coordinator, spec):
        process = TaskManagerProcess(spec)
        address, pid = await coordinator.member()
        assert pid == process.pid
        assert not process.wait(0)
        socket_path = Path(address.path)
        assert socket_path.parent.parent == scratch
        assert (mode(socket_path), mode(socket_path.parent)) == (0o600, 0o700)
        assert address.port == 0, "it listens on TCP without being told to"
        friend = await AsyncConnection.open(address, spec.secret)
        friend.close()
        with pytest.raises(AccessDenied):
            await AsyncConnection.open(address, Secret.generate())
        seen = await in_thread(lambda: everything_to_be_seen(pid, scratch, coordinator.location))
        assert b"dstl.process" in seen
        for secret in (CANARY, base64.b64encode(CANARY), CANARY.hex().encode()):
            assert secret not in seen
        await in_thread(process.stop)
        assert process.wait(0)
        assert process._process.returncode == 0
        assert leftovers(scratch) == []
        await in_thread(process.stop)


async def test_it_ends_when_its_parent_is_killed(scratch: Path) -> None:
    """SIGKILL of the driver: nothing runs in it any more, but its end of the pipe closes."""
    parent = (
        "import sys, time\n"
        "from dstl.process.launch_spec import LaunchSpec\n"
        "from dstl.process.launch_spec import TaskManagerProcess\n"
        "process = TaskManagerProcess(LaunchSpec.from_line(sys.stdin.readline()))\n"
        "time.sleep(60)\n"
    )
    async with coordinating() as (coordinator, spec):
        started = await in_thread(
            lambda: subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, text=True)
        )
        assert started.stdin is not None
        try:
            started.stdin.write(spec.to_line().decode())
            started.stdin.flush()
            _, pid = await coordinator.member()
            started.send_signal(signal.SIGKILL)
            await in_thread(started.wait)
            async with asyncio.timeout(PATIENCE_S):
                await coordinator.lost.wait()
            await until(lambda: is_gone(pid), "the process's end")
            assert leftovers(scratch) == []
        finally:
            started.kill()
            started.wait()
            started.stdin.close()


async def test_one_without_a_free_descriptor_serves_who_is_connected_and_takes_others_later(scratch: Path) -> None:
    async with coordinating() as (coordinator, spec):
        process = TaskManagerProcess(spec)
        address, pid = await coordinator.member()
        friend = await AsyncConnection.open(address, spec.secret, role=Role.COORDINATOR)
        opened = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (opened + 8, 4096))
        crowd = [socket.socket(socket.AF_UNIX) for _ in range(60)]
        for each in crowd:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                each.connect(address.path)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) >= opened + 8, "its connections")
        for _ in range(20):
            await friend.call(ReadMetrics())
        for each in crowd:
            each.close()
        # asyncio looks again for a connection to accept after a second.
        async with asyncio.timeout(PATIENCE_S):
            another = await AsyncConnection.open(address, spec.secret, role=Role.COORDINATOR)
            await another.call(ReadMetrics())
        for each in (friend, another):
            each.close()
        assert not process.wait(0)
        await in_thread(process.stop)
        assert leftovers(scratch) == []


async def test_one_may_open_as_many_files_as_its_host_allows(scratch: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with coordinating() as (coordinator, spec):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        try:
            process = TaskManagerProcess(spec)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        _, pid = await coordinator.member()
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
        await in_thread(process.stop)


async def test_what_a_killed_one_leaves_on_the_disk_is_removed_by_the_next(scratch: Path) -> None:
    """Before, each that the kernel killed for its memory left its state in TMPDIR for ever, until that was full."""
    async with coordinating() as (coordinator, spec):
        killed, alive = TaskManagerProcess(spec), TaskManagerProcess(spec)
        addresses = {pid: address for address, pid in [await coordinator.member(), await coordinator.member()]}
        left, used = (Path(addresses[each.pid].path).parent for each in (killed, alive))
        (left / "tables").mkdir(exist_ok=True)
        (left / "tables" / "big").write_bytes(b"x" * 100_000)
        os.kill(killed.pid, signal.SIGKILL)
        await in_thread(killed.wait)
        killed.stop()
        assert (left / "tables" / "big").exists()
        foreign = [scratch / name for name in ("dstl-backups", "dstl-demo-1234567", "other", "dstl-abcdefgh")]
        for each in foreign[:3]:
            each.mkdir()
        foreign[3].symlink_to(used)
        following = TaskManagerProcess(spec)
        address, _ = await coordinator.member()
        assert not left.exists()
        assert used.exists()
        assert sorted(leftovers(scratch)) == sorted([used, Path(address.path).parent, *foreign])
        for each in (alive, following):
            await in_thread(each.stop)
        assert sorted(leftovers(scratch)) == sorted(foreign)


async def test_its_parent_may_die_before_it_has_registered(scratch: Path) -> None:
    """A coordinator that accepts and says nothing holds the registration up; the pipe is watched all the same."""
    async with coordinating() as (_, spec):
        silent = socket.create_server(("127.0.0.1", 0))
        process = TaskManagerProcess(replace(spec, coordinator=Address("127.0.0.1", silent.getsockname()[1])))
        silent.settimeout(PATIENCE_S)
        accepted, _ = await in_thread(silent.accept)
        await in_thread(lambda: process.stop(timeout=10))
        accepted.close()
        assert process._process.returncode == 0, "it had to be killed"
        assert leftovers(scratch) == []
        silent.close()


@pytest.mark.parametrize(
    ("first_line", "code"),
    [("", 0), ('{"secret": "canary"}\n', 1), ("canary\n", 1), ('["canary"]\n', 1)],
)
async def test_a_configuration_that_is_none_is_refused_without_repeating_it(
    first_line: str, code: int, scratch: Path
) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dstl.process"]
        return subprocess.run(
            command, input=first_line, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    done = await in_thread(run)
    assert done.returncode == code, done.stderr
    assert "canary" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert leftovers(scratch) == []


async def test_a_module_in_the_working_directory_is_not_run(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may be started in a directory that others can write to, such as /tmp."""
    (scratch / "uuid.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(scratch)
    async with coordinating() as (coordinator, spec):
        process = TaskManagerProcess(spec)
        _, pid = await coordinator.member()
        await in_thread(process.stop)
    assert (pid, process._process.returncode) == (process.pid, 0)
    (scratch / "uuid.py").unlink()


async def test_without_a_coordinator_it_ends_with_a_reason(scratch: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with coordinating() as (coordinator, spec):
        await coordinator.server.close()
        process = TaskManagerProcess(spec)
        await until(lambda: process.wait(0), "the process's end")
        assert process._process.returncode == 1
        assert leftovers(scratch) == []
        process.stop()
    said = capfd.readouterr().err
    assert "nothing answers at 127.0.0.1" in said
    assert "canary" not in said


async def test_one_that_starts_while_its_driver_ends_says_nothing(
    scratch: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with coordinating() as (coordinator, spec):
        await coordinator.server.close()
        process = TaskManagerProcess(spec)
        await asyncio.sleep(1.0)  # A driver closes its coordinator first.
        process.stop()
    assert process._process.returncode == 0
    assert "ERROR" not in capfd.readouterr().err


async def test_one_whose_driver_ends_while_it_closes_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What materializes went on in a loop that was ending, and logged an error."""
    closing, closed, goes_on, ended = (asyncio.Event() for _ in range(4))
    close = TaskManager.close

    async def slowly(task_manager: TaskManager) -> None:
        closing.set()
        await goes_on.wait()
        await close(task_manager)
        closed.set()

    monkeypatch.setattr(TaskManager, "close", slowly)
    async with coordinating() as (coordinator, spec):
        life = asyncio.ensure_future(ProcessLife(spec).run(ended))
        await coordinator.member()
        await coordinator.server.close()
        async with asyncio.timeout(PATIENCE_S):
            await closing.wait()
            ended.set()
            await asyncio.sleep(0.1)
            assert not life.done()
            goes_on.set()
            await life
    assert closed.is_set()


async def test_one_that_hangs_is_killed() -> None:
    async with coordinating() as (coordinator, spec):
        process = TaskManagerProcess(spec)
        await coordinator.member()
        os.kill(process.pid, signal.SIGSTOP)
        await in_thread(lambda: process.stop(timeout=0.2))
        assert process.wait(0)
        async with asyncio.timeout(PATIENCE_S):
            await coordinator.lost.wait()


async def test_a_detached_one_outlives_its_launcher_and_ends_with_its_coordinator(scratch: Path) -> None:
    """What a worker launches: the worker, its executor and its pipe may all go."""
    launcher = (
        "import sys\n"
        "from dstl.process.launch_spec import LaunchSpec\n"
        "from dstl.process.launch_spec import launch_detached\n"
        "print(launch_detached(LaunchSpec.from_line(sys.stdin.readline())))\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )

    async with coordinating() as (coordinator, spec):
        line = replace(spec, host="127.0.0.2", bind="127.0.0.2", detached=True).to_line().decode()
        done = await in_thread(
            lambda: subprocess.run(
                [sys.executable, "-uc", launcher],
                input=line,
                stdout=subprocess.PIPE,  # standard error is the TaskManager's too, and stays open
                text=True,
                timeout=PATIENCE_S,
                check=False,
                env={**os.environ, "PYTHON_WORKER_FACTORY_SECRET": "canary-of-spark"},
            )
        )
        address, pid = await coordinator.member()
        assert done.stdout.split() == [str(pid)]
        assert (address.host, address.port > 0) == ("127.0.0.2", True)
        seen = everything_to_be_seen(pid, scratch, coordinator.location)
        for secret in (b"canary-of-spark", CANARY, base64.b64encode(CANARY)):
            assert secret not in seen
        assert os.getsid(pid) == pid
        friend = await AsyncConnection.open(address.seen_from("127.0.0.1"), spec.secret)
        friend.close()
        await coordinator.server.close()
        await until(lambda: is_gone(pid), "the process's end")
        assert leftovers(scratch) == []


def test_one_that_ends_before_it_is_told_anything_breaks_nothing_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """That it does not register is reported by who waits for it."""
    reads = tmp_path / "reads"

    class Late(LaunchSpec):
        def to_line(self) -> bytes:
            reads.touch()
            while reads.exists():
                time.sleep(0.001)
            return super().to_line()

    monkeypatch.setattr(launch_spec, "_COMMAND", ["sh", "-c", f"exec <&- 2>&-; until rm {reads}; do sleep 0.01; done"])
    spec = Late("early", None, Secret(CANARY))
    TaskManagerProcess(spec).stop()
    assert launch_detached(spec) > 0
    assert caplog.messages == ["TaskManager early ended at once"] * 2


async def test_one_whose_coordinator_comes_late_waits_for_it_and_ends_with_it(scratch: Path) -> None:
    async with coordinating() as (coordinator, spec):
        await coordinator.server.close()
        process = TaskManagerProcess(replace(spec, retry_s=PATIENCE_S))
        again = Coordinator(spec.secret, str(coordinator.location))
        await asyncio.sleep(0.5)
        assert not process.wait(0)
        await again.server.listen_tcp("127.0.0.1", spec.coordinator.port)
        await again.member()
        await again.server.close()
        await until(lambda: process.wait(0), "the process's end")
        assert process._process.returncode == 0
        assert leftovers(scratch) == []
        process.stop()


def test_a_process_does_without_pandas_threads_for_matrices_and_a_collector_of_modules() -> None:
    """The import of pandas takes more processor than all others of the process together."""
    code = """
import asyncio, gc, runpy, sys
from pathlib import Path
asyncio.run = lambda main: main.close()  # all of the process but its life
try:
    runpy.run_module("dstl.process", run_name="__main__")
except SystemExit as ended:
    assert not ended.code, ended
assert gc.isenabled()
assert gc.get_freeze_count() > 10_000, "the collector walks all modules"
import numpy as np
from tests.worlds.table_changes import changes, put
from materializer.tables import HeapStateTable
table = HeapStateTable()
table.apply(changes(put(1, 0, b"k", b"", b"v")))
assert table.get_many(0, np.array([1]), [b"k"]) == [b"v"]
assert not any(name.partition(".")[0] == "pandas" for name in sys.modules), "pandas was imported"
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert len([name for name in threads if "jemalloc" not in name]) == 1, threads
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
