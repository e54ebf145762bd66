"""Columns over the protocol: what a TaskManager answers, and that it takes nothing else."""

from __future__ import annotations

import pyarrow as pa
import pytest

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.errors import Invalid
from dstl.rpc.messages import KEY_COLUMNS, VALUE_COLUMN, FetchValues, read_columns, write_columns
from dstl.taskmanager.reads import TableSource
from materializer.tables import HeapStateTable


def request(key_groups: list[int], keys: list[bytes]) -> memoryview:
    return write_columns(KEY_COLUMNS, [pa.array(key_groups, pa.uint16()), pa.array(keys, pa.binary())])


def test_values_come_in_the_order_of_the_keys_and_are_null_where_there_is_none() -> None:
    table = HeapStateTable()
    rows = [(3, 7, OP_PUT, b"a", b"", b"one"), (3, 7, OP_PUT, b"b", b"", b""), (4, 8, OP_PUT, b"a", b"", b"other")]
    columns = [
        pa.array(list(column), field.type) for column, field in zip(zip(*rows, strict=True), CHANGE_SCHEMA, strict=True)
    ]
    table.apply(pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA))

    def answer(key_groups: list[int], keys: list[bytes]) -> list[bytes | None]:
        reply = TableSource(table).answer(FetchValues("op", 1, 7, request(key_groups, keys)))
        return read_columns(memoryview(reply.data), VALUE_COLUMN)[0].to_pylist()

    assert answer([3, 3, 4, 3], [b"b", b"a", b"a", b"x"]) == [b"", b"one", None, None]
    assert answer([], []) == []


def test_what_is_no_request_is_refused() -> None:
    whole = request([1, 2], [b"a", b"bc"])
    null = write_columns(VALUE_COLUMN, [pa.array([None], pa.binary())])
    with pytest.raises(Invalid, match="columns"):
        read_columns(null, KEY_COLUMNS)
    with pytest.raises(Invalid, match="null"):
        read_columns(
            write_columns(KEY_COLUMNS, [pa.array([1], pa.uint16()), pa.array([None], pa.binary())]), KEY_COLUMNS
        )
    for size in range(len(whole)):
        try:
            found = read_columns(whole[:size], KEY_COLUMNS)
        except Invalid:
            continue
        # Only the end-of-stream mark may be missing.
        assert [column.to_pylist() for column in found] == [[1, 2], [b"a", b"bc"]]
