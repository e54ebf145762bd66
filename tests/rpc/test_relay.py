"""Somebody between client and server who does not know the secret, and everything that he may try with real sockets."""

import asyncio
import contextlib
import hashlib
import os
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dstl.errors import AccessDenied, CorruptData, DstlError, Invalid, Unavailable
from dstl.rpc import handshake, protocol
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address, Connection
from dstl.rpc.codec import Call, Message, Payload
from dstl.rpc.handshake import Role, ServerHandshake, socket_address
from dstl.rpc.messages import Done
from dstl.rpc.protocol import FrameMac, Framing, Secret, encode_frame
from dstl.rpc.server import Peer, RpcServer
from worlds.waiting import until

SECRET = Secret.generate()
HANDSHAKE_FRAMES = {"to server": 1, "to client": 2}
"""Frames of a handshake in each direction."""

Change = Callable[[int, bytes], list[bytes]]
"""Given the number of a frame behind the handshake, from 0, and the frame: what is passed on in its place."""


class Bank:
    """A server that notes what was asked of it."""

    def __init__(self, name: str = "bank") -> None:
        self.name = name
        self.asked: list[tuple[str, bytes]] = []
        self.server = RpcServer(SECRET, {Put: self._answer, Get: self._answer})

    async def _answer(self, peer: Peer, call: "Put | Get") -> "Got":
        self.asked.append((call.name, bytes(call.data) if isinstance(call, Put) else b""))
        return Got(self.name, len(self.asked), b"state of " + self.name.encode())


@dataclass(frozen=True, slots=True)
class Got(Message):
    of: str
    n: int
    data: Payload


@dataclass(frozen=True, slots=True)
class Put(Call[Got], name="write"):
    data: Payload


@dataclass(frozen=True, slots=True)
class Get(Call[Got], name="fetch"):
    pass


class Relay:
    """Passes frames on between a client and a server, and does to them what the test says.

    Attributes:
        seen: Frames behind the handshake, by direction.
    """

    def __init__(self, target: Address, changes: dict[str, Change]) -> None:
        self._target = target
        self._changes = changes
        self.seen: dict[str, list[bytes]] = {"to server": [], "to client": []}
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self.writers = {"to server": there_writer, "to client": writer}
        self._tasks += [
            asyncio.ensure_future(self._pass("to server", reader, there_writer)),
            asyncio.ensure_future(self._pass("to client", there_reader, writer)),
        ]

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = -HANDSHAKE_FRAMES[way]
        try:
            while True:
                prefix = await reader.readexactly(4)
                frame = prefix + await reader.readexactly(struct.unpack(">I", prefix)[0])
                if number >= 0:
                    self.seen[way].append(frame)
                passed = [frame] if number < 0 or way not in self._changes else self._changes[way](number, frame)
                for each in passed:
                    writer.write(each)
                number += 1
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self.writers.values():
            writer.close()


@contextlib.asynccontextmanager
async def relayed(
    changes: dict[str, Change] | None = None, known: bool = True
) -> AsyncIterator[tuple[Bank, Relay, Address]]:
    """A server and a relay before it; where it is ``known`` by the relay's address, the relay is as good as a wire."""
    bank = Bank()
    relay: Relay | None = None

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert relay is not None
        await relay.accept(reader, writer)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    own = await bank.server.listen_tcp("127.0.0.1")
    if known:
        bank.server._names[False].add(f"127.0.0.1:{port}")
    relay = Relay(Address("127.0.0.1", own), changes or {})
    try:
        yield bank, relay, Address("127.0.0.1", port)
    finally:
        await relay.close()
        listener.close()
        await bank.server.close()


async def test_a_relay_that_changes_nothing_is_only_a_wire() -> None:
    async with relayed() as (bank, relay, address):
        connection = await AsyncConnection.open(address, SECRET)
        for n in range(3):
            assert (await connection.call(Put(b"%d" % n))).n == n + 1
        connection.close()
    assert [payload for _, payload in bank.asked] == [b"0", b"1", b"2"]
    assert len(relay.seen["to server"]) == len(relay.seen["to client"]) == 3


