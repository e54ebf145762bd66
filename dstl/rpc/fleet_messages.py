"""Calls between the coordinator and its TaskManagers: membership, restores and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dstl.changelog.log_segment import InlineSegment, LogSegment
from dstl.metrics import Sample
from dstl.rpc.client import Address
from dstl.rpc.codec import Bulk, Call, Message, Payload
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from materializer.restore.progress import RestoreStatus


@dataclass(frozen=True, slots=True)
class Enlisted(Message):
    """The reply to :class:`Enlist`.

    Attributes:
        marks: Objects that the TaskManager must find at the location of its configuration.
        config: The TaskManager's configuration as JSON.
    """

    marks: tuple[str, ...]
    config: Payload


@dataclass(frozen=True, slots=True)
class Enlist(Call[Enlisted], role=Role.TASK_MANAGER):
    """A process asks for what it needs to serve as a TaskManager.

    Attributes:
        member: The TaskManager's id.
        pid: Its process id, on its own host.
    """

    member: str
    pid: int


@dataclass(frozen=True, slots=True)
class Register(Call[Done], role=Role.TASK_MANAGER):
    """A TaskManager serves, or says why it cannot.

    Attributes:
        member: The TaskManager's id.
        pid: Its process id, on its own host.
        address: Where it serves; None where it does not.
        unfit: Why it does not; empty where it does.
    """

    member: str
    pid: int
    address: Address | None
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """The reply to :class:`Resume`.

    Attributes:
        resumed: The tables hold the parent; where they do not, a restore has to follow.
        writer: The TaskManager's writer id, which the names of its segments hold.
    """

    resumed: bool
    writer: str


@dataclass(frozen=True, slots=True)
class Resume(Call[Resumed], role=Role.COORDINATOR):
    """A run begins on a checkpoint; what the run before has left is dropped.

    Attributes:
        query: Spark's query id.
        parent: The checkpoint; None for an empty state.
        key_groups: The key groups that the TaskManager owns from now on.
    """

    query: str
    parent: int | None
    key_groups: KeyGroupRange


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """The reply to :class:`Restore`.

    Attributes:
        seconds: How long it took until the tables could be used.
        bytes: Bytes that were read from the store until then.
        changes: Change records that were replayed.
        status: The last status of its progress; None where there was none. Not finished where the rest comes behind.
    """

    seconds: float
    bytes: int
    changes: int
    status: RestoreStatus | None


@dataclass(frozen=True, slots=True)
class Restore(Call[Restored], role=Role.COORDINATOR):
    """Tables are replaced by those of a checkpoint.

    Attributes:
        key_groups: The key groups that the TaskManager owns from now on.
        checkpoint: The checkpoint as JSON; empty for an empty state.
    """

    key_groups: KeyGroupRange
    checkpoint: Payload


@dataclass(frozen=True, slots=True)
class RestoreStatusReply(Message):
    """The reply to :class:`ReadRestoreStatus`.

    Attributes:
        status: The latest status; None before the first.
    """

    status: RestoreStatus | None


@dataclass(frozen=True, slots=True)
class ReadRestoreStatus(Call[RestoreStatusReply], role=Role.COORDINATOR, name="restore_progress"):
    """The coordinator asks how far a restore has come, over another connection than the restore's."""


@dataclass(frozen=True, slots=True)
class PersistedSegment:
    """A segment that a TaskManager has sealed: stored already, or to be written inside the manifest.

    Attributes:
        handle: Where it lies; of an inlined one, only size and checksum mean anything.
        key_groups: The key groups in it.
        seal: The id of an inlined one, whose bytes are in :attr:`Persisted.inlined`; empty for a stored one.
    """

    handle: SegmentHandle
    key_groups: KeyGroupRange
    seal: str = ""


