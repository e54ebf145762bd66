"""Operators of every face of the product in a simulated query, and the model of all but those with clocks.

The faces are windows, sessions, groups, deduplication, functions over columns, pandas processors,
``applyInPandasWithState``, and processors with clocks, whose model is in ``clocked_model``. That their results are
Spark's is for other tests to show. Here the model is the product's own runner, over one table, in one task, without a
fault: what partitions, logs, restores and attempts make of it must be the same, in what is yielded and in each byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.spark.operators.aggregation import AggregationDefinition
from dstl.spark.operators.deduplication import DeduplicationDefinition
from dstl.spark.operators.grouping import initial_first, take_marks
from dstl.spark.operators.map_states import MapStatesDefinition
from dstl.spark.task_definition import EventTime, PreparedOperator, TaskDefinition
from dstl.state.broadcast_state import rows_of_streams
from dstl.state.codec.value_codec import write_time_ms
from dstl.state.group_state_processor import GroupStateProcessor
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import WINDOW_END, WINDOW_START, Aggregate, Aggregation
from dstl.state.vectorised.duplicates_runner import Deduplication
from dstl.state.vectorised.map_states import EXISTS_COLUMN, MapStates
from dstl.state.vectorised.time_windows import TimeWindows
from dstl.taskmanager.reads import TableSource, client_of
from materializer.tables import HeapStateTable, StateTable
from tests.simulation.all_kinds import AllKinds
from tests.simulation.clocked_model import SPARKS_DELAY_MS, TTL_MS, Batch, Recorder, event_time_ms
from tests.simulation.evolving import Evolving
from tests.simulation.face_input import EVENT_TIME, FRONT, KEY, MOMENT, PAIR, ROW, broadcast_rows, input_rows, processed
from tests.simulation.spark import WALL_CLOCK, rules_in
from tests.simulation.user_faces import USER_FACES, count_group

Entries = Mapping[tuple[int, int, bytes, bytes], bytes]
"""The values of one operator, by state, key group, key and user key."""
Output = dict[bytes, list[str]]

_WINDOW = StructType([StructField("start", MOMENT), StructField("end", MOMENT)])
_WINDOW_KEY = StructType([StructField(WINDOW_START, MOMENT), StructField(WINDOW_END, MOMENT), *KEY.fields])
_AGGREGATES = {
    "n": Aggregate("count"),
    "sum": Aggregate("sum", "price"),
    "mean": Aggregate("mean", "amount"),
    "low": Aggregate("min", "label"),
    "high": Aggregate("max", "amount"),
    "first": Aggregate("first", "label", ignore_nulls=True),
    "last": Aggregate("last", "operation"),
    "spread": Aggregate("stddev_samp", "amount"),
    "best": Aggregate("max_by", "pair"),
    "all": Aggregate("collect_list", "operation"),
    "kinds": Aggregate("count_distinct", "label"),
    "about": Aggregate("approx_count_distinct", "operation"),
}


@cache
def face_operator(uid: str, parallelism: int, max_parallelism: int, version: int = 0) -> TaskDefinition:
    """Return the definition of one of :data:`FACES`, as a version of the program has it."""
    define = processed(lambda: Evolving(version), "row", "none") if uid == EVOLVING else FACES[uid]
    return define(uid=uid, parallelism=parallelism, max_parallelism=max_parallelism, input_schema=ROW)


def run_face(
    uid: str,
    entries: Entries,
    rows: Mapping[bytes, Sequence[int]],
    given: Batch,
    key_groups: Sequence[int],
    most: int,
    known: Mapping[str, Any] | None = None,
    sequence: int = 1 << 40,
    version: int = 0,
    initial: Sequence[bytes] = (),
) -> tuple[Entries, Output]:
    """Return an operator's values behind a batch, and what it must yield for each key.

    Args:
        uid: The operator.
        entries: Its values before.
        rows: Operations by key.
        given: The batch's times.
        key_groups: Those of the task.
        most: Number of all key groups.
        known: Its states as a checkpoint has them; None for what it declares.
        sequence: Orders what the batch appends to lists.
        version: Of the program.
        initial: Keys whose initial state is among the rows, where the operator has any.
    """
    prepared = _prepared(uid, most, version)
    definition, states = prepared.definition, _resolved(uid, most, json.dumps(known) if known else "", version)
    held = TableSource(HeapStateTable())
    if entries:
        columns = zip(
            *((g, s, OP_PUT, k, u, v) for (s, g, k, u), v in sorted(entries.items(), key=_place)), strict=True
        )
        arrays = [pa.array(column, each.type) for column, each in zip(columns, CHANGE_SCHEMA, strict=True)]
        held.apply(pa.RecordBatch.from_arrays(arrays, schema=CHANGE_SCHEMA))
    output: Output = {}
    taken = [input_rows(definition, rows, initial if definition.has_initial_state else ())]
    if definition.operator.streams and (rules := rules_in(sorted(chain.from_iterable(rows.values())))):
        taken.append(broadcast_rows(definition, 0, rules))
    _, marked, taken = take_marks(taken, [each.column for each in definition.operator.streams])
    if definition.has_initial_state:
        taken = initial_first(taken)
    changes: list[pa.RecordBatch] = []
    task = TaskInput(
        source=client_of(held),
        send=changes.append,
        sequence=sequence,
        key_groups=key_groups,
        processing_time_ms=given.time_ms,
        watermark_ms=given.watermark_ms,
        late_watermark_ms=given.late_watermark_ms,
        broadcast=rows_of_streams(marked, definition.operator.streams),
        send_broadcast=changes.append,
    )
    for batch in prepared.runner(states).run(definition.arrange(taken), task):
        collect_rows(batch, output)
    for change in changes:
        held.apply(change.sort_by("key_group"))
    return entries_of([held.table], states_of(json.loads(states))), output


@cache
def _prepared(uid: str, most: int, version: int) -> PreparedOperator:
    """Return what the model runs: one task has all key groups."""
    return PreparedOperator(face_operator(uid, 1, most, version))


@lru_cache(maxsize=64)
def _resolved(uid: str, most: int, known: str, version: int) -> bytes:
    """Return an operator's states, given those of a checkpoint as JSON, as a task is given them."""
    return json.dumps(face_operator(uid, 1, most, version).resolve(json.loads(known) if known else None)).encode()


