"""Frames, handshake and secrets: what a stranger may send, and what nobody may see."""

import asyncio
import contextlib
import copy
import io
import logging
import os
import pickle
import struct
import threading
import traceback
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from echo_service import SECRET, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.errors import AccessDenied, CorruptData, Fenced, Invalid, Unavailable
from dstl.process.launch_spec import LaunchSpec
from dstl.rpc.client import MAX_IN_FLIGHT, Address, Connection
from dstl.rpc.frame_socket import FrameSocket
from dstl.rpc.handshake import NONCE_BYTES, ClientHandshake, Role, ServerHandshake
from dstl.rpc.protocol import (
    MAX_FRAME,
    MAX_HANDSHAKE,
    PREFIX_BYTES,
    Secret,
    decode_body,
    encode_frame,
    frame_length,
    raise_for,
)
from dstl.runtime import SystemClock
from worlds.echo import Echo, Fail, Wait

WORKER = Role.WORKER
CANARY = b"canary-0123456789abcdef"


def frame(header: dict[str, object], payload: bytes = b"") -> bytes:
    return b"".join(encode_frame(header, payload))


def test_no_buffer_of_a_frame_is_empty_for_python_3_12_polls_for_ever_behind_one() -> None:
    """A TaskManager took a whole core, and its connections were never closed."""
    assert all(map(len, encode_frame({})))
    assert all(map(len, encode_frame({}, memoryview(b""))))


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=100)
def test_garbage_is_refused_or_a_map_and_never_anything_else(data: bytes) -> None:
    try:
        header, _ = decode_body(data)
    except CorruptData:
        return
    assert isinstance(header, dict)


@pytest.mark.parametrize("length", [0, 3, MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_length_out_of_bounds_is_refused_before_anything_is_allocated(length: int) -> None:
    with pytest.raises(CorruptData, match=f"declares {length} bytes"):
        frame_length(struct.pack(">I", length))


def test_an_unauthenticated_peer_has_a_tighter_bound() -> None:
    with pytest.raises(CorruptData, match="the limit is 1024"):
        frame_length(struct.pack(">I", MAX_HANDSHAKE + 1), MAX_HANDSHAKE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        struct.pack(">I", 1),  # a header that is not there
        struct.pack(">I", 0xFFFFFFFF) + b"\x80",
        struct.pack(">I", 1) + b"\xc1",  # no msgpack
        struct.pack(">I", 1) + b"\x90",  # no map
        struct.pack(">I", 2) + b"\x80\x80",  # two
        struct.pack(">I", 3) + b"\x81\x80\xc0",  # a map as a key
        struct.pack(">I", 5) + b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
        struct.pack(">I", 5) + b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        struct.pack(">I", 4) + b"\x81\xa1\xff\xc0",  # no UTF-8
        struct.pack(">I", 100_000) + b"\x91" * 100_000,
        struct.pack(">I", 200_002) + b"\x81\xa1k" + b"\x91" * 199_999,
    ],
)
def test_hostile_headers_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptData):
        decode_body(body)


def test_a_header_of_more_than_16_mib_is_refused() -> None:
    big = msgpack.packb({"k": b"\0" * (16 << 20)})
    with pytest.raises(CorruptData, match="declares a header"):
        decode_body(struct.pack(">I", len(big)) + big)


def test_a_header_of_very_many_lists_is_refused_before_they_are_made() -> None:
    """Prevents that 16 MiB of empty lists take a gigabyte, and the loop for twenty seconds."""
    header = msgpack.packb({"entries": [[str(at), at] for at in range(100_000)]})
    assert len(decode_body(struct.pack(">I", len(header)) + header)[0]["entries"]) == 100_000
    header = msgpack.packb({"entries": [[]] * (1 << 20)})
    with pytest.raises(CorruptData, match="lists and maps"):
        decode_body(struct.pack(">I", len(header)) + header)


def test_a_message_above_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.rpc.protocol.MAX_FRAME", 100)
    assert encode_frame({}, b"\0" * 90)
    with pytest.raises(Invalid, match="send it in parts"):
        encode_frame({}, b"\0" * 100)


@pytest.mark.parametrize("error", [5, [], ["Fenced"], ["Fenced", b"x"], "Fenced", {"Fenced": 1}])
def test_an_error_that_is_none_is_refused(error: object) -> None:
    with pytest.raises(CorruptData):
        raise_for({"error": error})


def shaken(client: Secret, server: Secret, **changed: object) -> None:
    """Do a handshake in memory, and change what the client says."""
    serving, calling = (
        ServerHandshake(server, frozenset({"there:1"}), ""),
        ClientHandshake(client, WORKER, "there:1", ""),
    )
    _, last, _ = serving.accept({**calling.answer(serving.challenge()), **changed}, vouched=False)
    calling.finish(last, vouched=False)


