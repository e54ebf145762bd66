"""The schemas that users write as text, read by Spark on the driver and used by tasks."""

from collections.abc import Iterator
from typing import Any

import pytest
from home import Home
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
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
from dstl.spark.operators.arguments import parse_ddl

pytestmark = pytest.mark.usefixtures("spark")


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
def test_text_is_the_schema_that_spark_reads(ddl: str, expected: list[StructField]) -> None:
    assert parse_ddl(ddl) == StructType(expected)


@pytest.mark.parametrize(
    "ddl",
    [
        "a",
        "int",
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
        "struct<a:int> x y",
        pytest.param("a " + "array<" * 1_000 + "int" + ">" * 1_000, id="deep"),
    ],
)
def test_text_that_is_no_schema_is_refused(ddl: str) -> None:
    with pytest.raises(Invalid, match=r"not a schema that Spark can read: .*give a StructType") as caught:
        parse_ddl(ddl)
    assert len(str(caught.value)) < 1000


def test_a_task_uses_what_the_driver_has_read(home: Home) -> None:
    # Inside a function, so that it travels by value: workers do not have this file.
    class Keeps(StatefulProcessor):  # type: ignore[misc]
        """Declares its states with text of every kind, and yields what they hold."""

        def init(self, handle: Any) -> None:
            self.value = handle.getValueState(
                "v", "n long not null comment 'count', `a b` struct<x:int, y: array<string>>"
            )
            self.list = handle.getListState("l", "struct<d: decimal(12,2)>")
            self.map = handle.getMapState("m", "u: string", "N INT")

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
            count = len(list(rows))
            self.value.update((count, Row(x=1, y=["a", None])))
            self.map.updateValue(("a",), (count,))
            found = self.value.get()
            yield Row(k=key[0], what=repr((found, list(self.map.iterator()), list(self.list.get()))))

        def close(self) -> None: ...

    rows = home.spark.range(6).selectExpr("concat('k', id % 2) k", "id")
    with home.backend() as backend:
        out = (
            backend.groupBy(rows, "k").transformWithState(Keeps(), "k string, what string", "append", "none").collect()
        )
    value = (3, Row(x=1, y=["a", None]))
    assert {row.k: row.what for row in out} == {k: repr((value, [(("a",), (3,))], [])) for k in ("k0", "k1")}
