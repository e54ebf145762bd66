"""Vectorised operators without Spark: aggregates against a plain loop, and what a function over states may do."""

from __future__ import annotations

import decimal
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from dstl.errors import Invalid, UserCodeError
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregate_functions import Mean
from dstl.state.vectorised.aggregation import Aggregate, gathered
from dstl.state.vectorised.aggregation_runner import AggregationRunner
from dstl.state.vectorised.map_states import MapStates, MapStatesRunner
from worlds.ddl import parse_ddl
from worlds.memory_source import MemorySource
from worlds.runner import plain_aggregation

KEY = StructType([StructField("k", StringType())])
KEY_GROUP = "__dstl_key_group"


class Job:
    """One partition of an operator over several micro-batches; state is kept as change batches leave it."""

    def __init__(self, make: Callable[..., Any], keys: StructType, inputs: StructType, **options: Any) -> None:
        self.make, self.keys, self.inputs, self.options = make, keys, inputs, options
        self.source = MemorySource()
        self.registry = StateRegistry(keys)
        self.changes: list[pa.RecordBatch] = []
        self.batch = 0
        self.now_ms = 1000

    def run(self, rows: list[dict[str, Any]], rows_per_batch: int = 3) -> list[dict[str, Any]]:
        schema = arrow_schema(self.inputs)
        table = pa.Table.from_pylist(rows, schema=schema)
        groups = [
            hash_of(tuple(repr(row[name]).replace("-0.0", "0.0") for name in self.keys.names)) % 8 for row in rows
        ]
        table = table.append_column(KEY_GROUP, pa.array(groups, pa.int32()))
        self.changes = []
        registry = StateRegistry.from_wire(self.registry.to_wire())
        runner = self.make(self.keys, self.inputs, operator="op", registry=registry)
        self.registry = registry
        task = TaskInput(
            source=self.source,
            send=self.changes.append,
            sequence=self.batch,
            processing_time_ms=self.now_ms,
            **self.options,
        )
        self.batch += 1
        output = list(runner.run(iter(table.to_batches(max_chunksize=rows_per_batch)), task))
        for part in self.changes:
            groups = part.column("key_group").to_pylist()
            assert groups == sorted(groups)
            self.source.apply(part)
        return [row for each in output for row in each.to_pylist()]

    def content(self, state: int = 0) -> dict[bytes, tuple[Any, ...]]:
        codec = ValueCodec("state", self.registry.descriptors[state].value_schemas)
        return {key: codec.decode(value) for (key, _), value in self.source.content(state).items()}


def aggregates(held: Mapping[str, Aggregate], ttl_ms: int = 0) -> Callable[..., AggregationRunner]:
    def make(keys: StructType, inputs: StructType, **options: Any) -> AggregationRunner:
        return AggregationRunner(plain_aggregation(keys, inputs, held, ttl_ms), **options)

    return make


def mapped(function: Any, state: StructType, output: StructType, ttl_ms: int = 0) -> Callable[..., MapStatesRunner]:
    def make(keys: StructType, inputs: StructType, *, operator: str, **options: Any) -> MapStatesRunner:
        of = MapStates(
            name=operator,
            function=function,
            key_schema=keys,
            input_schema=inputs,
            output_schema=output,
            state_schema=state,
            ttl_ms=ttl_ms,
        )
        return MapStatesRunner(of, **options)

    return make


def test_more_text_than_one_array_takes_is_refused_with_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, Arrow's own error about offsets ended the query, at every restart alike."""
    inputs = StructType([*KEY.fields, StructField("v", StringType())])
    job = Job(aggregates({"last": Aggregate("last", "v")}), KEY, inputs)
    rows = [{"k": str(i % 3), "v": "x" * 100} for i in range(10)]
    monkeypatch.setattr("dstl.state.vectorised.key_codes._MOST_BYTES", 1 << 10)
    with pytest.raises(Invalid, match=r"column 'v' has .* in one partition.*larger parallelism"):
        job.run(rows)
    with pytest.raises(Invalid, match=r"column 'v' .*larger parallelism"):
        gathered(pa.Table.from_pylist(rows, arrow_schema(inputs)).to_batches(max_chunksize=3), inputs)
    monkeypatch.setattr("dstl.state.vectorised.key_codes._MOST_BYTES", 1 << 12)
    assert len(job.run(rows)) == 3


