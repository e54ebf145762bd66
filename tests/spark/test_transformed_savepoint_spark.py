"""Savepoints made of others: rows changed by the user, other key groups, and queries that go on from them."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from home import Home
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from typer.testing import CliRunner

from dstl.checkpoint.report import SavepointReport
from dstl.checkpoint.savepoint.format import decode_savepoint
from dstl.cli.savepoint import app as savepoint_cli
from dstl.errors import CorruptData, Invalid, MissingState, ObjectExists
from dstl.spark import StateBackend, transform_savepoint

OUT = "k string, total string, elements string, flags string"


class Everything(StatefulProcessor):
    """A state of each kind by key."""

    TOTAL = "total long"

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", self.TOTAL)
        self.elements = handle.getListState("elements", "v long")
        self.flags = handle.getMapState("flags", "odd boolean", "n long")
        self.recent = handle.getValueState("recent", "v long", ttlDurationMs=1 << 45)
        self.sum = handle.getReducingState("sum", "v long", lambda a, b: (a[0] + b[0],))

    def add(self, total: Any, v: int) -> Any:
        return (total or 0) + v

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for v in sorted(row.v for row in rows):
            self.total.update((self.add((self.total.get() or (None,))[0], v),))
            self.elements.appendValue((v,))
            odd = (v % 2 == 1,)
            self.flags.updateValue(odd, ((self.flags.getValue(odd)[0] if self.flags.containsKey(odd) else 0) + 1,))
            self.recent.update((v,))
            self.sum.add((v,))
            self.handle.registerTimer(9_000_000_000_000 + v)
        yield Row(
            k=key[0],
            total=str(self.total.get()[0]),
            elements=",".join(str(v) for (v,) in self.elements.get()),
            flags=",".join(f"{odd}:{n}" for (odd,), (n,) in sorted(self.flags.iterator())),
        )


class Texts(Everything):
    """The same with a total that a stored number cannot become."""

    TOTAL = "total string"

    def add(self, total: Any, v: int) -> Any:
        return f"{total or ''}+{v}"


def rows_of_batch(batch: int) -> list[dict[str, Any]]:
    return [{"k": f"k{i % 7}" if i % 7 else None, "v": batch * 100 + i} for i in range(30)]


def values(key: str | None, *batches: int) -> list[int]:
    return sorted(row["v"] for batch in batches for row in rows_of_batch(batch) if row["k"] == key)


def run(spark: SparkSession, source: Any, location: Path, processor: Everything, **settings: Any) -> list[Any]:
    with StateBackend(str(location), spark=spark, **settings) as backend:
        df = backend.groupBy(source.read(), "k").transformWithState(
            processor, OUT, "append", "processingTime", name="everything"
        )
        found: list[Any] = source.collect(df, backend)
        if settings.get("restore_from") is None:
            backend.savepoint("mine")
    return found


def states_of(spark: SparkSession, location: str, *names: str) -> list[list[Any]]:
    """Return the rows of states of a savepoint, in their order within a key."""
    seen: dict[str, DataFrame] = {}

    def look(rows: DataFrame, name: str) -> DataFrame:
        seen[name] = rows
        return rows

    looks = {name: functools.partial(look, name=name) for name in names}
    transform_savepoint(location, f"{location}-{uuid4()}", {"everything": looks}, spark=spark)
    return [sorted((tuple(row) for row in seen[name].collect()), key=repr) for name in names]


@pytest.fixture(scope="module")
def saved(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A savepoint of a query of one batch."""
    home = Home(spark, tmp_path_factory.mktemp("saved"))
    source = home.stream()
    source.add(rows_of_batch(0))
    run(spark, source, home.path / "state", Everything(), parallelism=3)
    return f"{home.path}/state/savepoints/mine"


