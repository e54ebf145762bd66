import pytest
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DayTimeIntervalType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    VarcharType,
    YearMonthIntervalType,
)

from dstl.errors import Invalid
from dstl.state.codec.ddl import parse_ddl, schema_of


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        ("a int", [StructField("a", IntegerType())]),
        ("A INT , b String", [StructField("A", IntegerType()), StructField("b", StringType())]),
        ("a: int, b: long", [StructField("a", IntegerType()), StructField("b", LongType())]),
        ("`a b``c` int not null", [StructField("a b`c", IntegerType(), False)]),
        ("a int comment 'it\\'s'", [StructField("a", IntegerType(), True, {"comment": "it's"})]),
        (
            "a array<map<string,decimal(10,2)>>",
            [StructField("a", ArrayType(MapType(StringType(), DecimalType(10, 2))))],
        ),
        (
            "a decimal, b dec(5), c numeric(6,1)",
            [
                StructField("a", DecimalType(10, 0)),
                StructField("b", DecimalType(5, 0)),
                StructField("c", DecimalType(6, 1)),
            ],
        ),
        ("struct<x:int,y:struct<>>", [StructField("x", IntegerType()), StructField("y", StructType([]))]),
        (
            "s struct<x int not null, t timestamp_ntz>",
            [
                StructField(
                    "s", StructType([StructField("x", IntegerType(), False), StructField("t", TimestampNTZType())])
                ),
            ],
        ),
        ("c char(3), v varchar(5)", [StructField("c", CharType(3)), StructField("v", VarcharType(5))]),
        (
            "i interval day to second, j interval year",
            [
                StructField("i", DayTimeIntervalType(0, 3)),
                StructField("j", YearMonthIntervalType(0, 0)),
            ],
        ),
        ("int int", [StructField("int", IntegerType())]),
        ("struct int", [StructField("struct", IntegerType())]),
    ],
)
def test_ddl_is_read_as_spark_reads_it(ddl, expected):
    assert parse_ddl(ddl) == StructType(expected)
    assert schema_of(StructType(expected)) == StructType(expected)


@pytest.mark.parametrize(
    "ddl",
    [
        "",
        "a",
        "a int,",
        "a int b int",
        "a array<int",
        "a map<int>",
        "a decimal(1,2,3)",
        "a frob",
        "a int comment x",
        "a struct<x int>> ",
        "a varchar",
        "a interval day to year",
        "a;int",
        "struct<a:int> x",
    ],
)
def test_what_is_not_ddl_is_refused(ddl):
    with pytest.raises(Invalid, match="StructType instead"):
        parse_ddl(ddl)


def test_only_schemas_are_schemas():
    with pytest.raises(Invalid, match="not int"):
        schema_of(5)


def test_types_nested_thousands_deep_are_refused_as_what_they_are():
    with pytest.raises(Invalid, match="not a schema that DSTL can read"):
        parse_ddl("a " + "array<" * 10_000 + "int" + ">" * 10_000)
