"""State values as bytes: packed rows where the schema is of fixed width, msgpack otherwise.

::

    u8      schema version, 1..127; bit 7 set when a write time follows
    [i64    write time, milliseconds since 1970]
    body    fixed width: null bitmap (1, 2, 4 or 8 bytes, bit i = field i), then the fields; little-endian, unpadded
            otherwise: one msgpack array of the fields' wire values (dstl.state.codec.field_codec)

Which body it is follows from the schema alone, so a reader needs the schema and nothing else. Nothing is ever pickled.
An older schema version is read with that version's schema and then made into the newest one (``schema_evolution``);
nothing is rewritten but what the processor writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import CorruptData, Invalid, clipped
from dstl.state.codec.field_codec import INT_BOUNDS, FieldCodec, field_codec, values_by_name
from dstl.state.codec.schema_evolution import reading

__all__ = [
    "FIXED_FORMATS",
    "HAS_WRITE_TIME",
    "MAX_SCHEMA_VERSIONS",
    "WRITE_TIME",
    "ValueCodec",
    "is_fixed_width",
    "null_bitmap",
]

HAS_WRITE_TIME = 0x80
"""Bit of a value's first byte: eight bytes of write time follow."""

WRITE_TIME = struct.Struct("<q")
MAX_SCHEMA_VERSIONS = 127

FIXED_FORMATS: dict[type[DataType], str] = {
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
"""How ``struct`` (and numpy) calls the fields of a packed row."""

_BITMAPS = ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], tuple[Any, ...]]


def is_fixed_width(schema: StructType) -> bool:
    """Return True where values of this schema are packed rows of one length."""
    return 0 < len(schema.fields) <= 64 and all(type(f.dataType) in FIXED_FORMATS for f in schema.fields)


def null_bitmap(fields: int) -> str:
    """Return the format of the null bitmap of a packed row with so many fields."""
    return next(code for bits, code in _BITMAPS if fields <= bits)


class ValueCodec:
    """Turns tuples into bytes and back for one state.

    Args:
        name: The state's name, for messages.
        schemas: Every schema that the state has had, oldest first; the last one is written.
        write_time_ms: Put this write time into every value (states with a time to live); None for none.
        max_bytes: No value is longer.

    Attributes:
        encode: Tuple (or list, ``Row``, dict by name, or of one column a bare string) to bytes. Raises Invalid naming
            the state and the field.
        decode: Bytes to tuple. Raises CorruptData when the bytes are not a value of any of the schemas.
    """

    __slots__ = ("_decoders", "_name", "_newest", "_schemas", "decode", "encode", "schema")

    def __init__(
        self,
        name: str,
        schemas: Sequence[StructType],
        *,
        write_time_ms: int | None = None,
        max_bytes: int = MAX_CHANGE_BYTES,
    ) -> None:
        if not 0 < len(schemas) <= MAX_SCHEMA_VERSIONS:
            raise Invalid(f"state {name!r} has {len(schemas)} schema versions; 1 to {MAX_SCHEMA_VERSIONS} are possible")
        self._name = name
        self.schema = schemas[-1]
        version, body = len(schemas), _body(name, schemas[-1])
        timed = HAS_WRITE_TIME if write_time_ms is not None else 0
        prefix = bytes([version | timed])
        if write_time_ms is not None:
            prefix += WRITE_TIME.pack(write_time_ms)
        self.encode: Encode = body.encoder(prefix, max_bytes)
        self._schemas = tuple(schemas)
        self._newest = body
        self._decoders: list[Decode] = [self._first] * 256
        for flag, offset in ((0, 1), (HAS_WRITE_TIME, 1 + WRITE_TIME.size)):
            self._decoders[version | flag] = body.decoder(offset)
        self.decode: Decode = self._decode

    def _decode(self, data: bytes) -> tuple[Any, ...]:
        try:
            return self._decoders[data[0]](data)
        except Exception as error:
            found = data[0] & ~HAS_WRITE_TIME if data else None
            raise CorruptData(
                f"a value of state {self._name!r} ({len(data)} bytes, schema version {found}) cannot be decoded: "
                f"{clipped(error)}; was it written by a newer version of the processor?"
            ) from error

    def _first(self, data: bytes) -> tuple[Any, ...]:
        """Decode the first value of an older version; its later ones need not come here."""
        kind = data[0]
        version = kind & ~HAS_WRITE_TIME
        if not 0 < version < len(self._schemas):
            raise ValueError("no such schema version")
        wire = _body(self._name, self._schemas[version - 1]).wire_reader(
            1 + (WRITE_TIME.size if kind & HAS_WRITE_TIME else 0)
        )
        convert, decoded = reading(self._schemas[version - 1 :]), self._newest.decoded
        if convert is None:
            self._decoders[kind] = lambda value: decoded(wire(value))
        else:
            self._decoders[kind] = lambda value: decoded(convert(wire(value)))
        return self._decoders[kind](data)


