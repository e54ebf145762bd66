"""The JVM's connection: whom it believes, what it says of servers that are none, and what its decoder takes."""

import asyncio
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from dstl.errors import ObjectNotFound
from dstl.rpc import server
from dstl.rpc.file_messages import FileStat, StatFile
from dstl.rpc.protocol import PROTOCOL_VERSION, Secret
from worlds import file_processes
from worlds.java import compiled

pytestmark = pytest.mark.skipif(shutil.which("javac") is None, reason="javac is missing: the jar cannot be built")

SOURCE = Path(__file__).with_name("java") / "ConnectionTrial.java"
NONCE = b"n" * 32
NOBODY = 65534


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("classes")
    return f"{made}:{compiled(SOURCE, made)}"


def trial(classes: str, *arguments: object) -> list[str]:
    # A decoder that makes room for all that is declared would need four times as much.
    command = ["java", "-Xmx256m", "-cp", classes, "dstl.fs.ConnectionTrial", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@contextmanager
def listening(sayings: Sequence[bytes], owner: int | None = None) -> Iterator[str]:
    """Say one thing to each connection. The kernel tells of a listener as who it was when it began to listen."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{directory}/s")
        if owner is not None:
            os.seteuid(owner)
        try:
            server.listen(50)
        finally:
            if owner is not None:
                os.seteuid(0)

        def serve() -> None:
            for said in sayings:
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(struct.pack(">II", 4 + len(said), len(said)) + said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{directory}/s"
        thread.join(10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
def test_a_server_of_another_user_is_refused_before_a_word(classes: str) -> None:
    """Prevents that whoever makes a lost socket anew passes a handshake on and answers what he likes."""
    challenge = msgpack.packb({"version": 7, "nonce": NONCE})
    with listening([challenge], NOBODY) as path:
        (said,) = trial(classes, path, 1)
    assert said.startswith("IOException: the process that listens at "), said
    with listening([challenge]) as path:
        (said,) = trial(classes, path, 1)
    assert "listens" not in said


def test_what_a_server_says_that_is_none_is_one_error_in_our_own_words(classes: str) -> None:
    """Prevents a NullPointerException out of a constructor, whose channel nobody closes, and forged lines of a log."""
    none = [
        msgpack.packb(each)
        for each in (
            {"nonce": NONCE},
            {"nonce": NONCE, "version": "7"},
            {"nonce": NONCE, "version": None},
            {"nonce": NONCE, "version": [7]},
            [1],
            {},
        )
    ]
    words = [msgpack.packb({"refused": each}) for each in ("secret", "x" * 900, "\x1b[2J\nERROR forged", {"a": 1})]
    with listening([*none, *words]) as path:
        said = trial(classes, path, len(none) + len(words))
    assert all(line.startswith("IOException: ") for line in said), said
    assert len(said) == len(none) + len(words)
    for line, why in zip(said[len(none) :], (" (secret)", "", "", ""), strict=True):
        assert f"refuses this JVM{why}; see its log" in line


@pytest.mark.parametrize("count", [300_000, pytest.param(20_000_000, marks=pytest.mark.long)])
def test_new_bytes_are_decoded_or_refused_in_little_memory(classes: str, seed: int, count: int) -> None:
    """Fuzzing of the decoder of headers, with what only declares to be long."""
    (said,) = trial(classes, "decode", seed, count)
    assert int(said.split()[0]) > 1000
    assert said.endswith("refused")


@pytest.mark.parametrize("found_by", ["stat_file", "stage_part"])
def test_a_service_that_hangs_is_not_asked_again(found_by: str, classes: str, tmp_path: Path) -> None:
    """Prevents that each task of an executor waits for a process that the coordinator has given up long ago."""
    services = [file_processes.started(file_processes.line()) for _ in range(2)]
    try:
        sockets = [file_processes.said(each)["socket"] for each in services]
        arguments = ["late", *sockets, file_processes.SECRET.decode(), str(PROTOCOL_VERSION)]
        command = ["java", "-cp", classes, "dstl.fs.ConnectionTrial", *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as jvm:
            assert jvm.stdin is not None
            assert jvm.stdout is not None
            lines = []
            for number in range(3):
                if number == 1:
                    file_processes.hang(services[0])
                is_part = number == 1 and found_by == "stage_part"
                jvm.stdin.write("part\n" if is_part else f"dstl://{tmp_path}/query/metadata\n")
                jvm.stdin.flush()
                lines.append(jvm.stdout.readline().strip())
            jvm.stdin.close()
    finally:
        services[0].send_signal(signal.SIGCONT)
        for each in services:
            each.communicate(timeout=30)
    assert lines[0] == lines[2] == "answered", lines
    assert f"gave no sign of life for 2 s (during {found_by})" in lines[1]


def test_a_service_that_accepts_nobody_is_given_up_while_its_queue_is_full(classes: str, tmp_path: Path) -> None:
    """Prevents that a task waits for ever where those before it have filled the queue of a service that hangs."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as hung:
        hung.bind(f"{directory}/s")
        hung.listen(0)
        said = trial(classes, f"{directory}/s", 2)
    assert [line.partition(" gave ")[2] for line in said] == ["no sign of life for 2 s"] * 2, said


async def test_a_call_may_take_as_long_as_its_service_is_at_it(
    classes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that a batch of twenty minutes, which its sink skips when it is replayed, ends its query for good: the
    commit of a backend's query is put in one call, behind which all its tasks may run once more.
    """
    monkeypatch.setattr(server, "BEAT_S", 0.1)

    async def stat(peer: server.Peer, asked: StatFile) -> FileStat:
        await asyncio.sleep(3)
        raise ObjectNotFound(asked.path)

    with tempfile.TemporaryDirectory() as directory:
        service = server.RpcServer(Secret(file_processes.SECRET), {StatFile: stat})
        await service.listen_unix(f"{directory}/s")
        try:
            arguments = ["late", *[f"{directory}/s"] * 2, file_processes.SECRET.decode(), str(PROTOCOL_VERSION)]
            command = ["java", "-cp", classes, "dstl.fs.ConnectionTrial", *arguments]
            jvm = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            said, _ = await jvm.communicate(b"dstl://a/query/metadata\n")
        finally:
            await service.close()
    assert said.decode().strip() == "dstl://a/query/metadata", "it has answered after more than 2 s"
