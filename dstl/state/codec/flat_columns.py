"""Flat rows a whole column at a time: the bytes of ``flat_row``, between Arrow columns and a binary array.

Nothing runs per value in Python but for arrays, maps and structs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    FloatType,
    MapType,
    StructType,
)

from dstl.column_buffers import (
    Nulls,
    array_of,
    content_of,
    filled,
    fixed_width_of,
    from_int64,
    lengths_of,
    numpy_of,
    piece_of,
    rows_of,
    to_int64,
    valid_of,
)
from dstl.state.codec.field_codec import FLOATS, TEXT, field_codec, is_small_decimal
from dstl.state.codec.flat_row import FlatRow, slot_format, unpack_nested
from dstl.state.codec.schema_evolution import conversion

_NUMPY_FORMATS: dict[str, Any] = {"?": "u1", "16s": ("<i8", (2,))}
"""Slots that numpy calls otherwise than ``struct``."""


class FlatColumns:
    """Writes and splits the rows of some types as columns.

    Args:
        types: Spark types, one per field.
        encoders: For each field, what makes a wire value of a Python value; None: the types' own.
    """

    def __init__(self, types: Sequence[DataType], encoders: Sequence[Callable[[Any], Any]] | None = None) -> None:
        self.types = list(types)
        self._encoders = list(encoders or (field_codec(each).encode for each in types))
        row = FlatRow(types)
        self.bitmap_bytes = len(row.blank)
        self.to_bytes = {i: each for i, each, _ in row.bodies}
        self._slots: dict[int, np.dtype[np.void]] = {}

    def slots(self, skip: int) -> np.dtype[np.void]:
        """Return the numpy type of what stands in front of a row's bytes, ``skip`` bytes before the row included."""
        if skip not in self._slots:
            self._slots[skip] = self._slots_behind(skip)
        return self._slots[skip]

    def _slots_behind(self, skip: int) -> np.dtype[np.void]:
        formats: list[np.dtype[Any]] = []
        offsets, offset = [], skip + self.bitmap_bytes
        for code in map(slot_format, self.types):
            kind: Any = _NUMPY_FORMATS.get(code, f"<{code}")
            formats.append(np.dtype(kind))
            offsets.append(offset)
            offset += formats[-1].itemsize
        names = [f"f{i}" for i in range(len(formats))]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})

    def write(self, columns: Sequence[pa.Array], count: int, prefix: bytes = b"") -> pa.Array:
        """Return each row as bytes, a binary array without nulls.

        Args:
            columns: Arrow columns in which Spark carries the types.
            count: Number of rows.
            prefix: Goes in front of each.
        """
        rows = np.zeros(count, self.slots(len(prefix)))
        raw = rows.view(np.uint8).reshape(count, rows.itemsize)
        raw[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        ends = np.zeros(count, np.int64)
        bodies = []
        for i, (column, data_type) in enumerate(zip(columns, self.types, strict=True)):
            if column.null_count:
                nulls = ~valid_of(column)
                raw[:, len(prefix) + i // 8] |= nulls.astype(np.uint8) << np.uint8(i % 8)
            if i in self.to_bytes:
                bodies.append(self._bodies(column, i))
                ends += lengths_of(bodies[-1])
                rows[f"f{i}"] = ends
            else:
                rows[f"f{i}"] = _numbers(column, data_type)
        return pc.binary_join_element_wise(rows_of(rows), *bodies, b"") if bodies else rows_of(rows)

    def _bodies(self, column: pa.Array, field: int) -> pa.Array:
        if isinstance(self.types[field], (*TEXT, BinaryType)):
            return filled(column.cast(pa.binary()), b"")
        encode, to_bytes = self._encoders[field], self.to_bytes[field]
        return pa.array([b"" if one is None else to_bytes(encode(one)) for one in column.to_pylist()], pa.binary())

    def split(self, values: pa.Array, skip: int) -> SplitRows:
        """Return rows cut into their fields; the inverse of :meth:`write`.

        Args:
            values: Binary, without nulls.
            skip: Bytes in front of each row.

        Raises:
            ValueError: Not such rows.
        """
        return SplitRows(self, values, skip)


class SplitRows:
    """Rows cut into their fields, all of which lie within their row.

    Args:
        layout: The rows' layout.
        values: Binary, without nulls.
        skip: Bytes in front of each row.

    Raises:
        ValueError: Not such rows.
    """

    def __init__(self, layout: FlatColumns, values: pa.Array, skip: int) -> None:
        slots = layout.slots(skip)
        size = slots.itemsize
        offsets = content_of(values)[1]
        heads = values
        if layout.to_bytes:
            if bool((np.diff(offsets) < size).any()):
                raise ValueError(f"a row has not the {size} bytes of its slots")
            heads = piece_of(values, np.stack((offsets[:-1] + size, offsets[1:]), axis=1), 0)
        content = fixed_width_of(heads, size)
        if content is None:
            raise ValueError(f"a row has not {size} bytes")
        self._types = layout.types
        self._slots = content.view(slots)
        self._bitmap = content.reshape(len(values), size)[:, skip : skip + layout.bitmap_bytes]
        self._some_null = bool(self._bitmap.any())
        self._values = values
        self._pieces = {field: piece for piece, field in enumerate(layout.to_bytes, start=1)}
        if not self._pieces:
            return
        self._ends = np.empty((len(values), 1 + len(self._pieces)), np.int64)
        self._ends[:, 0] = offsets[:-1] + size
        for field, piece in self._pieces.items():
            self._ends[:, piece] = self._ends[:, 0] + self._slots[f"f{field}"]
        if bool((np.diff(self._ends) < 0).any()):
            raise ValueError("a field ends before it begins")
        if bool((self._ends[:, -1] != offsets[1:]).any()):
            raise ValueError("a row is longer or shorter than its fields")

    def column(self, field: int, arrow_type: pa.DataType, history: Sequence[DataType] = ()) -> pa.Array:
        """Return one field of all rows.

        Args:
            field: Its position.
            arrow_type: What to return it as.
            history: The types that the field has had since, its own first; it is returned as the last. Empty: as it is.

        Raises:
            ValueError: Bytes that no value of the type has.
        """
        data_type = self._types[field]
        nulls = None
        if self._some_null:
            nulls = (self._bitmap[:, field // 8] >> np.uint8(field % 8)) & 1 != 0
            nulls = nulls if nulls.any() else None
        new = history[-1] if history else data_type
        if field not in self._pieces:
            return _of_numbers(np.ascontiguousarray(self._slots[f"f{field}"]), nulls, data_type, new, arrow_type)
        body = piece_of(self._values, self._ends, self._pieces[field])
        if nulls is not None:
            body = pc.if_else(array_of(~nulls), body, None)
        if isinstance(data_type, (*TEXT, BinaryType)):
            return _of_bytes(body, data_type, new, arrow_type)
        convert, to_arrow = conversion(history) if history else None, _arrow_value(new)
        wire = [None if one is None else unpack_nested(one) for one in body.to_pylist()]
        if convert is not None:
            wire = [None if one is None else convert(one) for one in wire]
        return pa.array([None if one is None else to_arrow(one) for one in wire], arrow_type)


def _numbers(column: pa.Array, data_type: DataType) -> npt.NDArray[Any]:
    """Return what the slots of a column hold."""
    found: npt.NDArray[Any]
    if isinstance(data_type, FLOATS):
        found = numpy_of(column, 0.0)
        return found
    if isinstance(data_type, DecimalType):
        found = np.frombuffer(column.buffers()[1], np.int64, 2 * len(column), 16 * column.offset).reshape(-1, 2)
        if column.null_count:
            found = np.where(valid_of(column)[:, None], found, 0)
        return found[:, 0] if is_small_decimal(data_type) else found
    return to_int64(column)


def _of_numbers(
    numbers: npt.NDArray[Any], nulls: Nulls, old: DataType, new: DataType, arrow_type: pa.DataType
) -> pa.Array:
    """Return a column of one type, given as its slots, as the type that it has become."""
    if isinstance(old, BooleanType):
        return array_of(numbers != 0, nulls)
    if isinstance(old, DecimalType):
        words = numbers if numbers.ndim == 2 else np.stack((numbers, numbers >> 63), axis=1)
        validity = None if nulls is None else array_of(~nulls).buffers()[1]
        return pa.Array.from_buffers(arrow_type, len(words), [validity, pa.py_buffer(np.ascontiguousarray(words))])
    if isinstance(new, FLOATS):
        # By numpy: Arrow's cast of integers to a float refuses or rounds twice.
        return array_of(numbers.astype(np.float32 if isinstance(new, FloatType) else np.float64), nulls)
    return from_int64(numbers.astype(np.int64, copy=False), nulls, arrow_type)


def _of_bytes(column: pa.Array, old: DataType, new: DataType, arrow_type: pa.DataType) -> pa.Array:
    """Return text or binary, given as its bytes, as the type that it has become."""
    if isinstance(old, BinaryType) and isinstance(new, TEXT):
        try:
            return column.cast(arrow_type)
        except pa.ArrowInvalid:
            replaced = [None if one is None else one.decode(errors="replace") for one in column.to_pylist()]
            return pa.array(replaced, arrow_type)
    if isinstance(old, TEXT):
        column = column.cast(pa.string())
    return column.cast(arrow_type)


def _arrow_value(data_type: DataType) -> Callable[[Any], Any]:
    """Return what makes of a wire value one that Arrow takes for the type."""
    if isinstance(data_type, DecimalType) or type(data_type).__name__ == "TimeType":
        decode = field_codec(data_type).decode
        assert decode is not None
        return decode
    if isinstance(data_type, ArrayType):
        element = _arrow_value(data_type.elementType)
        return lambda wire: [None if one is None else element(one) for one in wire]
    if isinstance(data_type, MapType):
        key, item = _arrow_value(data_type.keyType), _arrow_value(data_type.valueType)
        return lambda wire: [(key(k), None if v is None else item(v)) for k, v in wire]
    if isinstance(data_type, StructType):
        inner = list(map(_arrow_value, (field.dataType for field in data_type.fields)))
        return lambda wire: {
            name: None if one is None else convert(one)
            for name, convert, one in zip(data_type.names, inner, wire, strict=True)
        }
    return lambda wire: wire
