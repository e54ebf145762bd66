"""Operators whose states have other schemas than before, over the state that their earlier versions left."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from test_vectorised import KEY, Job, aggregates, mapped

import worlds.runner
from dstl.errors import Invalid
from dstl.state.vectorised.aggregation import Aggregate
from worlds.ddl import parse_ddl
from worlds.runner import batches_of

INPUTS = parse_ddl("k string, v long")
N, TOTAL = {"n": Aggregate("count")}, {"total": Aggregate("sum", "v")}


def test_aggregates_are_added_and_removed_and_start_from_nothing_whenever_they_come() -> None:
    job = Job(aggregates(N), KEY, INPUTS)
    job.run([{"k": "a", "v": 1}, {"k": "b", "v": 1}])
    job.make = aggregates(N | TOTAL | {"first": Aggregate("first", "v")})
    assert job.run([{"k": "a", "v": 5}]) == [{"k": "a", "n": 2, "total": 5, "first": 5}]
    assert job.run([{"k": "a", "v": 6}]) == [{"k": "a", "n": 3, "total": 11, "first": 5}]
    job.make = aggregates(TOTAL)
    assert job.run([{"k": "a", "v": 1}]) == [{"k": "a", "total": 12}]
    # "b" was last written before ``total`` came, "a" after ``n`` had gone.
    job.make = aggregates(TOTAL | N)
    assert sorted(job.run([{"k": "a", "v": 0}, {"k": "b", "v": 7}]), key=repr) == [
        {"k": "a", "total": 12, "n": 1},
        {"k": "b", "total": 7, "n": 1},
    ]


def test_aggregates_go_on_when_their_column_is_widened() -> None:
    narrow = parse_ddl("k string, v int")
    of = {name: Aggregate(name, "v") for name in ("sum", "min", "max", "mean", "last", "count")}
    job = Job(aggregates(of), KEY, narrow)
    job.run([{"k": "a", "v": 1}, {"k": "a", "v": 5}])
    wide = parse_ddl("k string, v double")
    job.inputs, job.make = wide, aggregates(of)
    assert job.run([{"k": "a", "v": 0.5}]) == [
        {"k": "a", "sum": 6.5, "min": 0.5, "max": 5.0, "mean": 6.5 / 3, "last": 0.5, "count": 3}
    ]


@pytest.mark.parametrize("other", [Aggregate("max", "v"), Aggregate("sum", "w"), Aggregate("count")])
def test_an_aggregate_does_not_go_on_from_what_another_one_of_its_name_has_left(other: Aggregate) -> None:
    inputs = parse_ddl("k string, v long, w long")
    job = Job(aggregates(TOTAL), KEY, inputs)
    job.run([{"k": "a", "v": 1, "w": 2}])
    job.make = aggregates({"total": other})
    with pytest.raises(Invalid, match=r"operator 'op': .*column 'total' was sum\(v\) and is .*another name"):
        job.run([{"k": "a", "v": 1, "w": 2}])


@pytest.mark.parametrize(
    ("inputs", "rsd"),
    [("k string, v long", 0.02), ("k string, v long", 0.1), ("k string, v double", 0.05), ("k string, v string", 0.05)],
)
def test_a_sketch_of_distinct_values_does_not_go_on_at_another_precision_or_of_another_type(
    inputs: str, rsd: float
) -> None:
    distinct = {"n": Aggregate("approx_count_distinct", "v")}
    job = Job(aggregates(distinct), KEY, parse_ddl("k string, v int"))
    before = job.run([{"k": "a", "v": v} for v in range(1000)])
    job.inputs = parse_ddl("k string, v long")
    assert job.run([{"k": "a", "v": v} for v in range(1000)]) == before
    job.inputs, job.make = parse_ddl(inputs), aggregates({"n": Aggregate("approx_count_distinct", "v", rsd=rsd)})
    with pytest.raises(Invalid, match="column 'n' was a sketch of whole numbers with 512 registers and is a sketch of"):
        job.run([])


def test_a_function_over_states_sees_them_as_its_schema_says_now() -> None:
    seen: list[Any] = []

    def keep(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        seen.append(states.drop_columns("__exists").to_pylist())
        return None, None

    def write(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
        return pa.table({"n": [1], "gone": ["x"], "l": pa.array([[{"x": 1}]])}), None

    first, later = (
        parse_ddl("n int, gone string, l array<struct<x:int>>"),
        parse_ddl("new date, l array<struct<y:int,x:double>>, n long"),
    )
    job = Job(mapped(write, first, parse_ddl("k string"), ttl_ms=1000), KEY, INPUTS)
    job.run([{"k": "a", "v": 1}])
    job.make = mapped(keep, later, parse_ddl("k string"), ttl_ms=1000)
    job.run([{"k": "a", "v": 1}])
    assert seen == [[{"new": None, "l": [{"y": None, "x": 1.0}], "n": 1}]]


class Sums:
    """An accumulator of one number, later of two."""

    def create_accumulator(self) -> tuple[Any, ...]:
        return (0, 0)

    def add(self, value: Any, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        return (accumulator[0] + value, (accumulator[1] or 0) + 1)

    def get_result(self, accumulator: tuple[Any, ...]) -> Any:
        return accumulator


class OneSum(Sums):
    def create_accumulator(self) -> tuple[Any, ...]:
        return (0,)

    def add(self, value: Any, accumulator: tuple[Any, ...]) -> tuple[Any, ...]:
        return (accumulator[0] + value,)


class Before(StatefulProcessor):
    """Every kind of state, with times to live and timers, under its first schema."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n int, gone string", 1000)
        self.list = handle.getListState("list", "n int, gone string", 1000)
        self.map = handle.getMapState("map", "u string", "n int, gone string", 1000)
        self.least = handle.getReducingState("least", "n int, gone string", min)
        self.sums = handle.getAggregatingState("sums", "n int", OneSum())

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(rows)
        self.value.update((1, "x"))
        self.list.appendList([(1, "x"), (2, None)])
        self.map.updateValue(("u",), (1, "x"))
        self.least.add((1, "x"))
        self.sums.add(1)
        self.handle.registerTimer(2000)
        return iter(())