def forged(_: int, frame: bytes) -> list[bytes]:
    return [b"".join(encode_frame({"call": "write"}, b"forged")), frame]


def flipped(at: int) -> Change:
    def change(_: int, frame: bytes) -> list[bytes]:
        changed = bytearray(frame)
        changed[at] ^= 1
        return [bytes(changed)]

    return change


def with_own_mac(_: int, frame: bytes) -> list[bytes]:
    """A frame with a MAC under another key, as long as it must be."""
    made = Framing(FrameMac(b"k" * 32))
    return [b"".join(made.encode({"call": "write"}, b"forged"))]


def unsealed(_: int, frame: bytes) -> list[bytes]:
    """The frame without its MAC, as a peer that asks for none would send it."""
    return [struct.pack(">I", len(frame) - 4 - 16) + frame[4:-16]]


ATTACKS_ON_REQUESTS: dict[str, Change] = {
    "a frame in front": forged,
    "a frame in its place": lambda n, frame: [b"".join(encode_frame({"call": "write"}, b"forged"))],
    "another key": with_own_mac,
    "a bit of the length": flipped(3),
    "a bit of the header": flipped(12),
    "a bit of the payload": flipped(-20),
    "a bit of the MAC": flipped(-1),
    "no MAC": unsealed,
    "left out": lambda n, frame: [] if n == 1 else [frame],
    "twice": lambda n, frame: [frame, frame],
}


@pytest.mark.parametrize("attack", ATTACKS_ON_REQUESTS)
async def test_a_request_is_neither_changed_nor_made_up_nor_repeated_on_its_way(attack: str) -> None:
    """Before, whoever passed a handshake on could then write and read state in the client's name."""
    async with relayed({"to server": ATTACKS_ON_REQUESTS[attack]}) as (bank, relay, address):
        connection = await AsyncConnection.open(address, SECRET)
        with contextlib.suppress(DstlError, TimeoutError):
            async with asyncio.timeout(1):
                for n in range(3):
                    await connection.call(Put(b"honest %d" % n))
        await asyncio.sleep(0.05)
        connection.close()
    honest = [("write", b"honest %d" % n) for n in range(3)]
    assert bank.asked == honest[: len(bank.asked)], "the server did what no client has asked for"
    assert len(bank.asked) < 3
    assert relay.seen["to server"]


ATTACKS_ON_REPLIES: dict[str, Change] = {
    "made up": lambda n, frame: [b"".join(encode_frame({"of": "forged"}, b"forged state"))],
    "in front": lambda n, frame: [b"".join(encode_frame({"of": "forged"}, b"forged state")), frame],
    "another key": with_own_mac,
    "a bit of the payload": flipped(-20),
    "a bit of the MAC": flipped(-1),
    "no MAC": unsealed,
    "twice": lambda n, frame: [frame, frame],
    "an error": lambda n, frame: [b"".join(encode_frame({"error": ["Fenced", "go away"]}))],
}


@pytest.mark.parametrize("attack", ATTACKS_ON_REPLIES)
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_reply_is_neither_changed_nor_made_up_nor_repeated_on_its_way(attack: str, blocking: bool) -> None:
    def ask(address: Address) -> None:
        worker = Connection(address, SECRET, timeout=5)
        try:
            for _ in range(3):
                got = worker.send(Get()).result()
                assert (got.of, bytes(got.data)) == ("bank", b"state of bank")
        finally:
            assert worker.is_broken

    async def ask_too(address: Address) -> None:
        connection = await AsyncConnection.open(address, SECRET)
        try:
            for _ in range(3):
                got = await connection.call(Get())
                assert (got.of, bytes(got.data)) == ("bank", b"state of bank")
        finally:
            assert connection.is_broken

    async with relayed({"to client": ATTACKS_ON_REPLIES[attack]}) as (_, _relay, address):
        with pytest.raises(Unavailable, match="broke during fetch"):
            await (asyncio.to_thread(ask, address) if blocking else ask_too(address))


