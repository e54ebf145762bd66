"""Checks one stored object against the claims of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

import google_crc32c

from dstl.changelog.change_set import META_KEY_GROUP
from dstl.changelog.segment.index import SegmentIndex
from dstl.changelog.segment.reader import SegmentReader, verify_segment
from dstl.errors import CorruptData
from dstl.runtime import call_in_thread
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializedStateHandle, TableFile
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from materializer.bases.key_group_file import decode_key_group
from materializer.bases.table_directory import decode_index

_WHOLE = 16 << 20
"""A larger segment is read twice, in parts: for its checksum, and block by block."""
_WHOLE_BASE = 64 << 20
"""A larger base file is read twice, too: for its checksum, and key group by key group."""


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """A checkpoint's claim about a part of a segment.

    Attributes:
        log_id: The log.
        sqns: Change sets of the log that lie in it: half-open.
        key_groups: All that they may touch, inclusive: those that both the log and the segment are listed with.
    """

    log_id: str
    sqns: SequenceNumberRange
    key_groups: KeyGroupRange


async def check_segment(store: ObjectStore, handle: SegmentHandle, uses: Iterable[SegmentUse]) -> None:
    """Read every byte of a segment and compare it with its handle and its uses.

    Raises:
        CorruptData: It is not what the manifest says.
        ObjectNotFound: It is not there.
        Invalid: A newer version wrote it.
        Unavailable: Try again.
    """
    if handle.size <= _WHOLE:
        data = await _get(store, handle.name, handle.offset, handle.size)
        _check_crc(google_crc32c.value(data), handle.checksum)
        index = await call_in_thread(verify_segment, data, handle.name)
    else:
        await _check_stored_crc(store, handle.name, handle.offset, handle.size, handle.checksum)
        reader = SegmentReader(store, handle, max_bytes_in_memory=_WHOLE)
        index = await reader.index()
        async with aclosing(reader.read()) as changes:
            async for _ in changes:
                pass
    for use in uses:
        _check_use(index, use)


async def check_stray_segment(store: ObjectStore, name: str, size: int) -> None:
    """Read a segment that no checkpoint needs; only the segment itself says what it should be.

    Raises:
        CorruptData: It is damaged.
    """
    data = await _get(store, name, 0, size)
    await call_in_thread(verify_segment, data, name)


async def check_base(store: ObjectStore, handle: MaterializedStateHandle) -> list[int]:
    """Read every byte of a base file and decode the parts that the handle lists; of a table in files, its index.

    Returns:
        The entries of each part.

    Raises:
        CorruptData: It is not what the manifest says.
        ObjectNotFound: It is not there.
        Invalid: A newer version wrote it.
        Unavailable: Try again.
    """
    whole: bytes | None = None
    if handle.files or handle.size <= _WHOLE_BASE:
        whole = await _get(store, handle.name, 0, handle.size)
        _check_crc(google_crc32c.value(whole), handle.checksum)
    else:
        await _check_stored_crc(store, handle.name, 0, handle.size, handle.checksum)
    if handle.files:
        decode_index(whole or b"", handle.files, handle.name)
        return []
    entries = []
    for key_group, offset, length in handle.parts:
        if whole is None:
            part = memoryview(await _get(store, handle.name, offset, length))
        else:
            part = memoryview(whole)[offset : offset + length]
        entries.append(await call_in_thread(_count_entries, part, key_group, handle.name))
    return entries


async def check_table_file(store: ObjectStore, file: TableFile) -> None:
    """Read every byte of a table's file and compare it with what handles say.

    Raises:
        CorruptData: It is not what the manifest says.
        ObjectNotFound: It is not there.
        Unavailable: Try again.
    """
    await _check_stored_crc(store, file.name, 0, file.size, file.checksum)


def _count_entries(data: memoryview, key_group: int, name: str) -> int:
    return sum(page.num_rows for page in decode_key_group(data, key_group, name=name))


def _check_use(index: SegmentIndex, use: SegmentUse) -> None:
    held = sum(len(use.sqns.intersect(each) or ()) for each in index.sqn_ranges(use.log_id))
    if held != len(use.sqns):
        raise CorruptData(
            f"it holds {held} of the {len(use.sqns)} change sets [{use.sqns.from_sqn}, {use.sqns.to_sqn}) of log "
            f"{use.log_id}"
        )
    for log in index.logs:
        if log.log_id != use.log_id:
            continue
        for block in log.blocks.find_blocks(None, use.sqns):
            groups = (block.first_key_group, block.last_key_group)
            if block.first_key_group != META_KEY_GROUP and not all(g in use.key_groups for g in groups):
                raise CorruptData(
                    f"log {use.log_id} has changes of key groups {groups[0]}-{groups[1]} in it, outside "
                    f"{use.key_groups}: a restore of fewer key groups would miss them"
                )


async def _check_stored_crc(store: ObjectStore, name: str, start: int, size: int, expected: int) -> None:
    crc = 0
    for at in range(0, size, _WHOLE):
        crc = google_crc32c.extend(crc, await _get(store, name, start + at, min(_WHOLE, size - at)))
    _check_crc(crc, expected)


def check_size(info: ObjectInfo | None, size: int) -> None:
    """Refuse an object that the store's list has with another size; one that the list lacks may still be there.

    Raises:
        CorruptData: It has another size.
    """
    if info is not None and info.size != size:
        raise CorruptData(f"it has {info.size} bytes, and its handle says {size}")


def _check_crc(found: int, expected: int) -> None:
    if found != expected:
        raise CorruptData(f"its CRC-32C is {found:08x}, and its handle's {expected:08x}")


async def _get(store: ObjectStore, name: str, start: int, size: int) -> bytes:
    data = await store.get(name, ByteRange(start, start + size))
    if len(data) != size:
        raise CorruptData(f"it is truncated: {len(data)} of {size} bytes at {start}")
    return data
