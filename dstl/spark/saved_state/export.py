"""Rows of a state as JSON lines, Parquet, or plain rows for a table.

A row is ``{"key": {...}, "user_key": {...}, "value": {...}}``, so that no column of one hides a column of another;
``user_key`` is there only where the state has one. A change has ``change`` before them, and null for what it lacks.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StringType, StructField, StructType

from dstl.errors import Invalid
from dstl.spark.saved_state.reader import StateColumns, StateRow
from dstl.state.frames.row_writer import RowWriter

_ROWS = 10_000
"""Rows of a batch: what is held at once beside the tables."""

OnRows = Callable[[int], None]


async def plain_rows(rows: AsyncIterator[StateRow], columns: StateColumns) -> AsyncIterator[dict[str, Any]]:
    """Yield each row as plain data: dates and times in ISO form, decimals as text, bytes as hexadecimal digits."""
    async for batch in _batches(rows, columns):
        for row in batch.to_pylist():
            yield {part: _plain(value) for part, value in row.items()}


async def json_lines(
    rows: AsyncIterator[StateRow], columns: StateColumns, out: TextIO, on_rows: OnRows | None = None
) -> int:
    """Write each row as a line of JSON and return how many they were."""
    count = 0
    async for row in plain_rows(rows, columns):
        out.write(json.dumps(row, allow_nan=False) + "\n")
        count += 1
        if on_rows is not None and count % _ROWS == 0:
            on_rows(count)
    return count


async def write_parquet(
    rows: AsyncIterator[StateRow], columns: StateColumns, path: Path, on_rows: OnRows | None = None
) -> int:
    """Write the rows as a Parquet file with one struct column per part, and return how many they were.

    Raises:
        Invalid: The file cannot be written, or a part has no columns, which Parquet does not know.
    """
    schema = _writer(columns).schema
    count = 0
    try:
        with pq.ParquetWriter(path, schema) as writer:
            async for batch in _batches(rows, columns):
                writer.write_batch(batch)
                count += batch.num_rows
                if on_rows is not None:
                    on_rows(count)
    except (OSError, pa.ArrowException) as error:
        raise Invalid(f"{path} cannot be written: {error}") from error
    return count


def _writer(columns: StateColumns) -> RowWriter:
    """Return what builds batches with a struct column for each part of a row that has columns."""
    parts = {"key": columns.key, "user_key": columns.user_key, "value": columns.value}
    fields = [StructField(name, part) for name, part in parts.items() if part is not None and part.fields]
    if columns.has_change:
        fields.insert(0, StructField("change", StringType()))
    return RowWriter(StructType(fields), "state")


def _part(row: StateRow, name: str) -> Any:
    return None if name == "value" and row.change not in (None, "put") else getattr(row, name)


async def _batches(rows: AsyncIterator[StateRow], columns: StateColumns) -> AsyncIterator[pa.RecordBatch]:
    writer = _writer(columns)
    held: list[tuple[Any, ...]] = []
    async for row in rows:
        held.append(tuple(_part(row, name) for name in writer.schema.names))
        if len(held) >= _ROWS:
            yield writer.batch(held)
            held = []
    if held:
        yield writer.batch(held)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case bytes():
            return value.hex()
        case datetime() | date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return str(value)
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        case _:
            return value
