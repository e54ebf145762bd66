"""A processor whose program is deployed anew: its states' schemas change, in every way that they may.

Each version of the program adds, removes, moves and widens columns. What a value must show to a later version follows
from the version that has written it, which it holds itself: so the processor says what is wrong, and no model has to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

WRONG = "WRONG: "
"""Begins what it yields where a value is not what its writer's version and this one make of it."""


def _pair(operation: Any, *more: StructField) -> StructType:
    return StructType([StructField("label", StringType()), StructField("operation", operation), *more])


_BY, _NUMBER = StructField("by", IntegerType()), StructField("number", LongType())
_EXTRA = StructField("extra", StringType())
_VALUES = (
    StructType(
        [
            _BY,
            StructField("n", IntegerType()),
            StructField("label", StringType()),
            StructField("price", DecimalType(8, 2)),
            StructField("share", FloatType()),
            StructField("pair", _pair(IntegerType())),
            StructField("pairs", ArrayType(_pair(IntegerType()))),
        ]
    ),
    # Moved and widened; a label has gone, and inside of others there is more.
    StructType(
        [
            StructField("price", DecimalType(9, 2)),
            _BY,
            StructField("n", LongType()),
            StructField("share", DoubleType()),
            StructField("pair", _pair(LongType(), _EXTRA)),
            StructField("pairs", ArrayType(_pair(LongType(), _EXTRA))),
            _NUMBER,
        ]
    ),
    # The label is back, and what the first version has written of it must not be.
    StructType([_NUMBER, StructField("label", StringType()), _BY, StructField("n", LongType())]),
)
_SLOTS = tuple(
    StructType([_BY, StructField("n", kind), StructField("by_name", MapType(StringType(), kind))])
    for kind in (ShortType(), IntegerType(), LongType())
)
_SLOT = StructType([StructField("slot", IntegerType())])
VERSIONS = len(_VALUES)
MISTAKES = (-2, -1)
"""Versions that nobody may run where the state is there already: a user key, or a column, is of another type."""


def _fields(n: int) -> Mapping[str, Any]:
    """Return what each column holds of a number, whatever its type; inside of others a dictionary stands for a row."""
    pair = {"label": f"label {n % 7}", "operation": n, "extra": f"extra {n}"}
    return {
        "n": n,
        "label": f"label {n}",
        "price": Decimal(n) / 4,
        "share": n / 4,
        "pair": pair,
        "pairs": [pair, pair],
        "number": n << 33,
        "by_name": {"n": n},
    }


def _row(schema: StructType, version: int, n: int) -> tuple[Any, ...]:
    """Return what a version writes of a number."""
    fields = {**_fields(n), "by": version}
    return tuple(_as(field.dataType, fields[field.name], field.dataType) for field in schema)


def _as(kind: Any, value: Any, written: Any) -> Any:
    """Return a value as a type shows it whose writer had another."""
    if isinstance(kind, StructType):
        known = {field.name: field.dataType for field in written}
        return tuple(
            _as(field.dataType, value[field.name], known[field.name]) if field.name in known else None for field in kind
        )
    if isinstance(kind, ArrayType):
        return [_as(kind.elementType, each, written.elementType) for each in value]
    return value


def _expected(schemas: tuple[StructType, ...], version: int, by: int, n: int) -> tuple[Any, ...]:
    """Return what a version must show of a number that another version has written.

    A version between them has only read it: what is written since says so itself.
    """
    fields, history = {**_fields(n), "by": by}, schemas[by : version + 1]
    return tuple(
        _as(field.dataType, fields[field.name], history[0][field.name].dataType)
        if all(field.name in each.names for each in history)
        else None
        for field in schemas[version]
    )


def _plain(value: Any) -> Any:
    """Return a value without the classes of rows."""
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


class Evolving(StatefulProcessor):  # type: ignore[misc]
    """Keeps a value and some slots for each key, as one version of its program has them.

    Args:
        version: The program's.
    """

    def __init__(self, version: int) -> None:
        self._version = version

    def init(self, handle: Any) -> None:
        """Declare the states with this version's schemas; the first version had one more, which is deleted since."""
        if self._version in MISTAKES:
            is_key = self._version == MISTAKES[0]
            number = StructField("n", StringType())
            handle.getMapState("slots", StructType([number]) if is_key else _SLOT, _SLOTS[0])
            handle.getValueState("value", StructType([_BY, number]))
        self._value = handle.getValueState("value", _VALUES[self._version])
        self._slots = handle.getMapState("slots", _SLOT, _SLOTS[self._version])
        old = handle.getListState("old", _SLOT)
        self._old = old if self._version == 0 else None
        if self._version == 1:
            handle.deleteIfExists("old")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Compare what is there with what must be, and write it anew."""
        numbers = [row.operation for row in rows]
        value = self._value.get()
        shown = [self._compared(_VALUES, value)]
        shown += [self._compared(_SLOTS, each) for _, each in sorted(self._slots.iterator())]
        for number in numbers:
            # Most slots keep what an earlier version has written.
            if number % 3 == 0:
                self._value.update(_row(_VALUES[self._version], self._version, number))
            slot = (number % 5,)
            if number % 4 == 0 or not self._slots.containsKey(slot):
                self._slots.updateValue(slot, _row(_SLOTS[self._version], self._version, number % 30_000))
            if self._old is not None:
                self._old.appendValue(slot)
        yield Row(key=key[0], what="; ".join(shown))

    def _compared(self, schemas: tuple[StructType, ...], value: Any) -> str:
        if value is None:
            return "nothing"
        found = _plain(tuple(value))
        names = schemas[self._version].names
        by, n = found[names.index("by")], found[names.index("n")]
        right = _expected(schemas, self._version, by, n)
        return f"{by} {n}" if found == right else f"{WRONG}version {self._version} shows {found}, and not {right}"
