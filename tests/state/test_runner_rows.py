"""What a processor is given and what it may yield: as Spark's worker has it."""

import datetime
import pickle

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, IntegerType, MapType, StringType, StructField, StructType

from dstl.errors import Invalid
from dstl.state.frames.frame_writer import FrameWriter
from dstl.state.frames.row_reader import python_values, row_class, rows_of
from dstl.state.frames.row_writer import RowWriter
from worlds.ddl import parse_ddl
from worlds.runner import Job, Seen, batches_of


def test_input_rows_are_what_sparks_worker_hands_over():
    zone = "America/New_York"
    kind = pa.schema([
        ("k", pa.string()), ("t", pa.timestamp("us", zone)), ("u", pa.timestamp("us")), ("d", pa.date32()),
        ("x", pa.decimal128(5, 2)), ("s", pa.struct([("a", pa.int32())])), ("m", pa.map_(pa.string(), pa.int64())),
        ("l", pa.list_(pa.struct([("z", pa.int64())]))), ("b", pa.binary()), ("count", pa.int16()),
    ])  # fmt: skip
    hour = 3600 * 10**6
    fold = 1604206800 * 10**6  # 2020-11-01 01:00 EDT; an hour later it is 01:00 EST
    rows = [
        {
            "k": "a",
            "t": t,
            "u": t,
            "d": 18000,
            "x": None,
            "s": {"a": 1},
            "m": [("q", 1)],
            "l": [{"z": 2}],
            "b": b"x",
            "count": 7,
        }
        for t in (0, -1, fold, fold + hour, None, 2**55)
    ]
    batch = (
        pa.Table.from_pylist(rows, kind)
        .append_column("__dstl_key_group", pa.array([0] * 6, pa.int32()))
        .to_batches()[0]
    )
    schema = parse_ddl(
        "k string, t timestamp, u timestamp_ntz, d date, x decimal(5,2), s struct<a:int>, m map<string,long>, "
        "l array<struct<z:long>>, b binary, count short"
    )
    Seen.log = []
    Job(Seen, schema=schema).run([batch])
    (_, given, _) = Seen.log[1]
    expected = [Row(*schema.names)(*(column[i].as_py() for column in batch.columns[:-1])) for i in range(6)]
    assert given == expected
    for row, same in zip(given, expected, strict=True):
        assert isinstance(row, Row)
        assert [type(one) for one in row] == [type(one) for one in same]
        assert repr(row) == repr(same)
        assert row.asDict() == same.asDict()
        assert [one.fold for one in (row.t,) if one] == [one.fold for one in (same.t,) if one]
        assert (row.d, row["d"], row[3], row[-1]) == (same.d, same["d"], same[3], same[-1])
        assert "d" in row
        assert "zz" not in row
        assert row.count("a") == 1, "a tuple's own method is not hidden by a column, as in PySpark"
        assert row["count"] == 7
        assert pickle.loads(pickle.dumps(row)) == row
        assert row[1:3] == same[1:3]
        with pytest.raises(AttributeError):
            _ = row.missing
        with pytest.raises(ValueError, match="missing"):
            row["missing"]
        with pytest.raises(Exception, match="READ_ONLY"):
            row.d = 1


def test_outputs_are_matched_as_sparks_worker_does():
    rows = [
        Row(n=1, k="by name", extra=5), Row(k="missing is null"), {"k": "dict", "n": 3}, ("tuple", "w", 4),
        Row("k", "what", "n")("called", "w", 5),
    ]  # fmt: skip

    class Yields(Seen):
        def handleInputRows(self, key, rows_, timerValues):
            return iter(rows)

    out = Job(Yields).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    assert [tuple(r.values()) for r in out] == [
        ("by name", None, 1), ("missing is null", None, None), ("dict", None, 3), ("tuple", "w", 4), ("called", "w", 5)
    ]  # fmt: skip


@pytest.mark.parametrize("most_bytes", [1, 700, 1 << 30])
@pytest.mark.parametrize("style", ["row", "pandas"])
def test_outputs_with_more_text_than_fits_one_array_are_several_batches(style, most_bytes):
    schema = parse_ddl("k string, v string")
    rows = [(f"k{i}", f"{i:0{i}d}") for i in range(50)] + [("long", "x" * 2000), ("", None)]
    writer = (RowWriter if style == "row" else FrameWriter)(schema, "op", most_bytes=most_bytes)
    held = [Row(k=k, v=v) for k, v in rows]
    if style == "pandas":
        held = [pd.DataFrame(rows[at : at + 13], columns=schema.names) for at in range(0, len(rows), 13)]
    made = list(writer.batches([held]))
    assert [(row["k"], row["v"]) for batch in made for row in batch.to_pylist()] == rows
    assert all(each.nbytes <= most_bytes for batch in made for each in batch.columns if batch.num_rows > 1)
    assert (len(made) == 1) == (most_bytes > 700)


def test_rows_of_every_form_come_out_in_their_order_in_batches_of_about_the_most_rows():
    forms = [
        lambda k, v: Row(k=k, v=v),
        lambda k, v: Row(v=v, more=0, k=k),
        lambda k, v: Row("k", "v")(k, v),
        lambda k, v: (k, v),
        lambda k, v: {"v": v, "k": k},
    ]
    one_form = [[make(i, -i) for i in range(7)] for make in forms]
    parts = [*one_form, [make(i, -i) for i, make in enumerate([*forms, *reversed(forms)])], []]
    made = list(RowWriter(parse_ddl("k long, v long"), "op", most_rows=10).batches(parts))
    assert [batch.num_rows for batch in made] == [14, 14, 17]
    expected = [(i, -i) for part in parts for i in range(len(part))]
    assert [(row["k"], row["v"]) for batch in made for row in batch.to_pylist()] == expected
    assert [b.num_rows for b in RowWriter(StructType(), "op", most_rows=2).batches([[Row(), Row(k=1)], [Row()]])] == [
        2,
        1,
    ]


