"""``dstl savepoint``: what it prints, what it refuses, and its exit codes."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dstl.checkpoint.savepoint.format import descriptor_name
from dstl.cli.savepoint import app
from dstl.store.local import LocalStore
from dstl.store.location import open_store
from worlds.s3_place import S3Place
from worlds.savepoints import a_job

RUNNER = CliRunner()


@pytest.fixture
def s3_job(s3_place: S3Place, seed: int) -> str:
    """A job on S3."""

    async def fill() -> None:
        store = open_store(f"{s3_place.location}/job", s3_place.options())
        try:
            await a_job(store, seed)
        finally:
            await store.close()

    asyncio.run(fill())
    return f"{s3_place.location}/job"


@pytest.fixture
def job(tmp_path: Path, seed: int) -> str:
    location = tmp_path / "job"
    asyncio.run(a_job(LocalStore(str(location)), seed))
    return str(location)


def call(*words: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.output


def test_a_savepoints_whole_life(job: str, tmp_path: Path) -> None:
    live_a_whole_life(job, str(tmp_path / "other"), call)


@pytest.mark.s3server
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
def test_a_savepoints_whole_life_on_s3(s3_job: str, s3_place: S3Place) -> None:
    live_a_whole_life(
        s3_job,
        f"{s3_place.location}/other",
        lambda *words, code=0: call(*words, "--endpoint-url", s3_place.endpoint_url, code=code),
    )


def live_a_whole_life(job: str, other: str, call: Callable[..., str]) -> None:
    def listed(location: str) -> list[dict[str, object]]:
        return json.loads(call("list", location, "--json"))

    made = json.loads(call("create", job, "first", "--json"))
    assert made["location"] == f"{job}/savepoints/first"
    assert (made["batch"], made["query_id"], made["operators"]) == (3, "query-1", ["counts", "sums"])
    moved = json.loads(call("create", job, "second", "--to", other, "--checkpoint", str(made["checkpoint"]), "--json"))
    assert moved["location"] == f"{other}/savepoints/second"
    assert moved["bytes"] == made["bytes"]
    assert [(each["name"], each["state"]) for each in listed(job)] == [("first", "complete")]
    assert [(each["name"], each["entries"]) for each in listed(other)] == [("second", made["entries"])]
    for words in (("list", other), ("verify", other, "second"), ("create", job, "third")):
        text = call(*words)
        assert "savepoint" in text
    found = json.loads(call("verify", other, "second", "--json"))
    assert (found["ok"], found["problems"], found["checkpoint"]) == (True, [], made["checkpoint"])
    dry = json.loads(call("delete", other, "second", "--json"))
    assert (dry["deleted"], len(dry["objects"])) == (False, moved["objects"])
    assert "would be deleted: run again with --commit" in call("delete", other, "second")
    assert listed(other)
    assert json.loads(call("delete", other, "second", "--commit", "--json"))["deleted"] is True
    assert "not a location of DSTL" in call("list", other, code=2)


def test_a_savepoint_names_its_source_as_any_process_finds_it(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor had the path as it was typed, which leads nowhere from another directory."""
    monkeypatch.chdir(Path(job).parent)
    for name, to in (("here", []), ("there", ["--to", "other"])):
        assert json.loads(call("create", Path(job).name, name, *to, "--json"))["source"] == job


def test_exit_codes_say_what_to_do(job: str, tmp_path: Path) -> None:
    call("create", job, "mine")
    assert "has a savepoint 'mine': delete it, or use another name" in call("create", job, "mine", code=2)
    assert "not a savepoint name" in call("create", job, "a/b", code=2)
    # As of every other command: not the exit code of what is damaged or missing.
    for verb, *more in (("create",), ("verify",), ("delete",), ("transform", "y")):
        assert "not a location of DSTL" in call(verb, str(tmp_path / "empty"), "x", *more, code=2)
    assert "has no checkpoint 77" in call("create", job, "x", "--checkpoint", "77", code=1)
    assert "has no savepoint 'none'" in call("verify", job, "none", code=1)
    assert "has no savepoint 'none'" in call("delete", job, "none", "--commit", code=1)
    assert "--endpoint-url is http" in call("list", job, "--endpoint-url", "key:secret@host", code=2)
    assert "holds no user, key or secret" in call("list", "s3://key:secret@bucket/x", code=2)


def test_damage_is_shown_with_the_object_and_ends_with_1(job: str) -> None:
    made = json.loads(call("create", job, "mine", "--json"))
    (file, *_) = sorted(Path(job, "savepoints", "mine").rglob("*.base"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    os.chmod(file, 0o644)
    file.write_bytes(data)
    found = json.loads(call("verify", job, "mine", "--json", code=1))
    assert found["ok"] is False
    (problem,) = found["problems"]
    assert str(file.relative_to(job)) in problem
    assert "DAMAGED" in call("verify", job, "mine", code=1)
    descriptor = Path(job, descriptor_name("mine"))
    os.chmod(descriptor, 0o644)
    descriptor.write_bytes(descriptor.read_bytes()[:-1])
    assert "savepoint.dstl is damaged" in call("verify", job, "mine", code=1)
    (each,) = json.loads(call("list", job, "--json"))
    assert (each["state"], made["name"]) == ("damaged", each["name"])
    call("delete", job, "mine", "--commit")
    assert json.loads(call("list", job, "--json")) == []


def test_create_says_where_the_savepoint_is_to_any_process(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(job).parent)
    assert json.loads(call("create", "job", "here", "--json"))["location"] == f"{job}/savepoints/here"
    assert json.loads(call("create", "job", "there", "--to", "x", "--json"))["location"] == (
        f"{Path(job).parent}/x/savepoints/there"
    )


def test_a_grace_is_written_as_in_every_other_command(job: str) -> None:
    call("create", job, "mine")
    Path(job, "savepoints", "mine", "savepoint.dstl").unlink()
    assert "may be being made" in call("delete", job, "mine", "--commit", code=2)
    assert "not a duration: '0'" in call("delete", job, "mine", "--grace", "0", "--commit", code=2)
    assert "deleted" in call("delete", job, "mine", "--grace", "0s", "--commit")
