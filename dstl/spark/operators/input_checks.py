"""Checks of an operator's input, made when the query is defined and not in a task."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, MapType, StructType, TimestampNTZType, TimestampType

from dstl.errors import Invalid
from dstl.spark.task_definition import OperatorPlace

SESSION_WINDOW = "spark.sessionWindow"
"""In the metadata of a column of session windows."""
WATERMARK_DELAY = "spark.watermarkDelayMs"
"""In a column's metadata: its watermark's delay, as ``withWatermark`` has left it there."""

MOMENTS = (TimestampType, TimestampNTZType)
"""Spark's types of event times, beside windows of them."""


def check_input(df: DataFrame, place: OperatorPlace, *, or_batch: bool = False) -> None:
    """Check an operator's input; the types of the columns that it needs are the caller's to check.

    With ``or_batch`` the operator takes batch DataFrames, too.

    Raises:
        Invalid: It is not a stream, a grouping column is missing or of a type that Spark cannot hash, or a name is
            taken.
    """
    what, by = place.label, place.by
    check_stream(df, what, or_batch=or_batch)
    if not by:
        raise Invalid(f"{what}: groupBy() names no column; there is no state without a key")
    missing = [name for name in by if name not in df.columns]
    if missing:
        raise Invalid(f"{what}: there is no column {missing[0]!r} to group by; there are {', '.join(df.columns)}")
    for name in by:
        check_hashable(df.schema[name].dataType, name, what)


def check_stream(df: DataFrame, what: str, *, or_batch: bool = False) -> None:
    """Check that an operator's input is a stream whose columns' names it can take.

    Args:
        df: The input.
        what: Names the operator, for messages.
        or_batch: The operator takes batch DataFrames, too.

    Raises:
        Invalid: It is not.
    """
    if not isinstance(df, DataFrame):
        raise Invalid(f"{what}: the input is {type(df).__name__}, not a DataFrame")
    if not (df.isStreaming or or_batch):
        raise Invalid(f"{what}: the DataFrame is not streaming; read it with spark.readStream")
    taken = [name for name in df.columns if name.startswith("__dstl_")]
    if taken:
        raise Invalid(f"{what}: the input's column {taken[0]!r} has a name that DSTL reserves: rename it")


def check_names(df: DataFrame, used: Collection[str], place: OperatorPlace) -> None:
    """Check the names of the columns that an operator needs, which travel to a worker.

    Spark would refuse each of these too, later and of a plan that the user has not written.

    Raises:
        Invalid: A name that Spark's ``mapInArrow`` cannot take, or that it cannot tell from another one.
    """
    what = place.label
    exact = df.sparkSession.conf.get("spark.sql.caseSensitive") == "true"
    folded = [name if exact else name.lower() for name in df.columns]
    for name in used:
        if "." in name or "`" in name:
            raise Invalid(
                f"{what}: the input's column {name!r} has a dot or a backtick in its name, which Spark's mapInArrow "
                "does not take: rename it with withColumnRenamed"
            )
        same = [
            each for each, fold in zip(df.columns, folded, strict=True) if fold == (name if exact else name.lower())
        ]
        if len(same) > 1:
            raise Invalid(
                f"{what}: the input has columns {' and '.join(map(repr, same))}, which Spark takes for one: rename "
                "one with an alias"
            )


def check_hashable(kind: DataType, name: str, what: str) -> None:
    """Refuse a grouping column of a type that Spark cannot hash.

    Raises:
        Invalid: Names the column.
    """
    if _holds_unhashable(kind):
        raise Invalid(
            f"{what}: grouping column {name!r} is {kind.simpleString()}: Spark has no hash of maps and variants; "
            "group by a string of it (to_json, say)"
        )


def _holds_unhashable(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_holds_unhashable(field.dataType) for field in kind.fields)
    # The oldest supported PySpark may lack variants: known by name.
    return (
        isinstance(kind, MapType)
        or type(kind).__name__ == "VariantType"
        or (hasattr(kind, "elementType") and _holds_unhashable(kind.elementType))
    )
