"""Grouping keys and user keys as bytes: equal keys have equal bytes, other keys of the schema have others.

::

    no column               b""
    one string column       its UTF-8; null is b"\\xff", which no UTF-8 holds
    one column of integers, dates, timestamps, booleans
                            i64, little-endian; null is b""
    anything else           a flat row (dstl.state.codec.flat_row)

As in Spark's grouping, -0.0 equals 0.0 and every NaN equals every other; the entries of a map are sorted.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructType,
)

from dstl.column_buffers import (
    array_of,
    empty_values,
    filled,
    fixed_width_of,
    from_int64,
    lengths_of,
    numpy_of,
    rows_of,
    to_int64,
)
from dstl.errors import CorruptData, Invalid, clip
from dstl.rpc.messages import ExpiryPlace
from dstl.state.codec.field_codec import FLOATS, TEXT, WHOLE, FieldCodec, field_codec
from dstl.state.codec.flat_columns import FlatColumns
from dstl.state.codec.row_codec import RowCodec
from dstl.state.frames.row_writer import arrow_schema

_NULL_TEXT = b"\xff"
_I64 = struct.Struct("<q")
_NAN = struct.unpack(">d", b"\x7f\xf8\0\0\0\0\0\0")[0]
_WHOLE = (BooleanType, *WHOLE)

Convert = Callable[[Any], Any]


class KeyCodec:
    """Turns the tuples of one key schema into bytes and back.

    Args:
        schema: The key's columns, in their order.
        what: What the key is of, for messages.

    Raises:
        Invalid: A column's type cannot be a key (a collated string, whose equality is not that of its bytes).
    """

    def __init__(self, schema: StructType, what: str = "the grouping key") -> None:
        self.schema = schema
        self.what = what
        self.names = list(schema.names)
        types = [f.dataType for f in schema.fields]
        for field in schema.fields:
            refuse_unequal(field.dataType, f"column {field.name!r} of {what}")
        codecs = list(map(_key_field, types))
        self._rows = RowCodec(schema, what, codecs)
        self._encode, self._decode = self._rows.encoder(), self._rows.decoder()
        self._columns = FlatColumns(types, [codec.encode for codec in codecs])
        self._kind = "row"
        if not types:
            self._kind = "empty"
        elif len(types) == 1 and isinstance(types[0], TEXT):
            self._kind = "text"
        elif len(types) == 1 and isinstance(types[0], _WHOLE):
            self._kind = "whole"

    def encode(self, key: Any) -> bytes:
        """Return the bytes of one key: a tuple, list or ``Row``, a dict by name, or of one column a bare string.

        Raises:
            Invalid: Not a key of the schema; names the column.
        """
        if self._kind == "row":
            return self._encode(key)
        wire = self._rows.to_wire(key)
        if self._kind == "empty":
            return b""
        if self._kind == "whole":
            return b"" if wire[0] is None else _I64.pack(wire[0])
        try:
            return _NULL_TEXT if wire[0] is None else wire[0].encode()
        except UnicodeEncodeError as error:
            raise Invalid(f"{self.what} has a string that is not one of Unicode: {clip(error)}") from error

    def decode(self, data: bytes) -> tuple[Any, ...]:
        """Return the key that :meth:`encode` was given, with the Python types that PySpark's state API returns.

        Raises:
            CorruptData: Not bytes of a key of this schema.
        """
        try:
            if self._kind == "row":
                return self._decode(data)
            if self._kind == "empty":
                return ()
            wire: Any = None
            if self._kind == "text":
                wire = None if data == _NULL_TEXT else data.decode()
            elif data:
                (wire,) = _I64.unpack(data)
                wire = bool(wire) if isinstance(self.schema.fields[0].dataType, BooleanType) else wire
            return self._rows.decode_wire([wire])
        except Exception as error:
            raise CorruptData(
                f"{len(data)} bytes are not {self.what} ({self.schema.simpleString()}): {clip(error)}"
            ) from error

    def encode_columns(self, columns: Sequence[pa.Array], count: int) -> list[bytes]:
        """Return the bytes of ``count`` keys given as Arrow columns; equal to :meth:`encode` of each."""
        if self._kind == "empty":
            return [b""] * count
        if self._kind == "text":
            found = columns[0].cast(pa.large_binary()).to_pylist()
            if columns[0].null_count:
                return [_NULL_TEXT if one is None else one for one in found]
            return list(found)
        if self._kind == "whole":
            return self._whole(columns[0])
        encoded: list[bytes] = self.encode_array(columns, count).to_pylist()
        return encoded

    def encode_array(self, columns: Sequence[pa.Array], count: int) -> pa.Array:
        """Return the bytes of ``count`` keys given as Arrow columns as a binary array; see :meth:`encode_columns`.

        Nothing runs per key in Python but for arrays, maps and structs.
        """
        if self._kind == "text":
            return filled(columns[0].cast(pa.binary()), _NULL_TEXT)
        if self._kind == "whole":
            found = rows_of(to_int64(columns[0]).astype("<i8"))
            return found if not columns[0].null_count else pc.if_else(columns[0].is_valid(), found, b"")
        if self._kind == "empty":
            return empty_values(count)
        return self._columns.write(self.canonical(columns), count)

    def decode_array(self, keys: pa.Array) -> list[pa.Array]:
        """Return keys as Arrow columns; the inverse of :meth:`encode_array`.

        Nothing runs per key in Python but for arrays, maps and structs.

        Raises:
            CorruptData: Not bytes of keys of this schema.
        """
        kinds = [field.type for field in arrow_schema(self.schema)]
        try:
            if self._kind == "text":
                is_null = pc.equal(keys, pa.scalar(_NULL_TEXT, keys.type))
                return [pc.if_else(is_null, None, keys).cast(kinds[0])]
            if self._kind == "whole":
                nulls = lengths_of(keys) == 0
                numbers = np.zeros(len(keys), np.int64)
                present = keys.filter(array_of(~nulls)) if nulls.any() else keys
                content = fixed_width_of(present, _I64.size)
                if content is None:
                    raise ValueError("not eight bytes")
                numbers[~nulls] = content.view("<i8")
                return [from_int64(numbers, nulls if nulls.any() else None, kinds[0])]
            if self._kind == "empty":
                return []
            split = self._columns.split(keys, 0)
            return [split.column(i, kind) for i, kind in enumerate(kinds)]
        except Exception as error:
            raise CorruptData(
                f"{len(keys)} keys are not {self.what} ({self.schema.simpleString()}): {clip(error)}"
            ) from error

    def place_of(self, column: str) -> ExpiryPlace:
        """Return where a key holds the microseconds of a timestamp column."""
        field = self.names.index(column)
        if self._kind == "whole":
            return ExpiryPlace(in_key=True, offset=0)
        offset = self._columns.slots(0).fields[f"f{field}"][1]  # type: ignore[index]
        return ExpiryPlace(in_key=True, offset=int(offset), null_bit=field)

    def canonical(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the key columns with one NaN and one zero: whose row came first must not show.

        Inside structs and arrays they stay as they are.
        """
        return list(map(canonical_column, columns))

    def starts(self, columns: Sequence[pa.Array], count: int) -> list[int]:
        """Return the row numbers at which a new key begins in ``count`` rows sorted by key; the first is 0."""
        if count == 0:
            return []
        if not columns or count == 1:
            return [0]
        differs = np.zeros(count - 1, dtype=bool)
        for column, field in zip(columns, self.schema.fields, strict=True):
            if isinstance(field.dataType, (StructType, ArrayType, MapType)) or not _comparable(column.type):
                encoded = KeyCodec(StructType([field]), self.what).encode_columns([column], count)
                differs |= np.fromiter(map(bytes.__ne__, encoded[1:], encoded), dtype=bool, count=count - 1)
            else:
                differs |= _changes(column)
        return [0, *(np.flatnonzero(differs) + 1).tolist()]

    @staticmethod
    def _whole(column: pa.Array) -> list[bytes]:
        found: list[bytes] = to_int64(column).astype("<i8").view("V8").tolist()
        if column.null_count:
            return [one if valid else b"" for one, valid in zip(found, column.is_valid().to_pylist(), strict=True)]
        return found


