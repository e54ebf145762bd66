"""State values as bytes, a column at a time: the bytes that :class:`ValueCodec` writes one by one.

So a processor and the offline reader read a state that vectorised code wrote, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.changelog.change_set import MAX_CHANGE_BYTES
from dstl.column_buffers import array_of, content_of, lengths_of, of_kind, valid_of
from dstl.errors import CorruptData, Invalid, clip
from dstl.state.codec.flat_columns import FlatColumns
from dstl.state.codec.value_codec import HAS_WRITE_TIME, WRITE_TIME
from dstl.state.frames.row_writer import arrow_schema

_MAX_VALUE_BYTES = MAX_CHANGE_BYTES - (1 << 16)


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
    return pc.if_else(array_of(is_dead), pa.scalar(None, values.type), values)


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
        written = arrow_schema(schemas[-1])
        self.schema = pa.schema([field.with_nullable(True) for field in written])
        self._required = [field.name for field in schemas[-1].fields if not field.nullable]
        self._schemas = tuple(schemas)
        self._rows = _rows_of(schemas[-1])

    def encode(self, columns: pa.RecordBatch, kept: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        """Return each row as the bytes of a value: a binary array without nulls.

        Args:
            columns: Of :attr:`schema`.
            kept: False for rows that will not be read: they may have nulls anywhere. None: all are read.

        Raises:
            Invalid: A null where the schema has NOT NULL, or a value above the limit; names the state.
        """
        for name in self._required:
            nulls = ~valid_of(columns.column(name))
            if bool((nulls if kept is None else nulls & kept).any()):
                raise Invalid(f"column {name!r} of state {self._name!r} is declared NOT NULL and got a null")
        values = self._rows.write(columns.columns, columns.num_rows, self._prefix)
        if len(values) and values.nbytes > _MAX_VALUE_BYTES and int(lengths_of(values).max()) > _MAX_VALUE_BYTES:
            raise Invalid(
                f"a value of state {self._name!r} has {int(lengths_of(values).max())} bytes, above the limit of "
                f"{_MAX_VALUE_BYTES}: keep less per key"
            )
        return values

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        """Return values as columns of :attr:`schema`; a null (no state) has nulls in every one.

        Raises:
            CorruptData: Bytes that are not a value of any of the schemas.
        """
        present = values.drop_null() if values.null_count else values
        try:
            found = self._decode(present)
        except CorruptData:
            raise
        except Exception as error:
            raise CorruptData(
                f"values of state {self._name!r} cannot be decoded: {clip(error)}; were they written by a newer "
                "version of the query?"
            ) from error
        if not values.null_count:
            return found
        valid = valid_of(values)
        where = array_of(np.cumsum(valid) - 1, ~valid)
        return pa.RecordBatch.from_arrays([c.take(where) for c in found.columns], schema=self.schema)

    def _decode(self, values: pa.Array) -> pa.RecordBatch:
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
        parts = [self._of_kind(values.take(array_of(r)), int(k)) for r, k in zip(rows, kinds, strict=True)]
        back = np.argsort(np.concatenate(rows))
        return pa.concat_batches(parts).take(array_of(back))

    def _of_kind(self, values: pa.Array, kind: int) -> pa.RecordBatch:
        version = kind & ~HAS_WRITE_TIME
        if not 0 < version <= len(self._schemas):
            raise ValueError(f"schema version {version}")
        skip = 1 + (WRITE_TIME.size if kind & HAS_WRITE_TIME else 0)
        history = self._schemas[version - 1 :]
        written = history[0].names
        rows = self._rows if len(history) == 1 else _rows_of(history[0])
        split = rows.split(values, skip)
        columns = []
        for field in self.schema:
            if all(field.name in each.names for each in history):
                types = [each[field.name].dataType for each in history]
                columns.append(of_kind(split.column(written.index(field.name), field.type, types), field.type))
            else:
                columns.append(pa.nulls(len(values), field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _rows_of(schema: StructType) -> FlatColumns:
    return FlatColumns([field.dataType for field in schema.fields])


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
