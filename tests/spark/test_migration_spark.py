"""A PySpark ``transformWithState`` query moves to ``StateBackend`` in mid-life, and the same rows come out."""

import asyncio
import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from home import Home, Stream
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from dstl.cli.files import app as files
from dstl.errors import CorruptData, Invalid, MissingState, ObjectExists
from dstl.runtime import system_runtime
from dstl.spark import StateBackend, migrate_state
from dstl.spark.migration.operator_reader import OperatorReader
from dstl.spark.migration.spark_operator import SparkState
from dstl.spark.saved_state.reader import find_savepoint
from dstl.state.codec.value_codec import write_time_ms
from dstl.state.descriptor import StateKind
from dstl.state.registry import StateRegistry
from dstl.store import LocalStore
from handles.key_group import KeyGroupRange
from materializer.bases.table_directory import FileBases
from materializer.tables import HeapStateTable
from worlds.restored import restore_tables

WIDE = (
    "b boolean, y tinyint, f float, d double, dec decimal(20, 4), big decimal(38, 10), t string, bin binary, "
    "day date, ts timestamp, ntz timestamp_ntz, st struct<a: int, in: struct<x: string>>, l array<int>, "
    "m map<string, struct<y: int>>, sure bigint not null"
)
HOUR = 3_600_000


def wide(n: int) -> tuple[Any, ...]:
    if n % 5 == 4:
        return (None,) * 14 + (n,)
    return (
        n % 2 == 0,
        n % 100,
        n / 4,
        (n / 3, float("-inf"))[n % 2],
        decimal.Decimal(n) / 4,
        decimal.Decimal(f"-12345678901234567890.{n:02d}"),
        f"täxt-{n}",
        b"\0\xff%d" % n,
        datetime.date(1969, 12, 1) + datetime.timedelta(days=n),
        datetime.datetime(2020, 11, 1, 1, 30, 0, n),
        datetime.datetime(1955, 1, 1, 0, 0, 0, n),
        # No Rows: PySpark 4.1 cannot store a struct that is given as one.
        (n, (None,)),
        [n, None],
        {"x": (n,)},
        n,
    )


class Everything(StatefulProcessor):
    """Keeps all kinds of state and timers, and yields what it sees of them."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.wide = handle.getValueState("wide", WIDE)
        self.seen = handle.getListState("seen", "n long, s string")
        self.by = handle.getMapState("by", "a string, n long", "x double")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.v):
            before = (
                self.wide.get(),
                [tuple(each) for each in self.seen.get()],
                sorted(((tuple(k), tuple(v)) for k, v in self.by.iterator()), key=repr),
                sorted(self.handle.listTimers()),
            )
            yield Row(k=key[0], j=key[1], what=repr(before).replace("bytearray", ""))
            self.wide.update(wide(row.v))
            self.seen.appendValue((row.v, None if row.v % 3 == 0 else f"s{row.v}"))
            self.by.updateValue((None if row.v % 4 == 0 else "a", row.v % 6), (row.v / 2,))
            self.handle.registerTimer(int(row.t.timestamp() * 1000) + 30_000 + row.v)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], j=key[1], what=f"timer {expiredTimerInfo.getExpiryTimeInMs()}")


class Sessions(StatefulProcessor):
    """In pandas' style, with times to live and a timer far away."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n long", HOUR)
        self.l = handle.getListState("l", "n long", HOUR)
        self.m = handle.getMapState("m", "a long", "n long", HOUR)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for frame in rows:
            for v in sorted(int(each) for each in frame["v"]):
                found = self.n.get()
                n = (int(found[0]) if found else 0) + v
                self.n.update((n,))
                self.l.appendValue((v,))
                self.m.updateValue((v % 3,), (v,))
                self.handle.registerTimer(4_000_000_000_000 + v)
                held = [int(each[0]) for each in self.l.get()]
                by = sorted((int(k[0]), int(x[0])) for k, x in self.m.iterator())
                what = repr((n, held, by, sorted(map(int, self.handle.listTimers()))))
                yield pd.DataFrame({"k": [key[0]], "what": [what]})


@pytest.fixture
def sparks_store(set_conf: Any, rocksdb: None, same_batches: None) -> None:
    """Spark's RocksDB, in checkpoint format 2."""
    store = "spark.sql.streaming.stateStore"
    set_conf(
        {
            f"{store}.checkpointFormatVersion": "2",
            f"{store}.rocksdb.changelogCheckpointing.enabled": "true",
            "spark.sql.shuffle.partitions": "2",
        }
    )


