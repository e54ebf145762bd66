"""Schemas for tests without Spark: the part of its DDL that they use."""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql import types as t

from dstl.errors import Invalid
from dstl.state.declared_schemas import DeclaredSchemas

__all__ = ["parse_ddl", "schemas_of_tests"]

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
    """Return the schema of ``"k string, n long not null, a array<struct<x: int>>"``."""
    fields = []
    for part in _split(text):
        name, kind, required = re.fullmatch(r"(?is)\s*(\w+)[\s:]+(.*?)(\s+not\s+null)?\s*", part).groups()
        fields.append(t.StructField(name, _type(kind), required is None))
    return t.StructType(fields)


def schemas_of_tests() -> DeclaredSchemas:
    """Return what reads the schemas of a processor under test."""
    return DeclaredSchemas(_parse_or_refuse)


def _parse_or_refuse(text: str) -> t.StructType:
    try:
        return parse_ddl(text)
    except (KeyError, AttributeError) as error:
        raise Invalid(f"not a schema: {text!r}") from error


def _type(text: str) -> t.DataType:
    word, inner = re.fullmatch(r"(?s)\s*([\w\s]+?)\s*(?:[<(](.*)[>)])?\s*", text).groups()
    word = word.lower()
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
        return parse_ddl(inner)
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
