"""Fields of state values and keys between Python and the wire, for every Spark SQL type.

A Python value is one that PySpark's state API returns: naive local ``datetime`` for timestamps, ``Row`` for structs,
``dict`` for maps, ``list`` for arrays, ``bytes`` for binary. A wire value is an integer, float, ``str``, ``bytes``,
list or None. A timestamp is microseconds since 1970 in UTC, a date is days, a decimal of up to 18 digits is its
unscaled integer and a larger one the 16 bytes of that (two's complement, little-endian, as in Arrow), an interval is
microseconds or months, a map is a list of pairs in its order.
"""

from __future__ import annotations

import datetime
import decimal
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
    VarcharType,
    YearMonthIntervalType,
)

from dstl.errors import Invalid, brief

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


Convert = Callable[[Any], Any]

INT_BOUNDS: dict[type[DataType], tuple[int, int]] = {
    ByteType: (-(1 << 7), (1 << 7) - 1),
    ShortType: (-(1 << 15), (1 << 15) - 1),
    IntegerType: (-(1 << 31), (1 << 31) - 1),
    LongType: (-(1 << 63), (1 << 63) - 1),
}
"""Smallest and largest value of each integer type, both included."""

_EPOCH = datetime.datetime(1970, 1, 1)
_EPOCH_UTC = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_EPOCH_ORDINAL = _EPOCH.toordinal()
_MICROSECOND = datetime.timedelta(microseconds=1)
_DECIMAL_CONTEXT = decimal.Context(prec=76, rounding=decimal.ROUND_HALF_UP)
_FLOAT = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """The conversions of one type.

    Attributes:
        native: The exact Python type whose values a flat row takes as they are, or refuses where one does not fit;
            None where every value is converted.
        encode: Python value, not None, to wire value. Raises TypeError or ValueError for a value of another type.
        decode: Wire value, not None, to Python value; None where the wire value is already the Python value.
    """

    native: type | None
    encode: Convert
    decode: Convert | None


def plain(value: Any) -> Any:
    """Return a Python value for a numpy or pandas scalar; anything else is returned as it is.

    Raises:
        TypeError: It is the null of pandas' times, which would count as a datetime.
    """
    if isinstance(value, datetime.datetime):
        to_pydatetime = getattr(value, "to_pydatetime", None)
        if to_pydatetime is None:
            return value
        if value != value:
            raise TypeError("NaT is pandas' null and no value: write None instead")
        return to_pydatetime()
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:
        return item()
    to_pytimedelta = getattr(value, "to_pytimedelta", None)
    return value if to_pytimedelta is None else to_pytimedelta()


def bound_row(names: list[str]) -> Callable[[Any], Row]:
    """Return a function that makes a ``Row`` with these field names out of a sequence of values."""

    def make(values: Any) -> Row:
        row = Row(*values)
        row.__fields__ = names
        return row

    return make


def values_by_name(value: dict[Any, Any], names: Sequence[str]) -> list[Any]:
    """Return a dict's values in the order of a schema's fields; what it does not have is None.

    Raises:
        ValueError: It has a key that is no field, which would be lost without a word; names it.
    """
    if len(value) > len(names) or not all(key in names for key in value):
        unknown = next(key for key in value if key not in names)
        raise ValueError(f"there is no field {str(unknown)[:80]!r}; there are {', '.join(names)}")
    return [value.get(name) for name in names]


def field_codec(data_type: DataType) -> FieldCodec:
    """Return the codec of a type.

    Raises:
        Invalid: A type that has no stored form (a calendar interval, say).
    """
    made = _SCALARS.get(type(data_type))
    if made is not None:
        return made
    if isinstance(data_type, TEXT):
        return FieldCodec(str, _text, None)
    if isinstance(data_type, DecimalType):
        return _decimal(data_type)
    if isinstance(data_type, ArrayType):
        return _array(data_type)
    if isinstance(data_type, MapType):
        return _map(data_type)
    if isinstance(data_type, StructType):
        return _struct(data_type)
    if isinstance(data_type, UserDefinedType):
        return _user_defined(data_type)
    return _by_name(data_type)


def _nullable(convert: Convert, nullable: bool, what: str) -> Convert:
    def checked(value: Any) -> Any:
        if value is None:
            if not nullable:
                raise ValueError(f"null in {what}, which is declared without nulls")
            return None
        return convert(value)

    return checked


