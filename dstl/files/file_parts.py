"""Files as changes of a log: one change set a file, one change for each part of it (``handles/FORMAT.md``). Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.rpc.codec import Payload
from handles.key_group import KeyGroupRange
from handles.segment_handle import SequenceNumber

PART = 4 << 20
"""Bytes of a part, of which each is a block of its own: as many as a JVM asks for at once, so that nothing is fetched
that nobody reads, and as many as a block of the log has at most."""

_KEY_GROUPS = 32_000
"""Of the 32,768 that there can be: more parts in a row than a segment has, so that none shares another's group."""
ALL_KEY_GROUPS = KeyGroupRange(0, _KEY_GROUPS - 1)


def file_batch(path: str, content: Sequence[Payload], sqn: SequenceNumber) -> pa.RecordBatch:
    """Return a file as changes: one for each part, in key groups of their own, so that each is a block of its own."""
    whole = content[0] if len(content) == 1 else b"".join(content)
    starts = [*range(0, len(whole), PART)] or [0]
    count = len(starts)
    # Not pa.array() of memoryviews: pyarrow never gives back what it has made an array of.
    places = pa.py_buffer(array("i", [*starts, len(whole)]))
    parts = pa.Array.from_buffers(pa.binary(), count, [None, places, pa.py_buffer(whole)])
    columns = (
        pa.array([(sqn + i) % _KEY_GROUPS for i in range(count)], pa.uint16()),
        pa.array([0] * count, pa.uint16()),
        pa.array([OP_PUT] * count, pa.uint8()),
        pa.array([path.encode()] * count, pa.binary()),
        pa.array([i.to_bytes(4, "big") for i in range(count)], pa.binary()),
        parts,
    )
    return pa.RecordBatch.from_arrays(list(columns), schema=CHANGE_SCHEMA)


def part_count(size: int) -> int:
    """Return the number of a file's parts: an empty file has one."""
    return max(1, -(-size // PART))


def key_groups_of(sqn: SequenceNumber, first: int, count: int) -> list[KeyGroupRange]:
    """Return the key groups of some parts of a change set's file, in the order of the parts."""
    start = (sqn + first) % _KEY_GROUPS
    ranges = [KeyGroupRange(start, min(start + count, _KEY_GROUPS) - 1)]
    if start + count > _KEY_GROUPS:
        ranges.append(KeyGroupRange(0, start + count - _KEY_GROUPS - 1))
    return ranges


def parts_of(batches: Iterable[pa.RecordBatch]) -> dict[int, pa.BinaryScalar]:
    """Return the parts of a file by their numbers, not copied, in whatever order its changes come."""
    return {
        int.from_bytes(user_key, "big"): value
        for batch in batches
        for user_key, value in zip(batch.column(4).to_pylist(), batch.column(5), strict=True)
    }


def cut(parts: dict[int, pa.BinaryScalar], offset: int, stop: int) -> bytes:
    """Return the bytes ``[offset, stop)`` of a file out of its parts."""
    found = []
    for number in range(offset // PART, part_count(stop)):
        start = number * PART
        found.append(memoryview(parts[number].as_buffer())[max(0, offset - start) : stop - start])
    return b"".join(found)
