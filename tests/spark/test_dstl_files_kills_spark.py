"""Driver, tasks and coordinator of a query on ``dstl://`` are killed at random moments: every key's count is exact."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bench._processor_time import descendants

pytestmark = pytest.mark.spark

FILES, ROWS, KEYS = 9, 60, 9
LIMIT_S = 200.0


class Job:
    """One process of the job, with all that it starts."""

    def __init__(self, directory: Path, version: int, master: str, env: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("files_job.py")), str(directory), str(version), master]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, **env}
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(self._process.stdout)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill_service(self) -> bool:
        """Kill the coordinator of files, and the TaskManager where there is one."""
        return self._kill(lambda line: "dstl.process" in line and "java" not in line)

    def kill_executor(self) -> bool:
        """Kill an executor's JVM, whose host's service outlives it."""
        return self._kill(lambda line: "CoarseGrainedExecutorBackend" in line, most=1)

    def _kill(self, is_one: Callable[[str], bool], most: int = 100) -> bool:
        """Kill descendants by their command; returns whether there was one."""
        found = [pid for pid, command in descendants(self._process.pid).items() if is_one(command)][:most]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(found)

    def kill(self) -> bool:
        """Kill the driver, and all that it has started."""
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return True


def _expected(directory: Path, seed: int) -> Counter[int]:
    rng = random.Random(seed)
    (directory / "in").mkdir()
    expected: Counter[int] = Counter()
    for number in range(FILES):
        keys = [rng.randrange(KEYS) for _ in range(ROWS)]
        expected.update(keys)
        path = directory / "in" / f"{number:03d}.json"
        path.write_text("\n".join(json.dumps({"k": key}) for key in keys))
        os.utime(path, (1_700_000_000 + number,) * 2)
    return expected


def _survives(
    directory: Path,
    version: int,
    seed: int,
    kills: int,
    master: str = "local[2]",
    limit_s: float = LIMIT_S,
    kinds: tuple[Callable[["Job"], bool], ...] = (),
) -> list[str]:
    """Run the job to its end through so many kills, of these kinds in turn; returns what it has said."""
    kinds = kinds or (Job.kill_service, Job.kill)
    expected = _expected(directory, seed)
    rng = random.Random(seed)
    commit = rng.choice(("now", "with-next"))
    said = [f"{commit}\n"]
    deadline = time.monotonic() + limit_s
    manifests = directory / "query" / ("_dstl" if version else "") / "manifests"
    while time.monotonic() < deadline:
        job = Job(directory, version, master, {"SPARK_LOCAL_IP": "127.0.0.2", "FILES_COMMIT": commit})
        try:
            while job.is_running and time.monotonic() < deadline:
                if kills and manifests.is_dir() and job.lines:
                    before = len(list(manifests.iterdir()))
                    time.sleep(rng.uniform(0.0, 1.5))
                    if len(list(manifests.iterdir())) > before:
                        kills -= kinds[kills % len(kinds)](job)
                time.sleep(0.02)
        finally:
            job.kill()
            said += job.lines
        counted = [line for line in said if line.startswith("counted ")]
        if counted:
            assert counted[-1] == f"counted {sorted(expected.items())}\n", f"seed {seed}: {said}"
            return said
    pytest.fail(f"seed {seed}: the job did not end within {limit_s} s: {said}")


def test_counts_are_exact_after_driver_and_coordinator_were_killed(tmp_path: Path, seed: int) -> None:
    said = _survives(tmp_path, 1 + seed % 2, seed, kills=2)
    assert said.count("started\n") > 1, said


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("number", range(4))
def test_counts_are_exact_after_many_kills(tmp_path: Path, seed: int, version: int, number: int) -> None:
    _survives(tmp_path, version, seed + number, kills=5, limit_s=1200.0)


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", [1, 2])
def test_counts_are_exact_after_executors_were_killed(tmp_path: Path, seed: int, version: int) -> None:
    """Executors are on another host than the driver, and what they have put is in their host's service."""
    kinds = (Job.kill_executor,)
    said = _survives(tmp_path, version, seed, 4, "local-cluster[2,1,1024]", limit_s=1200.0, kinds=kinds)
    assert said.count("started\n") == 1, f"the query needs no restart for a lost executor: {said}"


@pytest.mark.long
def test_executors_on_another_host_have_a_service_of_their_own(tmp_path: Path, seed: int) -> None:
    """Executors are on 127.0.0.2 as Spark names it, the driver on 127.0.0.1: the first task launches the service."""
    said = _survives(tmp_path, 1 + seed % 2, seed, kills=0, master="local-cluster[2,1,1024]")
    assert said.count("started\n") == 1, said
