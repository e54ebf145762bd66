"""``dstl state read`` without Spark running: every kind of state and awkward type, as lines, table and Parquet."""

import asyncio
import contextlib
import datetime as dt
import errno
import functools
import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow.parquet as pq
import pytest
import typer
from pyspark.sql.types import StructType
from typer.testing import CliRunner

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.checkpoint.savepoint.format import Savepoint, SavepointFile, SavepointObjects
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.checkpoint.state_catalogue import ExpectedOperator, StateCatalogue
from dstl.cli.console import errors_as_exit
from dstl.cli.savepoint import app as savepoint_app
from dstl.cli.state import app
from dstl.errors import CorruptData
from dstl.runtime import Runtime, system_runtime
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.descriptor import StateKind
from dstl.state.registry import TIMERS, StateRegistry
from dstl.state.timers import expiry_user_key
from dstl.store.base import ObjectStore
from dstl.store.local import LocalStore
from handles.checkpoint import OperatorEntry
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import HeapStateTable
from worlds.ddl import parse_ddl
from worlds.table_changes import changes, put

RUNNER = CliRunner()
GROUPS = 8
KEY = parse_ddl("name string, n int")
VALUE = parse_ddl("d date, t timestamp, m decimal(10,2), b binary, x double, a array<struct<p:int>>, o map<string,int>")
OLD_VERSION, NEW_VERSION = "n int, gone string, s struct<x:int>", "s struct<y:string,x:double>, new date, n long"
AWKWARD = (
    dt.date(2024, 2, 29),
    dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC),
    Decimal("12.50"),
    b"\x00\xff",
    float("nan"),
    [(1,), None],
    {"k": 1},
)
NOTHING = (None,) * 7


def expired_and_fresh(schema: StructType, runtime: Runtime) -> tuple[bytes, bytes]:
    now = int(runtime.clock.wall() * 1000)
    old, fresh = (ValueCodec("mortal", (schema,), write_time_ms=at) for at in (now - 10_000, now))
    return old.encode((1,)), fresh.encode((2,))


