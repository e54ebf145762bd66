"""What every operator asks of its input: refused when the query is defined, not in a task."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, MapType, StructType

from dstl.errors import Invalid

__all__ = ["check_input"]


def check_input(df: DataFrame, by: Sequence[str], what: str) -> None:
    """Check what an operator is given; the types of the columns that it needs are the caller's to check.

    Args:
        df: The input.
        by: Grouping columns.
        what: Names the operator, for messages.

    Raises:
        Invalid: It is not a stream, a grouping column is missing or of a type that Spark cannot hash, or a name is
            taken.
    """
    if not df.isStreaming:
        raise Invalid(f"{what}: the DataFrame is not streaming; read it with spark.readStream")
    if not by:
        raise Invalid(f"{what}: by names no column; there is no state without a key")
    missing = [name for name in by if name not in df.columns]
    if missing:
        raise Invalid(f"{what}: there is no column {missing[0]!r} to group by; there are {', '.join(df.columns)}")
    taken = [name for name in df.columns if name.startswith("__dstl_")]
    if taken:
        raise Invalid(f"{what}: the input's column {taken[0]!r} has a name that DSTL keeps for itself: rename it")
    for name in by:
        kind = df.schema[name].dataType
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