def test_a_query_goes_on_from_rows_that_were_changed_with_other_key_groups(home: Home, saved: str) -> None:
    def to_text(rows: DataFrame) -> DataFrame:
        return rows.withColumn("value", F.struct(F.concat(F.lit("<"), F.col("value.total"), F.lit(">")).alias("total")))

    def without_first_and_reversed(rows: DataFrame) -> DataFrame:
        return rows.where("position > 0").withColumn("position", 1000 - F.col("position"))

    def only_odd_and_a_new_key(rows: DataFrame) -> DataFrame:
        new = rows.sparkSession.createDataFrame([(("new",), (False,), (7,))], rows.schema)
        return rows.where("user_key.odd").union(new)

    report = transform_savepoint(
        saved,
        home.path / "other" / "savepoints" / "changed",
        {
            "everything": {
                "total": to_text,
                "elements": without_first_and_reversed,
                "flags": only_odd_and_a_new_key,
                "$timers": lambda rows: rows.where("expiry_ms % 2 = 0"),
            }
        },
        max_parallelism=37,
        spark=home.spark,
    )
    assert (report.batch_id, report.location) == (0, f"{home.path}/other/savepoints/changed")
    keys = [None, *(f"k{i}" for i in range(1, 7))]
    timers, recent, sums = states_of(home.spark, report.location, "$timers", "recent", "sum")
    assert timers == sorted(
        (((key,), 9_000_000_000_000 + v) for key in keys for v in values(key, 0) if v % 2 == 0), key=repr
    )
    # What was not changed has moved to other key groups whole.
    assert [(key, value) for key, value, _ in recent] == sorted(
        (((key,), (values(key, 0)[-1],)) for key in keys), key=repr
    )
    assert sums == sorted((((key,), (sum(values(key, 0)),)) for key in keys), key=repr)
    source = home.stream()
    source.add([*rows_of_batch(1), {"k": "new", "v": 2}])
    with pytest.raises(Invalid, match="max_parallelism=37"):
        home.backend(parallelism=2, restore_from=report.location)
    found = run(
        home.spark,
        source,
        home.path / "state",
        Texts(),
        restore_from=report.location,
        max_parallelism=37,
        parallelism=5,
        task_managers=2,
    )

    def expected(key: str | None) -> tuple[Any, ...]:
        before, now = values(key, 0), values(key, 1)
        odd = sum(v % 2 for v in before)
        flags = {False: len(now) - sum(v % 2 for v in now), True: odd + sum(v % 2 for v in now)}
        return (
            0,
            key,
            f"<{sum(before)}>" + "".join(f"+{v}" for v in now),
            ",".join(str(v) for v in [*reversed(before[1:]), *now]),
            ",".join(f"{odd}:{n}" for odd, n in flags.items() if n),
        )

    assert found == sorted([*map(expected, keys), (0, "new", "+2", "2", "False:8")], key=repr)


def test_the_rows_of_each_state_are_what_a_function_gets(spark: SparkSession, saved: str) -> None:
    keys = [None, *(f"k{i}" for i in range(1, 7))]
    totals, found, recent = states_of(spark, saved, "total", "elements", "recent")
    assert totals == sorted((((key,), (sum(values(key, 0)),)) for key in keys), key=repr)
    elements = sorted(((key,), at, (v,)) for key in keys[1:] for at, v in enumerate(values(key, 0)))
    assert sorted(row for row in found if row[0] != (None,)) == elements
    ends = {expiry for _, _, expiry in recent}
    assert len(ends) == 1
    assert min(ends) > 1 << 45


class Rules(StatefulProcessor):
    """Counts a key's rows, and shows the rules that all keys share."""

    def init(self, handle: Any) -> None:
        self.rules = handle.getBroadcastState("rules", "id string", "least long")
        self.n = handle.getValueState("n", "n long")

    def handleBroadcastRows(self, name: str, rows: Iterator[Any]) -> None:
        for row in rows:
            self.rules.updateValue((row.id,), (row.least,))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        n = (self.n.get() or (0,))[0] + sum(1 for _ in rows)
        self.n.update((n,))
        yield Row(k=key[0], n=n, rules=str(sorted((rule, least) for (rule,), (least,) in self.rules.iterator())))


def timed(df: DataFrame) -> DataFrame:
    return df.withColumn("at", F.timestamp_seconds("v")).withWatermark("at", "10 seconds")


def of_each_kind(backend: StateBackend, df: DataFrame) -> DataFrame:
    """One query with an operator of each kind, whose rows are JSON behind their operator's name."""
    rows = timed(df)
    gaps = F.session_window("at", F.expr("IF(k IS NULL, '2 seconds', '9 seconds')"))
    rules, others = df.where("k = 'k1'").selectExpr("k || v as id", "v as least"), df.where("k is null or k != 'k1'")
    frames = {
        "windows": backend.groupBy(rows, "k", F.window("at", "20 seconds")).count(outputMode="append", name="windows"),
        "alone": backend.groupBy(rows, F.window("at", "5 seconds")).sum("v", outputMode="append", name="alone"),
        "sessions": backend.groupBy(rows, "k", gaps).count(outputMode="append", name="sessions"),
        "once": backend.dropDuplicates(rows.select("k", F.window("at", "5 seconds").alias("w")), name="once"),
        "within": backend.dropDuplicatesWithinWatermark(rows, ["k"], name="within").select("k"),
        "rules": backend.groupBy(others, "k").transformWithState(
            Rules(), "k string, n long, rules string", "append", "none", broadcast={"rules": rules}, name="rules"
        ),
    }
    shown = [each.select(F.lit(name).alias("operator"), F.to_json(F.struct("*"))) for name, each in frames.items()]
    return functools.reduce(DataFrame.union, shown)


