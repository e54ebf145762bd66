"""State in memory behind the source protocol: for batch queries and tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_DELETE
from dstl.rpc.frame_columns import ENTRY_COLUMNS
from dstl.rpc.messages import ExpiryPlace
from dstl.state.source import Entry, Timer

__all__ = ["MemoryStateSource"]


class MemoryStateSource:
    """A :class:`~dstl.state.source.StateSource` over dictionaries.

    :meth:`apply` takes the change batches of a finished run: the next run then sees them. ``calls`` counts the reads,
    so that a test can tell bulk from one by one.
    """

    def __init__(self) -> None:
        self._tables: defaultdict[int, dict[tuple[int, bytes], dict[bytes, bytes]]] = defaultdict(dict)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def apply(self, changes: pa.RecordBatch) -> None:
        """Apply a batch of changes in its order."""
        for key_group, state, op, key, user_key, value in zip(*(c.to_pylist() for c in changes.columns), strict=True):
            table = self._tables[state]
            if op == OP_CLEAR:
                table.pop((key_group, key), None)
            elif op == OP_DELETE:
                entries = table.get((key_group, key), {})
                entries.pop(user_key, None)
                if not entries:
                    table.pop((key_group, key), None)
            else:
                table.setdefault((key_group, key), {})[user_key] = value

    def content(self, state: int) -> dict[tuple[bytes, bytes], bytes]:
        """Return everything that a state holds, by (key, user key)."""
        return {
            (key, user_key): value
            for (_, key), entries in self._tables[state].items()
            for user_key, value in entries.items()
        }

    def fetch_many(
        self, states: Sequence[int], key_groups: Sequence[int], keys: Sequence[bytes]
    ) -> list[list[bytes | None]]:
        """Return the values of all keys for each point state."""
        self.calls["fetch_many"] += 1
        where = list(zip(key_groups, keys, strict=True))
        return [[self._tables[state].get(one, {}).get(b"") for one in where] for state in states]

    def fetch_values(self, state: int, key_groups: npt.NDArray[np.uint16], keys: pa.Array) -> pa.Array:
        """Return the values of all keys of one point state, null where there is none."""
        self.calls["fetch_values"] += 1
        table = self._tables[state]
        where = zip(key_groups.tolist(), keys.to_pylist(), strict=True)
        return pa.array([table.get(one, {}).get(b"") for one in where], pa.binary())

    def fetch_entries(
        self, state: int, key_groups: Sequence[int], keys: Sequence[bytes], max_bytes: int
    ) -> list[list[Entry] | None]:
        """Return all entries of each key, None for a key of more than ``max_bytes``."""
        self.calls["fetch_entries"] += 1
        found: list[list[Entry] | None] = []
        for where in zip(key_groups, keys, strict=True):
            entries = self._tables[state].get(where, {})
            large = sum(len(u) + len(v) for u, v in entries.items()) > max_bytes
            found.append(None if large else sorted(entries.items()))
        return found

    def fetch_entry(self, state: int, key_group: int, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys."""
        self.calls["fetch_entry"] += 1
        entries = self._tables[state].get((key_group, key), {})
        return [entries.get(user_key) for user_key in user_keys]

    def scan_entries(self, state: int, key_group: int, key: bytes, after: bytes | None, max_bytes: int) -> list[Entry]:
        """Return the next entries after ``after``."""
        self.calls["scan_entries"] += 1
        page: list[Entry] = []
        for entry in sorted(self._tables[state].get((key_group, key), {}).items()):
            if after is not None and entry[0] <= after:
                continue
            if page and max_bytes <= 0:
                break
            page.append(entry)
            max_bytes -= len(entry[0]) + len(entry[1])
        return page

    def scan_timers(
        self, state: int, key_groups: Sequence[int], until: bytes, after: Timer | None, limit: int
    ) -> list[Timer]:
        """Return the next expired timers."""
        self.calls["scan_timers"] += 1
        wanted = set(key_groups)
        found = sorted(
            (user_key, key_group, key)
            for (key_group, key), entries in self._tables[state].items()
            if key_group in wanted
            for user_key in entries
            if user_key <= until
        )
        if after is not None:
            found = [one for one in found if one > (after[2], after[0], after[1])]
        return [(key_group, key, user_key) for user_key, key_group, key in found[:limit]]

    def fetch_due(
        self, state: int, key_groups: Sequence[int], place: ExpiryPlace, until: int, *, with_values: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the entries that are due."""
        self.calls["fetch_due"] += 1
        for found in self.scan_values(state, key_groups):
            due = []
            for key, value in zip(found.column("key").to_pylist(), found.column("value").to_pylist(), strict=True):
                holder = key if place.in_key else value
                at = holder[place.offset : place.offset + 8]
                bit = place.null_bit
                timeless = len(at) < 8 or (bit is not None and bool(holder[bit // 8] >> bit % 8 & 1))
                due.append(not timeless and int.from_bytes(at, "little", signed=True) <= until)
            found = found.filter(pa.array(due, pa.bool_()))
            if found.num_rows:
                yield found if with_values else found.set_column(2, ENTRY_COLUMNS[2], pa.array([b""] * len(found)))

    def scan_values(self, state: int, key_groups: Sequence[int]) -> Iterator[pa.RecordBatch]:
        """Yield all entries."""
        self.calls["scan_values"] += 1
        held = [
            (group, key, entries[b""])
            for (group, key), entries in self._tables[state].items()
            if group in set(key_groups) and b"" in entries
        ]
        if held:
            columns = [
                pa.array(column, field.type)
                for column, field in zip(zip(*held, strict=True), ENTRY_COLUMNS, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=ENTRY_COLUMNS)
