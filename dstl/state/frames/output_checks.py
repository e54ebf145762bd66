"""Refusal of output that Spark takes and goes wrong with later: nulls that a schema rules out, and late event times.

What reads a column as NOT NULL gets a zero for such a null, or a crash, and a Parquet file with it cannot be read. A
row that is late for the operator that follows is dropped.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, UserDefinedType

from dstl.errors import Invalid


def refuse_null(column: pa.Array, field: StructField, operator: str) -> None:
    """Refuse a column of an operator's output that holds a null where its field rules it out.

    Raises:
        Invalid: Names the operator, the column and the part of it.
    """
    found = forbidden_null(column, field.dataType, field.nullable)
    if found is not None:
        of = f"column {field.name!r}" if not found else f"{found} of column {field.name!r}"
        raise Invalid(f"operator {operator!r} yielded a null in {of}, which is NOT NULL")


def forbids_nulls(data_type: DataType) -> bool:
    """Return True where values of the type have a part that cannot be null."""
    if isinstance(data_type, StructType):
        return any(not field.nullable or forbids_nulls(field.dataType) for field in data_type.fields)
    if isinstance(data_type, ArrayType):
        return not data_type.containsNull or forbids_nulls(data_type.elementType)
    if isinstance(data_type, MapType):
        return not data_type.valueContainsNull or forbids_nulls(data_type.keyType) or forbids_nulls(data_type.valueType)
    return isinstance(data_type, UserDefinedType) and forbids_nulls(data_type.sqlType())


def forbidden_null(column: pa.Array, data_type: DataType, nullable: bool) -> str | None:
    """Return where a column has a null that its type rules out: a path below the column, empty for itself.

    Args:
        column: Of the Arrow type that Spark has for the type.
        data_type: Its type.
        nullable: Whether the column itself may hold nulls.

    Returns:
        ``.x`` for a struct's field, ``[]`` for an array's elements or a map's values; None where there is no such null.
    """
    if column.null_count:
        if not nullable:
            return ""
        column = column.drop_null()
    parts: list[tuple[str, pa.Array, DataType, bool]] = []
    if isinstance(data_type, UserDefinedType):
        return forbidden_null(column, data_type.sqlType(), True)
    if isinstance(data_type, StructType):
        for field, part in zip(data_type.fields, column.flatten(), strict=True):
            parts.append((f".{field.name}", part, field.dataType, field.nullable))
    elif isinstance(data_type, ArrayType):
        parts.append(("[]", column.flatten(), data_type.elementType, data_type.containsNull))
    elif isinstance(data_type, MapType):
        parts.append(("[key]", column.keys, data_type.keyType, True))
        parts.append(("[]", column.items, data_type.valueType, data_type.valueContainsNull))
    for where, part, kind, may in parts:
        found = forbidden_null(part, kind, may)
        if found is not None:
            return where + found
    return None


def check_emitted(batch: pa.RecordBatch, column: str, late_ms: int, operator: str) -> None:
    """Refuse output that what follows would drop: it has the watermark of this operator.

    Args:
        batch: Rows that the operator yields.
        column: Their event time; a null is never late.
        late_ms: Rows at or before it are late, milliseconds since 1970.
        operator: For the message.

    Raises:
        Invalid: A row is late; names its time and what to do.
    """
    times = batch.column(column)
    earliest = pc.min(times.cast(pa.timestamp("us", times.type.tz)).view(pa.int64())).as_py()
    if earliest is not None and earliest <= late_ms * 1000:
        raise Invalid(
            f"operator {operator!r} emits a row whose event time {column!r} is {earliest // 1000} ms since 1970, and "
            f"its watermark has passed {late_ms} already, so what follows would drop the row as late: give it a later "
            "event time (that of the timer, or of the latest row), or leave eventTimeColumnName out"
        )