@pytest.mark.usefixtures("one_partition", "same_batches")
def test_operators_of_each_kind_go_on_with_other_key_groups_as_if_they_had_not_stopped(home: Home) -> None:
    def rows(batch: int) -> list[dict[str, Any]]:
        many = [{"k": f"k{i % 5}" if i % 5 else None, "v": batch * 15 + i} for i in range(25)]
        return [*many, {"k": "x", "v": batch * 15 + 24}]

    def collected(place: str, parallelism: int, **settings: Any) -> list[Any]:
        with home.backend(place, parallelism=parallelism, **settings) as backend:
            found: list[Any] = source.collect(of_each_kind(backend, source.read()), backend)
            if not settings:
                saved.append(backend.savepoint(f"after-{len(saved)}"))
        return found

    source, saved = home.stream(), list[SavepointReport]()
    for batch in (0, 1):
        source.add(rows(batch))
    assert collected("old", 1) == collected("plain", 2)
    report = transform_savepoint(
        saved[0].location, home.path / "new/savepoints/rekeyed", max_parallelism=50, spark=home.spark
    )
    assert report.entries == saved[0].entries > 0
    source.carry_over(home.path / "old", home.path / "new")
    for batch in (2, 4):
        source.add(rows(batch))
    after = collected("new", 3, max_parallelism=50, restore_from=report.location)
    assert after == collected("plain", 2)
    assert {row[1] for row in after} == {"windows", "alone", "sessions", "once", "within", "rules"}


def test_operators_that_are_not_named_are_copied_byte_by_byte(home: Home) -> None:
    source = home.stream()
    source.add(rows_of_batch(0))
    with home.backend(parallelism=2) as backend:
        once = backend.dropDuplicates(source.read(), ["k", "v"], name="seen")
        df = backend.groupBy(once, "k").transformWithState(
            Everything(), OUT, "append", "processingTime", name="everything"
        )
        source.collect(df, backend)
        saved = backend.savepoint("mine")

    def files(name: str, operator: str) -> list[Any]:
        descriptor = decode_savepoint(
            (home.path / f"state/savepoints/{name}/savepoint.dstl").read_bytes(), name, "here"
        )
        return [(each.parts, each.checksum) for each in descriptor.files if each.operator == operator]

    changes = {
        "everything": {"total": lambda rows: rows.withColumn("value", F.struct(F.lit(1).cast("long").alias("total")))}
    }
    transform_savepoint(saved.location, f"{home.path}/state/savepoints/changed", changes, spark=home.spark)
    transform_savepoint(saved.location, f"{home.path}/state/savepoints/same", spark=home.spark)
    assert files("changed", "seen") == files("mine", "seen") == files("same", "seen") != []
    assert files("changed", "everything") != files("mine", "everything") == files("same", "everything")
    done = CliRunner().invoke(savepoint_cli, ["verify", f"{home.path}/state", "changed"])
    assert done.exit_code == 0, done.output


def raises(*_: Any) -> Any:
    raise LookupError("who is that?")