def rows_of(batch: int) -> list[dict[str, Any]]:
    return [
        {
            "k": None if i % 9 == 0 else f"k{i % 9}",
            "j": i % 2,
            "v": i + 31 * batch,
            "t": f"2026-01-01 00:{batch:02d}:{i:02d}",
        }
        for i in range(30)
    ]


def drain(
    source: Stream, df: DataFrame, place: str | StateBackend, mode: str = "update", batches: int | None = None
) -> list[tuple[Any, ...]]:
    """Process what is there; return all rows that came out, whatever their batch."""
    return sorted((row[1:] for row in source.collect(df, place, mode, batches)), key=repr)


@pytest.mark.drawn(1, group="moved queries")
def test_all_kinds_of_state_go_on_at_another_parallelism_where_sparks_would_have(
    sparks_store: None, home: Home
) -> None:
    """Event time, from ``dstl://`` the query that stays is the same one, on Spark's store."""
    arguments = (Everything(), "k string, j int, what string", "update", "eventTime")
    source = home.stream("k string, j int, v int, t timestamp")
    timed = source.read().withWatermark("t", "5 seconds")
    place = home.path / "old"
    for batch in range(2):
        source.add(rows_of(batch))
    old, new = f"dstl://{place}", f"file://{home.path}/state/_spark"
    drain(source, timed.groupBy("k", "j").transformWithState(*arguments), old)
    report = migrate_state(old, home.path / "saved", operators={0: "all"}, new_checkpoint=new, spark=home.spark)
    assert (report.batch_id, dict(report.operators)) == (1, {"all": ("$timers", "by", "seen", "wide")})
    assert not (home.path / "state" / "_spark" / "state").exists()
    source.add(rows_of(3))
    late = {"k": "k1", "j": 1, "v": 500, "t": "2026-01-01 00:00:10"}
    source.add([late, {"k": "other", "j": 0, "v": 900, "t": "2026-01-01 00:09:00"}])
    source.add([{"k": "other", "j": 0, "v": 901, "t": "2026-01-01 00:09:01"}])
    stayed = drain(source, timed.groupBy("k", "j").transformWithState(*arguments), old)
    with home.backend(restore_from=report.savepoint, parallelism=5) as backend:
        moved = drain(source, backend.groupBy(timed, "k", "j").transformWithState(*arguments, name="all"), backend)
    assert moved == stayed
    assert any("timer" in row[2] for row in moved)
    with pytest.raises(ObjectExists, match="migrated"):
        migrate_state(old, home.path / "saved", spark=home.spark)


@pytest.mark.drawn(1, group="moved queries")
def test_times_to_live_and_timers_in_processing_time_move_with_their_moments(sparks_store: None, home: Home) -> None:
    arguments = (Sessions(), "k string, what string", "update", "processingTime")
    source = home.stream("k string, j int, v int, t timestamp")
    old, new = home.path / "old", home.path / "state" / "_spark"
    source.add(rows_of(0))
    source.add(rows_of(1))
    drain(source, source.read().groupBy("k").transformWithStateInPandas(*arguments), str(old), batches=2)
    with pytest.raises(Invalid, match="'l' has a time to live"):
        migrate_state(str(old), home.path / "saved", spark=home.spark)
    report = migrate_state(
        str(old), home.path / "saved", ttl_ms=dict.fromkeys("nlm", HOUR), new_checkpoint=str(new), spark=home.spark
    )
    source.add(rows_of(2))
    before = len(list((old / "commits").glob("[0-9]*")))
    stayed = drain(
        source, source.read().groupBy("k").transformWithStateInPandas(*arguments), str(old), batches=before + 1
    )
    with home.backend(restore_from=report.savepoint, parallelism=2) as backend:
        moved = drain(source, backend.groupBy(source.read(), "k").transformWithStateInPandas(*arguments), backend)
        assert moved == stayed != []
    reader = home.spark.read.format("statestore").option("stateVarName", "n").option("batchId", report.batch_id)
    sparks = [row[0] for row in reader.load(str(old)).select("value.ttlExpirationMs").collect()]
    assert sorted(asyncio.run(_ends(home.path / "saved", "n"))) == sorted(sparks) != []


