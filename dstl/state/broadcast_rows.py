"""Rows of a broadcast stream as a task gets them: all of a batch, in an order that is the same in every partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.state.frames.frame_reader import frame_of
from dstl.state.frames.row_reader import python_values, rows_of
from dstl.state.keyed_batch import FrameLimits, Style

__all__ = ["BroadcastRows", "BroadcastStream", "rows_of_streams"]

_ROWS = 1 << 14


@dataclass(frozen=True, slots=True)
class BroadcastStream:
    """A stream that every partition of an operator gets whole.

    Attributes:
        name: As the user has named it.
        column: The input's helper column that carries its rows: a list of one struct, null in all other rows.
        schema: Its columns.
    """

    name: str
    column: str
    schema: StructType


@dataclass(frozen=True, slots=True)
class BroadcastRows:
    """The rows of one stream in one batch.

    Attributes:
        stream: Whose they are.
        rows: All of them, in their order.
    """

    stream: BroadcastStream
    rows: pa.Table

    def take(self, style: Style, limits: FrameLimits) -> Iterator[Any]:
        """Iterate over them as a processor of this style takes them: ``Row`` by ``Row``, or in data frames."""
        schema = self.stream.schema
        for batch in self.rows.combine_chunks().to_batches(max_chunksize=None if style == "pandas" else _ROWS):
            columns, count = batch.columns, batch.num_rows
            if style == "pandas":
                frame, most = frame_of(schema, columns, count), limits.rows_per_frame(columns, count)
                yield from (frame(at, min(at + most, count)) for at in range(0, count, most))
            else:
                yield from rows_of(tuple(schema.names), [python_values(column) for column in columns])


def rows_of_streams(marked: Sequence[pa.RecordBatch], streams: Sequence[BroadcastStream]) -> list[BroadcastRows]:
    """Return the rows of those streams that have any, in the order of the streams.

    A shuffle delivers the rows of several tasks in any order, and of each partition in another. So they are sorted by
    their columns, from the first to the last: equal rows cannot be told from each other.

    Args:
        marked: Rows that were sent to this partition by number, not by key.
        streams: The operator's.
    """
    found = []
    for stream in streams:
        parts = [batch.column(stream.column) for batch in marked]
        structs = pa.chunked_array([pc.list_flatten(part) for part in parts]) if parts else None
        if structs is not None and len(structs):
            columns = structs.combine_chunks().flatten()
            table = pa.Table.from_arrays(columns, names=[str(at) for at in range(len(columns))])
            found.append(BroadcastRows(stream, _sort(table).rename_columns(stream.schema.names)))
    return found


def _sort(table: pa.Table) -> pa.Table:
    """Return the rows by the values of their columns; what Arrow cannot compare goes by its text."""
    keys = {str(at): column if _sortable(column.type) else _texts(column) for at, column in enumerate(table.columns)}
    # Zeros of either sign are equal to each other, and so are all NaNs, but they are other values.
    floats = [_texts(column) for column in table.columns if pa.types.is_floating(column.type)]
    keys.update((f"text {at}", texts) for at, texts in enumerate(floats))
    order = pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys])
    return table.take(order)


def _sortable(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
        or types.is_string(kind)
        or types.is_binary(kind)
        or types.is_decimal(kind)
    )


def _texts(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([repr(value) for value in column.to_pylist()], pa.string())
