"""Changes of point states as records, made and sent a column at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_DELETE, OP_PUT
from dstl.state.codec.column_buffers import empty_values

__all__ = ["KeyGroups", "change_records", "deletions", "puts", "send_parts"]

KeyGroups = npt.NDArray[np.uint16]
"""The key group of each key."""


def change_records(
    state: int, ops: npt.NDArray[np.uint8], key_groups: KeyGroups, keys: pa.Array, values: pa.Array
) -> pa.RecordBatch:
    """Return one change for each key, as a batch of ``CHANGE_SCHEMA``; a deletion's value is empty."""
    columns = [
        pa.array(key_groups),
        pa.array(np.full(len(keys), state, np.uint16)),
        pa.array(ops),
        keys,
        empty_values(len(keys)),
        values,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def puts(state: int, key_groups: KeyGroups, keys: pa.Array, values: pa.Array) -> pa.RecordBatch:
    """Return changes that put a value under each key."""
    return change_records(state, np.full(len(keys), OP_PUT, np.uint8), key_groups, keys, values)


def deletions(state: int, key_groups: KeyGroups, keys: pa.Array) -> pa.RecordBatch:
    """Return changes that delete each key."""
    ops = np.full(len(keys), OP_DELETE, np.uint8)
    return change_records(state, ops, key_groups, keys, empty_values(len(keys)))


def send_parts(changes: pa.RecordBatch, part_bytes: int, send: Callable[[pa.RecordBatch], None]) -> None:
    """Send changes in parts of about ``part_bytes``; none where there is no change."""
    parts = max(1, -(-changes.nbytes // part_bytes))
    size = -(-changes.num_rows // parts)
    for start in range(0, changes.num_rows, max(1, size)):
        send(changes.slice(start, size))
