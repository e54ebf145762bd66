"""``dstl ui``: serves a location's page, refuses what is none, and ends when it is interrupted."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from dstl.store.local import LocalStore
from worlds.manifest_samples import commit, driver


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dstl.cli", "ui", "--port", "0", "--json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_location_is_served_until_the_command_is_interrupted(tmp_path: Path) -> None:
    async def fill() -> None:
        store = LocalStore(str(tmp_path))
        log = driver(store, 1)
        await log.fence("0c0a1b2c-1111-2222-3333-444455556666")
        for batch in range(3):
            await commit(log, batch)
        await store.close()

    asyncio.run(fill())
    before = sorted(tmp_path.rglob("*"))
    process = start(str(tmp_path))
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["query_id"] == "0c0a1b2c-1111-2222-3333-444455556666"
        assert told["url"].startswith("http://127.0.0.1:")
        for path in ("", "?part=1", "page.css", "page.js"):
            with urllib.request.urlopen(told["url"] + path, timeout=10) as answer:
                text = answer.read().decode()
                assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            if path == "":
                assert "batch 2, " in text
                assert str(tmp_path) in text
        assert sorted(tmp_path.rglob("*")) == before
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_a_directory_that_does_not_exist_is_refused_and_an_empty_one_is_said_to_be(tmp_path: Path) -> None:
    process = start(str(tmp_path / "typo"))
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(f"Invalid: there is no directory {tmp_path / 'typo'}")
    assert not (tmp_path / "typo").exists()
    empty = start(str(tmp_path))
    try:
        assert empty.stdout is not None
        told = json.loads(empty.stdout.readline())
        assert told["query_id"] == ""
        with urllib.request.urlopen(told["url"], timeout=10) as answer:
            assert "Nothing here yet" in answer.read().decode()
    finally:
        empty.terminate()
        empty.communicate(timeout=20)
    assert empty.returncode == 0
