"""A coordinator whose TaskManagers are launched by its tasks: who is told to, who waits, and who is passed over."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstl.checkpoint.fleet.resource_manager import SLOTS_OF_A_TASK_MANAGER, ExecutorHosts, task_managers_of
from dstl.errors import Invalid, Unavailable
from dstl.options import CheckpointOptions
from dstl.process.launch_spec import LaunchSpec, TaskManagerProcess
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Begin, Begun
from dstl.runtime import SystemClock
from dstl.store.base import ObjectStore
from dstl.store.location import open_store
from dstl.store.memory import MemoryStore
from dstl.store.probe import check_place, mark_place
from dstl.taskmanager.config import TaskManagerConfig
from handles.key_group import KeyGroupRange
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import seeded_runtime
from worlds.service import Driver, TaskManager, coordinator, query_directory

A, B = "127.0.0.2", "127.0.0.3"
CONFIG = json.dumps({"location": "somewhere"}).encode()


class ClusterDriver(Driver):
    """A driver that starts no TaskManager itself."""

    def __init__(
        self,
        seed: int,
        *,
        task_managers: int | None,
        hosts: int = 2,
        timeout_s: float = 20.0,
        store: ObjectStore | None = None,
        config: bytes = CONFIG,
        elsewhere: bool = False,
    ) -> None:
        super().__init__(store or MemoryStore(), seed=seed, operators={"counts": 4})
        self.hosts = hosts
        self.slots: tuple[int, ...] = ()
        self.service = coordinator(
            self.store,
            seeded_runtime(seed, SystemClock()),
            self.secret,
            {
                "on_event": self.reports.append,
                "on_task_manager_lost": self.lost.append,
                "executor_hosts": self._count,
            },
            options=CheckpointOptions(task_manager_timeout_s=timeout_s),
            task_managers=task_managers,
            task_manager_config=config,
            task_managers_elsewhere=elsewhere,
        )
        self.directory = query_directory(self.service, self.store, seed)
        self._size = 0

    async def _count(self) -> ExecutorHosts:
        return ExecutorHosts(self.hosts, 60.0, self.slots)

    async def connect(self, role: Role = Role.TASK_MANAGER) -> AsyncConnection:
        return await AsyncConnection.open(self.service.address, self.secret, role=role)

    async def begin(self, host: str, run: str = "run-1", launched: int = 0) -> Begun:
        """Begin a task on a host, and return the coordinator's answer."""
        await self.begin_run(run)
        connection = await self.connect(Role.WORKER)
        try:
            who = self.who(run, "counts", 0, 0)
            return await connection.call(Begin(who.task, 1, host, launched))
        finally:
            connection.close()

    def beginning(self, host: str) -> "asyncio.Task[Begun]":
        return asyncio.ensure_future(self.begin(host))

    async def launched(self, member_id: str, host: str) -> TaskManager:
        """Be the process that a worker has launched."""
        member = TaskManager(member_id, self.store, self.secret, self._seed + len(self.members))
        self.members[member_id] = member
        port = await member.service.server.listen_tcp(host)
        member._lifeline = await self.connect()
        told = await member._lifeline.call(Enlist(member_id, 1))
        assert bytes(told.config) == CONFIG
        await member._lifeline.call(Register(member_id, 1, Address(host, port)))
        return member


@contextlib.asynccontextmanager
async def cluster(seed: int, **options: Any) -> AsyncIterator[ClusterDriver]:
    driver = ClusterDriver(seed, **options)
    await driver.start()
    try:
        yield driver
    finally:
        await driver.close()


async def passed_over(*tasks: "asyncio.Task[Begun]") -> bool:
    """Return True where these tasks still wait, some time after they could have been answered."""
    await asyncio.sleep(0.15)
    return not any(task.done() for task in tasks)


async def test_each_host_is_told_once_and_all_tasks_go_on_when_both_are_there(seed: int) -> None:
    async with cluster(seed, task_managers=None) as driver:
        told = {host: await driver.begin(host) for host in (A, B)}
        others = [driver.beginning(host) for host in (A, B, A, B)]
        assert await passed_over(*others)
        for host, answer in told.items():
            assert await passed_over(*others)
            await driver.launched(answer.launch, host)
        answers = await asyncio.gather(*others)
        assigned = {answer.assignments[i].key_groups for answer in answers for i in (0, 1)}
        assert assigned == {KeyGroupRange(0, 63), KeyGroupRange(64, 127)}
        assert {each.address.host for each in answers[0].assignments} == {A, B}


