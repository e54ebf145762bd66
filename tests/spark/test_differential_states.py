"""One processor on Spark's own ``transformWithState`` and on ours, over the same files: output and final state.

Where each feature of PySpark's API is run on both sides (the test's name, in this directory unless it says otherwise):

| feature | test |
|---|---|
| ``init``, ``close``, ``handleInputRows`` in both styles | ``test_states_do_what_sparks_own_do`` row, pandas |
| value, list and map states, every method, nulls in values and user keys | the same |
| every Spark type in values, several grouping columns, null and empty keys | the same, row |
| every Spark type in grouping keys and user keys | ``test_keys_of_every_type_are_sparks_own`` |
| rows, frames and keys as the processor sees them, of every type | ``test_batch_query_spark.py`` |
| output modes append and update, time mode none, any case of the names | ``test_states_do_what_sparks_own_do`` |
| ``deleteIfExists``, a new state, another parallelism at a restart | the same, row |
| a nullable column more | the same, evolution |
| what states refuse, states declared and deleted at once, bare user keys | ``tests/state/test_state_calls.py`` |
| batch DataFrames, with initial state, every time mode, both styles | ``test_batch_query_spark.py`` |
| all other changes of schemas, allowed and refused | ``test_schema_evolution_spark.py`` |
| PySpark's argument names and places | the same (one tuple for both), ``test_grouped_stream.py`` |
| ``handleInitialState``, Rows | ``test_initial_state_spark.py`` |
| ``handleInitialState``, data frames | ``test_timers_spark.py``, event time, pandas |
| timers (all methods), late rows, watermark shown, both styles | ``test_timers_spark.py``, event time |
| timers and times to live of all states in processing time, the watermark there | the same file, processing time |
| timers that register and delete timers | ``test_timers_spark.py``, timers of timers |
| late rows whose event time is a window | ``test_timers_spark.py``, in a window |
| aggregates: nulls, NaNs, types of results | ``test_vectorised_spark.py`` |

What Spark's own refuses and ours takes (intervals, variants, char, maps with integers for keys) is in
``test_operator_types.py``.

Reducing and aggregating states are Flink's: Spark has nothing to compare them with.
"""

import datetime
import decimal
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from home import Home, storable
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor

ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
INPUT = "k string, k2 int, i long, op string, n long"
OUTPUT = "k string, k2 int, i long, what string"
WIDE = (
    "b boolean, y tinyint, s smallint, n int, f float, d double, dec decimal(20, 4), t string, bin binary, "
    "day date, ts timestamp, ntz timestamp_ntz, st struct<a: int, in: struct<x: string>>, l array<int>, "
    "m map<string, struct<y: int>>, big decimal(38, 10), deep array<struct<a: int, b: array<timestamp>>>, no void"
)
METHODS = {
    "v": ["get", "update", "exists", "clear"],
    "w": ["update", "get", "null"],
    "l": ["get", "put", "append", "appendList", "clear", "exists"],
    "m": ["get", "update", "contains", "remove", "keys", "values", "iterator", "clear", "exists"],
}
OPS = [f"{state}.{method}" for state, methods in METHODS.items() for method in methods]


def wide(n: int) -> tuple[Any, ...]:
    return (
        n % 2 == 0,
        n % 100,
        n,
        -n,
        n / 4,
        (n / 3, float("nan"), -0.0, float("-inf"))[n % 4],
        decimal.Decimal(n) / 4,
        f"täxt-{n}",
        b"\0\xff%d" % n,
        datetime.date(1969, 12, 1) + datetime.timedelta(days=n),
        datetime.datetime(2020, 11, 1, 1, 30, 0, n),
        datetime.datetime(1955, 1, 1, 0, 0, 0, n),
        Row(a=n, **{"in": Row(x=None)}),
        [n, None],
        {"x": Row(y=n)},
        decimal.Decimal(f"-12345678901234567890.{n:02d}"),
        [Row(a=None, b=[datetime.datetime(1969, 12, 31, 23, 59, 59, n), None]), None],
        None,
    )


def plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


