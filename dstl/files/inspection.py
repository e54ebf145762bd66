"""Looks into a checkpoint directory without a query: lists it, reads every byte, exports it, rolls it back."""

from __future__ import annotations

import io
import json
import logging
import zipfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.errors import CorruptData, Invalid, MissingState
from dstl.files.directory import Directory
from dstl.files.forking import opened_directory
from dstl.files.index import HELD, FileIndex, file_steps
from dstl.files.namespace import StateFile, is_of_a_backend, location_of, plain_location_of
from dstl.files.origins import OpenStore, Origins
from dstl.files.reader import FileReader
from dstl.files.rules import is_ahead
from dstl.runtime import Runtime, closed_after
from dstl.store.base import ObjectStore
from handles.file_record import FILES_OWNER, FileEntry, barrier_batch, foreign_object

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
"""Of a snapshot's list of files: more than RocksDB ever keeps open, and little for a process."""
_SHARED = (("sstFiles", "dfsSstFileName", "SSTs"), ("logFiles", "dfsLogFileName", "logs"))
"""Where a snapshot's list has files that it shares with others, how it calls them, and where they lie."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """A checkpoint directory at one moment.

    Attributes:
        entries: Its committed files, by path.
        reader: Reads them.
        origins: The locations elsewhere that they may lie in.
        look: Reads the entries as they are now: a query that runs lets go of old files.
    """

    entries: Mapping[str, FileEntry]
    reader: FileReader
    origins: Origins
    look: Callable[[], Awaitable[Mapping[str, FileEntry]]]

    @property
    def elsewhere(self) -> dict[str, bool]:
        """The locations of other directories that its records name, and whether they are opened."""
        places = (foreign_object(entry.segment.name) for entry in self.entries.values())
        return {place: self.origins.allows(place) for place in sorted({each[0] for each in places if each is not None})}

    @property
    def batches(self) -> list[int]:
        """The committed batches whose commit is there, ascending."""
        found = (barrier_batch(path, "commits") for path in self.entries)
        return sorted(batch for batch in found if batch is not None)


@asynccontextmanager
async def opened_files(
    root: str, runtime: Runtime, open_store: OpenStore, also: Collection[str] = ()
) -> AsyncIterator[CheckpointFiles]:
    """Read the index of a directory; takes nothing over.

    Args:
        root: The directory.
        runtime: Clock and jitter.
        open_store: Opens a location.
        also: Directories elsewhere whose objects it may use; see :class:`~dstl.files.origins.Origins`.

    Raises:
        MissingState: No query has written there.
        CorruptData: A record is damaged.
        Invalid: The root names no location, or another query's.
    """
    origins = Origins(root, also, open_store)
    store, plain = open_store(location_of(root)), open_store(plain_location_of(root))
    reader = FileReader(store, plain, runtime, origins=origins)
    async with closed_after(plain, store, reader):

        async def look() -> dict[str, FileEntry]:
            index = FileIndex()
            scan = await ManifestReader(store, runtime).scan()
            steps = file_steps(scan, store.location, scan.query_id if is_of_a_backend(root) else FILES_OWNER)
            if not steps:
                raise MissingState(
                    f"{root} holds no files: no query has written there through dstl://. A StateBackend's directory is "
                    "its checkpoint_location, which ends with _spark"
                )
            for sequence, files in steps:
                index.apply(files, sequence)
            found = (entry for entry in index if not entry.path.startswith(f"{HELD}/"))
            return {entry.path: entry for entry in sorted(found, key=lambda each: each.path)}

        yield CheckpointFiles(await look(), reader, origins, look)


async def verify_files(files: CheckpointFiles, on_progress: Progress = lambda done, total: None) -> list[str]:
    """Read every byte of every file; returns what is wrong, each with path and object.

    What a query that runs has let go of meanwhile is not.
    """
    problems: dict[str, str] = {}
    for done, entry in enumerate(files.entries.values()):
        on_progress(done, len(files.entries))
        try:
            await files.reader.read(entry)
        except (CorruptData, MissingState) as error:
            problems[entry.path] = f"{entry.path}: {error}"
    now = await files.look() if problems else {}
    return [problem for path, problem in problems.items() if now.get(path) == files.entries[path]]


async def export_files(
    files: CheckpointFiles, target: ObjectStore, on_progress: Progress = lambda done, total: None
) -> int:
    """Write the files as a plain directory, which stock Spark opens; returns their bytes.

    The barriers come last, so that what is cut off begins again at an earlier batch or not at all.

    Raises:
        Invalid: There is something in the target already; or a query that runs has let go of a file meanwhile.
        MissingState: A file is not there.
        CorruptData: A file is damaged.
    """
    async for info in target.list(""):
        raise Invalid(f"{target.location} holds {info.name} already: export into an empty directory")
    ordered = sorted(files.entries.values(), key=lambda entry: barrier_batch(entry.path) is not None)
    for done, entry in enumerate(ordered):
        on_progress(done, len(ordered))
        try:
            content = await files.reader.read(entry)
        except (CorruptData, MissingState):
            if (await files.look()).get(entry.path) == entry:
                raise
            raise Invalid(
                f"{entry.path} is no longer needed by the query, which runs: export it once it has stopped, into "
                f"another directory than {target.location}, which has a part of it now"
            ) from None
        await target.put(entry.path, content)
    return sum(entry.size for entry in ordered)


async def roll_back(root: str, batch: int, runtime: Runtime, open_store: OpenStore) -> list[str]:
    """Forget what came after a batch, so that the query's next run goes on behind it; returns the paths that are gone.

    One record takes barriers, state and what describes it. The sources' own logs stay: Spark goes on in them.

    The directory is taken over: a query that still runs is fenced.

    Raises:
        MissingState: The batch is not among those that are kept; or of a ``StateBackend``, its checkpoint is not.
    """
    async with opened_files(root, runtime, open_store) as files:
        batches = files.batches
    if batch not in batches:
        kept = f"{batches[0]} to {batches[-1]}" if batches else "none"
        raise MissingState(f"{root} keeps the commit of batches {kept}, and not that of {batch}")
    if is_of_a_backend(root):
        await _check_retained(root, batch, runtime, open_store)
    directory = opened_directory(root, runtime, open_store)
    async with closed_after(directory):
        await directory.claim()
        paths = {entry.path for entry in directory.run.index}
        gone = {path for path in paths if (barrier_batch(path) or 0) > batch or is_ahead(path, batch + 1)}
        gone |= paths & await _only_named_by(directory, gone, paths)
        for path in gone:
            await directory.delete(path, "")
        await directory.barriers.flush()
    return sorted(gone)


async def _only_named_by(directory: Directory, gone: Collection[str], paths: Iterable[str]) -> set[str]:
    """Return the SST files and logs that snapshots which go name, and no other one of their store."""
    snapshots: dict[str, list[str]] = {}
    for path in paths:
        file = StateFile.of(path)
        if file is not None and file.kind == "zip" and not file.is_checksum:
            snapshots.setdefault(file.store, []).append(path)
    found: set[str] = set()
    for store, zips in snapshots.items():
        if not any(path in gone for path in zips):
            continue
        named: dict[bool, set[str]] = {True: set(), False: set()}
        try:
            for path in zips:
                named[path in gone] |= _shared_files(store, await directory.read(path, ""))
        except (CorruptData, MissingState) as error:
            _log.warning("%s/%s: files that no snapshot needs are left to Spark: %s", directory.root, store, error)
        else:
            found |= named[True] - named[False]
    return found


def _shared_files(store: str, content: bytes) -> set[str]:
    """Return the paths of the SST files and logs that RocksDB's zip of a snapshot names."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)).open("metadata") as stream:
            _, _, body = stream.read(_MOST_BYTES).partition(b"\n")
        plain: dict[str, Any] = json.loads(body)
        return {f"{store}/{place}/{each[name]}" for key, name, place in _SHARED for each in plain.get(key) or ()}
    except (zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptData(f"a snapshot in {store} does not say which files it needs: {error}") from None


async def _check_retained(root: str, batch: int, runtime: Runtime, open_store: OpenStore) -> None:
    store = open_store(location_of(root))
    async with closed_after(store):
        retained = (await ManifestReader(store, runtime).scan()).retained
    if batch not in [checkpoint.batch_id for checkpoint in retained]:
        raise MissingState(f"{store.location} retains no checkpoint of batch {batch}: see dstl checkpoints list")
