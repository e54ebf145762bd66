"""Rules of a commit: which files it takes, and whether anything that it needs is missing. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable

from dstl.errors import TaskManagerLost
from dstl.files.namespace import StateFile, barrier_batch, description_batch, is_snapshot
from dstl.files.riders import Rider

__all__ = [
    "batch_of",
    "check_complete",
    "in_order",
    "is_ahead",
    "is_final",
    "is_late",
    "needs_snapshots",
    "next_version",
]


def is_final(path: str, committed: Container[str]) -> bool:
    """Return True where a state file is committed, so that a task that comes too late must not replace it.

    The changes that lead to version v are batch v-1's: they are final while that batch's commit is there.
    """
    batch = batch_of(path)
    return batch >= 0 and path in committed and f"commits/{batch}" in committed


def is_late(path: str, batch: int) -> bool:
    """Return True for changes that a task brings behind the commit of its batch, of which Spark has been told.

    Args:
        path: The file.
        batch: The one that is committed.
    """
    return 0 <= batch_of(path) <= batch


def batch_of(path: str) -> int:
    """Return the batch whose changes a file holds; -1 for any other file."""
    file = StateFile.of(path)
    return file.version - 1 if file is not None and file.kind in ("changelog", "delta") else -1


def next_version(paths: Iterable[str]) -> int:
    """Return the version on which a query's next batch begins: nobody needs a higher one.

    Args:
        paths: All files, or the barriers alone.
    """
    barriers = ((path, batch) for path in paths if (batch := barrier_batch(path)) is not None)
    # Without any commit Spark runs the newest offsets again.
    return max((batch + path.startswith("commits/") for path, batch in barriers), default=0)


def is_ahead(path: str, version: int) -> bool:
    """Return True for state behind a version, and for what describes it.

    Spark begins with the newest snapshot up to the version that it loads: one of batches that were taken back must not
    be there when others have led to its version.
    """
    file = StateFile.of(path)
    described = description_batch(path) if file is None else None
    return file.version > version if file is not None else described is not None and described >= version


def needs_snapshots(paths: Iterable[str], version: int) -> bool:
    """Return True where a version's only copy is a snapshot, as it is where a store writes no changelog.

    Args:
        paths: What tasks have put since the last commit.
        version: The one that the batch leads to.
    """
    changed: set[tuple[str, str]] = set()
    whole: set[tuple[str, str]] = set()
    for file in map(StateFile.of, paths):
        if file is not None and file.version == version and not file.is_checksum:
            (changed if file.kind in ("changelog", "delta") else whole).add((file.store, file.unique_id))
    return bool(whole - changed)


def in_order(riders: Iterable[Rider], left: Collection[Rider]) -> list[Rider]:
    """Return the riders that a record may take while some snapshots, whose bytes are not stored yet, are left behind.

    In a store's directory no file goes before what makes it dispensable, and no snapshot before what it names.

    Args:
        riders: What could go, in the order of its coming.
        left: What stays.
    """
    waiting = {_partition(rider.path) for rider in left}
    stay = set(left)
    return [
        rider
        for rider in riders
        if rider not in stay
        and not ((rider.is_deletion or is_snapshot(rider.path)) and _partition(rider.path) in waiting)
    ]


def _partition(path: str) -> str:
    """Return the directory of a state partition, in which all stores of an operator's partition are."""
    return "/".join(path.split("/", 3)[:3])


def check_complete(barrier: str, content: bytes, version: int, paths: Collection[str]) -> None:
    """Check that every state store that Spark's commit file names has put its file (checkpoint format 2).

    Args:
        barrier: The commit file, for messages.
        content: Its bytes: a line with the version of the format, and JSON.
        version: The version that the batch leads to.
        paths: All files of the directory once this commit is made.

    Raises:
        TaskManagerLost: A file is missing, so whoever held it is gone.
    """
    named = _unique_ids(content)
    if not named:
        return
    files = (StateFile.of(path) for path in paths)
    found = {file.unique_id for file in files if file is not None and file.version == version and not file.is_checksum}
    missing = sorted(named - found)
    if missing:
        raise TaskManagerLost(
            f"{barrier} names state of version {version} that nobody has put ({len(missing)} files, one of them of id "
            f"{missing[0]}): a host was lost; restart the query, which runs the batch again"
        )


def _unique_ids(content: bytes) -> set[str]:
    """Return the ids in a commit file; none in format 1, or in a file of another make."""
    _, _, body = content.partition(b"\n")
    try:
        fields = json.loads(body)
    except ValueError:
        return set()
    operators = fields.get("stateUniqueIds") if isinstance(fields, dict) else None
    if not isinstance(operators, dict):
        return set()
    return {
        unique_id
        for partitions in operators.values()
        for stores in partitions or ()
        for unique_id in stores or ()
        if unique_id
    }
