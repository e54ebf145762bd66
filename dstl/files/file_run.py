"""The runs of one checkpoint directory: whose files count, and what a barrier's record holds. A pure state machine.

Invariants:
    1. At most one run is current. A barrier of another one makes that current, and its predecessor is over for good.
    2. A host that has taken a file since the last commit takes part in the next one, or fails it.
    3. Between a commit and the next nothing of it is replaced (:func:`~dstl.files.rules.is_final`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dstl.checkpoint.assembly import inlined_handles
from dstl.errors import Fenced, TaskManagerLost
from dstl.files.index import FileIndex
from dstl.files.riders import wins
from dstl.files.rules import batch_of, check_complete, is_ahead, is_final, newest_batch, next_version
from dstl.rpc.fleet_messages import Persisted, PersistedFile
from handles.file_record import FileEntry, FileRecord, barrier_batch
from handles.segment_handle import SegmentHandle

WHOLE_EVERY = 100
"""Records between two whole indexes: a start reads this many at most, a second or two on S3, and the whole index of
thousands of files is a hundredth of what is written."""
_KINDS = ("offsets", "commits")


@dataclass(frozen=True, slots=True)
class Step:
    """One record, ready to be written.

    Attributes:
        record: Its body.
        change: What of it the index has not yet; the body itself where that is not whole.
        inlined: Segments to be written inside it, in order.
        located: Where it will hold each inlined seal.
    """

    record: FileRecord
    change: FileRecord
    inlined: tuple[bytes, ...]
    located: dict[str, SegmentHandle]


class FileRun:
    """Decides for one checkpoint directory. Not thread-safe.

    Args:
        whole_every: So many records after a whole one there is another. More: less to write; fewer: less to read at a
            start.
        outlives_hosts: A lost host loses nothing: what a task has put is stored before it ends (``durability=task``).
    """

    def __init__(self, whole_every: int = WHOLE_EVERY, *, outlives_hosts: bool = False) -> None:
        self._whole_every = whole_every
        self.index = FileIndex()
        self.current = ""
        self.outlives_hosts = outlives_hosts
        self._met: set[str] = set()
        self._wrote: dict[str, None] = {}
        self._lent: set[str] = set()
        self._over: dict[str, BaseException | None] = {}
        self._serving: set[tuple[str, str]] = set()
        self._lost: set[tuple[str, str]] = set()
        self._stored: dict[str, list[tuple[str, Persisted]]] = {}
        self._left: set[str] = set()

    def is_new(self, run: str) -> bool:
        """Return True for a run that nobody has met yet; what belongs to no run is never new."""
        return bool(run) and run not in self._met

    def meet(self, run: str) -> None:
        """A run is new no longer."""
        self._met.add(run)

    def admit(self, run: str) -> None:
        """Check that a run may put files.

        Raises:
            Fenced: It is over.
            TaskManagerLost: It is over because a record has failed; another one goes on.
        """
        self.check(run)
        if run:
            self._wrote.setdefault(run)

    def check(self, run: str) -> None:
        """Check that a run is not over.

        Raises:
            Fenced: It is.
            TaskManagerLost: It is, because a record has failed; another one goes on.
        """
        if run not in self._over:
            return
        error = self._over[run]
        if error is None or isinstance(error, Fenced):
            raise Fenced(f"run {run} of the query is over: {error or 'a newer one has replaced it'}")
        raise TaskManagerLost(f"run {run} of the query is over, restart it: {error}")

    def owner(self, run: str) -> str:
        """Return the run that a barrier belongs to: one of no run to the run that was the last to begin to write.

        So it is with jobs that rewrite state: their tasks have a run, the thread that writes their offsets and commit
        has none. Nor have the threads that write a query's progress asynchronously.
        """
        if not run:
            run = next((each for each in reversed(self._wrote) if each not in self._over), "")
            self._lent.add(run)
        return run

    def begin(self, run: str) -> None:
        """A run comes with a barrier: it is the current one from now on. Where it has none, nothing changes.

        Raises:
            Fenced: It is over.
        """
        self.admit(run)
        if run and run != self.current:
            if self.current:
                self._over.setdefault(self.current, None)
            self.current = run

    def end(self, run: str, error: BaseException) -> None:
        """A run has failed in a way that only another one gets over."""
        if run:
            self._over.setdefault(run, error)

    def end_all(self, error: BaseException) -> None:
        """Say that the runs which have looked here have seen what is no longer so."""
        for run in self._met:
            self.end(run, error)

    def newest(self, kind: str) -> int:
        """Return the newest batch that has begun (``offsets``) or is committed (``commits``); -1 for none."""
        return newest_batch(kind, self.index.tree.names(kind))

    def newest_barriers(self) -> list[FileEntry | None]:
        """Return where the newest barriers lie, by which Spark makes up its mind which batch is next."""
        return [self.index.find(f"{kind}/{self.newest(kind)}") for kind in _KINDS]

    def serve(self, member: str, run: str) -> None:
        """A host is about to take the first file since the last commit.

        Raises:
            Fenced: The run is over.
        """
        self.admit(run)
        self._serving.add((member, run))

    def store(self, member: str, run: str, part: Persisted) -> None:
        """A host has stored files before their record, and stays their holder while it is there.

        Raises:
            Fenced: The run is over.
        """
        self.admit(run)
        self._stored.setdefault(member, []).append((run, part))
        self._serving.add((member, run))

    def stored_by(self, member: str) -> list[Persisted]:
        """Return what a host that is gone has stored for the next commit."""
        return [part for run, part in self._stored.get(member, ()) if run not in self._over]

    def is_served_only_by(self, runs: Collection[str]) -> bool:
        """Return True where no host has files of other runs, or of no run, for the next record."""
        return all(run in runs for _, run in self._serving)

    def leave(self, member: str) -> None:
        """A host is about to end, and has stored all that it had."""
        self._left.add(member)

    def outlives(self, member: str) -> bool:
        """Return True where nothing is lost with a host."""
        return self.outlives_hosts or member in self._left

    def lose(self, member: str) -> None:
        """A host is gone, and with it what neither a record has nor it has stored."""
        if not self.outlives(member):
            self._lost.update(each for each in self._serving if each[0] == member)

    def take_hosts(self, barrier: str) -> frozenset[tuple[str, str]]:
        """Return the hosts that a commit asks, each with a run: those that have taken files since the last one.

        Raises:
            TaskManagerLost: One of them is gone; the next commit may go well.
        """
        taken = frozenset((member, run) for member, run in self._serving if run not in self._over)
        lost = sorted(member for member, run in self._lost if run not in self._over)
        # What the others hold of no run is the next commit's, and they tell of themselves once.
        self._serving = self._serving - self._lost if lost else set()
        self._lost.clear()
        if lost:
            raise TaskManagerLost(
                f"the file service {', '.join(lost)} is gone with files of {barrier}: restart the query, which runs "
                "the batch again"
            )
        return taken

    def keep_hosts(self, holders: Iterable[tuple[str, str]]) -> None:
        """Hosts have still files of runs for a later commit."""
        self._serving.update(holders)

    def count_stored(self, member: str) -> int:
        """Return how often a host has told what it had stored."""
        return len(self._stored.get(member, ()))

    def forget_stored(self, counts: Mapping[str, int]) -> None:
        """A record holds what hosts had stored, so many times each, when it was begun."""
        for member, count in counts.items():
            del self._stored.get(member, [])[:count]

    def is_final(self, path: str, is_changed: Callable[[str], bool] = lambda barrier: False) -> bool:
        """Return True where a task comes too late with a file: it is committed.

        Args:
            path: The file.
            is_changed: Says whether a commit is no longer that of the index: users delete them to roll back.
        """
        return is_final(path, self.index) and not is_changed(f"commits/{batch_of(path)}")

    def step(
        self,
        barrier: str,
        content: bytes,
        parts: Sequence[Persisted],
        sequence: int,
        boundary: int,
        also: Sequence[tuple[str, bytes]] = (),
        in_front: Sequence[int] = (),
    ) -> Step:
        """Return the record of a barrier.

        Args:
            barrier: Its path; empty for one without.
            content: The barrier's bytes.
            parts: What each host has persisted for it.
            also: Path and bytes of barriers before it that ride in its record.
            sequence: The record's number.
            boundary: Number of the newest whole record; 0 for none.
            in_front: Sizes of other segments that the record holds before these.

        Raises:
            TaskManagerLost: State that the commit names is missing.
        """
        located = inlined_handles(parts, sequence, in_front)
        inlined = tuple(data for part in parts for data in part.inlined_segments())
        winners: dict[str, tuple[PersistedFile, SegmentHandle | None]] = {}
        deleted: set[str] = set()
        for part in parts:
            handles = [located[each.seal] if each.seal else each.handle for each in part.segments]
            deleted.update(each.path for each in part.files if each.size < 0 and barrier_batch(each.path) is not None)
            # Of one host the latest counts: it may have deleted since what it had stored before the record.
            for file in {each.path: each for each in part.files}.values():
                known = winners.get(file.path)
                if known is not None and not _takes_over(file, known[0]):
                    continue
                winners[file.path] = (file, handles[file.segment] if file.size >= 0 else None)
        added, removed = [], []
        for path, (file, handle) in winners.items():
            if handle is None:
                if path in self.index:
                    removed.append(path)
            elif not self.is_final(path, winners.__contains__):
                added.append(FileEntry(path, file.size, file.modified_ms, handle, file.log_id, file.sqn))
        removed += [path for path in self._taken_back(deleted) if path not in winners]
        for path, body in (*also, (barrier, content)):
            self._check_complete(path, body, added, removed)
        record = change = FileRecord.of(barrier, self.current, added, removed)
        if not boundary or sequence - boundary >= self._whole_every:
            gone = {*removed, *(each.path for each in added)}
            whole = [*(each for each in self.index if each.path not in gone), *added]
            record = FileRecord.of(barrier, self.current, whole, is_whole=True, is_checked=True)
        return Step(record, change, inlined, located)

    def _taken_back(self, deleted: Collection[str]) -> list[str]:
        """Return state of batches that users take back, by deleting the newest barriers: others take their numbers."""
        barriers = [f"{kind}/{each}" for kind in _KINDS for each in self.index.tree.names(kind)]
        version = next_version(path for path in barriers if path not in deleted)
        if next_version(deleted) <= version:
            return []
        return [entry.path for entry in self.index if is_ahead(entry.path, version)]

    def _check_complete(self, barrier: str, content: bytes, added: Sequence[FileEntry], removed: Sequence[str]) -> None:
        batch = barrier_batch(barrier, "commits")
        if batch is None:
            return
        # Another action of the batch may have put some of them with an earlier record.
        found = {*(each.path for each in added), *self.index.of_version(batch + 1)}.difference(removed)
        # Whoever deletes a store's files wants it no more.
        before = {*self.index.of_version(batch)}.difference(removed)
        check_complete(barrier, content, found, before, is_rewrite=self.current in self._lent)


def _takes_over(file: PersistedFile, known: PersistedFile) -> bool:
    """Return True where a host's file takes the place of another host's; a file always that of a deletion."""
    if file.size < 0 or known.size < 0:
        return file.size >= 0
    return wins(file.attempt, known.attempt)
