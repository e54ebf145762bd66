"""The two ends of a socket: bad peers, broken connections, and the bounds that keep one from hurting the others."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from echo_service import SECRET, Service, serving

from dstl.errors import AccessDenied, Closed, DstlError, Fenced, Invalid, Unavailable
from dstl.rpc import protocol
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address, Connection
from dstl.rpc.codec import Call
from dstl.rpc.handshake import NONCE_BYTES, ServerHandshake, socket_address
from dstl.rpc.protocol import MAX_FRAME, Framing, Secret, encode_frame
from dstl.rpc.server import Peer, RpcServer
from worlds.echo import Bug, Echo, Echoed, Fail, Flood, TooMuch, Unknown, Wait, Watch, impostor
from worlds.waiting import until


@contextlib.asynccontextmanager
async def raw(address: Address) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def in_thread(work: Callable[[], Any]) -> Any:
    return asyncio.get_running_loop().run_in_executor(None, work)


async def refused(error: type[DstlError], address: Address, timeout: float = 5.0) -> None:
    """Open a blocking connection in vain."""

    def connect() -> None:
        with pytest.raises(error):
            Connection(address, SECRET, timeout=timeout)

    await in_thread(connect)


def send(peer: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    peer.sendall(b"".join(encode_frame(header, payload)))


def handshake(peer: socket.socket) -> Framing:
    """Do the server's part of a handshake, rightly."""
    shake = ServerHandshake(SECRET, frozenset(), socket_address(peer.getsockname()))
    send(peer, shake.challenge())
    _, last, framing = shake.accept(receive(peer), vouched=False)
    send(peer, last)
    return framing


def receive(peer: socket.socket, framing: Framing | None = None) -> dict[str, Any]:
    def exactly(length: int) -> bytes:
        data = b""
        while len(data) < length:
            got = peer.recv(length - len(data))
            if not got:
                raise ConnectionResetError
            data += got
        return data

    header, _ = (framing or Framing()).decode(exactly(protocol.frame_length(exactly(4))))
    return header


async def test_calls_and_errors_of_both_clients() -> None:
    async with serving() as (_, _service, address):
        connection = await AsyncConnection.open(address, SECRET)
        answer = await connection.call(Echo(1, b"x" * 300_000))
        assert (answer.n, len(answer.data)) == (1, 300_000)
        with pytest.raises(Fenced, match="no longer yours"):
            await connection.call(Fail())
        with pytest.raises(DstlError, match="RuntimeError: a bug"):
            await connection.call(Bug())
        with pytest.raises(Invalid, match="no such call"):
            await connection.call(Unknown())
        assert not connection.is_broken

        def blocking() -> None:
            worker = Connection(address, SECRET)
            answer = worker.send(Echo(2, b"y" * 300_000)).result()
            assert (answer.n, len(answer.data)) == (2, 300_000)
            with pytest.raises(Fenced):
                worker.send(Fail()).result()
            assert not worker.is_broken
            worker.close()
            worker.close()

        await in_thread(blocking)
        connection.close()


async def test_a_wrong_secret_is_told_so_on_the_clients_side() -> None:
    """Before, the server closed without a word, and the client saw a reset connection."""
    async with serving() as (_, service, address):
        with pytest.raises(AccessDenied, match="client does not know this application's secret"):
            await AsyncConnection.open(address, Secret.generate())

        def blocking() -> None:
            with pytest.raises(AccessDenied, match="client does not know this application's secret"):
                Connection(address, Secret.generate())

        await in_thread(blocking)
        assert service.seen == []