def table_of(registry: StateRegistry, runtime: Runtime) -> HeapStateTable:
    """One entry of each kind in key group 3, and a plain value in every other."""
    value = registry.declare("value", StateKind.VALUE, VALUE)
    elements = registry.declare("elements", StateKind.LIST, parse_ddl("v int"))
    by_user = registry.declare("by_user", StateKind.MAP, parse_ddl("v int"), parse_ddl("u string, w int"))
    mortal = registry.declare("mortal", StateKind.VALUE, parse_ddl("v int"), ttl_ms=5000)
    timers = registry.declare(TIMERS, StateKind.TIMER, StructType([]))
    evolved = registry.declare("evolved", StateKind.MAP, parse_ddl(NEW_VERSION), parse_ddl("u string"))
    versions = [ValueCodec("evolved", evolved.value_schemas[:count]) for count in (1, 2)]
    keys, user_keys = KeyCodec(KEY), KeyCodec(parse_ddl("u string, w int"))
    awkward, small = ValueCodec("value", (VALUE,)), ValueCodec("v", (parse_ddl("v int"),))
    old, fresh = expired_and_fresh(parse_ddl("v int"), runtime)
    one, two = keys.encode(("one", 1)), keys.encode((None, 2))
    rows = [
        put(3, value.state_id, one, b"", awkward.encode(AWKWARD)),
        put(3, value.state_id, two, b"", awkward.encode(NOTHING)),
        *(put(3, elements.state_id, one, struct.pack(">QI", 1 + n // 2, n % 2), small.encode((n,))) for n in range(5)),
        put(3, by_user.state_id, one, user_keys.encode(("x", None)), small.encode((7,))),
        put(3, evolved.state_id, one, b"a", versions[0].encode((1, "x", (2,)))),
        put(3, evolved.state_id, one, b"b", versions[1].encode((("y", 0.5), None, 1 << 40))),
        put(3, mortal.state_id, one, b"", old),
        put(3, mortal.state_id, two, b"", fresh),
        put(3, timers.state_id, one, expiry_user_key(-5), b""),
        put(3, timers.state_id, one, expiry_user_key(1_700_000_000_000), b""),
        *(
            put(g, value.state_id, keys.encode((f"g{g}", g)), b"", awkward.encode(NOTHING))
            for g in range(GROUPS)
            if g != 3
        ),
    ]
    table = HeapStateTable()
    table.apply(changes(*rows))
    return table


async def saved(
    store: ObjectStore, table: HeapStateTable, entry: OperatorEntry, groups: int, query_id: str = "q"
) -> Savepoint:
    """Store a savepoint "mine" of one operator."""
    data, parts = b"", []
    for group in range(groups):
        part = encode_key_group(table.snapshot(), group)
        parts.append((group, len(data), len(part.data), part.rows))
        data += part.data
    checksum = google_crc32c.value(data)
    name = f"{'0' * 32}/000000.base"
    file = SavepointFile(operator=entry.uid, name=name, size=len(data), checksum=checksum, parts=tuple(parts))
    savepoint = Savepoint(
        name="mine",
        put_id="p",
        created_at=1.0,
        source=query_id,
        query_id=query_id,
        checkpoint_id=2,
        batch_id=0,
        sequence_base=2,
        max_parallelism=groups,
        operators=(entry,),
        files=(file,),
    )
    objects = SavepointObjects(store, system_runtime())
    await objects.put(savepoint.object_name(file), data)
    assert await objects.win(savepoint, "mine")
    return savepoint


def made_location(tmp_path: Path, forge: Callable[[dict[str, Any]], None] = lambda registry: None) -> str:
    """Make a location with a savepoint and a checkpoint of the same state; ``forge`` changes its stored registry."""

    async def fill() -> None:
        store, runtime = LocalStore(str(tmp_path / "job")), system_runtime()
        first = StateRegistry(KEY)
        first.declare("evolved", StateKind.MAP, parse_ddl(OLD_VERSION), parse_ddl("u string"))
        registry = StateRegistry.from_wire(first.to_wire())
        table = table_of(registry, runtime)
        stored = registry.to_wire()
        forge(stored)
        entry = OperatorEntry(uid="op", parallelism=2, key_types="string,int", registry=stored)
        savepoint = await saved(store, table, entry, GROUPS)
        log = ManifestLog(store, runtime)
        await log.fence("q")
        checkpoint = savepoint_as_checkpoint(
            savepoint,
            checkpoint_id=log.next_sequence,
            batch_id=0,
            query_id="q",
            run_id="r",
        )
        await log.commit(checkpoint, [])

    asyncio.run(fill())
    return str(tmp_path / "job")


@pytest.fixture
def location(tmp_path: Path) -> str:
    """A location with a savepoint and a checkpoint of the same state."""
    return made_location(tmp_path)


def read(location: str, state: str, *more: str, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["read", location, "--operator", "op", "--state", state, *more])
    assert done.exit_code == code, done.output
    return done.output if code else done.stdout


def lines(location: str, state: str, *more: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(location, state, "--json", *more).splitlines()]


ONE, TWO = {"name": "one", "n": 1}, {"name": None, "n": 2}


@pytest.mark.parametrize("of", [(), ("--checkpoint", "2"), ("--savepoint", "mine")])
def test_values_of_awkward_types_are_json(location: str, of: tuple[str, ...]) -> None:
    rows = {row["key"]["name"]: row["value"] for row in lines(location, "value", *of)}
    assert set(rows) == {"one", None, *(f"g{g}" for g in range(GROUPS) if g != 3)}
    assert rows["one"] == {
        "d": "2024-02-29",
        "t": "2024-02-29T12:30:00+00:00",
        "m": "12.50",
        "b": "00ff",
        "x": "nan",
        "a": [{"p": 1}, None],
        "o": [["k", 1]],
    }
    assert rows[None] == dict.fromkeys(VALUE.names)


def test_lists_maps_timers_and_expired_values(location: str) -> None:
    assert lines(location, "elements") == [{"key": ONE, "value": {"v": n}} for n in range(5)]
    assert lines(location, "by_user") == [{"key": ONE, "user_key": {"u": "x", "w": None}, "value": {"v": 7}}]
    assert lines(location, "mortal") == [{"key": TWO, "value": {"v": 2}}]
    assert lines(location, TIMERS) == [{"key": ONE, "user_key": {"expiry_ms": at}} for at in (-5, 1_700_000_000_000)]


@pytest.mark.parametrize("of", [("--checkpoint", "2"), ("--savepoint", "mine")])
def test_values_of_every_schema_version_are_shown_as_the_newest_says(location: str, of: tuple[str, ...]) -> None:
    assert {row["user_key"]["u"]: row["value"] for row in lines(location, "evolved", *of)} == {
        "a": {"s": {"y": None, "x": 2.0}, "new": None, "n": 1},
        "b": {"s": {"y": "y", "x": 0.5}, "new": None, "n": 1 << 40},
    }


@pytest.mark.parametrize("state", ["value", "elements", "by_user", "evolved", TIMERS])
def test_parquet_holds_the_same_rows(location: str, state: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    told = json.loads(read(location, state, "--format", "parquet", "--out", str(path), "--json"))
    table = pq.read_table(path)
    assert told == {"out": str(path), "format": "parquet", "rows": table.num_rows}
    assert [row["key"] for row in table.to_pylist()] == [row["key"] for row in lines(location, state)]
    if state == "value":
        found = next(row["value"] for row in table.to_pylist() if row["key"] == ONE)
        assert (found["m"], found["b"], found["d"]) == (AWKWARD[2], AWKWARD[3], AWKWARD[0])


def test_a_table_shows_the_first_rows_and_says_so(location: str, tmp_path: Path) -> None:
    shown = read(location, "elements", "--limit", "2")
    assert "key.name" in shown
    assert " v " in shown
    assert shown.count("one") == 2
    path = tmp_path / "rows.txt"
    read(location, "elements", "--out", str(path))
    assert path.read_text().count("one") == 5
    jsonl = tmp_path / "rows.jsonl"
    assert json.loads(read(location, "elements", "--out", str(jsonl), "--json", "--limit", "3"))["rows"] == 3
    assert len(jsonl.read_text().splitlines()) == 3


def test_what_is_not_there_is_named_with_what_is(location: str, tmp_path: Path) -> None:
    assert "has no state 'none'; it has 'evolved', 'value', 'elements', 'by_user', 'mortal', '$timers'" in read(
        location, "none", code=2
    )
    assert "has no checkpoint 9; it retains: 2" in read(location, "value", "--checkpoint", "9", code=1)
    assert "has no savepoint 'none'" in read(location, "value", "--savepoint", "none", code=1)
    assert "name it with --out" in read(location, "value", "--format", "parquet", code=2)
    assert "exclude each other" in read(location, "value", "--checkpoint", "2", "--savepoint", "mine", code=2)
    assert "cannot be written" in read(location, "value", "--out", str(tmp_path / "no" / "where"), code=2)
    assert "not a location of DSTL" in read(str(tmp_path / "empty"), "value", code=2)
    done = RUNNER.invoke(app, ["read", location, "--operator", "other", "--state", "value"])
    assert (done.exit_code, "has no operator 'other'; it has 'op'" in done.output) == (2, True)


def test_state_names_are_found_without_knowing_one(location: str) -> None:
    for of in ((), ("--checkpoint", "2"), ("--savepoint", "mine")):
        done = RUNNER.invoke(app, ["list", location, "--json", *of])
        assert done.exit_code == 0, done.output
        rows = {row["state"]: row for row in json.loads(done.stdout)}
        assert list(rows) == ["evolved", "value", "elements", "by_user", "mortal", TIMERS]
        assert (rows["by_user"]["operator"], rows["by_user"]["kind"]) == ("op", "map")
        assert rows["by_user"]["key"] == "name string, n integer"
        assert rows["by_user"]["user_key"] == "u string, w integer"
        assert rows["value"]["value"].endswith("a array<struct<p: integer>>, o map<string, integer>")
        assert rows["mortal"]["ttl_ms"] == 5000
    shown = RUNNER.invoke(app, ["list", location, "--wide"]).stdout
    assert "by_user" in shown
    assert "5 s" in shown
    assert RUNNER.invoke(app, ["list", location, "--savepoint", "none"]).exit_code == 1
    assert RUNNER.invoke(app, ["list", location + "-typo"]).exit_code == 2


AS_STORED = ["[draft] price is 5", "[x] done", "end [/b]", "[red]", "\\[b]", "plain", "ünï ✓ 漢"]
ESCAPED = {
    "\x1b[2J": "\\x1b[2J",
    "a\nb": "a\\nb",
    "\x9b1m": "\\x9b1m",
    "abc\u202edef": "abc\\u202edef",
    "\x00\x7f": "\\x00\\x7f",
}


def test_a_table_shows_what_is_stored_and_sends_no_control_to_the_terminal(tmp_path: Path) -> None:
    """Markup of rich in a value vanished or raised, and an escape sequence reached the terminal."""
    texts = [*AS_STORED, *ESCAPED]

    async def fill() -> None:
        store = LocalStore(str(tmp_path / "[b]"))
        key = parse_ddl("name string")
        registry = StateRegistry(key)
        schema = StructType().add("[/red]\x1b[2J", "string")
        state = registry.declare("[/b]", StateKind.VALUE, schema)
        keys, values = KeyCodec(key), ValueCodec("v", (schema,))
        table = HeapStateTable()
        table.apply(
            changes(*(put(0, state.state_id, keys.encode((each,)), b"", values.encode((each,))) for each in texts))
        )
        entry = OperatorEntry(uid="op", parallelism=1, key_types="string", registry=registry.to_wire())
        await saved(store, table, entry, 1, "[/b]\x1b[2J")

    asyncio.run(fill())
    location = str(tmp_path / "[b]")
    shown = read(location, "[/b]", "--savepoint", "mine", "--wide", code=0).replace("op.[/b]", "")
    for text in (*AS_STORED, *ESCAPED.values()):
        assert shown.count(f" {text} ") == 2, text
    assert "[/red]\\x1b[2J" in shown
    more = RUNNER.invoke(app, ["list", location, "--savepoint", "mine"])
    assert more.exit_code == 0
    savepoint = RUNNER.invoke(savepoint_app, ["verify", location, "mine"])
    assert (savepoint.exit_code, "[/b]\\x1b[2J" in savepoint.stdout) == (0, True)
    for output in (shown, more.stdout, savepoint.stdout):
        assert not any((ord(each) < 32 and each != "\n") or 127 <= ord(each) < 160 for each in output)


READ = ("read", "--operator", "op", "--state", "elements")


@pytest.mark.parametrize("arguments", [READ, (*READ, "--json"), ("list", "--json"), ("--help",)], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_not_taken_for_damage(
    arguments: tuple[str, ...], unbuffered: str, location: str
) -> None:
    """It ended in a traceback, with the exit code of what is damaged or missing, or with one of Python's."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = state_command(arguments[0], location, *arguments[1:], stdout=full, env=environment)
    assert (done.returncode, done.stderr) == (2, "Invalid: standard output: No space left on device\n")


def test_what_nobody_reads_or_a_program_has_closed_is_no_traceback(location: str) -> None:
    """Few lines of JSON were written at the exit, which failed with an exit code of Python's."""
    reader, writer = os.pipe()
    os.close(reader)
    done = state_command(READ[0], location, *READ[1:], "--json", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    closed = state_command(READ[0], location, *READ[1:], "--json", preexec_fn=functools.partial(os.close, 1))
    assert (closed.returncode, closed.stderr) == (0, "")


def test_an_error_that_names_no_file_is_not_taken_for_standard_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    """A socket's, say: it was told as one of standard output, which got nothing more then."""
    before = os.fstat(1)
    with pytest.raises(typer.Exit) as ended, errors_as_exit():
        raise OSError(errno.EMFILE, "Too many open files")
    assert (ended.value.exit_code, capsys.readouterr().err) == (2, "Invalid: Too many open files\n")
    assert os.path.samestat(os.fstat(1), before)


def state_command(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dstl.cli", "state", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, **how)


def test_what_an_encoding_has_no_character_for_is_written_out(tmp_path: Path) -> None:
    """A table with such a name ended in a traceback."""
    command = [sys.executable, "-m", "dstl.cli", "state", "list", made_location(tmp_path / "ž")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )
    assert (done.returncode, "\\u017e" in done.stdout) == (0, True), done.stderr


def test_the_bar_stands_beside_nothing_that_is_printed(location: str) -> None:
    """On a terminal the title of the table was glued to the bar."""
    leader, follower = pty.openpty()
    code = subprocess.Popen(
        [sys.executable, "-m", "dstl.cli", "state", "read", location, "--operator", "op", "--state", "elements"],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(follower)
    text = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while more := os.read(leader, 4096):
            text += more
    os.close(leader)
    assert code.wait(60) == 0
    (title,) = [line for line in text.decode().splitlines() if "op.elements" in line]
    assert "reading" not in title


def test_a_damaged_object_ends_with_1_and_its_name(location: str) -> None:
    (file,) = Path(location, "savepoints").rglob("*.base")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    for of in ((), ("--savepoint", "mine")):
        assert str(file.relative_to(location)) in read(location, "value", "--json", *of, code=1)


@pytest.mark.parametrize("what", ["a column", "the key", "nested", "deep"])
def test_a_forged_schema_of_a_checkpoint_or_savepoint_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "dstl_forged_module.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Payload: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    udt = '{"type":"udt","pyClass":"dstl_forged_module.Payload","serializedClass":"gASVCg==","sqlType":"string"}'
    column = '{"type":"struct","fields":[{"name":"f","type":%s}]}'
    nested = '{"type":"array","containsNull":true,"elementType":'
    text = column % {"nested": nested * 3 + column % udt + "}" * 3, "deep": nested * 10_000 + udt + "}" * 10_000}.get(
        what, udt
    )

    def forge(registry: dict[str, Any]) -> None:
        if what == "the key":
            registry["key"] = text
        else:
            next(state for state in registry["states"] if state["name"] == "value")["schemas"] = [text]

    location = made_location(tmp_path, forge)
    for of in ((), ("--savepoint", "mine")):
        told = " ".join(read(location, "value", *of, code=1).split())
        assert "is not one that DSTL has stored" in told
        assert ("of an operator's key" if what == "the key" else "of state 'value'") in told
    # A driver that starts again from it hears the same, before any TaskManager is told to restore.
    catalogue = StateCatalogue()
    catalogue.expect(
        ExpectedOperator("op", 2, "string,int", lambda known: StateRegistry.from_wire(dict(known or {})).to_wire())
    )
    with pytest.raises(CorruptData, match="is not one that DSTL has stored"):
        asyncio.run(opened(catalogue, location))
    assert "dstl_forged_module" not in sys.modules
    assert not mark.exists()


async def opened(catalogue: StateCatalogue, location: str) -> None:
    """Open the catalogue with the location's latest checkpoint, as a driver that starts does."""
    found = await choose_checkpoint(LocalStore(location), system_runtime(), None)
    catalogue.open(found)
