"""``dstl ui``: serves a location's page, refuses what is none, and ends when it is interrupted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from dstl.options import SealingOptions
from dstl.store.local import LocalStore
from dstl.store.location import open_store
from worlds.manifest_samples import commit, driver


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dstl.cli", "ui", "--port", "0", "--json", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )


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


def test_a_sealed_location_is_read_with_the_key_of_the_environment(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("8f4b1e0c2d7a6953" * 4)

    async def fill() -> None:
        store = open_store(tmp_path / "state", sealing=SealingOptions(key_file=str(key)))
        log = driver(store, 1)
        await log.fence("0c0a1b2c-1111-2222-3333-444455556666")
        await commit(log, 0)
        await store.close()

    asyncio.run(fill())
    process = start(str(tmp_path / "state"), DSTL_SEALING_KEY_FILE=str(key))
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with urllib.request.urlopen(told["url"], timeout=10) as answer:
            text = answer.read().decode()
        assert "batch 0, " in text
        assert "cannot be read" not in text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