async def test_an_impostor_that_does_not_know_the_secret_is_found_out() -> None:
    def behave(peer: socket.socket) -> None:
        send(peer, {"version": protocol.PROTOCOL_VERSION, "nonce": os.urandom(NONCE_BYTES)})
        receive(peer)
        send(peer, {"proof": os.urandom(32)})

    with impostor(behave) as address:
        with pytest.raises(AccessDenied, match="as server, does not know"):
            await AsyncConnection.open(address, SECRET)
        await refused(AccessDenied, address)


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Unavailable),
        (struct.pack(">I", MAX_FRAME), Unavailable),  # nobody allocates for a stranger
        (b"".join(encode_frame({"hello": 1})), Unavailable),
        (b"".join(encode_frame({"version": 999, "nonce": b"\0" * 32})), Invalid),
        (b"", Unavailable),
        (b"\0\0", Unavailable),
    ],
)
async def test_what_listens_but_is_no_service_is_named(first: bytes, error: type[DstlError]) -> None:
    def behave(peer: socket.socket) -> None:
        peer.sendall(first)

    with impostor(behave) as address:
        with pytest.raises(error):
            await AsyncConnection.open(address, SECRET)
        await refused(error, address)


async def test_a_service_that_never_answers_is_given_up() -> None:
    done = threading.Event()
    with impostor(lambda peer: done.wait(10)) as address:
        with pytest.raises(Unavailable, match="nothing answers"):
            await AsyncConnection.open(address, SECRET, timeout=0.1)
        await refused(Unavailable, address, timeout=0.1)
        done.set()


async def test_nobody_listens_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    stale = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(stale))
    # A peer says by which name it is reached: one that no name may have is its own fault, and no crash of ours.
    for address in (Address("127.0.0.1", port), Address("127.0.0.1", 0, str(stale)), Address("../../x", 1)):
        with pytest.raises(Unavailable, match="nothing answers"):
            await AsyncConnection.open(address, SECRET)
        with pytest.raises(Unavailable, match="nothing answers"):
            Connection(address, SECRET)


@pytest.mark.parametrize("ending", ["close", "half a frame", "no frame", "silence"])
async def test_a_connection_that_breaks_during_a_call_is_unavailable_and_never_a_hang(ending: str) -> None:
    done = threading.Event()

    def behave(peer: socket.socket) -> None:
        framing = handshake(peer)
        receive(peer, framing)
        if ending == "half a frame":
            peer.sendall(b"".join(framing.encode({"n": 1}, b"0123"))[:-2])
        elif ending == "no frame":
            peer.sendall(struct.pack(">I", 5) + b"\0\0\0\1\xc1")
        elif ending == "silence":
            done.wait(10)

    with impostor(behave) as address:
        if ending != "silence":
            connection = await AsyncConnection.open(address, SECRET)
            with pytest.raises(Unavailable, match="broke during echo"):
                await connection.call(Echo())
            assert connection.is_broken
            with pytest.raises(Unavailable):
                await connection.call(Echo())

        def blocking() -> None:
            worker = Connection(address, SECRET, timeout=0.2)
            with pytest.raises(Unavailable, match="broke during echo"):
                worker.send(Echo()).result()
            assert worker.is_broken
            with pytest.raises(Unavailable):
                worker.send(Echo()).result()

        await in_thread(blocking)
        done.set()


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let services say every few milliseconds that they are at a call, and be taken for hung after one second."""
    monkeypatch.setattr("dstl.rpc.server.BEAT_S", 0.02)
    monkeypatch.setattr("dstl.rpc.async_connection.SILENCE_S", 1.0)


@pytest.mark.usefixtures("lively")
async def test_a_call_may_take_as_long_as_its_service_is_at_it() -> None:
    """Prevents that a long restore, which a task's first call waits for, fails the task."""
    async with serving() as (_, service, address):
        waits = await AsyncConnection.open(address, SECRET)

        def blocking() -> tuple[int | None, int]:
            worker = Connection(address, SECRET, timeout=1.0)
            pending = [worker.send(Wait()), worker.send(Echo(1, bytes(1 << 24))), worker.send(Echo(2))]
            try:
                return pending[2].result().n, len(pending[1].result().data)
            finally:
                worker.close()

        calls = asyncio.gather(waits.call(Wait()), waits.call(Echo(3)), in_thread(blocking))
        done, _ = await asyncio.wait([asyncio.ensure_future(calls)], timeout=2.5)
        assert not done
        service.release.set()
        _, echoed, (n, length) = await calls
        assert (echoed.n, n, length) == (3, 2, 1 << 24)
        waits.close()