def states_of(registry: Mapping[str, Any]) -> list[int]:
    """Return the numbers of an operator's states."""
    return [each.state_id for each in StateRegistry.from_wire(dict(registry), settled=True).descriptors]


def entries_of(tables: Sequence[StateTable], states: Sequence[int]) -> Entries:
    """Return everything that tables hold of some states."""
    return {
        (state, group, entry.key, entry.user_key): bytes(entry.value)
        for table in tables
        for group in table.key_groups()
        for state in states
        for entry in table.scan(state, group)
    }


def unexpired(entries: Entries, latest_dead_ms: int) -> Entries:
    """Return the entries without those that were written then or before: they may be swept or not."""
    return {place: value for place, value in entries.items() if (write_time_ms(value) or 0) > latest_dead_ms}


def collect_rows(batch: pa.RecordBatch, output: Output) -> None:
    """Add an operator's output to what it has yielded for each key."""
    for row in batch.to_pylist():
        shown = row["what"] if "what" in row else repr({name: _shown(value) for name, value in row.items()})
        # A late row has nothing but itself.
        output.setdefault(row["key"] or row["late"]["key"], []).append(shown)


def _place(entry: tuple[tuple[int, int, bytes, bytes], bytes]) -> tuple[int, int, bytes, bytes]:
    (state, group, key, user_key), _ = entry
    return group, state, key, user_key


def _shown(value: Any) -> Any:
    return "nan" if isinstance(value, float) and np.isnan(value) else value


def _aggregated(kind: str, time: EventTime = EVENT_TIME, ttl_ms: int = 0) -> Callable[..., TaskDefinition]:
    def define(uid: str, input_schema: StructType, **place: Any) -> TaskDefinition:
        timed = kind != "groups"
        results = StructType([*KEY.fields, *([StructField("window", _WINDOW)] if timed else [])])
        whole = Aggregation(
            mode="append" if timed else "update",
            aggregates=_AGGREGATES,
            key_schema=_WINDOW_KEY if timed else KEY,
            others=("key",),
            window=1 if timed else None,
            windows=TimeWindows(3_000_000, 1_000_000) if kind == "windows" else None,
            session=kind == "sessions",
            time="at" if timed else None,
            starts="at" if kind == "sessions" else None,
            ends="until" if kind == "sessions" else None,
            expires=WINDOW_END if timed else None,
            ttl_ms=ttl_ms,
            input_schema=input_schema,
            output_schema=StructType(
                [*results.fields, *(StructField(n, each.accumulator(ROW).result) for n, each in _AGGREGATES.items())]
            ),
        )
        return AggregationDefinition(
            uid=uid,
            by=tuple(whole.key_schema.names),
            placed_by=("key",),
            event_time=time if timed else None,
            operator=whole,
            **place,
        )

    return define


def _deduplicated(uid: str, input_schema: StructType, **place: Any) -> TaskDefinition:
    names = ("key", "label")
    whole = Deduplication(
        input_schema=input_schema,
        columns=tuple((name, None) for name in names),
        key_schema=StructType([ROW[name] for name in names]),
        output_schema=input_schema,
        time="at",
        within_us=2_500_000,
    )
    return DeduplicationDefinition(
        uid=uid,
        by=names,
        placed_by=("key",),
        event_time=EVENT_TIME,
        operator=whole,
        **place,
    )