class Everything(StatefulProcessor):
    """Does what its rows say and yields what it sees."""

    style = "row"
    states = "vwlm"
    value_schema = "n long, s string"
    is_old = True

    def init(self, handle: Any) -> None:
        self.v = handle.getValueState("v", self.value_schema)
        if "w" in self.states:
            self.w = handle.getValueState("w", WIDE)
        self.l = handle.getListState("l", "n long, s string")
        self.m = handle.getMapState("m", "a string, n long", "x double")
        if self.is_old:
            self.old = handle.getValueState("old", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        if self.style == "pandas":
            rows = [Row(**row) for frame in rows for row in frame.to_dict("records")]
        out = []
        for row in sorted(rows, key=lambda row: row.i):
            seen = self.step(row.op, int(row.n))
            out.append({"k": key[0], "k2": key[1], "i": int(row.i), "what": repr(seen)})
        if self.style == "pandas":
            yield pd.DataFrame(out).astype({"k2": "Int32"})
        else:
            yield from (Row(**one) for one in out)

    def step(self, op: str, n: int) -> Any:
        which, method = op.split(".")
        if which in "vw":
            state = self.v if which == "v" else self.w
            if method == "update":
                state.update(storable(self.value(n) if which == "v" else wide(n)))
            elif method == "null":
                state.update((None,) * len(wide(0)))
            elif method == "clear":
                state.clear()
            else:
                found = getattr(state, method)()
                return tuple(map(plain, found)) if isinstance(found, tuple) else found
        elif which == "l":
            if method == "put":
                self.l.put([(n, None), (None, f"p{n}")])
            elif method == "append":
                self.l.appendValue((n, f"a{n}"))
            elif method == "appendList":
                self.l.appendList([(n + j, None) for j in range(3)])
            else:
                found = getattr(self.l, method)()
                return list(found) if method == "get" else found
        else:
            user_key = (None if n % 4 == 0 else f"u{n % 4}", n % 3)
            if method == "update":
                self.m.updateValue(user_key, (n / 8,))
            elif method in ("contains", "get", "remove"):
                name = {"contains": "containsKey", "get": "getValue", "remove": "removeKey"}[method]
                return getattr(self.m, name)(user_key)
            else:
                found = getattr(self.m, method)()
                return found if method in ("exists", "clear") else sorted(map(repr, found))
        return None

    def value(self, n: int) -> tuple[Any, ...]:
        return (n, None if n % 2 else f"s{n}")


class PandasEverything(Everything):
    style = "pandas"


class NextVersion(Everything):
    """With a state less and one more."""

    is_old = False

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("old")
        super().init(handle)
        self.new = handle.getValueState("new", "n long")


class Plain(Everything):
    states = "vlm"


class NextPlain(Plain):
    """With a column more in a state."""

    value_schema = "n long, s string, added int"

    def value(self, n: int) -> tuple[Any, ...]:
        return (*super().value(n), n + 1)


def rows_of_batch(rng: random.Random, batch: int, ops: list[str], null: int | None) -> list[dict[str, Any]]:
    keys = [("a", 1), ("a", null), (None, 1), (None, null), ("", 9), ("b", 2), ("c", 3)]
    rows = []
    for i in range(160):
        k, k2 = rng.choice(keys)
        rows.append({"k": k, "k2": k2, "i": batch * 1000 + i, "op": rng.choice(ops), "n": rng.randrange(1, 40)})
    return rows


def spark_state(spark: SparkSession, checkpoint: Path, name: str) -> list[str]:
    reader = spark.read.format("statestore").option("stateVarName", name)
    df = reader.load(str(checkpoint))
    columns = [c for c in ("key", "user_map_key", "list_element", "value", "user_map_value") if c in df.columns]
    return sorted(repr(tuple(row)) for row in df.select(*columns).collect())


KEY_TYPES = {
    "b": ("boolean", "if(i % 5 = 0, null, i % 2 = 0)"),
    "y": ("tinyint", "cast(i % 2 as tinyint)"),
    "s": ("smallint", "cast(-i % 2 as smallint)"),
    "o": ("bigint", "-9223372036854775807L - i % 2"),
    "str": ("string", "if(i % 11 = 0, null, if(i % 2 = 0, '', 'ß'))"),
    "n": ("int", "if(i % 7 = 0, null, cast(-i % 2 as int))"),
    "d": ("date", "date_add(date'1969-12-31', cast(i % 2 as int))"),
    "ts": ("timestamp", "timestamp'1969-12-31 23:59:59.5' + make_interval(0, 0, 0, 0, 0, 0, i % 2)"),
    "ntz": ("timestamp_ntz", "timestamp_ntz'2020-11-01 01:30:00.000001'"),
    "dec": ("decimal(10,2)", "cast(-i % 2 as decimal(10, 2)) / 4"),
    "big": ("decimal(30,0)", "cast(i % 2 as decimal(30, 0)) * 10000000000000000000000"),
    # No NaN: Spark's worker takes each row with one for a group of its own.
    "f": ("float", "cast(if(i % 2 = 0, '0.0', '0.1') as float)"),
    "x": ("double", "if(i % 2 = 0, 0.5D, double('-Infinity'))"),
    "bin": ("binary", "if(i % 2 = 0, unhex('00FF'), unhex(''))"),
    "st": ("struct<a: int, s: string>", "named_struct('a', cast(i % 2 as int), 's', if(i % 3 = 0, null, 'ä'))"),
    "l": ("array<int>", "array(cast(i % 2 as int), null)"),
}
USER_KEY = ", ".join(f"{name} {kind}" for name, (kind, _) in KEY_TYPES.items())


class Keys(StatefulProcessor):
    """Counts its keys, and under each the keys of the same types that its rows bring."""

    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")
        self.m = handle.getMapState("m", USER_KEY, "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        n = (self.n.get() or (0,))[0]
        for row in rows:
            n += 1
            user_key = tuple(row[name] for name in KEY_TYPES)
            self.m.updateValue(user_key, ((self.m.getValue(user_key) or (0,))[0] + 1,))
        self.n.update((n,))
        yield Row(what=repr((tuple(map(plain, key)), n)))


RUNS = {
    # Spark lets schemas evolve with Avro only, which has no tinyint and no array with nulls: two jobs, then.
    "row": [(Everything(), "update", 3, 2), (NextVersion(), "update", 5, 1)],
    "evolution": [(Plain(), "append", 3, 1), (NextPlain(), "append", 2, 1)],
    "pandas": [(PandasEverything(), "update", 2, 2)],
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("job", RUNS)
@pytest.mark.usefixtures("rocksdb")
def test_states_do_what_sparks_own_do(home: Home, set_conf: Any, job: str, rng: random.Random) -> None:
    source = home.stream(INPUT)
    set_conf({ENCODING: "avro" if job == "evolution" else "unsaferow"})
    # In Spark's pandas API an integer key becomes null in the store once the batch has a key with a null beside it.
    null = 4 if job == "pandas" else None
    for processor, mode, parallelism, batches in RUNS[job]:
        for _ in range(batches):
            source.add(rows_of_batch(rng, source.files, [op for op in OPS if op[0] in processor.states], null))
        method = "transformWithStateInPandas" if job == "pandas" else "transformWithState"
        what = (processor, OUTPUT, mode, "none")
        native = getattr(source.read().groupBy("k", "k2"), method)(*what)
        want = source.collect(native, "native", mode)
        with home.backend(parallelism=parallelism) as backend:
            ours = getattr(backend.groupBy(source.read(), "k", "k2"), method)(*what)
            assert source.collect(ours, backend, mode) == want
            for name in processor.states:
                held = sorted(repr(tuple(row)) for row in backend.read_state(home.spark, name).collect())
                assert held == spark_state(home.spark, source.directory / "native", name), name


@pytest.mark.usefixtures("rocksdb")
def test_keys_of_every_type_are_sparks_own(home: Home) -> None:
    source = home.stream("i long")
    for batch in range(2):
        source.add([{"i": i + batch} for i in range(60)])
    df = source.read().selectExpr(*(f"{expression} as {name}" for name, (_, expression) in KEY_TYPES.items()))
    what = (Keys(), "what string", "Update", "None")
    by = [name for name in KEY_TYPES if name != "l"]  # Spark itself cannot read the schema of such a grouping key
    want = source.collect(df.groupBy(*by).transformWithState(*what), "native", "update")
    with home.backend(parallelism=3) as backend:
        assert source.collect(backend.groupBy(df, *by).transformWithState(*what), backend, "update") == want
        for name in "nm":
            held = sorted(repr(tuple(row)) for row in backend.read_state(home.spark, name).collect())
            assert held == spark_state(home.spark, source.directory / "native", name), name
