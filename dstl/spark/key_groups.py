"""Key groups in a Spark plan: which column says where a row belongs."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F

__all__ = ["KEY_GROUP_COLUMN", "key_group_column", "partition_column"]

KEY_GROUP_COLUMN = "__dstl_key_group"
"""Travels with every row into the task; no user column may have this name."""


def key_group_column(by: Sequence[str], max_parallelism: int) -> Column:
    """Return each row's key group: Spark's murmur3 (seed 42) of the key columns modulo ``max_parallelism``.

    The hash is Spark's own, so that the same key has the same group whoever computes it; a null key has a group too.
    """
    return F.pmod(F.hash(*[F.col(f"`{name}`") for name in by]), F.lit(max_parallelism)).cast("int")


def partition_column(max_parallelism: int, parallelism: int) -> Column:
    """Return each row's partition by :func:`handles.key_group.partition_of`'s formula.

    A key group below zero is a mark of partition ``-1 - key_group`` (see :mod:`dstl.spark.ticks`).
    """
    group = F.col(KEY_GROUP_COLUMN)
    partition = F.floor(group * F.lit(parallelism) / F.lit(max_parallelism)).cast("int")
    return F.when(group < 0, -1 - group).otherwise(partition)