async def test_the_place_of_a_host_that_is_gone_goes_to_another_at_once(seed: int) -> None:
    async with cluster(seed, task_managers=None) as driver:
        members = {host: await driver.launched((await driver.begin(host)).launch, host) for host in (A, B)}
        await driver.begin(A)
        driver.hosts = 1
        await members[B].kill()
        async with asyncio.timeout(5):  # and not the ten seconds that a host is waited for
            answer = await driver.begin(A)
            while answer.launch is None:
                answer = await driver.begin(A)
        await driver.launched(answer.launch, A)
        assert [each.address.host for each in (await driver.begin(A)).assignments] == [A, A]


async def test_one_that_dies_before_it_has_registered_is_launched_again(seed: int) -> None:
    async with cluster(seed, task_managers=1) as driver:
        member_id = (await driver.begin(A)).launch
        stillborn = await driver.connect()
        await stillborn.call(Enlist(member_id, 1))
        waiting = driver.beginning(A)
        assert await passed_over(waiting)
        stillborn.close()
        again = (await waiting).launch
        assert again != member_id
        await driver.launched(again, A)
        assert (await driver.begin(A)).assignments


async def test_a_task_that_has_died_is_not_told_to_launch(seed: int) -> None:
    """Its launch would be waited for in vain, and so on with each of the dead before it."""
    async with cluster(seed, task_managers=1) as driver:
        member_id = (await driver.begin(A)).launch
        dead = await driver.connect(Role.WORKER)
        for_ever = asyncio.ensure_future(dead.call(Begin(driver.who("run-1", "counts", 0, 0).task, 1, A)))
        assert not for_ever.done()
        await asyncio.sleep(0.05)
        alive = driver.beginning(A)
        assert await passed_over(alive)
        for_ever.cancel()
        await asyncio.gather(for_ever, return_exceptions=True)
        dead.close()
        await asyncio.sleep(0.05)
        stillborn = await driver.connect()
        await stillborn.call(Enlist(member_id, 1))
        stillborn.close()
        assert (await alive).launch is not None


async def test_a_run_on_more_hosts_than_the_one_before_has_more_task_managers(seed: int) -> None:
    async with cluster(seed, task_managers=None, hosts=1) as driver:
        await driver.launched((await driver.begin(A)).launch, A)
        assert [str(each.key_groups) for each in (await driver.begin(B)).assignments] == ["0-127"]
        driver.hosts = 2
        assert (await driver.begin(A)).assignments, "a run keeps its number"
        await driver.launched((await driver.begin(B, run="run-2")).launch, B)
        assert [str(each.key_groups) for each in (await driver.begin(A, run="run-2")).assignments] == ["0-63", "64-127"]
        driver.hosts = 1
        assert len((await driver.begin(A, run="run-3")).assignments) == 1


def test_the_number_follows_the_slots() -> None:
    per = SLOTS_OF_A_TASK_MANAGER
    assert [task_managers_of(slots) for slots in (0, 1, 2, per, per + 1, 2 * per, 2 * per + 1)] == [1, 1, 1, 1, 2, 2, 3]
    assert ExecutorHosts(0, 60.0).task_managers == 1, "no executor has come yet"
    assert ExecutorHosts(3, 60.0).task_managers == 3, "nobody has counted slots"
    assert ExecutorHosts(2, 60.0, (per, per + 1)).task_managers == 3


async def test_one_that_was_started_by_hand_counts_like_any_other(seed: int) -> None:
    async with cluster(seed, task_managers=1) as driver:
        await driver.launched("by-hand", "127.0.0.9")
        assert [each.address.host for each in (await driver.begin(A)).assignments] == ["127.0.0.9"]


async def test_where_nobody_comes_the_task_fails_with_a_reason(seed: int) -> None:
    async with cluster(seed, task_managers=1, timeout_s=0.3) as driver:
        assert (await driver.begin(A)).launch is not None
        with pytest.raises(Unavailable, match=r"0 of 1 TaskManagers registered within 0\.3 s"):
            await driver.begin(A)


