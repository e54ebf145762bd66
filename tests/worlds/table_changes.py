"""Change records written by hand, and the content of a snapshot as a dictionary: what table tests are made of."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR, OP_DELETE, OP_PUT
from materializer.tables.base import TableSnapshot

Change = tuple[int, int, int, bytes, bytes, bytes]
"""Key group, state, operation, key, user key, value."""


def changes(*rows: Change) -> pa.RecordBatch:
    """Return change records as the batch that a table applies."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(CHANGE_SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, CHANGE_SCHEMA, strict=True)],
        schema=CHANGE_SCHEMA,
    )


def content(snapshot: TableSnapshot, key_groups: Sequence[int]) -> dict[tuple[int, int, bytes, bytes], bytes]:
    """Return all of a snapshot by (key group, state, key, user key); fails where an entry comes twice."""
    found: dict[tuple[int, int, bytes, bytes], bytes] = {}
    for key_group in key_groups:
        for page in snapshot.entries(key_group):
            for state, key, user_key, value in zip(*page.to_pydict().values(), strict=True):
                assert (key_group, state, key, user_key) not in found
                found[key_group, state, key, user_key] = value
    return found


def put(key_group: int, state: int, key: bytes, user_key: bytes, value: bytes) -> Change:
    """Return a put."""
    return (key_group, state, OP_PUT, key, user_key, value)


def delete(key_group: int, state: int, key: bytes, user_key: bytes = b"") -> Change:
    """Return a delete."""
    return (key_group, state, OP_DELETE, key, user_key, b"")


def clear(key_group: int, state: int, key: bytes) -> Change:
    """Return a clear."""
    return (key_group, state, OP_CLEAR, key, b"", b"")


AWKWARD = [
    b"",
    b"\0",
    b"\0\0",
    b"\0\xff",
    b"\0\x01",
    b"a",
    b"a\0",
    b"a\0b",
    b"a\0\0",
    b"ab",
    b"b",
    b"\xff",
    b"\xff\xff",
    b"\xff\0",
]
"""Keys that an encoding could confuse, or order wrongly."""
