"""``dstl files`` as an operator meets it, on directories that real services have written."""

import asyncio
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dstl.cli.files import app as files
from dstl.cli.gc import gc
from dstl.store import LocalStore
from worlds.files import BIG, Application, noise
from worlds.query import open_query
from worlds.service import Job

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
    assert f"use {tmp_path}/another as checkpointLocation" in exported_to(f"dstl://{place}", tmp_path / "another")


def test_an_export_advises_what_a_query_may_have(tmp_path: Path) -> None:
    """Of a StateBackend's directory it advised a checkpointLocation, with which its query is refused."""
    location = tmp_path / "job"

    async def run_a_batch() -> None:
        async with open_query(Job(1, LocalStore(str(location))), tmp_path / "s") as query:
            await query.start("run")
            await query.run_batch(0)

    (tmp_path / "s").mkdir()
    asyncio.run(run_a_batch())
    advice = exported_to(f"dstl://{location}/_spark", tmp_path / "plain")
    assert "at _spark below a StateBackend's location, and restore_from= their state" in advice


def exported_to(root: str, target: Path) -> str:
    return run("files", "export", root, target).stdout


def test_with_json_an_error_is_one_line_on_standard_error_and_standard_output_is_empty(tmp_path: Path) -> None:
    result = run("files", "list", f"dstl://{tmp_path}/nothing", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("MissingState: ")
    assert result.stderr.count("\n") == 1


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


LOST = [(1, "commits/0"), (2, "offsets/1"), (3, "commits/1"), (4, "offsets/2")]


@pytest.mark.parametrize(("lost", "named"), LOST)
def test_a_record_that_somebody_has_deleted_is_named(place: Path, lost: int, named: str) -> None:
    """Before, all was called sound, and the query failed for a file of it at each start."""
    records = sorted(place.rglob("manifests/*"), reverse=True)[1:]  # by number, behind the fence
    records[lost].unlink()
    result = run("files", "verify", f"dstl://{place}")
    assert result.exit_code == 1
    assert f"{records[lost].name}, with {named} of Spark's directory, was deleted" in result.stderr


def zipped(*sst_files: str) -> bytes:
    """Spark's zip of a snapshot of RocksDB, as far as anybody reads it without RocksDB."""
    listed = [{"localFileName": each[:6], "dfsSstFileName": each, "sizeBytes": 1} for each in sst_files]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("metadata", f"v1\n{json.dumps({'sstFiles': listed, 'numKeys': 1})}")
    return out.getvalue()


STATE_AT_1 = {
    "state/0/0/1.changelog": b"kept", "state/0/0/1.zip": zipped("1-a.sst"), "state/0/0/SSTs/1-a.sst": b"kept",
    "state/0/1/1.zip": b"damaged", "state/0/1/SSTs/1-a.sst": b"kept",
    "state/1/0/left/1_a-b.zip": zipped("1-b.sst"), "state/1/0/left/SSTs/1-b.sst": b"kept", "state/2/0/1.delta": b"k",
    "state/0/0/_metadata/schema": b"kept", "state/0/_metadata/metadata": b"kept", "state/1/_metadata/v2/0": b"kept",
    "state/1/_stateSchema/default/0_a-b": b"kept",
}  # fmt: skip
STATE_BEHIND = {
    1: {
        "state/0/0/2.changelog": b"old", "state/0/0/2.changelog.crc": b"old", "state/0/0/2.zip": zipped("1-a.sst"),
        "state/1/0/left/2_c-d.changelog": b"old", "state/1/0/left/2_c-d.zip": zipped("2-c.sst", "1-b.sst"),
        "state/1/0/left/SSTs/2-c.sst": b"old", "state/2/0/2.delta": b"old", "state/2/0/2.snapshot": b"old",
        "state/0/1/2.changelog": b"old", "state/1/_metadata/v2/1": b"old", "state/1/_stateSchema/default/1_a-b": b"old",
        "sources/0/1": b"the source's",
    },
    2: {
        "state/0/0/3.zip": zipped("1-a.sst", "3-d.sst"), "state/0/0/SSTs/3-d.sst": noise(BIG),
        "state/0/1/3.zip": zipped("3-e.sst"), "state/0/1/SSTs/3-e.sst": b"of a store with a damaged snapshot",
        "state/1/0/left/3_e-f.zip": zipped("2-c.sst"), "state/2/0/3.delta": b"old", "state/2/0/3.delta.crc": b"old",
    },
}  # fmt: skip


def test_rollback_forgets_the_batches_behind_and_all_state_of_theirs_in_one_record(tmp_path: Path) -> None:
    root = f"dstl://{tmp_path}/query"

    async def work(run: str, batches: dict[int, dict[str, bytes]]) -> list[str]:
        stores = {str(tmp_path / "query" / "_dstl"): LocalStore(str(tmp_path / "query" / "_dstl"))}
        async with Application(dict(stores), lambda store: store) as started:
            driver = await started.driver(run, root)
            for batch, files in batches.items():
                await driver.batch(batch, files)
            return await driver.names("state/0/0")

    asyncio.run(work("old", {0: STATE_AT_1, **STATE_BEHIND}))
    # A large snapshot, which no record has waited for, comes with a later one.
    stores = ("state/0/0", "state/0/1", "state/1/0/left", "state/2/0")
    rest = {batch: {f"{store}/{batch + 1}.changelog": b"old" for store in stores} for batch in (3, 4)}
    asyncio.run(work("older", rest))
    before = set(tmp_path.rglob("manifests/*"))
    rolled = json.loads(run("files", "rollback", root, 0, "--json").stdout)
    assert len(set(tmp_path.rglob("manifests/*")) - before) == 2, "the fence, and one record"
    kept = {"sources/0/1", "state/0/1/SSTs/3-e.sst"}
    state = {path for files in (*STATE_BEHIND.values(), *rest.values()) for path in files} - kept
    barriers = {f"{kind}/{batch}" for kind in ("offsets", "commits") for batch in range(1, 5)}
    assert set(rolled["removed"]) == state | barriers
    listed = json.loads(run("files", "list", root, "--json").stdout)
    assert {each["path"] for each in listed["files"]} == {*STATE_AT_1, *kept, "commits/0", "offsets/0"}
    assert asyncio.run(work("new", {1: {f"{store}/2.changelog": b"new" for store in stores}})) == [
        "1.changelog", "1.zip", "2.changelog", "SSTs", "_metadata",
    ]  # fmt: skip
    result = run("files", "rollback", root, 3)
    assert (result.exit_code, "0 to 1" in result.stderr) == (1, True)


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
        ("--aggregate", "0:total=median(v)", "not an aggregate"),
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


def test_objects_elsewhere_are_shown_and_opened_where_they_are_named_alone(place: Path, tmp_path: Path) -> None:
    source, target = f"dstl://{place}", f"dstl://{tmp_path}/deep/fork"
    made = run("files", "fork", source, target)
    assert f"its query needs spark.dstl.also={source}" in made.stdout
    listed = run("files", "list", target)
    assert f"has objects of {place}/_dstl, which is NOT opened" in listed.stdout
    told = json.loads(run("files", "list", target, "--also", source, "--json").stdout)
    assert told["elsewhere"] == {f"{place}/_dstl": True}
    refused = run("files", "export", target, tmp_path / "plain")
    assert (refused.exit_code, f"--also {source}" in refused.stderr, (tmp_path / "plain").exists()) == (1, True, False)
    for command in (("verify", target), ("export", target, tmp_path / "plain")):
        assert run("files", *command, "--also", source).exit_code == 0
    again = run("files", "fork", target, f"dstl://{tmp_path}/second")
    assert (again.exit_code, f"--also {source}" in again.stderr) == (2, True)
    assert run("files", "fork", target, f"dstl://{tmp_path}/second", "--also", source).exit_code == 0
