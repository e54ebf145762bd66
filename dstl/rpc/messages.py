"""Calls of a worker: an attempt begins, opens its state, reads, writes and acknowledges.

A worker imports this module, so nothing here may need pydantic. The calls of TaskManagers and of the coordinator are in
:mod:`dstl.rpc.fleet_messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.errors import Invalid
from dstl.rpc.client import Address
from dstl.rpc.codec import Bulk, Call, Message, Payload, R
from dstl.rpc.handshake import Role
from handles.key_group import KeyGroupRange


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
    """The reply of a call that returns nothing."""


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
class Begin(Call[Begun], role=Role.WORKER):
    """An attempt begins.

    Attributes:
        task: The attempt.
        pid: The worker's process id.
        host: The worker's host; empty where it launches no TaskManagers.
        launched: How many TaskManagers it has launched already.
    """

    task: TaskAttempt
    pid: int
    host: str = ""
    launched: int = 0


@dataclass(frozen=True, slots=True)
class Acknowledgement(Call[Done], role=Role.WORKER, name="acknowledge"):
    """A task says that its change set is complete and held by the TaskManagers.

    Attributes:
        task: The attempt.
        partition: The operator's partition that the task's keys belong to; None where it had no row.
        event_time_ms: Latest event time among its rows, Unix milliseconds; None where there is none.
        late_rows: Rows that it has dropped because they came behind the watermark.
        broadcast: Digest of what it has changed in broadcast states, empty where it has not: every task of a batch has
            the same.
    """

    task: TaskAttempt
    partition: int | None
    event_time_ms: int | None = None
    late_rows: int = 0
    broadcast: bytes = b""


@dataclass(frozen=True, slots=True)
class AttemptCall(Call[R], role=Role.WORKER):
    """A call about one attempt's view of its operator's state, on one TaskManager.

    Attributes:
        operator: The operator's uid.
        attempt: Spark's task attempt id.
    """

    operator: str
    attempt: int

    @property
    def who(self) -> tuple[str, int]:
        """The attempt's name on a TaskManager."""
        return self.operator, self.attempt


@dataclass(frozen=True, slots=True)
class StateCall(AttemptCall[R]):
    """A read of one of the operator's states.

    Attributes:
        state: The state's number.
    """

    state: int


@dataclass(frozen=True, slots=True)
class OpenAttempt(AttemptCall[Done]):
    """An attempt is about to read and write.

    Attributes:
        batch: The micro-batch.
        parent: The checkpoint that it builds on; None for an empty state.
        parallelism: Partitions of the operator.
    """

    batch: int
    parent: int | None
    parallelism: int


@dataclass(frozen=True, slots=True)
class Fetched(Message):
    """The reply of a read of bytes or columns.

    Attributes:
        data: What was found, in the format that the call names.
    """

    data: Payload


@dataclass(frozen=True, slots=True)
class Values(Message):
    """Values of keys.

    Attributes:
        columns: For each state the values of the keys, None where there is none.
    """

    columns: Bulk[tuple[tuple[bytes | None, ...], ...]]


