"""What the replay of a log holds ahead is bounded by what it is, not by what it was packed to."""

import asyncio
import random
import tracemalloc
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path

import google_crc32c
import pyarrow as pa

from dstl.changelog.change_set import OP_PUT, ChangeSet
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.runtime import system_runtime
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializedStateHandle
from materializer.bases.key_group_file import encode_key_group
from materializer.restore.log_replay import decoding_turn, replay, replay_steps
from materializer.tables import HeapStateTable, RocksDBStateTable
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.manifest_samples import checkpoint
from worlds.restored import restore_tables
from worlds.segment_samples import batch_of
from worlds.table_changes import changes, put

SEGMENTS, ROWS, VALUE = 12, 24, 1 << 20


async def stored_log(store: MemoryStore, segments: Sequence[ChangeSet]) -> CompletedCheckpoint:
    entries = []
    for number, written in enumerate(segments):
        data = encode_segment([("log", number, written)], writer_id="writer")
        await store.put(f"00/q/w/{number}", data)
        entries.append(
            SegmentEntry(
                segment=(f"00/q/w/{number}", len(data), segment_checksum(data), 0),
                first_key_group=0,
                last_key_group=0,
                ranges=((0, number, number + 1),),
                checkpoint=number + 1,
            )
        )
    return checkpoint(
        len(segments),
        0,
        max_parallelism=1,
        operators=(OperatorEntry(uid="op", parallelism=1, key_types="string"),),
        logs=(LogEntry(log_id="log", operator="op", first_key_group=0, last_key_group=0),),
        segments=tuple(entries),
    )


def change_set(values: Iterable[bytes]) -> ChangeSet:
    made = ChangeSet()
    for row, value in enumerate(values):
        made.append_batch(batch_of([(0, 1, OP_PUT, b"%08d" % row, b"", value)]))
    return made


async def test_segments_that_are_packed_to_kilobytes_do_not_fill_the_memory_before_their_turn() -> None:
    store = MemoryStore()
    checkpoint = await stored_log(store, [change_set([bytes([n]) * VALUE] * ROWS) for n in range(SEGMENTS)])
    assert sum(entry.handle.size for entry in checkpoint.segments) < 1 << 20
    owned = KeyGroupRange(0, 0)
    seen: list[str] = []
    most = 0
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        async for step, found in replay(
            replay_steps(checkpoint, owned, {}), store, owned, system_runtime(), decoding_turn()
        ):
            # A slow table: whoever is ahead has the time to load all that it may.
            await asyncio.sleep(0.1)
            held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
            most = max(most, held)
            assert {batch.column("value")[0].as_py()[:1] for _, batch, _ in found} == {bytes([len(seen)])}
            seen.append(step.entry.segment[0])
    finally:
        tracemalloc.stop()
    assert seen == [f"00/q/w/{number}" for number in range(SEGMENTS)]
    assert most < SEGMENTS * ROWS * VALUE // 2, f"{most >> 20} MB were held"


async def test_a_read_that_is_repeated_counts_its_bytes_once(seed: int) -> None:
    """The second request of a segment fails once, when what the first one brought is decoded and counted."""
    inner, rng = MemoryStore(), random.Random(seed)
    large = change_set([rng.randbytes(VALUE) for _ in range(12)])
    checkpoint = await stored_log(inner, [change_set([b"small"]), large])
    # The index of the second segment is its first request.
    store = FaultyStore(inner, [FaultRule(Fault.UNAVAILABLE, "get", nth=(3,), only="/1")])
    owned = KeyGroupRange(0, 0)
    async with aclosing(
        replay(replay_steps(checkpoint, owned, {}), store, owned, system_runtime(), decoding_turn())
    ) as segments:
        most = 0
        for _ in range(1000):
            await asyncio.sleep(0.02)
            most = max(most, segments.taken)
            if store.fired and segments.taken == most >= large.nbytes - VALUE:
                break
        assert len(store.fired) == 1
        assert large.nbytes - VALUE < most < large.nbytes + VALUE
        assert [sum(batch.num_rows for _, batch, _ in found) async for _, found in segments] == [1, 12]


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
