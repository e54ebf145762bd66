"""What a checkpoint of Spark's says of its query: read, and refused by name, without Spark."""

import json
from typing import Any

import pytest
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from dstl.errors import CorruptData, DstlError, Invalid
from dstl.spark.migration.aggregation import NamedAggregation, held_aggregates
from dstl.spark.migration.spark_operator import SparkState, check_aggregates, name_operators, operators_of
from dstl.spark.migration.stopped_query import Position, position_of, without_state_ids
from dstl.state.codec.schema_evolution import MEANING
from dstl.state.descriptor import StateKind
from dstl.state.handle import TimeMode
from dstl.state.vectorised.aggregation import Aggregate, Aggregation

PYSPARK = "transformWithStateInPySparkExec"


def row(number: int, name: str = PYSPARK, mode: str = "NoTime", **kinds: str) -> dict[str, Any]:
    states = [
        {"stateName": state, "stateVariableType": kind.removesuffix("+ttl"), "ttlEnabled": kind.endswith("+ttl")}
        for state, kind in kinds.items()
    ]
    properties = json.dumps({"timeMode": mode, "outputMode": "Update", "stateVariables": states})
    return {"operatorId": number, "operatorName": name, "numPartitions": 3, "operatorProperties": properties}


def test_operators_and_their_states_are_read_from_sparks_metadata() -> None:
    timers = {"$procTimers_keyToTimestamp": "TimerState"}
    (found,) = operators_of("place", [row(0, mode="ProcessingTime", v="ValueState", l="ListState+ttl", **timers)])
    assert (found.number, found.partitions, found.time_mode) == (0, 3, TimeMode.PROCESSING_TIME)
    assert found.has_timers
    assert found.states == (SparkState("l", StateKind.LIST, True), SparkState("v", StateKind.VALUE, False))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("transformWithStateExec", "Scala or Java"),
        ("symmetricHashJoin", "a join of two streams"),
        ("sessionWindowStateStoreSaveExec", "session windows"),
        ("dedupe", "dropDuplicates"),
        ("aNewOperator", "unknown to DSTL"),
    ],
)
def test_what_cannot_move_is_refused_by_name_also_beside_what_can(name: str, what: str) -> None:
    with pytest.raises(Invalid, match=rf"operator 1 is {name} \({what}|{name} \(.*{what}"):
        operators_of("place", [row(0, v="ValueState"), row(1, name)])


def test_metadata_of_an_unknown_make_is_damage() -> None:
    for broken in ({"operatorProperties": "{"}, {"operatorProperties": "{}"}, {"numPartitions": None}):
        with pytest.raises(CorruptData, match="newer"):
            operators_of("place", [row(0, v="ValueState") | broken])
    with pytest.raises(CorruptData, match="newer"):
        operators_of("place", [row(0, v="QueueState")])


@pytest.mark.parametrize(
    ("names", "ttl_ms", "wrong"),
    [
        ({}, {}, "0 has v; 1 has n, w"),
        ({0: "a"}, {}, "needs a name of its own"),
        ({0: "a", 1: "a"}, {}, "needs a name of its own"),
        ({0: "a", 1: "b", 2: "c"}, {}, "needs a name of its own"),
        ({0: "a", 1: "b"}, {}, "'w' has a time to live"),
        ({0: "a", 1: "b"}, {"w": 5, "v": 5}, "no state 'v' with a time to live; there is 'w'"),
        ({0: "a", 1: "b"}, {"w": 0}, "above 0"),
    ],
)
def test_what_the_new_query_needs_to_be_told_is_asked_for(
    names: dict[int, str], ttl_ms: dict[str, int], wrong: str
) -> None:
    found = operators_of("place", [row(0, v="ValueState"), row(1, n="MapState", w="ValueState+ttl")])
    with pytest.raises(DstlError, match=wrong):
        name_operators("place", found, names, ttl_ms)
    assert name_operators("place", found, {0: "a", 1: "b"}, {"w": 5}) == {0: "a", 1: "b"}
    assert name_operators("place", found[:1], {}, {}) == {0: "operator-1"}


def test_aggregations_need_their_aggregates_and_nothing_else_has_some() -> None:
    found = operators_of("place", [row(0, "stateStoreSave") | {"operatorProperties": None}, row(1, v="ValueState")])
    assert [each.is_aggregation for each in found] == [True, False]
    n = {"n": "count()"}
    check_aggregates("place", found, {0: n}, {0: ["day"]})
    wrongs: list[tuple[dict[int, Any], dict[int, list[str]], str]] = [
        ({}, {}, "operator 0 is an aggregation"),
        ({0: {}}, {}, "operator 0 is an aggregation"),
        ({0: n, 1: n}, {}, "operator 1 is not an aggregation.*there is 0"),
        ({0: n}, {7: ["day"]}, "operator 7 is not an aggregation"),
    ]
    for named, keys, wrong in wrongs:
        with pytest.raises(Invalid, match=wrong):
            check_aggregates("place", found, named, keys)
    with pytest.raises(Invalid, match="0 has an aggregation; 1 has v"):
        name_operators("place", found, {}, {})


PAID = DecimalType(34, 2)
TYPES: dict[str, DataType] = {"fee": DecimalType(6, 2), "big": DecimalType(24, 2)}


def held(*columns: tuple[str, DataType]) -> StructType:
    """Return columns of Spark's state, of which several may have one name."""
    return StructType([StructField(name, kind) for name, kind in columns])


