"""One task attempt's view of its operator's state: bulk reads from, and writes to, the TaskManagers that own it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dstl.changelog.change_digest import ChangeDigest
from dstl.errors import CorruptData
from dstl.rpc.client import Transport
from dstl.rpc.frame_columns import KEY_COLUMNS, VALUE_COLUMN, read_columns, write_columns
from dstl.rpc.messages import (
    FetchEntries,
    FetchEntry,
    FetchMany,
    FetchValues,
    OpenAttempt,
    ScanEntries,
    ScanTimers,
    Write,
)
from handles.key_group import KeyGroupRange

if TYPE_CHECKING:
    # At run time it would bring pydantic into every worker.
    from handles.checkpoint import CheckpointId

__all__ = ["StateClient"]

_REQUEST_BYTES = 64 << 20
"""About how many bytes of keys one request holds: a fourth of the longest frame."""

Entry = tuple[bytes, bytes]
Timer = tuple[int, bytes, bytes]


class StateClient:
    """The state source of a task (``dstl.state.source.StateSource``), over sockets. Not thread-safe.

    Args:
        owners: Which connection serves which key groups; together they cover all.
        operator: The operator's uid.
        attempt: Spark's task attempt id.
    """

    def __init__(self, owners: Sequence[tuple[KeyGroupRange, Transport]], operator: str, attempt: int) -> None:
        self._owners = list(owners)
        self._who = operator, attempt
        self._digest = ChangeDigest()
        self._partition: int | None = None

    def open(self, batch: int, parent: CheckpointId | None, parallelism: int) -> None:
        """Begin the attempt on every TaskManager.

        Raises:
            Unavailable: One of them does not hold the parent's state.
        """
        for _, connection in self._owners:
            connection.call(OpenAttempt(*self._who, batch, parent, parallelism))

    @property
    def digest(self) -> bytes:
        """Digest of everything written so far, whatever its order and parts; empty where nothing was."""
        return self._digest.digest() if self._partition is not None else b""

    @property
    def partition(self) -> int | None:
        """The partition that was written to; None before the first write."""
        return self._partition

    def write(self, partition: int, changes: pa.RecordBatch, metadata: bytes) -> None:
        """Send a part of the change set, sorted by key group; waits while the TaskManager's log is over its budget.

        Args:
            partition: The operator's partition that all its keys belong to.
            changes: Columns of ``CHANGE_SCHEMA``.
            metadata: The operator's states, for the log's own record.

        Raises:
            Fenced: Another attempt has taken this one's place.
        """
        self._partition = partition
        self._digest.update(changes)
        key_groups = changes.column("key_group")
        for owned, connection in self._owners:
            part = changes
            if len(self._owners) > 1:
                part = changes.filter(
                    pc.and_(pc.greater_equal(key_groups, owned.start), pc.less_equal(key_groups, owned.end))
                )
            if part.num_rows:
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, part.schema) as writer:
                    writer.write_batch(part)
                connection.call(Write(*self._who, partition, metadata, memoryview(sink.getvalue())))

    def fetch_many(
        self, states: Sequence[int], key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[list[bytes | None]]:
        """Return, for each point state, the values of all keys."""
        columns: list[list[bytes | None]] = [[None] * len(keys) for _ in states]
        for rows, groups, part, connection in self._split(key_groups, keys):
            found = self._fetch_many(connection, list(states), groups, part)
            if rows is None:
                return found
            for column, values in zip(columns, found, strict=True):
                for row, value in zip(rows, values, strict=True):
                    column[row] = value
        return columns

    def _fetch_many(
        self, connection: Transport, states: list[int], key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[list[bytes | None]]:
        columns: list[list[bytes | None]] = [[] for _ in states]
        at = 0
        while states and at < len(keys):
            stop = at + _sendable(len(keys) - at, sum(map(len, keys[at:])))
            asked = _pack(key_groups[at:stop], keys[at:stop])
            found = connection.call(FetchMany(*self._who, tuple(states), asked))
            # Values of fewer keys than were asked for are as many as fit a reply.
            for column, values in zip(columns, msgpack.unpackb(found.data), strict=True):
                column += values
            at = _further(at, len(columns[0]))
        return columns

    def fetch_values(self, state: int, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> pa.Array:
        """Return the values of all keys of one point state as a binary array, null where there is none.

        Args:
            state: The state's number.
            key_groups: One per key.
            keys: Binary, without nulls.
        """
        parts: list[tuple[npt.NDArray[np.intp] | None, pa.Array]] = []
        for owned, connection in self._owners:
            rows = None
            groups, part = pa.array(key_groups), keys
            if len(self._owners) > 1:
                rows = np.flatnonzero((key_groups >= owned.start) & (key_groups <= owned.end))
                if not len(rows):
                    continue
                groups, part = groups.take(pa.array(rows)), part.take(pa.array(rows))
            parts.append((rows, self._fetch_values(connection, state, groups, part)))
        if len(parts) == 1:
            return parts[0][1]
        positions = np.concatenate([rows for rows, _ in parts if rows is not None] or [np.empty(0, np.intp)])
        found = pa.concat_arrays([values for _, values in parts] or [pa.array([], pa.binary())])
        return found.take(pa.array(np.argsort(positions)))

    def _fetch_values(self, connection: Transport, state: int, key_groups: pa.Array, keys: pa.Array) -> pa.Array:
        found: list[pa.Array] = []
        at = 0
        while at < len(keys):
            count = _sendable(len(keys) - at, keys.slice(at).nbytes)
            asked = write_columns(KEY_COLUMNS, [key_groups.slice(at, count), keys.slice(at, count)])
            reply = connection.call(FetchValues(*self._who, state, asked))
            found.append(read_columns(memoryview(reply.data), VALUE_COLUMN)[0])
            at = _further(at, at + len(found[-1]))
        return found[0] if len(found) == 1 else pa.concat_arrays(found or [pa.array([], pa.binary())])

    def fetch_entries(
        self, state: int, key_groups: Sequence[int], keys: Sequence[bytes], max_bytes: int
    ) -> list[list[Entry] | None]:
        """Return all entries of each key; None where they are more than ``max_bytes``."""
        result: list[list[Entry] | None] = [None] * len(keys)
        for rows, groups, part, connection in self._split(key_groups, keys):
            found = connection.call(FetchEntries(*self._who, state, max_bytes, _pack(groups, part)))
            for row, entries in zip(rows or range(len(keys)), msgpack.unpackb(found.data, use_list=False), strict=True):
                result[row] = list(entries) if entries is not None else None
        return result

    def fetch_entry(self, state: int, key_group: int, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key."""
        asked = FetchEntry(*self._who, state, key_group, _pack(key, list(user_keys)))
        return list(msgpack.unpackb(self._owner(key_group).call(asked).data))

    def scan_entries(self, state: int, key_group: int, key: bytes, after: bytes | None, max_bytes: int) -> list[Entry]:
        """Return the next entries of one key in user key order."""
        asked = ScanEntries(*self._who, state, key_group, max_bytes, _pack(key, after))
        return list(msgpack.unpackb(self._owner(key_group).call(asked).data, use_list=False))

    def scan_timers(
        self, state: int, key_groups: Sequence[int], until: bytes, after: Timer | None, limit: int
    ) -> list[Timer]:
        """Return the next due timers of all owners, ordered by (expiry, key group, key)."""
        due: list[Timer] = []
        for owned, connection in self._owners:
            groups = [group for group in key_groups if group in owned]
            if groups:
                found = connection.call(ScanTimers(*self._who, state, limit, _pack(groups, until, after)))
                due += msgpack.unpackb(found.data, use_list=False)
        due.sort(key=lambda timer: (timer[2], timer[0], timer[1]))
        return due[:limit]

    def _owner(self, key_group: int) -> Transport:
        return next(connection for owned, connection in self._owners if key_group in owned)

    def _split(
        self, key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[tuple[list[int] | None, Sequence[int], Sequence[bytes], Transport]]:
        """Return the rows that each owner answers; None for all rows where there is one owner."""
        if len(self._owners) == 1:
            return [(None, key_groups, keys, self._owners[0][1])]
        parts = []
        for owned, connection in self._owners:
            rows = [row for row, group in enumerate(key_groups) if group in owned]
            if rows:
                parts.append((rows, [key_groups[r] for r in rows], [keys[r] for r in rows], connection))
        return parts  # type: ignore[return-value]


def _sendable(count: int, nbytes: int) -> int:
    """Return of how many of ``count`` keys, with ``nbytes`` together, one request is made."""
    return count if nbytes <= _REQUEST_BYTES else max(1, count * _REQUEST_BYTES // nbytes)


def _further(at: int, reached: int) -> int:
    if reached <= at:
        raise CorruptData("a TaskManager answered a request for values with none; run the same version everywhere")
    return reached


def _pack(*fields: object) -> bytes:
    packed: bytes = msgpack.packb(tuple(_plain(field) for field in fields))
    return packed


def _plain(field: object) -> object:
    tolist = getattr(field, "tolist", None)
    return tolist() if tolist is not None else field