def canonical_column(column: pa.Array) -> pa.Array:
    """Return a column with one NaN and one zero: Arrow tells others apart by their bits."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(math.nan, column.type), pc.add(column, pa.scalar(0.0, column.type)))


def _comparable(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_interval(kind))


def _changes(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    after, before = column.slice(1), column.slice(0, len(column) - 1)
    differs = pc.not_equal(after, before)
    if pa.types.is_floating(column.type):
        differs = pc.and_not(differs, pc.and_(pc.is_nan(after), pc.is_nan(before)))
    if column.null_count:
        null_after, null_before = pc.is_null(after), pc.is_null(before)
        differs = pc.if_else(pc.or_(null_after, null_before), pc.xor(null_after, null_before), differs)
    found: np.ndarray[Any, np.dtype[np.bool_]] = numpy_of(differs)
    return found


def _key_field(data_type: DataType) -> FieldCodec:
    """Return the codec of a type that gives equal keys equal wire values."""
    codec, canonical = field_codec(data_type), _canonical(data_type)
    if canonical is None:
        return codec
    return FieldCodec(None, lambda value: canonical(codec.encode(value)), codec.decode)


def _canonical(data_type: DataType) -> Convert | None:
    """Return what is done to a wire value so that equal values have equal bytes; None for nothing."""
    if isinstance(data_type, FLOATS):
        return lambda number: _NAN if math.isnan(number) else number + 0.0
    if isinstance(data_type, ArrayType):
        element = _canonical(data_type.elementType)
        return None if element is None else lambda wire: [None if one is None else element(one) for one in wire]
    if isinstance(data_type, MapType):
        key, value = _canonical(data_type.keyType), _canonical(data_type.valueType)
        pack = msgpack.Packer(use_bin_type=True).pack

        def sort(wire: list[list[Any]]) -> list[list[Any]]:
            pairs = [[key(k) if key else k, value(v) if value is not None and v is not None else v] for k, v in wire]
            return sorted(pairs, key=lambda pair: pack(pair[0]))

        return sort
    if isinstance(data_type, StructType):
        inner = [_canonical(f.dataType) for f in data_type.fields]
        if not any(inner):
            return None
        return lambda wire: [one if c is None or one is None else c(one) for one, c in zip(wire, inner, strict=True)]
    return None


def refuse_unequal(data_type: DataType, where: str) -> None:
    """Refuse types whose equality is not that of their bytes.

    Args:
        data_type: The type.
        where: What has it, for messages.

    Raises:
        Invalid: It is such a type, or has one in it.
    """
    # The oldest supported PySpark may lack variants: known by name.
    if type(data_type).__name__ == "VariantType":
        raise Invalid(f"{where} is a variant, which has no equality: use a string of it (to_json, say) instead")
    collation = getattr(data_type, "collation", "UTF8_BINARY")
    if isinstance(data_type, StringType) and collation != "UTF8_BINARY":
        raise Invalid(f"{where} is a string collated by {collation}: use a plain string (lower(...), say) instead")
    for inner in ("elementType", "keyType", "valueType"):
        if hasattr(data_type, inner):
            refuse_unequal(getattr(data_type, inner), where)
    if isinstance(data_type, StructType):
        for field in data_type.fields:
            refuse_unequal(field.dataType, where)
    if isinstance(data_type, DecimalType) and data_type.precision > 38:
        raise Invalid(f"{where} has a decimal of more than 38 digits")
