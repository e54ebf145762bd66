import datetime
import decimal
import json
import math
import struct
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)

from dstl.errors import Invalid
from dstl.state.codec.value_codec import TimeToLive, ValueCodec, write_time_ms
from worlds.ddl import parse_ddl

MICROS = st.datetimes(datetime.datetime(1950, 1, 1), datetime.datetime(2200, 1, 1))
ATOMS = {
    BooleanType(): st.booleans(),
    ByteType(): st.integers(-(2**7), 2**7 - 1),
    ShortType(): st.integers(-(2**15), 2**15 - 1),
    IntegerType(): st.integers(-(2**31), 2**31 - 1),
    LongType(): st.integers(-(2**63), 2**63 - 1),
    FloatType(): st.floats(width=32, allow_nan=False),
    DoubleType(): st.floats(allow_nan=False),
    StringType(): st.text(max_size=20),
    BinaryType(): st.binary(max_size=20),
    DateType(): st.dates(),
    TimestampType(): MICROS,
    TimestampNTZType(): st.datetimes(),
    DecimalType(10, 2): st.decimals(-99999999, 99999999, places=2),
    DecimalType(38, 18): st.decimals(-(10**19), 10**19, places=18),
    DayTimeIntervalType(): st.timedeltas(datetime.timedelta(-1000), datetime.timedelta(1000)),
    YearMonthIntervalType(): st.integers(-1000, 1000),
}


def types_with_values(depth=2):
    atoms = st.sampled_from(list(ATOMS)).map(lambda t: (t, ATOMS[t]))
    if depth == 0:
        return atoms
    inner = types_with_values(depth - 1)
    arrays = inner.map(lambda tv: (ArrayType(tv[0]), st.lists(st.none() | tv[1], max_size=3)))
    maps = st.tuples(st.sampled_from([StringType(), LongType()]), inner).map(
        lambda p: (MapType(p[0], p[1][0]), st.dictionaries(ATOMS[p[0]], st.none() | p[1][1], max_size=3))
    )

    def struct_of(parts):
        names = [f"f{i}" for i in range(len(parts))]
        make = Row(*names)
        schema = StructType([StructField(n, t) for n, (t, _) in zip(names, parts, strict=True)])
        return schema, st.tuples(*[st.none() | v for _, v in parts]).map(lambda values: make(*values))

    return st.one_of(atoms, atoms, arrays, maps, st.lists(inner, min_size=1, max_size=3).map(struct_of))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_what_is_encoded_is_decoded(data):
    parts = data.draw(st.lists(types_with_values(), min_size=1, max_size=5))
    schema = StructType([StructField(f"c{i}", t) for i, (t, _) in enumerate(parts)])
    codec = ValueCodec("s", [schema], write_time_ms=data.draw(st.none() | st.integers(0, 2**50)))
    for _ in range(3):
        value = tuple(data.draw(st.none() | v) for _, v in parts)
        encoded = codec.encode(value)
        assert codec.decode(encoded) == value
        assert codec.encode(list(value)) == encoded
        assert codec.encode(dict(zip(schema.names, value, strict=True))) == encoded
    json.loads(schema.json())


@pytest.mark.parametrize(
    ("ddl", "value", "names"),
    [
        ("n int", (2**31,), "'n'"),
        ("n int, s string", (2**31, "x"), "'n'"),
        ("n long, s string", (2**63, "x"), "'n'"),
        ("n int", ("x",), "'n'"),
        ("n int", (1.5,), "'n'"),
        ("b boolean", (1,), "'b'"),
        ("s string", (5,), "'s'"),
        ("a int, s string", (1, b"x"), "'s'"),
        ("d decimal(4,2)", (decimal.Decimal("100.00"),), "'d'"),
        ("n int not null", (None,), "'n'"),
        ("n int not null, s string", (None, "x"), "'n'"),
        ("a array<int>", (["x"],), "'a'"),
        ("n int", (1, 2), "takes 1"),
        ("n int, s string", ("x",), "takes 2"),
        ("n int, s string", "ab", "tuple"),
        ("n int", 5, "tuple"),
        ("a int, b int", b"ab", "tuple"),
        ("a int, b int", {1, 2}, "tuple"),
        ("t timestamp_ntz", (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),), "'t'"),
        ("t timestamp_ntz", (5,), "'t'"),
        ("i interval day to second", (5,), "'i'"),
        ("b binary", ("x",), "'b'"),
        ("p struct<a: int>", (5,), "'p'"),
        ("p struct<a: int>", ((1, 2),), "'p'"),
    ],
)
def test_a_value_of_another_shape_is_refused_by_name(ddl, value, names):
    codec = ValueCodec("balance", [parse_ddl(ddl)])
    with pytest.raises(Invalid, match=r"balance") as caught:
        codec.encode(value)
    assert names in str(caught.value)


