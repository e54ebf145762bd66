"""Requests to the server of page and metrics that no browser makes. The long form: ``-m long``."""

import random
import socket
from contextlib import suppress

import pytest

from dstl.monitoring.server import PageServer, Reply


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_whatever_is_asked_is_answered_or_let_go(count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """No request raises in the server, and no foreign name is answered."""
    rng = random.Random(seed)
    caplog.set_level("DEBUG", "dstl.monitoring.server")
    server = PageServer({"/metrics": lambda _: Reply(b"ok")}, "127.0.0.2", 0)
    paths = [
        "/metrics",
        "/../../etc/passwd",
        "//x",
        "http://[",
        "//[",
        "/%00",
        "*",
        "/metrics?x=\xff",
        "",
        "/" + "A" * 70_000,
    ]
    hosts = [
        "127.0.0.2",
        "localhost:1",
        "[::1]:5",
        "evil.example",
        "[",
        "[::1",
        "localhost@evil",
        "[v1.x]",
        "\xff",
        None,
    ]
    try:
        for number in range(count):
            path, host = rng.choice(paths), rng.choice(hosts)
            lines = [f"GET {path} HTTP/1.1"] + ([f"Host: {host}"] if host is not None else []) + ["Connection: close"]
            request = bytearray("\r\n".join([*lines, "", ""]).encode("latin-1"))
            if number % 5 == 0:
                request[rng.randrange(len(request))] = rng.randrange(256)
            with socket.create_connection(("127.0.0.2", server.port), timeout=5) as asking, suppress(ConnectionError):
                asking.sendall(request)
                asking.shutdown(socket.SHUT_WR)
                said = b"".join(iter(lambda: asking.recv(1 << 16), b""))
                assert said or number % 5 == 0, request[:100]
                if number % 5:
                    assert not (said.startswith(b"HTTP/1.1 200") and host not in hosts[:3]), request[:100]
                    assert (path, host) != ("/metrics", "127.0.0.2") or said.startswith(b"HTTP/1.1 200")
        broken = [str(record.exc_info[1]) for record in caplog.records if record.exc_info and record.exc_info[1]]
        assert all("reset" in each or "Broken pipe" in each for each in broken), broken
    finally:
        server.close()
