"""The driver's own TaskManagers are kept running, and an executor's host is told from the machine's name."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstl.process import launch_spec as launcher_module
from dstl.process.launch_spec import LaunchSpec
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.spark import worker_process
from dstl.spark.application import fleet_launcher
from dstl.spark.application.fleet_launcher import FleetLauncher
from dstl.spark.application.session import local_slots
from worlds.waiting import wait_until


class Processes:
    """What is started in place of ``python -m dstl.process``: a shell that notes its id."""

    def __init__(self, notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._notes = notes
        self._monkeypatch = monkeypatch
        self.launchers: list[FleetLauncher] = []

    def start(self, size: int, then: str) -> FleetLauncher:
        self._monkeypatch.setattr(launcher_module, "_COMMAND", ["/bin/sh", "-c", f"echo $$ >> {self._notes}; {then}"])
        launcher = FleetLauncher(size)
        launcher.spec = LaunchSpec("", Address("127.0.0.1", 1), Secret.generate())
        self.launchers.append(launcher)
        launcher.start()
        return launcher

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._notes.read_text().split()] if self._notes.exists() else []


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    processes = Processes(tmp_path / "pids", monkeypatch)
    yield processes
    for each in processes.launchers:
        each.stop()


def test_one_that_dies_before_it_has_registered_is_replaced_but_not_for_ever(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "dstl.spark.application.fleet_launcher"):
        processes.start(1, "exit 1")
        wait_until(lambda: "no more are started" in caplog.text, "the message")
    assert len(processes.pids) == 6


def test_those_that_had_registered_are_replaced_however_often_they_are_lost(processes: Processes) -> None:
    launcher = processes.start(2, "read line; read for_ever")
    wait_until(lambda: len(processes.pids) == 2, "both")
    for number in range(1, 111):
        # By its name: of two that begin together nobody knows which notes its id first.
        os.kill(launcher._processes[f"taskmanager-{number + 1}"].pid, signal.SIGKILL)
        launcher.lost(f"taskmanager-{number + 1}")
        wait_until(lambda number=number: len(processes.pids) == 2 + number, "another")
        launcher.lost(f"taskmanager-{number + 1}")
    time.sleep(0.1)
    assert len(processes.pids) == 112, "one was replaced twice"


def test_one_that_hangs_before_it_has_registered_is_replaced(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_launcher, "START_S", 0.5)
    launcher = processes.start(2, "read line; read for_ever")
    launcher.registered = {"taskmanager-2", "taskmanager-3"}
    wait_until(lambda: len(processes.pids) == 2, "both")
    hanging = launcher._processes["taskmanager-1"].pid
    os.kill(hanging, signal.SIGSTOP)
    wait_until(lambda: len(processes.pids) == 3, "another")
    wait_until(lambda: not Path(f"/proc/{hanging}").exists(), "its end")
    time.sleep(1.0)
    assert sorted(launcher._processes) == ["taskmanager-2", "taskmanager-3"], "those that serve stay"


def test_after_the_end_nobody_is_replaced(processes: Processes) -> None:
    launcher = processes.start(2, "read line; read for_ever")
    wait_until(lambda: len(processes.pids) == 2, "both")
    launcher.stop()
    launcher.lost("taskmanager-1")
    time.sleep(0.1)
    assert len(processes.pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes.pids)


def fake_proc(directory: Path, *generations: tuple[int, str]) -> Path:
    """Write what ``/proc`` says of a process and those above it."""
    for index, (pid, command) in enumerate(generations):
        parent = generations[index + 1][0] if index + 1 < len(generations) else 1
        (directory / str(pid)).mkdir()
        (directory / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (directory / str(pid) / "stat").write_text(f"{pid} (odd) name)) S {parent} 1 1 0")
    return directory


@pytest.fixture
def host_seen_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    for name in worker_process._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def seen(proc: Path) -> str:
        ancestors = worker_process._ancestors
        monkeypatch.setattr(worker_process, "_ancestors", lambda _, pid: ancestors(proc, 42))
        return worker_process.executor_host.__wrapped__()

    return seen


@pytest.mark.parametrize(
    "backend",
    [
        "org.apache.spark.executor.CoarseGrainedExecutorBackend",
        "org.apache.spark.executor.YarnCoarseGrainedExecutorBackend",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
    ],
)
def test_the_host_is_the_one_on_the_executors_command_line(
    backend: str, tmp_path: Path, host_seen_in: Callable[[Path], str]
) -> None:
    proc = fake_proc(
        tmp_path,
        (42, "python -m pyspark.daemon pyspark.worker"),
        (41, "python -m pyspark.daemon pyspark.worker"),
        (40, f"java -cp x {backend} --executor-id 0 --hostname 127.0.0.3 --cores 2"),
        (30, "java org.apache.spark.deploy.worker.Worker --hostname not-this-one"),
    )
    assert host_seen_in(proc) == "127.0.0.3"


def test_where_the_command_line_is_hidden_the_environment_tells_and_then_the_machine(
    tmp_path: Path, host_seen_in: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process.socket, "gethostname", lambda: "machine")
    proc = fake_proc(tmp_path, (42, "python -m pyspark.daemon pyspark.worker"))
    assert host_seen_in(proc) == "machine"
    monkeypatch.setenv("SPARK_EXECUTOR_POD_IP", "10.1.2.3")
    assert host_seen_in(proc) == "10.1.2.3"
    assert host_seen_in(tmp_path / "nothing") == "10.1.2.3"


@pytest.mark.parametrize(
    ("master", "slots"),
    [("local", 1), ("local[2]", 2), ("local[2,4]", 2), ("local[*]", 12), ("local[*, 4]", 12), ("local[16]", 16)],
)
def test_a_local_master_says_how_many_tasks_it_runs_at_once(master: str, slots: int) -> None:
    assert local_slots(master, 12) == slots
