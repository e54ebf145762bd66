"""Changes of states between checkpoints: what a checkpoint has and the changes behind it are what the later one has."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest
from home import Home
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from dstl.checkpoint.report import CheckpointReport
from dstl.cli.state import app
from dstl.errors import Invalid, MissingState
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.spark import StateBackend

STATES = ("total", "elements", "signs", "$timers", "rules", "sum")


class Everything(StatefulProcessor):
    """A state of each kind; a negative row takes something away again, and 0 all."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "total long")
        self.elements = handle.getListState("elements", "v long")
        self.signs = handle.getMapState("signs", "odd boolean, v long", "n long")
        self.rules = handle.getBroadcastState("rules", "id string", "least long")
        self.sum = handle.getReducingState("sum", "v long", lambda a, b: (a[0] + b[0],))

    def handleBroadcastRows(self, name: str, rows: Iterator[Any]) -> None:
        for row in rows:
            if row.v < 0:
                self.rules.removeKey((f"r{-row.v}",))
            else:
                self.rules.updateValue((f"r{row.v}",), (row.v,))

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for v in [row.v for row in rows]:
            if v > 0:
                self.total.update(((self.total.get() or (0,))[0] + v,))
                self.elements.appendValue((v,))
                self.signs.updateValue((v % 2 == 1, v), (v,))
                self.handle.registerTimer(9_000_000_000_000 + v)
                self.sum.add((v,))
            elif v < 0:
                self.elements.put([(v,)])
                self.signs.removeKey((v % 2 == 1, -v))
                self.handle.deleteTimer(9_000_000_000_000 - v)
            else:
                self.total.clear()
                self.elements.clear()
                self.signs.clear()
                self.sum.clear()
        yield Row(k=key[0])


BATCHES = [
    [("a", 1), ("a", 2), ("b", 3), ("rule", 1)],
    [("a", 5), (None, 4), ("rule", 2)],
    [("a", -2), ("c", 9)],
    [("b", 0), ("rule", -1)],
    [("b", 6), ("c", 0), ("d", 1)],
    [("e", 7)],
]


class States:
    """The states of a backend's checkpoints, each of which is read once.

    Of a state its rows by key and user key or expiry; of a list the elements of each key.
    """

    def __init__(self, backend: StateBackend, spark: SparkSession) -> None:
        self.backend, self.spark = backend, spark
        self._known: dict[tuple[str, int], dict[Any, Any]] = {}

    def at(self, name: str, checkpoint: int) -> dict[Any, Any]:
        if (name, checkpoint) not in self._known:
            found: dict[Any, Any] = {}
            for row in self.backend.read_state(self.spark, name, checkpoint=checkpoint).collect():
                found = changed(found, name, "put", row)
            self._known[name, checkpoint] = found
        return self._known[name, checkpoint]

    def check(self, name: str, after: int, to: int) -> list[Row]:
        """Return the changes between two checkpoints, which are all that makes the later one of the earlier."""
        changes = self.backend.read_changes(self.spark, name, after, to).collect()
        found = self.at(name, after) if after else {}
        for row in changes:
            found = changed(found, name, row.change, row)
        assert found == self.at(name, to), (name, after, to, changes)
        return changes


def changed(rows: dict[Any, Any], name: str, change: str, row: Row) -> dict[Any, Any]:
    key = tuple(row.key) if "key" in row else ()
    if change == "clear":
        return {place: value for place, value in rows.items() if place[0] != key}
    part = row.user_key if "user_key" in row else row.expiry_ms if "expiry_ms" in row else None
    value = row.value if "value" in row else ()
    if name == "elements":
        assert change == "put"
        return {**rows, (key, None): [*rows.get((key, None), []), value]}
    if change == "delete":
        assert row.asDict().get("value") is None
        return {place: held for place, held in rows.items() if place != (key, part)}
    return {**rows, (key, part): value}


