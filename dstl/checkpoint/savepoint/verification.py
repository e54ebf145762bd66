"""Reading a savepoint back whole: every byte of every object, before anybody needs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import google_crc32c

from dstl.checkpoint.savepoint.creation import OnProgress
from dstl.checkpoint.savepoint.format import Savepoint, SavepointFile, check_savepoint_name
from dstl.checkpoint.savepoint.objects import SavepointObjects
from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from materializer.bases.key_group_file import decode_key_group

__all__ = ["Verification", "verify_savepoint"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check of every byte of a savepoint found.

    Attributes:
        savepoint: The descriptor.
        entries: Entries that were decoded.
        bytes: Bytes that were read.
        problems: One message per damaged or missing object; empty where all is well.
    """

    savepoint: Savepoint
    entries: int
    bytes: int
    problems: tuple[str, ...]


async def verify_savepoint(
    store: ObjectStore, runtime: Runtime, name: str, *, on_progress: OnProgress | None = None
) -> Verification:
    """Read and decode every byte of a savepoint, and report every object that is not sound.

    Raises:
        MissingState: There is no such savepoint.
        CorruptData: Its descriptor is damaged.
        Invalid: A newer version wrote it.
    """
    objects = SavepointObjects(store, runtime)
    savepoint = await objects.descriptor(check_savepoint_name(name))
    problems: list[str] = []
    entries = read = done = 0
    for file in savepoint.files:
        try:
            data = await objects.get(savepoint.object_name(file))
            read += len(data)
            entries += await asyncio.to_thread(_verify_file, savepoint, file, data, store.location)
        except MissingState:
            problems.append(
                f"savepoint {name!r} in {store.location}: {savepoint.object_name(file)} is not there; restore it from "
                "a replica, or use another savepoint"
            )
        except DstlError as error:
            problems.append(str(error))
        done += len(file.parts)
        if on_progress is not None:
            on_progress(done, len(savepoint.operators) * savepoint.max_parallelism)
    return Verification(savepoint, entries, read, tuple(problems))


def _verify_file(savepoint: Savepoint, file: SavepointFile, data: bytes, where: str) -> int:
    """Check every byte of one base file and return its entries.

    Raises:
        CorruptData: Names the savepoint, the object and the next step.
        Invalid: A newer version wrote it.
    """
    label = f"savepoint {savepoint.name!r} in {where}: {savepoint.object_name(file)}"
    step = "restore that object from a replica, or use another savepoint"
    if len(data) != file.size or google_crc32c.value(data) != file.checksum:
        raise CorruptData(
            f"{label} is damaged: {len(data)} bytes that are not the {file.size} that were written; {step}"
        )
    entries = 0
    for group, offset, length, expected in file.parts:
        part = memoryview(data)[offset : offset + length]
        found = sum(page.num_rows for page in decode_key_group(part, group, name=label))
        if found != expected:
            raise CorruptData(f"{label} is damaged: key group {group} has {found} entries, not {expected}; {step}")
        entries += found
    return entries