def hash_of(parts: tuple[str, ...]) -> int:
    return sum(ord(each) * 31 for part in parts for each in part)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b)) or a == b
    return bool(a == b) and type(a) is type(b)


def nan_last(value: Any) -> Any:
    return (1, 0.0) if isinstance(value, float) and math.isnan(value) else (0, value)


def expected_of(name: str, values: list[Any]) -> Any:
    """What Spark says of all values of one key, oldest first."""
    some = [value for value in values if value is not None]
    if name == "count":
        return len(some)
    if name in ("first", "last"):
        return values[0 if name == "first" else -1]
    if name in ("first_some", "last_some"):
        return (some[0 if name == "first_some" else -1]) if some else None
    if not some:
        return None
    if name == "mean":
        return sum(float(value) for value in some) / len(some)
    return {"sum": sum, "min": lambda v: min(v, key=nan_last), "max": lambda v: max(v, key=nan_last)}[name](some)


KINDS: dict[str, tuple[DataType, st.SearchStrategy[Any], tuple[str, ...]]] = {
    "short": (ShortType(), st.integers(-300, 300), ("sum", "mean", "min", "max")),
    "long": (LongType(), st.integers(-(1 << 40), 1 << 40), ("sum", "mean", "min", "max")),
    "double": (DoubleType(), st.floats(-1e6, 1e6) | st.just(math.nan), ("sum", "mean", "min", "max")),
    "decimal": (
        DecimalType(20, 2),
        st.integers(-(10**19), 10**19).map(lambda n: decimal.Decimal(n).scaleb(-2, decimal.Context(40))),
        ("sum", "min", "max"),
    ),
    "string": (StringType(), st.text(max_size=2), ("min", "max")),
    "date": (DateType(), st.dates(), ("min", "max")),
    "boolean": (BooleanType(), st.booleans(), ("min", "max")),
}


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_aggregates_are_those_of_a_loop_over_all_rows_so_far(data: st.DataObject, kind: str) -> None:
    of, values, functions = KINDS[kind]
    inputs = StructType([StructField("k", StringType()), StructField("v", of)])
    held = {name: Aggregate(name, "v") for name in (*functions, "first", "last", "count")}
    held |= {f"{name}_some": Aggregate(name, "v", ignore_nulls=True) for name in ("first", "last")}
    held["rows"] = Aggregate("count")
    job = Job(aggregates(held), KEY, inputs, call_rows=data.draw(st.sampled_from([4, 1000])))
    seen: dict[str | None, list[Any]] = {}
    for _ in range(3):
        rows = data.draw(
            st.lists(
                st.fixed_dictionaries({"k": st.sampled_from(["a", "b", None]), "v": st.none() | values}), max_size=9
            )
        )
        for row in rows:
            seen.setdefault(row["k"], []).append(row["v"])
        found = {row.pop("k"): row for row in job.run(rows)}
        assert found.keys() == {row["k"] for row in rows}
        for key, row in found.items():
            assert row.pop("rows") == len(seen[key])
            for name, value in row.items():
                assert same(value, expected_of(name, seen[key])), (key, name, value, seen[key])


def test_several_columns_as_key_with_nulls_nans_and_signed_zeros_are_grouped_as_spark_does() -> None:
    keys = parse_ddl("a double, b long")
    inputs = parse_ddl("a double, b long")
    job = Job(aggregates({"n": Aggregate("count")}), keys, inputs)
    rows = [(0.0, 1), (-0.0, 1), (math.nan, None), (-math.nan, None), (None, None), (None, 0)]
    found = job.run([{"a": a, "b": b} for a, b in rows])
    assert sorted(row["n"] for row in found) == [1, 1, 2, 2]
    found = job.run([{"a": a, "b": b} for a, b in rows])
    assert sorted(row["n"] for row in found) == [2, 2, 4, 4]
    assert sorted(job.content().values()) == [(2,), (2,), (4,), (4,)]


