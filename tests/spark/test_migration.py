"""What a checkpoint of Spark's says of its query: read, and refused by name, without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dstl.errors import CorruptData, DstlError, Invalid
from dstl.spark.migration.query_directory import Position, position_of, without_state_ids
from dstl.spark.migration.spark_operator import SparkState, name_operators, operators_of
from dstl.state.descriptor import StateKind
from dstl.state.handle import TimeMode

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
        ("stateStoreSave", "an aggregation"),
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


def test_a_query_stands_behind_its_last_commit() -> None:
    metadata, offsets = '{"id":"q"}', 'v1\n{"batchWatermarkMs":5000,"batchTimestampMs":1}\n{"logOffset":0}'
    commit = 'v1\n{"nextBatchWatermarkMs":7000}'
    assert position_of("place", metadata, 4, offsets, commit) == Position("q", 4, 7000, 5000)
    none = position_of("place", metadata, 4, offsets.replace("5000", "0"), commit.replace("7000", "0"))
    assert none == Position("q", 4, None, None)
    for texts in (("{}", offsets, commit), (metadata, "v1\n-", commit), (metadata, offsets, 'v1\n{"x":')):
        with pytest.raises(CorruptData, match="not what Spark writes"):
            position_of("place", texts[0], 4, texts[1], texts[2])


def test_a_copied_commit_names_no_state_files() -> None:
    named = 'v2\n{"nextBatchWatermarkMs":7,"stateUniqueIds":{"0":[["a"],["b"]]}}'
    assert without_state_ids(named) == 'v2\n{"nextBatchWatermarkMs": 7, "stateUniqueIds": {}}'
    assert without_state_ids('v1\n{"nextBatchWatermarkMs":7}') == 'v1\n{"nextBatchWatermarkMs": 7}'
    with pytest.raises(CorruptData, match="commit file"):
        without_state_ids("v1")