@pytest.mark.usefixtures("lively")
async def test_a_service_that_hangs_is_given_up_after_a_time_of_silence() -> None:
    """Prevents that each task waits for an hour for a TaskManager that hangs (seed 180260595)."""
    done = threading.Event()

    def behave(peer: socket.socket) -> None:
        framing = handshake(peer)
        receive(peer, framing)
        peer.sendall(b"".join(framing.encode({"working": True})))
        done.wait(20)

    with impostor(behave) as address:
        connection = await AsyncConnection.open(address, SECRET)
        async with asyncio.timeout(10):
            with pytest.raises(Unavailable, match="broke during echo: no sign of life for 1 s"):
                await connection.call(Echo())
        assert connection.is_broken

        def blocking() -> None:
            worker = Connection(address, SECRET, timeout=1.0)
            with pytest.raises(Unavailable, match="broke during echo: no sign of life for 1 s"):
                worker.send(Echo()).result()

        done.set()
        done.clear()
        await in_thread(blocking)
        done.set()


@pytest.mark.usefixtures("lively")
async def test_a_service_that_hangs_is_given_up_by_all_whose_requests_it_does_not_take() -> None:
    """Prevents that a sender waits for ever for room, with the lock of those that would notice."""
    done = threading.Event()

    def behave(peer: socket.socket) -> None:
        handshake(peer)
        done.wait(20)

    with impostor(behave) as address:
        connection = await AsyncConnection.open(address, SECRET)
        async with asyncio.timeout(10):
            calls = [connection.call(Echo(n, bytes(1 << 24))) for n in range(3)]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, Unavailable), answer
            await connection.wait_closed()
        done.set()


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("seconds", [1.2, 3.0])
async def test_who_stood_still_itself_reads_what_came_meanwhile_before_it_gives_others_up(seconds: float) -> None:
    """Prevents that a driver that was suspended takes every TaskManager for lost."""

    def behave(peer: socket.socket) -> None:
        framing = handshake(peer)
        receive(peer, framing)
        time.sleep(0.3)  # by then it stands still
        peer.sendall(b"".join(framing.encode({"n": 7}, b"")))

    with impostor(behave) as address:
        connection = await AsyncConnection.open(address, SECRET)
        call = asyncio.ensure_future(connection.call(Echo(7)))
        await asyncio.sleep(0.01)
        threading.Event().wait(seconds)  # the whole loop stands still
        assert (await call).n == 7
        connection.close()


def test_who_stood_still_together_with_its_service_gives_it_time_to_go_on() -> None:
    """Prevents that of a host that was suspended the workers, which are first to go on, take all others for hung."""
    asked, goes_on = threading.Event(), threading.Event()

    def behave(peer: socket.socket) -> None:
        framing = handshake(peer)
        receive(peer, framing)
        asked.set()
        goes_on.wait(20)
        time.sleep(0.3)  # it is later than its caller
        peer.sendall(b"".join(framing.encode({"n": 7}, b"")))

    call = (
        "import sys; from dstl.rpc.client import *; from worlds.echo import Echo; "
        "where, secret = Address.parse(sys.argv[1]), Secret(bytes.fromhex(sys.argv[2])); "
        "print(Connection(where, secret, timeout=1.0).send(Echo(7)).result().n)"
    )
    with impostor(behave) as address:
        command = [sys.executable, "-c", call, str(address), SECRET.reveal().hex()]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as worker:
            assert asked.wait(20)
            time.sleep(0.3)  # until it waits for the reply
            worker.send_signal(signal.SIGSTOP)
            time.sleep(2)
            worker.send_signal(signal.SIGCONT)
            goes_on.set()
            said, _ = worker.communicate(timeout=20)
    assert said == b"7\n"


