"""The rows that operators of every face take in a simulated query, and what defines those that run processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dstl.spark.operators.processor import ProcessorDefinition
from dstl.spark.task_definition import EventTime, TaskDefinition
from dstl.state.broadcast_state import BroadcastStream
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.group_state_processor import TIMEOUT_COLUMN
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN, KEY_GROUP_COLUMN, Style
from dstl.state.processor_runner import ProcessorOperator
from dstl.state.vectorised.aggregation import LATE
from tests.simulation.clocked_model import DELAY_MS, event_time_ms
from tests.simulation.spark import RULES, key_group_of, number_of

MOMENT = TimestampType()
FRONT = [StructField("key", BinaryType()), StructField("operation", IntegerType())]
PAIR = StructType([StructField("label", StringType()), StructField("operation", IntegerType())])
ROW = StructType(
    [
        *FRONT,
        StructField("at", MOMENT),
        StructField("until", MOMENT),
        StructField("label", StringType()),
        StructField("amount", DoubleType()),
        StructField("price", DecimalType(9, 2)),
        StructField("pair", PAIR),
    ]
)
KEY = StructType(FRONT[:1])
EVENT_TIME = EventTime("at", DELAY_MS)
NUMBER = StructField("number", LongType())
TAGS = StructField("tags", ArrayType(DoubleType()))
INITIAL = StructType([StructField("n", LongType()), StructField(TIMEOUT_COLUMN, LongType())])
"""What a key has before the query begins."""
_INITIAL_EVERY = 3
"""One key in so many has nothing then."""
RULE_STREAM = BroadcastStream(RULES, "__dstl_broadcast_0", StructType(FRONT[1:]))
WEIGHT_STREAM = BroadcastStream(
    "weights",
    "__dstl_broadcast_0",
    StructType([StructField("weight", DoubleType()), StructField("pair", PAIR), NUMBER]),
)
"""Another operator's: rows that only the last of their columns tell from each other."""
_COLUMNS = {
    **{field.name: pa.field(field.name, arrow_schema(ROW).field(field.name).type) for field in ROW.fields},
    KEY_GROUP_COLUMN: pa.field(KEY_GROUP_COLUMN, pa.int32()),
    NUMBER.name: pa.field(NUMBER.name, pa.int64()),
    TAGS.name: pa.field(TAGS.name, pa.list_(pa.float64())),
    LATE: pa.field(LATE, pa.struct(list(arrow_schema(ROW)))),
    INITIAL_STATE_COLUMN: pa.field(INITIAL_STATE_COLUMN, pa.struct(list(arrow_schema(INITIAL)))),
}


def input_rows(
    definition: TaskDefinition, operations: Mapping[bytes, Sequence[int]], initial: Iterable[bytes] = ()
) -> pa.RecordBatch:
    """Return operations by key as rows of an operator's input, with those of keys that begin with a state.

    Args:
        definition: The operator; its columns alone are there.
        operations: Its input.
        initial: Keys whose initial state is among the rows.
    """
    rows, most = [], definition.max_parallelism
    for key, numbers in operations.items():
        place = {"key": key, NUMBER.name: number_of(key), KEY_GROUP_COLUMN: key_group_of(key, most)}
        for number in numbers:
            at = event_time_ms(number) * 1000
            label = None if number % 5 == 4 else f"label {number % 7}"
            row = {
                "operation": number,
                "at": at,
                "until": at + 1_500_000,
                "label": label,
                "amount": float("nan") if number % 19 == 18 else number / 3,
                "price": Decimal(number) / 4,
                "pair": {"label": label, "operation": number},
                **place,
            }
            # Zeros of either sign are one value.
            tags = [-0.0 if number % 2 else 0.0, float(number % 3)]
            rows.append({**row, TAGS.name: tags, LATE: dict(row)})
    for key in initial:
        begins = number_of(key)
        if begins % _INITIAL_EVERY:
            place = {"key": key, NUMBER.name: begins, KEY_GROUP_COLUMN: key_group_of(key, most)}
            rows.append({**place, INITIAL_STATE_COLUMN: {"n": 1000 + begins, TIMEOUT_COLUMN: event_time_ms(begins)}})
    return pa.RecordBatch.from_pylist(rows, schema=_schema(definition))


def input_mark(definition: TaskDefinition, partition: int) -> pa.RecordBatch:
    """Return the row that tells a task without rows its partition."""
    return pa.RecordBatch.from_pylist([{KEY_GROUP_COLUMN: -1 - partition}], schema=_schema(definition))


def broadcast_rows(definition: TaskDefinition, partition: int, operations: Sequence[int]) -> pa.RecordBatch:
    """Return the rows of an operator's broadcast stream, as a partition gets them: behind marks, in any order."""
    (stream,) = definition.operator.streams
    rows = []
    for number in operations:
        weight = (0.0, -0.0, number / 3, float("nan"))[number // 2 % 4]
        pair = {"label": None if number % 3 else f"label {number % 7}", "operation": number % 5}
        row = {"weight": weight, "pair": pair, NUMBER.name: number, "operation": number}
        rows.append(
            {KEY_GROUP_COLUMN: -1 - partition, stream.column: [{name: row[name] for name in stream.schema.names}]}
        )
    return pa.RecordBatch.from_pylist(rows, schema=_schema(definition))


def processed(
    processor: Callable[[], StatefulProcessor],
    style: Style = "pandas",
    time_mode: str = "eventTime",
    shown: Sequence[StructField] = (StructField("what", StringType()),),
    by: StructField = FRONT[0],
    has_initial_state: bool = False,
    **more: Any,
) -> Callable[..., TaskDefinition]:
    """Return what defines an operator that runs a processor.

    Args:
        processor: Makes it.
        style: What it takes.
        time_mode: PySpark's name of it.
        shown: Columns of its output beside the key.
        by: The grouping column.
        has_initial_state: Rows of initial state are among those of the first batch.
        more: Of its operator.
    """

    def define(input_schema: StructType, **place: Any) -> TaskDefinition:
        event_time = EVENT_TIME if time_mode == "eventTime" else None
        operator = ProcessorOperator(
            name=place["uid"],
            key_schema=StructType([by]),
            input_schema=StructType([*input_schema.fields, *([by] if by.name not in input_schema.names else [])]),
            output_schema=StructType([*KEY.fields, *shown]),
            style=style,
            time_mode=time_mode,
            event_time=event_time.column if event_time else None,
            **more,
        )
        return ProcessorDefinition(
            by=(by.name,),
            placed_by=("key",),
            event_time=event_time,
            has_initial_state=has_initial_state,
            processor=processor(),
            operator=operator,
            schemas=DeclaredSchemas(),
            **place,
        )

    return define


def _schema(definition: TaskDefinition) -> pa.Schema:
    more = [KEY_GROUP_COLUMN] + [INITIAL_STATE_COLUMN] * definition.has_initial_state
    return _schema_of((*definition.operator.input_schema.names, *more), definition.operator.streams)


@cache
def _schema_of(names: Sequence[str], streams: Sequence[BroadcastStream]) -> pa.Schema:
    carried = [pa.field(each.column, pa.list_(pa.struct(list(arrow_schema(each.schema))))) for each in streams]
    return pa.schema([*(_COLUMNS[name] for name in names), *carried])
