"""Initial state: the rows of a batch DataFrame that each key is given once, before its first input.

The rows travel as rows of the stream: a stream-static join of the DataFrame with a source that has one row, once. So
Spark's own record of offsets says when they are delivered: in batch 0, again when that batch is run again, and never
in another; and they reach their key's partition through the same shuffle as every row, whatever their number. A batch
query is all in one, so there they travel as they are.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, GroupedData
from pyspark.sql import functions as F

from dstl.errors import Invalid
from dstl.spark.query.placement import key_group_column
from dstl.spark.query.ticks import one_row_once
from dstl.spark.task_definition import TaskDefinition
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN, KEY_GROUP_COLUMN


def check_initial_state(initial_state: Any, definition: TaskDefinition) -> DataFrame:
    """Return the DataFrame of initial state if its keys can be those of the stream.

    Args:
        initial_state: A batch DataFrame, or one that is grouped already, as PySpark's own argument is.
        definition: The operator.

    Raises:
        Invalid: It is a stream, has not the same grouping columns, or has a type that cannot be brought to a worker.
    """
    what = definition.label
    df = getattr(initial_state, "_df", None) if isinstance(initial_state, GroupedData) else initial_state
    if not isinstance(df, DataFrame):
        raise Invalid(f"{what}: initial_state is a {type(initial_state).__name__}, not a DataFrame")
    if df.isStreaming:
        raise Invalid(f"{what}: initial_state is a stream; it must be a batch DataFrame")
    found = {field.name: field.dataType.simpleString() for field in df.schema.fields}
    for field in definition.operator.key_schema.fields:
        wanted = field.dataType.simpleString()
        if found.get(field.name) != wanted:
            held = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise Invalid(f"{what}: initial_state needs the grouping column {field.name} {wanted}; it has {held}")
    arrow_schema_of(df.schema, f"{what}: the initial state")
    return df


def with_initial_state(df: DataFrame, initial: DataFrame, definition: TaskDefinition) -> DataFrame:
    """Return the input with the initial state's rows among its own.

    Args:
        df: The input, a stream or not, with its key groups.
        initial: The batch DataFrame, which has the grouping columns, too.
        definition: The operator.
    """
    names = [f"`{name}`" for name in initial.columns]
    state = F.struct(*names)
    kind = initial.select(state.alias("s")).schema["s"].dataType
    rows = df.withColumn(INITIAL_STATE_COLUMN, F.lit(None).cast(kind))
    # The one row is broadcast to the state's, however many: as a join's streamed side the state stays distributed.
    once = initial.join(F.broadcast(one_row_once(df.sparkSession, definition.uid))) if df.isStreaming else initial
    columns = []
    for field in rows.schema.fields:
        if field.name in definition.by:
            value = F.col(f"`{field.name}`")
        elif field.name == KEY_GROUP_COLUMN:
            value = key_group_column(definition.by, definition.max_parallelism)
        elif field.name == INITIAL_STATE_COLUMN:
            value = state
        else:
            value = F.lit(None).cast(field.dataType)
        columns.append(value.alias(field.name))
    return rows.union(once.select(*columns))
