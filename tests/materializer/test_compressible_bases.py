"""What a restore holds is bounded by what it is, not by what it was packed to."""

import tracemalloc
from pathlib import Path

import google_crc32c

from dstl.runtime import system_runtime
from dstl.store.memory import MemoryStore
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializedStateHandle
from materializer.bases.key_group_file import encode_key_group
from materializer.restore.restore import restore_tables
from materializer.tables import HeapStateTable, RocksDBStateTable
from worlds.manifest_samples import checkpoint
from worlds.table_changes import changes, put

GROUPS, ROWS, VALUE = 8, 40, 1 << 20


async def test_a_base_that_is_packed_to_kilobytes_does_not_multiply_a_restores_memory(tmp_path: Path) -> None:
    """Before, 94 KB took a restore into RocksDB from 362 to 3,423 MB: parts were decoded whole, and ahead."""
    store, data, parts = MemoryStore(), b"", []
    for group in range(GROUPS):
        table = HeapStateTable()
        table.apply(changes(*(put(group, 1, b"%08d" % n, b"", bytes(VALUE)) for n in range(ROWS))))
        part = encode_key_group(table.snapshot(), group).data
        parts.append((group, len(data), len(part)))
        data += part
    assert len(data) < 1 << 20
    await store.put("00/q/w/base", data)
    base = MaterializedStateHandle(
        operator="op",
        materialization_id=1,
        checkpoint=1,
        name="00/q/w/base",
        size=len(data),
        checksum=google_crc32c.value(data),
        parts=tuple(parts),
    )
    tracemalloc.start()
    try:
        restored = await restore_tables(
            checkpoint(1, 0, max_parallelism=GROUPS, materialized=(base,)),
            store,
            KeyGroupRange(0, GROUPS - 1),
            lambda operator: RocksDBStateTable(tmp_path / operator),
            system_runtime(),
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    table = restored.tables["op"]
    assert table.size().entries == GROUPS * ROWS
    assert table.get_many(1, [5], [b"%08d" % 7]) == [bytes(VALUE)]
    for each in restored.tables.values():
        each.close()
    assert peak < GROUPS * ROWS * VALUE // 2, f"{peak >> 20} MB were held"
