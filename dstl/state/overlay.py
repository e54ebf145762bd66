"""What one task has written: the change set of its batch, squashed by construction.

Reads ask it first; base tables never see it before the checkpoint completes. It holds the last write per (state, key,
user key) only, so that a counter updated a million times is one change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat

import numpy as np
import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR, OP_DELETE, OP_PUT

__all__ = ["EntryWrites", "Overlay"]

_PART_BYTES = 32 << 20
_RECORD_BYTES = 48
"""What one pending change costs beside its keys and value; only to bound memory."""


class EntryWrites:
    """The writes to one key of a list, map or timer state.

    Attributes:
        key_group: The key's group.
        cleared: Everything that the key had before is gone.
        entries: User key to new value, None for a removed one.
    """

    __slots__ = ("cleared", "entries", "key_group")

    def __init__(self, key_group: int) -> None:
        self.key_group = key_group
        self.cleared = False
        self.entries: dict[bytes, bytes | None] = {}


class Overlay:
    """Own writes of one task, by state and key.

    Invariants:
        1. Draining returns every write once; applying the parts in their order gives the overlay's content.
        2. A clear goes before the puts of the same key in every part.

    Args:
        keep_sent: Keep what was drained readable. False where the source shows what was sent; then memory is bounded
            by the size at which parts are drained.
    """

    def __init__(self, *, keep_sent: bool = True) -> None:
        self._keep_sent = keep_sent
        self._values: dict[int, dict[bytes, tuple[int, bytes | None]]] = {}
        self._entries: dict[int, dict[bytes, EntryWrites]] = {}
        self._sent_values: dict[int, dict[bytes, tuple[int, bytes | None]]] = {}
        self._sent_entries: dict[int, dict[bytes, EntryWrites]] = {}
        self._nbytes = 0
        self.sent_any = False

    @property
    def nbytes(self) -> int:
        """About how many bytes wait to be drained; overwritten values count until then."""
        return self._nbytes

    def put_values(
        self, state: int, key_groups: Iterable[int], keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> None:
        """Take the new values of many keys of a point state; None removes a value."""
        self._values.setdefault(state, {}).update(zip(keys, zip(key_groups, values, strict=True), strict=True))
        self._nbytes += sum(map(len, keys)) + sum(map(len, filter(None, values))) + _RECORD_BYTES * len(keys)

    def overlay_values(self, state: int, keys: Sequence[bytes], values: list[bytes | None]) -> None:
        """Replace in ``values`` what this task has written for any of ``keys``."""
        for written in (self._sent_values.get(state), self._values.get(state)):
            if written and not written.keys().isdisjoint(keys):
                for i, key in enumerate(keys):
                    found = written.get(key)
                    if found is not None:
                        values[i] = found[1]

    def entry_writes(self, state: int, key_group: int, key: bytes) -> EntryWrites:
        """Return the record to which writes of one key of an entry state go."""
        of_state = self._entries.setdefault(state, {})
        writes = of_state.get(key)
        if writes is None:
            writes = of_state[key] = EntryWrites(key_group)
            self._nbytes += len(key)
        return writes

    def grew(self, nbytes: int) -> None:
        """Count the bytes of one entry write, for :attr:`nbytes`."""
        self._nbytes += nbytes + _RECORD_BYTES

    def written_entries(self, state: int, key: bytes) -> tuple[bool, dict[bytes, bytes | None]]:
        """Return whether this task has cleared the key, and what it has written since (a copy)."""
        cleared = False
        merged: dict[bytes, bytes | None] = {}
        for of_state in (self._sent_entries.get(state), self._entries.get(state)):
            writes = of_state.get(key) if of_state else None
            if writes is not None:
                if writes.cleared:
                    cleared, merged = True, {}
                merged.update(writes.entries)
        return cleared, merged

    def keys_with_entries(self, state: int) -> Iterator[tuple[int, bytes]]:
        """Return (key group, key) of every key of an entry state that this task has written to."""
        seen: dict[bytes, int] = {}
        for of_state in (self._sent_entries.get(state), self._entries.get(state)):
            if of_state:
                seen.update((key, writes.key_group) for key, writes in of_state.items())
        return ((key_group, key) for key, key_group in seen.items())

    def drain(self) -> list[pa.RecordBatch]:
        """Return what was written since the last call as batches of ``CHANGE_SCHEMA``, each sorted by key group.

        Empty when nothing was. Batches are some ten megabytes at most unless one value is larger.
        """
        columns = _Columns()
        for state, values in self._values.items():
            columns.add_values(state, values)
        for state, entries in self._entries.items():
            for key, writes in entries.items():
                columns.add_entries(state, key, writes)
        if self._keep_sent:
            self._remember()
        self._values, self._entries, self._nbytes = {}, {}, 0
        batches = columns.batches()
        self.sent_any = self.sent_any or bool(batches)
        return batches

    def _remember(self) -> None:
        for state, values in self._values.items():
            self._sent_values.setdefault(state, {}).update(values)
        for state, entries in self._entries.items():
            sent = self._sent_entries.setdefault(state, {})
            for key, writes in entries.items():
                before = sent.get(key)
                if before is None or writes.cleared:
                    sent[key] = writes
                else:
                    before.entries.update(writes.entries)


class _Columns:
    def __init__(self) -> None:
        self.key_groups: list[int] = []
        self.states: list[int] = []
        self.ops: list[int] = []
        self.keys: list[bytes] = []
        self.user_keys: list[bytes] = []
        self.values: list[bytes] = []

    def add_values(self, state: int, written: dict[bytes, tuple[int, bytes | None]]) -> None:
        count = len(written)
        if not count:
            return
        key_groups, values = zip(*written.values(), strict=True)
        self.key_groups += key_groups
        self.states += repeat(state, count)
        self.keys += written
        self.user_keys += repeat(b"", count)
        if None in values:
            self.ops += [OP_DELETE if value is None else OP_PUT for value in values]
            self.values += [b"" if value is None else value for value in values]
        else:
            self.ops += repeat(OP_PUT, count)
            self.values += values

    def add_entries(self, state: int, key: bytes, writes: EntryWrites) -> None:
        entries = writes.entries
        if writes.cleared:
            # After a clear a removed entry needs no record of its own.
            entries = {user_key: value for user_key, value in entries.items() if value is not None}
            self.key_groups.append(writes.key_group)
            self.states.append(state)
            self.ops.append(OP_CLEAR)
            self.keys.append(key)
            self.user_keys.append(b"")
            self.values.append(b"")
        count = len(entries)
        self.key_groups += repeat(writes.key_group, count)
        self.states += repeat(state, count)
        self.ops += [OP_DELETE if value is None else OP_PUT for value in entries.values()]
        self.keys += repeat(key, count)
        self.user_keys += entries
        self.values += [value or b"" for value in entries.values()]

    def batches(self) -> list[pa.RecordBatch]:
        if not self.keys:
            return []
        key_groups = np.array(self.key_groups, dtype=np.uint16)
        # Stable: a clear stays in front of the puts of its key.
        order = np.argsort(key_groups, kind="stable")
        lengths = np.fromiter(map(len, self.keys), np.int64, len(self.keys))
        lengths += np.fromiter(map(len, self.user_keys), np.int64, len(self.keys))
        lengths += np.fromiter(map(len, self.values), np.int64, len(self.keys))
        parts = np.cumsum(lengths[order]) // _PART_BYTES
        cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(order)]
        return [self._batch(key_groups, order[start:stop]) for start, stop in pairwise(cuts)]

    def _batch(self, key_groups: np.ndarray, rows: np.ndarray) -> pa.RecordBatch:
        whole = len(rows) == len(self.keys)
        picked = rows.tolist()
        fixed = (
            pa.array(key_groups[rows], pa.uint16()),
            pa.array(np.array(self.states, dtype=np.uint16)[rows], pa.uint16()),
            pa.array(np.array(self.ops, dtype=np.uint8)[rows], pa.uint8()),
        )
        indices = pa.array(rows)
        binary = [
            pa.array(column, pa.binary()).take(indices) if whole else pa.array([column[i] for i in picked], pa.binary())
            for column in (self.keys, self.user_keys, self.values)
        ]
        return pa.RecordBatch.from_arrays([*fixed, *binary], schema=CHANGE_SCHEMA)
