"""Rows of the operators with clocks, as Spark delivers them: with event times, and a mark of the partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from tests.simulation.clocked_model import event_time_ms
from tests.simulation.spark import key_group_of

_COLUMNS = pa.schema(
    [
        ("key", pa.binary()),
        ("operation", pa.int32()),
        ("at", pa.timestamp("us", "UTC")),
        (KEY_GROUP_COLUMN, pa.int32()),
    ]
)


def clocked_rows(operations: Mapping[bytes, Sequence[int]], max_parallelism: int) -> pa.RecordBatch:
    """Return operations by key as rows of the operator's input."""
    rows = [
        {
            "key": key,
            "operation": operation,
            "at": event_time_ms(operation) * 1000,
            KEY_GROUP_COLUMN: key_group_of(key, max_parallelism),
        }
        for key in operations
        for operation in operations[key]
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_COLUMNS)


def mark_of(partition: int) -> pa.RecordBatch:
    """Return the row that tells a task without rows its partition."""
    return pa.RecordBatch.from_pylist([{KEY_GROUP_COLUMN: -1 - partition}], schema=_COLUMNS)
