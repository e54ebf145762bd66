"""Placement of rows in a Spark plan: the key group of each, and its partition."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dstl.errors import Invalid
from dstl.spark.task_definition import TaskDefinition
from dstl.state.codec.schema_evolution import MEANING
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.registry import StateRegistry
from dstl.state.vectorised.aggregation import WINDOW_END, WINDOW_START


def key_group_of(columns: Sequence[Column], max_parallelism: int) -> Column:
    """Return each row's key group: Spark's murmur3 (seed 42) of the columns that place it, modulo ``max_parallelism``.

    The hash is Spark's own, so that the same key has the same group whoever computes it; a null key has a group too.
    """
    return F.pmod(F.hash(*columns), F.lit(max_parallelism)).cast("int")


def key_group_column(by: Sequence[str], max_parallelism: int) -> Column:
    """Return each row's key group by the names of the columns that place it."""
    return key_group_of([F.col(f"`{name}`") for name in by], max_parallelism)


def placing_columns(registry: StateRegistry) -> Sequence[str]:
    """Return the columns of an operator's key whose hash is its key group.

    Those are all but for an aggregation by windows, whose other columns place its groups, as far as it has any.
    """
    names: list[str] = registry.key_schema.names
    is_aggregation = any(
        MEANING in (field.metadata or {}) for each in registry.descriptors for field in each.value_schemas[-1].fields
    )
    if is_aggregation and names[:2] == [WINDOW_START, WINDOW_END]:
        return names[2:] or names[:1]
    return names


def with_key_groups(df: DataFrame, definition: TaskDefinition) -> DataFrame:
    """Return the rows with their key groups, which travel with them into the task."""
    by = definition.placed_by or definition.by
    return df.withColumn(KEY_GROUP_COLUMN, key_group_column(by, definition.max_parallelism))


def keyed_input(df: DataFrame, definition: TaskDefinition) -> DataFrame:
    """Return the columns that an operator needs and its key groups, of rows that are counted for the query's progress.

    Counting also keeps a source without new data from being planned away, and an operator's tasks with it: then the
    batch could not be committed.

    Raises:
        Invalid: The rows come from an operator of that name, of this backend or another one.
    """
    try:
        counted = df.observe(f"dstl_{definition.uid}", F.count(F.lit(1)).alias("rows"))
    except AnalysisException as error:
        if error.getCondition() != "DUPLICATED_METRICS_NAME":
            raise
        raise Invalid(
            f"operator {definition.uid!r}: its rows come from an operator that is called so too: give each a name of "
            "its own (name=...), and make all operators of a query with one StateBackend"
        ) from None
    needed = [F.col(f"`{name}`") for name in definition.operator.input_schema.names]
    return with_key_groups(counted.select(needed), definition)


def repartition(keyed: DataFrame, definition: TaskDefinition) -> DataFrame:
    """Bring the rows to their partitions, by :func:`handles.key_group.partition_of`'s formula.

    A key group below zero is a mark of partition ``-1 - key_group`` (see :mod:`dstl.spark.query.ticks`).
    """
    group = F.col(KEY_GROUP_COLUMN)
    partition = F.floor(group * F.lit(definition.parallelism) / F.lit(definition.max_parallelism)).cast("int")
    return keyed.repartitionById(definition.parallelism, F.when(group < 0, -1 - group).otherwise(partition))