def test_a_proof_holds_for_one_secret_and_one_pair_of_nonces() -> None:
    ours, theirs = Secret.generate(), Secret.generate()
    shaken(ours, ours)
    with pytest.raises(AccessDenied, match="does not know this application's secret"):
        shaken(ours, theirs)
    with pytest.raises(AccessDenied, match="does not know this application's secret"):
        shaken(ours, ours, nonce=b"n" * NONCE_BYTES)


@pytest.mark.parametrize("given", [None, 0, 1 << 60, "text", b"", [1], b"\0" * NONCE_BYTES])
def test_whatever_is_sent_as_a_proof_is_refused_without_a_crash(given: object) -> None:
    secret = Secret.generate()
    with pytest.raises(AccessDenied):
        shaken(secret, secret, proof=given)


@pytest.mark.parametrize("text", ["a" * 32, "ab" * 16, "1111111122222222", "a" * 1000])
def test_a_secret_that_repeats_itself_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(Invalid, match="easily guessed") as raised:
        Secret.from_text(text)
    assert text not in str(raised.value)


def test_a_weak_secret_is_warned_of_and_a_random_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    Secret.from_text("hunter2 hunter2 hunter2")
    assert ["can be guessed" in record.getMessage() for record in caplog.records] == [True]
    assert "hunter2" not in caplog.text
    caplog.clear()
    for _ in range(100):
        Secret.from_text(Secret.generate().reveal().hex())
    assert not caplog.records


def test_a_secret_that_is_no_text_is_refused_and_not_shown() -> None:
    """From the environment bytes that are not UTF-8 come as surrogates, and the encoder's error holds them."""
    with pytest.raises(Invalid, match="not UTF-8 text") as raised:
        Secret.from_text(b"hunter2-hunter2-\xff".decode(errors="surrogateescape"))
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_short_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(Invalid) as raised:
        Secret(b"shortcanary")
    assert "shortcanary" not in str(raised.value)


def test_the_secret_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(CANARY)
    config = LaunchSpec("tm", Address("127.0.0.1", 1), secret)
    shown = io.StringIO()
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("dstl").warning("%s %r %s", secret, secret, config)
    try:
        shaken(secret, secret, proof=b"wrong")
    except AccessDenied as error:
        traceback.print_exception(error, file=shown)
    for text in (repr(secret), str(secret), f"{secret}", repr(config), caplog.text, shown.getvalue(), repr([secret])):
        assert "canary" not in text
    assert not hasattr(secret, "__dict__")


def test_the_secret_survives_what_spark_does_to_a_closure_and_the_pipe_to_a_child() -> None:
    secret = Secret(CANARY)
    assert pickle.loads(pickle.dumps(secret)).reveal() == CANARY
    assert copy.deepcopy(secret).reveal() == CANARY
    config = LaunchSpec("tm", Address("h", 1), secret, bind="h")
    line = config.to_line()
    assert line.count(b"\n") == 1
    assert b"canary" not in line
    back = LaunchSpec.from_line(line)
    assert back.secret.reveal() == CANARY
    assert (back.coordinator, back.bind, back.detached) == (config.coordinator, "h", False)


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
            assert connection.send(Echo(10)).result().n == 10
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


class Pieces:
    """A connected socket that receives in pieces of some sizes, and counts how often it sends."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self.data, self.sizes, self.sent = data, sizes, list[bytes]()

    def recv_into(self, view: memoryview) -> int:
        size = min(len(view), len(self.data), self.sizes.pop(0) if self.sizes else len(view))
        view[:size] = self.data[:size]
        self.data = self.data[size:]
        return size

    def sendmsg(self, buffers: list[memoryview]) -> int:
        self.sent.append(b"".join(buffers))
        return len(self.sent[-1])

    def settimeout(self, timeout: float | None) -> None:
        pass


@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=6), st.lists(st.integers(1, 50_000), max_size=30))
@settings(max_examples=100, deadline=None)
def test_frames_come_whole_whatever_pieces_they_are_received_in(lengths: list[int], sizes: list[int]) -> None:
    bodies = [frame({"n": n}, bytes([n]) * length) for n, length in enumerate(lengths)]
    frames = FrameSocket(Pieces(b"".join(bodies), sizes), SystemClock())  # type: ignore[arg-type]
    frames.set_timeout(1.0)
    assert [bytes(frames.receive()) for _ in bodies] == [body[PREFIX_BYTES:] for body in bodies]


def test_a_frame_is_sent_in_one_piece_for_each_piece_wakes_the_other_side() -> None:
    sock, payload = Pieces(b"", []), b"p" * (1 << 17)
    FrameSocket(sock, SystemClock()).send(encode_frame({"n": 1}, payload))  # type: ignore[arg-type]
    assert sock.sent == [frame({"n": 1}, payload)]