def _pass_nulls(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: None if value is None else convert(value)


def _integer(kind: type[DataType]) -> FieldCodec:
    low, high = INT_BOUNDS[kind]

    def encode(value: Any) -> int:
        value = plain(value)
        if not isinstance(value, int):
            raise TypeError(f"{brief(value)} ({type(value).__name__}) is not an integer")
        if not low <= value <= high:
            raise ValueError(f"{brief(value)} is outside [{low}, {high}]")
        return int(value)

    return FieldCodec(int, encode, None)


def _float(value: Any) -> float:
    value = plain(value)
    if not isinstance(value, (float, int)):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a number")
    return float(value)


def _float32(value: Any) -> float:
    try:
        rounded: float = _FLOAT.unpack(_FLOAT.pack(_float(value)))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return rounded


def _boolean(value: Any) -> bool:
    value = plain(value)
    if value is not True and value is not False:
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a boolean")
    return bool(value)


def _text(value: Any) -> str:
    value = plain(value)
    if not isinstance(value, str):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a string")
    return str(value)


def _binary(value: Any) -> bytes:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{type(value).__name__} is not bytes")
    return bytes(value)


def _null(value: Any) -> None:
    raise TypeError(f"{brief(value)} in a void column: only None fits")


def _date(value: Any) -> int:
    value = plain(value)
    if not isinstance(value, datetime.date):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a date")
    return value.toordinal() - _EPOCH_ORDINAL


def _to_date(days: int) -> datetime.date:
    return datetime.date.fromordinal(days + _EPOCH_ORDINAL)


def _timestamp(value: Any) -> int:
    value = plain(value)
    if not isinstance(value, datetime.datetime):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a datetime")
    # A naive datetime is local time, as it is for PySpark.
    aware = value.astimezone(datetime.UTC) if value.tzinfo is None else value
    return (aware - _EPOCH_UTC) // _MICROSECOND


def _to_timestamp(micros: int) -> datetime.datetime:
    seconds, rest = divmod(micros, 1_000_000)
    return datetime.datetime.fromtimestamp(seconds).replace(microsecond=rest)


def _timestamp_ntz(value: Any) -> int:
    value = plain(value)
    if not isinstance(value, datetime.datetime):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a datetime")
    if value.tzinfo is not None:
        raise ValueError(f"{brief(value)} has a time zone; a timestamp_ntz has none")
    return (value - _EPOCH) // _MICROSECOND


def _to_timestamp_ntz(micros: int) -> datetime.datetime:
    return _EPOCH + datetime.timedelta(microseconds=micros)


def _day_time(value: Any) -> int:
    value = plain(value)
    if not isinstance(value, datetime.timedelta):
        raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a timedelta")
    return value // _MICROSECOND


def _to_day_time(micros: int) -> datetime.timedelta:
    return datetime.timedelta(microseconds=micros)


_SCALARS: dict[type[DataType], FieldCodec] = {
    **{kind: _integer(kind) for kind in INT_BOUNDS},
    DoubleType: FieldCodec(float, _float, None),
    FloatType: FieldCodec(float, _float32, None),
    BooleanType: FieldCodec(bool, _boolean, None),
    BinaryType: FieldCodec(bytes, _binary, None),
    NullType: FieldCodec(None, _null, None),
    DateType: FieldCodec(None, _date, _to_date),
    TimestampType: FieldCodec(None, _timestamp, _to_timestamp),
    TimestampNTZType: FieldCodec(None, _timestamp_ntz, _to_timestamp_ntz),
    DayTimeIntervalType: FieldCodec(None, _day_time, _to_day_time),
    YearMonthIntervalType: FieldCodec(None, _integer(IntegerType).encode, None),
}


def _decimal(data_type: DecimalType) -> FieldCodec:
    scale, bound, is_small = data_type.scale, 10**data_type.precision, is_small_decimal(data_type)

    def encode(value: Any) -> int | bytes | None:
        value = plain(value)
        if isinstance(value, int) and not isinstance(value, bool):
            value = decimal.Decimal(value)
        if not isinstance(value, decimal.Decimal):
            raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a Decimal")
        if value.is_nan():
            return None
        unscaled = int(value.scaleb(scale, _DECIMAL_CONTEXT).to_integral_value(decimal.ROUND_HALF_UP))
        if not -bound < unscaled < bound:
            raise ValueError(f"{brief(value)} does not fit {data_type.simpleString()}")
        return unscaled if is_small else unscaled.to_bytes(16, "little", signed=True)

    def decode(wire: int | bytes) -> decimal.Decimal:
        unscaled = int.from_bytes(wire, "little", signed=True) if isinstance(wire, bytes) else wire
        return decimal.Decimal(unscaled).scaleb(-scale, _DECIMAL_CONTEXT)

    return FieldCodec(None, encode, decode)


def _array(data_type: ArrayType) -> FieldCodec:
    element = field_codec(data_type.elementType)
    encode_one = _nullable(element.encode, data_type.containsNull, "an array")
    decode_one = _pass_nulls(element.decode)

    def encode(value: Any) -> list[Any]:
        if isinstance(value, (str, bytes, dict)) or not hasattr(value, "__iter__"):
            raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a list")
        return [encode_one(one) for one in value]

    if decode_one is None:
        return FieldCodec(None, encode, None)
    return FieldCodec(None, encode, lambda wire: [decode_one(one) for one in wire])


def _map(data_type: MapType) -> FieldCodec:
    key, value = field_codec(data_type.keyType), field_codec(data_type.valueType)
    encode_value = _nullable(value.encode, data_type.valueContainsNull, "a map's values")
    decode_key, decode_value = _pass_nulls(key.decode), _pass_nulls(value.decode)

    def encode(given: Any) -> list[Any]:
        # A list of pairs is what an input row holds for a map.
        pairs = given.items() if isinstance(given, dict) else dict(given).items()
        return [[key.encode(k), encode_value(v)] for k, v in pairs]

    def decode(wire: list[Any]) -> dict[Any, Any]:
        return {(decode_key(k) if decode_key else k): (decode_value(v) if decode_value else v) for k, v in wire}

    return FieldCodec(None, encode, decode)


def _struct(data_type: StructType) -> FieldCodec:
    names = list(data_type.names)
    codecs = [field_codec(field.dataType) for field in data_type.fields]
    encoders = [_nullable(c.encode, f.nullable, f.name) for c, f in zip(codecs, data_type.fields, strict=True)]
    decoders = [_pass_nulls(c.decode) for c in codecs]
    make = bound_row(names)

    def encode(value: Any) -> list[Any]:
        if isinstance(value, dict):
            value = values_by_name(value, names)
        elif not isinstance(value, (tuple, list)):
            held = getattr(value, "__dict__", None)
            if held is None:
                raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a struct")
            value = [held.get(name) for name in names]
        if len(value) != len(names):
            raise ValueError(f"{len(value)} values for the {len(names)} fields of {data_type.simpleString()}")
        return [encoder(one) for encoder, one in zip(encoders, value, strict=True)]

    def decode(wire: list[Any]) -> Row:
        return make([d(one) if d else one for d, one in zip(decoders, wire, strict=True)])

    return FieldCodec(None, encode, decode)


def _user_defined(data_type: UserDefinedType) -> FieldCodec:
    inner = field_codec(data_type.sqlType())

    def decode(wire: Any) -> Any:
        return data_type.deserialize(inner.decode(wire) if inner.decode else wire)

    return FieldCodec(None, lambda value: inner.encode(data_type.serialize(value)), decode)


def _by_name(data_type: DataType) -> FieldCodec:
    # Types that the oldest supported PySpark lacks are known by name.
    kind = type(data_type).__name__
    if kind == "TimeType":

        def encode_time(value: Any) -> int:
            if not isinstance(value, datetime.time):
                raise TypeError(f"{brief(value)} ({type(value).__name__}) is not a time")
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond

        return FieldCodec(None, encode_time, lambda micros: (_EPOCH + micros * _MICROSECOND).time())
    if kind == "VariantType":
        from pyspark.sql.types import VariantVal

        def encode_variant(value: Any) -> list[bytes]:
            # A dict of the two is what an input row holds for a variant.
            if isinstance(value, dict) and value.keys() == {"value", "metadata"}:
                value = VariantVal(**value)
            if not isinstance(value, VariantVal):
                raise TypeError(f"{type(value).__name__} is not a VariantVal")
            return [bytes(value.value), bytes(value.metadata)]

        return FieldCodec(None, encode_variant, lambda wire: VariantVal(wire[0], wire[1]))
    raise Invalid(f"the type {data_type.simpleString()} cannot be kept in state: use a type that Spark can store")
