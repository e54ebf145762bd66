"""The writes of one task, which are the change set of its batch.

Reads ask it first; base tables never see it before the checkpoint completes. It holds the last write per (state, key,
user key) only, so that a counter updated a million times is one change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, pairwise, repeat
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_CLEAR, OP_DELETE, OP_PUT

_W = TypeVar("_W")

_PART_BYTES = 32 << 20  # a frame has room for eight such parts
_RECORD_BYTES = 48
"""Estimated cost of one pending change beside its keys and value; only bounds memory."""


class EntryWrites:
    """The writes to one key of a list, map or timer state.

    Attributes:
        key_group: The key's group.
        cleared: Everything that the key had before is gone.
        entries: User key to new value, None for a removed one.
        numbered: How many elements of the key's list this task has numbered, also those that are gone again.
    """

    __slots__ = ("cleared", "entries", "key_group", "numbered")

    def __init__(self, key_group: int) -> None:
        self.key_group = key_group
        self.cleared = False
        self.entries: dict[bytes, bytes | None] = {}
        self.numbered = 0


class Overlay:
    """Holds the writes of one task, by state and key.

    Invariants:
        1. Draining returns every write once, and forgets it: memory is bounded by the size at which parts are drained.
        2. A clear goes before the puts of the same key in every part.
        3. A key that is still to be read is held back, so that no place is drained twice.

    Attributes:
        nbytes: About how many bytes were written since the last drain; overwritten values count, too.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[bytes, bytes | None]] = {}
        self._placed: dict[int, list[tuple[Sequence[bytes], Sequence[int]]]] = {}
        """Of each point state the keys that were put together, and their key groups."""
        self._entries: dict[int, dict[bytes, EntryWrites]] = {}
        self.nbytes = 0

    def put_values(
        self, state: int, key_groups: Sequence[int], keys: Sequence[bytes], values: Sequence[bytes | None]
    ) -> None:
        """Take the new values of many keys of a point state; None removes a value."""
        self._values.setdefault(state, {}).update(zip(keys, values, strict=True))
        self._placed.setdefault(state, []).append((keys, key_groups))
        self.nbytes += sum(map(len, keys)) + sum(map(len, filter(None, values))) + _RECORD_BYTES * len(keys)

    def overlay_values(self, state: int, keys: Sequence[bytes], values: list[bytes | None]) -> None:
        """Replace in ``values`` what this task has written for any of ``keys``."""
        written = self._values.get(state)
        if written and not written.keys().isdisjoint(keys):
            for i, key in enumerate(keys):
                if key in written:
                    values[i] = written[key]

    def entry_writes(self, state: int, key_group: int, key: bytes) -> EntryWrites:
        """Return the record to which writes of one key of an entry state go."""
        of_state = self._entries.setdefault(state, {})
        writes = of_state.get(key)
        if writes is None:
            writes = of_state[key] = EntryWrites(key_group)
            self.nbytes += len(key)
        return writes

    def count_bytes(self, nbytes: int) -> None:
        """Count the bytes of one entry write, for :attr:`nbytes`."""
        self.nbytes += nbytes + _RECORD_BYTES

    def written_entries(self, state: int, key: bytes) -> tuple[bool, dict[bytes, bytes | None]]:
        """Return whether this task has cleared the key, and what it has written since (a copy)."""
        writes = self._entries.get(state, {}).get(key)
        return (writes.cleared, dict(writes.entries)) if writes is not None else (False, {})

    def keys_with_entries(self, state: int) -> Iterator[tuple[int, bytes]]:
        """Return (key group, key) of every key of an entry state that this task has written to."""
        return ((writes.key_group, key) for key, writes in self._entries.get(state, {}).items())

    def drain(self, held: AbstractSet[bytes] = frozenset()) -> list[pa.RecordBatch]:
        """Return what was written as batches of ``CHANGE_SCHEMA``, each sorted by key group, and forget it.

        Empty when nothing was. Batches are some ten megabytes at most unless one value is larger.

        Args:
            held: Keys that may still be read or written: what was written for them stays, for a later drain.
        """
        columns = _Columns()
        all_values, all_placed, all_entries = self._values, self._placed, self._entries
        self._values, self._placed, self._entries, self.nbytes = {}, {}, {}, 0
        for state, values in all_values.items():
            key_groups: Sequence[int] = list(chain.from_iterable(groups for _, groups in all_placed[state]))
            if held or len(key_groups) > len(values):
                # Keys that were put several times, or that stay.
                group_of = dict(
                    zip(chain.from_iterable(keys for keys, _ in all_placed[state]), key_groups, strict=True)
                )
                values, kept = _split_by_key(values, held)
                if kept:
                    self._values[state] = kept
                    self._placed[state] = [(list(kept), [group_of[key] for key in kept])]
                key_groups = [group_of[key] for key in values]
            columns.add_values(state, key_groups, values)
        for state, entries in all_entries.items():
            entries, kept_entries = _split_by_key(entries, held)
            if kept_entries:
                self._entries[state] = kept_entries
            for key, writes in entries.items():
                columns.add_entries(state, key, writes)
        return columns.batches()


