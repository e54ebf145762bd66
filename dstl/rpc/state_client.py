"""The source of prior state: the parent checkpoint's content as one task attempt sees it, and where its changes go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dstl.changelog.change_set import ENCODED_AHEAD_BYTES
from dstl.column_buffers import array_of
from dstl.errors import CorruptData
from dstl.rpc.client import Reply, Transport
from dstl.rpc.codec import Call, Payload, R
from dstl.rpc.messages import (
    ENTRY_COLUMNS,
    KEY_COLUMNS,
    VALUE_COLUMN,
    Done,
    DueEntries,
    EndOfChanges,
    Entries,
    ExpiryPlace,
    FetchDue,
    Fetched,
    FetchEntries,
    FetchEntry,
    FetchMany,
    FetchValues,
    OpenAttempt,
    ScanEntries,
    ScanValues,
    Values,
    Write,
    read_columns,
    write_batch,
    write_columns,
)
from handles.key_group import KeyGroupRange

if TYPE_CHECKING:
    # At run time it would bring pydantic into every worker.
    from handles.checkpoint import CheckpointId

_REQUEST_BYTES = 64 << 20
"""About how many bytes of keys one request holds: a fourth of the longest frame."""

Entry = tuple[bytes, bytes]
"""User key and value."""


@dataclass(slots=True)
class _Read:
    """A read of many keys from one TaskManager, in as many requests as it takes.

    Attributes:
        owner: The TaskManager's place.
        count: How many keys there are.
        ask: Makes the request for the keys from a place on.
        take: Takes a reply, and returns how many keys it has answered.
        at: How many keys were answered.
    """

    owner: int
    count: int
    ask: Callable[[int], Call[Any]]
    take: Callable[[Any], int]
    at: int = 0


class StateClient:
    """Reads, in bulk, and writes one operator's state at the TaskManagers that own it. One task's own; not thread-safe.

    What is read does not change while the task runs: the parent checkpoint, without the task's own writes. Sequences
    given together are of one length and belong together. Values are opaque bytes and never None; a missing one is None.

    What has nothing to tell is not waited for: the replies to :meth:`open` and :meth:`write` are looked at when a later
    read comes back, and by :meth:`flush`. An error among them is raised then, by that call and every later one.

    Args:
        owners: Which transport leads to the owner of which key groups; together they cover all.
        operator: The operator's uid.
        attempt: Spark's task attempt id.
    """

    def __init__(self, owners: Sequence[tuple[KeyGroupRange, Transport]], operator: str, attempt: int) -> None:
        self._owners = list(owners)
        self._who = operator, attempt
        self._told: set[int] = set()
        self._sent = [0 for _ in self._owners]
        self._unseen: list[deque[Reply[Done]]] = [deque() for _ in self._owners]

    def open(self, batch: int, parent: CheckpointId | None, parallelism: int) -> None:
        """Begin the attempt on every TaskManager; one that does not hold the parent's state says so later."""
        for owner in range(len(self._owners)):
            self._send_unseen(owner, OpenAttempt(*self._who, batch, parent, parallelism))

    def write(self, partition: int, changes: pa.RecordBatch, metadata: bytes, *, expiring: bool = False) -> None:
        """Send a part of the change set, sorted by key group; waits while too much of it was not taken yet.

        Args:
            partition: The operator's partition that all its keys belong to.
            changes: Columns of ``CHANGE_SCHEMA``.
            metadata: The operator's states, for the log's own record; each TaskManager gets them once.
            expiring: The puts are of entries whose time (see :meth:`fetch_due`) is new.

        Raises:
            DstlError: What was sent before has failed.
        """
        key_groups = changes.column("key_group")
        for owner, (owned, _) in enumerate(self._owners):
            part = changes
            if len(self._owners) > 1:
                part = changes.filter(
                    pc.and_(pc.greater_equal(key_groups, owned.start), pc.less_equal(key_groups, owned.end))
                )
            if part.num_rows:
                told = b"" if owner in self._told else metadata
                self._told.add(owner)
                payload = write_batch(part)
                self._sent[owner] += len(payload)
                self._send_unseen(owner, Write(*self._who, partition, told, expiring, payload))

    def flush(self) -> None:
        """Tell every TaskManager that this was all, and wait until it has taken everything.

        Raises:
            Fenced: Another attempt has taken this one's place.
            Unavailable: A TaskManager does not hold the parent's state, or is gone.
        """
        for owner, nbytes in enumerate(self._sent):
            if nbytes >= ENCODED_AHEAD_BYTES:
                self._send_unseen(owner, EndOfChanges(*self._who))
                self._sent[owner] = 0
        for owner in range(len(self._owners)):
            self._see(owner)

    def fetch_many(
        self, states: Sequence[int], key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[list[bytes | None]]:
        """Return, for each point state, the values of all keys: one round trip."""
        parts = self._split(key_groups, keys) if states else []
        found: list[list[list[bytes | None]]] = [[[] for _ in states] for _ in parts]
        self._read([self._read_of_many(tuple(states), *part, into) for part, into in zip(parts, found, strict=True)])
        if len(parts) == 1 and parts[0][1] is None:
            return found[0]
        columns: list[list[bytes | None]] = [[None] * len(keys) for _ in states]
        for (_, rows, _, _), values_of in zip(parts, found, strict=True):
            for column, values in zip(columns, values_of, strict=True):
                for row, value in zip(rows or (), values, strict=True):
                    column[row] = value
        return columns

    def _read_of_many(
        self,
        states: tuple[int, ...],
        owner: int,
        rows: list[int] | None,
        key_groups: Sequence[int],
        keys: Sequence[bytes],
        into: list[list[bytes | None]],
    ) -> _Read:
        def ask(at: int) -> Call[Values]:
            stop = at + _sendable(len(keys) - at, sum(map(len, keys[at:])))
            return FetchMany(*self._who, states, tuple(key_groups[at:stop]), tuple(keys[at:stop]))

        def take(reply: Values) -> int:
            for column, values in zip(into, reply.columns, strict=True):
                column += values
            return len(reply.columns[0])

        return _Read(owner, len(keys), ask, take)

    def fetch_values(self, state: int, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> pa.Array:
        """Return the values of all keys of one point state as a binary array, null where there is none.

        Args:
            state: The state's number.
            key_groups: One per key; fastest when they are sorted.
            keys: Binary, without nulls, each key once.
        """
        parts: list[npt.NDArray[np.intp]] = []
        found: list[list[pa.Array]] = []
        reads: list[_Read] = []
        for owner, (owned, _) in enumerate(self._owners):
            rows = np.arange(len(keys))
            groups, part = array_of(key_groups), keys
            if len(self._owners) > 1:
                rows = np.flatnonzero((key_groups >= owned.start) & (key_groups <= owned.end))
                groups, part = groups.take(array_of(rows)), part.take(array_of(rows))
            if len(rows):
                parts.append(rows)
                found.append([])
                reads.append(self._read_of_values(state, owner, groups, part, found[-1]))
        self._read(reads)
        values = [each for of_owner in found for each in of_owner]
        if not values:
            return pa.nulls(0, pa.binary())
        whole = values[0] if len(values) == 1 else pa.concat_arrays(values)
        return whole if len(parts) == 1 else whole.take(array_of(np.argsort(np.concatenate(parts))))

    def _read_of_values(
        self, state: int, owner: int, key_groups: pa.Array, keys: pa.Array, into: list[pa.Array]
    ) -> _Read:
        def ask(at: int) -> Call[Fetched]:
            count = _sendable(len(keys) - at, keys.slice(at).nbytes)
            asked = write_columns(KEY_COLUMNS, [key_groups.slice(at, count), keys.slice(at, count)])
            return FetchValues(*self._who, state, asked)

        def take(reply: Fetched) -> int:
            into.append(read_columns(memoryview(reply.data), VALUE_COLUMN)[0])
            return len(into[-1])

        return _Read(owner, len(keys), ask, take)

    def fetch_entries(
        self, state: int, key_groups: Sequence[int], keys: Sequence[bytes], max_bytes: int
    ) -> list[list[Entry] | None]:
        """Return all entries of each key in the order of their user keys' bytes, in one round trip.

        A key whose entries have more than ``max_bytes`` together is None: it is then read piece by piece. So may keys
        at the end be once the reply itself has grown to several times ``max_bytes``, but never a key that fits when it
        is asked for alone.
        """
        result: list[list[Entry] | None] = [None] * len(keys)
        asked = [
            (owner, rows, self._send(owner, FetchEntries(*self._who, state, max_bytes, tuple(groups), tuple(part))))
            for owner, rows, groups, part in self._split(key_groups, keys)
        ]
        for owner, rows, reply in asked:
            found = _pairs(self._result(owner, reply))
            for row, entries in zip(range(len(keys)) if rows is None else rows, found, strict=True):
                result[row] = entries
        return result

    def fetch_entry(self, state: int, key_group: int, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key."""
        asked = FetchEntry(*self._who, state, key_group, key, tuple(user_keys))
        return list(self._call(key_group, asked).columns[0])

    def scan_entries(self, state: int, key_group: int, key: bytes, after: bytes | None, max_bytes: int) -> list[Entry]:
        """Return the next entries of one key in user-key order, strictly after ``after`` (None: from the first).

        At least one if there is one; about ``max_bytes`` at most. Empty at the end.
        """
        asked = ScanEntries(*self._who, state, key_group, max_bytes, key, after)
        return _pairs(self._call(key_group, asked))[0] or []

    def fetch_due(
        self, state: int, key_groups: Sequence[int], place: ExpiryPlace | None, until: int, *, with_values: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the entries of a point state, or the timers, that are due, each once, as batches of ``ENTRY_COLUMNS``.

        Args:
            state: The state's number.
            key_groups: Where to look.
            place: Where an entry's time stands; None for timers, which have their user key as value.
            until: Due is a time at or below this; its unit is that of the entries.
            with_values: Whether values are wanted; without, they are empty.
        """

        def ask(owner: int, groups: tuple[int, ...], skip: int = 0) -> Reply[DueEntries]:
            return self._send(owner, FetchDue(*self._who, state, place, until, skip, with_values, groups))

        # All are asked before any is waited for: each may have an index to make first.
        parts = [tuple(group for group in key_groups if group in owned) for owned, _ in self._owners]
        asked = [(owner, groups, ask(owner, groups)) for owner, groups in enumerate(parts) if groups]
        for owner, groups, reply in asked:
            skip = 0
            while True:
                answer = self._result(owner, reply)
                found = _entries(answer.data)
                if found.num_rows:
                    yield found
                if not answer.more:
                    break
                ends = np.asarray(found.column("key_group"))
                last = int(ends[-1])
                skip = int((ends == last).sum()) + (skip if last == groups[0] else 0)
                groups = groups[groups.index(last) :]
                reply = ask(owner, groups, skip)

    def scan_values(self, state: int, key_groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Yield all entries of a point state, key group by key group, as batches of ``ENTRY_COLUMNS``."""
        for group in key_groups:
            after: bytes | None = None
            while True:
                asked = ScanValues(*self._who, state, group, after)
                found = _entries(self._call(group, asked).data)
                if not found.num_rows:
                    break
                after = found.column("key")[-1].as_py()
                yield found

    def _read(self, reads: Sequence[_Read]) -> None:
        """Carry reads out, those of several TaskManagers at the same time."""
        while asked := [(read, self._send(read.owner, read.ask(read.at))) for read in reads if read.at < read.count]:
            for read, reply in asked:
                count = read.take(self._result(read.owner, reply))
                # Fewer than were asked for are as many as fit a reply.
                if count <= 0:
                    raise CorruptData(
                        "a TaskManager answered a request for values with none; run the same version everywhere"
                    )
                read.at += count

    def _send(self, owner: int, message: Call[R]) -> Reply[R]:
        return self._owners[owner][1].send(message)

    def _send_unseen(self, owner: int, message: Call[Done]) -> None:
        """Send a request whose reply is looked at later; what is known of those before is looked at now."""
        self._see(owner, waiting=False)
        self._unseen[owner].append(self._send(owner, message))

    def _see(self, owner: int, *, waiting: bool = True) -> None:
        """Look at the replies that were not waited for; one that is an error stays, and is raised every time."""
        unseen = self._unseen[owner]
        while unseen and (waiting or unseen[0].is_done):
            unseen[0].result()
            unseen.popleft()

    def _result(self, owner: int, reply: Reply[R]) -> R:
        """Return a reply, once those before it were no errors."""
        self._see(owner)
        return reply.result()

    def _call(self, key_group: int, message: Call[R]) -> R:
        """Return the reply of a key group's owner."""
        owner = next(owner for owner, (owned, _) in enumerate(self._owners) if key_group in owned)
        return self._result(owner, self._send(owner, message))

    def _split(
        self, key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[tuple[int, list[int] | None, Sequence[int], Sequence[bytes]]]:
        """Return the rows that each owner answers; None for all rows where there is one owner."""
        if len(self._owners) == 1:
            return [(0, None, key_groups, keys)]
        parts: list[tuple[int, list[int] | None, Sequence[int], Sequence[bytes]]] = []
        for owner, (owned, _) in enumerate(self._owners):
            rows = [row for row, group in enumerate(key_groups) if group in owned]
            if rows:
                parts.append((owner, rows, [key_groups[r] for r in rows], [keys[r] for r in rows]))
        return parts


def _sendable(count: int, nbytes: int) -> int:
    """Return of how many of ``count`` keys, with ``nbytes`` together, one request is made."""
    return count if nbytes <= _REQUEST_BYTES else max(1, count * _REQUEST_BYTES // nbytes)


def _entries(data: Payload) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(read_columns(memoryview(data), ENTRY_COLUMNS), schema=ENTRY_COLUMNS)


def _pairs(found: Entries) -> list[list[Entry] | None]:
    """Return the entries of each key."""
    pairs = iter(zip(found.user_keys, found.values, strict=True))
    return [None if count is None else list(islice(pairs, count)) for count in found.counts]
