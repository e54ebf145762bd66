"""Schemas as text for tests without a JVM, which Spark's own parser needs: the usual part of its DDL."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql import types as t

from dstl.errors import Invalid, brief

_TYPES: dict[str, Callable[..., t.DataType]] = {
    "boolean": t.BooleanType,
    "tinyint": t.ByteType,
    "byte": t.ByteType,
    "smallint": t.ShortType,
    "short": t.ShortType,
    "int": t.IntegerType,
    "bigint": t.LongType,
    "long": t.LongType,
    "float": t.FloatType,
    "double": t.DoubleType,
    "date": t.DateType,
    "timestamp": t.TimestampType,
    "timestamp_ntz": t.TimestampNTZType,
    "string": t.StringType,
    "binary": t.BinaryType,
    "void": t.NullType,
    "decimal": t.DecimalType,
    "char": t.CharType,
    "varchar": t.VarcharType,
    "variant": t.VariantType,
    "time": t.TimeType,
}

_DAY_TIME = ["day", "hour", "minute", "second"]
_YEAR_MONTH = ["year", "month"]


def parse_ddl(text: str) -> t.StructType:
    """Return the schema of ``"k string, n long not null, a array<struct<x: int>>"``.

    Columns have plain names (letters, digits, ``_``); no comments, defaults or collations.

    Raises:
        Invalid: It is something else: give a ``StructType``.
    """
    try:
        return _struct(text)
    except (KeyError, AttributeError, TypeError, ValueError):
        raise Invalid(
            f"not a schema that can be read without Spark: {brief(text)}; write it as 'page string, n long', or give a "
            "StructType"
        ) from None


def _struct(text: str) -> t.StructType:
    fields = []
    for part in _split(text):
        found = re.fullmatch(r"(?is)\s*(\w+)[\s:]+(.*?)(\s+not\s+null)?\s*", part)
        if found is None:
            raise ValueError(part)
        fields.append(t.StructField(found[1], _type(found[2]), found[3] is None))
    return t.StructType(fields)


def _type(text: str) -> t.DataType:
    found = re.fullmatch(r"(?s)\s*([\w\s]+?)\s*(?:[<(](.*)[>)])?\s*", text)
    if found is None:
        raise ValueError(text)
    word, inner = found[1].lower(), found[2]
    if word.startswith("interval "):
        names = word.removeprefix("interval ").split(" to ")
        kind, units = (
            (t.DayTimeIntervalType, _DAY_TIME) if names[0] in _DAY_TIME else (t.YearMonthIntervalType, _YEAR_MONTH)
        )
        return kind(units.index(names[0]), units.index(names[-1]))
    if word == "array":
        return t.ArrayType(_type(inner))
    if word == "map":
        return t.MapType(*map(_type, _split(inner)))
    if word == "struct":
        return _struct(inner)
    return _TYPES[word](*map(int, _split(inner or "")))


def _split(text: str) -> list[str]:
    """Return what stands between commas outside of brackets."""
    parts, depth = [""], 0
    for mark in text:
        depth += (mark in "<(") - (mark in ">)")
        if mark == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += mark
    return parts if text.strip() else []
