"""Savepoints through Spark: made while the query runs, restored into another query, its shape changed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from home import Home
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from dstl.checkpoint.report import RestoreReport, SavepointReport
from dstl.cli.savepoint import app as savepoint_cli
from dstl.cli.state import app as state_cli
from dstl.errors import Invalid, MissingState, ObjectExists
from dstl.spark import StateBackend

RUNNER = CliRunner()
OUT = "k string, total long, seen int"


class Journal(StatefulProcessor):
    """A value, a list and a map by key: the list's order shows whether numbers go on after a restore."""

    TOTAL = "total long"
    COUNT = "n int"

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", self.TOTAL)
        self.values = handle.getListState("values", "v long")
        self.parity = handle.getMapState("parity", "odd boolean", self.COUNT)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = sorted(row.v for row in rows)
        total = (self.total.get() or (0,))[-1] + sum(values)
        self.total.update((total,) if self.TOTAL == Journal.TOTAL else (None, total))
        for v in values:
            self.values.appendValue((v,))
            odd = (v % 2 == 1,)
            self.parity.updateValue(odd, ((self.parity.getValue(odd)[0] if self.parity.containsKey(odd) else 0) + 1,))
        yield Row(k=key[0], total=total, seen=sum(1 for _ in self.values.get()))


class NextJournal(Journal):
    """The same with a column more in front, and a wider one."""

    TOTAL = "note string, total long"
    COUNT = "n long"


def rows_of_batch(batch: int) -> list[dict[str, Any]]:
    return [{"k": f"k{i % 7}", "v": batch * 100 + i} for i in range(30)]


def expected(batches: int) -> dict[str, list[int]]:
    """The list of each key: batches in order, sorted within each."""
    lists: dict[str, list[int]] = {}
    for batch in range(batches):
        for row in sorted(rows_of_batch(batch), key=lambda row: int(row["v"])):
            lists.setdefault(row["k"], []).append(row["v"])
    return lists


def read_rows(location: Path, state: str, operator: str = "journal", *more: str) -> list[dict[str, Any]]:
    done = RUNNER.invoke(
        state_cli, ["read", str(location), "--operator", operator, "--state", state, "--format", "jsonl", *more]
    )
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_state(location: Path, batches: int, *more: str) -> None:
    lists = expected(batches)
    totals = {row["key"]["k"]: row["value"]["total"] for row in read_rows(location, "total", "journal", *more)}
    assert totals == {key: sum(values) for key, values in lists.items()}
    found: dict[str, list[int]] = {}
    for row in read_rows(location, "values", "journal", *more):
        found.setdefault(row["key"]["k"], []).append(row["value"]["v"])
    assert found == lists
    parity = {
        (row["key"]["k"], row["user_key"]["odd"]): row["value"]["n"]
        for row in read_rows(location, "parity", "journal", *more)
    }
    assert parity == {
        (key, odd): n
        for key, values in lists.items()
        for odd in (False, True)
        if (n := sum(v % 2 == odd for v in values))
    }


def run(
    spark: SparkSession, source: Any, location: Path, *, processor: StatefulProcessor | None = None, **settings: Any
) -> list[RestoreReport]:
    """Process everything that is there as one run of a query, and return its restores."""
    restores: list[RestoreReport] = []
    with StateBackend(str(location), spark=spark, **settings) as backend:
        backend.add_listener(lambda report: restores.append(report) if isinstance(report, RestoreReport) else None)
        df = backend.groupBy(source.read(), "k").transformWithState(
            processor or Journal(), OUT, "append", "none", name="journal"
        )
        source.drain(df, backend)
    return restores


@pytest.fixture(scope="module")
def saved(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SavepointReport]:
    """A job of two batches, and a savepoint that was made in its own process."""
    home = Home(spark, tmp_path_factory.mktemp("saved"))
    source = home.stream()
    for batch in range(2):
        source.add(rows_of_batch(batch))
    with home.backend(parallelism=3) as backend:
        with pytest.raises(MissingState, match="wait for its first batch"):
            backend.savepoint("early")
        df = backend.groupBy(source.read(), "k").transformWithState(Journal(), OUT, "append", "none", name="journal")
        source.drain(df, backend)
        report = backend.savepoint("mine")
        with pytest.raises(ObjectExists, match="'mine'"):
            backend.savepoint("mine")
    return home.path / "state", report


def test_the_report_and_the_command_line_say_the_same(saved: tuple[Path, SavepointReport]) -> None:
    location, report = saved
    assert report.location == f"{location}/savepoints/mine"
    assert (report.batch_id, report.entries > 0) == (1, True)
    listed = RUNNER.invoke(savepoint_cli, ["list", str(location), "--json"])
    (found,) = json.loads(listed.stdout)
    assert (found["name"], found["state"], found["batch"], found["entries"]) == ("mine", "complete", 1, report.entries)
    check_state(location, 2, "--savepoint", "mine")
    check_state(location, 2)


@pytest.mark.parametrize(
    ("mode", "settings", "processor"),
    [
        ("no_claim", {"parallelism": 5, "task_managers": 2}, Journal()),
        ("claim", {"parallelism": 2, "table": "rocksdb"}, NextJournal()),
    ],
)
def test_a_new_query_of_another_shape_goes_on_from_it(
    home: Home, saved: tuple[Path, SavepointReport], mode: str, settings: dict[str, Any], processor: Journal
) -> None:
    location, report = saved
    new = home.path / "new"
    restore_from = report.location
    if mode == "claim":
        done = RUNNER.invoke(savepoint_cli, ["create", str(location), "moved", "--to", str(new), "--json"])
        assert done.exit_code == 0, done.output
        restore_from = json.loads(done.stdout)["location"]
        assert restore_from == f"{new}/savepoints/moved"
    source = home.stream()
    source.add(rows_of_batch(2))
    given = {"restore_from": restore_from, "restore_mode": mode, "processor": processor, **settings}
    run(home.spark, source, new, **given)
    check_state(new, 3)
    # The same program again, the argument still there: its own checkpoints come first.
    source.add(rows_of_batch(3))
    run(home.spark, source, new, **given)
    check_state(new, 4)
    told = {(k, seen): total for k, total, seen in source.output(OUT)}
    for batches in (3, 4):
        assert all(told[k, len(values)] == sum(values) for k, values in expected(batches).items())
    assert len(told) == 14
    left = RUNNER.invoke(savepoint_cli, ["list", str(new), "--json"])
    assert [each["state"] for each in json.loads(left.stdout)] == (["claimed"] if mode == "claim" else [])
    check_state(location, 2, "--savepoint", "mine")


def test_what_cannot_be_restored_is_refused_when_the_backend_is_made(
    home: Home, saved: tuple[Path, SavepointReport]
) -> None:
    new = str(home.path / "new")
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        (
            {"restore_from": saved[1].location, "max_parallelism": 64},
            Invalid,
            "max_parallelism=128, and this backend 64",
        ),
        ({"restore_from": saved[1].location, "restore_mode": "claim"}, Invalid, "restore_mode='no_claim'"),
        ({"restore_from": f"{saved[0]}/savepoints/other"}, MissingState, "has no savepoint 'other'"),
        ({"restore_from": str(saved[0])}, Invalid, "LOCATION/savepoints/NAME"),
    ]
    for settings, kind, message in refused:
        with pytest.raises(kind, match=message):
            StateBackend(new, spark=home.spark, parallelism=2, **settings)