@dataclass(frozen=True, slots=True)
class Entries(Message):
    """Entries of keys, in the order of the keys and then of their user keys.

    Attributes:
        counts: How many entries each key has; None for a key that has too much to be answered at once.
        user_keys: Of all entries.
        values: Likewise.
    """

    counts: Bulk[tuple[int | None, ...]]
    user_keys: Bulk[tuple[bytes, ...]]
    values: Bulk[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class FetchMany(AttemptCall[Values]):
    """Reads the values of many keys of some point states.

    A reply may hold the values of fewer keys, from the first on: as many as fit.

    Attributes:
        states: The states' numbers.
        key_groups: One for each key.
        keys: The keys.
    """

    states: tuple[int, ...]
    key_groups: Bulk[tuple[int, ...]]
    keys: Bulk[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class FetchValues(StateCall[Fetched]):
    """Reads the values of many keys of one point state; the reply is Arrow, of ``VALUE_COLUMN``, maybe of fewer keys.

    Attributes:
        keys: An Arrow batch of ``KEY_COLUMNS``.
    """

    keys: Payload


@dataclass(frozen=True, slots=True)
class FetchEntries(StateCall[Entries]):
    """Reads all entries of many keys.

    Attributes:
        max_bytes: A key with more entries, in bytes, is answered with None.
        key_groups: One for each key.
        keys: The keys.
    """

    max_bytes: int
    key_groups: Bulk[tuple[int, ...]]
    keys: Bulk[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class FetchEntry(StateCall[Values]):
    """Reads the values of some user keys of one key: one column.

    Attributes:
        key_group: The key's.
        key: The key.
        user_keys: The user keys.
    """

    key_group: int
    key: Bulk[bytes]
    user_keys: Bulk[tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class ScanEntries(StateCall[Entries]):
    """Reads the next entries of one key.

    Attributes:
        key_group: The key's.
        max_bytes: About how many bytes the reply may have.
        key: The key.
        after: The user key that the entries come after; None for the first ones.
    """

    key_group: int
    max_bytes: int
    key: Bulk[bytes]
    after: Bulk[bytes | None]


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
        data: Entries, an Arrow batch of ``ENTRY_COLUMNS``.
    """

    more: bool
    data: Payload


@dataclass(frozen=True, slots=True)
class FetchDue(StateCall[DueEntries]):
    """Reads the entries of a point state, or the timers, that are due.

    They come key group by key group, and within one by their time. A reply holds as many as fit, at least one. A
    timer's user key stands in the place of its value.

    Attributes:
        place: Where an entry's time stands; None for timers, whose user key is a number of eight bytes, big-endian.
        until: Due is a time at or below this.
        skip: How many entries of the first key group were answered already.
        with_values: Whether values are wanted; without, those of a point state are empty.
        key_groups: Where to look.
    """

    place: ExpiryPlace | None
    until: int
    skip: int
    with_values: bool
    key_groups: Bulk[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ScanValues(StateCall[Fetched]):
    """Reads the next entries of a point state in one key group; the reply is an Arrow batch of ``ENTRY_COLUMNS``.

    Attributes:
        key_group: The key group.
        after: The key that they come after; None for the first ones.
    """

    key_group: int
    after: Bulk[bytes | None]


@dataclass(frozen=True, slots=True)
class Write(AttemptCall[Done]):
    """A part of an attempt's change set; the answer waits while the log is over its budget.

    Attributes:
        partition: The operator's partition that all its keys belong to.
        metadata: The operator's states as JSON, for the log's own record; empty but in an attempt's first part.
        expiring: The puts are of entries that had no time before, or another one: an index by time takes them.
        changes: An Arrow batch of ``CHANGE_SCHEMA``.
    """

    partition: int
    metadata: bytes
    expiring: bool
    changes: Payload


@dataclass(frozen=True, slots=True)
class EndOfChanges(AttemptCall[Done]):
    """The attempt has written its last part: what it wrote may be encoded before its checkpoint. A hint, no promise."""


KEY_COLUMNS = pa.schema(
    [pa.field("key_group", pa.uint16(), nullable=False), pa.field("key", pa.binary(), nullable=False)]
)
"""A request for the values of keys."""

VALUE_COLUMN = pa.schema([pa.field("value", pa.binary())])
"""Its answer, in the keys' order; null where there is no value."""


ENTRY_COLUMNS = pa.schema([*KEY_COLUMNS, pa.field("value", pa.binary(), nullable=False)])
"""Entries of a state, with the key group of each."""


def write_columns(schema: pa.Schema, columns: Sequence[pa.Array]) -> memoryview:
    """Return columns as an Arrow batch, see :func:`write_batch`."""
    return write_batch(pa.RecordBatch.from_arrays(list(columns), schema=schema))


def write_batch(batch: pa.RecordBatch) -> memoryview:
    """Return a batch as one Arrow message, without its schema: both sides know it, and a small batch would double."""
    return memoryview(batch.serialize())


def read_batch(payload: memoryview, schema: pa.Schema, *, checked: bool = False) -> pa.RecordBatch:
    """Return the batch of such a message; it lies in the payload, and is validated where it is to be ``checked``.

    Raises:
        Invalid: Fewer columns, or bytes that are no Arrow batch.
    """
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(payload), schema)
        if checked:
            batch.validate(full=True)
        return batch
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        raise Invalid(f"a payload is not an Arrow batch of {', '.join(schema.names)}: {error}") from None


def read_columns(payload: memoryview, schema: pa.Schema) -> list[pa.Array]:
    """Return the columns of such a batch, validated.

    Raises:
        Invalid: Other columns, or bytes that are no Arrow batch.
    """
    columns: list[pa.Array] = read_batch(payload, schema, checked=True).columns
    if any(column.null_count for column, field in zip(columns, schema, strict=True) if not field.nullable):
        raise Invalid("a payload has a null where none can be")
    return columns
