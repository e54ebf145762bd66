"""Calls of a worker: an attempt begins, opens its state, reads, writes and acknowledges.

A worker imports this module, so nothing here may need pydantic. The calls of TaskManagers and of the coordinator are in
:mod:`dstl.rpc.fleet_messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dstl.rpc.client import Address
from dstl.rpc.codec import Call, Message, Payload, R
from dstl.rpc.handshake import Role
from handles.key_group import KeyGroupRange

__all__ = [
    "Acknowledged",
    "Acknowledgement",
    "Assignment",
    "AttemptCall",
    "Begin",
    "Begun",
    "Done",
    "DueEntries",
    "EndOfChanges",
    "ExpiryPlace",
    "FetchDue",
    "FetchEntries",
    "FetchEntry",
    "FetchMany",
    "FetchValues",
    "Fetched",
    "OpenAttempt",
    "ScanEntries",
    "ScanTimers",
    "ScanValues",
    "TaskAttempt",
    "Write",
]


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One execution of one task.

    Attributes:
        query_id: Spark's query id: stable over restarts.
        run_id: Spark's run id: new at every start.
        operator: The operator's uid.
        batch_id: The micro-batch.
        slot: The task's index in its stage; not the partition, because a union shifts it.
        stage_id: Spark's stage id.
        attempt_id: Spark's task attempt id: unique in the application.
        invocation: Of our function; one attempt calls it once, unless partitions were merged behind the operator.
    """

    query_id: str
    run_id: str
    operator: str
    batch_id: int
    slot: int
    stage_id: int
    attempt_id: int
    invocation: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Key groups and the TaskManager that serves them."""

    key_groups: KeyGroupRange
    address: Address


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The reply of a call that has nothing to tell."""


@dataclass(frozen=True, slots=True)
class Begun(Message):
    """The reply to :class:`Begin`.

    Attributes:
        launch: A TaskManager that the worker launches before it begins again; the other fields mean nothing then.
        attempt: The number that the attempt goes by from now on; a task with several partitions is several attempts.
        parent: The checkpoint that the batch builds on; None for an empty state.
        watermark_ms: Event-time watermark, Unix milliseconds; None where there is none.
        late_watermark_ms: Rows at or before it are late.
        sequence: The number that the batch gives to elements of lists.
        processing_time_ms: The batch's processing time, Unix milliseconds.
        registry: The operator's states as JSON, as the driver has settled them for the run.
        assignments: TaskManagers in the order of their key groups.
    """

    launch: str | None = None
    attempt: int = 0
    parent: int | None = None
    watermark_ms: int | None = None
    late_watermark_ms: int | None = None
    sequence: int = 1
    processing_time_ms: int = 0
    registry: bytes = b""
    assignments: tuple[Assignment, ...] = ()


@dataclass(frozen=True, slots=True)
class Begin(Call[Begun]):
    """An attempt begins.

    Attributes:
        task: The attempt.
        pid: The worker's process id.
        host: The worker's host; empty where it launches no TaskManagers.
        launched: How many TaskManagers it has launched already.
    """

    name: ClassVar[str] = "begin"
    role: ClassVar[Role | None] = Role.WORKER
    task: TaskAttempt
    pid: int
    host: str = ""
    launched: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledged(Message):
    """The reply to :class:`Acknowledgement`.

    Attributes:
        decision: ``GO_ON`` where the batch lacks others, ``WAIT`` where its checkpoint was made.
    """

    decision: str


@dataclass(frozen=True, slots=True)
class Acknowledgement(Call[Acknowledged]):
    """A task says that its change set is complete and held by the TaskManagers.

    Attributes:
        task: The attempt.
        partition: The operator's partition that the task's keys belong to; None where it had no row.
        digest: Digest of the change set, empty where there is none: equal digests are equal changes.
        event_time_ms: Latest event time among its rows, Unix milliseconds; None where there is none.
        late_rows: Rows that it has dropped because they came behind the watermark.
        broadcast: Digest of what it has changed in broadcast states, empty where it has not: every task of a batch has
            the same.
    """

    name: ClassVar[str] = "acknowledge"
    role: ClassVar[Role | None] = Role.WORKER
    task: TaskAttempt
    partition: int | None
    digest: bytes
    event_time_ms: int | None = None
    late_rows: int = 0
    broadcast: bytes = b""


@dataclass(frozen=True, slots=True)
class AttemptCall(Call[R]):
    """A call about one attempt's view of its operator's state, on one TaskManager.

    Attributes:
        operator: The operator's uid.
        attempt: Spark's task attempt id.
    """

    role: ClassVar[Role | None] = Role.WORKER
    operator: str
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        """The attempt's name on a TaskManager."""
        return self.operator, self.attempt


@dataclass(frozen=True, slots=True)
class OpenAttempt(AttemptCall[Done]):
    """An attempt is about to read and write.

    Attributes:
        batch: The micro-batch.
        parent: The checkpoint that it builds on; None for an empty state.
        parallelism: Partitions of the operator.
    """

    name: ClassVar[str] = "open_attempt"
    batch: int
    parent: int | None
    parallelism: int


@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """The reply of every read.

    Attributes:
        data: What was found, in the format that the call names.
    """

    data: Payload


