"""Conversion of values that were written under an older schema of their state to the newest one.

Columns, and the fields of structs wherever they stand (in structs, arrays, the values of maps), are matched by name.
One that has come later is null, one that is gone is left out, their order is free, and their types may widen as Avro
widens them: the rules of Spark's ``transformWithState`` with its Avro encoding. A column that was removed and has come
back is another column: it is null where the value is older than the gap (Spark shows the old content again).

Spark also takes changes after which a stored number means something else, or may not be readable. They are refused
here: another scale or a smaller precision of a decimal, and dates as timestamps (days become microseconds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

MEANING = "dstl.meaning"
"""In a column's metadata: what it holds, where its type does not say so and another content would not fit."""

FORM = "dstl.form"
"""In a column's metadata: how its bytes are made, where neither its type nor :data:`MEANING` says so."""

Convert = Callable[[Any], Any]
"""A wire value of the old type, not None, to one of the new type (see ``dstl.state.codec.field_codec``)."""

_REAL = (FloatType, DoubleType)
_MOMENTS = (TimestampType, TimestampNTZType)

_WIDER: dict[type[DataType], tuple[type[DataType], ...]] = {
    ByteType: (ShortType, IntegerType, LongType, *_REAL),
    ShortType: (IntegerType, LongType, *_REAL),
    IntegerType: (LongType, *_REAL, DateType, *_MOMENTS),
    LongType: (*_REAL, *_MOMENTS),
    FloatType: (DoubleType,),
    DateType: (IntegerType, LongType, *_REAL),
    TimestampType: (LongType, *_REAL, TimestampNTZType),
    TimestampNTZType: (LongType, *_REAL, TimestampType),
    StringType: (BinaryType,),
    BinaryType: (StringType,),
}
"""Types that a type may become: a date is its days, a timestamp its microseconds since 1970, a string its UTF-8."""


def why_unreadable(stored: StructType, declared: StructType) -> str:
    """Return why values of ``stored`` cannot be read as ``declared``, naming the column; empty where they can."""
    return _struct_reason(stored, declared, "")


def conversion(history: Sequence[DataType]) -> Convert | None:
    """Return what makes wire values of the first type into those of the last; None where they are the same.

    Args:
        history: The types that one column, or the whole state, has had, in their order; each can be read as the later
            ones. Of a struct the wire value is the list of its fields.
    """
    old, new = history[0], history[-1]
    if isinstance(new, StructType):
        return _struct_conversion(history)
    if isinstance(new, ArrayType):
        element = conversion([each.elementType for each in history])
        return None if element is None else lambda wire: [None if one is None else element(one) for one in wire]
    if isinstance(new, MapType):
        item = conversion([each.valueType for each in history])
        return None if item is None else lambda wire: [[k, None if v is None else item(v)] for k, v in wire]
    if isinstance(new, FloatType) and not isinstance(old, FloatType):
        # Rounded once: by way of a double some would be rounded twice.
        return lambda wire: float(np.int64(wire).astype(np.float32))
    if isinstance(new, DoubleType) and not isinstance(old, FloatType):
        return float
    if isinstance(old, StringType) and isinstance(new, BinaryType):
        return str.encode
    if isinstance(old, BinaryType) and isinstance(new, StringType):
        return lambda wire: wire.decode(errors="replace")
    return None


def _struct_conversion(history: Sequence[StructType]) -> Convert | None:
    old, new = history[0], history[-1]
    taken: list[tuple[int | None, Convert | None]] = []
    for field in new.fields:
        if all(field.name in each.names for each in history):
            convert = conversion([each[field.name].dataType for each in history])
            taken.append((old.names.index(field.name), convert))
        else:
            taken.append((None, None))
    if taken == [(position, None) for position in range(len(old.names))]:  # the same columns in the same places
        return None

    width = len(old.names)

    def convert_struct(wire: Sequence[Any]) -> list[Any]:
        if len(wire) != width:
            raise ValueError(f"{len(wire)} fields instead of {width}")
        found: list[Any] = []
        for position, convert in taken:
            one = None if position is None else wire[position]
            found.append(one if convert is None or one is None else convert(one))
        return found

    return convert_struct


def _struct_reason(stored: StructType, declared: StructType, path: str) -> str:
    held = {field.name: field for field in stored.fields}
    for field in declared.fields:
        where = f"{path}{field.name}"
        before = held.get(field.name)
        if before is None:
            # A processor's column is another one then, as with Avro. An aggregate's is a name of Spark's SQL.
            like = [name for name in held if name.lower() == field.name.lower() and name not in declared.names]
            if like and MEANING in field.metadata:
                return f"{where!r} was called {path + like[0]!r}, and with other capitals it would begin anew"
            if not field.nullable:
                return f"the new column {where!r} is NOT NULL, and stored values have none"
            continue
        if before.nullable and not field.nullable:
            return f"column {where!r} may hold nulls and is declared NOT NULL"
        for said in (MEANING, FORM):
            meant, means = (each.metadata.get(said) for each in (before, field))
            if meant and means and meant != means:
                return f"column {where!r} was {meant} and is {means}"
        # Nothing was ever stored in a void column.
        if isinstance(before.dataType, NullType) and field.nullable:
            continue
        reason = _reason(before.dataType, field.dataType, where)
        if reason:
            return reason
    return ""


def _reason(old: DataType, new: DataType, path: str) -> str:
    if isinstance(old, StructType) and isinstance(new, StructType):
        return _struct_reason(old, new, f"{path}.")
    if isinstance(old, ArrayType) and isinstance(new, ArrayType):
        if old.containsNull and not new.containsNull:
            return f"array {path!r} may hold nulls and is declared without"
        return _reason(old.elementType, new.elementType, f"{path}.element")
    if isinstance(old, MapType) and isinstance(new, MapType):
        if old.keyType.simpleString() != new.keyType.simpleString():
            return f"the keys of map {path!r} change from {old.keyType.simpleString()} to {new.keyType.simpleString()}"
        if old.valueContainsNull and not new.valueContainsNull:
            return f"map {path!r} may hold nulls and is declared without"
        return _reason(old.valueType, new.valueType, f"{path}.value")
    if old.simpleString() == new.simpleString() or _widens(old, new):
        return ""
    return f"column {path!r} changes from {old.simpleString()} to {new.simpleString()}"


def _widens(old: DataType, new: DataType) -> bool:
    if isinstance(old, DecimalType) and isinstance(new, DecimalType):
        same_bytes = _decimal_bytes(old.precision) == _decimal_bytes(new.precision)
        return old.scale == new.scale and old.precision <= new.precision and same_bytes
    if any(isinstance(each, StringType) and each.simpleString() != "string" for each in (old, new)):
        return False  # a collated string, which Avro does not have
    return type(new) in _WIDER.get(type(old), ())


def _decimal_bytes(precision: int) -> int:
    """Return how many bytes Avro has for a decimal: Spark lets its precision grow within them."""
    return (int(10**precision - 1).bit_length() + 8) // 8
