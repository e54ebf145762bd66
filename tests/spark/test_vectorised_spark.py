"""Vectorised operators through Spark: equal to Spark's own aggregates, restartable, readable, and refused early."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from home import Home
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as F

from dstl.checkpoint.report import CheckpointReport
from dstl.errors import Invalid

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


def test_nulls_nans_and_the_types_of_results_are_sparks_own_over_restarts_and_other_parallelism(home: Home) -> None:
    source = home.stream("i long")
    # Group 0 has nulls only, group 1 NaNs (where there are any) and nulls, the others some of everything.
    nans = {"x": "double('NaN')", "f": "float('NaN')"}
    columns = [
        f"case when i % 5 = 0 or i % 3 = 1 then null when i % 5 = 1 then {nans.get(name, sql)} else {sql} end {name}"
        for name, sql in (NUMBERS | ORDERED).items()
    ]
    both = ("count", "min", "max", "count_distinct", "min_by", "max_by")
    of = {f"{f}_{name}": (f, name) for name in NUMBERS for f in (*both, "sum", "mean")}
    of |= {f"{f}_{name}": (f, name) for name in ORDERED for f in both}
    of |= {f"{f}_b": (f, "b") for f in ("bool_and", "bool_or", "every", "some")}
    aggregates = [F.count_distinct("v", "t").alias("pairs"), F.count(F.lit(1)).alias("rows")]
    aggregates += [getattr(F, f)(*(name,) * (1 + f.endswith("_by"))).alias(alias) for alias, (f, name) in of.items()]
    got: dict[Any, tuple[Any, ...]] = {}
    for batch, parallelism in enumerate((3, 2)):
        source.add([{"i": i} for i in range(batch * 30, batch * 30 + 30)])
        with home.backend(parallelism=parallelism, task_managers=1 + (batch > 0)) as backend:
            ours = backend.groupBy(source.read().selectExpr("if(i % 5 = 4, null, i % 5) k", *columns), "k")
            df = ours.agg(*aggregates, F.approx_count_distinct("v").alias("kinds"), name="stats")
            got |= {row[1]: row[2:] for row in source.collect(df, backend, "update")}
            held = backend.read_state(home.spark, "aggregates").select("key.k", "value.sum_v").collect()
    everything = home.spark.read.schema("i long").json(str(source.directory / "in"))
    theirs = everything.selectExpr("if(i % 5 = 4, null, i % 5) k", *columns).groupBy("k").agg(*aggregates)
    assert [(f.name, f.dataType) for f in df.schema][:-1] == [(f.name, f.dataType) for f in theirs.schema]
    want = {row[0]: tuple(row)[1:] for row in theirs.collect()}
    assert want.keys() == got.keys() == {0, 1, 2, 3, None}
    names = ("pairs", "rows", *of)
    for key, row in want.items():
        for alias, a, b in zip(names, row, got[key][:-1], strict=True):
            assert repr(a) == repr(b), (key, alias)
        assert abs(got[key][-1] - row[names.index("count_distinct_v")]) <= 2
    assert {row.k: row.sum_v for row in held} == {key: row[names.index("sum_v")] for key, row in want.items()}


def test_nested_values_are_collected_and_told_apart_as_by_spark(home: Home) -> None:
    """Arrow casts no null struct with a NOT NULL field within an array; a map's entries have no order."""
    source = home.stream("i long")
    source.add([{"i": i} for i in range(20)])
    columns = (
        "i % 2 k",
        "array(if(i % 3 = 0, null, named_struct('n', coalesce(i % 4, 0)))) a",
        "if(i % 4 < 2, map('a', 1, 'b', null), map('b', null, 'a', 1)) m",
    )
    aggregates = [f("a").alias(f.__name__) for f in (F.collect_list, F.collect_set, F.count_distinct)]
    aggregates.append(F.collect_list("m").alias("all_maps"))
    everything = home.spark.read.schema("i long").json(str(source.directory / "in")).selectExpr(*columns)
    # Before 4.3 Spark itself takes two orders of the same entries for two maps.
    sorted_maps = F.count_distinct(F.array_sort(F.map_entries("m")))
    want = {row[0]: row[1:] for row in everything.groupBy("k").agg(*aggregates, sorted_maps).collect()}
    with home.backend(parallelism=1) as backend:
        ours = backend.groupBy(source.read().selectExpr(*columns), "k").agg(*aggregates, F.count_distinct("m"))
        got = {row[1]: row[2:] for row in source.collect(ours, backend, "update")}
    assert [row[-1] for row in got.values()] == [1, 1]
    for key in (0, 1):
        for one, other in zip(got[key], want[key], strict=True):
            assert one == other if isinstance(one, int) else sorted(map(repr, one)) == sorted(map(repr, other))


