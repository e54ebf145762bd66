"""Requests to the server of page and metrics that no browser makes. The long form: ``-m long``."""

import json
import random
import socket
from contextlib import suppress

import pytest
from fuzz.run import CHUNK, Found, Journal, execute, fuzz, fuzz_in_chunks
from fuzz.targets import TARGETS, Target

from dstl.monitoring.server import PageServer, Reply


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_whatever_is_asked_is_answered_or_let_go(
    count: int, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """No request raises in the server, and no foreign name is answered."""
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


EXECUTIONS = 1500


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_new_inputs_are_decoded_or_refused(target: Target, seed: int) -> None:
    found = fuzz(target, EXECUTIONS // target.cost, seed)
    assert found.bugs == []
    assert found.refused > found.executions / 10
    assert found.decoded > 0 or target.name == "table_index"  # its files are those of a handle, which is not here


@pytest.mark.parametrize(
    "path",
    [path for target in TARGETS.values() for path in target.kept()],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)
def test_an_input_that_has_found_a_bug_finds_none(path: object) -> None:
    found = Found("kept")
    execute(TARGETS[path.parent.name], path.read_bytes(), found)  # type: ignore[attr-defined]
    assert found.bugs == []


def test_a_bug_in_a_decoder_is_found_and_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.run.CORPUS", tmp_path)
    planted = Target("planted", lambda data: json.loads(data.decode("latin-1")), [b'{"a": [1, 2, {"b": 3}]}'])
    found = fuzz(planted, 500, seed=1, most_bugs=3)
    assert len(found.bugs) == 3
    assert list(tmp_path.rglob("*"))


def test_a_long_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.run.CHUNK", CHUNK // 100)
    target = TARGETS["name"]
    whole = fuzz_in_chunks(target, 250, seed=7)
    first = Journal(tmp_path / "journal", 7)
    fuzz_in_chunks(target, 100, 7, first)
    with (tmp_path / "journal").open("a") as torn:
        torn.write('{"target": "name", "chu')
    resumed = Journal(tmp_path / "journal", 8)
    assert (resumed.seed, list(resumed.done)) == (7, [("name", 0)])
    found = fuzz_in_chunks(target, 250, resumed.seed, resumed)
    assert (found.executions, found.decoded, found.refused) == (250, whole.decoded, whole.refused)
    assert list(Journal(tmp_path / "journal", 8).done) == [("name", 0), ("name", 1), ("name", 2)]
