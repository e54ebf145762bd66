"""Calls between the coordinator and its TaskManagers: membership, restores and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dstl.metrics import Sample
from dstl.rpc.client import Address
from dstl.rpc.codec import Call, Message, Payload
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Done
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumberRange
from materializer.restore.progress import RestoreStatus

__all__ = [
    "Abort",
    "Complete",
    "Enlist",
    "Enlisted",
    "Measured",
    "Persist",
    "Persisted",
    "PersistedLog",
    "PersistedSegment",
    "ReadMetrics",
    "ReadRestoreStatus",
    "Register",
    "Restore",
    "RestoreStatusReply",
    "Restored",
    "Resume",
    "Resumed",
    "Size",
    "TableSize",
]


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
class Enlist(Call[Enlisted]):
    """A process asks for what it needs to serve as a TaskManager.

    Attributes:
        member: The TaskManager's id.
        pid: Its process id, on its own host.
    """

    name: ClassVar[str] = "enlist"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
    member: str
    pid: int


@dataclass(frozen=True, slots=True)
class Register(Call[Done]):
    """A TaskManager serves, or says why it cannot.

    Attributes:
        member: The TaskManager's id.
        pid: Its process id, on its own host.
        address: Where it serves; None where it does not.
        unfit: Why it does not; empty where it does.
    """

    name: ClassVar[str] = "register"
    role: ClassVar[Role | None] = Role.TASK_MANAGER
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
class Resume(Call[Resumed]):
    """A run begins on a checkpoint; what the run before has left is dropped.

    Attributes:
        query: Spark's query id.
        parent: The checkpoint; None for an empty state.
        key_groups: The key groups that the TaskManager owns from now on.
    """

    name: ClassVar[str] = "resume"
    role: ClassVar[Role | None] = Role.COORDINATOR
    query: str
    parent: int | None
    key_groups: KeyGroupRange


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """The reply to :class:`Restore`.

    Attributes:
        seconds: How long it took.
        bytes: Bytes that were read from the store.
        changes: Change records that were replayed.
        status: The last status of its progress; None where there was none.
    """

    seconds: float
    bytes: int
    changes: int
    status: RestoreStatus | None


@dataclass(frozen=True, slots=True)
class Restore(Call[Restored]):
    """Tables are replaced by those of a checkpoint.

    Attributes:
        key_groups: The key groups that the TaskManager owns from now on.
        checkpoint: The checkpoint as JSON; empty for an empty state.
    """

    name: ClassVar[str] = "restore"
    role: ClassVar[Role | None] = Role.COORDINATOR
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
class ReadRestoreStatus(Call[RestoreStatusReply]):
    """The coordinator asks how far a restore has come, over another connection than the restore's."""

    name: ClassVar[str] = "restore_progress"
    role: ClassVar[Role | None] = Role.COORDINATOR


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
class Persisted(Message):
    """A TaskManager's part of a checkpoint.

    Attributes:
        segments: What it has sealed.
        logs: What of it belongs to the checkpoint.
        materializations: Those that have finished since the parent, of the parent's state or of an ancestor's.
        open_logs: Logs that it may go on with: they stay listed when they are materialized to their end.
        requests: Requests to the store since the checkpoint before.
        hedges: How many of them were hedges, of uploads that have ended.
        state: By operator, entries and bytes of the tables, which do not hold this batch's changes yet.
        inlined: The bytes of its inlined segments, back to back in their order.
    """

    segments: tuple[PersistedSegment, ...]
    logs: tuple[PersistedLog, ...]
    materializations: tuple[MaterializationReport, ...] = ()
    open_logs: tuple[str, ...] = ()
    requests: int = 0
    hedges: int = 0
    state: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    inlined: Payload = b""

    def inlined_segments(self) -> Iterator[tuple[PersistedSegment, bytes]]:
        """Yield each inlined segment with its bytes."""
        at = 0
        for segment in self.segments:
            if segment.seal:
                yield segment, bytes(self.inlined[at : at + segment.handle.size])
                at += segment.handle.size


@dataclass(frozen=True, slots=True)
class Persist(Call[Persisted]):
    """A checkpoint begins: the winners' changes are made durable, or handed over to be written inside the manifest.

    Attributes:
        winners: Per operator, the attempts whose changes count.
        timeout_s: Seconds that the TaskManager has.
    """

    name: ClassVar[str] = "persist"
    role: ClassVar[Role | None] = Role.COORDINATOR
    winners: Mapping[str, tuple[int, ...]]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Complete(Call[Done]):
    """A checkpoint is durable.

    Attributes:
        checkpoint: Its number.
        winners: Per operator, the attempts whose changes it holds.
        located: By seal, where the manifest holds an inlined segment.
        time_ms: The batch's processing time, Unix milliseconds; None where it is not known.
    """

    name: ClassVar[str] = "complete"
    role: ClassVar[Role | None] = Role.COORDINATOR
    checkpoint: int
    winners: Mapping[str, tuple[int, ...]]
    located: Mapping[str, SegmentHandle]
    time_ms: int | None


@dataclass(frozen=True, slots=True)
class Abort(Call[Done]):
    """The checkpoint that was persisted last has failed."""

    name: ClassVar[str] = "abort"
    role: ClassVar[Role | None] = Role.COORDINATOR


@dataclass(frozen=True, slots=True)
class TableSize(Message):
    """The size of all tables of a TaskManager."""

    entries: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Size(Call[TableSize]):
    """The coordinator asks how large the tables are."""

    name: ClassVar[str] = "size"
    role: ClassVar[Role | None] = Role.COORDINATOR


@dataclass(frozen=True, slots=True)
class Measured(Message):
    """The reply to :class:`ReadMetrics`.

    Attributes:
        sample: The values of the TaskManager's metrics.
    """

    sample: Sample


@dataclass(frozen=True, slots=True)
class ReadMetrics(Call[Measured]):
    """The coordinator asks for a TaskManager's metrics, over another connection than that of its other calls."""

    name: ClassVar[str] = "metrics"
    role: ClassVar[Role | None] = Role.COORDINATOR
