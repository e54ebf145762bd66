"""A restore takes as long as it likes while it comes further, and is given up when it stands still."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.checkpoint.fleet.restore_watch import RestoreWatch
from dstl.errors import Invalid
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import ReadRestoreStatus, RestoreStatusReply
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.runtime import end_tasks
from materializer.restore.progress import RestoreStatus

SECRET = Secret(b"s" * 32)
STALL_S = 1.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.checkpoint.fleet.restore_watch._INTERVAL_S", 0.02)
    monkeypatch.setattr("dstl.checkpoint.fleet.restore_watch._ANSWER_S", 0.2)


@asynccontextmanager
async def restoring(answers: Iterator[int | BaseException | None]) -> AsyncIterator[Address]:
    """A TaskManager that is asked how far it is: so many bytes, nothing yet, an error, or silence at the end."""

    async def progress(peer: Peer, call: ReadRestoreStatus) -> RestoreStatusReply:
        try:
            done = next(answers)
        except StopIteration:
            await asyncio.Event().wait()
            raise AssertionError("unreachable") from None
        if isinstance(done, BaseException):
            raise done
        status = None if done is None else RestoreStatus(done, 10_000, 1.0, 0.0, None, {"op": (done, 10_000)})
        return RestoreStatusReply(status)

    server = RpcServer(SECRET, {ReadRestoreStatus: progress})
    port = await server.listen_tcp("127.0.0.1")
    try:
        yield Address("127.0.0.1", port)
    finally:
        await server.close()


async def test_a_slow_restore_is_waited_for_while_bytes_are_applied() -> None:
    told: list[int] = []
    watch = RestoreWatch(OwnConnections(SECRET, ""), lambda status: told.append(status.done), STALL_S)
    async with restoring(iter(range(10_000))) as address:
        assert await watch.watch("tm", address, asyncio.sleep(3 * STALL_S, "restored")) == "restored"
    assert told == sorted(told)
    assert len(told) > 10


@pytest.mark.parametrize(
    "answers",
    [[5000] * 1000, [None] * 1000, [Invalid("no such call")] * 1000, []],
    ids=["the same bytes", "nothing yet", "an error", "silence"],
)
async def test_a_restore_that_stands_still_is_given_up(answers: list[int | BaseException | None]) -> None:
    cancelled = asyncio.Event()

    async def restore() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with restoring(iter(answers)) as address, asyncio.timeout(10):
        with pytest.raises(TimeoutError, match=r"TaskManager tm stands still for 1 s"):
            await RestoreWatch(OwnConnections(SECRET, ""), None, STALL_S).watch("tm", address, restore())
    assert cancelled.is_set()


async def test_a_driver_that_stood_still_asks_once_more_before_it_gives_a_restore_up() -> None:
    """Prevents that a restore of an hour begins anew where the driver was suspended for some minutes."""
    watch = RestoreWatch(OwnConnections(SECRET, ""), None, STALL_S)
    async with restoring(iter(range(10_000))) as address:
        asyncio.get_running_loop().call_later(0.2, time.sleep, 1.5 * STALL_S)
        assert await watch.watch("tm", address, asyncio.sleep(2.5 * STALL_S, "restored")) == "restored"


async def test_a_question_that_fails_is_asked_again() -> None:
    def some() -> Iterator[int | BaseException]:
        for done in range(10_000):
            yield done
            if done % 5 == 0:
                yield Invalid("not now")

    async with restoring(some()) as address:
        watch = RestoreWatch(OwnConnections(SECRET, ""), None, STALL_S)
        assert await watch.watch("tm", address, asyncio.sleep(2 * STALL_S, "restored")) == "restored"


async def test_a_taskmanager_that_does_not_answer_holds_up_no_connection_to_another() -> None:
    """Prevents that all TaskManagers' metrics stand still while one host is gone."""
    connections = OwnConnections(SECRET, "")
    async with restoring(iter(())) as there:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            gone = Address("127.0.0.1", silent.getsockname()[1])
            opening = asyncio.ensure_future(connections.to("gone", gone))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(2):
                assert not (await connections.to("there", there)).is_broken
            assert not opening.done()
            await end_tasks([opening])
        connections.keep(())
