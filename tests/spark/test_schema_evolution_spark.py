"""What may become of a state's schema between two runs: Spark's own with its Avro encoding, and ours.

What Spark 4.3 does (``encodingFormat`` avro), found by these tests and kept by them:

| change of a value's schema | Spark | here |
|---|---|---|
| a nullable column more, less, elsewhere; the same in structs, in arrays and map values too | yes | yes |
| a column renamed (by case, too) | as removed and added | the same |
| a default in a column's metadata | ignored: null | the same |
| int to bigint, float, double; bigint to float, double; float to double | yes | yes |
| string to binary and back; date to int, bigint, float, double; int to date | yes | yes |
| timestamps to each other, to and from bigint, to float, double; int to timestamps (microseconds) | yes | yes |
| void to anything; decimals of more digits in as many bytes | yes | yes |
| a decimal's scale; fewer digits; date to timestamps | yes, wrong numbers or a failing query | refused |
| a column removed, then added again | shows the old content | null |
| anything else, also against any earlier schema | STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION | refused |
| NOT NULL | TRANSFORM_WITH_STATE_SCHEMA_MUST_BE_NULLABLE, always | where it is new: refused |
| tinyint, smallint, char, varchar, intervals, time, variant, maps by other keys than strings | never | integers widen |
| another kind of state | STATE_STORE_INVALID_VARIABLE_TYPE_CHANGE | refused |
| a user key's types | STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE | refused |
| a user key's names | free | free, but for places changed |
| a time to live added or removed | the query fails, or shows nulls | yes |
| more versions than | 16 | 127 |
"""

import datetime
import decimal
import functools
import random
from typing import Any

import pytest
from home import Home, storable
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from dstl.spark import StateBackend
from dstl.state.codec.schema_evolution import why_unreadable
from worlds.ddl import parse_ddl

ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
DEFAULTS = StructType(
    [
        StructField("a", IntegerType()),
        StructField("b", IntegerType(), True, {"CURRENT_DEFAULT": "7", "EXISTS_DEFAULT": "7"}),
        StructField("c", StringType(), True, {"CURRENT_DEFAULT": "'x'", "EXISTS_DEFAULT": "'x'"}),
    ]
)
DAY, MOMENT = datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)

VERSIONS: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
    "add": [("a int", (1,)), ("a int, b string", (2, "n")), ("b string, c double, a bigint", ("m", 0.5, 1 << 40))],
    "first": [("a int", (1,)), ("b string, a int", ("n", 2)), ("b string, a int", ("m", 3))],
    "remove": [("a int, b string", (1, "x")), ("a int", (2,)), ("a double", (0.5,))],
    "reorder": [("a int, b string, c double", (1, "x", 0.5)), ("c double, a int, b string", (0.25, 2, "y"))] * 2,
    "rename": [("a int", (1,)), ("z int", (2,)), ("A int", (3,))],
    "defaults": [("a int", (1,)), (DEFAULTS, (2, 3, "y")), (DEFAULTS, (4, None, None))],
    "wider": [("a int", (-5,)), ("a bigint", (1 << 40,)), ("a double", (0.5,))],
    "floats": [("a int", (16777217,)), ("a float", (0.1,)), ("a double", (0.1,))],
    "rounded": [("a bigint", ((1 << 60) + (1 << 36) + 1,)), ("a float", (0.5,)), ("a float", (0.25,))],
    "utf8": [("a string", ("ä",)), ("a binary", (b"\xff\0",)), ("a string", ("zz",))],
    "days": [("a date", (DAY,)), ("a int", (4,)), ("a bigint", (5,))],
    "micros": [("a timestamp", (MOMENT,)), ("a bigint", (9,)), ("a timestamp_ntz", (MOMENT,))],
    "moment": [("a int, b bigint", (18262, 1577836800000000)), ("a date, b timestamp", (DAY, MOMENT))],
    "digits": [
        ("a decimal(10,2), b decimal(17,0)", (decimal.Decimal("1.25"), decimal.Decimal(10**16))),
        ("a decimal(11,2), b decimal(18,0)", (decimal.Decimal("123456789.25"), decimal.Decimal(10**17))),
    ],
    "nothing": [("a void, b int", (None, 2)), ("a string, b int", ("x", 1)), ("b int, a binary", (3, b"y"))],
    "struct": [
        ("s struct<x:int,t:struct<u:int>>, n int", (Row(x=1, t=Row(u=3)), 1)),
        ("s struct<t:struct<v:int,u:bigint>,x:double>, n int", (Row(t=Row(v=1, u=2), x=2.5), 2)),
        ("s struct<t:struct<u:double>,y:string>", (Row(t=Row(u=0.5), y="q"),)),
    ],
    "no_struct": [("s struct<x:int>, b int", (None, 1)), ("s struct<x:bigint>, b int", (Row(x=None), 2))],
    "array": [
        ("l array<int>, k array<struct<x:int,z:int>>", ([1, 2], [Row(x=1, z=2), None])),
        ("l array<bigint>, k array<struct<y:int,x:double>>", ([1 << 40], [Row(y=1, x=0.5)])),
    ],
    "map": [
        ("m map<string,int>, k map<string,struct<x:int>>", ({"a": 1}, {"a": Row(x=1), "b": None})),
        ("m map<string,float>, k map<string,struct<y:string,x:bigint>>", ({"b": 0.5}, {"b": Row(y="q", x=2)})),
    ],
}
"""Of each value state: its schemas, one after the other, and what a key is given under each."""
ENTRIES = ["a int, g string", "n string, a bigint", "a double, h array<int>, n string"]
"""Schemas of a list and a map state."""
ENTRY = [(1, "x"), ("n", 1 << 40), (0.5, [1], None)]
KEYS = ["u int", "w int", "w int"]


