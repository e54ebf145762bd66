"""The heap table counts bytes without looking at what it replaces, where values have one length; it must stay exact."""

from __future__ import annotations

import random

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_DELETE, OP_PUT
from materializer.tables import HeapStateTable
from materializer.tables.heap import HeapTableSnapshot
from worlds.table_changes import content

Row = tuple[int, int, int, bytes, bytes, bytes]


def changes(rows: list[Row]) -> pa.RecordBatch:
    columns = [
        pa.array(list(column), field.type) for column, field in zip(zip(*rows, strict=True), CHANGE_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)


def held(table: HeapStateTable) -> dict[tuple[int, bytes, bytes], bytes]:
    return {(group, each.key, each.user_key): each.value for group in (0, 1) for each in table.scan(0, group)}


def test_the_size_is_exact_while_lengths_change_and_snapshots_come_and_go(rng: random.Random) -> None:
    for _ in range(30):
        table = HeapStateTable()
        model: dict[tuple[int, bytes, bytes], bytes] = {}
        snapshots: list[tuple[HeapTableSnapshot, dict[tuple[int, bytes, bytes], bytes]]] = []
        width = rng.randrange(4)
        for _ in range(12):
            if rng.random() < 0.2:
                width = rng.randrange(4)
            mixed, deletions = rng.random() < 0.2, rng.choice((0.1, 0.1, 0.1, 1.0))
            rows: list[Row] = []
            for _ in range(rng.randrange(1, 12)):
                group, key = rng.randrange(2), bytes(rng.randrange(1, 4) * [rng.randrange(3)])
                op = OP_DELETE if rng.random() < deletions else OP_PUT
                user_key = b"u" if rng.random() < 0.1 else b""
                value = b"" if op == OP_DELETE else rng.randbytes(rng.randrange(5) if mixed else width)
                rows.append((group, 0, op, key, user_key, value))
            rows.sort(key=lambda row: row[0])
            table.apply(changes(rows))
            for group, _, op, key, user_key, value in rows:
                if op == OP_PUT:
                    model[group, key, user_key] = value
                else:
                    model.pop((group, key, user_key), None)
            size = table.size()
            assert size.entries == len(model)
            assert size.bytes == sum(len(k) + len(u) + len(v) for (_, k, u), v in model.items())
            assert held(table) == model
            if rng.random() < 0.3:
                snapshots.append((table.snapshot(), dict(model)))
            elif snapshots and rng.random() < 0.5:
                snapshots.pop()[0].close()
        for snapshot, shown in snapshots:
            assert {(g, k, u): v for (g, _, k, u), v in content(snapshot, (0, 1)).items()} == shown
            snapshot.close()
