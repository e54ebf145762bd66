"""The runs of one checkpoint directory: whose files count, and what a barrier's record holds. A pure state machine.

Invariants:
    1. At most one run is current. A barrier of another one makes that current, and its predecessor is over for good.
    2. A host that has taken a file since the last commit takes part in the next one, or fails it.
    3. Between a commit and the next nothing of it is replaced (:func:`~dstl.files.rules.is_final`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstl.checkpoint.manifest.format import inline_offsets, manifest_name
from dstl.errors import Fenced, TaskManagerLost
from dstl.files.index import FileIndex
from dstl.files.namespace import StateFile, barrier_batch
from dstl.files.riders import wins
from dstl.files.rules import check_complete, is_final
from dstl.rpc.file_messages import PersistedFile, PersistedFiles
from handles.file_record import FileEntry, FileRecord
from handles.segment_handle import SegmentHandle

__all__ = ["FileRun", "Step"]

_WHOLE_EVERY = 100


@dataclass(frozen=True, slots=True)
class Step:
    """One record, ready to be written.

    Attributes:
        record: Its body.
        inlined: Segments to be written inside it, in order.
        located: Where it will hold each inlined seal.
    """

    record: FileRecord
    inlined: tuple[bytes, ...]
    located: dict[str, SegmentHandle]


class FileRun:
    """Decides for one checkpoint directory. Not thread-safe."""

    def __init__(self) -> None:
        self.index = FileIndex()
        self.current = ""
        self._over: set[str] = set()
        self._serving: set[str] = set()
        self._lost: set[str] = set()

    @property
    def serving(self) -> frozenset[str]:
        """The hosts that have taken files since the last commit."""
        return frozenset(self._serving)

    def admit(self, run: str) -> None:
        """Check that a run may put files.

        Raises:
            Fenced: It is over.
        """
        if run in self._over:
            raise Fenced(f"run {run} of the query is over: a newer one has replaced it, or it has failed")

    def begin(self, run: str) -> None:
        """A run comes with a barrier: it is the current one from now on.

        Raises:
            Fenced: It is over.
        """
        self.admit(run)
        if run and run != self.current:
            if self.current:
                self._over.add(self.current)
            self.current = run

    def end(self, run: str) -> None:
        """A run has failed in a way that only another one gets over."""
        if run:
            self._over.add(run)

    def serve(self, member: str, run: str) -> None:
        """A host is about to take the first file since the last commit.

        Raises:
            Fenced: The run is over.
        """
        self.admit(run)
        self._serving.add(member)

    def lose(self, member: str) -> None:
        """A host is gone, and with it what no record has."""
        if member in self._serving:
            self._lost.add(member)

    def check_hosts(self, barrier: str) -> None:
        """Check that nobody who has taken files for this commit is gone.

        Raises:
            TaskManagerLost: One is; the next commit may go well.
        """
        if self._lost:
            lost = ", ".join(sorted(self._lost))
            raise TaskManagerLost(
                f"the file service {lost} is gone with files of {barrier}: restart the query, which runs the "
                "batch again"
            )

    def forget_hosts(self) -> None:
        """A commit was made or has failed for good: what hosts have taken before has ended with it."""
        self._serving.clear()
        self._lost.clear()

    def step(self, barrier: str, content: bytes, parts: Sequence[PersistedFiles], sequence: int, boundary: int) -> Step:
        """Return the record of a barrier.

        Args:
            barrier: Its path; empty for one without.
            content: The barrier's bytes.
            parts: What each host has persisted for it.
            sequence: The record's number.
            boundary: Number of the newest whole record; 0 for none.

        Raises:
            TaskManagerLost: State that the commit names is missing.
        """
        located, inlined = _located(parts, sequence)
        winners: dict[str, tuple[PersistedFile, SegmentHandle | None]] = {}
        for part in parts:
            handles = [
                located[seal] if seal else SegmentHandle(name, size, checksum, offset)
                for seal, name, size, checksum, offset in part.segments
            ]
            for file in part.files:
                known = winners.get(file.path)
                if known is not None and not _takes_over(file, known[0]):
                    continue
                winners[file.path] = (file, handles[file.segment] if file.size >= 0 else None)
        added, removed = [], []
        for path, (file, handle) in winners.items():
            if handle is None:
                if path in self.index:
                    removed.append(path)
            elif not is_final(path, self.index):
                added.append(FileEntry(path, file.size, file.modified_ms, handle, file.log_id, file.sqn))
        self._check_complete(barrier, content, added, removed)
        is_whole = not boundary or sequence - boundary >= _WHOLE_EVERY
        if is_whole:
            gone = {*removed, *(each.path for each in added)}
            added = [*(each for each in self.index if each.path not in gone), *added]
            removed = []
        return Step(FileRecord.of(barrier, self.current, added, removed, is_whole=is_whole), inlined, located)

    def _check_complete(self, barrier: str, content: bytes, added: Sequence[FileEntry], removed: Sequence[str]) -> None:
        batch = barrier_batch(barrier, "commits")
        if batch is None:
            return
        paths = {each.path for each in added}
        version = batch + 1
        # Another action of the batch may have put some of them with an earlier record.
        paths.update(e.path for e in self.index if (s := StateFile.of(e.path)) is not None and s.version == version)
        check_complete(barrier, content, version, paths.difference(removed))


def _takes_over(file: PersistedFile, known: PersistedFile) -> bool:
    """Return True where a host's file takes the place of another host's; a file always that of a deletion."""
    if file.size < 0 or known.size < 0:
        return file.size >= 0
    return wins(file.attempt, known.attempt)


def _located(parts: Sequence[PersistedFiles], sequence: int) -> tuple[dict[str, SegmentHandle], tuple[bytes, ...]]:
    """Return where a record of this number holds the seals, and the seals themselves in order."""
    seals = [
        (seal, size, checksum, bytes(part.inlined[offset : offset + size]))
        for part in parts
        for seal, _, size, checksum, offset in part.segments
        if seal
    ]
    offsets = inline_offsets([size for _, size, _, _ in seals])
    located = {
        seal: SegmentHandle(manifest_name(sequence), size, checksum, offset)
        for (seal, size, checksum, _), offset in zip(seals, offsets, strict=True)
    }
    return located, tuple(data for *_, data in seals)
