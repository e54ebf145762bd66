"""The event time of an operator's input and output: which column it is, and whose watermark goes with it.

Spark keeps the delay of ``withWatermark`` in the column's metadata, and so do we for an output's event time: what
follows, one of Spark's operators or of ours, finds it there. Whose watermark it is, the plan says. An operator directly
behind ``withWatermark`` has one of its own, made of the rows that reach it. What follows an operator goes by that
one's: by ours, as the coordinator keeps it, or by Spark's, where one of Spark's stateful operators stands in between,
for the rows that leave a window say nothing about how far its input has come.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.input_checks import MOMENTS, WATERMARK_DELAY
from dstl.spark.query.plan import watermark_follows
from dstl.spark.task_definition import EventTime


def event_time_of(df: DataFrame) -> EventTime | str:
    """Return the event time of a stream; where it has none, what is wrong: Spark leaves the delay in the schema."""
    marked = [field for field in df.schema.fields if WATERMARK_DELAY in (field.metadata or {})]
    if len(marked) != 1:
        return (
            f"one column with a watermark, and the input has {len(marked)}: call df.withWatermark(column, delay) "
            "before, and keep the column"
        )
    field = marked[0]
    return EventTime(field.name, int(field.metadata[WATERMARK_DELAY]), watermark_follows(df))


def check_event_time_column(name: Any, output: StructType, what: str) -> None:
    """Check the column that an operator names as its output's event time.

    Raises:
        Invalid: It is not a column of the output, or no timestamp.
    """
    if name not in output.names:
        raise Invalid(
            f"{what}: eventTimeColumnName={brief(name)} is not a column of the output: it has {', '.join(output.names)}"
        )
    kind = output[name].dataType
    if not isinstance(kind, MOMENTS):
        raise Invalid(
            f"{what}: eventTimeColumnName={name!r} is {kind.simpleString()}: an event time is a timestamp; declare it "
            "so in the output schema"
        )


def passed_on(df: DataFrame, column: str, event_time: EventTime) -> DataFrame:
    """Return an operator's output with an event time, whose watermark is the operator's own.

    Args:
        df: The output.
        column: Its event time.
        event_time: That of the operator's input.
    """
    metadata = {WATERMARK_DELAY: event_time.delay_ms}
    return df.select(
        *(
            F.col(f"`{name}`").alias(name, metadata=metadata) if name == column else F.col(f"`{name}`")
            for name in df.columns
        )
    )
