"""Adoption: the plain files of a checkpoint directory become entries of the index, where they are."""

from __future__ import annotations

from dstl.errors import CorruptData, Invalid
from dstl.files.namespace import OBJECTS, is_of_a_query
from dstl.store.base import ObjectStore
from handles.file_record import PLAIN, FileEntry
from handles.segment_handle import SegmentHandle


async def plain_entries(plain: ObjectStore) -> list[FileEntry]:
    """Return what stock Spark has written into a checkpoint directory: one listing.

    Nothing of it is ever changed or deleted: a query that has moved in can move out again, to where it was.

    Args:
        plain: The directory. Hidden files, as those of half-written ones, are passed over by every store.

    Raises:
        Invalid: There are files that nobody knows, so it is perhaps another directory than was meant; or objects are
            sealed here, which files of Spark's own cannot be.
    """
    entries = []
    async for info in plain.list(""):
        if info.name.startswith(f"{OBJECTS}/"):
            continue
        if not is_of_a_query(info.name):
            raise Invalid(
                f"{plain.location} holds {info.name}, which is not a file of a streaming query's checkpoint: give the "
                "query a directory of its own"
            )
        handle = SegmentHandle(PLAIN + info.name, info.size, 0)
        entries.append(FileEntry(info.name, info.size, int(info.modified * 1000), handle, "", 0))
    if entries:
        smallest = min(entries, key=lambda entry: entry.size)
        try:
            await plain.get(smallest.path)
        except CorruptData:
            raise Invalid(
                f"{plain.location} holds plain files of Spark's, which carry no seal, and sealing.key_file is set: "
                "a forged one would go unnoticed. Give the query another directory, or go on without a key"
            ) from None
    return entries
