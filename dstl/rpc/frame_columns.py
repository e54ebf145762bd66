"""Columns as payloads of the protocol: one Arrow batch, checked before anybody reads a value."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dstl.errors import Invalid

__all__ = ["ENTRY_COLUMNS", "KEY_COLUMNS", "VALUE_COLUMN", "read_columns", "write_batch", "write_columns"]

KEY_COLUMNS = pa.schema(
    [pa.field("key_group", pa.uint16(), nullable=False), pa.field("key", pa.binary(), nullable=False)]
)
"""A request for the values of keys."""

VALUE_COLUMN = pa.schema([pa.field("value", pa.binary())])
"""Its answer, in the keys' order; null where there is no value."""


ENTRY_COLUMNS = pa.schema([*KEY_COLUMNS, pa.field("value", pa.binary(), nullable=False)])
"""Entries of a state that nobody has named."""


_OPTIONS = pa.ipc.IpcWriteOptions()
"""Arrow's own; where none are given it looks for each stream into the environment."""


def write_columns(schema: pa.Schema, columns: Sequence[pa.Array]) -> memoryview:
    """Return columns as an Arrow stream of one batch."""
    return write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))


def write_batch(batch: pa.RecordBatch) -> memoryview:
    """Return a batch as an Arrow stream of it alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def read_columns(payload: memoryview, schema: pa.Schema) -> list[pa.Array]:
    """Return the columns of such a stream; they lie in the payload.

    Raises:
        Invalid: Other columns, more or less than one batch, or bytes that are no Arrow stream.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
            if not reader.schema.equals(schema):
                raise Invalid(f"a payload has the columns {reader.schema.names} instead of {schema.names}")
            batch = reader.read_next_batch()
            batch.validate(full=True)
    except (pa.ArrowException, StopIteration, OSError, UnicodeDecodeError) as error:
        raise Invalid(f"a payload is no stream of {', '.join(schema.names)}: {error}") from None
    columns: list[pa.Array] = batch.columns
    if any(column.null_count for column, field in zip(columns, schema, strict=True) if not field.nullable):
        raise Invalid("a payload has a null where none can be")
    return columns