def test_types_learned_from_one_value_do_not_let_a_wrong_one_pass():
    codec = ValueCodec("s", [parse_ddl("n int not null, d decimal(10,2) not null, s string")])
    good = (1, decimal.Decimal("1.00"), "x")
    assert codec.decode(codec.encode(good)) == good
    for bad in ((2**40, good[1], "x"), (1, decimal.Decimal("NaN"), "x"), (1, decimal.Decimal("1e20"), "x")):
        with pytest.raises(Invalid):
            codec.encode(bad)


@pytest.mark.parametrize("data_type", ["timestamp", "timestamp_ntz", "date", "interval day to second"])
def test_the_null_of_pandas_times_is_refused_with_what_to_write(data_type):
    import pandas as pd

    with pytest.raises(Invalid, match="NaT is pandas' null and no value: write None instead"):
        ValueCodec("s", [parse_ddl(f"v {data_type}")]).encode((pd.NaT,))


def test_numpy_scalars_are_taken():
    import numpy as np

    for ddl in ("n long, x double, b boolean", "n long, x double, b boolean, s string"):
        schema = parse_ddl(ddl)
        codec = ValueCodec("s", [schema])
        value = (np.int64(5), np.float64(2.5), np.bool_(True), "x")[: len(schema.names)]
        assert codec.decode(codec.encode(value)) == (5, 2.5, True, "x")[: len(schema.names)]


@pytest.mark.parametrize(
    ("ddl", "value"),
    [
        ("total long", {"zz": 1}),
        ("total long", {"total": 1, "zz": 1}),
        ("n int, s string", {"n": 1, "S": "x"}),
        ("n int, s string", {"n": 1, 0: "x"}),
        ("s struct<a: int, b: int>", ({"a": 1, "c": 2},)),
    ],
)
def test_a_dict_with_a_field_that_there_is_not_is_no_null(ddl, value):
    codec = ValueCodec("balance", [parse_ddl(ddl)])
    with pytest.raises(Invalid, match=r"balance.*there is no field .*; there are "):
        codec.encode(value)


def test_a_dict_may_leave_out_what_is_null():
    codec = ValueCodec("balance", [parse_ddl("n int, s string")])
    assert codec.decode(codec.encode({"n": 1})) == (1, None)


def test_values_of_other_kinds_are_taken_where_spark_takes_them():
    codec = ValueCodec("balance", [parse_ddl("x float, d decimal(10,2), p struct<a: int, b: int>")])
    taken = codec.decode(codec.encode((-1e300, 7, SimpleNamespace(a=1))))
    assert taken == (-math.inf, decimal.Decimal("7.00"), (1, None))


