"""Peers that have proved nothing: how many there may be, for how long, and what they can make others believe."""

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from echo_service import SECRET, serving

from dstl.errors import AccessDenied, DstlError, Unavailable
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address, Connection
from dstl.rpc.protocol import Secret, encode_frame
from dstl.rpc.server import RpcServer
from worlds.echo import Echo, impostor

EVIL = "\x1b[2Jyour state is fine"


@contextlib.contextmanager
def silent(address: Address, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((address.host, address.port), timeout=5)) for _ in range(count)
        ]


def knock(address: Address) -> socket.socket:
    """Begin to connect, and wait for nothing."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex((address.host, address.port))
    return stranger


async def test_of_many_silent_strangers_those_that_came_first_are_let_go() -> None:
    async with serving(max_strangers=4, patience_s=0.05) as (server, _, address):
        with silent(address, 50):
            async with asyncio.timeout(30):
                while True:  # they are asked to go when somebody comes, once they have had their time
                    await asyncio.sleep(0.2)
                    friend = await AsyncConnection.open(address, SECRET)
                    await asyncio.sleep(0.05)
                    if len(server._connections) <= 6:
                        break
                    friend.close()
            assert bytes((await friend.call(Echo(1, b"here"))).data) == b"here"
            friend.close()


async def test_a_burst_of_those_who_know_the_secret_gets_in_whole() -> None:
    """Two hundred tasks begin at once: that is no attack, though it may take a slow machine a while."""
    async with serving(max_strangers=4, handshake_s=30.0, patience_s=30.0) as (_, _, address):
        connections = await asyncio.gather(*(AsyncConnection.open(address, SECRET) for _ in range(200)))
        for number, connection in enumerate(connections):
            assert (await connection.call(Echo(number))).n == number
            connection.close()


async def test_at_the_cap_a_stranger_makes_room_for_who_comes() -> None:
    async with serving(max_connections=5, patience_s=60.0) as (_, _, address):
        with silent(address, 5):
            await asyncio.sleep(0.05)
            friends = [await AsyncConnection.open(address, SECRET) for _ in range(5)]
            with pytest.raises(Unavailable, match="too many connections"):
                await AsyncConnection.open(address, SECRET)
            for friend in friends:
                await friend.call(Echo())
                friend.close()


SERVER = """
import asyncio, json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from dstl.rpc.protocol import Secret
from dstl.rpc.server import RpcServer
from worlds.echo import Echo, Echoed

async def main():
    async def echo(peer, call):
        open("/dev/null").close()
        return Echoed(call.n, call.data)
    server = RpcServer(Secret(b"0123456789abcdef" * 2), {Echo: echo})
    print(json.dumps(await server.listen_tcp("127.0.0.1")), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.close()

asyncio.run(main())
"""


def started(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )


async def test_strangers_do_not_use_up_the_files_that_a_process_may_open() -> None:
    """Before, 1,014 of them left a process no file for its stores, its tables and its peers."""
    process = started(SERVER)
    assert process.stdout is not None
    try:
        port = json.loads(await asyncio.to_thread(process.stdout.readline))
        address = Address("127.0.0.1", port)
        with contextlib.ExitStack() as strangers:
            for _ in range(8):
                # All of a burst are there before the server sees the first.
                process.send_signal(signal.SIGSTOP)
                knocks = [strangers.enter_context(knock(address)) for _ in range(100)]
                process.send_signal(signal.SIGCONT)
                for each in knocks:
                    each.settimeout(5.0)
                    with contextlib.suppress(OSError):  # let go already
                        await asyncio.to_thread(each.recv, 1)
            friend = await AsyncConnection.open(address, Secret(b"0123456789abcdef" * 2))
            assert bytes((await friend.call(Echo(1, b"here"))).data) == b"here"
            friend.close()
    finally:
        _, log = await asyncio.to_thread(process.communicate, "")
    assert "Traceback" not in log
    assert "Too many open files" not in log


@pytest.mark.parametrize(("soft", "cap"), [(1024, 512), (20, 16), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)])
def test_connections_may_use_half_of_the_files(monkeypatch: pytest.MonkeyPatch, soft: int, cap: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, soft))
    assert RpcServer(SECRET, {})._max_connections == cap


async def test_refused_strangers_are_one_line_of_the_log_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving() as (_, _, address):
            for _ in range(20):
                with pytest.raises(AccessDenied):
                    await AsyncConnection.open(address, Secret.generate())
            for data in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">II", 7, 3) + b"\x81\x80\xc0", b"\xff" * 64):
                with silent(address, 1) as (stranger,):
                    stranger.sendall(data)
                    await asyncio.sleep(0.02)
    lines = [record for record in caplog.records if record.name.startswith("dstl")]
    assert [record.levelname for record in lines] == ["WARNING"]
    assert "does not know this application's secret" in lines[0].getMessage()
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    "said",
    [
        {"error": ["Fenced", EVIL]},
        {"error": ["CorruptData", EVIL]},
        {"error": EVIL},
        {"refused": EVIL},
        {"refused": {"a": 1}},
        {"refused": "busy", "error": ["Fenced", EVIL]},
        {"version": EVIL, "nonce": b"\0" * 32},
        {"version": 1 << 60, "nonce": b"\0" * 32},
        {"version": 2, "nonce": EVIL},
        {"proof": EVIL},
    ],
)
@pytest.mark.parametrize("after", [False, True])
async def test_a_stranger_does_not_choose_the_clients_error(said: dict[str, Any], after: bool) -> None:
    """Before, whoever listened at a port could have a driver believe that it was fenced."""

    def behave(peer: socket.socket) -> None:
        if after:
            peer.sendall(b"".join(encode_frame({"version": 2, "nonce": b"\0" * 32})))
            peer.recv(2000)
        peer.sendall(b"".join(encode_frame(said)))
        peer.recv(2000)

    with impostor(behave) as address:
        for opening in (AsyncConnection.open(address, SECRET), asyncio.to_thread(Connection, address, SECRET)):
            with pytest.raises(DstlError) as caught:
                await opening
            # AccessDenied is an Invalid; of another version is an Invalid too.
            assert type(caught.value).__name__ in ("AccessDenied", "Unavailable", "Refusal", "Invalid")
            assert EVIL not in str(caught.value)
            assert str(1 << 60) not in str(caught.value)


@pytest.mark.parametrize("drip", [False, True])
async def test_a_silent_stranger_holds_nobody_for_the_time_of_a_call(
    drip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's calls may take an hour; its handshake may not, not even a byte at a time."""
    monkeypatch.setattr("dstl.rpc.client.OPEN_SECONDS", 0.3)
    ended = threading.Event()

    def behave(peer: socket.socket) -> None:
        if drip:
            peer.sendall(struct.pack(">I", 1000))
        while not ended.wait(0.05):
            if drip:
                peer.sendall(b"\0")

    with impostor(behave) as address:
        async with asyncio.timeout(5):
            with pytest.raises(Unavailable, match="ended the handshake"):
                await asyncio.to_thread(Connection, address, SECRET, timeout=3600.0)
        ended.set()
