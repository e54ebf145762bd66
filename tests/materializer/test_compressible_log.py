"""What the replay of a log holds ahead is bounded by what it is, not by what it was packed to."""

import asyncio
import tracemalloc

import pyarrow as pa

from dstl.changelog.change_set import OP_PUT, ChangeSet
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.runtime import system_runtime
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from handles.key_group import KeyGroupRange
from materializer.restore.log_replay import replay_steps, replayed

SEGMENTS, ROWS, VALUE = 12, 24, 1 << 20


async def test_segments_that_are_packed_to_kilobytes_do_not_fill_the_memory_before_their_turn() -> None:
    store, entries, packed = MemoryStore(), [], 0
    for number in range(SEGMENTS):
        changes = ChangeSet()
        for row in range(ROWS):
            changes.append(0, 1, OP_PUT, b"%08d" % row, b"", bytes([number]) * VALUE)
        data = encode_segment([("log", number, changes)], writer_id="writer")
        packed += len(data)
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
    assert packed < 1 << 20
    checkpoint = CompletedCheckpoint(
        checkpoint_id=SEGMENTS,
        batch_id=0,
        query_id="q",
        run_id="r",
        max_parallelism=1,
        created_at=0.0,
        operators=(OperatorEntry(uid="op", parallelism=1, key_types="string"),),
        logs=(LogEntry(log_id="log", operator="op", first_key_group=0, last_key_group=0),),
        segments=tuple(entries),
    )
    owned, seen, most = KeyGroupRange(0, 0), [], 0
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        async for step, found in replayed(replay_steps(checkpoint, owned, {}), store, owned, system_runtime()):
            # A slow table: whoever is ahead has the time to load all that it may.
            await asyncio.sleep(0.1)
            held = tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes() - before
            most = max(most, held)
            assert {batch.column("value")[0].as_py()[:1] for *_, batch in found} == {bytes([len(seen)])}
            seen.append(step.entry.segment[0])
    finally:
        tracemalloc.stop()
    assert seen == [f"00/q/w/{number}" for number in range(SEGMENTS)]
    assert most < SEGMENTS * ROWS * VALUE // 2, f"{most >> 20} MB were held"
