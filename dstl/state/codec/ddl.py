"""Spark's DDL type strings, read without a JVM: a Python worker has none, and PySpark itself asks the JVM.

The grammar is that of Spark SQL's ``colTypeList`` and ``dataType``: ``name STRING NOT NULL COMMENT 'x', n INT``,
``array<map<string, decimal(10,2)>>``, names in back quotes, and the older ``name: type``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
    YearMonthIntervalType,
)

from dstl.errors import Invalid

__all__ = ["parse_ddl", "schema_of"]

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)*`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:]))", re.ASCII)

_SIMPLE: dict[str, Callable[[], DataType]] = {
    "boolean": BooleanType,
    "tinyint": ByteType,
    "byte": ByteType,
    "smallint": ShortType,
    "short": ShortType,
    "int": IntegerType,
    "integer": IntegerType,
    "bigint": LongType,
    "long": LongType,
    "float": FloatType,
    "real": FloatType,
    "double": DoubleType,
    "date": DateType,
    "timestamp": TimestampType,
    "timestamp_ltz": TimestampType,
    "timestamp_ntz": TimestampNTZType,
    "string": StringType,
    "binary": BinaryType,
    "void": NullType,
}
_DAY_TIME = {"day": 0, "hour": 1, "minute": 2, "second": 3}
_YEAR_MONTH = {"year": 0, "month": 1}


def schema_of(schema: StructType | str) -> StructType:
    """Return a struct type from what ``getValueState`` and its siblings accept.

    Raises:
        Invalid: Neither a ``StructType`` nor a DDL string that Spark would take.
    """
    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise Invalid(f"a schema is a StructType or a DDL string, not {type(schema).__name__}")
    return parse_ddl(schema)


def parse_ddl(text: str) -> StructType:
    """Read a DDL string such as ``"name STRING, n INT NOT NULL"``; a lone ``struct<...>`` is taken as well.

    Raises:
        Invalid: Not Spark's grammar, or a type that this reader does not know; give a ``StructType`` then.
    """
    parser = _Parser(text)
    try:
        if parser.peek() == "struct" and parser.peek(1) == "<":
            found = parser.data_type()
            if parser.peek() is None and isinstance(found, StructType):
                return found
            raise parser.wrong()
        return StructType(parser.fields(end=None))
    except RecursionError:
        raise parser.wrong() from None


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        position, stop = 0, len(text.rstrip())
        while position < stop:
            match = _TOKEN.match(text, position)
            if match is None:
                raise self.wrong()
            position = match.end()
            quoted, literal, word, mark = match.groups()
            if quoted is not None:
                self._tokens.append(("name", quoted[1:-1].replace("``", "`")))
            elif literal is not None:
                self._tokens.append(("text", re.sub(r"\\(.)", r"\1", literal[1:-1])))
            elif word is not None:
                self._tokens.append(("word", word))
            else:
                self._tokens.append(("mark", mark))
        self._at = 0

    def wrong(self, why: str = "") -> Invalid:
        return Invalid(
            f"not a schema that DSTL can read: {self._text[:200]!r}{why}; write it as 'page string, n long', or give a "
            "StructType instead"
        )

    def peek(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        if at >= len(self._tokens):
            return None
        kind, value = self._tokens[at]
        return value.lower() if kind in ("word", "mark") else None

    def fields(self, end: str | None) -> list[StructField]:
        found: list[StructField] = []
        if end is not None and self.peek() == end:
            return found
        while True:
            found.append(self._field())
            if self.peek() == ",":
                self._at += 1
                continue
            if self._at == len(self._tokens) if end is None else self.peek() == end:
                return found
            raise self.wrong()

    def _field(self) -> StructField:
        kind, name = self._take()
        if kind not in ("word", "name"):
            raise self.wrong()
        if self.peek() == ":":
            self._at += 1
        data_type = self.data_type()
        nullable, metadata = True, {}
        if self.peek() == "not" and self.peek(1) == "null":
            self._at += 2
            nullable = False
        if self.peek() == "comment":
            self._at += 1
            kind, comment = self._take()
            if kind != "text":
                raise self.wrong()
            metadata = {"comment": comment}
        return StructField(name, data_type, nullable, metadata)

    def data_type(self) -> DataType:
        kind, raw = self._take()
        if kind != "word":
            raise self.wrong()
        word = raw.lower()
        if word == "array":
            (element,) = self._angles(1)
            return ArrayType(element)
        if word == "map":
            key, value = self._angles(2)
            return MapType(key, value)
        if word == "struct":
            self._expect("<")
            fields = self.fields(end=">")
            self._expect(">")
            return StructType(fields)
        if word in ("decimal", "dec", "numeric"):
            numbers = self._numbers()
            if len(numbers) > 2:
                raise self.wrong()
            return DecimalType(*numbers)
        if word in ("char", "character", "varchar"):
            (length,) = self._numbers() or (0,)
            if length < 1:
                raise self.wrong()
            return VarcharType(length) if word == "varchar" else CharType(length)
        if word == "interval":
            return self._interval()
        if word in ("time", "variant"):
            return self._recent(word)
        if word == "string" and self.peek() == "collate":
            self._at += 1
            return StringType(self._take()[1])
        if word not in _SIMPLE:
            raise self.wrong(f" has the type {raw[:40]!r}, which there is not")
        return _SIMPLE[word]()

    def _interval(self) -> DataType:
        first = self.peek()
        self._at += 1
        last = first
        if self.peek() == "to":
            last = self.peek(1)
            self._at += 2
        if first in _DAY_TIME and last in _DAY_TIME:
            return DayTimeIntervalType(_DAY_TIME[first], _DAY_TIME[last])
        if first in _YEAR_MONTH and last in _YEAR_MONTH:
            return YearMonthIntervalType(_YEAR_MONTH[first], _YEAR_MONTH[last])
        raise self.wrong()

    def _recent(self, word: str) -> DataType:
        # Types that the oldest supported PySpark does not have.
        from pyspark.sql import types

        numbers = self._numbers() if word == "time" else []
        kind = getattr(types, "TimeType" if word == "time" else "VariantType", None)
        if kind is None:
            raise self.wrong()
        made: DataType = kind(*numbers)
        return made

    def _angles(self, count: int) -> list[DataType]:
        self._expect("<")
        found = [self.data_type()]
        while len(found) < count:
            self._expect(",")
            found.append(self.data_type())
        self._expect(">")
        return found

    def _numbers(self) -> list[int]:
        found: list[int] = []
        if self.peek() != "(":
            return found
        while True:
            self._at += 1
            kind, value = self._take()
            if kind != "word" or not value.isdigit():
                raise self.wrong()
            found.append(int(value))
            if self.peek() != ",":
                self._expect(")")
                return found

    def _take(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise self.wrong()
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, mark: str) -> None:
        if self.peek() != mark:
            raise self.wrong()
        self._at += 1