WRONG: dict[str, tuple[str, Any, str]] = {
    "a function that raises": (
        "total",
        raises,
        r"(?s)state 'total' of operator 'everything': its function raised LookupError: who is that\?.*, in raises\n",
    ),
    "a column that is not there": (
        "total",
        lambda rows: rows.select("nope"),
        "its function raised AnalysisException: ",
    ),
    "a function of rows that raises": (
        "total",
        lambda rows: rows.withColumn("value", F.struct(F.udf(raises, "long")("value.total").alias("total"))),
        r"(?s)cannot make the states of 'wrong': LookupError: who is that\?\nTraceback .*, in raises\n",
    ),
    "no such state": (
        "nope",
        lambda rows: rows,
        "operator 'everything' has no state 'nope'; it has '\\$timers', 'total', ",
    ),
    "no function": ("total", "value * 2", "'value \\* 2' is no function of a DataFrame"),
    "no DataFrame": ("total", lambda rows: rows.count(), "returned 7, not a DataFrame"),
    "a column less": (
        "elements",
        lambda rows: rows.drop("position"),
        r"\(key, value\); its rows have \(key, position, value\)",
    ),
    "no struct": ("total", lambda rows: rows.withColumn("value", F.lit(1)), "column value is int, not a struct"),
    "another key": (
        "total",
        lambda rows: rows.withColumn("key", F.struct(F.lit(1).alias("k"))),
        "its key is struct<k:int>, and all states of the operator have the key struct<k:string>",
    ),
    "two rows of one key": (
        "total",
        lambda rows: rows.union(rows.limit(2)),
        "state 'total': two rows have the same key",
    ),
    "two elements in one place": (
        "elements",
        lambda rows: rows.withColumn("position", F.lit(0)),
        "state 'elements': two rows have the same key",
    ),
    "no value": (
        "total",
        lambda rows: rows.withColumn("value", F.when(F.col("key.k").isNotNull(), F.col("value"))),
        "state 'total': a row has null as its value",
    ),
    "a negative place": (
        "elements",
        lambda rows: rows.withColumn("position", -F.col("position")),
        "state 'elements': position -[0-9]+ is not one from 0 to 4294967295",
    ),
    "no expiry": (
        "$timers",
        lambda rows: rows.withColumn("expiry_ms", F.lit(None).cast("long")),
        "null as its user key",
    ),
    "a type that cannot be kept": (
        "flags",
        lambda rows: rows.withColumn("user_key", F.struct(F.expr("collate('a', 'UNICODE_CI')").alias("u"))),
        "collated by UNICODE_CI",
    ),
    "an error of Spark's": (
        "total",
        lambda rows: rows.withColumn("value", F.struct(F.expr("1 div (value.total - value.total)").alias("total"))),
        "Spark cannot make the states of 'wrong': .*DIVIDE_BY_ZERO",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_a_state_cannot_have_are_refused_and_nothing_is_written(home: Home, saved: str, name: str) -> None:
    state, change, message = WRONG[name]
    with pytest.raises(Invalid, match=message):
        transform_savepoint(
            saved, home.path / "savepoints" / "wrong", {"everything": {state: change}}, spark=home.spark
        )
    assert [each for each in home.path.rglob("*") if each.is_file()] == []


def test_what_cannot_be_transformed_is_named(home: Home, saved: str) -> None:
    target = home.path / "savepoints" / "new"

    def same(rows: DataFrame) -> DataFrame:
        return rows

    with pytest.raises(Invalid, match="has no operator 'nobody'; it has 'everything'"):
        transform_savepoint(saved, target, {"nobody": {"total": same}}, spark=home.spark)
    with pytest.raises(MissingState, match="has no savepoint 'nothing'"):
        transform_savepoint(home.path / "savepoints" / "nothing", target, spark=home.spark)
    with pytest.raises(Invalid, match="LOCATION/savepoints/NAME"):
        transform_savepoint(saved, home.path, spark=home.spark)
    with pytest.raises(Invalid, match="max_parallelism"):
        transform_savepoint(saved, target, max_parallelism=40_000, spark=home.spark)
    with pytest.raises(Invalid, match="memory://"):
        transform_savepoint(saved, "memory://x/savepoints/new", spark=home.spark)
    with pytest.raises(ObjectExists, match="'mine'"):
        transform_savepoint(saved, saved, {"everything": {"total": same}}, spark=home.spark)
    copy = home.path / "copy"
    shutil.copytree(Path(saved).parents[1], copy)
    (file,) = (copy / "savepoints" / "mine").rglob("*.base")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    for states in ({}, {"everything": {"total": same}}):
        with pytest.raises(CorruptData, match=r"\.base"):
            transform_savepoint(f"{copy}/savepoints/mine", target, states, spark=home.spark)
    assert not target.exists()


def test_the_command_line_makes_one_with_functions_of_a_file(home: Home, saved: str) -> None:
    location, _, name = saved.rpartition("/savepoints/")
    (home.path / "fix.py").write_text(
        "from pyspark.sql import functions as F\n"
        "def doubled(rows):\n"
        "    return rows.withColumn('value', F.struct((F.col('value.total') * 2).alias('total')))\n"
    )
    (home.path / "wrong.py").write_text("doubled")

    def transform(*more: str) -> Any:
        return CliRunner().invoke(savepoint_cli, ["transform", location, name, "new", "--to", str(home.path), *more])

    change = f"--change=everything:total={home.path}/fix.py:doubled"
    done = transform(change, "--max-parallelism=40", "--json")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["location"] == f"{home.path}/savepoints/new"
    (after,) = states_of(home.spark, made["location"], "total")
    keys = [None, *(f"k{i}" for i in range(1, 7))]
    assert after == sorted((((key,), (2 * sum(values(key, 0)),)) for key in keys), key=repr)
    assert (
        decode_savepoint((home.path / "savepoints/new/savepoint.dstl").read_bytes(), "new", "here").max_parallelism
        == 40
    )
    assert "ObjectExists" in transform(change).output
    for wrong, said in (
        (f"everything:total={home.path}/fix.py:tripled", "fix.py has no function 'tripled'"),
        (f"total={home.path}/fix.py:doubled", "does not begin with OPERATOR:STATE"),
        (f"everything:total={home.path}/none.py:doubled", "none.py cannot be read: [Errno 2] No such file or"),
        (f"everything:total={home.path}/wrong.py:doubled", "wrong.py, which is run for its functions, raised NameErr"),
        ("everything:total=doubled", "not of the form FILE.py:FUNCTION"),
    ):
        refused = transform(f"--change={wrong}")
        assert (refused.exit_code, said in refused.output) == (2, True), refused.output