def _body(name: str, schema: StructType) -> _FixedBody | _PackedBody:
    return _FixedBody(name, schema) if is_fixed_width(schema) else _PackedBody(name, schema)


class _Fields:
    """The slow and exact way for one schema: every field checked and converted, errors that name it."""

    def __init__(self, name: str, schema: StructType) -> None:
        self.name = name
        self.schema = schema
        self.codecs: list[FieldCodec] = [field_codec(f.dataType) for f in schema.fields]
        self.decoders = [(i, c.decode) for i, c in enumerate(self.codecs) if c.decode is not None]

    def to_wire(self, value: Any) -> list[Any]:
        fields = self.schema.fields
        if isinstance(value, dict):
            try:
                value = values_by_name(value, self.schema.names)
            except ValueError as error:
                raise Invalid(f"state {self.name!r}: {error}") from None
        elif isinstance(value, str) and len(fields) == 1:
            value = (value,)
        if not isinstance(value, (tuple, list)):
            raise Invalid(
                f"state {self.name!r} takes a tuple of {len(fields)} values ({self.schema.simpleString()}), "
                f"not {type(value).__name__}"
            )
        if len(value) != len(fields):
            raise Invalid(
                f"state {self.name!r} takes {len(fields)} values ({self.schema.simpleString()}), not {len(value)}"
            )
        wire: list[Any] = []
        for one, codec, field in zip(value, self.codecs, fields, strict=True):
            try:
                encoded = None if one is None else codec.encode(one)
            except (TypeError, ValueError, OverflowError, AssertionError) as error:
                raise Invalid(f"field {field.name!r} of state {self.name!r}: {clipped(error)}") from error
            if encoded is None and not field.nullable:
                raise Invalid(f"field {field.name!r} of state {self.name!r} is declared NOT NULL and got None")
            wire.append(encoded)
        return wire

    def decoded(self, values: list[Any]) -> tuple[Any, ...]:
        for i, decode in self.decoders:
            if values[i] is not None:
                values[i] = decode(values[i])
        return tuple(values)


class _FixedBody(_Fields):
    def __init__(self, name: str, schema: StructType) -> None:
        super().__init__(name, schema)
        types = [type(f.dataType) for f in schema.fields]
        self._row = null_bitmap(len(types)) + "".join(FIXED_FORMATS[t] for t in types)
        self._defaults = [False if t is BooleanType else 0 for t in types]
        # struct takes any object for a boolean: those schemas are checked field by field.
        self._direct = not self.decoders and BooleanType not in types

    def encoder(self, prefix: bytes, max_bytes: int) -> Encode:
        pack = struct.Struct(f"<{len(prefix)}s{self._row}").pack
        direct, to_wire, defaults = self._direct, self.to_wire, self._defaults

        def encode_checked(value: Any) -> bytes:
            wire = to_wire(value)
            nulls = 0
            for i, one in enumerate(wire):
                if one is None:
                    nulls |= 1 << i
                    wire[i] = defaults[i]
            return pack(prefix, nulls, *wire)

        def encode(value: Any) -> bytes:
            if isinstance(value, (tuple, list)):
                try:
                    return pack(prefix, 0, *value)
                except (struct.error, TypeError, OverflowError):
                    pass  # a null, or an error that has to be named
            return encode_checked(value)

        return encode if direct else encode_checked

    def decoder(self, offset: int) -> Decode:
        unpack = struct.Struct(f"<{offset}x{self._row}").unpack
        width, decoders, decoded = len(self.codecs), self.decoders, self.decoded

        def decode(data: bytes) -> tuple[Any, ...]:
            values = unpack(data)
            nulls = values[0]
            if not nulls and not decoders:
                return values[1:]
            rest = list(values[1:])
            for i in range(width):
                if nulls >> i & 1:
                    rest[i] = None
            return decoded(rest)

        return decode

    def wire_reader(self, offset: int) -> Callable[[bytes], list[Any]]:
        unpack = struct.Struct(f"<{offset}x{self._row}").unpack

        def read(data: bytes) -> list[Any]:
            nulls, *values = unpack(data)
            if nulls:
                values = [None if nulls >> i & 1 else one for i, one in enumerate(values)]
            return values

        return read


