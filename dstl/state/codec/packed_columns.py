"""Columns to msgpack arrays and back, a whole column at a time: the bytes that ``msgpack.packb`` gives row by row.

Every scalar type of Spark crosses so; only arrays, maps and structs are packed value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StructType,
)

from dstl.state.codec.binary_column import Bytes, binary_of, content_of, gathered, lengths_of
from dstl.state.codec.field_codec import field_codec
from dstl.state.codec.type_groups import FLOATS, TEXT, WHOLE
from dstl.state.codec.wire_column import from_int64, to_int64

__all__ = ["columns_of_rows", "is_columnar", "pack_columns", "unpack_columns", "unpack_rows"]

_NIL, _FALSE, _TRUE, _DOUBLE = 0xC0, 0xC2, 0xC3, 0xCB

_UNSIGNED = ((0x80, 0xCC, 1), (0x100, 0xCD, 2), (0x1_0000, 0xCE, 4), (0x1_0000_0000, 0xCF, 8))
"""From this number up: the tag, and how many bytes follow."""
_SIGNED = ((-32, 0xD0, 1), (-0x80, 0xD1, 2), (-0x8000, 0xD2, 4), (-0x8000_0000, 0xD3, 8))
"""Below this number."""
_NUMBERS = {0xCC: ">u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8", 0xD0: ">i1", 0xD1: ">i2", 0xD2: ">i4", 0xD3: ">i8"}
_LENGTHS = {0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC4: 1, 0xC5: 2, 0xC6: 4}
_PADDING = 16

Positions = npt.NDArray[np.int64]


def is_columnar(data_type: DataType) -> bool:
    """Return True where columns of this type cross without a step per value."""
    return isinstance(data_type, (BooleanType, BinaryType, DecimalType, *WHOLE, *FLOATS, *TEXT))


def pack_columns(
    columns: Sequence[pa.Array],
    types: Sequence[DataType],
    count: int,
    *,
    prefix: bytes = b"",
    encoders: Sequence[Callable[[Any], Any]] = (),
) -> pa.Array:
    """Return one msgpack array for each row.

    Args:
        columns: Arrow columns in which Spark carries these types.
        types: Their Spark types.
        count: Number of rows.
        prefix: Goes in front of each.
        encoders: For each column, what makes a wire value of a Python value; used for types that are not columnar.
    """
    size = len(types)
    header = bytes([0x90 | size]) if size < 16 else b"\xdc" + size.to_bytes(2, "big")
    pieces: list[pa.Array | pa.Scalar] = [pa.scalar(prefix + header, pa.binary())]
    for at, (column, data_type) in enumerate(zip(columns, types, strict=True)):
        if is_columnar(data_type):
            pieces += _packed(column, data_type)
        else:
            encode, pack = encoders[at], msgpack.Packer(use_bin_type=True).pack
            found = [pack(None if one is None else encode(one)) for one in column.to_pylist()]
            pieces.append(pa.array(found, pa.binary()))
    if size == 0:
        return pa.array([prefix + header] * count, pa.binary())
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.binary()))


def unpack_columns(
    values: pa.Array, types: Sequence[DataType], arrow_types: Sequence[pa.DataType], skip: int
) -> list[pa.Array]:
    """Return the columns of msgpack arrays; the inverse of :func:`pack_columns`.

    Args:
        values: Binary, without nulls.
        types: The columns' Spark types.
        arrow_types: What to return them as.
        skip: Bytes in front of each array.

    Raises:
        ValueError: Not such values.
    """
    if not all(map(is_columnar, types)):
        return columns_of_rows(unpack_rows(values, len(types), skip), types, arrow_types)
    content, offsets = content_of(values)
    data = np.concatenate((content, np.zeros(_PADDING, np.uint8)))
    at = offsets[:-1] + skip
    header = 1 if len(types) < 16 else 3
    expected = 0x90 | len(types) if header == 1 else 0xDC
    if bool((offsets[1:] - at < header).any()) or bool((data[at] != expected).any()):
        raise ValueError(f"not an array of {len(types)} fields")
    at = at + header
    columns = []
    for data_type, arrow_type in zip(types, arrow_types, strict=True):
        column, at = _unpacked(data, at, data_type, arrow_type)
        columns.append(column)
    if bool((at != offsets[1:]).any()):
        raise ValueError("a value is longer or shorter than its fields")
    return columns


def _packed(column: pa.Array, data_type: DataType) -> list[pa.Array]:
    valid = None if not column.null_count else column.is_valid().to_numpy(zero_copy_only=False)
    if isinstance(data_type, BooleanType):
        flags = column.fill_null(False).to_numpy(zero_copy_only=False)
        return [_heads(np.where(flags, _TRUE, _FALSE).astype(np.uint8)[:, None], np.ones(len(flags), np.int64), valid)]
    if isinstance(data_type, FLOATS):
        numbers = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        heads = np.empty((len(numbers), 9), np.uint8)
        heads[:, 0] = _DOUBLE
        heads[:, 1:] = numbers.astype(">f8").view(np.uint8).reshape(-1, 8)
        return [_heads(heads, np.full(len(numbers), 9), valid)]
    if isinstance(data_type, DecimalType):
        return _packed_decimals(column, valid)
    if isinstance(data_type, WHOLE):
        heads, lengths = _integers(to_int64(column))
        return [_heads(heads, lengths, valid)]
    body = column.cast(pa.binary()).fill_null(b"")
    return [_length_heads(lengths_of(body), isinstance(data_type, TEXT), valid), body]


def _packed_decimals(column: pa.Array, valid: npt.NDArray[np.bool_] | None) -> list[pa.Array]:
    words = np.frombuffer(column.buffers()[1], np.int64, 2 * len(column), 16 * column.offset).reshape(-1, 2)
    low, high = words[:, 0], words[:, 1]
    heads, lengths = _integers(low)
    small = _heads(heads, lengths, valid)
    large = high != low >> 63
    if valid is not None:
        large &= valid
    if not large.any():
        return [small]
    rows = np.flatnonzero(large)
    pack = msgpack.Packer(use_bin_type=True).pack
    found = []
    for hi, lo in zip(high[rows].tolist(), low[rows].astype(np.uint64).tolist(), strict=True):
        unscaled = hi << 64 | lo
        found.append(pack(unscaled.to_bytes((unscaled.bit_length() + 8) // 8, "big", signed=True)))
    return [pc.replace_with_mask(small, pa.array(large), pa.array(found, pa.binary()))]


def _integers(numbers: Positions) -> tuple[Bytes, Positions]:
    heads = np.empty((len(numbers), 9), np.uint8)
    lengths = np.ones(len(numbers), np.int64)
    heads[:, 0] = numbers.astype(np.uint8)  # small ones are their own tag, negative ones in two's complement
    big = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)
    for bounds, beyond in ((_UNSIGNED, np.greater_equal), (_SIGNED, np.less)):
        for bound, tag, size in bounds:
            rows = beyond(numbers, bound)
            if not rows.any():
                break
            heads[rows, 0] = tag
            heads[rows, 1 : 1 + size] = big[rows, 8 - size :]
            lengths[rows] = 1 + size
    return heads, lengths


def _length_heads(lengths: Positions, is_text: bool, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    heads = np.empty((len(lengths), 5), np.uint8)
    sizes = np.ones(len(lengths), np.int64)
    big = lengths.astype(">i4").view(np.uint8).reshape(-1, 4)
    heads[:, 0] = 0xA0 | (lengths & 0x1F)
    steps = ((32, 0xD9, 1), (0x100, 0xDA, 2), (0x1_0000, 0xDB, 4))
    if not is_text:
        steps = ((0, 0xC4, 1), (0x100, 0xC5, 2), (0x1_0000, 0xC6, 4))
    for bound, tag, size in steps:
        rows = lengths >= bound
        heads[rows, 0] = tag
        heads[rows, 1 : 1 + size] = big[rows, 4 - size :]
        sizes[rows] = 1 + size
    return _heads(heads, sizes, valid)


def _heads(heads: Bytes, lengths: Positions, valid: npt.NDArray[np.bool_] | None) -> pa.Array:
    if valid is not None:
        heads[~valid, 0] = _NIL
        lengths = np.where(valid, lengths, 1)
    return binary_of(heads[np.arange(heads.shape[1]) < lengths[:, None]], lengths)


def _unpacked(data: Bytes, at: Positions, data_type: DataType, arrow_type: pa.DataType) -> tuple[pa.Array, Positions]:
    at = np.minimum(at, len(data) - _PADDING)
    tags = data[at]
    nulls = tags == _NIL
    if isinstance(data_type, BooleanType):
        if not bool((nulls | (tags == _TRUE) | (tags == _FALSE)).all()):
            raise ValueError("not a boolean")
        return pa.array(tags == _TRUE, mask=nulls), at + 1
    if isinstance(data_type, FLOATS):
        if not bool((nulls | (tags == _DOUBLE)).all()):
            raise ValueError("not a number")
        numbers = _big_endian(data, at + 1, ">f8").astype(np.float64)
        with np.errstate(over="ignore"):
            return pa.array(numbers, mask=nulls).cast(arrow_type, safe=False), at + np.where(nulls, 1, 9)
    if isinstance(data_type, WHOLE):
        integers, at = _integers_at(data, at, tags, nulls)
        return from_int64(integers, nulls, arrow_type), at
    if isinstance(data_type, DecimalType):
        return _decimals_at(data, at, tags, nulls, arrow_type)
    body, at = _bodies_at(data, at, tags, nulls)
    return body.cast(arrow_type), at


def _integers_at(data: Bytes, at: Positions, tags: Bytes, others: npt.NDArray[np.bool_]) -> tuple[Positions, Positions]:
    numbers = tags.astype(np.int8).astype(np.int64)
    after = at + 1
    for tag in np.unique(tags[((tags >= 0x80) & (tags < 0xE0)) & ~others]).tolist():
        if tag not in _NUMBERS:
            raise ValueError("not an integer")
        rows = np.flatnonzero(tags == tag)
        numbers[rows] = _big_endian(data, at[rows] + 1, _NUMBERS[tag]).astype(np.int64)
        after[rows] += int(_NUMBERS[tag][2:])
    return numbers, after


def _bodies_at(data: Bytes, at: Positions, tags: Bytes, others: npt.NDArray[np.bool_]) -> tuple[pa.Array, Positions]:
    lengths = np.where(others, 0, (tags & 0x1F).astype(np.int64))
    starts = at + 1
    for tag in np.unique(tags[((tags < 0xA0) | (tags > 0xBF)) & ~others]).tolist():
        if tag not in _LENGTHS:
            raise ValueError("neither text nor bytes")
        rows = np.flatnonzero(tags == tag)
        lengths[rows] = _big_endian(data, at[rows] + 1, f">u{_LENGTHS[tag]}").astype(np.int64)
        starts[rows] += _LENGTHS[tag]
    if bool((starts + lengths > len(data) - _PADDING).any()):
        raise ValueError("a length beyond the end")
    found = gathered(data, starts, lengths)
    nulls = tags == _NIL
    return (pc.if_else(pa.array(~nulls), found, None) if nulls.any() else found), starts + lengths


def _decimals_at(
    data: Bytes, at: Positions, tags: Bytes, nulls: npt.NDArray[np.bool_], arrow_type: pa.DataType
) -> tuple[pa.Array, Positions]:
    is_large = (tags == 0xC4) & ~nulls
    numbers, after = _integers_at(data, at, tags, nulls | is_large)
    words = np.empty((len(at), 2), np.int64)
    words[:, 0], words[:, 1] = numbers, numbers >> 63
    rows = np.flatnonzero(is_large)
    if len(rows):
        bodies, after[rows] = _bodies_at(data, at[rows], tags[rows], np.zeros(len(rows), np.bool_))
        wide = [int.from_bytes(one, "big", signed=True) for one in bodies.to_pylist()]
        packed = b"".join(one.to_bytes(16, "little", signed=True) for one in wide)
        words[rows] = np.frombuffer(packed, np.int64).reshape(-1, 2)
    validity = pa.array(~nulls).buffers()[1] if nulls.any() else None
    return pa.Array.from_buffers(arrow_type, len(at), [validity, pa.py_buffer(words)]), after


def unpack_rows(values: pa.Array, count: int, skip: int) -> list[list[Any]]:
    """Return each value's list of wire values.

    Args:
        values: Binary, without nulls.
        count: How many each has.
        skip: Bytes in front of each array.

    Raises:
        ValueError: Not such values.
    """
    unpack = partial(msgpack.unpackb, strict_map_key=False)
    rows = [unpack(value[skip:]) for value in values.to_pylist()]
    if any(len(row) != count for row in rows):
        raise ValueError(f"not an array of {count} fields")
    return rows


def columns_of_rows(
    rows: Sequence[Sequence[Any]], types: Sequence[DataType], arrow_types: Sequence[pa.DataType]
) -> list[pa.Array]:
    """Return the columns of rows of wire values, of which there is at least one."""
    converters = list(map(_arrowable, types))
    return [
        pa.array([None if one is None else convert(one) for one in column], arrow_type)
        for column, convert, arrow_type in zip(zip(*rows, strict=True), converters, arrow_types, strict=True)
    ]


def _arrowable(data_type: DataType) -> Callable[[Any], Any]:
    """What makes of a wire value one that Arrow takes for the type."""
    if isinstance(data_type, DecimalType):
        decode = field_codec(data_type).decode
        assert decode is not None
        return decode
    if isinstance(data_type, ArrayType):
        element = _arrowable(data_type.elementType)
        return lambda wire: [None if one is None else element(one) for one in wire]
    if isinstance(data_type, MapType):
        key, item = _arrowable(data_type.keyType), _arrowable(data_type.valueType)
        return lambda wire: [(key(k), None if v is None else item(v)) for k, v in wire]
    if isinstance(data_type, StructType):
        inner = list(map(_arrowable, (field.dataType for field in data_type.fields)))
        return lambda wire: {
            name: None if one is None else convert(one)
            for name, convert, one in zip(data_type.names, inner, wire, strict=True)
        }
    return lambda wire: wire


def _big_endian(data: Bytes, at: Positions, kind: str) -> npt.NDArray[Any]:
    size = int(kind[2:])
    found: npt.NDArray[Any] = data[at[:, None] + np.arange(size)].reshape(-1).view(kind)
    return found
