"""A real cluster: standalone master, two hosts, three executors, TaskManagers that start by themselves on each host.

One application is driven through every fault that DESIGN section 9 promises to mask, then its driver is killed, and a
second one goes on: starting Spark costs more than all that happens in it.
"""

import base64
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from standalone_cluster import Driver, StandaloneCluster

from worlds.standalone_cluster import HOSTS
from worlds.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CANARY = "canary-0123456789-the-secret-of-this-application"
KEYS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    cluster = StandaloneCluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


class Job:
    """The query's files, and what its result has to be."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.totals: Counter[str] = Counter()
        self.output: list[list[object]] = []
        self.files = 0
        for name in ("in", "marks"):
            (work / name).mkdir(parents=True)
        self.secret_file = work / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(CANARY + "\n")

    def add(self, *extra: str) -> int:
        """Add a file with rows of all keys, and of some that misbehave; return its batch."""
        batch, self.files = self.files, self.files + 1
        rows = [{"k": f"k{i % KEYS}", "v": batch * 1000 + i} for i in range(200)] + [{"k": k, "v": 1} for k in extra]
        before = dict(self.totals)
        for row in rows:
            self.totals[str(row["k"])] += int(row["v"])
        self.output += [[k, total] for k, total in self.totals.items() if total != before.get(k)]
        staged = self.work / "staged"
        staged.write_text("\n".join(map(json.dumps, rows)))
        os.utime(staged, (1_700_000_000 + batch,) * 2)
        staged.rename(self.work / "in" / f"{batch:04d}.json")
        return batch

    def marked(self, name: str) -> list[int]:
        """Return the processes of the attempts that have reached this key, in order."""
        path = self.work / "marks" / name
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def connected_tcp(host: str, port: int) -> int:
    """Return how many clients are connected to a TCP port."""
    local = f"{int.from_bytes(bytes(int(part) for part in host.split('.')), 'little'):08X}:{port:04X}"
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(fields[1] == local and fields[3] == "01" for fields in sockets)


def connected_unix(path: str) -> int:
    """Return how many clients are connected to a unix socket."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(fields[5] == "03" and fields[-1] == path for fields in sockets)


def assert_the_secret_is_nowhere(cluster: StandaloneCluster) -> None:
    raw = CANARY.encode()
    forms = [raw, base64.b64encode(raw), raw.hex().encode(), ", ".join(map(str, raw[:12])).encode()]
    for pid in cluster.processes(""):
        for name in ("cmdline", "environ"):
            try:
                seen = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            assert not any(form in seen for form in forms), f"the secret is in /proc/{pid}/{name}"
    logs = dict(cluster.logs())
    plans = {path.name.split("_")[0] for path, text in logs.items() if b"MapInArrow" in text}
    assert "events" in plans, f"these are not the logs that show the plan: {plans}"
    for path, text in logs.items():
        assert not any(form in text for form in forms), f"the secret is in {path}"


