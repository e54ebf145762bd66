"""Values of several schema versions side by side: what is read is what the newest schema says."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, Row, StructType

from dstl.errors import CorruptData
from dstl.state.codec.schema_evolution import why_unreadable
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.vectorised.aggregation import Aggregate, state_fields
from worlds.ddl import parse_ddl

MOMENT = datetime.datetime(2020, 1, 1)


def read_by_both(schemas: list[str], version: int, value: tuple[Any, ...], write_time_ms: int | None = None) -> Any:
    """Write under one of the versions, read under the last, value by value and as columns; both must agree."""
    parsed = [parse_ddl(each) for each in schemas]
    for old in parsed[:-1]:
        assert not why_unreadable(old, parsed[-1])
    data = ValueCodec("s", parsed[:version], write_time_ms=write_time_ms).encode(value)
    codec = ValueCodec("s", parsed)
    found = codec.decode(data)
    assert codec.decode(data) == found  # the first value of a version goes another way than the later ones
    rewritten = ValueCodec("s", parsed[-1:]).encode(found)
    newest = ValueCodec("s", parsed).encode(found)
    assert newest[1:] == rewritten[1:]
    columns, again = ValueColumns("s", parsed), pa.array([data, None, newest, data], pa.binary())
    assert columns.decode(again).equals(columns.decode(pa.array([newest, None, newest, newest], pa.binary())))
    return found


@pytest.mark.parametrize(
    ("old", "value", "new", "found"),
    [
        ("a int", (1,), "b string, a int", (None, 1)),
        ("a int, b string", (1, "x"), "b string", ("x",)),
        ("a int, b int", (1, 2), "b int", (2,)),
        ("a int, b string, c double", (1, "x", 0.5), "c double, a int, b string", (0.5, 1, "x")),
        ("a int", (1,), "z int", (None,)),
        ("a int", (1,), "A int", (None,)),
        ("a int, l array<int>", (1, [2]), "a long", (1,)),
        ("a tinyint, b smallint", (-5, 300), "b long, a float", (300, -5.0)),
        ("a int", (-5,), "a bigint", (-5,)),
        ("a int", (16777217,), "a float", (16777216.0,)),
        ("a int", (16777217,), "a double", (16777217.0,)),
        # Between two floats, just above the middle: by way of a double it would be rounded down.
        ("a bigint", ((1 << 60) + (1 << 36) + 1,), "a float", (float((1 << 60) + (1 << 37)),)),
        ("a bigint", ((1 << 53) + 1,), "a double", (float(1 << 53),)),
        ("a float", (0.1,), "a double", (0.10000000149011612,)),
        ("a float, s string", (0.1, "q"), "s string, a double", ("q", 0.10000000149011612)),
        ("a string", ("ä",), "a binary", (b"\xc3\xa4",)),
        ("a binary", (b"hi\xff",), "a string", ("hi�",)),
        ("a date", (datetime.date(2020, 1, 1),), "a int", (18262,)),
        ("a date", (datetime.date(2020, 1, 1),), "a double", (18262.0,)),
        ("a int", (18262,), "a date", (datetime.date(2020, 1, 1),)),
        ("a timestamp_ntz", (MOMENT,), "a bigint", (1577836800000000,)),
        ("a timestamp_ntz, t string", (MOMENT, ""), "a float", (1577836766822400.0,)),
        ("a bigint", (1577836800000000,), "a timestamp_ntz", (MOMENT,)),
        ("a decimal(10,2)", (decimal.Decimal("1.25"),), "a decimal(11,2)", (decimal.Decimal("1.25"),)),
        ("a void, b int", (None, 2), "a string, b int", (None, 2)),
        ("s struct<x:int>", (Row(x=1),), "s struct<y:string,x:int>", (Row(y=None, x=1),)),
        ("s struct<x:int,y:string>", (Row(x=1, y="r"),), "s struct<y:string>", (Row(y="r"),)),
        ("s struct<x:int>, b int", (None, 1), "s struct<x:bigint>, b int", (None, 1)),
        (
            "s struct<x:int,t:struct<u:int>>",
            (Row(x=1, t=Row(u=3)),),
            "s struct<t:struct<v:int,u:double>,x:double>",
            (Row(t=Row(v=None, u=3.0), x=1.0),),
        ),
        ("l array<int>", ([1, None],), "l array<double>", ([1.0, None],)),
        ("l array<struct<x:int,z:int>>", ([Row(x=1, z=2), None],), "l array<struct<x:float>>", ([Row(x=1.0), None],)),
        ("m map<string,int>", ({"a": 1, "b": None},), "m map<string,float>", ({"a": 1.0, "b": None},)),
        ("m map<int,struct<x:int>>", ({7: Row(x=1)},), "m map<int,struct<y:int,x:long>>", ({7: Row(y=None, x=1)},)),
        ("m map<string,array<date>>", ({"a": [datetime.date(1970, 1, 2)]},), "m map<string,array<int>>", ({"a": [1]},)),
    ],
)
@pytest.mark.parametrize("write_time_ms", [None, 1_700_000_000_000])
def test_a_value_of_an_older_schema_reads_as_the_newest_says(
    old: str, value: tuple[Any, ...], new: str, found: tuple[Any, ...], write_time_ms: int | None
) -> None:
    got = read_by_both([old, new], 1, value, write_time_ms)
    assert repr(got) == repr(found)
    # Beside a version in between, with one more column.
    assert repr(read_by_both([old, f"{old}, more int", f"{new}, more int"], 1, value)) == repr((*found, None))
    nulls = (None,) * len(value)
    assert read_by_both([old, new], 1, nulls) == (None,) * len(found)


def test_a_column_that_was_removed_and_came_back_is_empty_and_not_what_it_was() -> None:
    versions = ["a int, b string", "a int", "b string, a long", "a long, b string, c int"]
    assert read_by_both(versions[:3], 1, (1, "old")) == (None, 1)
    assert read_by_both(versions, 1, (1, "old")) == (1, None, None)
    assert read_by_both(versions, 3, ("new", 2)) == (2, "new", None)
    inside = [
        f"s struct<{each}>, l array<struct<{each}>>, f boolean" for each in ("x:int,y:int", "x:int", "y:int,x:int")
    ]
    assert read_by_both(inside, 1, (Row(x=1, y=2), [Row(x=3, y=4)], True)) == (Row(None, 1), [Row(None, 3)], True)
    # A column that is a struct and was gone for a while has no field of old left either.
    gone = ["a int, s struct<x:int>", "a int", "a int, s struct<x:int>"]
    assert read_by_both(gone, 1, (1, Row(x=1))) == (1, None)


ATOMS = ["int", "bigint", "float", "double", "string", "binary", "date", "timestamp_ntz", "boolean", "decimal(10,2)"]
WIDENS = {
    "int": ["bigint", "double", "float"],
    "bigint": ["double"],
    "float": ["double"],
    "date": ["int", "bigint"],
    "timestamp_ntz": ["bigint"],
    "string": ["binary"],
    "decimal(10,2)": ["decimal(11,2)"],
}


class Column:
    """One column of a random history: its number says what it is, however it is called later."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.kind = rng.choice(["atom", "atom", "atom", "struct", "array", "map"]) if depth else "atom"
        self.atom = rng.choice(ATOMS)
        self.inner = (
            [] if self.kind == "atom" else [(f"f{i}", Column(rng, depth - 1)) for i in range(rng.choice([1, 2]))]
        )

    def ddl(self) -> str:
        if self.kind == "atom":
            return self.atom
        if self.kind == "struct":
            return f"struct<{', '.join(f'{n}:{c.ddl()}' for n, c in self.inner)}>"
        inner = self.inner[0][1].ddl()
        return f"array<{inner}>" if self.kind == "array" else f"map<string,{inner}>"

    def change(self, rng: random.Random) -> None:
        if self.kind == "atom" and self.atom in WIDENS and rng.random() < 0.4:
            self.atom = rng.choice(WIDENS[self.atom])
        elif self.kind == "struct":
            self.inner = changed(rng, self.inner)
        elif self.kind != "atom":
            self.inner[0][1].change(rng)