def test_a_checkpoint_and_the_changes_behind_it_are_a_later_one(home: Home, seed: int) -> None:
    source, checkpoints, rng = home.stream(), list[int](), random.Random(seed)
    where = str(home.path / "state")

    def note(report: Any) -> None:
        if isinstance(report, CheckpointReport):
            checkpoints.append(report.checkpoint_id)

    def run(batches: list[Any], **options: Any) -> None:
        for batch in batches:
            source.add([{"k": k, "v": v} for k, v in batch])
        options = {"spark": home.spark, "checkpoints": CheckpointOptions(retained=60), **options}
        with StateBackend(where, parallelism=2, **options) as backend:
            backend.add_listener(note)
            df = source.read()
            rows = backend.groupBy(df.where("k is null or k != 'rule'"), "k").transformWithState(
                Everything(),
                "k string",
                "append",
                "processingTime",
                broadcast={"rules": df.where("k = 'rule'")},
                name="everything",
            )
            source.collect(rows, backend)
            look(backend)

    def command(*more: str, code: int = 0) -> Any:
        words = ["changes", where, "--operator", "everything", *more]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == code, done.output
        return done

    def look_at_log(backend: StateBackend) -> None:
        assert len(checkpoints) == len(BATCHES)
        states = States(backend, home.spark)
        for name in STATES:
            states.check(name, 0, checkpoints[-1])
            for after, to in rng.sample(list(itertools.combinations((0, *checkpoints), 2)), 1):
                states.check(name, after, to)
        # What has not changed is no row, and each has its keys.
        (row,) = states.check("total", checkpoints[-2], checkpoints[-1])
        assert row == Row(change="put", key=Row(k="e"), value=Row(total=7))
        found = states.check("elements", checkpoints[1], checkpoints[2])
        assert sorted(found, key=repr) == [
            Row(change="clear", key=Row(k="a"), value=None),
            Row(change="put", key=Row(k="a"), value=Row(v=-2)),
            Row(change="put", key=Row(k="c"), value=Row(v=9)),
        ]
        found = states.check("signs", checkpoints[1], checkpoints[2])
        assert Row(change="delete", key=Row(k="a"), user_key=Row(odd=False, v=2), value=None) in found
        with pytest.raises(Invalid, match="no state 'nope'"):
            backend.read_changes(home.spark, "nope", checkpoints[0])
        with pytest.raises(Invalid, match=f"checkpoint {checkpoints[1]} is not before checkpoint {checkpoints[1]}"):
            backend.read_changes(home.spark, "total", checkpoints[1], checkpoints[1])
        with pytest.raises(MissingState, match="has no checkpoint 999"):
            backend.read_changes(home.spark, "total", 1, 999)

    look: Callable[[StateBackend], None] = look_at_log
    run(BATCHES, materialization=MaterializationOptions(enabled=False))
    first, last = checkpoints[0], checkpoints[-1]
    span = ["--from", str(checkpoints[-2])]
    done = command("--state", "total", *span, "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"change": "put", "key": {"k": "e"}, "value": {"total": 7}}
    ]
    assert done.stderr == "from the log\n"
    shown = command("--state", "signs", "--from", str(checkpoints[2]), "--to", str(checkpoints[3])).stdout
    assert [word in shown for word in ("change", "key.k", "user_key.odd", "clear")] == [True] * 4
    path = home.path / "changes.parquet"
    told = command("--state", "signs", "--from", "0", "--format", "parquet", "--out", str(path), "--json")
    table = pq.read_table(path)
    assert json.loads(told.stdout) == {
        "out": str(path),
        "format": "parquet",
        "rows": table.num_rows,
        "source": "log",
    }
    assert table.column_names == ["change", "key", "user_key", "value"]
    assert "is not before" in command("--state", "total", "--from", str(last), code=2).output
    assert (
        "has no operator 'other'"
        in CliRunner().invoke(app, ["changes", where, "--operator", "other", "--state", "total", "--from", "0"]).output
    )

    def look_at_both(backend: StateBackend) -> None:
        states = States(backend, home.spark)
        for name in STATES:
            changes = states.check(name, first, checkpoints[-1])
            before = states.at(name, first)
            for row in changes:
                if name not in ("elements", "$timers") and row.change == "put":
                    assert changed(before, name, "put", row) != before, "a row that is the same is no change"

    # Bases come, and the log behind the first checkpoints goes; these stay.
    look = lambda backend: None  # noqa: E731
    busy = MaterializationOptions(interval_s=0.1, min_pause_s=0, min_log_bytes=1, generations=1, log_to_state_ratio=0.1)
    for _ in range(15):
        run([[("z", 1), ("a", 1)]] * 3, materialization=busy)
        done = command("--state", "total", "--from", str(first), "--json")
        if done.stderr != "from the log\n":
            break
    assert done.stderr == "from a comparison of both checkpoints\n"
    look = look_at_both
    run([[("z", 1), ("b", 1)]], materialization=busy)
    told = " ".join(command("--state", "total", "--from", "0", code=1).output.split())
    assert f"what came behind checkpoint 0 is gone: {where} retains the checkpoints {first}, {checkpoints[1]}, " in told
    assert "and the log of operator 'everything' goes back to checkpoint " in told