async def test_an_own_request_sent_back_is_no_reply() -> None:
    """Directions have keys of their own."""

    async with relayed() as (_, relay, address):

        def reflect(number: int, frame: bytes) -> list[bytes]:
            relay.writers["to client"].write(frame)
            return []

        relay._changes["to server"] = reflect
        connection = await AsyncConnection.open(address, SECRET)
        with pytest.raises(Unavailable, match="frames are being changed on the way"):
            await connection.call(Get())


async def test_a_reply_of_another_connection_is_none() -> None:
    """Keys are of one connection: what was recorded on one says nothing on the next."""
    async with relayed() as (_, relay, address):
        first = await AsyncConnection.open(address, SECRET)
        await first.call(Get())
        recorded = relay.seen["to client"][0]
        relay._changes["to client"] = lambda n, frame: [recorded]
        second = await AsyncConnection.open(address, SECRET)
        with pytest.raises(Unavailable, match="frames are being changed on the way"):
            await second.call(Get())
        first.close()


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_client_does_not_take_another_server_for_the_one_that_it_dialled(blocking: bool) -> None:
    """Whoever squats on the port of a dead TaskManager can pass connections on to a living one of the same secret."""
    async with relayed(known=False) as (bank, _relay, address):
        opening = asyncio.to_thread(Connection, address, SECRET) if blocking else AsyncConnection.open(address, SECRET)
        with pytest.raises(AccessDenied, match="is not known by that address"):
            await opening
    assert not bank.asked