def test_a_row_is_taken_by_place_as_spark_takes_it():
    codec = ValueCodec("balance", [parse_ddl("n int")])
    assert codec.decode(codec.encode(Row(other=7))) == (7,)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_many_values_are_those_that_are_decoded_one_by_one(data):
    """All as tuples, or all as the bytes that they were: then there is one that a struct alone cannot read."""
    schema, longer = parse_ddl("a int, b double, c boolean"), parse_ddl("a int, b double, c boolean, d long")
    codec = ValueCodec("s", [schema, longer], write_time_ms=data.draw(st.sampled_from([None, 7])))
    numbers = st.tuples(st.integers(0, 9), st.floats(allow_nan=False), st.booleans(), st.integers(0, 9)).map(
        codec.encode
    )
    nulls = st.just(codec.encode((1, None, True, 2)))
    others = nulls | st.just(ValueCodec("s", [schema]).encode((1, 2.0, True))) | st.binary(max_size=22)
    plain = data.draw(st.lists(numbers | st.none(), max_size=6))
    values = plain + data.draw(st.lists(others, max_size=1))
    many = codec.decode_many(list(values))
    if len(values) == len(plain):
        assert many == [None if value is None else codec.decode(value) for value in values]
        assert not any(isinstance(each, bytes) for each in many)
    else:
        assert many == values
    assert ValueCodec("s", [parse_ddl("t string")]).decode_many([b"x", None]) == [b"x", None]


def test_the_write_time_is_in_the_value():
    schema = parse_ddl("n long")
    timed, plain = ValueCodec("s", [schema], write_time_ms=1000).encode((5,)), ValueCodec("s", [schema]).encode((5,))
    assert write_time_ms(timed) == 1000
    assert write_time_ms(plain) is None
    assert not TimeToLive(10, 1009).is_dead(timed)
    assert TimeToLive(10, 1010).is_dead(timed)
    assert not TimeToLive(10, 10**15).is_dead(plain)
    # A time to live may be added or taken away: both kinds of value stay readable.
    assert ValueCodec("s", [schema]).decode(timed) == ValueCodec("s", [schema], write_time_ms=7).decode(plain) == (5,)


def test_the_bytes_of_values_stay_what_they_are():
    """From release 0.1.0 on these bytes are in users' checkpoints: add lines, change none."""
    packed = ValueCodec("s", [parse_ddl("n int, x double")], write_time_ms=3)
    assert packed.encode((None, 1.5)) == b"\x81" + struct.pack("<qBid", 3, 1, 0, 1.5)
    text = ValueCodec("s", [parse_ddl("s string, n int, b binary")])
    assert text.encode(("aé", 1, b"\0")) == b"\x01\0" + struct.pack("<IiI", 3, 1, 4) + "aé".encode() + b"\0"
    assert text.encode((None, None, b"x")) == b"\x01\x03" + struct.pack("<IiI", 0, 0, 1) + b"x"
    numbers = ValueCodec("s", [parse_ddl("a decimal(18,2), b decimal(38,0), c boolean, d date, t timestamp_ntz")])
    wide = -(10**30)
    assert numbers.encode(
        (
            decimal.Decimal("-1.50"),
            decimal.Decimal(wide),
            True,
            datetime.date(1970, 1, 2),
            datetime.datetime(1970, 1, 1, 0, 0, 1),
        )
    ) == b"\x01\0" + struct.pack("<q", -150) + wide.to_bytes(16, "little", signed=True) + struct.pack(
        "<?iq", True, 1, 10**6
    )
    nested = ValueCodec("s", [parse_ddl("a array<int>, m map<string,bigint>, s struct<x: double, d: decimal(20,0)>")])
    parts = [b"\x93\x01\xc0\xcd\x01\x00", b"\x91\x92\xa1k\x02", b"\x92\xc0\xc4\x10" + b"\xff" * 16]
    ends = [len(b"".join(parts[:count])) for count in (1, 2, 3)]
    assert nested.encode(([1, None, 256], {"k": 2}, {"d": decimal.Decimal(-1)})) == (
        b"\x01\0" + struct.pack("<3I", *ends) + b"".join(parts)
    )


@pytest.mark.parametrize("ddl", ["s string", "n int, s string, a array<string>"])
def test_a_string_that_is_not_unicode_is_refused_by_the_state(ddl):
    schema = parse_ddl(ddl)
    value = tuple({"n": 1, "s": "\ud800", "a": ["x"]}[name] for name in schema.names)
    for _ in range(2):
        with pytest.raises(Invalid, match="'balance'"):
            ValueCodec("balance", [schema]).encode(value)
