"""Whole columns of keys and values have the bytes that the codecs for single ones write, and come back unchanged."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import math
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    TimeType,
)

from dstl.column_buffers import array_of, numpy_of, valid_of
from dstl.errors import CorruptData, Invalid
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import ValueCodec
from dstl.state.codec.value_columns import ValueColumns, without_expired
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.vectorised.exact_sums import exact_sums
from dstl.state.vectorised.key_codes import with_steps
from dstl.state.vectorised.time_windows import TimeWindows, Windows, merge_sessions

INSTANT = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30), timezones=st.just(datetime.UTC))
DECIMAL = DecimalType(38, 4)
VALUES: list[tuple[DataType, st.SearchStrategy[Any]]] = [
    (BooleanType(), st.booleans()),
    (ByteType(), st.integers(-128, 127)),
    (ShortType(), st.integers(-(1 << 15), (1 << 15) - 1)),
    (IntegerType(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (LongType(), st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-300, 70_000))),
    (DoubleType(), st.floats()),
    (FloatType(), st.floats(width=32)),
    (DateType(), st.dates()),
    (TimestampType(), INSTANT),
    (TimestampNTZType(), st.datetimes()),
    (StringType(), st.one_of(st.text(max_size=5), st.integers(0, 70_000).map(lambda n: "é" * (n // 2)))),
    (BinaryType(), st.one_of(st.binary(max_size=5), st.sampled_from([255, 256, 65535, 65536]).map(bytes))),
    (DECIMAL, st.integers(-(10**38) + 1, 10**38 - 1).map(lambda n: decimal.Decimal(n).scaleb(-4, decimal.Context(50)))),
    (DECIMAL, st.integers(-(10**20), 10**20).map(lambda n: decimal.Decimal(n).scaleb(-4, decimal.Context(50)))),
    (DecimalType(18, 2), st.integers(-(10**18) + 1, 10**18 - 1).map(lambda n: decimal.Decimal(n).scaleb(-2))),
    (TimeType(), st.times()),
    (
        DayTimeIntervalType(),
        st.integers(-(10**17), 10**17).map(lambda micros: datetime.timedelta(microseconds=micros)),
    ),
    (NullType(), st.none()),
    (StructType([]), st.just({})),
    (ArrayType(LongType()), st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=3)),
    (
        StructType([StructField("a", LongType()), StructField("t", TimestampType())]),
        st.fixed_dictionaries({"a": st.integers(0, 9), "t": INSTANT}),
    ),
    (
        ArrayType(StructType([StructField("x", DoubleType()), StructField("m", MapType(LongType(), BinaryType()))])),
        st.lists(
            st.none()
            | st.fixed_dictionaries(
                {"x": st.sampled_from([None, -0.0, math.inf, 0.5]), "m": st.dictionaries(st.integers(), st.binary())}
            ).filter(lambda each: all(-(1 << 63) <= key < 1 << 63 for key in each["m"])),
            max_size=2,
        ),
    ),
    (
        MapType(StringType(), DECIMAL),
        st.dictionaries(st.text(max_size=2), st.none() | st.just(decimal.Decimal("1.5000"))),
    ),
]


@st.composite
def tables(draw: st.DrawFn, kinds: list[tuple[DataType, st.SearchStrategy[Any]]]) -> tuple[StructType, pa.RecordBatch]:
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=18))
    schema = StructType([StructField(f"c{i}", kind) for i, (kind, _) in enumerate(chosen)])
    count = draw(st.integers(0, 5))
    arrow = arrow_schema(schema)
    columns = [
        pa.array(draw(st.lists(st.none() | values, min_size=count, max_size=count)), field.type)
        for (_, values), field in zip(chosen, arrow, strict=True)
    ]
    return schema, pa.RecordBatch.from_arrays(columns, schema=arrow)


def rows_of_table(table: pa.RecordBatch) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


@settings(deadline=None, max_examples=50)
@given(tables(VALUES))
def test_a_column_of_values_has_the_bytes_of_single_values_and_comes_back(
    drawn: tuple[StructType, pa.RecordBatch],
) -> None:
    schema, table = drawn
    columns = ValueColumns("s", [schema])
    encoded = columns.encode(table)
    for written in (None, 1_700_000_000_000):
        one = ValueCodec("s", [schema], write_time_ms=written)
        found = ValueColumns("s", [schema], written).encode(table)
        assert found.to_pylist() == [one.encode(row) for row in rows_of_table(table)]
    assert columns.decode(encoded).cast(table.schema).equals(table, check_metadata=False) or repr(
        columns.decode(encoded).to_pylist()
    ) == repr(table.to_pylist())


@settings(deadline=None, max_examples=50)
@given(tables([kind for kind in VALUES if not isinstance(kind[0], MapType)]))
def test_a_column_of_keys_has_the_bytes_of_single_keys(drawn: tuple[StructType, pa.RecordBatch]) -> None:
    schema, table = drawn
    codec = KeyCodec(schema)
    found = codec.encode_array(table.columns, table.num_rows)
    assert found.to_pylist() == codec.encode_columns(table.columns, table.num_rows)
    assert found.to_pylist() == [codec.encode(row) for row in rows_of_table(table)]
    assert found.null_count == 0


FIRST = StructType([StructField("n", IntegerType()), StructField("x", DoubleType())])
SECOND = StructType([StructField("x", DoubleType()), StructField("n", LongType()), StructField("t", StringType())])


DAMAGED = [
    kind
    for kind in VALUES
    if not isinstance(kind[0], (DateType, TimestampType, TimestampNTZType, TimeType, DayTimeIntervalType, DecimalType))
    and not hasattr(kind[0], "elementType")
    and not hasattr(kind[0], "fields")
    and not hasattr(kind[0], "keyType")
]
"""Types of whose values every slot is good for both codecs."""


def test_values_of_several_schema_versions_and_with_write_times_are_read_together() -> None:
    old = ValueCodec("s", [FIRST])
    timed = ValueCodec("s", [FIRST], write_time_ms=1_700_000_000_000)
    new = ValueCodec("s", [FIRST, SECOND])
    values = [
        old.encode((1, 0.5)),
        None,
        new.encode((1.5, 1 << 40, "a")),
        timed.encode((None, 2.5)),
        old.encode((2, None)),
    ]
    found = ValueColumns("s", [FIRST, SECOND]).decode(pa.array(values, pa.binary()))
    nothing = (None, None, None)
    assert rows_of_table(found) == [(0.5, 1, None), nothing, (1.5, 1 << 40, "a"), (2.5, None, None), (None, 2, None)]


@settings(deadline=None, max_examples=100)
@given(st.data(), tables(DAMAGED), st.integers(0, 3))
def test_damaged_rows_are_refused_by_both_codecs_or_read_alike(
    data: st.DataObject, drawn: tuple[StructType, pa.RecordBatch], flips: int
) -> None:
    schema, table = drawn
    one, columns = ValueCodec("s", [schema]), ValueColumns("s", [schema])
    values = []
    for row in rows_of_table(table):
        value = bytearray(one.encode(row))
        for _ in range(flips):
            value[data.draw(st.integers(1, len(value) - 1))] = data.draw(st.integers(0, 255))
        values.append(
            bytes(value[: data.draw(st.integers(len(value) - 1, len(value)))] + data.draw(st.binary(max_size=1)))
        )
    for value in values:
        # Among others, so that a field may not reach into its neighbour's bytes.
        column = pa.array([b"\x01" * 100, value, b"\x01" * 100], pa.binary()).slice(1, 1)
        try:
            found = one.decode(value)
        except CorruptData:
            with pytest.raises(CorruptData, match="'s'"):
                columns.decode(column)
        else:
            assert repr(rows_of_table(columns.decode(column))) == repr([found])


@settings(deadline=None, max_examples=80)
@given(st.data(), tables(VALUES))
def test_damaged_rows_of_any_type_raise_nothing_but_corrupt_data(
    data: st.DataObject, drawn: tuple[StructType, pa.RecordBatch]
) -> None:
    schema, table = drawn
    one, columns = ValueCodec("s", [schema]), ValueColumns("s", [schema])
    for row in rows_of_table(table):
        value = bytearray(one.encode(row))
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(CorruptData):
            assert len(one.decode(bytes(value))) == len(schema.names)
        with contextlib.suppress(CorruptData):
            assert columns.decode(pa.array([bytes(value)], pa.binary())).validate() is None


@pytest.mark.parametrize("schema", [FIRST, SECOND])
def test_values_written_too_long_ago_are_nulls(schema: StructType) -> None:
    rows = [(1, 2.5), (2, 0.5)] if schema is FIRST else [(2.5, 1000, "text"), (None, None, None)]
    values = [ValueCodec("s", [schema], write_time_ms=at).encode(row) for at in (99, 100, 101, None) for row in rows]
    column = pa.array([b"before", None, *values, None], pa.binary()).slice(1)
    kept = without_expired(column, 100).to_pylist()
    assert kept == [None, *[None] * 4, *values[4:], None]
    assert without_expired(column, 98).to_pylist() == column.to_pylist()
    assert without_expired(pa.array([], pa.binary()), 98).to_pylist() == []


def test_a_null_in_a_required_field_is_refused() -> None:
    columns = ValueColumns("s", [StructType([StructField("n", LongType(), nullable=False)])])
    with pytest.raises(Invalid, match="'n' of state 's' is declared NOT NULL"):
        columns.encode(pa.record_batch([pa.array([1, None])], names=["n"]))


ODD = (0.0, -0.0, 1e300, -1e300, 5e-324, 1e-310)
ODDEST = (*ODD, 1e308, -1e308, math.inf, -math.inf, math.nan)


def number(rng: random.Random) -> float:
    if rng.random() < 0.1:
        return rng.choice(ODDEST if rng.random() < 0.3 else ODD)
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20)


def sums(rows: list[tuple[int, float]], count: int) -> list[bytes]:
    found = exact_sums(np.array([x for _, x in rows], float), np.array([g for g, _ in rows], np.int64), count)
    return [each.tobytes() for each in found]


def test_a_sum_depends_neither_on_the_order_of_its_rows_nor_on_other_groups(rng: random.Random) -> None:
    for _ in range(500):
        groups = [[number(rng) for _ in range(rng.randrange(0, 9))] for _ in range(rng.randrange(1, 6))]
        rows = [(group, x) for group, xs in enumerate(groups) for x in xs]
        found = sums(rows, len(groups))
        rng.shuffle(rows)
        assert sums(rows, len(groups)) == found
        assert [sums([(0, x) for x in xs], 1)[0] for xs in groups] == found


def test_a_sum_is_as_close_as_one_rounding_of_its_largest_number_allows(rng: random.Random) -> None:
    for _ in range(500):
        xs = [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 20) for _ in range(rng.randrange(3, 40))]
        (found,) = exact_sums(np.array(xs), np.zeros(len(xs), np.int64), 1)
        assert abs(found - float(sum(map(Fraction, xs)))) <= 4 * math.ulp(max(map(abs, xs)))


def windows_of(moment: int, windows: TimeWindows) -> set[int]:
    """Spark's own: the last start at or before the moment, and those before it that still reach it."""
    last = moment - (moment - windows.offset) % windows.slide
    starts = (last - i * windows.slide for i in range(-(-windows.size // windows.slide)))
    return {start for start in starts if start <= moment < start + windows.size}


@settings(deadline=None)
@given(st.lists(st.integers(-200, 200), min_size=1), st.integers(1, 40), st.data())
def test_windows_are_those_of_sparks_formula(moments: list[int], size: int, data: st.DataObject) -> None:
    windows = TimeWindows(size, data.draw(st.integers(1, size)), data.draw(st.integers(-50, 50)))
    panes = windows.panes(np.array(moments, np.int64))
    assert all(pane <= moment < pane + windows.pane for pane, moment in zip(panes, moments, strict=True))
    rows, starts = windows.windows_of(panes)
    for at, moment in enumerate(moments):
        found = starts[rows == at].tolist()
        assert len(found) == len(set(found))
        assert set(found) == windows_of(moment, windows)


@pytest.mark.parametrize("farthest", [9, 1 << 60])
def test_rows_are_numbered_by_key_and_moment_however_far_moments_lie_apart(farthest: int, rng: random.Random) -> None:
    rows = [(rng.randrange(20), 3 * rng.choice((0, 1, rng.randrange(-farthest, farthest)))) for _ in range(300)]
    seen: dict[tuple[int, int], int] = {}
    expected = [seen.setdefault(row, len(seen)) for row in rows]
    codes, moments = np.array(rows, np.int64).T
    assert with_steps(codes, moments, 3).tolist() == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50), st.integers(1, 12))))