def changed(rng: random.Random, columns: list[tuple[str, Column]]) -> list[tuple[str, Column]]:
    """Widen, add, remove and reorder; names of removed columns never come back."""
    found = list(columns)
    for _, column in found:
        column.change(rng)
    if len(found) > 1 and rng.random() < 0.3:
        found.remove(rng.choice(found))
    if rng.random() < 0.4:
        found.append((f"c{rng.getrandbits(40)}", Column(rng, 1)))
    rng.shuffle(found)
    return found


def test_random_histories_read_the_same_row_by_row_and_as_columns(rng: random.Random) -> None:
    """Three random changes in sequence; a value of every version is read under the last one."""
    for _ in range(60):
        columns = [(f"c{i}", Column(rng, 2)) for i in range(rng.randrange(1, 5))]
        versions = []
        for _ in range(4):
            versions.append(", ".join(f"{name} {column.ddl()}" for name, column in columns))
            columns = changed(rng, columns)
        for version in range(1, 5):
            schema = parse_ddl(versions[version - 1])
            value = tuple(sample(rng, field.dataType) for field in schema.fields)
            found = read_by_both(versions, version, value)
            new = parse_ddl(versions[-1])
            before = ValueCodec("s", [schema]).decode(ValueCodec("s", [schema]).encode(value))
            for name, one in zip(new.names, found, strict=True):
                if name not in schema.names:
                    assert one is None
                elif schema[name].dataType == new[name].dataType:
                    assert repr(one) == repr(before[schema.names.index(name)])