async def _ends(location: Path, state: str) -> list[int]:
    """Return when each value of a state of a savepoint ends."""
    runtime, store = system_runtime(), LocalStore(str(location))
    checkpoint = await find_savepoint(store, runtime, "migrated")
    (entry,) = checkpoint.operators
    (found,) = (each for each in StateRegistry.from_wire(entry.registry).descriptors if each.name == state)
    groups = KeyGroupRange(0, checkpoint.max_parallelism - 1)
    async with FileBases(store, runtime) as files:
        restored = await restore_tables(checkpoint, store, groups, lambda _: HeapStateTable(), runtime, files=files)
    table = restored.tables[entry.uid]
    values = [each.value for group in groups for each in table.scan(found.state_id, group)]
    return [(write_time_ms(value) or 0) + found.ttl_ms for value in values]


AGGREGATES = {
    "n": "count()",
    "some": "count(d)",
    "total": "sum(v)",
    "paid": "sum(big)",
    "length": "sum(d)",
    "again": "sum(v)",
    "middle": "avg(v)",
    "price": "mean(big)",
    "fees": "sum(fee)",
    "fee": "avg(fee)",
    "least": "min(s)",
    "latest": "max(t)",
    "began": "first(s)",
    "known": "last(s, ignore_nulls=True)",
}
AMOUNTS = "k string, v int, d double, big decimal(24, 2), fee decimal(6, 2), s string, t timestamp"


def amounts(batch: int) -> list[dict[str, Any]]:
    """Return rows of a batch: a key's texts are the same throughout it, so that the order of its rows does not show."""
    start = datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=8 * batch)
    return [
        {
            "k": None if i % 5 == 0 else f"k{i % 5}",
            "v": i * batch - 7,
            "d": None if i % 5 == 1 else (i - batch) / 4,
            "big": None if (i + batch) % 4 == 0 else f"{-1 if i % 2 else 1}1234567890123456789{i % 10}.{batch:02d}",
            "fee": None if i % 5 == 2 else f"{(-1) ** i * i}.{batch}{i % 10}",
            "s": None if batch % 3 == i % 5 else f"{batch % 4}-{i % 5}",
            "t": str(start + datetime.timedelta(seconds=i % 10)),
        }
        for i in range(20)
    ]


@pytest.mark.drawn(1, group="moved aggregations")
@pytest.mark.parametrize(
    "mode",
    ["update", "append", "complete"],
)
def test_aggregations_of_sparks_go_on_at_another_parallelism_where_they_would_have(
    sparks_store: None, home: Home, mode: str
) -> None:
    """Plain groups, windows that end, and groups of an expression; the query that stays is never interrupted."""
    source = home.stream(AMOUNTS)
    timed = source.read().withWatermark("t", "12 seconds")
    by = {
        "update": ["k"],
        "append": [F.window("t", "10 seconds", "5 seconds"), "k"],
        "complete": [(F.col("v") % 2).alias("odd"), F.window("t", "1 minute")],
    }[mode]
    columns = [
        F.expr(each.replace(", ignore_nulls=True", ", true").replace("count()", "count(*)")).alias(name)
        for name, each in AGGREGATES.items()
    ]
    old, new = home.path / "old", home.path / "state" / "_spark"
    for batch in range(2):
        source.add(amounts(batch))
    drain(source, timed.groupBy(*by).agg(*columns), str(old), mode=mode)
    report = migrate_state(
        str(old),
        home.path / "saved",
        operators={0: "amounts"},
        aggregates={0: AGGREGATES},
        types={"fee": "decimal(6, 2)"},
        keys={0: ["odd"]} if mode == "complete" else None,
        output_mode=mode,
        new_checkpoint=str(new),
        spark=home.spark,
    )
    assert dict(report.operators) == {"amounts": ("aggregates",)}
    for batch in (2, 4, 5):
        source.add(amounts(batch) + amounts(0)[:batch])  # the last of these are late
    stayed = drain(source, timed.groupBy(*by).agg(*columns), str(old), mode=mode)
    with home.backend(restore_from=report.savepoint, parallelism=3) as backend:
        moved = backend.groupBy(timed, *by).agg(*columns, outputMode=mode, name="amounts")
        assert drain(source, moved, backend) == stayed != []


