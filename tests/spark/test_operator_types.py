"""Columns that no worker can be given, or give back, are refused when the query is defined, by operator and name."""

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from home import Home
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import CalendarIntervalType, StructType

from dstl.errors import Invalid

MONTHS, CALENDAR = "make_ym_interval(1, 1)", "make_interval(1, 1)"
VARIANT, MAP = "parse_json('1')", "map('a', 1)"


class Keeps(StatefulProcessor):
    """Keeps the last row of each key, and says what it has kept before."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "v variant, dt interval day to second, m map<int, array<string>>")
        self.all = handle.getListState("all", "v array<variant>, ym interval year to month")
        self.by = handle.getMapState("by", "dt interval day to second", "v struct<v: variant, c: char(3)>")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.last.get()
        for row in rows:
            self.last.update((row.v, row.dt, dict(row.m)))
            self.all.appendValue(([row.v, None], row.months))
            self.by.updateValue((row.dt,), (Row(v=row.v, c="abc"),))
        v, dt, m = before or (None, None, None)
        yield Row(k=key[0], seen=repr((v and v.toPython(), m)), v=v, dt=dt)


def nothing(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[Any, Any]:
    return None, None


def test_what_cannot_be_given_or_taken_is_refused_by_name(home: Home) -> None:
    df = home.stream("k string, n long").read()

    with home.backend(parallelism=2) as backend:

        def processed(sql: str = "1", output: Any = "k string", by: str = "k", more: Any = None) -> Any:
            given = df.withColumn("x", F.expr(sql))
            if more is not None:
                given = given.select("*", more)
            return backend.groupBy(given, by).transformWithState(Keeps(), output, "append", "none", name="op")

        def mapped(sql: str = "1", state: str = "n long", output: str = "k string", by: str = "k") -> Any:
            given = df.withColumn("x", F.expr(sql))
            return backend.groupBy(given, by).mapStates(nothing, output, state, name="op")

        def aggregated(sql: str, aggregate: Any, by: str = "k") -> Any:
            return backend.groupBy(df.withColumn("x", F.expr(sql)), by).agg(aggregate.alias("x1"), name="op")

        def started(sql: str) -> Any:
            initial = home.spark.range(1).selectExpr("'a' k", f"{sql} x")
            return backend.groupBy(df, "k").transformWithState(
                Keeps(), "k string", "append", "none", name="op", initialState=initial
            )

        calendar = StructType().add("k", "string").add("x", CalendarIntervalType())
        cases: list[tuple[Callable[[], Any], str]] = [
            (lambda: processed(MONTHS), "the input's column 'x' is interval year to month"),
            (lambda: processed(f"array(named_struct('a', {MONTHS}))"), "the input's column 'x' is array<struct<a:int"),
            (lambda: processed(CALENDAR), "the input's column 'x' is interval, "),
            (
                lambda: processed(more=F.lit(1).alias("n")),
                "the input has columns 'n' and 'n', which Spark takes for one",
            ),
            (lambda: processed(output="k string, x interval year to month"), "the output's column 'x' is interval"),
            (lambda: processed(output=calendar), "the output's column 'x' is interval, "),
            (lambda: processed(output="k string, k long"), "the output has two columns 'k'"),
            (lambda: processed(MAP, by="x"), "grouping column 'x' is map<string,int>"),
            (lambda: processed(f"named_struct('a', {VARIANT})", by="x"), "grouping column 'x' is struct<a:variant>"),
            (lambda: started(MONTHS), "the initial state's column 'x' is interval year to month"),
            (lambda: mapped(MONTHS), "the input's column 'x' is interval year to month"),
            (lambda: mapped(VARIANT, by="x"), "grouping column 'x' is variant"),
            (lambda: mapped(state="n variant"), "the state's column 'n' is variant"),
            (lambda: mapped(state="n interval year to month"), "the state's column 'n' is interval year to month"),
            (lambda: mapped(output="k interval year to month"), "the output's column 'k' is interval year to month"),
            (lambda: aggregated(MONTHS, F.count("x")), "the input's column 'x' is interval year to month"),
            (lambda: aggregated(MAP, F.count("*"), by="x"), "grouping column 'x' is map<string,int>"),
            (lambda: aggregated(VARIANT, F.first("x")), "the state's column 'x1' is variant"),
            (
                lambda: aggregated(VARIANT, F.approx_count_distinct("x")),
                "'value' of the column of approx_count_distinct",
            ),
        ]
        for attempt, message in cases:
            with pytest.raises(Invalid, match=message) as raised:
                attempt()
            assert "operator 'op'" in str(raised.value)
        assert repr(backend).endswith("operators=[])")


def test_types_that_sparks_own_refuses_are_kept(home: Home) -> None:
    source = home.stream("k string, n long")
    columns = {
        "v": "parse_json(concat('{\"a\": ', n, '}'))",
        "dt": "make_dt_interval(0, 0, 0, n)",
        "m": "map(cast(n as int), array('x', null))",
        "months": "cast(n as int)",
    }
    df = source.read().selectExpr("k", *(f"{sql} {name}" for name, sql in columns.items()))
    out: list[list[Any]] = []
    for n in (1, 2):
        source.add([{"k": "a", "n": n}])
        with home.backend(parallelism=2) as backend:
            kept = backend.groupBy(df, "k").transformWithState(
                Keeps(), "k string, seen string, v variant, dt interval day to second", "append", "none"
            )
            out.append(source.collect(kept.selectExpr("k", "seen", "to_json(v)", "cast(dt as string)"), backend))
            if n == 1:
                continue
            held = [backend.read_state(home.spark, name) for name in ("last", "all", "by")]
            last = held[0].selectExpr("to_json(value.v)", "cast(value.dt as string)", "value.m").collect()
            lists = held[1].selectExpr("to_json(value.v[0])", "value.ym").collect()
            by = held[2].selectExpr("cast(user_key.dt as string)", "to_json(value.v.v)", "value.v.c").collect()
    assert out == [
        [(0, "a", "(None, None)", None, None)],
        [(1, "a", "({'a': 1}, {1: ['x', None]})", '{"a":1}', "INTERVAL '0 00:00:01' DAY TO SECOND")],
    ]
    assert [tuple(row) for row in last] == [('{"a":2}', "INTERVAL '0 00:00:02' DAY TO SECOND", {2: ["x", None]})]
    assert [tuple(row) for row in lists] == [
        ('{"a":1}', 1),
        ('{"a":2}', 2),
    ]
    assert sorted(map(tuple, by)) == [
        ("INTERVAL '0 00:00:01' DAY TO SECOND", '{"a":1}', "abc"),
        ("INTERVAL '0 00:00:02' DAY TO SECOND", '{"a":2}', "abc"),
    ]