def test_sessions_are_unions_of_what_touches(pieces: list[tuple[int, int, int]]) -> None:
    keys, starts, lengths = (np.array(each, np.int64) for each in (zip(*pieces, strict=True) if pieces else ([],) * 3))
    order, of_piece, sessions = merge_sessions(Windows(keys, starts, starts + lengths))
    assert sorted(order.tolist()) == list(range(len(pieces)))
    expected: list[tuple[int, int, int]] = []
    for key, start, end in sorted((k, s, s + n) for k, s, n in pieces):
        if expected and expected[-1][0] == key and start <= expected[-1][2]:
            expected[-1] = (key, expected[-1][1], max(end, expected[-1][2]))
        else:
            expected.append((key, start, end))
    assert list(zip(sessions.keys, sessions.starts, sessions.ends, strict=True)) == expected
    for at, session in zip(order, of_piece, strict=True):
        assert sessions.keys[session] == keys[at]
        assert sessions.starts[session] <= starts[at] < sessions.ends[session]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.uint16, np.int64, np.float32])
@pytest.mark.parametrize("offset", [0, 1, 8, 13])
def test_columns_over_buffers_are_those_that_arrow_makes(dtype: type[Any], offset: int) -> None:
    values = (np.arange(40) % 3).astype(dtype)[::2]
    nulls = np.arange(20) % 4 == 1
    for each in (None, nulls, np.zeros(20, np.bool_), np.ones(20, np.bool_)):
        column = array_of(values, each)
        assert column.equals(pa.array(values, mask=each))
        for part in (column.slice(offset), column.slice(offset, 0), column.slice(offset, 3)):
            assert valid_of(part).tolist() == part.is_valid().to_pylist()
            assert numpy_of(part, 1).tolist() == part.fill_null(dtype(1).item()).to_pylist()
            assert numpy_of(part, 1).dtype == dtype
    empty = pa.array([], pa.from_numpy_dtype(dtype))
    assert numpy_of(empty).tolist() == valid_of(empty).tolist() == []