def test_the_command_line_advises_the_checkpoint_directory_that_a_query_may_have(
    sparks_store: None, home: Home
) -> None:
    """It advised the copy's path, which a query is refused with."""
    source = home.stream("k string")
    source.add([{"k": "a"}])
    drain(source, source.read().groupBy("k").count(), str(home.path / "old"))
    words = ["migrate", home.path / "old", home.path / "state", "--operator", "0=n", "--aggregate", "0:n=count()"]
    done = CliRunner().invoke(files, [*map(str, words), "--new-checkpoint", str(home.path / "state" / "_spark")])
    assert "checkpointLocation backend.checkpoint_location" in done.stdout


def test_a_directory_that_sparks_reader_does_not_find_is_read_by_a_link(sparks_store: None, home: Home) -> None:
    """Spark escapes a blank in the name, and said then that no batch was committed there: no word of what to do."""
    source = home.stream("k string, v long")
    source.add([{"k": "a", "v": 1}])
    df, old, new = source.read(), home.path / "old # dir", home.path / "new # dir"
    stays = df.groupBy("k").agg(F.sum("v"))
    drain(source, stays, str(old))
    options = {"aggregates": {0: {"s": "sum(v)"}}, "new_checkpoint": str(new / "_spark"), "spark": home.spark}
    with pytest.raises(Invalid, match=r"looks for .*/old%20%23%20dir: let a link of a name without blanks.* lead to"):
        migrate_state(str(old), new, **options)
    (home.path / "link").symlink_to(old)
    report = migrate_state(str(home.path / "link"), new, **options)
    source.add([{"k": "a", "v": 10}])
    with home.backend(new.name, restore_from=report.savepoint) as backend:
        assert drain(source, backend.groupBy(df, "k").agg(F.sum("v").alias("s")), backend) == [("a", 11)]


def test_what_is_not_to_be_had_is_refused_before_anything_is_written(sparks_store: None, home: Home) -> None:
    source = home.stream("k string, j int, v int, t timestamp")
    source.add(rows_of(0))
    drain(source, source.read().groupBy(F.col("k")).count(), str(home.path / "count"))
    target = home.path / "saved"
    with pytest.raises(Invalid, match=r"operator 0 is an aggregation.*aggregates="):
        migrate_state(str(home.path / "count"), target, spark=home.spark)
    held = {"n": "count()", "total": "sum(v)"}
    with pytest.raises(Invalid, match=r"columns \(count bigint\), which are not those of n=count\(\), total=sum\(v\)"):
        migrate_state(str(home.path / "count"), target, aggregates={0: held}, spark=home.spark)
    with pytest.raises(Invalid, match="output mode 'latest' is not one of append, update, complete"):
        migrate_state(str(home.path / "count"), target, aggregates={0: held}, output_mode="latest", spark=home.spark)
    with pytest.raises(MissingState, match="no committed batch"):
        migrate_state(str(home.path / "nowhere"), target, spark=home.spark)
    with pytest.raises(Invalid, match="cannot open"):
        migrate_state("gopher://host/query", target, spark=home.spark)
    assert not target.exists()


def test_a_module_that_a_foreign_checkpoint_names_is_not_imported(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's parser in Python imports what the schema of a checkpoint says: whoever has written it would run code."""
    (home.path / "planted_type.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(home.path)
    planted = {"type": "udt", "pyClass": "planted_type.Value", "serializedClass": "", "sqlType": "long"}
    fields = [{"name": "key", "type": planted, "nullable": True, "metadata": {}}]
    parsed = home.spark._jsparkSession.parseDataType(json.dumps({"type": "struct", "fields": fields}))
    foreign = DataFrame(
        home.spark._jsparkSession.createDataFrame(home.spark._jvm.java.util.ArrayList(), parsed), home.spark
    )
    reader = OperatorReader(SimpleNamespace(read=_Reading(foreign)), "foreign", 0, 0, 8)
    with pytest.raises(CorruptData, match="holds the type 'udt'"):
        reader.state(SparkState("s", StateKind.VALUE, False))
    with pytest.raises(CorruptData, match="holds the type 'udt'"):
        reader.timers()


class _Reading:
    """A reader that gives one frame, whatever is asked for."""

    def __init__(self, frame: DataFrame) -> None:
        self._frame = frame

    def format(self, _: str) -> "_Reading":
        return self

    def option(self, *_: object) -> "_Reading":
        return self

    def options(self, **_: object) -> "_Reading":
        return self

    def load(self, _: str) -> DataFrame:
        return self._frame