@pytest.mark.usefixtures("lively")
@pytest.mark.parametrize("message", [Echo(0, bytes(2 << 20)), Flood()], ids=["request", "reply"])
async def test_a_service_says_that_it_is_at_a_call_whose_mac_waits_for_a_thread(message: Call[Echoed]) -> None:
    """Prevents that a TaskManager whose threads all wait for its disk is taken for hung."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    async with serving() as (_, _, address):

        def blocking() -> int | None:
            worker = Connection(address, SECRET, timeout=1.0)
            try:
                return worker.send(message).result().n
            finally:
                worker.close()

        disk = loop.run_in_executor(None, threading.Event().wait, 2.5)
        with ThreadPoolExecutor(1) as workers:
            assert await loop.run_in_executor(workers, blocking) == 0
        assert disk.done()


async def test_the_reply_of_an_abandoned_call_is_never_taken_for_another() -> None:
    async with serving() as (_, service, address):
        connection = await AsyncConnection.open(address, SECRET)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.call(Wait())
        service.release.set()
        with pytest.raises(Unavailable):
            await connection.call(Echo(1))
        assert connection.is_broken


async def test_calls_on_one_asynchronous_connection_do_not_wait_for_each_others_replies() -> None:
    arrived: list[str] = []

    def behave(peer: socket.socket) -> None:
        framing = handshake(peer)
        arrived.extend(receive(peer, framing)["call"] for _ in range(3))

    with impostor(behave) as address:
        connection = await AsyncConnection.open(address, SECRET)
        calls = [connection.call(Echo(1)), connection.call(Wait()), connection.call(Echo(2))]
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in ended] == [Unavailable] * 3
        assert len(arrived) == 3


async def test_replies_come_in_the_order_of_the_calls() -> None:
    async with serving() as (_, service, address):
        connection = await AsyncConnection.open(address, SECRET)
        first = asyncio.create_task(connection.call(Wait()))
        others = [asyncio.create_task(connection.call(Echo(n, b"x" * 100_000))) for n in range(20)]
        await asyncio.sleep(0.05)
        assert not any(each.done() for each in (first, *others))  # handled in their order, behind the first
        service.release.set()
        await first
        assert [(await each).n for each in others] == list(range(20))
        connection.close()


async def test_a_cancelled_call_ends_those_behind_it_and_none_gets_its_reply() -> None:
    async with serving() as (_, service, address):
        connection = await AsyncConnection.open(address, SECRET)
        first = asyncio.create_task(connection.call(Wait()))
        second = asyncio.create_task(connection.call(Echo(2)))
        third = asyncio.create_task(connection.call(Echo(3)))
        await asyncio.sleep(0.05)
        service.release.set()
        await asyncio.sleep(0)
        second.cancel()
        ended = await asyncio.gather(first, second, third, return_exceptions=True)
        assert isinstance(ended[1], asyncio.CancelledError)
        assert isinstance(ended[2], Unavailable)
        assert connection.is_broken


async def test_a_call_that_is_cancelled_before_it_is_sent_costs_the_connection_nothing() -> None:
    async with serving() as (_, _service, address):
        connection = await AsyncConnection.open(address, SECRET)
        async with connection._sending:
            call = asyncio.create_task(connection.call(Echo(1)))
            await asyncio.sleep(0)
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await connection.call(Echo(2))).n == 2
        connection.close()


async def test_an_exception_in_the_middle_of_a_call_breaks_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, or Spark's interrupt, while a worker waits: its connection is cached, and the reply is still to come."""
    async with serving() as (_, _service, address):

        def blocking() -> None:
            worker = Connection(address, SECRET)
            receive_really = worker._receive

            def interrupted(*_: object) -> Any:
                raise KeyboardInterrupt

            monkeypatch.setattr(worker, "_receive", interrupted)
            with pytest.raises(KeyboardInterrupt) as raised:
                worker.send(Echo(1)).result()
            # Its own cause would make an endless chain for whoever looks for the first error.
            assert raised.value.__cause__ is None
            monkeypatch.setattr(worker, "_receive", receive_really)
            assert worker.is_broken
            with pytest.raises(Unavailable):
                worker.send(Echo(2)).result()

        await in_thread(blocking)