async def test_a_server_is_known_by_its_socket_over_that_socket_alone(tmp_path: Path) -> None:
    """Prevents that whoever has made a lost socket anew passes its handshakes on to the service's port."""
    bank = Bank()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        path = f"{directory}/s"
        await bank.server.listen_unix(path)
        port = await bank.server.listen_tcp("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = handshake.ClientHandshake(SECRET, Role.WORKER, path, "")

        async def said() -> dict[str, object]:
            return Framing().decode(await reader.readexactly(int.from_bytes(await reader.readexactly(4))))[0]

        writer.writelines(Framing().encode(client.answer(await said())))
        assert await said() == {"refused": "address"}
        writer.close()
        await bank.server.close()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
async def test_a_server_is_reached_by_any_name_that_leads_to_its_own_socket(name: str) -> None:
    bank = Bank()
    port = await bank.server.listen_tcp("127.0.0.1")
    connection = await AsyncConnection.open(Address(name, port), SECRET)
    assert (await connection.call(Get())).of == "bank"
    connection.close()
    await bank.server.close()


@pytest.mark.parametrize("way", ["role", "dialled", "reached", "nonce", "version"])
async def test_what_a_client_says_in_its_handshake_cannot_be_changed_on_the_way(way: str) -> None:
    """In another role a worker's connection could restore and abort."""
    server_side = ServerHandshake(SECRET, frozenset({"there:1"}), "[10.0.0.1]:1")
    client_side = handshake.ClientHandshake(SECRET, Role.WORKER, "there:1", "[10.0.0.1]:1")
    answer = client_side.answer(server_side.challenge())
    server_side.accept(dict(answer), vouched=False)
    other = {
        "role": "coordinator",
        "dialled": "there:1 ",
        "reached": "[10.0.0.1]:2",
        "nonce": os.urandom(32),
        "version": 1,
    }
    with pytest.raises(AccessDenied):
        server_side.accept({**answer, way: other[way]}, vouched=False)


async def test_the_servers_proof_is_of_this_handshake_alone() -> None:
    """A server that does not know the secret can have none made by one that does, for another address."""
    other = ServerHandshake(SECRET, frozenset({"other:1"}), "")
    challenge = other.challenge()
    client_side = handshake.ClientHandshake(SECRET, Role.WORKER, "there:1", "")
    with pytest.raises(AccessDenied, match="not known by that address"):
        other.accept(client_side.answer(challenge), vouched=False)
    for reflected in (client_side.answer(challenge)["proof"], os.urandom(32), b"", None, 5):
        with pytest.raises(AccessDenied, match="does not know this application's secret"):
            client_side.finish({"proof": reflected}, vouched=False)


@dataclass(frozen=True, slots=True)
class OfTaskManagers(Call[Done], name="register", role=Role.TASK_MANAGER):
    pass


@dataclass(frozen=True, slots=True)
class OfWorkers(Call[Done], name="begin", role=Role.WORKER):
    pass


@dataclass(frozen=True, slots=True)
class OfAll(Call[Done], name="everybodys"):
    pass


async def test_a_peer_may_call_only_what_is_for_its_role() -> None:
    called: list[str] = []

    async def note(peer: Peer, call: Call[Done]) -> Done:
        called.append(f"{peer.role} {call.name}")
        return Done()

    server = RpcServer(SECRET, {OfTaskManagers: note, OfWorkers: note, OfAll: note})
    address = Address("127.0.0.1", await server.listen_tcp("127.0.0.1"))
    for role in Role:
        connection = await AsyncConnection.open(address, SECRET, role=role)
        for call in (OfTaskManagers(), OfWorkers(), OfAll()):
            if call.role in (role, None):
                await connection.call(call)
                continue
            with pytest.raises(AccessDenied, match=f"a {role} may not call {call.name}"):
                await connection.call(call)
        connection.close()
    assert called == [
        "coordinator everybodys",
        "task_manager register",
        "task_manager everybodys",
        "worker begin",
        "worker everybodys",
    ]
    await server.close()


async def test_a_client_of_another_version_is_told_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank()
    address = Address("127.0.0.1", await bank.server.listen_tcp("127.0.0.1"))
    own = protocol.PROTOCOL_VERSION
    monkeypatch.setattr(ServerHandshake, "challenge", lambda self: {"version": own + 1, "nonce": self._nonce})
    for blocking in (False, True):
        opening = asyncio.to_thread(Connection, address, SECRET) if blocking else AsyncConnection.open(address, SECRET)
        with pytest.raises(
            Invalid, match=f"speaks protocol {own + 1}, this process {own}: run the same version of DSTL"
        ):
            await opening
    monkeypatch.undo()
    await bank.server.close()


async def test_a_service_says_in_its_log_of_which_version_a_client_is(caplog: pytest.LogCaptureFixture) -> None:
    """The client that finds another version goes, but says its own first."""
    bank = Bank()
    address = Address("127.0.0.1", await bank.server.listen_tcp("127.0.0.1"))
    own = protocol.PROTOCOL_VERSION
    reader, writer = await asyncio.open_connection(address.host, address.port)
    client_side = handshake.ClientHandshake(SECRET, Role.WORKER, str(address), "")
    frame = await reader.readexactly(4)
    challenge, _ = Framing().decode(await reader.readexactly(struct.unpack(">I", frame)[0]))
    answer = client_side.answer({**challenge, "version": own + 1})
    with pytest.raises(Invalid, match=f"speaks protocol {own + 1}, this process {own}"):
        client_side.check_version()
    writer.writelines(encode_frame({**answer, "version": own + 1}))
    writer.close()
    await until(lambda: "refused" in caplog.text, "the refusal")
    assert f"a client speaks protocol {own + 1}, this service {own}: run the same version of DSTL" in caplog.text
    await bank.server.close()


NEEDS_CREDENTIALS = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the kernel names no peers")


@NEEDS_CREDENTIALS
async def test_frames_between_processes_of_one_user_on_one_host_carry_no_mac() -> None:
    bank = Bank()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        path = str(Path(directory) / "socket")
        await bank.server.listen_unix(path)
        connection = await AsyncConnection.open(Address("here", 0, path), SECRET)
        assert connection._framing._sent is None
        assert (await connection.call(Get())).of == "bank"
        connection.close()
        await bank.server.close()


@NEEDS_CREDENTIALS
def test_a_peer_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert handshake.is_vouched_for(one)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(AccessDenied, match="is of user"):
            handshake.is_vouched_for(one)


@NEEDS_CREDENTIALS
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_users_process_neither_calls_nor_answers_over_a_unix_socket() -> None:
    """The directory is 0700, but a removed one's name is free: the kernel says who listens there."""
    bank = Bank()
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        ours, theirs = str(Path(directory) / "ours"), str(Path(directory) / "theirs")
        await bank.server.listen_unix(ours)
        os.chmod(ours, 0o666)
        code = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[2]); listener.listen()\n"
            "caller = socket.socket(socket.AF_UNIX); caller.connect(sys.argv[1])\n"
            "print(caller.recv(1000), flush=True)\n"
            "sys.stdin.read()\n"
        )
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, ours, theirs, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert stranger.stdout is not None
        said = await stranger.stdout.readline()
        assert b"refused" in said
        assert b"nonce" not in said
        os.chmod(theirs, 0o777)
        assert not Address("here", 0, theirs).is_local, "TCP is for that"
        os.chown(theirs, 0, 0)
        with pytest.raises(AccessDenied, match="is of user 65534"):
            await AsyncConnection.open(Address("here", 0, theirs), SECRET)
        with pytest.raises(AccessDenied, match="is of user 65534"):
            await asyncio.to_thread(Connection, Address("here", 0, theirs), SECRET)
        await stranger.communicate(b"")
    await bank.server.close()
    assert not bank.asked


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (("10.0.0.1", 5), "[10.0.0.1]:5"),
        (("::ffff:10.0.0.1", 5, 0, 0), "[10.0.0.1]:5"),
        (("fe80::1%eth0", 5, 0, 2), "[fe80::1]:5"),
        (("0:0::1", 5, 0, 0), "[::1]:5"),
        (("simulated", 5), ""),
        ("/tmp/socket", ""),
        ("", ""),
        (b"\0abstract", ""),
        (None, ""),
    ],
)
def test_one_address_is_one_text_at_both_ends(name: object, text: str) -> None:
    assert socket_address(name) == text


