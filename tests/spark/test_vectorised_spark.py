"""Vectorised operators through Spark: equal to Spark's own aggregates, restartable, readable, and refused early."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dstl.checkpoint.service import CheckpointReport
from dstl.errors import Invalid, UserCodeError
from dstl.spark import StateBackend, approx_count_distinct, count, first, last, max, mean, min, sum

pytestmark = pytest.mark.spark

# Workers cannot import a test module: its functions travel by value, as those of a user's __main__ do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "a string, b long, v long, x double, t timestamp, d decimal(10,2)"
NAMES = "rows", "n", "total", "low", "high", "middle", "worth", "latest", "kinds"


def rows_of_batch(batch: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(60):
        row = {"a": f"a{i % 5}" if i % 7 else None, "b": i % 3 if i % 11 else None, "x": (i * 37 % 50) / 4 - batch}
        row |= {"v": i * batch - 20 if i % 4 else None, "d": f"{i}.25", "t": f"2024-01-0{1 + batch} 00:{i:02d}:00"}
        found.append(row)
    return found


def aggregated(backend: StateBackend, df: Any, **options: Any) -> Any:
    aggregates = {
        "rows": count(),
        "n": count("v"),
        "total": sum("v"),
        "low": min("x"),
        "high": max("t"),
        "middle": mean("x"),
        "worth": sum("d"),
        "latest": last("t"),
        "kinds": approx_count_distinct("v"),
    }
    return backend.aggregate(df, by=["a", "b"], **aggregates, **options)


def test_aggregates_equal_sparks_own_over_restarts_and_other_parallelism(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream(SCHEMA)
    for batch, parallelism in enumerate((3, 3, 2)):
        source.add(rows_of_batch(batch))
        many = 1 if batch == 0 else 2
        with StateBackend(str(tmp_path / "state"), parallelism=parallelism, task_managers=many, spark=spark) as backend:
            source.drain(aggregated(backend, source.read(), name="stats"))
    everything = spark.read.schema(SCHEMA).json(str(source.directory / "in"))
    expected = everything.groupBy("a", "b").agg(
        F.count(F.lit(1)).alias("rows"),
        F.count("v").alias("n"),
        F.sum("v").alias("total"),
        F.min("x").alias("low"),
        F.max("t").alias("high"),
        F.mean("x").alias("middle"),
        F.sum("d").alias("worth"),
        F.max("t").alias("latest"),
        F.count_distinct("v").alias("kinds"),
    )
    out = spark.read.schema(expected.schema).json(str(source.directory / "out"))
    per_key = expected.count()
    assert out.count() == 3 * per_key
    # Update mode: of each key the last result is the one with the most rows.
    newest = out.groupBy("a", "b").agg(F.max_by(F.struct(*NAMES), "rows").alias("s")).select("a", "b", "s.*")
    found = {tuple(row)[:2]: tuple(row)[2:-1] for row in newest.collect()}
    assert found == {tuple(row)[:2]: tuple(row)[2:-1] for row in expected.collect()}
    kinds = {tuple(row)[:2]: row.kinds for row in newest.collect()}
    for row in expected.collect():
        assert abs(kinds[row.a, row.b] - row.kinds) <= 2


NUMBERS = {
    "v": "i * 1000003",
    "s": "cast(i as smallint)",
    "x": "if(i % 9 = 0, double('NaN'), i / 4 - 10)",
    "f": "cast(if(i % 9 = 0, float('NaN'), i / 4) as float)",
    "d": "cast(i as decimal(10, 2)) / -3",
    "w": "cast(i as decimal(38, 6)) * 10000000000000000 / 7",
    "n38": "cast(i * i as decimal(38, 0))",
}
ORDERED = {
    "b": "i % 2 = 0",
    "t": "concat('ä', i)",
    "bin": "cast(concat('b', i) as binary)",
    "day": "date_add(date'1969-12-01', cast(i as int))",
    "ts": "timestamp'1969-12-31 23:59:59' + make_interval(0, 0, 0, 0, i)",
    "ntz": "timestamp_ntz'1969-12-31 23:59:59' + make_interval(0, 0, 0, 0, i)",
    "dt": "make_dt_interval(0, 0, i - 20)",
}


def test_nulls_nans_and_the_types_of_results_are_sparks_own(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream("i long")
    for batch in range(3):
        source.add([{"i": i} for i in range(batch * 20, batch * 20 + 20)])
    # Group 0 has nulls only, group 1 NaNs (where there are any) and nulls, the others some of everything.
    nans = {"x": "double('NaN')", "f": "float('NaN')"}
    columns = [
        f"case when i % 5 = 0 or i % 3 = 1 then null when i % 5 = 1 then {nans.get(name, sql)} else {sql} end {name}"
        for name, sql in (NUMBERS | ORDERED).items()
    ]
    of = {f"{f.__name__}_{name}": (f, name) for name in NUMBERS for f in (count, sum, mean, min, max)}
    of |= {f"{f.__name__}_{name}": (f, name) for name in ORDERED for f in (count, min, max)}
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        df = source.read().selectExpr("i % 5 k", *columns)
        ours = backend.aggregate(df, by="k", **{alias: f(name) for alias, (f, name) in of.items()})
        got = {row[1]: row[2:] for row in sorted(source.collect(ours, "ours", "update"), key=lambda row: row[0])}
        schema = ours.schema
        held = backend.read_state(spark, "aggregates").select("key.k", "value.sum_v").collect()
    everything = spark.read.schema("i long").json(str(source.directory / "in")).selectExpr("i % 5 k", *columns)
    theirs = everything.groupBy("k").agg(
        *(getattr(F, f.__name__)(name).alias(alias) for alias, (f, name) in of.items())
    )
    assert [(f.name, f.dataType) for f in schema] == [(f.name, f.dataType) for f in theirs.schema]
    want = {row[0]: tuple(row)[1:] for row in theirs.collect()}
    assert want.keys() == got.keys()
    for key, row in want.items():
        for alias, a, b in zip(of, row, got[key], strict=True):
            assert repr(a) == repr(b), (key, alias)
    assert {row.k: row.sum_v for row in held} == {key: row[list(of).index("sum_v")] for key, row in want.items()}


def sessions(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    """Counts the events of each key; at ten the session is over and its state goes."""
    seen = states["events"].fill_null(0).to_numpy() + np.bincount(rows["__group"].to_numpy(), minlength=len(keys))
    done = seen >= 10
    new = pa.table({"events": seen, "name": keys["k"], "__exists": ~done})
    return new, pa.table({"k": keys["k"], "events": seen}).filter(pa.array(done))


def test_a_function_over_states_is_restartable_and_its_state_readable(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    rows = [{"k": f"k{i % 4}", "v": i} for i in range(16)] + [{"k": None, "v": 0}]
    reports: list[CheckpointReport] = []
    for _ in range(3):
        source.add(rows)
        with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
            backend.add_listener(lambda report: isinstance(report, CheckpointReport) and reports.append(report))
            source.drain(
                backend.map_states(
                    source.read(),
                    by="k",
                    state="events long, name string",
                    output="k string, events long",
                    function=sessions,
                    name="sessions",
                )
            )
            state = backend.read_state(spark, "state", operator="sessions")
            held = {row.key.k: row.value.events for row in state.collect()}
    assert source.output("k string, events long") == [(f"k{i}", 12) for i in range(4)]
    assert held == {None: 3}
    assert [report.batch_id for report in reports] == [0, 1, 2]


def failing(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    raise RuntimeError("no luck with these")


def test_an_error_in_the_function_reaches_the_user_with_its_traceback(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream()
    source.add([{"k": "a", "v": 1}])
    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        rows = backend.map_states(source.read(), by="k", state="n long", output="k string", function=failing)
        with pytest.raises(StreamingQueryException) as raised:
            source.drain(rows)
    text = str(raised.value)
    assert UserCodeError.__name__ in text
    assert "no luck with these" in text
    assert "in failing" in text
    assert "operator-1" in text


def test_what_cannot_work_is_refused_when_the_query_is_defined(
    spark: SparkSession, stream: Callable[..., Any], tmp_path: Path
) -> None:
    source = stream("k string, v long, m array<int>")
    source.add([{"k": "a", "v": 1}])
    df = source.read()

    def keep(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        return None, None

    def define(**changes: Any) -> Any:
        given: dict[str, Any] = {"by": "k", "state": "n long", "output": "k string", "function": keep}
        return backend.map_states(df, **(given | changes))

    with StateBackend(str(tmp_path / "state"), parallelism=2, spark=spark) as backend:
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: backend.aggregate(df, by="x", n=count()), "there is no column 'x' to group by"),
            (lambda: backend.aggregate(df, by="k"), "there is nothing to aggregate"),
            (lambda: backend.aggregate(df, by="k", n=1), "n= is 1, not an aggregate"),  # type: ignore[arg-type]
            (lambda: backend.aggregate(df, by="k", k=count()), "cannot have a column 'k'"),
            (lambda: backend.aggregate(df, by="k", n=sum("k")), r"sum\(\) takes numbers, not string"),
            (lambda: backend.aggregate(df, by="k", n=max("m")), "a type with an order, not array<int>"),
            (lambda: backend.aggregate(df, by="k", n=first("nothing")), "names column 'nothing'"),
            (lambda: backend.aggregate(df, by="k", n=approx_count_distinct("v", rsd=2)), "rsd=2 is not in"),
            (lambda: backend.aggregate(spark.range(3), by="id", n=count()), "is not streaming"),
            (
                lambda: backend.aggregate(df, by="k", n=count(), ttl_ms=0),
                "ttl_ms=0 is no number of milliseconds above 0",
            ),
            (lambda: define(ttl_ms="1 hour"), "ttl_ms='1 hour' is no number of milliseconds"),
            (lambda: define(state="no such type"), "the state schema cannot be used"),
            (lambda: define(function=lambda rows: None), r"called as function\(rows, keys, states\)"),
            (lambda: define(state="__exists boolean"), "__exists is taken by DSTL"),
            (lambda: define(output="x interval year to month"), "the output's column 'x' is interval year to month"),
        ]
        for attempt, message in cases:
            with pytest.raises(Invalid, match=message):
                attempt()
        assert repr(backend).endswith("operators=[])")