class After(Before):
    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "new string, n long", 1000)
        self.list = handle.getListState("list", "new string, n long", 1000)
        self.map = handle.getMapState("map", "user string", "new string, n double", 1000)
        self.least = handle.getReducingState("least", "n long", min)
        self.sums = handle.getAggregatingState("sums", "n long, count int", Sums())

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(rows)
        self.list.appendValue(("new", 1 << 40))
        self.least.add((1 << 40,))
        self.sums.add(1 << 40)
        found = (
            self.value.get(),
            list(self.list.get()),
            self.map.getValue(("u",)),
            list(self.map.iterator()),
            self.least.get(),
            self.sums.get(),
            list(self.handle.listTimers()),
        )
        row = {"k": key[0], "what": repr(found), "n": 0}
        yield pd.DataFrame([row]) if self.style == "pandas" else Row(**row)

    style = "row"


class PandasAfter(After):
    style = "pandas"


@pytest.mark.parametrize("after", [After, PandasAfter])
def test_every_kind_of_state_follows_its_schema_with_times_to_live_and_timers(after: type[After]) -> None:
    job = worlds.runner.Job(Before, time_mode="processingTime")
    rows = batches_of([{"k": "a", "op": "", "n": 0}], 10)
    job.run(rows, now=1500)
    job.make, job.style = after, after.style
    (row,) = job.run(rows, now=1900)
    value, entries, got, pairs, least, sums, timers = eval(row["what"], {"Row": Row})
    assert (value, entries) == ((None, 1), [(None, 1), (None, 2), ("new", 1 << 40)])
    assert (tuple(got), pairs) == ((None, 1.0), [(("u",), (None, 1.0))])
    assert (least, sums, timers) == ((1,), ((1 << 40) + 1, 1), [2000])
    # Values still die when their first version's time is over; the list's newest element is younger.
    job.make, job.style = After, "row"
    (row,) = job.run(rows, now=2600)
    value, entries, got, pairs, *_ = eval(row["what"], {"Row": Row})
    assert (value, got, pairs) == (None, None, [])
    assert entries == [("new", 1 << 40)] * 2
