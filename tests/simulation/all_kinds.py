"""A processor with states of every kind and values of every type, larger than what one look-up may bring."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DoubleType, LongType, MapType, StructField, StructType, VariantVal
from pyspark.sql.types import _parse_datatype_json_value as data_type

_NAMES = (
    "byte short integer long float double boolean binary string date timestamp timestamp_ntz void variant "
    "decimal(9,2) decimal(30,3)"
)
_TYPES = StructType(
    [
        *(StructField(f"c{at}", data_type(name)) for at, name in enumerate(_NAMES.split())),
        StructField("interval", data_type("interval day to second")),
        StructField("months", data_type("interval year to month")),
        StructField("vector", VectorUDT()),
    ]
)
_LONG = StructType([StructField("n", LongType())])
_SLOT = StructType([*_TYPES.fields[4:9], StructField("by", MapType(DoubleType(), LongType()))])
_MOMENT = datetime(2026, 1, 1)


def _of_each_type(n: int) -> tuple[Any, ...]:
    moment = None if n % 5 == 4 else _MOMENT + timedelta(seconds=n)
    whole = (n % 100, n % 1000, n, n << 33)
    parts = (n / 4, n / 3, n % 2 == 0, b"%d" % n, f"{n}", date(2026, 1, 1), moment, moment, None)
    variant = VariantVal(bytes([12, n % 100]), bytes([1, 0, 0]))
    numbers = (Decimal(n) / 4, Decimal(n) * 10**15)
    return (*whole, *parts, variant, *numbers, timedelta(minutes=n), n % 12, DenseVector([n, n / 2]))


class _Sum:
    """An aggregate function: a sum and a count, and their mean."""

    def create_accumulator(self) -> tuple[int, ...]:
        return (0,)

    def add(self, value: int, accumulator: tuple[int, ...]) -> tuple[int, ...]:
        return (accumulator[0] + value,)

    def get_result(self, accumulator: tuple[int, ...]) -> str:
        return f"sum {accumulator[0]}"


class AllKinds(StatefulProcessor):  # type: ignore[misc]
    """Writes a state of each kind for each row, and shows all that it reads."""

    def init(self, handle: Any) -> None:
        """Declare a state of each kind, and delete one that an earlier program may have had."""
        handle.getValueState("before", _LONG)
        handle.deleteIfExists("before")
        self._types = handle.getValueState("types", _TYPES)
        self._most = handle.getReducingState("most", _LONG, max)
        self._sum = handle.getAggregatingState("sum", _LONG, _Sum())
        self._seen = handle.getListState("seen", _LONG)
        self._slots = handle.getMapState("slots", _SLOT, _LONG)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        """Show the key's states, and change them."""
        before = self._types.get()
        seen = [n for (n,) in self._seen.get()] if self._seen.exists() else None
        slots = [n for _, (n,) in self._slots.iterator()] if self._slots.exists() else None
        for row in rows:
            n = row.operation
            value = _of_each_type(n)
            self._types.update(value)
            self._most.add((n,))
            self._sum.add(n)
            self._seen.appendList([(n,), (-n,)])
            slot = (*_of_each_type(n % 5)[4:9], {0.5: n % 5, -0.0: None})
            if n % 7 == 6:
                self._slots.removeKey(slot)
            elif not self._slots.containsKey(slot):
                self._slots.updateValue(slot, (n,))
        yield Row(key=key[0], what=f"{before} {seen} {slots} {self._most.get()} {self._sum.get()}")