def test_aggregates_find_their_columns_by_their_order_and_one_that_is_there_twice_is_kept_once() -> None:
    state = held(
        ("count", LongType()),
        ("sum", LongType()),
        ("sum", PAID),
        ("isEmpty", BooleanType()),
        ("sum", PAID),
        ("count", LongType()),
        ("last", StringType()),
        ("valueSet", BooleanType()),
    )
    named = {
        "n": Aggregate("count"),
        "total": Aggregate("sum", "v"),
        "paid": Aggregate("sum", "p"),
        "also": Aggregate("sum", "v"),
        "price": Aggregate("mean", "p"),
        "known": Aggregate("last", "s", ignore_nulls=True),
    }
    found = held_aggregates("place", state, NamedAggregation(named, output_mode="append"))
    assert [(each.position, each.may_overflow) for each in found] == [
        *((0, False), (1, False), (2, True), (1, False), (4, True), (6, False)),
    ]
    # The new query's own columns, so that it can see whether it is given what it asks for.
    schema = StructType(
        [StructField("v", LongType()), StructField("p", DecimalType(24, 2)), StructField("s", StringType())]
    )
    new = Aggregation(
        mode="append",
        aggregates=named,
        key_schema=StructType(),
        others=(),
        input_schema=schema,
        output_schema=StructType(),
    )
    ours = new.state_schema()
    assert [field for each in found for field in each.fields] == ours.fields
    few = held(("sum", LongType()), ("sum", DoubleType()), ("count", LongType()))
    fees = {"total": Aggregate("sum", "fee"), "middle": Aggregate("mean", "fee")}
    found = held_aggregates("place", few, NamedAggregation(fees, TYPES))
    assert [(each.fields[0].dataType, each.scale) for each in found] == [(DecimalType(16, 2), 2)] * 2
    assert {field.metadata[MEANING] for field in ours.fields if field.name.startswith("known")} == {
        "last(s, ignore_nulls=True) for output mode append"
    }


@pytest.mark.parametrize(
    ("state", "named", "wrong"),
    [
        (held(("count", LongType())), {"n": "count()", "total": "sum(v)"}, "not those of n=count"),
        (held(("count", LongType()), ("sum", LongType())), {"n": "count()"}, "sum bigint"),
        (held(("sum", LongType()), ("count", LongType())), {"n": "count()", "total": "sum(v)"}, "in its order"),
        (held(("sum", LongType()), ("isEmpty", BooleanType())), {"total": "sum(v)"}, "isEmpty boolean"),
        (held(("k", StringType()), ("count", LongType())), {"n": "count()"}, "k string"),
        (held(("buf", BinaryType())), {"all": "count()"}, "buf binary"),
        (held(("MS[0]", LongType())), {"some": "approx_count_distinct(v)"}, "does not keep it as Spark"),
        (held(("sum", DayTimeIntervalType())), {"total": "sum(v)"}, "kept as interval"),
        (held(("max", StructType())), {"most": "max(v)"}, "a type with an order"),
        (
            held(("sum", DoubleType())),
            {"total": "sum(fee)"},
            r"as double by Spark, which is not one of decimal\(6,2\)",
        ),
        (
            held(("sum", LongType())),
            {"total": "sum(big)"},
            r"as bigint by Spark, which is not one of decimal\(24,2\)",
        ),
    ],
)
def test_aggregates_that_are_not_those_of_the_state_are_refused(
    state: StructType, named: dict[str, str], wrong: str
) -> None:
    with pytest.raises(Invalid, match=wrong):
        held_aggregates(
            "place", state, NamedAggregation({name: Aggregate.of(text) for name, text in named.items()}, TYPES)
        )


def test_an_aggregate_is_read_from_the_text_that_it_shows() -> None:
    for each in (
        Aggregate("count"),
        Aggregate("mean", "a b"),
        Aggregate("first", "v"),
        Aggregate("last", "f(v)", ignore_nulls=True),
    ):
        assert Aggregate.of(str(each)) == each
    assert Aggregate.of("avg(v)") == Aggregate("mean", "v")
    for wrong in ("sum", "median(v)", "sum(v) + 1", ""):
        with pytest.raises(Invalid, match="not an aggregate"):
            Aggregate.of(wrong)


def test_a_query_stands_behind_its_last_commit() -> None:
    metadata, offsets = '{"id":"q"}', 'v1\n{"batchWatermarkMs":5000,"batchTimestampMs":1}\n{"logOffset":0}'
    commit = 'v1\n{"nextBatchWatermarkMs":7000}'
    assert position_of("place", metadata, 4, offsets, commit) == Position("q", 4, 7000, 5000)
    none = position_of("place", metadata, 4, offsets.replace("5000", "0"), commit.replace("7000", "0"))
    assert none == Position("q", 4, None, None)
    damaged = (("{}", offsets, commit), ('{"id":""}', offsets, commit), (metadata, "v1\n-", commit))
    for texts in (*damaged, (metadata, offsets, 'v1\n{"x":')):
        with pytest.raises(CorruptData, match="not what Spark writes"):
            position_of("place", texts[0], 4, texts[1], texts[2])


def test_a_copied_commit_names_no_state_files() -> None:
    named = 'v2\n{"nextBatchWatermarkMs":7,"stateUniqueIds":{"0":[["a"],["b"]]}}'
    assert without_state_ids(named) == 'v2\n{"nextBatchWatermarkMs": 7, "stateUniqueIds": {}}'
    assert without_state_ids('v1\n{"nextBatchWatermarkMs":7}') == 'v1\n{"nextBatchWatermarkMs": 7}'
    with pytest.raises(CorruptData, match="commit file"):
        without_state_ids("v1")
