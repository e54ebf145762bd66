"""Lists and deletes savepoints: only their owner deletes them, never a cleanup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dstl.checkpoint.manifest.reader import ManifestReader, no_location
from dstl.checkpoint.savepoint.format import (
    SAVEPOINTS,
    EndMarker,
    Savepoint,
    SavepointObjects,
    check_savepoint_name,
    descriptor_name,
    directory_of,
    is_savepoint_object,
    marker_name,
)
from dstl.errors import CorruptData, DstlError, Invalid, MissingState, OutcomeUnknown
from dstl.runtime import Runtime
from dstl.store.base import ObjectInfo, ObjectStore
from handles.checkpoint import referenced_objects

SavepointState = Literal["complete", "claimed", "deleting", "incomplete", "damaged", "foreign"]
"""``complete``: can be restored. ``claimed``: its files belong to a job now. ``deleting``: a deletion was begun.
``incomplete``: being written, or given up. ``damaged``: its descriptor or marker cannot be read. ``foreign``: somebody
else's files below ``savepoints/``, which Flink for one uses as well."""

WRITING_GRACE_S = 3600.0
"""Files without a descriptor that are younger may belong to a savepoint that is being written."""


@dataclass(frozen=True, slots=True)
class SavepointListing:
    """One savepoint of a location.

    Attributes:
        name: Its name.
        state: Whether it can be restored, and if not, why.
        savepoint: The descriptor; None where it is not there or not readable.
        objects: Number of objects below its directory.
        bytes: Their bytes.
        modified: When the newest of them was written: Unix seconds by the store's clock.
        detail: Who claimed it, what is damaged or whose it is not; empty otherwise.
    """

    name: str
    state: SavepointState
    savepoint: Savepoint | None
    objects: int
    bytes: int
    modified: float
    detail: str


@dataclass(frozen=True, slots=True)
class SavepointDeletion:
    """The objects that a deletion removes.

    Attributes:
        state: The savepoint's state before.
        objects: The objects, in the order in which they go.
        bytes: Their bytes.
        committed: True where they are gone; False for a dry run.
    """

    state: SavepointState
    objects: tuple[str, ...]
    bytes: int
    committed: bool


async def list_savepoints(store: ObjectStore, runtime: Runtime) -> list[SavepointListing]:
    """Return every savepoint of a location by name, damaged and unfinished ones included. Only reads.

    Raises:
        Invalid: There is neither a savepoint nor a manifest: it is no location of DSTL, or nothing is left in it.
        Unavailable: The store did not answer.
    """
    objects = SavepointObjects(store, runtime)
    by_name: dict[str, list[ObjectInfo]] = {}
    for info in await objects.list():
        by_name.setdefault(info.name[len(SAVEPOINTS) :].split("/")[0], []).append(info)
    if not by_name and not await ManifestReader(store, runtime).tail():
        raise no_location(store.location, "it holds neither a savepoint nor a manifest")
    return [await _list_savepoint(objects, name, infos) for name, infos in sorted(by_name.items())]


async def delete_savepoint(
    store: ObjectStore, runtime: Runtime, name: str, *, commit: bool, grace_s: float = WRITING_GRACE_S
) -> SavepointDeletion:
    """Delete a savepoint, or what is left of one; a deletion that was interrupted is finished.

    Args:
        store: The location.
        runtime: Clock, jitter, ids.
        name: The savepoint's name.
        commit: False only says what would be deleted.
        grace_s: Seconds for which files without a descriptor are taken for a savepoint that is being written. Shorter:
            leftovers can go at once; longer: a slow writer is safe.

    Raises:
        MissingState: Nothing of that name is there.
        Invalid: A job has claimed it and still needs its files, it may be being written, or there are files that are
            not a savepoint's, of which none is ever deleted.
        CorruptData: A manifest of the location is damaged, so it is not known what a claimed one's job still needs.
    """
    objects = SavepointObjects(store, runtime)
    infos = await objects.list(f"{check_savepoint_name(name)}/")
    if not infos:
        raise MissingState(f"{store.location} has no savepoint {name!r}: see dstl savepoint list")
    foreign = [i.name for i in infos if not is_savepoint_object(i.name)]
    if foreign:
        raise Invalid(
            f"{directory_of(name)} in {store.location} holds what is not a savepoint's: {_some(foreign)}; nothing is "
            "deleted. Move those away first, if the rest is a savepoint of DSTL"
        )
    listing = await _list_savepoint(objects, name, infos)
    own = EndMarker(kind="delete", put_id=runtime.new_id(), created_at=runtime.clock.wall())
    now = runtime.clock.wall()
    won = False
    if commit and listing.state in ("complete", "incomplete", "damaged"):
        won = await _begin(objects, own, name)
        infos = await objects.list(f"{name}/")
        now = next((i.modified for i in infos if i.name == marker_name(name)), now)
        if not won:
            # A job may have claimed it since it was listed.
            listing = await _list_savepoint(objects, name, infos)
    try:
        await _check_deletable(objects, listing, infos, now, grace_s, ours=won)
    except DstlError:
        if won:
            await objects.delete([marker_name(name)])
        raise
    first, last = descriptor_name(name), marker_name(name)
    names = sorted(
        (i.name for i in infos if is_savepoint_object(i.name)), key=lambda each: (each != first, each == last, each)
    )
    if commit:
        await objects.delete([each for each in names if each == first])
        await objects.delete([each for each in names if each not in (first, last)])
        await objects.delete([last])
    sizes = {i.name: i.size for i in infos}
    return SavepointDeletion(listing.state, tuple(names), sum(sizes[each] for each in names), commit)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