def test_every_fault_on_a_cluster_is_masked_and_nothing_is_left(cluster: StandaloneCluster, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    config = {"secret_file": str(job.secret_file)}
    first = cluster.driver(job.work, hosts=list(HOSTS), **config)
    try:
        in_good_times(cluster, first, job)
        a_task_manager_dies_between_batches(cluster, first, job)
        an_executor_dies_in_a_batch(cluster, first, job)
        a_task_is_retried_and_another_run_twice(first, job)
        assert_the_secret_is_nowhere(cluster)
        a_host_dies_between_batches(cluster, first, job)
        restores = [event for event in first.seen if event["event"] == "restore"]
        assert len(restores) == 1, f"the query was restarted: {restores}"
        the_driver_is_killed_in_a_batch(cluster, first, job)
    finally:
        first.close()
    second = cluster.driver(job.work, **config)
    try:
        second.until("batch", batch=job.files - 1)
        second.until("batch", batch=job.add())
        assert len(cluster.task_managers()) == 1, "there is one host left, and this run has begun on it"
        finished = second.finish()
    finally:
        second.close()
    assert finished["state"] == finished["looked_up"] == dict(job.totals)
    assert finished["saved"] == [len(job.totals)] * 2
    assert finished["output"] == sorted(job.output)
    wait_until(lambda: not cluster.task_managers(), "the TaskManagers' end after the application's", 150)
    assert_the_secret_is_nowhere(cluster)


def in_good_times(cluster: StandaloneCluster, driver: Driver, job: Job) -> None:
    driver.until("batch", batch=job.add())
    lost = [line for line in driver.log.read_text().splitlines() if "Lost task" in line and "TaskKilled" not in line]
    assert not lost, "a task failed for no reason"  # a slow machine has speculative copies, which are killed
    # A host's tasks reach the other's TaskManager by TCP and their own by its unix socket.
    members = [event for event in driver.seen if event["event"] == "checkpoint"][-1]["members"]
    assert sorted(member["host"] for member in members) == list(HOSTS)
    assert len(cluster.task_managers()) == len(HOSTS)
    assert {host: len(cluster.executors(host)) for host in HOSTS} == dict(zip(HOSTS, (2, 1), strict=True))
    for member in members:
        assert connected_unix(member["path"]) >= 1
        assert connected_tcp(member["host"], member["port"]) >= 2, "the coordinator alone is connected"


def a_task_manager_dies_between_batches(cluster: StandaloneCluster, driver: Driver, job: Job) -> None:
    before = cluster.task_managers()
    os.kill(before[0], signal.SIGKILL)
    driver.until("batch", batch=job.add())
    after = cluster.task_managers()
    assert before[0] not in after
    assert before[1] in after
    assert len(after) == len(HOSTS)


def an_executor_dies_in_a_batch(cluster: StandaloneCluster, driver: Driver, job: Job) -> None:
    before = cluster.task_managers()
    batch = job.add("pause-1")
    worker, *_ = wait_until(lambda: job.marked("pause-1"), "the task that pauses", 150)
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    host = next(host for host in HOSTS if f"http://{host}:".encode() in environment)
    parents = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
    daemon = Path(f"/proc/{parents[1]}/stat").read_text().rpartition(")")[2].split()
    executor = int(daemon[1])
    assert executor in cluster.executors(host)
    os.kill(executor, signal.SIGKILL)
    driver.until("batch", batch=batch)
    assert cluster.task_managers() == before, "a TaskManager must outlive the executor that has launched it"


def a_task_is_retried_and_another_run_twice(driver: Driver, job: Job) -> None:
    driver.until("batch", batch=job.add("fail-1"))
    assert len(job.marked("fail-1")) > 1, "no second attempt"
    started = time.monotonic()
    driver.until("batch", batch=job.add("slow-1"))
    assert len(job.marked("slow-1")) > 1, "no second attempt beside the slow one"
    assert time.monotonic() - started < 60, "the slow attempt was waited for"


def a_host_dies_between_batches(cluster: StandaloneCluster, driver: Driver, job: Job) -> None:
    """All that ran on it: Spark's worker, the executor, its Python processes and the TaskManager."""
    gone = HOSTS[1]
    members = [event for event in driver.seen if event["event"] == "checkpoint"][-1]
    of_the_host = [pid for pid, where in zip(members["pids"], members["member_hosts"], strict=True) if where == gone]
    assert len(of_the_host) == 1
    for pid in [*cluster.workers(gone), *cluster.executors(gone), *of_the_host]:
        os.kill(pid, signal.SIGKILL)
    driver.until("batch", batch=job.add())
    after = cluster.task_managers()
    assert len(after) == len(HOSTS), "the other host has launched one in its place"
    assert not set(of_the_host).intersection(after)


def the_driver_is_killed_in_a_batch(cluster: StandaloneCluster, driver: Driver, job: Job) -> None:
    job.add("pause-2")
    wait_until(lambda: job.marked("pause-2"), "the task that pauses", 150)
    driver.kill()
    wait_until(lambda: not cluster.task_managers(), "the TaskManagers' end after the driver's", 150)
