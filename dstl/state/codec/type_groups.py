"""Groups of Spark's types by how the codecs hold their values."""

from __future__ import annotations

from pyspark.sql.types import (
    ByteType,
    CharType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

__all__ = ["FLOATS", "INTEGERS", "MICROSECONDS", "TEXT", "WHOLE", "is_small_decimal"]

INTEGERS = (ByteType, ShortType, IntegerType, LongType)

MICROSECONDS = (TimestampType, TimestampNTZType, DayTimeIntervalType)
"""Moments and durations, which are numbers of microseconds."""

WHOLE = (*INTEGERS, DateType, *MICROSECONDS)
"""Types whose values are whole numbers of at most 64 bits."""

FLOATS = (DoubleType, FloatType)

TEXT = (StringType, CharType, VarcharType)


def is_small_decimal(data_type: DecimalType) -> bool:
    """Return True where every unscaled value of the type fits 64 bits."""
    return bool(data_type.precision <= 18)
