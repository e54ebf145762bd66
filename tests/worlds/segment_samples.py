"""Change sets for the tests of the segment format: drawn at random, or covering every feature."""

import random
from collections.abc import Iterator

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR, OP_DELETE, OP_PUT, ChangeSet
from dstl.changelog.segment.reader import decode_segment

Row = tuple[int, int, int, bytes, bytes, bytes]
Key = tuple[str, int, int]


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in batch.columns), strict=True))


def change_set(rows: list[Row]) -> ChangeSet:
    changes = ChangeSet()
    for row in rows:  # one by one: small batches are joined when they are encoded
        changes.append_batch(batch_of([row]))
    return changes


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    columns = [
        pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), CHANGE_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def expected(sets: list[tuple[str, int, ChangeSet]]) -> dict[Key, list[Row]]:
    """Return the rows that a reader must find: by log, number and key group, in the order of their appends."""
    found: dict[Key, list[Row]] = {}
    for log_id, sqn, changes in sets:
        for batch in changes.batches():
            for row in rows_of(batch):
                found.setdefault((log_id, sqn, row[0]), []).append(row)
    return found


def collected(changes: Iterator[tuple[str, int, int, pa.RecordBatch]]) -> dict[Key, list[Row]]:
    found: dict[Key, list[Row]] = {}
    for log_id, sqn, key_group, batch in changes:
        assert batch.schema == CHANGE_SCHEMA
        assert set(batch.column(0).to_pylist()) == {key_group}
        found.setdefault((log_id, sqn, key_group), []).extend(rows_of(batch))
    return found


def decoded(data: bytes) -> dict[Key, list[Row]]:
    return collected(decode_segment(data, "test"))


def random_rows(rng: random.Random, count: int, key_groups: int = 8) -> list[Row]:
    rows: list[Row] = []
    for _ in range(count):
        op = rng.choice((OP_PUT, OP_PUT, OP_PUT, OP_DELETE, OP_CLEAR))
        value = rng.randbytes(rng.choice((0, 1, 8, 40))) if op == OP_PUT else b""
        rows.append((rng.randrange(key_groups), rng.randrange(3), op, rng.randbytes(rng.randrange(9)), b"", value))
    return rows


def feature_sets() -> list[tuple[str, int, ChangeSet]]:
    """Small, and with everything: metadata, gaps, adjacent numbers, all ops, empty and long values, shared blocks."""
    first = change_set(
        [(5, 1, OP_PUT, b"k1", b"", b"v1"), (2, 1, OP_PUT, b"k2", b"u", b""), (5, 1, OP_DELETE, b"k1", b"", b"")]
    )
    first.append_metadata(b'{"state":1}')
    second = change_set([(2, 2, OP_CLEAR, b"k2", b"", b""), (127, 1, OP_PUT, b"long", b"", b"x" * 300)])
    third = change_set([(5, 65535, OP_PUT, b"", b"", bytes(range(256)))])
    other = ChangeSet()
    other.append_batch(batch_of([(group, 7, OP_PUT, group.to_bytes(8, "big"), b"", b"same") for group in (3, 1, 2, 1)]))
    other.append_batch(batch_of([(1, 7, OP_PUT, b"after", b"", b"the batch")]))
    meta = ChangeSet()
    meta.append_metadata(b"only metadata")
    return [
        ("log-b", 0, other),
        ("log-a", 3, first),
        ("log-a", 4, second),
        ("log-a", 9, third),
        ("log-c", 1 << 40, meta),
    ]
