"""The index of a checkpoint directory's committed files, and the objects that hold them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from dstl.checkpoint.manifest.format import manifest_name, manifest_sequence
from dstl.checkpoint.manifest.reader import ManifestScan
from dstl.errors import CorruptData, Invalid
from dstl.files.namespace import state_version
from handles.file_record import FileEntry, FileRecord, foreign_object

HELD = ".forks"
"""Entries below it are no files: they name objects that a fork needs, which are not free before it has gone."""


def file_steps(scan: ManifestScan, location: str, owner: str) -> list[tuple[int, FileRecord]]:
    """Return number and body of the records that make an index, a whole one first; none where there are none.

    Args:
        scan: The log.
        location: For messages.
        owner: What stands for the query in such a location.

    Raises:
        CorruptData: A record is damaged.
        Invalid: The location is another query's.
    """
    if scan.query_id not in ("", owner):
        raise Invalid(
            f"{location} holds the checkpoints of query {scan.query_id} and no files: give the directory another place"
        )
    for _, error in sorted(scan.damaged.items()):
        raise error
    steps = [(s, record.files) for s, record in sorted(scan.records.items()) if record.files is not None]
    first = max((i for i, (_, files) in enumerate(steps) if files.is_whole), default=None)
    if steps and first is None:
        raise CorruptData(f"{location} has records of files and none with all of them: restore it from a replica")
    return steps[first or 0 :]


class FileTree:
    """Directories, as the paths of files make them: in memory as large as the paths are long. Not thread-safe."""

    def __init__(self) -> None:
        self._root = _Node()

    def add(self, path: str) -> None:
        """There is a file."""
        node = self._root
        for name in path.split("/"):
            below = node.below.get(name)
            if below is None:
                below = node.below[name] = _Node()
            below.files += 1
            node = below

    def remove(self, path: str) -> None:
        """A file is gone, and with it the directories that held nothing else."""
        node = self._root
        for name in path.split("/"):
            below = node.below[name]
            below.files -= 1
            if not below.files:
                del node.below[name]
                return
            node = below

    def below(self, path: str) -> Iterator[str]:
        """Yield the files below a directory; nothing for a file."""
        for name, node in tuple(self._find(path).items()):
            inner = f"{path}/{name}" if path else name
            if node.below:
                yield from self.below(inner)
            else:
                yield inner

    def count(self, directory: str, name: str) -> int:
        """Return the number of files under a name of a directory."""
        below = self._find(directory).get(name)
        return below.files if below is not None else 0

    def names(self, directory: str) -> Collection[str]:
        """Return what lies directly in a directory; nothing where there is none."""
        return tuple(self._find(directory))

    def _find(self, directory: str) -> dict[str, _Node]:
        below = self._root.below
        for name in directory.split("/") if directory else ():
            node = below.get(name)
            below = node.below if node is not None else {}
        return below


@dataclass(slots=True)
class _Node:
    """A directory or a file: the number of files at and below it, and what lies in it."""

    files: int = 0
    below: dict[str, _Node] = field(default_factory=dict)


class FileIndex:
    """Committed files by path. Not thread-safe.

    Invariants:
        1. It is what the records say, applied in their order from one that is whole.
        2. An object is free when no entry names it; a record also only when it is below the newest whole one.
    """

    def __init__(self) -> None:
        self.tree = FileTree()
        self._entries: dict[str, FileEntry] = {}
        self._versions: dict[int, dict[str, None]] = {}
        self._named: Counter[str] = Counter()
        self._free: dict[str, None] = {}
        self._records: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, path: object) -> bool:
        return path in self._entries

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(list(self._entries.values()))

    def find(self, path: str) -> FileEntry | None:
        """Return a file's entry."""
        return self._entries.get(path)

    def of_version(self, version: int) -> Collection[str]:
        """Return the state files of a version."""
        return self._versions.get(version, {}).keys()

    def apply(self, record: FileRecord, sequence: int) -> None:
        """Take a record over."""
        if record.is_whole:
            for path in list(self._entries):
                self._remove(path)
        for path in record.removed:
            self._remove(path)
        for entry in record.entries():
            # Named before the file that it replaces lets go of its object, which may be the same.
            self._named[entry.segment.name] += 1
            self._free.pop(entry.segment.name, None)
            self._remove(entry.path)
            self._entries[entry.path] = entry
            if not entry.path.startswith(f"{HELD}/"):
                self.tree.add(entry.path)
                if (version := state_version(entry.path)) is not None:
                    self._versions.setdefault(version, {})[entry.path] = None
        if sequence:
            self._records.add(sequence)

    def take_free(self, boundary: int) -> list[str]:
        """Return the objects that became free since the last call.

        Args:
            boundary: The number of the newest whole record: no reader needs one below it for what it says.
        """
        for sequence in [each for each in self._records if each < boundary]:
            self._records.discard(sequence)
            if not self._named[manifest_name(sequence)]:
                self._free[manifest_name(sequence)] = None
        ready = [n for n in self._free if (manifest_sequence(n) or 0) < boundary]
        for name in ready:
            del self._free[name]
        return ready

    def needs(self, name: str, boundary: int) -> bool:
        """Return True where an entry names an object, or where it is a record that the index is made of.

        Args:
            name: The object.
            boundary: The number of the newest whole record.
        """
        sequence = manifest_sequence(name)
        return bool(self._named[name]) or (sequence in self._records and (sequence or 0) >= boundary)

    def _remove(self, path: str) -> None:
        entry = self._entries.pop(path, None)
        if entry is None:
            return
        if not path.startswith(f"{HELD}/"):
            self.tree.remove(path)
            if (version := state_version(path)) is not None:
                paths = self._versions[version]
                del paths[path]
                if not paths:
                    del self._versions[version]
        name = entry.segment.name
        self._named[name] -= 1
        if not self._named[name]:
            del self._named[name]
            if entry.log_id and foreign_object(name) is None:
                self._free[name] = None
