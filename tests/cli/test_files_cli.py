"""``dstl files`` as an operator meets it, on directories that real services have written."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dstl.cli.files import app as files
from dstl.cli.gc import gc
from dstl.store import LocalStore
from worlds.files import BIG, Application, noise

app = typer.Typer()
app.add_typer(files, name="files")
app.command()(gc)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with three batches; the last one's changes are an object of their own."""

    async def fill() -> None:
        stores = {str(tmp_path / "query" / "_dstl"): LocalStore(str(tmp_path / "query" / "_dstl"))}
        async with Application(dict(stores), lambda store: store) as started:
            driver = await started.driver("run", f"dstl://{tmp_path}/query")
            await driver.put("metadata", b'{"id":"a"}')
            for batch in range(3):
                content = noise(BIG) if batch == 2 else b"%d" % batch
                await driver.batch(batch, {f"state/0/0/{batch + 1}.changelog": content})

    asyncio.run(fill())
    return tmp_path / "query"


def test_list_verify_and_export_show_what_was_committed(place: Path, tmp_path: Path) -> None:
    listed = json.loads(run("files", "list", f"dstl://{place}", "--json").stdout)
    assert listed["batches"] == [0, 1, 2]
    assert [each["path"] for each in listed["files"]][:3] == ["commits/0", "commits/1", "commits/2"]
    assert "state/0/0/3.changelog" in run("files", "list", f"dstl://{place}").stdout
    verified = json.loads(run("files", "verify", f"dstl://{place}", "--json").stdout)
    assert (verified["ok"], verified["files"]) == (True, 10)
    plain = tmp_path / "plain"
    exported = json.loads(run("files", "export", f"dstl://{place}", plain, "--json").stdout)
    assert exported["files"] == 10
    assert (plain / "state/0/0/3.changelog").read_bytes() == noise(BIG)
    assert (plain / "metadata").read_bytes() == b'{"id":"a"}'
    again = run("files", "export", f"dstl://{place}", plain)
    assert (again.exit_code, "empty directory" in again.stderr) == (2, True)


def test_damage_is_found_and_named(place: Path) -> None:
    (segment,) = place.rglob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    result = run("files", "verify", f"dstl://{place}")
    assert result.exit_code == 1
    assert "DAMAGED state/0/0/3.changelog" in result.stdout
    segment.unlink()
    assert run("files", "verify", f"dstl://{place}").exit_code == 1


def test_rollback_forgets_the_batches_behind(place: Path) -> None:
    rolled = json.loads(run("files", "rollback", f"dstl://{place}", 0, "--json").stdout)
    assert sorted(rolled["removed"]) == ["commits/1", "commits/2", "offsets/1", "offsets/2"]
    assert json.loads(run("files", "list", f"dstl://{place}", "--json").stdout)["batches"] == [0]
    result = run("files", "rollback", f"dstl://{place}", 2)
    assert (result.exit_code, "0 to 0" in result.stderr) == (1, True)


def test_what_is_none_is_refused_and_gc_takes_what_no_file_needs(place: Path, tmp_path: Path) -> None:
    assert run("files", "list", f"dstl://{tmp_path}/nothing").exit_code == 1
    assert run("files", "list", str(place)).exit_code == 2
    before = sorted(path for path in place.rglob("*") if path.is_file())
    (segment,) = place.rglob("*.seg")
    orphan = segment.with_name(f"{'0' * 32}.seg")
    shutil.copy(segment, orphan)
    for each in (segment, orphan):
        os.utime(each, (1_700_000_000,) * 2)
    told = json.loads(run("gc", f"dstl://{place}", "--commit", "--json").stdout)
    assert [each["object"].rpartition("/")[2] for each in told["orphans"]] == [orphan.name]
    assert told["deleted"] == 1
    assert sorted(path for path in place.rglob("*") if path.is_file()) == before
    assert json.loads(run("gc", place / "_dstl", "--stopped", "--grace", "0s", "--json").stdout)["orphans"] == []


@pytest.mark.parametrize(
    ("option", "value", "wrong"),
    [
        ("--operator", "visits", "NAME=VALUE"),
        ("--operator", "visits=0", "the id a number"),
        ("--ttl", "n=", "NAME=VALUE"),
        ("--ttl", "n=soon", "not a duration"),
        ("--conf", "spark.x", "NAME=VALUE"),
        ("--aggregate", "total=sum(v)", "ID:COLUMN"),
        ("--aggregate", "0:total", "NAME=VALUE"),
        ("--aggregate", "0:total=median(v)", "no aggregate"),
        ("--key", "day", "ID:COLUMN"),
    ],
)
def test_arguments_of_a_migration_are_checked_before_spark_starts(
    option: str, value: str, wrong: str, tmp_path: Path
) -> None:
    done = run("files", "migrate", tmp_path / "old", tmp_path / "new", option, value)
    assert (done.exit_code, wrong in done.stderr) == (2, True), done.output
    assert not list(tmp_path.iterdir())


def test_a_fork_reads_the_same_objects_and_is_released_when_it_is_gone(place: Path, tmp_path: Path) -> None:
    source, target = f"dstl://{place}", f"dstl://{tmp_path}/fork"
    assert json.loads(run("files", "fork", source, target, "--json").stdout)["batches"] == 3
    assert not list((tmp_path / "fork").rglob("*.seg"))
    assert json.loads(run("files", "list", target, "--json").stdout)["batches"] == [0, 1, 2]
    assert json.loads(run("files", "verify", target, "--json").stdout)["ok"]
    assert json.loads(run("files", "verify", source, "--json").stdout)["files"] == 10
    for wrong in (run("files", "fork", source, target), run("files", "release", source, target)):
        assert wrong.exit_code == 2, wrong.output
    shutil.rmtree(tmp_path / "fork")
    assert json.loads(run("files", "release", source, target, "--json").stdout)["objects"] > 0
