"""Rules of a commit: which files it takes, and whether anything that it needs is missing. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterable

from dstl.errors import TaskManagerLost
from dstl.files.namespace import StateFile

__all__ = ["check_complete", "is_final", "needs_snapshots"]


def is_final(path: str, committed: Container[str]) -> bool:
    """Return True where a state file is committed, so that a task that comes too late must not replace it.

    The changes that lead to version v are batch v-1's: they are final while that batch's commit is there.
    """
    file = StateFile.of(path)
    if file is None or file.kind not in ("changelog", "delta") or path not in committed:
        return False
    return f"commits/{file.version - 1}" in committed


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
