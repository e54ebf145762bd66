"""Broadcast streams: every partition of an operator gets all their rows, before the keyed rows of the same batch.

The rows travel as rows of the keyed stream, once for each partition, through the same shuffle: what a task must know of
them is among its own rows, so a retry, a speculative copy and a batch that runs again see what the first attempt saw.
In a batch without such rows Spark plans the stream away, and what is left of it is a column of nulls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructType

from dstl.errors import Invalid, brief
from dstl.spark.query.ticks import nulls_for
from dstl.spark.task_definition import TaskDefinition
from dstl.state.broadcast_state import BroadcastStream
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.keyed_batch import KEY_GROUP_COLUMN

_COLUMN = "__dstl_broadcast"
_PARTITION = "__dstl_partition"


def check_broadcast(
    broadcast: Mapping[str, DataFrame] | None, df: DataFrame, processor: object, what: str
) -> tuple[BroadcastStream, ...]:
    """Return an operator's broadcast streams.

    Args:
        broadcast: DataFrames by name, as the user has given them.
        df: The operator's input.
        processor: The operator's.
        what: Names the operator, for messages.

    Raises:
        Invalid: Names the stream, what is wrong and what to do.
    """
    if broadcast is None:
        return ()
    if not isinstance(broadcast, Mapping):
        raise Invalid(
            f"{what}: broadcast is {type(broadcast).__name__}: give DataFrames by name, each once, as in "
            'broadcast={"rules": rules}'
        )
    streams = []
    for number, (name, rows) in enumerate(broadcast.items()):
        where = f"{what}: broadcast stream {brief(name)}"
        if not isinstance(name, str) or not name or name.startswith("$"):
            raise Invalid(f"{where}: a name is a text that is not empty and does not begin with '$'")
        if not isinstance(rows, DataFrame):
            raise Invalid(f"{where} is {type(rows).__name__}, not a DataFrame")
        if rows.isStreaming and not df.isStreaming:
            raise Invalid(f"{where} is a stream, and the input is not: read it with spark.read")
        if df.isStreaming and not rows.isStreaming:
            raise Invalid(
                f"{where} is a batch DataFrame, which no batch would bring anything new of: read it with "
                "spark.readStream, or join the input with it before (df.join(F.broadcast(rules), ...))"
            )
        _check_columns(rows.schema, where)
        streams.append(BroadcastStream(name, f"{_COLUMN}_{number}", rows.schema))
    if streams and not callable(getattr(processor, "handleBroadcastRows", None)):
        raise Invalid(
            f"{what}: {type(processor).__name__} has no handleBroadcastRows, and the operator has broadcast streams: "
            "write def handleBroadcastRows(self, name, rows), which takes the rows of one of them"
        )
    return tuple(streams)


def _check_columns(schema: StructType, where: str) -> None:
    arrow_schema_of(schema, where)
    if not schema.fields:
        raise Invalid(f"{where} has no column")
    for name in schema.names:
        if "`" in name:
            raise Invalid(f"{where}: column {name!r} has a backtick in its name: rename it with withColumnRenamed")


def with_broadcast(keyed: DataFrame, broadcast: Mapping[str, DataFrame], definition: TaskDefinition) -> DataFrame:
    """Return the input with the rows of its broadcast streams among its own, each once for every partition.

    Args:
        keyed: The input with its key groups.
        broadcast: DataFrames by name.
        definition: The operator.
    """
    rows = keyed
    for stream in definition.operator.streams:
        # A list, for it has no room for values where it is null, and a struct has.
        rows = rows.withColumn(stream.column, F.lit(None).cast(ArrayType(stream.schema)))
    union = rows
    for stream in definition.operator.streams:
        source = broadcast[stream.name]
        carried = F.array(F.struct(*(F.col(f"`{name}`") for name in stream.schema.names))).alias(stream.column)
        numbers = F.explode(F.sequence(F.lit(0), F.lit(definition.parallelism - 1))).alias(_PARTITION)
        everywhere = source.select(carried, numbers)
        nulls = nulls_for(rows, (stream.column,))
        union = union.union(everywhere.select(*_with_group(nulls, rows.columns)))
    return union


def _with_group(columns: Sequence[Any], names: Sequence[str]) -> list[Any]:
    mark = (-1 - F.col(_PARTITION)).cast("int").alias(KEY_GROUP_COLUMN)
    return [mark if name == KEY_GROUP_COLUMN else column for column, name in zip(columns, names, strict=True)]