_Plan = tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, Callable[[Any], Any]], ...]]


class _PackedBody(_Fields):
    def __init__(self, name: str, schema: StructType) -> None:
        super().__init__(name, schema)
        # What still has to be done for a value whose fields have exactly these Python types: ranges of integers to
        # check and fields to convert. Few combinations occur, so one look-up replaces checking every field.
        self._plans: dict[tuple[type, ...], _Plan] = {}

    def encoder(self, prefix: bytes, max_bytes: int) -> Encode:
        pack = msgpack.Packer(use_bin_type=True, buf_size=4096).pack
        plans, to_wire, plan_for, name = self._plans, self.to_wire, self._plan_for, self.name

        def encode(value: Any) -> bytes:
            if isinstance(value, (tuple, list)):
                types = tuple(map(type, value))
                plan = plans.get(types)
                if plan is None:
                    wire: Any = to_wire(value)
                    plan_for(types)
                else:
                    ranges, conversions = plan
                    for i, low, high in ranges:
                        if not low <= value[i] <= high:
                            to_wire(value)
                    wire = value
                    if conversions:
                        wire = list(value)
                        try:
                            for i, convert in conversions:
                                wire[i] = convert(wire[i])
                        except (TypeError, ValueError, OverflowError, AssertionError):
                            wire = to_wire(value)
            else:
                wire = to_wire(value)
            data: bytes = prefix + pack(wire)
            if len(data) > max_bytes:
                raise Invalid(
                    f"a value of state {name!r} has {len(data)} bytes, above the limit of {max_bytes}: split it over a "
                    "map or list state"
                )
            return data

        return encode

    def _plan_for(self, types: tuple[type, ...]) -> None:
        # Only called for a value that to_wire has accepted, so arity and nullability are known to be right.
        if len(self._plans) >= 256:
            return
        ranges: list[tuple[int, int, int]] = []
        conversions: list[tuple[int, Callable[[Any], Any]]] = []
        for i, (kind, codec, field) in enumerate(zip(types, self.codecs, self.schema.fields, strict=True)):
            if kind is type(None):
                continue
            if codec.native is not kind:
                if not field.nullable:
                    return  # a conversion may yield None (a decimal NaN): leave it to the exact way
                conversions.append((i, codec.encode))
            elif kind is int:
                ranges.append((i, *INT_BOUNDS[type(field.dataType)]))
        self._plans[types] = (tuple(ranges), tuple(conversions))

    def decoder(self, offset: int) -> Decode:
        unpackb, decoders, decoded, width = msgpack.unpackb, self.decoders, self.decoded, len(self.codecs)
        flat = not decoders and all(c.native is not None or c.decode is None for c in self.codecs)
        nested = any(not _is_atomic(f.dataType) for f in self.schema.fields)

        def decode_flat(data: bytes) -> tuple[Any, ...]:
            values: tuple[Any, ...] = unpackb(data[offset:], use_list=False)
            if len(values) != width:
                raise ValueError(f"{len(values)} fields instead of {width}")
            return values

        def decode(data: bytes) -> tuple[Any, ...]:
            values = unpackb(data[offset:], use_list=True, strict_map_key=False)
            if len(values) != width:
                raise ValueError(f"{len(values)} fields instead of {width}")
            return decoded(values)

        return decode_flat if flat and not nested else decode

    def wire_reader(self, offset: int) -> Callable[[bytes], list[Any]]:
        unpackb, width = msgpack.unpackb, len(self.codecs)

        def read(data: bytes) -> list[Any]:
            values: list[Any] = unpackb(data[offset:], use_list=True, strict_map_key=False)
            if len(values) != width:
                raise ValueError(f"{len(values)} fields instead of {width}")
            return values

        return read


def _is_atomic(data_type: DataType) -> bool:
    return (
        not hasattr(data_type, "elementType") and not hasattr(data_type, "keyType") and not hasattr(data_type, "fields")
    )