def _split_by_key(written: dict[bytes, _W], held: AbstractSet[bytes]) -> tuple[dict[bytes, _W], dict[bytes, _W]]:
    """Return what is drained and what stays."""
    if not held or written.keys().isdisjoint(held):
        return written, {}
    kept = {key: each for key, each in written.items() if key in held}
    return {key: each for key, each in written.items() if key not in kept}, kept


class _Columns:
    """The columns of what is drained: values of point states first, then entries."""

    def __init__(self) -> None:
        self.key_groups: list[int] = []
        self.states: list[tuple[int, int]] = []
        self.ops = bytearray()
        self.keys: list[bytes] = []
        self.user_keys: list[bytes] = []
        self.values: list[bytes] = []

    def add_values(self, state: int, key_groups: Sequence[int], written: dict[bytes, bytes | None]) -> None:
        self.key_groups += key_groups
        self.states.append((state, len(written)))
        self.keys += written
        self._add(written.values())

    def add_entries(self, state: int, key: bytes, writes: EntryWrites) -> None:
        entries = writes.entries
        if writes.cleared:
            # After a clear a removed entry needs no record of its own.
            entries = {user_key: value for user_key, value in entries.items() if value is not None}
            self.key_groups.append(writes.key_group)
            self.states.append((state, 1))
            self.ops.append(OP_CLEAR)
            self.keys.append(key)
            self.user_keys.append(b"")
            self.values.append(b"")
        count = len(entries)
        self.key_groups += repeat(writes.key_group, count)
        self.states.append((state, count))
        self.keys += repeat(key, count)
        self.user_keys += entries
        self._add(entries.values())

    def _add(self, values: Collection[bytes | None]) -> None:
        if all(values):  # as nearly always: decided without a Python loop
            self.ops += bytes([OP_PUT]) * len(values)
            self.values += values  # type: ignore[arg-type]
        else:
            self.ops += bytes([OP_DELETE if value is None else OP_PUT for value in values])
            self.values += [value or b"" for value in values]

    def batches(self) -> list[pa.RecordBatch]:
        if not self.keys:
            return []
        states, counts = zip(*self.states, strict=True)
        numbers = (
            np.array(self.key_groups, np.uint16),
            np.repeat(np.array(states, np.uint16), counts),
            np.frombuffer(self.ops, np.uint8),
        )
        plain = len(self.keys) - len(self.user_keys)
        columns = [self.keys, [b""] * plain + self.user_keys, self.values]
        key_groups = numbers[0]
        # The rows of a task come in the order of their key groups, and so do most writes.
        is_sorted = not np.any(key_groups[1:] < key_groups[:-1])
        if is_sorted and sum(map(len, chain(self.keys, self.user_keys, self.values))) <= _PART_BYTES:
            return [_batch(numbers, columns)]
        # Stable: a clear stays in front of the puts of its key.
        order = np.argsort(key_groups, kind="stable")
        lengths = np.sum([np.fromiter(map(len, column), np.int64, len(column)) for column in columns], axis=0)
        parts = np.cumsum(lengths[order]) // _PART_BYTES
        cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(order)]
        return [
            _batch([column[rows] for column in numbers], [[column[i] for i in rows.tolist()] for column in columns])
            for rows in (order[start:stop] for start, stop in pairwise(cuts))
        ]


def _batch(numbers: Iterable[npt.NDArray[np.integer]], columns: Iterable[list[bytes]]) -> pa.RecordBatch:
    binary = [pa.array(column, pa.binary()) for column in columns]
    return pa.RecordBatch.from_arrays([*map(pa.array, numbers), *binary], schema=CHANGE_SCHEMA)