@dataclass(frozen=True, slots=True)
class PersistedLog:
    """Change sets of one log, and the segments that hold them.

    Attributes:
        log_id: The log.
        operator: Its operator's uid.
        key_groups: Key groups that the log may hold.
        pieces: ``(range, index of the segment)`` in order.
    """

    log_id: str
    operator: str
    key_groups: KeyGroupRange
    pieces: tuple[tuple[SequenceNumberRange, int], ...]


@dataclass(frozen=True, slots=True)
class PersistedFile:
    """One file of a checkpoint directory, or a deletion, that a TaskManager holds for the next record.

    Attributes:
        path: Relative to the directory.
        attempt: The task's; negative where no task wrote it.
        size: In bytes; negative for a deletion.
        modified_ms: When it was written.
        log_id: The log; empty for a deletion.
        sqn: The change set.
        segment: Place in the reply's ``segments``.
    """

    path: str
    attempt: int
    size: int
    modified_ms: int
    log_id: str
    sqn: int
    segment: int


@dataclass(frozen=True, slots=True)
class Persisted(Message):
    """A TaskManager's part of a record: of a checkpoint, or of the commit of a checkpoint directory.

    Attributes:
        segments: What it has sealed.
        logs: What of it belongs to the checkpoint.
        materializations: Those that have finished since the parent, of the parent's state or of an ancestor's.
        open_logs: Logs that it may go on with: they stay listed when they are materialized to their end.
        requests: Requests to the store since the checkpoint before.
        hedges: How many of them were hedges, of uploads that have ended.
        state: By operator, entries and bytes of the tables, which do not hold this batch's changes yet.
        files: What of it belongs to the checkpoint directory, in the order in which it came.
        has_more: Snapshots are left for a later record, so that losing this TaskManager still loses something.
        inlined: The bytes of its inlined segments, back to back in their order.
    """

    segments: tuple[PersistedSegment, ...]
    logs: tuple[PersistedLog, ...]
    materializations: tuple[MaterializationReport, ...] = ()
    open_logs: tuple[str, ...] = ()
    requests: int = 0
    hedges: int = 0
    state: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    files: tuple[PersistedFile, ...] = ()
    has_more: bool = False
    inlined: Payload = b""

    def inlined_segments(self) -> Iterator[bytes]:
        """Yield the bytes of each inlined segment."""
        at = 0
        for segment in self.segments:
            if segment.seal:
                yield bytes(self.inlined[at : at + segment.handle.size])
                at += segment.handle.size


@dataclass(frozen=True, slots=True)
class DirectoryCommit:
    """The commit of a checkpoint directory: its run's files are persisted, and other runs' forgotten.

    Attributes:
        root: The directory.
        run: Whose commit it is.
        version: Of the state to which the commit leads.
    """

    root: str
    run: str
    version: int


@dataclass(frozen=True, slots=True)
class Persist(Call[Persisted], role=Role.COORDINATOR):
    """A record begins: what is to be in it is made durable, or handed over to be written inside the record.

    Attributes:
        winners: Per operator, the attempts whose changes count.
        timeout_s: Seconds that the TaskManager has.
        files: The commit of a checkpoint directory that has the record; None for a checkpoint of tables.
    """

    winners: Mapping[str, tuple[int, ...]]
    timeout_s: float
    files: DirectoryCommit | None = None


@dataclass(frozen=True, slots=True)
class Complete(Call[Done], role=Role.COORDINATOR):
    """The record of the latest persist is durable.

    Attributes:
        located: By seal, where the record holds an inlined segment.
        root: The checkpoint directory whose record it is; empty for a checkpoint of tables, which the others describe.
        checkpoint: Its number.
        winners: Per operator, the attempts whose changes it holds.
        time_ms: The batch's processing time, Unix milliseconds; None where it is not known.
    """

    located: Mapping[str, SegmentHandle]
    root: str = ""
    checkpoint: int = 0
    winners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    time_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Abort(Call[Done], role=Role.COORDINATOR):
    """The record of the latest persist was certainly not written.

    Attributes:
        root: The checkpoint directory whose record it was; empty for a checkpoint of tables.
    """

    root: str = ""