def test_zeros_within_arrays_are_one_key_too() -> None:
    keys = parse_ddl("a array<struct<x: double>>")
    job = Job(aggregates({"n": Aggregate("count")}), keys, keys)
    for batch in (1, 2):
        found = job.run([{"a": [{"x": x}, None]} for x in (0.0, -0.0, math.nan, -math.nan, None)])
        assert sorted(row["n"] for row in found) == [batch, 2 * batch, 2 * batch]


def test_an_integer_sum_beyond_64_bits_fails_instead_of_wrapping_around() -> None:
    inputs = parse_ddl("k string, v long")
    function = aggregates({"total": Aggregate("sum", "v")})
    half = 1 << 62
    with pytest.raises(Invalid, match="operator 'op': aggregate 'total': a sum does not fit int64"):
        Job(function, KEY, inputs).run([{"k": "a", "v": half}, {"k": "a", "v": half}])
    job = Job(function, KEY, inputs)
    # In one batch the partial sums would overflow in between; the sum itself fits.
    assert job.run([{"k": "a", "v": v} for v in (half, half, -half)]) == [{"k": "a", "total": half}]
    with pytest.raises(Invalid, match=r"add up a wider type .* under another name"):
        job.run([{"k": "a", "v": half}])


def test_a_number_whose_square_overflows_has_the_variance_of_any_other() -> None:
    """Nothing before was a mean of 0, and infinitely far away no times: NaN, where Spark's is 0."""
    job = Job(aggregates({"spread": Aggregate("var_pop", "v")}), KEY, parse_ddl("k string, v double"))
    for _ in range(2):
        found = job.run([{"k": "a", "v": 1e200}, {"k": "b", "v": 3.0}])
        assert [row["spread"] for row in found] == [0.0, 0.0]


def test_numbers_whose_sum_overflows_have_the_variance_of_any_others() -> None:
    """Their mean was infinite, and so was their distance from it, where Spark's is 0."""
    job = Job(aggregates({"spread": Aggregate("var_pop", "v")}), KEY, parse_ddl("k string, v double"))
    rows = [{"k": "a", "v": 1.7e308}] * 3 + [{"k": "b", "v": 3.0}] + [{"k": "c", "v": v} for v in (math.inf, 1.0)]
    for _ in range(3):
        first, second, third = (row["spread"] for row in job.run(rows))
        assert (first, second, math.isnan(third)) == (0.0, 0.0, True)


def test_decimals_that_do_not_fit_are_null_without_ansi_whatever_comes_then_and_with_it_again_an_error() -> None:
    """They ended the query with ANSI off too, at each start."""
    inputs = parse_ddl("k string, v decimal(38,0)")
    most = decimal.Decimal("9" * 38)

    def function(ansi: bool) -> Any:
        named = {name: Aggregate(name, "v", ansi=ansi) for name in ("sum", "mean")}
        return aggregates(named)

    job = Job(function(False), KEY, inputs)
    (found,) = job.run([{"k": "a", "v": most}])
    assert (found["sum"], found["mean"]) == (most, None), "a mean has four digits more"
    for value in (decimal.Decimal(1), most.copy_negate(), None):
        (found,) = job.run([{"k": "a", "v": value}])
        assert (found["sum"], found["mean"]) == (None, None)
    assert job.run([{"k": "b", "v": value} for value in (most, decimal.Decimal(1), most.copy_negate())])[0]["sum"] == 1


def test_decimals_fail_instead_of_losing_digits() -> None:
    inputs = parse_ddl("k string, v decimal(38,0)")
    most = decimal.Decimal("9" * 38)
    for name in ("sum", "mean"):
        function = aggregates({"total": Aggregate(name, "v")})
        with pytest.raises(Invalid, match=r"operator 'op': aggregate 'total': a (sum|mean) does not fit decimal128"):
            Job(function, KEY, inputs).run([{"k": "a", "v": most}, {"k": "a", "v": most}])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-(10**20) + 1, 10**20 - 1), min_size=1, max_size=9), st.sampled_from([0, 2, 10]))
