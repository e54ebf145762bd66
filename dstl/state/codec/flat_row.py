"""Flat rows: the bytes of state values and of keys with several columns, alike for ``struct``, numpy and Arrow.

::

    null bitmap   ceil(fields / 8) bytes; bit i % 8 of byte i // 8 is set where field i is null
    slots         one per field, little-endian, unpadded: its number; or, where the field has no fixed width, u32: the
                  end of its bytes, counted from the end of the slots
    bytes         of the fields without a fixed width, in their order: UTF-8, binary as it is, msgpack of an array, map,
                  struct or variant

The slot of a null is 0; one that would be an end repeats the end before. So equal rows have equal bytes. The layout
follows from the types alone. ``flat_columns`` reads and writes whole columns of such rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
    YearMonthIntervalType,
)

from dstl.state.codec.field_codec import TEXT, is_small_decimal

END_FORMAT = "I"
"""The format of the slot of a field without a fixed width, in ``struct`` and numpy."""

Converter = Callable[[Any], Any]

MAX_PLANS = 256  # rows of one state have few patterns of nulls and Python types; a hostile one may have any

_FORMATS: dict[type[DataType], str] = {
    BooleanType: "?",
    ByteType: "b",
    ShortType: "h",
    IntegerType: "i",
    LongType: "q",
    FloatType: "f",
    DoubleType: "d",
    DateType: "i",
    TimestampType: "q",
    TimestampNTZType: "q",
    DayTimeIntervalType: "q",
    YearMonthIntervalType: "i",
}

unpack_nested: Callable[[bytes], Any] = msgpack.unpackb
"""Returns the wire value of an array, map, struct or variant, which holds no msgpack map."""


def slot_format(data_type: DataType) -> str:
    """Return how ``struct`` calls the slot of a type: its number, or :data:`END_FORMAT`."""
    if isinstance(data_type, UserDefinedType):
        return slot_format(data_type.sqlType())
    if isinstance(data_type, DecimalType):
        return "q" if is_small_decimal(data_type) else "16s"
    # The oldest supported PySpark lacks times: known by name.
    return "q" if type(data_type).__name__ == "TimeType" else _FORMATS.get(type(data_type), END_FORMAT)


class FlatRow:
    """Lays out the rows of some types.

    Rows are sequences of wire values (``dstl.state.codec.field_codec``), None for a null.

    Args:
        types: One per field.

    Attributes:
        blank: The null bitmap of a row without nulls.
        slots: The slots, as ``struct`` calls them.
        zeros: What the slot of a null holds, for each field.
        bodies: Of each field without a fixed width: its position, its wire value to bytes, and back.
    """

    def __init__(self, types: Sequence[DataType]) -> None:
        formats = list(map(slot_format, types))
        self.blank = bytes(-(-len(types) // 8))
        self.slots = "".join(formats)
        self.zeros: list[Any] = [{"?": False, "16s": b""}.get(code, 0) for code in formats]
        self.bodies = [
            (i, *_body(t)) for i, (t, code) in enumerate(zip(types, formats, strict=True)) if code == END_FORMAT
        ]

    def bitmap(self, nulls: Sequence[bool]) -> bytes:
        """Return the null bitmap of a row: for each field, whether it is null."""
        return sum(1 << i for i, null in enumerate(nulls) if null).to_bytes(len(self.blank), "little")

    def writer(self, prefix: bytes) -> Callable[[Sequence[Any]], bytes]:
        """Return a function that makes ``prefix`` and a row of wire values.

        It raises ``struct.error``, OverflowError, TypeError or ValueError for what is not a wire value.
        """
        pack = struct.Struct(f"<{len(prefix) + len(self.blank)}s{self.slots}").pack
        blank, zeros, bodies, bitmap = prefix + self.blank, self.zeros, self.bodies, self.bitmap

        def write(wire: Sequence[Any]) -> bytes:
            slots, lead = list(wire), blank
            if None in slots:
                nulls = [one is None for one in slots]
                lead = prefix + bitmap(nulls)
                slots = [zero if one is None else one for one, zero in zip(slots, zeros, strict=True)]
            end, parts = 0, [b""]
            for i, to_bytes, _ in bodies:
                if wire[i] is not None:
                    parts.append(to_bytes(wire[i]))
                    end += len(parts[-1])
                slots[i] = end
            parts[0] = pack(lead, *slots)
            return b"".join(parts)

        return write

    def reader(self, offset: int, converters: Sequence[Converter | None] = ()) -> Callable[[bytes], tuple[Any, ...]]:
        """Return a function that reads a row that begins at ``offset``.

        It raises ValueError, ``struct.error`` and other exceptions for bytes that are no such row.

        Args:
            offset: Bytes in front of the row.
            converters: For each field, what is done to a wire value that is not null; empty: nothing to any.
        """
        shape = struct.Struct(f"<{offset}x{len(self.blank)}s{self.slots}")
        size, unpack, blank = shape.size, shape.unpack_from, self.blank
        converters = converters or [None] * len(self.zeros)
        plans: dict[bytes, _ReadPlan] = {}

        def plan_for(nulls: bytes) -> _ReadPlan:
            bits = int.from_bytes(nulls, "little")
            is_null = [bool(bits >> i & 1) for i in range(len(self.zeros))]
            bodies = {
                i: _nothing if is_null[i] else _compose(from_bytes, converters[i]) for i, _, from_bytes in self.bodies
            }
            conversions = [
                (i, each) for i, each in enumerate(converters) if each and not is_null[i] and i not in bodies
            ]
            plan = tuple(bodies.items()), tuple(conversions), tuple(i for i, null in enumerate(is_null) if null)
            if len(plans) < MAX_PLANS:
                plans[nulls] = plan
            return plan

        def read(data: bytes) -> tuple[Any, ...]:
            nulls, *values = unpack(data)
            bodies, conversions, missing = plans.get(nulls) or plan_for(nulls)
            start = size
            for i, from_bytes in bodies:
                end = size + values[i]
                if end < start:
                    raise ValueError("a field ends before it begins")
                values[i] = from_bytes(data[start:end])
                start = end
            if start != len(data):
                raise ValueError("a row is longer or shorter than its fields")
            for i, convert in conversions:
                values[i] = convert(values[i])
            for i in missing:
                values[i] = None
            return tuple(values)

        def read_numbers(data: bytes) -> tuple[Any, ...]:
            values = unpack(data)
            return values[1:] if values[0] == blank and len(data) == size else read(data)

        def read_one_body(data: bytes) -> tuple[Any, ...]:
            values = unpack(data)
            if values[0] != blank or size + values[place] != len(data):
                return read(data)
            return (*values[1:place], from_bytes(data[size:]), *values[place + 1 :])

        # What most states are, a little faster.
        bodies, conversions, _ = plan_for(blank)
        if conversions or len(bodies) > 1:
            return read
        if not bodies:
            return read_numbers
        place, from_bytes = bodies[0][0] + 1, bodies[0][1]
        return read_one_body


_ReadPlan = tuple[tuple[tuple[int, Converter], ...], tuple[tuple[int, Converter], ...], tuple[int, ...]]
"""Of the rows with certain nulls: how fields are made of their bytes, what is done to others, and which are null."""


def _compose(from_bytes: Converter, convert: Converter | None) -> Converter:
    return from_bytes if convert is None else lambda data: convert(from_bytes(data))


def _nothing(data: bytes) -> None:
    return None


def _binary(wire: Any) -> bytes:
    if type(wire) is not bytes:
        raise TypeError(f"{type(wire).__name__} is not bytes")
    return wire


def _body(data_type: DataType) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return how a wire value of a type without a fixed width becomes bytes, and back."""
    if isinstance(data_type, UserDefinedType):
        return _body(data_type.sqlType())
    if isinstance(data_type, TEXT):
        return str.encode, bytes.decode
    if isinstance(data_type, BinaryType):
        return _binary, bytes
    return msgpack.Packer(use_bin_type=True, buf_size=4096).pack, unpack_nested
