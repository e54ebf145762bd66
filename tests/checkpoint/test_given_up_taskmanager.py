"""A TaskManager process that is given up learns of it: it ends or is a member again; no call to it lasts for ever."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dstl.checkpoint.fleet.members import Member
from dstl.checkpoint.state_catalogue import ExpectedOperator
from dstl.errors import DstlError, TaskManagerLost
from dstl.options import (
    CheckpointOptions,
)
from dstl.process import launch_spec
from dstl.process.launch_spec import LaunchSpec, launch_detached
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.codec import Call
from dstl.rpc.fleet_messages import Restore
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.runtime import SystemClock
from dstl.store import open_store
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.virtual_time import seeded_runtime
from worlds.echo import Echo, Echoed
from worlds.service import MAX_PARALLELISM, Driver, coordinator, query_directory, resolve_states
from worlds.waiting import until


class ProcessDriver(Driver):
    """A driver whose one TaskManager is a process that somebody else has started (``launch=False``)."""

    def __init__(self, where: Path, seed: int, retry_s: float) -> None:
        location = f"file://{where}"
        self.store = open_store(location)
        self.secret = Secret.generate()
        self.operators = {"op": 1}
        self.lost: list[str] = []
        self.pids: list[int] = []
        self._attempts = 0
        self._retry_s = retry_s
        self.service = coordinator(
            self.store,
            seeded_runtime(seed, SystemClock()),
            self.secret,
            {"on_task_manager_lost": self.lost.append},
            options=CheckpointOptions(timeout_s=1.0, task_manager_timeout_s=2.0),
            task_manager_config=TaskManagerConfig(location, max_parallelism=MAX_PARALLELISM).to_json(),
        )
        self.directory = query_directory(self.service, self.store, seed)

    def launch(self) -> int:
        name = f"by-hand-{len(self.pids)}"
        where = self.service.address
        spec = LaunchSpec(name, where, self.secret, bind="127.0.0.1", detached=True, retry_s=self._retry_s)
        self.pids.append(launch_detached(spec))
        return self.pids[-1]

    async def batch(self, run: str, number: int, before: dict[bytes, bytes], *, stop: bool = False) -> None:
        await self.plan(run, number)
        async with self.attempt(self.who(run, "op", number, 0), {b"k": b"%d" % number}, before) as attempt:
            await attempt.acknowledge()
        if stop:
            os.kill(self.pids[-1], signal.SIGSTOP)
        await self.commit(run, number)

    async def members(self, count: int) -> None:
        await until(lambda: len(self.service.fleet.pids) == count, "members")


@asynccontextmanager
async def process_driver(where: Path, seed: int, retry_s: float) -> AsyncIterator[ProcessDriver]:
    driver = ProcessDriver(where, seed, retry_s)
    driver.service.expect(ExpectedOperator("op", 1, "string", resolve_states))
    await driver.service.start()
    driver.launch()
    try:
        await driver.members(1)
        yield driver
    finally:
        await driver.service.close()
        for pid in driver.pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: has_ended(pid), "its end")
        await driver.directory.close()
        await driver.store.close()


def has_ended(pid: int) -> bool:
    return all(process.pid != pid or process.poll() is not None for process in launch_spec._detached)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.checkpoint.fleet.members.ANSWER_S", 2.0)


@pytest.mark.parametrize("retry_s", [0.0, 60.0], ids=["launched", "a service"])
async def test_a_process_that_was_given_up_during_a_persist_ends_or_is_a_member_again(
    tmp_path: Path, seed: int, retry_s: float
) -> None:
    async with process_driver(tmp_path, seed, retry_s) as driver:
        await driver.batch("run-1", 0, {})
        with pytest.raises(TaskManagerLost, match="does not answer persist"):
            await driver.batch("run-1", 1, {b"k": b"0"}, stop=True)
        assert driver.lost == ["by-hand-0"]
        assert not driver.service.fleet.pids
        os.kill(driver.pids[0], signal.SIGCONT)
        if retry_s:
            await driver.members(1)
            assert list(driver.service.fleet.pids) == driver.pids, "another process than the one that was given up"
        else:
            await until(lambda: has_ended(driver.pids[0]), "end of the process")
            driver.launch()
            await driver.members(1)
        for number in (1, 2):
            await driver.batch("run-2", number, {b"k": b"%d" % (number - 1)})


async def test_a_service_ends_with_its_application(tmp_path: Path, seed: int) -> None:
    async with process_driver(tmp_path, seed, 60.0) as driver:
        await driver.batch("run-1", 0, {})
        await driver.service.close()
        await until(lambda: has_ended(driver.pids[0]), "end of the process")


@pytest.mark.parametrize("during", ["resume", "restore"])
async def test_a_process_that_hangs_while_it_is_prepared_is_given_up_and_holds_nothing_up(
    tmp_path: Path, seed: int, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the query waited for it for ever, and every later task waited for the query to be opened."""
    async with process_driver(tmp_path, seed, 0.0) as driver:
        await driver.batch("run-1", 0, {})
        if during == "restore":
            os.kill(driver.pids[0], signal.SIGKILL)
            await driver.members(0)
            driver.launch()
            await driver.members(1)
            call = Member.call

            async def stopped(member: Member, message: Call[Any], timeout: float | None = 0.0) -> object:
                if isinstance(message, Restore):
                    os.kill(driver.pids[-1], signal.SIGSTOP)
                return await call(member, message, timeout)

            monkeypatch.setattr(Member, "call", stopped)
        else:
            os.kill(driver.pids[0], signal.SIGSTOP)
        async with asyncio.timeout(40):
            with pytest.raises(DstlError, match=r"0 of 1 TaskManagers registered") as raised:
                await driver.batch("run-2", 1, {b"k": b"0"})
        assert raised.value.restartable
        assert not driver.service._opening.locked()
        os.kill(driver.pids[-1], signal.SIGCONT)
        await until(lambda: has_ended(driver.pids[-1]), "end of the process")


async def test_a_driver_that_stood_still_reads_what_came_meanwhile_before_it_gives_task_managers_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents that a driver that was suspended for half a minute loses each TaskManager that it was calling."""
    monkeypatch.setattr("dstl.checkpoint.fleet.members.ANSWER_S", 1.0)

    async def answer(peer: Peer, call: Echo) -> Echoed:
        await asyncio.sleep(0.3)
        return Echoed(call.n, b"")

    server, elsewhere = RpcServer(Secret(bytes(32)), {Echo: answer}), asyncio.new_event_loop()
    serving = threading.Thread(target=elsewhere.run_forever)
    serving.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(server.listen_tcp("127.0.0.1"), elsewhere)
        address = Address("127.0.0.1", await asyncio.wrap_future(listening))
        lost: list[Member] = []
        connection = await AsyncConnection.open(address, Secret(bytes(32)))
        member = Member("tm", address, connection, os.getpid(), lambda: None, lost.append)
        call = asyncio.ensure_future(member.call(Echo(7)))
        await asyncio.sleep(0.01)
        time.sleep(1.5)  # noqa: ASYNC251 (all of the driver stands still)
        assert ((await call).n, lost) == (7, [])
        connection.close()
    finally:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.close(), elsewhere))
        elsewhere.call_soon_threadsafe(elsewhere.stop)
        await asyncio.to_thread(serving.join)
        elsewhere.close()