def test_a_mean_of_decimals_is_rounded_half_up_in_the_last_digit(values: list[int], scale: int) -> None:
    inputs = StructType([StructField("k", StringType()), StructField("v", DecimalType(20, scale))])
    function = aggregates({"mean": Aggregate("mean", "v")})
    assert Mean(DecimalType(20, scale)).result == DecimalType(24, scale + 4)
    context = decimal.Context(prec=80, rounding=decimal.ROUND_HALF_UP)
    exact = [decimal.Decimal(value).scaleb(-scale, context) for value in values]
    total = decimal.Decimal(sum(values)).scaleb(-scale, context)
    want = context.quantize(context.divide(total, decimal.Decimal(len(exact))), decimal.Decimal(1).scaleb(-scale - 4))
    job = Job(function, KEY, inputs)
    for value in exact[:-1]:
        job.run([{"k": "a", "v": value}, {"k": "a", "v": None}])
    assert job.run([{"k": "a", "v": exact[-1]}]) == [{"k": "a", "mean": want}]


@pytest.mark.parametrize("function", ["count_distinct", "approx_count_distinct"])
def test_distinct_values_whose_equality_is_not_that_of_their_bytes_are_not_counted(function: str) -> None:
    collated = StructType([StructField("s", StringType("UTF8_LCASE"))])
    for inputs in (collated, StructType([StructField("s", collated)])):
        with pytest.raises(Invalid, match=f"the column of {function} is a string collated by UTF8_LCASE: use a plain"):
            Aggregate(function, "s").accumulator(inputs)