_STATE = StructType(
    [
        StructField("n", LongType()),
        StructField("label", StringType()),
        StructField("day", DateType()),
        StructField("price", DecimalType(20, 2)),
        StructField("pair", PAIR),
        StructField("all", ArrayType(LongType())),
        StructField("by", MapType(StringType(), DoubleType())),
    ]
)


def _mapped(uid: str, input_schema: StructType, ttl_ms: int = 0, **place: Any) -> TaskDefinition:
    output = StructType([*KEY.fields, *_STATE.fields])
    whole = MapStates(
        name=uid,
        function=_map_states,
        key_schema=KEY,
        input_schema=input_schema,
        output_schema=output,
        state_schema=_STATE,
        ttl_ms=ttl_ms,
    )
    return MapStatesDefinition(uid=uid, by=("key",), operator=whole, **place)


def _map_states(rows: pa.Table, keys: pa.Table, states: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Count each key's rows, keep what the last of them says, and forget a key whose last number asks for it."""
    new = states.to_pylist()
    for row in rows.to_pylist():
        state, number = new[row["__group"]], row["operation"]
        state[EXISTS_COLUMN] = number % 11 != 10
        state |= {
            "n": (state["n"] or 0) + 1,
            "label": row["label"],
            "day": date(2026, 1, 1) + timedelta(number),
            "price": row["price"],
            "pair": row["pair"],
            "all": [*(state["all"] or ())[-3:], number],
            "by": [(f"{number % 3}", number / 2)],
        }
    table = pa.Table.from_pylist(new, states.schema)
    shown = table.drop_columns([EXISTS_COLUMN]).add_column(0, keys.schema.field("key"), keys.column("key"))
    return table, shown


class _Frames(StatefulProcessor):  # type: ignore[misc]
    """A pandas processor: one state of each kind that knows no order, and timers in event time."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", _STATE)
        self._slots = handle.getMapState("slots", StructType(FRONT[1:]), PAIR)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        last = self._last.get()
        total = last[0] if self._last.exists() else 0
        for frame in rows:
            total += len(frame)
            for number, label in zip(frame["operation"], frame["label"], strict=True):
                number = int(number)
                day, pair = date(2026, 1, 1) + timedelta(number), (label, number)
                value = (total, label, day, Decimal(number), pair, [number], {"n": float(number)})
                self._last.update(value)
                if self._slots.containsKey((number % 4,)) and number % 3 == 0:
                    self._slots.removeKey((number % 4,))
                else:
                    self._slots.updateValue((number % 4,), pair)
                self._handle.registerTimer(event_time_ms(number) + 700)
        slots = sorted(each for (each,) in self._slots.keys())  # noqa: SIM118 - a state's method
        yield pd.DataFrame(
            {"key": [key[0]], "what": [f"{total} {last} {slots} {sorted(self._slots.values(), key=repr)}"]}
        )

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        if at % 4 == 0:
            self._last.clear()
        yield pd.DataFrame({"key": [key[0]], "what": [f"fired at {at} {self._last.get()}"]})


EVOLVING = "evolving"
"""The one whose program has versions."""
BRIEF = BRIEF_GROUPS, BRIEF_COLUMNS = "brief-groups", "brief-columns"
"""Those over columns whose values expire."""
SPARKS = "windows-of-spark"
"""The one that goes by Spark's watermark: what follows an operator of Spark's own."""
FACES: Mapping[str, Callable[..., TaskDefinition]] = {
    EVOLVING: processed(lambda: Evolving(0), "row", "none"),
    "event-clock": processed(lambda: Recorder(True), "row"),
    WALL_CLOCK: processed(lambda: Recorder(False), "row", "processingTime"),
    "windows": _aggregated("windows"),
    SPARKS: _aggregated("windows", EventTime("at", SPARKS_DELAY_MS, follows="spark")),
    "sessions": _aggregated("sessions"),
    "groups": _aggregated("groups"),
    "first-rows": _deduplicated,
    "columns": _mapped,
    BRIEF_GROUPS: _aggregated("groups", ttl_ms=TTL_MS),
    BRIEF_COLUMNS: partial(_mapped, ttl_ms=TTL_MS),
    "frames": processed(_Frames),
    "all-kinds": processed(AllKinds, "row", "none"),
    "group-state": processed(
        lambda: GroupStateProcessor(count_group, StructType([StructField("n", LongType())]), "EventTimeTimeout")
    ),
    **USER_FACES,
}
"""What defines each of these operators, by uid."""