def test_the_macs_of_a_direction_are_those_of_keyed_blake2b_over_length_body_and_number() -> None:
    """So that another implementation can be written from the description."""
    framing = Framing(FrameMac(b"k" * 32), None)
    for number in range(3):
        frame = b"".join(framing.encode({"n": number}, b"payload"))
        expected = hashlib.blake2b(frame[:-16] + struct.pack(">Q", number), key=b"k" * 32, digest_size=16).digest()
        assert frame[-16:] == expected
        assert struct.unpack(">I", frame[:4])[0] == len(frame) - 4


@pytest.mark.parametrize("length", [0, 3, 15, 16, 19])
def test_a_body_too_short_for_a_mac_is_corrupt(length: int) -> None:
    with pytest.raises(CorruptData):
        Framing(FrameMac(b"k" * 32), FrameMac(b"k" * 32)).decode(bytes(length))


async def test_a_long_frame_is_sealed_beside_the_loop_and_comes_whole() -> None:
    bank = Bank()
    address = Address("127.0.0.1", await bank.server.listen_tcp("127.0.0.1"))
    connection = await AsyncConnection.open(address, SECRET)
    payload = os.urandom(5 << 20)
    await connection.call(Put(payload))
    await connection.call(Put(b"small"))
    assert bank.asked == [("write", payload), ("write", b"small")]
    connection.close()
    await bank.server.close()
