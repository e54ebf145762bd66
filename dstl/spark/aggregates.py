"""Aggregates for :meth:`StateBackend.aggregate <dstl.spark.StateBackend.aggregate>`, named as Spark names its own."""

from __future__ import annotations

from dstl.state.vectorised.keyed_functions import Aggregate

__all__ = ["approx_count_distinct", "count", "first", "last", "max", "mean", "min", "sum"]


def count(column: str | None = None) -> Aggregate:
    """Number of rows; of a column: of its values that are not null."""
    return Aggregate("count", column)


def sum(column: str) -> Aggregate:
    """Sum of a column's numbers: ``bigint`` of integers, double of floats, a wider decimal of decimals.

    Null where every value is. A sum that does not fit fails the batch, as Spark's does in ANSI mode.
    """
    return Aggregate("sum", column)


def min(column: str) -> Aggregate:
    """Smallest value of a column, nulls left out; NaN is larger than any number."""
    return Aggregate("min", column)


def max(column: str) -> Aggregate:
    """Largest value of a column, nulls left out; NaN is larger than any number."""
    return Aggregate("max", column)


def mean(column: str) -> Aggregate:
    """Mean of a column's numbers, nulls left out: a double, or of decimals a decimal with four more digits."""
    return Aggregate("mean", column)


def first(column: str, ignore_nulls: bool = False) -> Aggregate:
    """Value of the first row of the key that ever came; with ``ignore_nulls`` the first one that is not null.

    Spark promises no order among the rows of one micro-batch.
    """
    return Aggregate("first", column, ignore_nulls=ignore_nulls)


def last(column: str, ignore_nulls: bool = False) -> Aggregate:
    """Value of the key's last row so far; with ``ignore_nulls`` the last one that is not null; see :func:`first`."""
    return Aggregate("last", column, ignore_nulls=ignore_nulls)


def approx_count_distinct(column: str, rsd: float = 0.05) -> Aggregate:
    """Approximate number of a column's distinct values.

    Args:
        column: Its values are told apart as grouping keys are; nulls do not count.
        rsd: Relative standard deviation, in [0.005, 0.4]. Smaller: closer, and more state per key with many distinct
            values (0.05: at most 1 KB, 0.01: at most 64 KB); keys with few take few bytes at any setting.
    """
    return Aggregate("approx_count_distinct", column, rsd=rsd)