class Evolving(StatefulProcessor):
    """All states of one version; says what it finds, and writes where the row says so."""

    version = 0

    def init(self, handle: Any) -> None:
        v = self.version
        self.values = {}
        for name, versions in VERSIONS.items():
            schema, value = versions[min(v, len(versions) - 1)]
            self.values[name] = (handle.getValueState(name, schema), storable(value))
        self.entries = handle.getListState("entries", ENTRIES[v])
        self.map = handle.getMapState("map_state", KEYS[v], ENTRIES[v])

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        writes = any(row["w"] for row in rows)
        for name, (state, value) in self.values.items():
            yield Row(k=key[0], name=name, what=shown(state.get()))
            if writes:
                state.update(value)
                yield Row(k=key[0], name=name, what=shown(state.get()))
        if writes:
            self.entries.appendValue(ENTRY[self.version])
            self.map.updateValue((self.version,), ENTRY[self.version])
        yield Row(k=key[0], name="entries", what=shown(list(self.entries.get())))
        yield Row(k=key[0], name="map", what=shown(sorted(map(repr, self.map.iterator()))))
        yield Row(k=key[0], name="got", what=shown(self.map.getValue((0,))))


class Evolved(Evolving):
    version = 1


class EvolvedTwice(Evolving):
    version = 2


def shown(value: Any) -> str:
    return repr(tuple(bytes(one) if isinstance(one, bytearray) else one for one in value) if value else value)


@pytest.fixture
def avro(set_conf: Any, rocksdb: None) -> None:
    """The encoding with which Spark's own states may change their schemas."""
    set_conf({ENCODING: "avro"})


@pytest.mark.drawn(1, group="evolution")
@pytest.mark.usefixtures("avro")
def test_schemas_evolve_as_sparks_own_do(home: Home) -> None:
    """Three versions in sequence; keys that were written by each of them, or by none but the first."""
    source = home.stream("k string, w boolean")
    for version, processor in enumerate((Evolving(), Evolved(), EvolvedTwice())):
        for written in ("abcd"[: 4 - version], "d")[: 1 if version < 2 else 2]:
            source.add([{"k": k, "w": k in written} for k in "abcd"])
        what = (processor, "k string, name string, what string", "update", "none")
        native = source.collect(source.read().groupBy("k").transformWithState(*what), "native", "update")
        assert native
        for table in ("heap", "rocksdb"):
            with StateBackend(
                str(home.path / table), parallelism=1 + version, spark=home.spark, table=table
            ) as backend:
                df = backend.groupBy(source.read(), "k").transformWithState(*what)
                assert source.collect(df, backend, "update") == native, (table, version)


SCALARS = [
    *("boolean", "int", "bigint", "float", "double", "string", "binary", "date", "timestamp", "timestamp_ntz"),
    *("decimal(9,2)", "decimal(10,2)", "decimal(11,2)", "decimal(10,3)", "decimal(20,2)", "decimal(38,2)", "void"),
]
NESTING = ["{}", "struct<x:{}>", "struct<x:{},y:int>", "array<struct<x:{}>>", "map<string,struct<y:int,x:{}>>"]