@pytest.mark.parametrize("rsd", [0.05, 0.02])
def test_approximate_distinct_counts_stay_near_the_truth_over_batches(rsd: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = parse_ddl("k string, v string")
    job = Job(aggregates({"n": Aggregate("approx_count_distinct", "v", rsd=rsd)}), KEY, inputs)
    sizes = {"none": 0, "one": 1, "few": 30, "many": 3000}
    rows = [{"k": "none", "v": None}]
    rows += [{"k": key, "v": f"{key}-{i}"} for key, size in sizes.items() for i in range(size)]
    found: dict[str, int] = {}
    for part in (rows, [rows[i] for i in rng.integers(0, len(rows), 500)], rows):
        found = {row["k"]: row["n"] for row in job.run(part, rows_per_batch=1000)}
    assert found["none"] == 0
    assert found["one"] == 1
    for key in ("few", "many"):
        assert abs(found[key] - sizes[key]) <= 5 * rsd * sizes[key], found
    # What a key with few values takes is little.
    assert len(job.content()[b"few"][0]) <= 4 * 30


TOTAL = parse_ddl("total long")


def totals(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    """Adds up; a total below zero removes the state."""
    sums = np.bincount(rows["__group"].to_numpy(), weights=rows["v"].to_numpy(), minlength=len(keys)).astype(np.int64)
    new = states["total"].fill_null(0).to_numpy() + sums
    states_now = pa.table({"total": new, "__exists": new >= 0})
    return states_now, pa.table({"k": keys["k"], "total": new, "before": states["__exists"]})


OUT = parse_ddl("k string, total long, before boolean")
IN = parse_ddl("k string, v long")


def test_a_function_sees_prior_states_and_may_remove_them() -> None:
    job = Job(mapped(totals, TOTAL, OUT), KEY, IN)
    rows = [{"k": "a", "v": 1}, {"k": None, "v": 5}, {"k": "a", "v": 2}, {"k": "b", "v": 1}]
    first = job.run(rows)
    assert {(r["k"], r["total"], r["before"]) for r in first} == {("a", 3, False), (None, 5, False), ("b", 1, False)}
    assert {(r["k"], r["total"], r["before"]) for r in job.run(rows[:3])} == {("a", 6, True), (None, 10, True)}
    assert job.run([{"k": "a", "v": -100}]) == [{"k": "a", "total": -94, "before": True}]
    assert job.content() == {b"\xff": (10,), b"b": (1,)}
    assert job.run([{"k": "a", "v": 7}]) == [{"k": "a", "total": 7, "before": False}]
    # One read for all keys of a call, and none one by one.
    assert dict(job.source.calls) == {"fetch_values": 4}


def test_a_state_that_is_removed_needs_no_value_in_a_required_column() -> None:
    def remove(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        total = pc.if_else(pc.equal(keys["k"], "a"), None, 1)
        return pa.table({"total": total, "__exists": pc.not_equal(keys["k"], "a")}), None

    required = StructType([StructField("total", LongType(), nullable=False)])
    job = Job(mapped(remove, required, OUT), KEY, IN)
    job.run([{"k": "a", "v": 1}, {"k": "b", "v": 1}])
    assert job.content() == {b"b": (1,)}


def test_states_that_stay_the_same_are_not_written() -> None:
    job = Job(mapped(totals, TOTAL, OUT), KEY, IN)
    job.run([{"k": "a", "v": 1}, {"k": "b", "v": 1}])
    job.run([{"k": "a", "v": 0}, {"k": "b", "v": 1}, {"k": "gone", "v": -1}])
    assert [change["key"] for part in job.changes for change in part.to_pylist()] == [b"b"]
    job.run([{"k": "a", "v": 0}])
    assert job.changes == []


def test_a_key_is_in_one_call_with_all_its_rows_in_their_order() -> None:
    calls: list[dict[str, list[int]]] = []

    def collect(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        held: dict[str, list[int]] = {}
        for group, value in zip(rows["__group"].to_pylist(), rows["v"].to_pylist(), strict=True):
            held.setdefault(keys["k"][group].as_py(), []).append(value)
        calls.append(held)
        assert sorted(set(rows["__group"].to_pylist())) == list(range(len(keys)))
        return None, None

    rows = [{"k": f"k{i % 7}", "v": i} for i in range(60)]
    job = Job(mapped(collect, TOTAL, OUT), KEY, IN, call_rows=10)
    assert job.run(rows) == []
    assert len(calls) > 3
    assert [key for call in calls for key in call] == list(dict.fromkeys(key for call in calls for key in call))
    merged = {key: values for call in calls for key, values in call.items()}
    assert merged == {f"k{i}": list(range(i, 60, 7)) for i in range(7)}
    assert job.changes == []


def raising(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    raise RuntimeError("no luck with this one")


BAD: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (raising, UserCodeError, "no luck with this one"),
    (lambda rows, keys, states: states, Invalid, r"returns \(new states, output\)"),
    (lambda rows, keys, states: ([1], None), Invalid, "the new states are a list"),
    (lambda rows, keys, states: (None, "x"), Invalid, "the output are a str"),
    (lambda rows, keys, states: (states.slice(1), None), Invalid, "1 new states for 2 keys"),
    (lambda rows, keys, states: (pa.table({"x": [1, 2]}), None), Invalid, "the new states has no column 'total'"),
    (lambda rows, keys, states: (pa.table({"total": ["a", "b"]}), None), Invalid, "'total' as string, not int64"),
    (lambda rows, keys, states: (None, pa.table({"k": ["a"]})), Invalid, "the output has no column 'total'"),
    (
        lambda rows, keys, states: (pa.table({"total": [1, 2], "__exists": [1, 0]}), None),
        Invalid,
        "__exists of the new states is int64",
    ),
]


@pytest.mark.parametrize(("function", "error", "message"), BAD)
def test_what_a_function_may_not_do_names_the_operator_and_sends_nothing(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    job = Job(mapped(function, TOTAL, OUT), KEY, IN)
    with pytest.raises(error, match=message) as raised:
        job.run([{"k": "a", "v": 1}, {"k": "b", "v": 1}])
    assert "'op'" in str(raised.value)
    assert job.changes == []


def test_a_state_is_gone_when_its_time_to_live_has_passed_since_its_last_row() -> None:
    inputs = StructType([*KEY.fields, StructField("v", LongType())])
    job = Job(aggregates({"n": Aggregate("sum", "v")}, 100), KEY, inputs)
    seen = []
    # "kept" is written each time, with a value that does not change; "late" comes back at the last moment and after it.
    for now, keys in (
        (1000, ("kept", "late")),
        (1060, ("kept",)),
        (1099, ("late",)),
        (1120, ("kept",)),
        (1199, ("late",)),
    ):
        job.now_ms = now
        seen.append({row["k"]: row["n"] for row in job.run([{"k": k, "v": 0 if k == "kept" else 1} for k in keys])})
    assert seen == [{"kept": 0, "late": 1}, {"kept": 0}, {"late": 2}, {"kept": 0}, {"late": 1}]
    assert job.registry.descriptors[0].ttl_ms == 100


def test_a_function_sees_no_expired_state_and_removes_none() -> None:
    exists: list[bool] = []

    def function(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        exists.extend(states.column("__exists").to_pylist())
        kept = pc.greater(rows.column("v"), 0)
        return pa.table({"n": rows.column("v"), "__exists": kept}), None

    inputs = StructType([*KEY.fields, StructField("v", LongType())])
    job = Job(mapped(function, parse_ddl("n long"), parse_ddl("k string"), 10), KEY, inputs)
    for now, v in ((0, 1), (9, 2), (19, 3), (40, 0), (41, 1)):
        job.now_ms = now
        job.run([{"k": "a", "v": v}])
        assert sum(each.num_rows for each in job.changes) == int(v > 0), "what may have been swept away is not removed"
    assert exists == [False, True, False, False, False]


def test_nothing_runs_per_row_or_per_key_in_python() -> None:
    inputs = parse_ddl("k string, b long, v long, x double, d decimal(10,2), s string, t timestamp")
    keys = parse_ddl("k string, b long")
    names = ("sum", "mean", "min", "max", "first", "last", "count", "approx_count_distinct")
    held = {f"{name}_{column}": Aggregate(name, column) for name in names for column in "vxd"}
    held |= {f"{name}_{column}": Aggregate(name, column) for name in names[2:] for column in "st"}

    def calls_of(rows: int, distinct: int) -> int:
        table = [
            {"k": f"k{i % distinct}", "b": i % distinct, "v": i, "x": i / 4, "d": decimal.Decimal(i % 9), "s": f"s{i}"}
            for i in range(rows)
        ]
        job = Job(aggregates(held), keys, inputs)
        job.run(table, rows_per_batch=rows)
        calls = 0

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            name = frame.f_code.co_filename
            calls += event == "call" and "/dstl/" in name

        sys.setprofile(count)
        try:
            job.run(table, rows_per_batch=rows)
        finally:
            sys.setprofile(None)
        return calls

    few = calls_of(64, 32)
    assert few > 0
    # Columns may be taken once more where numbers are longer; nothing grows with the rows or the keys.
    assert calls_of(2048, 32) < 2 * few
    assert calls_of(2048, 1024) < 2 * few


def test_an_aggregate_brings_no_pandas_into_a_worker() -> None:
    """Arrow imports it for a first array of Python's: that takes as long as all else that a worker imports."""
    code = """
import sys
import numpy as np, pyarrow as pa, pyarrow.compute as pc
from pyspark.sql.types import LongType, StringType, StructField, StructType
from dstl.column_buffers import array_of
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import Aggregate
from dstl.state.vectorised.aggregation_runner import AggregationRunner
from worlds.runner import plain_aggregation

class Source:
    held = []
    def fetch_values(self, state, key_groups, keys):
        if not self.held:
            return pa.nulls(len(keys), pa.binary())
        return self.held[0].column("value").take(pc.index_in(keys, value_set=self.held[0].column("key")))

number = array_of(np.arange(6))
keys = {LongType(): number, StringType(): number.cast(pa.string())}
for kind, column in keys.items():
    by, names = StructType([StructField("k", kind)]), ["k", "v", "__dstl_key_group"]
    inputs = StructType([*by.fields, StructField("v", LongType())])
    wanted = {name: Aggregate(name, "v") for name in ("count", "sum", "mean", "min", "max", "first", "last")}
    source = Source()
    for batch in range(2):
        aggregation, changes = plain_aggregation(by, inputs, wanted), []
        runner = AggregationRunner(aggregation, operator="op", registry=StateRegistry(by))
        rows = pa.RecordBatch.from_arrays([column, number, array_of(np.zeros(6, np.int32))], names=names)
        task = TaskInput(source=source, send=changes.append, sequence=batch, processing_time_ms=0)
        (found,) = runner.run(iter([rows]), task)
        assert found.column("count").to_pylist() == [batch + 1] * 6, found
        source.held = changes
assert "pandas" not in sys.modules
"""
    tests = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "PYTHONPATH": tests})