@dataclass(frozen=True, slots=True)
class UnnamedBases(Message):
    """The reply to :class:`ReadUnnamedBases`.

    Attributes:
        running: Materializations that run: none or one.
        waiting: Finished ones that no checkpoint has named.
        waited_s: How long the oldest of those has waited, seconds.
    """

    running: int
    waiting: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class ReadUnnamedBases(Call[UnnamedBases], role=Role.COORDINATOR, name="unnamed_bases"):
    """The coordinator asks for materializations that a checkpoint could name, now or soon."""


@dataclass(frozen=True, slots=True)
class Measured(Message):
    """The reply to :class:`ReadMetrics`.

    Attributes:
        sample: The values of the TaskManager's metrics.
    """

    sample: Sample


@dataclass(frozen=True, slots=True)
class ReadMetrics(Call[Measured], role=Role.COORDINATOR, name="metrics"):
    """The coordinator asks for a TaskManager's metrics, over another connection than that of its other calls."""


@dataclass(frozen=True, slots=True)
class Content(Message):
    """The reply to :class:`LookUp`: the key's entries, ordered by user key.

    Attributes:
        user_keys: Of each; empty where the state has none.
        values: Of each.
    """

    user_keys: Bulk[tuple[bytes, ...]]
    values: Bulk[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class LookUp(Call[Content], role=Role.COORDINATOR):
    """The driver asks for one key's entries of one state, over another connection than that of its other calls.

    Attributes:
        checkpoint: The checkpoint as of which they are wanted.
        operator: The operator's uid.
        state: The state's number.
        key_group: The key's group.
        key: The key.
        user_keys: Of the entries that are wanted; empty for all.
    """

    checkpoint: int
    operator: str
    state: int
    key_group: int
    key: Bulk[bytes]
    user_keys: Bulk[tuple[bytes, ...]] = ()


class PersistedPart:
    """Collects the logs of one persist; each segment is listed once, with the key groups of all logs in it."""

    def __init__(self) -> None:
        self._index: dict[SegmentHandle | str, int] = {}
        self._segments: list[PersistedSegment] = []
        self._inlined: list[bytes] = []
        self._logs: list[PersistedLog] = []

    def add(self, log_id: str, operator: str, key_groups: KeyGroupRange, segments: Sequence[LogSegment]) -> None:
        """Add a log: which segments hold its change sets.

        Args:
            log_id: The log.
            operator: Its operator's uid.
            key_groups: Key groups that it may hold.
            segments: In order.
        """
        pieces = tuple((segment.range, self.place(segment.location, key_groups)) for segment in segments)
        self._logs.append(PersistedLog(log_id, operator, key_groups, pieces))

    def finish(self) -> Persisted:
        """Return the reply; what else belongs to it the caller adds."""
        return Persisted(tuple(self._segments), tuple(self._logs), inlined=b"".join(self._inlined))

    def place(self, where: SegmentHandle | InlineSegment, key_groups: KeyGroupRange) -> int:
        """Return the place of a segment among those of the reply; it holds these key groups, and perhaps more."""
        seal = where.id if isinstance(where, InlineSegment) else ""
        handle = SegmentHandle("", where.size, where.checksum) if isinstance(where, InlineSegment) else where
        at = self._index.setdefault(seal or handle, len(self._segments))
        if at < len(self._segments):
            known = self._segments[at].key_groups
            key_groups = KeyGroupRange(min(known.start, key_groups.start), max(known.end, key_groups.end))
            self._segments[at] = PersistedSegment(handle, key_groups, seal)
        else:
            self._segments.append(PersistedSegment(handle, key_groups, seal))
            if isinstance(where, InlineSegment):
                self._inlined.append(where.data)
        return at
