import datetime
import math
import struct

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from dstl.errors import CorruptData, Invalid
from dstl.state.codec.key_codec import KeyCodec
from worlds.ddl import parse_ddl

COLUMNS = {
    "string": st.text(max_size=4),
    "bigint": st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1),
    "int": st.integers(-3, 3),
    "boolean": st.booleans(),
    "double": st.sampled_from([0.0, -0.0, math.nan, 1.5, -math.inf]),
    "float": st.sampled_from([0.0, -0.0, math.nan, 1.5]),
    "binary": st.binary(max_size=3),
    "date": st.dates(datetime.date(1900, 1, 1), datetime.date(2100, 1, 1)),
    "timestamp_ntz": st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1)),
    "decimal(20,3)": st.decimals(-1000, 1000, places=3),
    "struct<a:int,b:string>": st.fixed_dictionaries({"a": st.none() | st.integers(0, 2), "b": st.text(max_size=2)}),
    "array<double>": st.lists(st.none() | st.sampled_from([0.0, -0.0, 2.0]), max_size=2),
}


def same(a, b):
    """Equality as Spark groups by it."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def plain(key):
    return tuple(one.asDict() if hasattr(one, "asDict") else one for one in key)


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_bytes_are_equal_exactly_where_keys_are(data):
    types = data.draw(st.lists(st.sampled_from(list(COLUMNS)), max_size=3))
    schema = (
        StructType(parse_ddl(", ".join(f"c{i} {t}" for i, t in enumerate(types))).fields) if types else StructType([])
    )
    rows = data.draw(st.lists(st.tuples(*[st.none() | COLUMNS[t] for t in types]), max_size=8))
    codec = KeyCodec(schema)
    arrow = to_arrow_schema(schema, timezone="UTC")
    columns = [pa.array([row[i] for row in rows], arrow.field(i).type) for i in range(len(types))]
    encoded = codec.encode_columns(columns, len(rows))
    assert encoded == [codec.encode(row) for row in rows]
    for a, x in zip(rows, encoded, strict=True):
        assert same(plain(codec.decode(x)), a)
        for b, y in zip(rows, encoded, strict=True):
            assert same(a, b) == (x == y)
    starts = codec.starts(columns, len(rows))
    assert starts == [i for i in range(len(rows)) if i == 0 or encoded[i] != encoded[i - 1]]


@pytest.mark.parametrize(
    "ddl", ["a double", "a float", "a array<double>", "a struct<x:double>", "a map<string,double>"]
)
def test_zeros_are_one_key_and_nans_are_one_key(ddl):
    codec = KeyCodec(parse_ddl(ddl))
    wrap = {"array": lambda x: [x], "struct": lambda x: {"x": x}, "map": lambda x: {"k": x}}.get(
        ddl.split()[1].split("<")[0], lambda x: x
    )
    other_nan = struct.unpack(">d", b"\xff\xf8\0\0\0\0\0\1")[0]
    assert codec.encode((wrap(0.0),)) == codec.encode((wrap(-0.0),)) != codec.encode((wrap(1.0),))
    assert codec.encode((wrap(math.nan),)) == codec.encode((wrap(other_nan),)) != codec.encode((None,))


def test_a_timestamp_key_is_an_instant():
    codec = KeyCodec(parse_ddl("t timestamp"))
    instant = datetime.datetime(2020, 6, 1, 12, tzinfo=datetime.UTC)
    berlin = pa.array([instant], pa.timestamp("us", "Europe/Berlin"))
    assert codec.encode_columns([berlin], 1) == [codec.encode((instant,))]
    assert codec.decode(codec.encode((instant,)))[0].astimezone(datetime.UTC) == instant


def test_large_strings_are_keys_too():
    codec = KeyCodec(parse_ddl("s string"))
    column = pa.array(["a", None, ""], pa.large_string())
    assert codec.encode_columns([column], 3) == [b"a", b"\xff", b""]


def test_a_collated_string_is_refused():
    with pytest.raises(Invalid, match="collated by UTF8_LCASE"):
        KeyCodec(StructType([StructField("s", StringType("UTF8_LCASE"))]))


def test_a_wrong_key_names_its_column():
    codec = KeyCodec(parse_ddl("a int, b string"), "the user key of state 'm'")
    with pytest.raises(Invalid, match="column 'a' of the user key of state 'm'"):
        codec.encode(("x", "y"))
    with pytest.raises(Invalid, match="takes 2 values"):
        codec.encode(("x",))


@pytest.mark.parametrize("ddl", ["a bigint", "a string", "a int, b string"])
@pytest.mark.parametrize("data", [b"\x01\x02\xff", b"\xff\xfe", b"\x91\x01\xc1"])
def test_foreign_bytes_are_corrupt(ddl, data):
    with pytest.raises(CorruptData):
        KeyCodec(parse_ddl(ddl)).decode(data)


@pytest.mark.parametrize(
    ("ddl", "key", "expected"),
    [
        ("k string", ("aé",), "61c3a9"),
        ("k string", (None,), "ff"),
        ("k int", (-2,), "feffffffffffffff"),
        ("k date", (datetime.date(1970, 1, 3),), "0200000000000000"),
        ("a string, b int", ("x", 1), "00010000000100000078"),
        ("a string, b int", (None, 1), "010000000001000000"),
        ("k double", (-0.0,), "000000000000000000"),
        ("k double", (float("-nan"),), "00000000000000f87f"),
        ("m map<string,int>", ({"b": 1, "a": 2},), "00090000009292a1610292a16201"),
    ],
)
def test_the_bytes_of_keys_stay_what_they_are(ddl, key, expected):
    """From release 0.1.0 on these bytes are in users' checkpoints: add lines, change none."""
    assert KeyCodec(parse_ddl(ddl)).encode(key).hex() == expected