@pytest.mark.drawn(1, group="evolution")
def test_what_may_change_is_what_avro_allows_but_for_wrong_numbers(spark: SparkSession, rng: random.Random) -> None:
    jvm: Any = spark._jvm
    assert jvm is not None
    avro = jvm.org.apache.spark.sql.avro.SchemaConverters.toAvroTypeWithDefaults
    struct_of = jvm.org.apache.spark.sql.types.StructType.fromDDL
    validator = jvm.org.apache.avro.SchemaValidatorBuilder().canReadStrategy().validateAll()

    avro_of = functools.cache(lambda ddl: avro(struct_of(ddl)))

    def spark_reads(old: str, new: str) -> bool:
        schemas = jvm.java.util.ArrayList()
        schemas.add(avro_of(old))
        try:
            validator.validate(avro_of(new), schemas)
        except Py4JJavaError as error:
            if "SchemaValidationException" not in str(error):
                raise
            return False
        return True

    pairs = [(f"c {old}", f"c {new}") for old in SCALARS for new in SCALARS]
    for _ in range(100):
        outer, inner = rng.choice(NESTING), [rng.choice(SCALARS) for _ in range(3)]
        other = rng.choice([outer, outer, rng.choice(NESTING)])
        old = f"c {outer.format(inner[0])}, d {inner[2]}"
        new = rng.choice(["c {}, e int", "d void, c {}", "e string, c {}", "c {}"]).format(other.format(inner[1]))
        pairs.append((old, new))
    stricter = []
    for old, new in pairs:
        reason = why_unreadable(parse_ddl(old), parse_ddl(new))
        allowed = spark_reads(old, new)
        if not reason:
            assert allowed, (old, new)
        elif allowed:
            stricter.append((old, new, reason))
    for old, new, reason in stricter:
        kinds = reason.partition(" changes from ")[2].split(" to ")
        assert kinds[0].startswith("decimal") or (kinds[0] == "date" and kinds[1].startswith("timestamp")), (old, new)
    assert len(stricter) > 5


class Alone(StatefulProcessor):
    """One value state of a given schema."""

    def __init__(self, schema: str, value: tuple[Any, ...] | None = None, ttl_ms: int | None = None) -> None:
        self.schema, self.value, self.ttl_ms = schema, value, ttl_ms

    def init(self, handle: Any) -> None:
        self.state = handle.getValueState("balance", self.schema, self.ttl_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        list(rows)
        yield Row(what=repr(self.state.get()))
        if self.value is not None:
            self.state.update(self.value)


@pytest.mark.drawn(1, group="evolution")
@pytest.mark.usefixtures("avro")
def test_what_spark_refuses_is_refused_and_says_which_operator_and_state(home: Home) -> None:
    source = home.stream("k string")

    def run(processor: Alone) -> tuple[list[Any], list[Any]]:
        source.add([{"k": "a"}])
        what = (processor, "what string", "update", "none")
        native = source.collect(source.read().groupBy("k").transformWithState(*what), "native", "update")
        with home.backend() as backend:
            df = backend.groupBy(source.read(), "k").transformWithState(
                processor, what[1], "update", "none", name="bank"
            )
            return native, source.collect(df, backend, "update")

    for schema, value in (("a int, b string", (1, "old")), ("a int", None), ("a bigint", None)):
        native, ours = run(Alone(schema, value))
        assert native == ours
    # Numbers that were widened, and a column's type under which something was ever stored.
    for schema in ("a int", "a bigint, b int"):
        source.add([{"k": "a"}])
        df = source.read().groupBy("k").transformWithState(Alone(schema), "what string", "update", "none")
        with pytest.raises(StreamingQueryException, match="STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION"):
            source.collect(df, "native", "update")
        with home.backend() as backend:
            df = backend.groupBy(source.read(), "k").transformWithState(
                Alone(schema), "what string", "update", "none", name="bank"
            )
            with pytest.raises(StreamingQueryException) as refused:
                source.collect(df, backend, "update")
        message = str(refused.value)
        for part in ("'bank'", "'balance'", "Stored: struct<a:", f"declared: {parse_ddl(schema).simpleString()}"):
            assert part in message, message
        assert "another name" in message
    # Back to the first schema. Spark shows what the column held before it was removed; here it is a new one.
    native, ours = run(Alone("a bigint, b string"))
    assert "(1, 'old')" in repr(native)
    assert "(1, None)" in repr(ours)
    assert "old" not in repr(ours)