async def _begin(objects: SavepointObjects, own: EndMarker, name: str) -> bool:
    try:
        return await objects.win(own, name)
    except OutcomeUnknown as error:
        if not isinstance(error.__cause__, CorruptData):
            raise
        # There is a marker that cannot be read: go by what the manifests need.
        return False


async def _list_savepoint(objects: SavepointObjects, name: str, infos: list[ObjectInfo]) -> SavepointListing:
    names = {info.name for info in infos}
    savepoint: Savepoint | None = None
    marker: EndMarker | None = None
    state: SavepointState = "incomplete"
    detail = ""
    foreign = [each for each in sorted(names) if not is_savepoint_object(each)]
    if foreign and not names & {descriptor_name(name), marker_name(name)}:
        state, detail = "foreign", f"holds {_some(foreign)}"
    try:
        if descriptor_name(name) in names:
            savepoint = await objects.descriptor(name)
            state = "complete"
    except MissingState:
        # Deleted since it was listed.
        state = "deleting"
    except (CorruptData, Invalid) as error:
        state, detail = "damaged", str(error)
    try:
        if marker_name(name) in names:
            marker = await objects.marker(name)
    except (CorruptData, Invalid) as error:
        state, detail = "damaged", str(error)
    if marker is not None:
        state = "claimed" if marker.kind == "claim" else "deleting"
        detail = f"by query {marker.query_id}" if marker.kind == "claim" else ""
    return SavepointListing(
        name,
        state,
        savepoint,
        len(infos),
        sum(info.size for info in infos),
        max(info.modified for info in infos),
        detail,
    )


async def _check_deletable(
    objects: SavepointObjects,
    listing: SavepointListing,
    infos: list[ObjectInfo],
    now: float,
    grace_s: float,
    *,
    ours: bool,
) -> None:
    where = f"savepoint {listing.name!r} in {objects.store.location}"
    if listing.state == "incomplete":
        youngest = max((i.modified for i in infos if i.name != marker_name(listing.name)), default=0.0)
        if now - youngest < grace_s:
            raise Invalid(
                f"{where} has no descriptor and was written to {max(0.0, now - youngest):.0f} s ago: it may be being "
                f"made. Wait until it is {grace_s:.0f} s old, or lower --grace if it is not being made"
            )
    if not ours and marker_name(listing.name) in {i.name for i in infos} and listing.state in ("claimed", "damaged"):
        scan = await ManifestReader(objects.store, objects.runtime).scan()
        for _, error in sorted(scan.damaged.items()):
            raise error
        directory = directory_of(listing.name)
        for checkpoint in scan.retained:
            if any(each.startswith(directory) for each in referenced_objects(checkpoint)):
                raise Invalid(
                    f"{where} was claimed by query {scan.query_id}, whose checkpoint {checkpoint.checkpoint_id} needs "
                    "its files: the job deletes each when it needs it no more"
                )
        if listing.state == "claimed" and not scan.retained:
            raise Invalid(
                f"{where} is being claimed {listing.detail}, which has no checkpoint yet: start that query, or remove "
                f"{directory} by hand if it never will"
            )
