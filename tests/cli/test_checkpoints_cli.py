"""``dstl checkpoints`` and ``dstl gc`` as an operator meets them: tables, JSON, exit codes."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dstl.checkpoint.manifest.format import manifest_name
from dstl.cli.checkpoints import app as checkpoints
from dstl.cli.console import parse_duration
from dstl.cli.gc import gc
from dstl.errors import Invalid
from dstl.store import LocalStore
from worlds.real_location import Location, fill

app = typer.Typer()
app.add_typer(checkpoints, name="checkpoints")
app.command()(gc)


def run(*arguments: object, columns: int = 200) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": str(columns)})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, Location]]:
    store = LocalStore(str(tmp_path / "state"))
    location = asyncio.run(fill(store))
    yield tmp_path / "state", location
    asyncio.run(store.close())


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def read(result: Result) -> Any:
    return json.loads(result.stdout)


def test_list_shows_the_retained_checkpoints(place: tuple[Path, Location]) -> None:
    path, location = place
    result = run("checkpoints", "list", path, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = read(result)
    assert (found["query_id"], [row["checkpoint_id"] for row in found["checkpoints"]]) == ("real-query", [6, 7])
    newest, made = found["checkpoints"][-1], location.made[-1]
    assert newest["full_bytes"] == made.full_bytes
    assert newest["new_bytes"] == made.segments[-1].segment[1]
    assert (newest["segments_stored"], newest["segments_inlined"], newest["base_files"]) == (3, 2, 1)
    assert newest["manifest_bytes"] == (path / manifest_name(7)).stat().st_size
    table = run("checkpoints", "list", path, "--wide", columns=80)
    assert table.exit_code == 0
    assert "3 + 2 inlined" in table.stdout
    assert "retained" in table.stdout


def test_list_names_a_damaged_record_and_goes_on(place: tuple[Path, Location]) -> None:
    path, _ = place
    damaged = path / manifest_name(6)
    damaged.chmod(0o644)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run("checkpoints", "list", path, "--json")
    assert result.exit_code == 1
    states = {row["checkpoint_id"]: row["state"] for row in read(result)["checkpoints"]}
    assert states == {6: "damaged", 7: "retained"}
    listed = " ".join(run("checkpoints", "list", path).stdout.split())
    assert "DAMAGED" in listed
    assert 'StateBackend(..., restore="previous")' in listed
    assert run("checkpoints", "show", path, "6").exit_code == 1
    assert run("checkpoints", "show", path, "7").exit_code == 0


def test_show_tells_what_a_checkpoint_is_made_of(place: tuple[Path, Location]) -> None:
    path, location = place
    found = read(run("checkpoints", "show", path, "--json"))
    assert found["checkpoint_id"] == 7
    assert [s["object"] for s in found["segments"]] == [s.segment[0] for s in location.made[-1].segments]
    assert {log["log_id"]: log["to_sqn"] for log in found["logs"]} == {"a": 2, "b": 1, "c": 3}
    assert found["operators"][0]["states"] == {"states": []}
    assert found["bases"][0]["key_groups"] == 4
    older = run("checkpoints", "show", path, "6")
    assert older.exit_code == 0
    assert "checkpoint 6" in older.stdout
    missing = run("checkpoints", "show", path, "99")
    assert missing.exit_code == 1
    assert "it retains: 6, 7" in missing.stderr


def test_watch_shows_what_is_there_and_then_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "state"
    command = [sys.executable, "-m", "dstl.cli", "checkpoints", "watch", str(path), "--every", "1s", "--count", "2"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as watching:
        try:
            store = LocalStore(str(path))  # made while it is being watched
            location = asyncio.run(fill(store))
            assert watching.stdout is not None
            shown = [json.loads(watching.stdout.readline()) for _ in range(2)]
            assert watching.wait(30) == 0
        finally:
            watching.kill()
    assert [row["checkpoint_id"] for row in shown] == sorted(row["checkpoint_id"] for row in shown)
    assert shown[-1]["checkpoint_id"] <= location.made[-1].checkpoint_id
    table = run("checkpoints", "watch", path, "--count", 2, columns=80)
    head, *rows = table.stdout.splitlines()
    assert "to restore" in head
    assert [row.split()[0] for row in rows] == ["6", "7"]
    assert max(map(len, table.stdout.splitlines())) <= 80
    assert run("checkpoints", "watch", path, "--every", "100ms").exit_code == 2
    asyncio.run(store.close())


def test_verify_reports_damage_with_exit_code_1(place: tuple[Path, Location]) -> None:
    path, location = place
    sound = run("checkpoints", "verify", path, "--json")
    assert (sound.exit_code, read(sound)["ok"], read(sound)["objects"]) == (0, True, len(files(path)))
    assert "all sound" in run("checkpoints", "verify", path).stdout
    name = location.made[-1].segments[0].segment[0]
    (path / name).chmod(0o644)
    data = bytearray((path / name).read_bytes())
    data[40] ^= 1
    (path / name).write_bytes(bytes(data))
    result = run("checkpoints", "verify", path, "--json")
    assert result.exit_code == 1
    (problem,) = read(result)["problems"]
    assert (problem["object"], problem["checkpoints"], problem["kind"]) == (name, [6, 7], "damaged")
    shown = run("checkpoints", "verify", path)
    assert shown.exit_code == 1
    assert f"DAMAGED {name} (checkpoints 6, 7)" in shown.stdout
    assert "next: restore" in shown.stdout
    # Both need it: there is none to go back to.
    assert 'restore="previous"' not in shown.stdout
    record = path / manifest_name(7)
    record.chmod(0o644)
    record.write_bytes(record.read_bytes()[:-1])
    of_one = next(
        each for each in read(run("checkpoints", "verify", path, "--json"))["problems"] if each["checkpoints"] == [7]
    )
    assert 'a checkpoint other than 7 (StateBackend(..., restore="previous")' in of_one["next_step"]
    (path / name).unlink()
    assert read(run("checkpoints", "verify", path, "--json"))["problems"][0]["kind"] == "missing"


@pytest.mark.parametrize(
    "verb",
    [["checkpoints", "list"], ["checkpoints", "show"], ["checkpoints", "verify"], ["gc"], ["gc", "--commit"]],
)
def test_what_is_no_location_is_refused_with_exit_code_2(tmp_path: Path, verb: list[str]) -> None:
    (tmp_path / "README").write_text("somebody's files")
    result = run(*verb, tmp_path)
    assert result.exit_code == 2
    assert "is not a location of DSTL" in result.stderr
    assert result.stdout == ""
    assert files(tmp_path) == ["README"]
    secret = run(*verb, "s3://user:hunter2@bucket/x")
    assert secret.exit_code == 2
    assert "hunter2" not in secret.stdout + secret.stderr


def test_read_only_verbs_change_nothing(place: tuple[Path, Location]) -> None:
    path, _ = place
    before = {name: (path / name).read_bytes() for name in files(path)}
    for verb in (["checkpoints", "list"], ["checkpoints", "show"], ["checkpoints", "verify"], ["gc"]):
        assert run(*verb, path).exit_code == 0
    assert {name: (path / name).read_bytes() for name in files(path)} == before


def test_gc_is_a_dry_run_unless_told_to_commit(place: tuple[Path, Location]) -> None:
    path, location = place
    long_ago = time.time() - 3 * 86_400
    for name in files(path):
        os.utime(path / name, (long_ago, long_ago))
    before = files(path)
    asked = run("gc", path, "--json", "--stopped")
    found = read(asked)
    assert (asked.exit_code, found["dry_run"], found["deleted"]) == (0, True, 0)
    orphans = {each["object"]: each["reason"] for each in found["orphans"]}
    # Checkpoints 2, 3 and 5 are subsumed; 3 holds an inlined segment that is still needed.
    assert {manifest_name(2), manifest_name(5)} <= set(orphans)
    assert manifest_name(3) not in orphans
    assert sum(name.endswith(".seg") for name in orphans) == 1
    assert files(path) == before
    shown = run("gc", path, "--stopped")
    assert "would go: pass --commit" in shown.stdout
    assert "it is below the cleanup boundary" in shown.stdout
    done = read(run("gc", path, "--stopped", "--commit", "--json"))
    assert done["deleted"] == len(orphans)
    assert set(before) - set(files(path)) == set(orphans)
    assert run("checkpoints", "verify", path).exit_code == 0
    assert read(run("gc", path, "--stopped", "--commit", "--json"))["deleted"] == 0
    assert [c.checkpoint_id for c in asyncio.run(location.log.checkpoints())] == [6, 7]


def test_gc_leaves_what_is_younger_than_the_grace(place: tuple[Path, Location]) -> None:
    path, _ = place
    found = read(run("gc", path, "--stopped", "--commit", "--json"))
    assert (found["orphans"], found["deleted"]) == ([], 0)
    assert read(run("gc", path, "--stopped", "--grace", "0s", "--json"))["orphans"]


def test_gc_without_stopped_leaves_what_a_running_batch_may_need(place: tuple[Path, Location]) -> None:
    path, _ = place
    found = read(run("gc", path, "--grace", "0s", "--json"))
    assert not [each for each in found["orphans"] if each["object"].endswith(".seg")]
    assert "a running batch or materialization may still need it" in {each["reason"] for each in found["kept"]}


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("24h", 86_400), ("7d", 604_800), ("0s", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1 week", "1e9s", "24h1m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="write 90s"):
        parse_duration(text)


def test_tables_fit_a_terminal_of_80_columns_and_cut_nothing(place: tuple[Path, Location]) -> None:
    path, location = place
    for verb in (["checkpoints", "list"], ["checkpoints", "show"], ["gc", "--grace", "0s", "--stopped"]):
        shown = run(*verb, path, columns=80)
        assert shown.exit_code == 0, shown.output
        tables = [line for line in shown.stdout.splitlines() if line and line[0] in "┏┃┡│├└"]
        assert tables
        assert max(map(len, tables)) <= 80, max(tables, key=len)
        assert "…" not in shown.stdout
    names = run("checkpoints", "list", path, columns=80).stdout
    for column in ("checkpoint", "batch", "age", "full", "to restore", "state"):
        assert column in names
    stored = [s.segment[0] for s in location.made[-1].segments]
    wide = run("checkpoints", "show", path, "--wide", columns=80).stdout
    assert all(name in wide for name in stored)
    # Wrapped, but whole: the column's lines together are the name.
    narrow = run("checkpoints", "show", path, columns=80).stdout
    column = "".join(
        line.split("│")[1].strip() for line in narrow.splitlines() if line.startswith("│ ") and line.count("│") > 5
    )
    assert all(name in column for name in stored)


def test_a_location_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    for verb in (
        ["checkpoints", "list"],
        ["checkpoints", "show"],
        ["checkpoints", "verify"],
        ["gc"],
        ["gc", "--commit"],
    ):
        assert run(*verb, tmp_path / "no" / "where").exit_code == 2
    assert os.listdir(tmp_path) == []
