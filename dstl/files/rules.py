"""Rules of a commit: which files it takes, and whether anything that it needs is missing. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable

from dstl.errors import TaskManagerLost
from dstl.files.namespace import StateFile, description_batch, is_snapshot
from dstl.files.riders import Rider
from handles.file_record import barrier_batch


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


def newest_batch(kind: str, names: Iterable[str]) -> int:
    """Return the newest batch of the barriers of a kind, ``offsets`` or ``commits``, of these names; -1 for none."""
    batches = (barrier_batch(f"{kind}/{name}") for name in names)
    return max((batch for batch in batches if batch is not None), default=-1)


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


def check_complete(
    barrier: str, content: bytes, found: Iterable[str], before: Iterable[str], *, is_rewrite: bool = False
) -> None:
    """Check that state stores have put their files: those that Spark's commit file names, or had some before the batch.

    In checkpoint format 2 the commit names them. In format 1 every store that has the version on which the batch began
    puts the next one: Spark would commit a batch of which some task has not run, and never get over the next.

    Args:
        barrier: The commit file, for messages.
        content: Its bytes: a line with the version of the format, and JSON.
        found: The state files of the version that the batch leads to, once this commit is made.
        before: Those of the version on which it began.
        is_rewrite: The batch is a job that gives the state another number of partitions.

    Raises:
        TaskManagerLost: A file is missing, so whoever held it is gone, or its task has not run.
    """
    files, began = (
        [file for file in map(StateFile.of, paths) if file is not None and not file.is_checksum]
        for paths in (found, before)
    )
    named = _unique_ids(content)
    if named:
        missing = sorted(f"of id {each}" for each in named.difference(file.unique_id for file in files))
    else:
        have, need = {file.store for file in files}, {file.store for file in began}
        missing = sorted((_rewritten(need, have) if is_rewrite else need) - have)
    if missing:
        raise TaskManagerLost(
            f"{barrier} leads to state that was never put ({len(missing)} stores, one of them {missing[0]}): a host "
            "was lost, or a task has not run, as where foreachBatch reads a part of a join of streams; restart the "
            "query, which runs the batch again"
        )


def _rewritten(stores: Iterable[str], found: Iterable[str]) -> set[str]:
    """Return the stores that there must be of state with another number of partitions: as far as its operator's go."""
    counts: dict[str, int] = {}
    for store in found:
        _, operator, partition, *_ = store.split("/")
        counts[operator] = max(counts.get(operator, 1), int(partition) + 1)
    kinds = (store.split("/") for store in stores)
    return {"/".join((*kind[:2], str(i), *kind[3:])) for kind in kinds for i in range(counts.get(kind[1], 1))}


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