async def test_a_restore_that_kills_every_task_manager_is_not_tried_for_ever(seed: int) -> None:
    async with cluster(seed, task_managers=1) as driver:

        async def launch_and_die(most: int) -> int:
            for launched in range(most):
                answer = await driver.begin(A, launched=launched)
                member = await driver.launched(answer.launch, A)
                await member.kill()
            return most

        with pytest.raises(Unavailable, match=r"launched on 127\.0\.0\.2, and they do not stay"):
            await launch_and_die(10)
        assert await launch_and_die(2) == 2, "another task may try again"


async def test_a_coordinator_without_a_configuration_enlists_nobody(seed: int) -> None:
    driver = Driver(MemoryStore(), seed=seed, operators={"counts": 1})
    await driver.start()
    connection = await AsyncConnection.open(driver.service.address, driver.secret, role=Role.TASK_MANAGER)
    with pytest.raises(Invalid, match="no configuration"):
        await connection.call(Enlist("x", 1))
    connection.close()
    await driver.close()


@contextlib.contextmanager
def process_on(host: str, member_id: str, driver: ClusterDriver) -> Iterator[TaskManagerProcess]:
    """Be the worker that launches what it was told to."""
    where = LaunchSpec(member_id, driver.service.address, driver.secret, host=host, bind=host)
    process = TaskManagerProcess(where)
    try:
        yield process
    finally:
        process.stop()


@pytest.mark.parametrize("several", [False, True])
async def test_a_directory_that_is_not_shared_is_refused_before_the_first_batch(
    seed: int, tmp_path: Path, several: bool
) -> None:
    """A TaskManager whose directory only has the same name would keep the state on its own disk, until it is gone."""
    at_driver, at_host = str(tmp_path / "driver"), str(tmp_path / "host")
    if several:  # the first is shared, and the second is not
        at_driver, at_host = f"{tmp_path / 'one'},{at_driver}", f"{tmp_path / 'one'},{at_host}"
    config = TaskManagerConfig(at_host).to_json()
    async with cluster(
        seed, task_managers=1, hosts=1, store=open_store(at_driver), config=config, elsewhere=True
    ) as driver:
        told = (await driver.begin(A)).launch
        waiting = driver.beginning(A)
        with process_on(A, told, driver) as process:
            with pytest.raises(Invalid, match=rf"{re.escape(at_host)} on host {A} is not what the driver has there"):
                await waiting
            assert await asyncio.to_thread(process._process.wait, 30) == 1
        assert [info.name async for info in driver.store.list() if "probe/" in info.name] == []
        # The mount is repaired: the next run is not told of the last one's trouble.
        assert (await driver.begin(A, run="run-2")).launch is not None


async def test_a_directory_that_is_shared_is_found_and_nothing_of_the_proof_stays(seed: int, tmp_path: Path) -> None:
    places = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    config = TaskManagerConfig(places).to_json()
    async with cluster(
        seed, task_managers=1, hosts=1, store=open_store(places), config=config, elsewhere=True
    ) as driver:
        told = (await driver.begin(A)).launch
        with process_on(A, told, driver):
            assert (await driver.begin(A)).assignments
        for _ in range(1000):
            # The cleaner's first pass asks for the store's time with an object of that kind, too.
            left = [info.name async for info in driver.store.list() if "probe/" in info.name]
            if not left:
                break
            await asyncio.sleep(0.01)
        assert left == []


async def test_a_store_that_does_not_answer_proves_nothing(seed: int) -> None:
    """An outage while a TaskManager enlists is no reason to refuse its place."""
    runtime = seeded_runtime(seed, SystemClock())
    inner = MemoryStore()
    rules = [FaultRule(Fault.UNAVAILABLE, verb, chance=1.0) for verb in ("put", "get")]
    rules.append(FaultRule(Fault.SHORT_GET, "get", chance=1.0))  # a cut answer told of another place
    assert await mark_place(FaultyStore(inner, rules[:1]), runtime) == ()
    marks = await mark_place(inner, runtime)
    for rule in rules[1:]:
        await check_place(FaultyStore(inner, [rule]), marks, A)
    await check_place(inner, marks, A)
    with pytest.raises(Invalid, match="is not what the driver has there"):
        await check_place(MemoryStore(), marks, A)