def test_the_short_calls_are_sparks_own(home: Home) -> None:
    """Names, types, which columns they take, and what they return; `sum` of a text is cast as Spark casts it."""
    source = home.stream("k string, v long, x double")
    source.add([{"k": "a", "v": 1, "x": 0.5}, {"k": "a", "v": 2, "x": None}, {"k": None, "v": 5, "x": 2.5}])
    everything = home.spark.read.schema("k string, v long, x double").json(str(source.directory / "in"))
    calls: list[Callable[[Any], Any]] = [
        lambda grouped: grouped.count(),
        lambda grouped: grouped.sum(),
        lambda grouped: grouped.avg("v", "x"),
        lambda grouped: grouped.mean("v"),
        lambda grouped: grouped.min("x"),
        lambda grouped: grouped.max(),
        lambda grouped: grouped.agg({"v": "max", "*": "count"}),
        lambda grouped: grouped.agg(F.sum("k"), F.first("v")),
    ]
    with home.backend(parallelism=1) as backend:
        ours = [call(backend.groupBy(source.read(), "k")) for call in calls]
        theirs = [call(everything.groupBy("k")) for call in calls]
        for one, other in zip(ours, theirs, strict=True):
            assert [(f.name, f.dataType) for f in one.schema] == [(f.name, f.dataType) for f in other.schema]
    with home.backend("one", parallelism=1) as backend:
        got = source.collect(backend.groupBy(source.read(), "k").sum(), backend, "update")
    assert sorted(map(repr, (row[1:] for row in got))) == sorted(repr(tuple(row)) for row in theirs[1].collect())


def sessions(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    """Counts the events of each key; at ten the session is over and its state goes."""
    seen = states["events"].fill_null(0).to_numpy() + np.bincount(rows["__group"].to_numpy(), minlength=len(keys))
    done = seen >= 10
    new = pa.table({"events": seen, "name": keys["k"], "__exists": ~done})
    return new, pa.table({"k": keys["k"], "events": seen}).filter(pa.array(done))


def test_a_function_over_states_is_restartable_and_its_state_readable(home: Home) -> None:
    source = home.stream()
    rows = [{"k": f"k{i % 4}", "v": i} for i in range(16)] + [{"k": None, "v": 0}]
    reports: list[CheckpointReport] = []
    for _ in range(3):
        source.add(rows)
        with home.backend(parallelism=2) as backend:
            backend.add_listener(lambda report: isinstance(report, CheckpointReport) and reports.append(report))
            source.drain(
                backend.groupBy(source.read(), "k").mapStates(
                    sessions, "k string, events long", "events long, name string", name="sessions"
                ),
                backend,
            )
            state = backend.read_state(home.spark, "state", operator="sessions")
            held = {row.key.k: row.value.events for row in state.collect()}
    assert source.output("k string, events long") == [(f"k{i}", 12) for i in range(4)]
    assert held == {None: 3}
    assert [report.batch_id for report in reports] == [0, 1, 2]


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_a_sum_of_integers_wraps_around_without_ansi_as_sparks_does(ansi: str, home: Home, set_conf: Any) -> None:
    """Within a batch, over batches, and back."""
    set_conf({"spark.sql.ansi.enabled": ansi})
    most = 2**63 - 1
    batches = [[("a", most), ("a", 1), ("b", most)], [("b", 5), ("c", -most)], [("c", -2), ("b", -7)]]
    source = home.stream()
    for batch in batches:
        source.add([{"k": k, "v": v} for k, v in batch])
    with home.backend(parallelism=2) as backend:
        sums = backend.groupBy(source.read(), "k").sum("v")
        if ansi == "true":
            with pytest.raises(StreamingQueryException, match=r"a sum does not fit int64: add up a wider type"):
                source.collect(sums, backend, "update")
            return
        got = dict(row[1:] for row in source.collect(sums, backend, "update"))
    everything = home.spark.createDataFrame([row for batch in batches for row in batch], "k string, v long")
    assert got == dict(everything.groupBy("k").sum("v").collect())


def test_decimals_that_do_not_fit_are_null_without_ansi_as_spark_s_are(home: Home, set_conf: Any) -> None:
    """They ended the query with ANSI off too, at each start."""
    set_conf({"spark.sql.ansi.enabled": "false", "spark.sql.shuffle.partitions": "2"})
    most = 10**36 - 1
    batches = [[("a", most), ("b", 5), ("c", most), ("c", 1)], [("a", 1), ("b", None)], [("a", -most), ("b", 1)]]
    source = home.stream("k string, v decimal(38, 2)")
    for batch in batches:
        source.add([{"k": k, "v": v} for k, v in batch])
    aggregates = F.sum("v").alias("total"), F.avg("v").alias("middle")
    with home.backend(parallelism=2) as backend:
        got = source.collect(backend.groupBy(source.read(), "k").agg(*aggregates), backend, "update")
    assert got == source.collect(source.read().groupBy("k").agg(*aggregates), "native", "update")
    assert len([row for row in got if row[2] is None]) == 3


def test_an_aggregate_that_collects_a_void_is_refused_where_it_is_defined(home: Home) -> None:
    """Arrow has no list of it whose elements may not be null, and said so in its own words."""
    rows = home.stream().read().selectExpr("k", "null v", "array() a")
    with home.backend(parallelism=1) as backend:
        for aggregate in (F.collect_list("v"), F.collect_set("v"), F.count_distinct("v"), F.collect_list("a")):
            with pytest.raises(Invalid, match=r"column '\w+' is array<void>, which .* cast or drop it"):
                backend.groupBy(rows, "k").agg(aggregate)