async def test_a_request_that_cannot_be_sent_leaves_the_connection_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, _service, address):
        connection = await AsyncConnection.open(address, SECRET)
        monkeypatch.setattr("dstl.rpc.protocol.MAX_FRAME", 1000)
        with pytest.raises(Invalid, match="send it in parts"):
            await connection.call(Echo(1, b"\0" * 2000))
        with pytest.raises(Invalid, match="send it in parts"):
            await connection.call(TooMuch())
        assert (await connection.call(Echo(3))).n == 3
        connection.close()


async def test_a_connection_is_refused_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, _service, address):

        def blocking() -> None:
            worker = Connection(address, SECRET)
            monkeypatch.setattr("dstl.rpc.client.os.getpid", lambda: worker.pid + 1)
            with pytest.raises(Closed, match="before a fork"):
                worker.send(Echo(1)).result()
            monkeypatch.undo()
            assert worker.send(Echo(1)).result().n == 1
            worker.close()

        await in_thread(blocking)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 1 << 20),
        b"".join(encode_frame({"nonce": 5, "proof": b""})),
        b"".join(encode_frame({"nonce": b"\0" * 32, "proof": 1 << 40})),
        struct.pack(">II", 7, 3) + b"\x81\x80\xc0",
        b"".join(encode_frame({"call": "echo"})),
    ],
)
async def test_strangers_cost_only_their_own_connection(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, service, address):
        friend = await AsyncConnection.open(address, SECRET)
        async with raw(address) as (reader, writer):
            writer.write(data)
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(5):
                with contextlib.suppress(OSError):
                    await reader.read()
        assert (await friend.call(Echo(1))).n == 1
        assert len(service.seen) == 1, "a stranger was dispatched"
        friend.close()
    assert not [r for r in caplog.records if r.name == "asyncio"], caplog.text


async def test_an_authenticated_peer_that_talks_rubbish_costs_only_its_own_connection() -> None:
    async with serving() as (_, _service, address):
        friend = await AsyncConnection.open(address, SECRET)
        for rubbish in (struct.pack(">I", 0xFFFFFFFF), struct.pack(">II", 7, 3) + b"\x81\x80\xc0", b"\0\0\0"):
            bad = await AsyncConnection.open(address, SECRET)
            bad._writer.write(rubbish)
            bad.close()
            assert (await friend.call(Echo(1))).n == 1
        friend.close()


async def test_a_peer_that_does_not_shake_hands_in_time_is_let_go() -> None:
    async with serving(handshake_s=0.1) as (_, _service, address), raw(address) as (reader, _writer):
        async with asyncio.timeout(5):
            assert await reader.read(4)
            await reader.read()


async def test_beyond_the_cap_a_peer_is_told_to_come_later() -> None:
    async with serving(max_connections=2) as (server, _service, address):
        two = [await AsyncConnection.open(address, SECRET) for _ in range(2)]
        with pytest.raises(Unavailable, match="too many connections already: try again later"):
            await AsyncConnection.open(address, SECRET)
        assert (await two[0].call(Echo(1))).n == 1
        two[1].close()
        await until(lambda: len(server._connections) == 1, "the connection's end")
        third = await AsyncConnection.open(address, SECRET)
        assert (await third.call(Echo(3))).n == 3
        for each in (two[0], third):
            each.close()


async def test_a_peer_that_does_not_read_its_replies_holds_up_nobody() -> None:
    async with serving() as (_, _service, address):
        slow = await AsyncConnection.open(address, SECRET)
        for _ in range(8):
            slow._writer.writelines(slow._framing.encode({"call": "flood"}))
        slow._reader._transport.pause_reading()
        friend = await AsyncConnection.open(address, SECRET)
        async with asyncio.timeout(5):
            for n in range(50):
                assert (await friend.call(Echo(n))).n == n
        for each in (slow, friend):
            each.close()


