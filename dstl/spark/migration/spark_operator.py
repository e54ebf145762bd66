"""Stateful operators of a Spark query as its checkpoint names them: those that move, and why others cannot. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstl.errors import CorruptData, Invalid
from dstl.state.descriptor import StateKind
from dstl.state.handle import TimeMode

_PROCESSORS = ("transformWithStateInPySparkExec", "transformWithStateInPandasExec")
_AGGREGATION = "stateStoreSave"
_OTHERS = {
    "transformWithStateExec": "a processor in Scala or Java",
    "symmetricHashJoin": "a join of two streams",
    "sessionWindowStateStoreSaveExec": "an aggregation over session windows",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    "flatMapGroupsWithState": "flatMapGroupsWithState",
    "applyInPandasWithState": "applyInPandasWithState",
    "globalLimit": "limit",
}
_KINDS = {"ValueState": StateKind.VALUE, "ListState": StateKind.LIST, "MapState": StateKind.MAP}
_TIMERS = "TimerState"
_TIME_MODES = {
    "NoTime": TimeMode.NONE,
    "ProcessingTime": TimeMode.PROCESSING_TIME,
    "EventTime": TimeMode.EVENT_TIME,
}


@dataclass(frozen=True, slots=True)
class SparkState:
    """One state of a processor.

    Attributes:
        name: As the processor declares it.
        kind: Value, list or map.
        has_ttl: Whether its values have a time to live, whose length Spark does not keep.
    """

    name: str
    kind: StateKind
    has_ttl: bool


@dataclass(frozen=True, slots=True)
class SparkOperator:
    """One PySpark ``transformWithState``, or one aggregation of Spark's own.

    Attributes:
        number: Spark's operator id in the query.
        partitions: Those that it ran with.
        time_mode: The processor's.
        states: Its states, without timers, by name.
        is_aggregation: It is an aggregation, of which Spark says no more than that.
    """

    number: int
    partitions: int
    time_mode: TimeMode
    states: tuple[SparkState, ...]
    is_aggregation: bool = False

    @property
    def has_timers(self) -> bool:
        """True in the time modes that have timers."""
        return self.time_mode is not TimeMode.NONE


def operators_of(where: str, rows: Collection[Mapping[str, Any]]) -> list[SparkOperator]:
    """Return the operators of a checkpoint from the rows of Spark's ``state-metadata`` source.

    Raises:
        Invalid: There is none, or one that cannot be moved; names all of those.
        CorruptData: A row is not what Spark writes.
    """
    found = {int(row["operatorId"]): row for row in rows}
    if not found:
        raise Invalid(f"{where} has no stateful operator: there is nothing to migrate")
    refused = [
        f"operator {number} is {row['operatorName']} ({_OTHERS.get(str(row['operatorName']), 'unknown to DSTL')})"
        for number, row in sorted(found.items())
        if row["operatorName"] not in (*_PROCESSORS, _AGGREGATION)
    ]
    if refused:
        raise Invalid(
            f"{where} cannot be migrated: {'; '.join(refused)}. Only PySpark's transformWithState and groupBy().agg() "
            "can; keep this query's state where it is, with checkpointLocation dstl://..., or give the new query its "
            "state as initialState"
        )
    return [_operator(where, number, row) for number, row in sorted(found.items())]


def _operator(where: str, number: int, row: Mapping[str, Any]) -> SparkOperator:
    try:
        if row["operatorName"] == _AGGREGATION:
            return SparkOperator(number, int(row["numPartitions"]), TimeMode.NONE, (), is_aggregation=True)
        properties = json.loads(row["operatorProperties"])
        states = [
            SparkState(str(each["stateName"]), _KINDS[each["stateVariableType"]], bool(each["ttlEnabled"]))
            for each in properties["stateVariables"]
            if each["stateVariableType"] != _TIMERS
        ]
        mode = _TIME_MODES[properties["timeMode"]]
        return SparkOperator(number, int(row["numPartitions"]), mode, tuple(sorted(states, key=lambda one: one.name)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(
            f"{where}: the metadata of operator {number} is not what DSTL knows ({error!r}): was it written by a newer "
            "Spark than this DSTL supports?"
        ) from error


def check_aggregates(
    where: str,
    operators: Collection[SparkOperator],
    aggregates: Mapping[int, Collection[str]],
    keys: Mapping[int, Sequence[str]],
) -> None:
    """See that each aggregation's aggregates were named, and no others.

    Args:
        where: The checkpoint, for messages.
        operators: All of them.
        aggregates: Their columns, by Spark's operator id.
        keys: Names of grouping columns, likewise.

    Raises:
        Invalid: Some are missing, or of no aggregation.
    """
    aggregations = {each.number for each in operators if each.is_aggregation}
    missing = sorted(each for each in aggregations if not aggregates.get(each))
    if missing:
        raise Invalid(
            f"{where}: operator {missing[0]} is an aggregation, and Spark keeps no more of its aggregates than their "
            f"functions: name them in the query's order (aggregates={{{missing[0]}: {{'n': 'count()', ...}}}}, "
            f"--aggregate '{missing[0]}:n=count()')"
        )
    unknown = sorted({*aggregates, *keys} - aggregations)
    if unknown:
        held = ", ".join(map(str, sorted(aggregations))) or "none"
        raise Invalid(f"{where}: operator {unknown[0]} is not an aggregation that can be moved; there is {held}")


def _states(operator: SparkOperator) -> str:
    if operator.is_aggregation:
        return "an aggregation"
    return ", ".join(state.name for state in operator.states) or "no state"


def name_operators(
    where: str, operators: Collection[SparkOperator], names: Mapping[int, str], ttl_ms: Mapping[str, int]
) -> dict[int, str]:
    """Return each operator's name in DSTL, once it is known that every one has what it needs.

    Args:
        where: The checkpoint, for messages.
        operators: All of them.
        names: Names by Spark's operator id; of a single operator, ``operator-1`` where there is none.
        ttl_ms: Times to live by state.

    Raises:
        Invalid: A name is missing, twice, or of no operator; or a time to live is missing, or of no such state.
    """
    if not names and len(operators) == 1:
        names = {each.number: "operator-1" for each in operators}
    shown = "; ".join(f"{each.number} has {_states(each)}" for each in operators)
    numbers = {each.number for each in operators}
    if set(names) != numbers or len(set(names.values())) != len(names):
        raise Invalid(
            f"{where}: each of its {len(operators)} operators needs a name of its own, the name= under which the new "
            f"query finds its state. By number: {shown}"
        )
    timed = {state.name for each in operators for state in each.states if state.has_ttl}
    missing, unknown = sorted(timed - set(ttl_ms)), sorted(set(ttl_ms) - timed)
    if missing:
        raise Invalid(
            f"{where}: state {missing[0]!r} has a time to live, and Spark keeps no more of it than when each value "
            "ends: give the one that the processor declares (ttl_ms, --ttl)"
        )
    if unknown:
        held = ", ".join(map(repr, sorted(timed))) or "none"
        raise Invalid(f"{where}: there is no state {unknown[0]!r} with a time to live; there is {held}")
    wrong = sorted(name for name, ttl in ttl_ms.items() if ttl <= 0)
    if wrong:
        raise Invalid(f"the time to live of state {wrong[0]!r} must be above 0 ms")
    return dict(names)