@dataclass(frozen=True, slots=True)
class FetchMany(AttemptCall[Fetched]):
    """Reads the values of many keys of some point states; the reply is msgpack, a list of values for each state.

    A reply may hold the values of fewer keys, from the first on: as many as fit.

    Attributes:
        states: The states' numbers.
        keys: msgpack: a list of key groups, and a list of keys.
    """

    name: ClassVar[str] = "fetch_many"
    states: tuple[int, ...]
    keys: Payload


@dataclass(frozen=True, slots=True)
class FetchValues(AttemptCall[Fetched]):
    """Reads the values of many keys of one point state; the reply is Arrow, of ``VALUE_COLUMN``, maybe of fewer keys.

    Attributes:
        state: The state's number.
        keys: Arrow, of ``KEY_COLUMNS``.
    """

    name: ClassVar[str] = "fetch_values"
    state: int
    keys: Payload


@dataclass(frozen=True, slots=True)
class FetchEntries(AttemptCall[Fetched]):
    """Reads all entries of many keys; the reply is msgpack, a list of pairs or None for each key.

    Attributes:
        state: The state's number.
        max_bytes: A key with more entries, in bytes, is answered with None.
        keys: msgpack: a list of key groups, and a list of keys.
    """

    name: ClassVar[str] = "fetch_entries"
    state: int
    max_bytes: int
    keys: Payload


@dataclass(frozen=True, slots=True)
class FetchEntry(AttemptCall[Fetched]):
    """Reads the values of some user keys of one key; the reply is msgpack, a list of values.

    Attributes:
        state: The state's number.
        key_group: The key's.
        keys: msgpack: the key, and a list of user keys.
    """

    name: ClassVar[str] = "fetch_entry"
    state: int
    key_group: int
    keys: Payload


@dataclass(frozen=True, slots=True)
class ScanEntries(AttemptCall[Fetched]):
    """Reads the next entries of one key; the reply is msgpack, a list of pairs.

    Attributes:
        state: The state's number.
        key_group: The key's.
        max_bytes: About how many bytes the reply may have.
        after: msgpack: the key, and the user key that the entries come after, or None.
    """

    name: ClassVar[str] = "scan_entries"
    state: int
    key_group: int
    max_bytes: int
    after: Payload


@dataclass(frozen=True, slots=True)
class ScanTimers(AttemptCall[Fetched]):
    """Reads the next due timers; the reply is msgpack, a list of key group, key and user key.

    Attributes:
        state: The timers' state.
        limit: Most timers to return.
        due: msgpack: a list of key groups, the last user key that is due, and the timer that the page comes after, or
            None.
    """

    name: ClassVar[str] = "scan_timers"
    state: int
    limit: int
    due: Payload


@dataclass(frozen=True, slots=True)
class ExpiryPlace:
    """The place of the time at which an entry expires: eight bytes, little-endian, in its key or its value.

    Attributes:
        in_key: In the key; else in the value.
        offset: Where the time begins. A key or value that ends before expires never.
        null_bit: A bit, counted from the beginning, that is set where there is no time; None for no such bit.
    """

    in_key: bool
    offset: int
    null_bit: int | None = None


@dataclass(frozen=True, slots=True)
class DueEntries(Message):
    """The reply to :class:`FetchDue`.

    Attributes:
        more: Whether there are more to ask for.
        data: Entries, Arrow of ``ENTRY_COLUMNS``.
    """

    more: bool
    data: Payload


@dataclass(frozen=True, slots=True)
class FetchDue(AttemptCall[DueEntries]):
    """Reads the entries of a point state that are due.

    They come key group by key group, and within one by their time. A reply holds as many as fit, at least one.

    Attributes:
        state: The state's number.
        place: Where an entry's time stands.
        until: Due is a time at or below this.
        skip: How many entries were answered already.
        with_values: Whether values are wanted; without, they are empty.
        key_groups: msgpack: a list.
    """

    name: ClassVar[str] = "fetch_due"
    state: int
    place: ExpiryPlace
    until: int
    skip: int
    with_values: bool
    key_groups: Payload


@dataclass(frozen=True, slots=True)
class ScanValues(AttemptCall[Fetched]):
    """Reads the next entries of a point state in one key group; the reply is Arrow, of ``ENTRY_COLUMNS``.

    Attributes:
        state: The state's number.
        key_group: The key group.
        after: msgpack: the key that they come after, or None for the first ones.
    """

    name: ClassVar[str] = "scan_values"
    state: int
    key_group: int
    after: Payload


@dataclass(frozen=True, slots=True)
class Write(AttemptCall[Done]):
    """A part of an attempt's change set; the answer waits while the log is over its budget.

    Attributes:
        partition: The operator's partition that all its keys belong to.
        metadata: The operator's states as JSON, for the log's own record; empty but in an attempt's first part.
        expiring: The puts are of entries that had no time before, or another one: an index by time takes them.
        changes: An Arrow stream of ``CHANGE_SCHEMA``.
    """

    name: ClassVar[str] = "write"
    partition: int
    metadata: bytes
    expiring: bool
    changes: Payload


@dataclass(frozen=True, slots=True)
class EndOfChanges(AttemptCall[Done]):
    """The attempt has written its last part: what it wrote may be encoded before its checkpoint. A hint, no promise."""

    name: ClassVar[str] = "end_of_changes"