async def test_on_lost_fires_once_however_a_connection_ends() -> None:
    async with serving() as (server, service, address):
        for name, end in [("close", AsyncConnection.close), ("abort", lambda c: c._writer.transport.abort())]:
            connection = await AsyncConnection.open(address, SECRET)
            await connection.call(Watch(name))
            end(connection)
        rubbish = await AsyncConnection.open(address, SECRET)
        await rubbish.call(Watch("rubbish"))
        rubbish._writer.write(struct.pack(">I", 0xFFFFFFFF))
        last = await AsyncConnection.open(address, SECRET)
        await last.call(Watch("server"))
        await until(lambda: len(service.lost) >= 3, "what is said of three")
        assert sorted(service.lost) == ["abort", "close", "rubbish"]
        await server.close()
        assert sorted(service.lost) == ["abort", "close", "rubbish", "server"]
        await server.close()
        assert len(service.lost) == 4
        for each in (rubbish, last):
            each.close()


async def test_close_ends_calls_listeners_and_peers_that_have_just_connected() -> None:
    async with serving() as (server, _service, address):
        busy = await AsyncConnection.open(address, SECRET)
        waiting = asyncio.create_task(busy.call(Wait()))
        await asyncio.sleep(0.02)
        async with raw(address) as (reader, _):
            await server.close()
            async with asyncio.timeout(5):
                with contextlib.suppress(OSError):
                    await reader.read()
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable):
            await AsyncConnection.open(address, SECRET)


@pytest.mark.parametrize("turns", range(5))
async def test_a_server_that_closes_leaves_no_socket_open_of_whom_it_has_just_accepted(turns: int) -> None:
    """From the accept to the connection the loop turns some times; asyncio's own server has none for it any more."""
    lost: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    server = RpcServer(SECRET, {})
    port = await server.listen_tcp("127.0.0.1")
    with socket.socket() as peer:
        peer.settimeout(0.0)
        assert peer.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
        for _ in range(turns):
            await asyncio.sleep(0)
        await server.close()
        peer.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            while await in_thread(lambda: peer.recv(1024)):
                pass
    assert lost == []


async def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    server = RpcServer(SECRET, Service().handlers)
    path = str(tmp_path / "socket")
    await server.listen_unix(path)
    try:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        connection = await AsyncConnection.open(Address("elsewhere", 1, path), SECRET)
        assert (await connection.call(Echo(7))).n == 7
        connection.close()

        def blocking() -> None:
            worker = Connection(Address("elsewhere", 1, path), SECRET)
            assert worker.send(Echo(8)).result().n == 8
            worker.close()

        await in_thread(blocking)
    finally:
        await server.close()


async def test_a_socket_path_that_is_too_long_is_refused_with_what_to_do(tmp_path: Path) -> None:
    server = RpcServer(SECRET, {})
    with pytest.raises(Invalid, match="TMPDIR"):
        await server.listen_unix(str(tmp_path / ("x" * 120)))
    await server.close()


async def test_a_lifeline_ends_when_the_peer_does() -> None:
    async with serving() as (server, _service, address):
        lifeline = await AsyncConnection.open(address, SECRET)
        watching = asyncio.create_task(lifeline.wait_closed_by_peer())
        await asyncio.sleep(0.02)
        assert not watching.done()
        await server.close()
        async with asyncio.timeout(5):
            await watching
        lifeline.close()


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_call_that_waits_is_told_when_its_caller_has_gone(is_reset: bool) -> None:
    """What a dead worker has asked for must not be done, nor hold the others up."""
    seen: list[bool] = []
    gone = asyncio.Event()

    async def patient(peer: Peer, call: Wait) -> Echoed:
        while not peer.is_gone:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        seen.append(peer.is_gone)
        gone.set()
        return Echoed(0, b"")

    server = RpcServer(SECRET, {Wait: patient})
    address = Address("127.0.0.1", await server.listen_tcp("127.0.0.1"))
    connection = await AsyncConnection.open(address, SECRET)
    waiting = asyncio.ensure_future(connection.call(Wait()))
    await asyncio.sleep(0.05)
    assert not seen
    if is_reset:
        ends_at_once = struct.pack("ii", 1, 0)
        connection._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ends_at_once)
    connection.close()
    with pytest.raises(Unavailable):
        await waiting
    async with asyncio.timeout(5):
        await gone.wait()
    await server.close()