def sample(rng: random.Random, kind: Any) -> Any:
    if rng.random() < 0.2:
        return None
    if isinstance(kind, StructType):
        return Row(**{f.name: sample(rng, f.dataType) for f in kind.fields})
    name = kind.simpleString()
    if name.startswith("array"):
        return [sample(rng, kind.elementType) for _ in range(rng.randrange(3))]
    if name.startswith("map"):
        return {f"k{i}": sample(rng, kind.valueType) for i in range(rng.randrange(3))}
    return {
        "int": lambda: rng.randrange(-(1 << 31), 1 << 31),
        "bigint": lambda: rng.randrange(-(1 << 63), 1 << 63),
        "float": lambda: rng.choice([0.5, float("inf"), -1.25]),
        "double": rng.random,
        "string": lambda: rng.choice(["", "ä", "x" * 40]),
        "binary": lambda: rng.randbytes(3),
        "date": lambda: datetime.date(1960, 1, 1) + datetime.timedelta(days=rng.randrange(30_000)),
        "timestamp_ntz": lambda: MOMENT + datetime.timedelta(microseconds=rng.randrange(-(1 << 50), 1 << 50)),
        "boolean": lambda: rng.random() < 0.5,
        "decimal(10,2)": lambda: decimal.Decimal(rng.randrange(-(10**10) + 1, 10**10)) / 100,
        "decimal(11,2)": lambda: decimal.Decimal(rng.randrange(-(10**11) + 1, 10**11)) / 100,
    }[name]()


def test_a_damaged_value_of_an_older_schema_is_refused() -> None:
    for old, new, value in (
        ("a int, b int", "b long", (1, 2)),
        ("a int, s struct<x:int,y:int>", "s struct<y:int>", (1, Row(x=1, y=2))),
    ):
        schemas = [parse_ddl(old), parse_ddl(new)]
        data = ValueCodec("s", schemas[:1]).encode(value)
        shorter = [data[:size] for size in range(len(data))]
        other = ValueCodec("s", [parse_ddl("a int, s struct<x:int>")]).encode((1, Row(x=1)))
        for bad in [*shorter, other, b"\x03" + data[1:], b"\x00" + data[1:]]:
            with pytest.raises(CorruptData):
                ValueCodec("s", schemas).decode(bad)
            with pytest.raises(CorruptData):
                ValueColumns("s", schemas).decode(pa.array([bad], pa.binary()))


def test_an_aggregate_does_not_begin_anew_because_of_capitals() -> None:
    """Spark's names have no case; a query whose alias got another one counted from nothing, and nobody was told."""
    of_old, of_new = (state_fields(name, Aggregate("count"), [LongType()]) for name in ("n", "N"))
    assert why_unreadable(StructType(of_old), StructType(of_new)) == (
        "'N' was called 'n', and with other capitals it would begin anew"
    )
    assert not why_unreadable(StructType(of_old), StructType(of_old + of_new))
