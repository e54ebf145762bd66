"""Several requests on a connection before their replies: in order, bounded, and without a deadlock."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from echo_service import SECRET, serving

from dstl.errors import Fenced, Unavailable
from dstl.rpc.client import MAX_IN_FLIGHT, Address, Connection
from worlds.echo import Echo, Fail, Wait

PATIENCE_S = 20.0


async def in_worker(work: Callable[[Connection], None], address: Address, timeout: float = PATIENCE_S) -> None:
    """Do a worker's part in a thread, on a connection of its own."""

    def run() -> None:
        connection = Connection(address, SECRET, timeout=timeout)
        try:
            work(connection)
        finally:
            connection.close()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(run)


async def test_replies_come_in_the_order_of_the_requests_whatever_is_asked_for_first() -> None:
    async with serving() as (_, service, address):

        def work(connection: Connection) -> None:
            pending = [connection.send(Echo(n, b"%d" % n)) for n in range(10)]
            assert connection.in_flight == 10
            assert (pending[4].result().n, connection.in_flight) == (4, 5)
            assert [each.is_done for each in pending] == [True] * 5 + [False] * 5
            assert connection.call(Echo(10)).n == 10
            assert [bytes(each.result().data) for each in pending] == [b"%d" % n for n in range(10)]
            assert connection.in_flight == 0

        await in_worker(work, address)
        assert service.seen == [f"echo {n}" for n in range(11)]


async def test_an_error_is_its_own_requests_alone_and_is_raised_as_often_as_it_is_asked_for() -> None:
    async with serving() as (_, _, address):

        def work(connection: Connection) -> None:
            before, failing, behind = connection.send(Echo(1)), connection.send(Fail()), connection.send(Echo(2))
            assert behind.result().n == 2
            for _ in range(2):
                with pytest.raises(Fenced, match="no longer yours"):
                    failing.result()
            assert before.result().n == 1
            assert not connection.is_broken

        await in_worker(work, address)


@pytest.mark.parametrize("unix", [True, False])
async def test_large_frames_in_both_directions_at_once_pass_each_other(unix: bool, tmp_path: Any) -> None:
    """The server reads nothing while its reply does not fit the buffers, so the client reads while it sends."""
    path = f"/tmp/p{os.getpid()}-{threading.get_ident() % 1000}" if unix else ""
    payload = os.urandom(16 << 20)
    async with serving(path) as (_, _, address):

        def work(connection: Connection) -> None:
            pending = [connection.send(Echo(n, payload)) for n in range(6)]
            for n, each in enumerate(pending):
                reply = each.result()
                assert reply.n == n
                assert bytes(reply.data) == payload

        await in_worker(work, address)
    if unix:
        with contextlib.suppress(FileNotFoundError):  # from Python 3.13 on, asyncio has removed it
            os.unlink(path)


async def test_so_many_requests_are_in_flight_and_no_more() -> None:
    async with serving() as (_, service, address):
        loop = asyncio.get_running_loop()

        def work(connection: Connection) -> None:
            connection.send(Wait())
            for n in range(MAX_IN_FLIGHT - 1):
                connection.send(Echo(n))
            assert connection.in_flight == MAX_IN_FLIGHT
            threading.Timer(0.2, loop.call_soon_threadsafe, (service.release.set,)).start()
            last = connection.send(Echo(99))
            assert service.release.is_set(), "it did not wait for a reply"
            assert connection.in_flight == MAX_IN_FLIGHT
            assert last.result().n == 99

        await in_worker(work, address)


async def test_a_connection_that_breaks_leaves_no_request_without_an_error() -> None:
    async with serving() as (_, service, address):

        def work(connection: Connection) -> None:
            answered = connection.send(Echo(1))
            assert answered.result().n == 1
            waiting = [connection.send(Wait()), connection.send(Echo(2)), connection.send(Echo(3))]
            for each in (waiting[1], waiting[0], waiting[2], waiting[1]):
                with pytest.raises(Unavailable, match="broke during wait"):
                    each.result()
            assert connection.is_broken
            with pytest.raises(Unavailable):
                connection.send(Echo(4))
            assert answered.result().n == 1

        await in_worker(work, address, timeout=0.3)
        service.release.set()
