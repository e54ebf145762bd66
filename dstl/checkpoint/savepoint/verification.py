"""Verification of a savepoint: every byte of every object is read and decoded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from dstl.checkpoint.savepoint.creation import OnProgress
from dstl.checkpoint.savepoint.format import Savepoint, check_savepoint_name
from dstl.checkpoint.savepoint.objects import SavepointObjects
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.checkpoint.upkeep.object_checks import check_base, check_size
from dstl.errors import CorruptData, DstlError, MissingState
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.patience import Patience

__all__ = ["Verification", "verify_savepoint"]

_STEP = "restore it from a replica, or use another savepoint"


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of reading a savepoint whole.

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
    listed = {info.name: info for info in await objects.list(f"{name}/")}
    checkpoint = savepoint_as_checkpoint(savepoint)
    problems: list[str] = []
    entries = read = done = 0
    for file, handle in zip(savepoint.files, checkpoint.materialized, strict=True):
        label = f"savepoint {name!r} in {store.location}: {handle.name}"
        try:
            check_size(listed.get(handle.name), handle.size)
            held = await Patience(runtime).read(partial(check_base, store, handle))
            read += handle.size
            entries += sum(held)
            for (group, _, _, expected), found in zip(file.parts, held, strict=True):
                if found != expected:
                    raise CorruptData(f"key group {group} has {found} entries, not {expected}")
        except MissingState:
            problems.append(f"{label} is not there; {_STEP}")
        except CorruptData as error:
            problems.append(f"{label} is damaged: {error}; {_STEP}")
        except DstlError as error:
            problems.append(f"{label}: {error}")
        done += len(file.parts)
        if on_progress is not None:
            on_progress(done, len(savepoint.operators) * savepoint.max_parallelism)
    return Verification(savepoint, entries, read, tuple(problems))
