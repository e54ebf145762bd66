"""Spark's types by how their values are held: what the codecs, in all their forms, tell apart."""

from __future__ import annotations

from pyspark.sql.types import (
    ByteType,
    CharType,
    DateType,
    DayTimeIntervalType,
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

__all__ = ["FLOATS", "INTEGERS", "MICROSECONDS", "TEXT", "WHOLE"]

INTEGERS = (ByteType, ShortType, IntegerType, LongType)

MICROSECONDS = (TimestampType, TimestampNTZType, DayTimeIntervalType)
"""Moments and durations."""

WHOLE = (*INTEGERS, DateType, *MICROSECONDS)
"""What is a whole number of 64 bits, at first sight or not."""

FLOATS = (DoubleType, FloatType)

TEXT = (StringType, CharType, VarcharType)
