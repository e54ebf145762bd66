"""Forks: a checkpoint directory that begins with another's files where they are, so that it may go its own way."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from urllib.parse import quote

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.errors import Invalid, MissingState
from dstl.files.config import FileConfig
from dstl.files.file_log import FileLog
from dstl.files.index import HELD, file_steps
from dstl.files.leader import LeaderDirectory, own_directory
from dstl.files.namespace import SCHEME, is_of_a_backend, location_of, plain_location_of
from dstl.files.origins import OpenStore, Origins, root_of
from dstl.files.query_directory import QueryDirectory
from dstl.files.reader import FileReader
from dstl.rpc.fleet_messages import Persisted, PersistedFile, PersistedPart
from dstl.runtime import Runtime, closed_after
from handles.file_record import FILES_OWNER, PLAIN, FileEntry, barrier_batch, elsewhere, foreign_object
from handles.key_group import KeyGroupRange
from handles.segment_handle import SegmentHandle


@dataclass(frozen=True, slots=True)
class Fork:
    """A fork that was made, and what it needs.

    Attributes:
        batches: The number of its batches.
        also: The directories that its query must name in ``spark.dstl.also``, for they are elsewhere.
    """

    batches: int
    also: tuple[str, ...]


def opened_directory(root: str, runtime: Runtime, open_store: OpenStore) -> LeaderDirectory:
    """Open a directory for a change of its index without a query; the caller closes it."""
    store, plain = open_store(location_of(root)), open_store(plain_location_of(root))
    config = FileConfig(location="")
    log = FileLog(config, runtime, FileReader(store, plain, runtime))
    if is_of_a_backend(root):
        return QueryDirectory(root, log, None, runtime)
    return own_directory(root, log, {}, runtime, config)


async def fork(source: str, target: str, runtime: Runtime, open_store: OpenStore, also: Collection[str] = ()) -> Fork:
    """Let a directory begin with another's committed files.

    One record of the source holds its objects for the target, whatever becomes of the source's query; then one record
    of the target names them. Neither side ever deletes them until :func:`release`. The source is taken over: a query
    that still runs there is fenced, and may be started again. So is each directory that the source was forked from.

    Args:
        source: Its root.
        target: The root of an empty directory.
        runtime: Clock, jitter and ids.
        open_store: Opens a location.
        also: Directories besides the two that may be taken over.

    Raises:
        Invalid: There is something in the target already, or it is the source; or the source has objects of a directory
            that nobody has named.
        MissingState: The source has no files.
    """
    if is_of_a_backend(source) or is_of_a_backend(target):
        raise Invalid(f"{source}: files of a StateBackend are not without its state: make a savepoint instead")
    source, target, *named = (root_of(plain_location_of(each)) for each in (source, target, *also))
    async with AsyncExitStack() as stack:
        old, new = (opened_directory(each, runtime, open_store) for each in (source, target))
        stack.push_async_callback(old.close)
        stack.push_async_callback(new.close)
        if source == target or await new.listing("", ""):
            raise Invalid(f"{target} is not empty: fork into a directory of its own")
        await old.listing("", "")
        _check_named(source, _entries(old), named)  # so that what is refused fences nobody
        await old.claim()
        entries = _entries(old)
        if not entries:
            raise MissingState(f"{source} holds no files: no query has written there through {SCHEME}://")
        # Whoever has an object must know of the fork before the fork relies on it.
        _check_named(source, entries, named)
        for root, names in _owned(entries).items():
            if root == source:
                await old.barriers.add(_holds(names, target))
            else:
                owner = opened_directory(root, runtime, open_store)
                stack.push_async_callback(owner.close)
                await owner.claim()
                await owner.barriers.add(_holds(names, target))
        await new.barriers.add(_part(entries))
        places = {place[0] for entry in entries if (place := foreign_object(entry.segment.name)) is not None}
        origins = Origins(target, (), open_store)
        return Fork(
            sum(barrier_batch(entry.path, "commits") is not None for entry in entries),
            tuple(sorted({root_of(place) for place in places if not origins.allows(place)})),
        )


async def release(source: str, target: str, runtime: Runtime, open_store: OpenStore) -> int:
    """Let go of what a directory holds for a fork that was deleted; returns the number of objects.

    Raises:
        Invalid: The fork is there.
    """
    source, target = (root_of(plain_location_of(each)) for each in (source, target))
    store = open_store(location_of(target))
    async with closed_after(store):
        if file_steps(await ManifestReader(store, runtime).scan(), store.location, FILES_OWNER):
            raise Invalid(f"{target} is there, and may need the objects of {source}: delete it first")
    directory = opened_directory(source, runtime, open_store)
    async with closed_after(directory):
        await directory.claim()
        held = [entry.path for entry in directory.run.index if entry.path.startswith(f"{_held(target)}/")]
        for path in held:
            await directory.delete(path, "")
        await directory.barriers.flush()
        return len(held)


def _held(target: str) -> str:
    return f"{HELD}/{quote(target, safe='')}"


def _entries(directory: LeaderDirectory) -> list[FileEntry]:
    """Return a directory's files as another one names them."""
    index = directory.run.index
    return [_elsewhere(entry, directory.root) for entry in index if not entry.path.startswith(f"{HELD}/")]


def _check_named(source: str, entries: Iterable[FileEntry], named: Collection[str]) -> None:
    """Refuse to take a directory over that only a record names."""
    for root in sorted(_owned(entries).keys() - {source, *named}):
        raise Invalid(
            f"{source} uses objects of {root}, which a fork would take over as well, and a query that runs there is "
            f"fenced. Where that is meant, name it too: --also {root}"
        )


def _elsewhere(entry: FileEntry, root: str) -> FileEntry:
    """Return a file of a directory as another one names it."""
    name = entry.segment.name
    if foreign_object(name) is None:
        if entry.log_id:
            name = elsewhere(location_of(root), name)
        else:
            name = elsewhere(plain_location_of(root), name.removeprefix(PLAIN))
    return replace(entry, segment=replace(entry.segment, name=name))


def _owned(entries: Iterable[FileEntry]) -> dict[str, dict[str, SegmentHandle]]:
    """Return the objects that are their directories' own, by directory and name: plain files never go."""
    found: dict[str, dict[str, SegmentHandle]] = {}
    for entry in entries:
        place = foreign_object(entry.segment.name)
        if place is not None and entry.log_id:
            location, name = place
            found.setdefault(root_of(location), {})[name] = replace(entry.segment, name=name)
    return found


def _holds(names: dict[str, SegmentHandle], target: str) -> Persisted:
    """Return entries that stand for what a fork needs of objects."""
    held = _held(target)
    return _part([FileEntry(f"{held}/{name}", 0, 0, handle, held, 0) for name, handle in names.items()])


def _part(entries: Iterable[FileEntry]) -> Persisted:
    part, any_key_groups = PersistedPart(), KeyGroupRange(0, 0)
    files = tuple(
        PersistedFile(
            each.path,
            -1,
            each.size,
            each.modified_ms,
            each.log_id,
            each.sqn,
            part.place(each.segment, any_key_groups),
        )
        for each in entries
    )
    return replace(part.finish(), files=files)