def test_output_types_are_converted_as_arrow_wants_them():
    output = parse_ddl(
        "t timestamp, s struct<a:int,b:array<struct<x:int>>>, m map<string,struct<y:int>>, d decimal(6,2)"
    )
    import decimal

    row = Row(t=datetime.datetime(2020, 1, 1), s=Row(b=[Row(x=1)], a=2), m={"q": Row(y=3)}, d=decimal.Decimal("1.5"))

    class Yields(Seen):
        def handleInputRows(self, key, rows_, timerValues):
            return iter([row])

    (out,) = Job(Yields, output=output).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    assert out["t"] == datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    assert out["s"] == {"a": 2, "b": [{"x": 1}]}
    assert out["m"] == [("q", {"y": 3})]
    assert out["d"] == decimal.Decimal("1.50")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(k=5, what="x", n=1), "column 'k' is not string"),
        (Row(k="x", what="x", n="y"), "column 'n' is not bigint"),
        (("too", "few"), "2 values for the 3 output columns"),
        (5, "yielded int"),
    ],
)
def test_a_wrong_output_names_operator_and_column(row, message):
    class Yields(Seen):
        def handleInputRows(self, key, rows, timerValues):
            return iter([row])

    with pytest.raises(Invalid, match="operator 'op'") as caught:
        Job(Yields).run(batches_of([{"k": "a", "op": "", "n": 0}], 5))
    assert message in str(caught.value)


INNER = StructType([StructField("x", IntegerType(), False), StructField("y", StringType())])


def schema(kind, nullable=True):
    return StructType([StructField("k", StringType()), StructField("v", kind, nullable)])


CASES = [
    (schema(IntegerType(), False), 1, None, "column 'v'"),
    (schema(StringType(), False), "", None, "column 'v'"),
    (schema(INNER), {"x": 1, "y": None}, {"x": None, "y": "a"}, ".x of column 'v'"),
    (schema(ArrayType(IntegerType(), False)), [1], [1, None], "[] of column 'v'"),
    (schema(ArrayType(INNER)), [None, {"x": 1, "y": None}], [{"x": None, "y": None}], "[].x of column 'v'"),
    (schema(MapType(StringType(), IntegerType(), False)), {"a": 1}, {"a": 1, "b": None}, "[] of column 'v'"),
    (
        schema(MapType(StringType(), StructType([StructField("l", ArrayType(StringType(), False))]))),
        {"a": None, "b": {"l": None}, "c": {"l": ["z"]}},
        {"a": None, "b": {"l": ["z", None]}},
        "[].l[] of column 'v'",
    ),
]


@pytest.mark.parametrize(("of", "right", "wrong", "where"), CASES)
@pytest.mark.parametrize("style", ["row", "pandas"])
def test_a_null_that_the_schema_rules_out_is_refused_and_no_other(of, right, wrong, where, style):
    def write(*values):
        if style == "row":
            return list(RowWriter(of, "op").batches([[Row(k=None, v=value) for value in values]]))
        return list(FrameWriter(of, "op").batches([[pd.DataFrame({"k": [None], "v": [value]}) for value in values]]))

    rights = [right, None, right] if of["v"].nullable else [right, right]
    (batch,) = write(*rights)
    assert batch.num_rows == len(rights)
    for values in ([wrong], [right, wrong], [wrong, right]):
        with pytest.raises(Invalid) as raised:
            write(*values)
        assert f"operator 'op' yielded a null in {where}, which is NOT NULL" in str(raised.value)


ZONES = [None, "UTC", "+00:00", "America/New_York", "Europe/London", "Australia/Lord_Howe", "Asia/Kolkata", "+05:30"]
INSTANTS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999) | st.integers(-(10**15), 2 * 10**15)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.none() | INSTANTS, max_size=4), st.sampled_from(ZONES))
def test_timestamps_are_what_arrow_makes_one_by_one(instants, zone):
    column = pa.array(instants, pa.timestamp("us", zone))
    try:
        expected = [one.as_py() for one in column]
    except (ValueError, OverflowError) as error:  # year 0 or 10000 in the zone
        with pytest.raises(type(error)):
            python_values(column)
        return
    found = python_values(column)
    assert found == expected
    assert [repr(one) for one in found] == [repr(one) for one in expected]


def test_the_hour_that_comes_twice():
    first = 1604206800 * 10**6  # 2020-11-01 05:00 UTC: 01:00 in New York, for the first time
    column = pa.array([first, first + 3600 * 10**6], pa.timestamp("us", "America/New_York"))
    one, two = python_values(column)
    assert (one.hour, one.fold, two.hour, two.fold) == (1, 0, 1, 1)
    assert two.timestamp() - one.timestamp() == 3600


@settings(deadline=None, max_examples=50)
@given(st.lists(st.none() | st.dates(datetime.date.min, datetime.date.max), max_size=4))
def test_dates_are_what_arrow_makes_one_by_one(dates):
    assert python_values(pa.array(dates, pa.date32())) == dates


def test_a_row_with_two_columns_of_one_name_is_read_as_pysparks():
    (row,) = rows_of(("a", "a", "class", "x y"), [[1], [2], [3], [4]])
    assert (row.a, row["a"], row[1], row["x y"], getattr(row, "class")) == (1, 1, 2, 4, 3)
    assert repr(row) == "Row(a=1, a=2, class=3, x y=4)"
    assert row_class(("a",)) is row_class(("a",))
