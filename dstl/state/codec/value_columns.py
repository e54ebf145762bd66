"""State values as bytes, a whole column of them at a time: the same bytes that :class:`ValueCodec` writes one by one.

So a state that vectorised code wrote can be read by a processor, by the offline reader, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BooleanType, DataType, DoubleType, FloatType, StructType

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.errors import CorruptData, Invalid, clipped
from dstl.state.codec.binary_column import content_of, fixed_width_of, lengths_of, rows_of
from dstl.state.codec.column_evolution import widened
from dstl.state.codec.field_codec import field_codec
from dstl.state.codec.packed_columns import columns_of_rows, is_columnar, pack_columns, unpack_columns, unpack_rows
from dstl.state.codec.schema_evolution import reading
from dstl.state.codec.type_groups import FLOATS
from dstl.state.codec.value_codec import FIXED_FORMATS, HAS_WRITE_TIME, WRITE_TIME, is_fixed_width, null_bitmap
from dstl.state.codec.wire_column import from_int64, to_int64
from dstl.state.frames.row_writer import arrow_schema

__all__ = ["ValueColumns", "without_expired"]

_MOST_VALUE_BYTES = MAX_CHANGE_BYTES - (1 << 16)


def without_expired(values: pa.Array, latest_dead_ms: int) -> pa.Array:
    """Return the same values, null where one was written at ``latest_dead_ms`` (milliseconds since 1970) or before.

    A value without a write time never expires.
    """
    data, offsets = content_of(values)
    timed = np.flatnonzero(np.diff(offsets) > WRITE_TIME.size)
    timed = timed[(data[offsets[timed]] & HAS_WRITE_TIME) != 0]
    bytes_of_times = data[offsets[timed][:, None] + np.arange(1, 1 + WRITE_TIME.size)]
    dead = timed[np.ascontiguousarray(bytes_of_times).view("<i8")[:, 0] <= latest_dead_ms]
    if not len(dead):
        return values
    is_dead = np.zeros(len(values), bool)
    is_dead[dead] = True
    return pc.if_else(pa.array(is_dead), pa.scalar(None, values.type), values)


class ValueColumns:
    """Turns Arrow columns into values and back for one state.

    Args:
        name: The state's name, for messages.
        schemas: Every schema that the state has had, oldest first; the last one is written.
        write_time_ms: Put this write time into every value (states with a time to live); None for none.

    Attributes:
        schema: The last one, in Arrow's types; nullable throughout, for a key without state has nulls.

    Raises:
        Invalid: A type that cannot be kept, or that Arrow cannot carry.
    """

    def __init__(self, name: str, schemas: Sequence[StructType], write_time_ms: int | None = None) -> None:
        self._name = name
        self._prefix = bytes([len(schemas)])
        if write_time_ms is not None:
            self._prefix = bytes([len(schemas) | HAS_WRITE_TIME]) + WRITE_TIME.pack(write_time_ms)
        self._newest = schemas[-1]
        written = arrow_schema(schemas[-1])
        self.schema = pa.schema([field.with_nullable(True) for field in written])
        self._required = [field.name for field in schemas[-1].fields if not field.nullable]
        self._schemas = tuple(schemas)
        self._body = _body(self._newest)

    def encode(self, columns: pa.RecordBatch, kept: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """Return each row as the bytes of a value: a binary array without nulls.

        Args:
            columns: Of :attr:`schema`.
            kept: False for rows that nobody will read: they may have nulls anywhere. None: all are read.

        Raises:
            Invalid: A null where the schema has NOT NULL, or a value above the limit; names the state.
        """
        for name in self._required:
            nulls = columns.column(name).is_null().to_numpy(zero_copy_only=False)
            if bool((nulls if kept is None else nulls & kept).any()):
                raise Invalid(f"field {name!r} of state {self._name!r} is declared NOT NULL and got a null")
        values = self._body.encode(columns.columns, columns.num_rows, self._prefix)
        if len(values) and values.nbytes > _MOST_VALUE_BYTES and int(lengths_of(values).max()) > _MOST_VALUE_BYTES:
            raise Invalid(
                f"a value of state {self._name!r} has {int(lengths_of(values).max())} bytes, above the limit of "
                f"{_MOST_VALUE_BYTES}: keep less per key"
            )
        return values

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        """Return values as columns of :attr:`schema`; a null (no state) has nulls in every one.

        Raises:
            CorruptData: Bytes that are not a value of any of the schemas.
        """
        present = values.drop_null() if values.null_count else values
        try:
            found = self._decoded(present)
        except CorruptData:
            raise
        except Exception as error:
            raise CorruptData(
                f"values of state {self._name!r} cannot be decoded: {clipped(error)}; were they written by a newer "
                "version of the query?"
            ) from error
        if not values.null_count:
            return found
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        where = pa.array(np.cumsum(valid) - 1, mask=~valid)
        return pa.RecordBatch.from_arrays([c.take(where) for c in found.columns], schema=self.schema)

    def _decoded(self, values: pa.Array) -> pa.RecordBatch:
        if not len(values):
            return _empty(self.schema)
        data, offsets = content_of(values)
        if int(np.diff(offsets).min()) < 1:
            raise ValueError("an empty value")
        first = data[offsets[:-1]]
        kinds = np.unique(first) if bool((first != first[0]).any()) else first[:1]
        if len(kinds) == 1:
            return self._of_kind(values, int(kinds[0]))
        # Values of several schema versions: each kind by itself, then back into the order of the rows.
        rows = [np.flatnonzero(first == kind) for kind in kinds]
        parts = [self._of_kind(values.take(pa.array(r)), int(k)) for r, k in zip(rows, kinds, strict=True)]
        back = np.argsort(np.concatenate(rows))
        return pa.concat_batches(parts).take(pa.array(back))

    def _of_kind(self, values: pa.Array, kind: int) -> pa.RecordBatch:
        version = kind & ~HAS_WRITE_TIME
        skip = 1 + (WRITE_TIME.size if kind & HAS_WRITE_TIME else 0)
        if version == len(self._schemas):
            found = self._body.decode(values, skip)
        elif 0 < version < len(self._schemas):
            found = self._of_older(values, self._schemas[version - 1 :], skip)
        else:
            raise ValueError(f"schema version {version}")
        columns = [column.cast(field.type) for column, field in zip(found, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _of_older(self, values: pa.Array, history: Sequence[StructType], skip: int) -> list[pa.Array]:
        """Return values of the first of these schemas as columns of the last, the newest."""
        old, new = _body(history[0]), self._body
        if isinstance(old, _PackedBody) and not all(map(is_columnar, old.types)):
            rows, convert = unpack_rows(values, len(old.types), skip), reading(history)
            if convert is not None:
                rows = list(map(convert, rows))
            return columns_of_rows(rows, new.types, new.arrow_types)
        held = {
            name: (column, kind)
            for name, column, kind in zip(old.names, old.decode(values, skip), old.types, strict=True)
        }
        columns = []
        for name, data_type, arrow_type in zip(new.names, new.types, new.arrow_types, strict=True):
            if all(name in each.names for each in history):
                column, before = held[name]
                columns.append(widened(column, before, data_type, arrow_type))
            else:
                columns.append(pa.nulls(len(values), arrow_type))
        return columns


def _body(schema: StructType) -> _FixedBody | _PackedBody:
    return _FixedBody(schema) if is_fixed_width(schema) else _PackedBody(schema)


class _Body:
    def __init__(self, schema: StructType) -> None:
        self.names = list(schema.names)
        self.types: list[DataType] = [field.dataType for field in schema.fields]
        self.arrow_types = [field.type for field in arrow_schema(schema)]


class _FixedBody(_Body):
    def __init__(self, schema: StructType) -> None:
        super().__init__(schema)
        self._formats = [np.dtype("<" + FIXED_FORMATS[type(each)]) for each in self.types]
        self._bitmap = np.dtype("<" + null_bitmap(len(self.types)))

    def _row(self, skip: int) -> np.dtype[np.void]:
        offset = skip + self._bitmap.itemsize
        names, formats, offsets = ["kind", "nulls"], [np.dtype("u1"), self._bitmap], [0, skip]
        for position, each in enumerate(self._formats):
            names.append(f"f{position}")
            formats.append(each)
            offsets.append(offset)
            offset += each.itemsize
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})

    def encode(self, columns: Sequence[pa.Array], count: int, prefix: bytes) -> pa.Array:
        rows = np.zeros(count, self._row(len(prefix)))
        rows.view(np.uint8).reshape(count, rows.itemsize)[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        for position, column in enumerate(columns):
            if column.null_count:
                nulls = column.is_null().to_numpy(zero_copy_only=False)
                rows["nulls"] |= nulls.astype(self._bitmap) << np.array(position, self._bitmap)
            rows[f"f{position}"] = self._numbers(column, self.types[position])
        return rows_of(rows)

    def decode(self, values: pa.Array, skip: int) -> list[pa.Array]:
        row = self._row(skip)
        content = fixed_width_of(values, row.itemsize)
        if content is None:
            raise ValueError(f"a value that has not {row.itemsize} bytes")
        rows = content.view(row)
        some_null = bool(rows["nulls"].any())
        columns = []
        for position, (data_type, arrow_type) in enumerate(zip(self.types, self.arrow_types, strict=True)):
            nulls = (rows["nulls"] >> np.array(position, self._bitmap)) & 1 != 0 if some_null else np.False_
            numbers = np.ascontiguousarray(rows[f"f{position}"])
            if isinstance(data_type, (DoubleType, FloatType, BooleanType)):
                columns.append(pa.array(numbers, arrow_type, mask=nulls if some_null else None))
            else:
                columns.append(from_int64(numbers.astype(np.int64, copy=False), np.asarray(nulls), arrow_type))
        return columns

    @staticmethod
    def _numbers(column: pa.Array, data_type: DataType) -> npt.NDArray[Any]:
        if isinstance(data_type, FLOATS):
            found: npt.NDArray[Any] = column.fill_null(0.0).to_numpy(zero_copy_only=False)
            return found
        return to_int64(column)


class _PackedBody(_Body):
    def __init__(self, schema: StructType) -> None:
        super().__init__(schema)
        self._encoders = [field_codec(each).encode for each in self.types]

    def encode(self, columns: Sequence[pa.Array], count: int, prefix: bytes) -> pa.Array:
        return pack_columns(columns, self.types, count, prefix=prefix, encoders=self._encoders)

    def decode(self, values: pa.Array, skip: int) -> list[pa.Array]:
        return unpack_columns(values, self.types, self.arrow_types, skip)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
