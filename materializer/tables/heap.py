"""State in dictionaries, one per (state, key group); a snapshot shares them, and later writes go to a layer above.

The default table: Flink's ``HashMapStateBackend``. A snapshot copies the directory of groups and nothing else. What is
written while it is open goes to layers (see :class:`~materializer.tables.heap_group.HeapGroup`), so that no batch pays
for the size of the state, only for what it writes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import repeat

import numpy as np
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from dstl.column_buffers import rows_of
from dstl.errors import Closed, Invalid, Unavailable
from handles.key_group import KeyGroup
from materializer.tables.base import (
    ENTRY_SCHEMA,
    PAGE_ROWS,
    Expired,
    ExpiredValue,
    KeyGroups,
    StateEntry,
    StateTable,
    TableSize,
)
from materializer.tables.cold_group import ColdGroup
from materializer.tables.columns import (
    ChangeRun,
    PageBuilder,
    change_runs,
    is_all_empty,
    key_group_runs,
    key_items,
    value_items,
)
from materializer.tables.heap_group import HeapGroup
from materializer.tables.key_places import ONE_BY_ONE, Keys, names_of
from materializer.tables.value_slots import ValueSlots

ENTRY_OVERHEAD_BYTES = 130
"""Memory of an entry above its key and value, at most about: 15 to 30 where many keys have one length, and values too
(``python -m bench memory``), 80 to 90 where values alone have, 120 in a dictionary, and of values of 64 bytes and more
up to half of them, where their array has just grown."""

_EMPTY: Mapping[bytes, bytes] = {}
_EXPIRED_KEYS = 1024  # looked at in about a millisecond, for batches wait meanwhile
_MOST = 0.8  # of a page: what else it holds is at most a fourth of the values


class HeapStateTable(StateTable):
    """See :class:`~materializer.tables.base.StateTable`; state must fit in memory.

    Costs, at a million keys, 0.03 to 0.8 us for a value fetched, by how many of a key group are asked for together, as
    much for one put, and some 15 to 120 bytes of memory per entry above its key and value, by what has one length. A
    snapshot takes microseconds. While one is open, reads look in two places; what was written meanwhile is written a
    second time by the first write after it was closed, so close a snapshot when its last page was read, not when that
    is uploaded.

    It works while the bases of some of its key groups, the *cold* ones, are still to come. Changes are applied to a
    cold key group as to any other; its base goes below them, row by row or whole. Reads of it show what is there: who
    asks lets the rows that the answer needs be put there first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[int, dict[KeyGroup, HeapGroup]] = {}
        self._epoch = 0
        self._lock = threading.Lock()
        self._open_epochs: set[int] = set()
        self._frozen = -1
        self._elements_order: tuple[object, list[bytes]] = (None, [])
        self._cold: dict[KeyGroup, ColdGroup] = {}
        self._closed = False

    def chill(self, key_groups: Iterable[KeyGroup]) -> None:
        """Let empty key groups be cold.

        Raises:
            Invalid: One has entries.
        """
        self._check_open()
        for group in key_groups:
            if group in self._versions:
                raise Invalid(f"key group {group} has entries already: its base cannot be put below them")
            self._cold[group] = ColdGroup()

    def is_cold(self, key_group: KeyGroup) -> bool:
        """Return whether the key group's base is still to come."""
        return key_group in self._cold

    def put_below(self, key_group: KeyGroup, rows: pa.RecordBatch) -> None:
        """Put some rows of a cold key group's base below its changes; of any other, do nothing. Idempotent.

        Args:
            key_group: The key group.
            rows: Of :data:`ENTRY_SCHEMA`, in its order.
        """
        self._check_open()
        cold = self._cold.get(key_group)
        if cold is None:
            return
        for state, start, stop in key_group_runs(rows.column("state").to_numpy()):
            cold.put_below(self._writable(state, key_group), state, rows.slice(start, stop - start))

    def warm(self, key_group: KeyGroup, base: StateTable) -> bool:
        """Take a cold key group's whole base out of another table of this kind, and make the changes to it.

        Returns:
            Whether there were none: the key group is what its base holds.
        """
        self._check_open()
        assert isinstance(base, HeapStateTable)
        cold = self._cold.pop(key_group)
        content = {state: groups.pop(key_group) for state, groups in base._states.items() if key_group in groups}
        above = {state: groups[key_group] for state, groups in self._states.items() if key_group in groups}
        cold.lay_over(content, above)
        self.drop_key_group(key_group)
        for state, group in content.items():
            group.epoch = self._epoch
            self._states.setdefault(state, {})[key_group] = group
        self._touch(key_group)
        return not cold.is_changed

    def get_many(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value under the empty user key of each key."""
        groups = self._groups(state, key_groups, keys)
        if not groups:
            return [None] * len(keys)
        runs = list(key_group_runs(key_groups))
        if len(runs) * 4 > len(keys) > 64:
            gets: dict[int, Callable[[bytes], bytes | None]] = dict.fromkeys(map(int, key_groups), _EMPTY.get)
            for group in gets.keys() & groups.keys():
                content = groups[group]
                gets[group] = content.get if content.point_layer else content.points.get
            return [gets[group](key) for group, key in zip(key_groups, keys, strict=True)]
        found: list[bytes | None] = []
        for group, start, stop in runs:
            part = groups.get(group)
            found.extend(repeat(None, stop - start) if part is None else part.get_all(keys[start:stop]))
        return found

    def get_values(self, state: int, key_groups: KeyGroups, keys: pa.Array) -> pa.Array:
        """Return the same as a column; where a state's values have one length, without an object for each."""
        groups = self._groups(state, key_groups, keys)
        runs = list(key_group_runs(key_groups))
        if len(runs) * ONE_BY_ONE >= len(keys):
            return super().get_values(state, key_groups, keys)
        names = key_items(keys)
        places = {group: slots for group, _, _ in runs if (slots := _slots_of(groups.get(group))) is not None}
        widths = {slots.width for slots in places.values()}
        held = groups.keys() & {group for group, _, _ in runs}
        if len(widths) != 1 or len(places) < len(held):
            return pa.array(self.get_many(state, key_groups, names_of(names)), pa.binary())
        found = np.zeros(len(names), f"V{widths.pop()}")
        valid = np.zeros(len(names), np.bool_)
        for group, start, stop in runs:
            if group in places:
                valid[start:stop] = places[group].take(names[start:stop], found[start:stop])
        return rows_of(found, valid=valid)

    def get_entries(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """Return all (user key, value) of each key, in user key order."""
        groups = self._groups(state, key_groups, keys)
        found: list[list[tuple[bytes, bytes]]] = []
        for group, start, stop in key_group_runs(key_groups):
            content = groups.get(group)
            found.extend([] if content is None else content.items(key) for key in keys[start:stop])
        return found

    def get_entry(self, state: int, key_group: KeyGroup, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key."""
        content = self._groups(state, (key_group,), (key,)).get(key_group)
        if content is None:
            return [None] * len(user_keys)
        inner = content.elements_of(key)
        return [inner.get(name) if name else content.get(key) for name in user_keys]

    def scan(
        self,
        state: int,
        key_group: KeyGroup,
        *,
        after: tuple[bytes, bytes] | None = None,
        before_key: bytes | None = None,
        limit: int = PAGE_ROWS,
    ) -> list[StateEntry]:
        """Return a page of one state's entries in one key group. The first page after a change sorts the
        group."""
        content = self._groups(state, (key_group,), (b"",)).get(key_group)
        found: list[StateEntry] = []
        if content is None or limit < 1:
            return found
        version = self._versions[key_group]
        order = content.sorted_keys(version)
        last_key, last_user_key = after if after is not None else (b"", None)
        if content.has_points_alone:
            start = (bisect_left if after is None else bisect_right)(order, last_key)
            stop = len(order) if before_key is None else bisect_left(order, before_key)
            while start < stop and len(found) < limit:
                end = min(stop, start + limit - len(found))
                names = order[start:end] if isinstance(order, list) else order.part(start, end)
                start = end
                held = zip(names_of(names), content.get_all(names), strict=True)
                # What has expired is in the order of its version still.
                found.extend(StateEntry(key, b"", value) for key, value in held if value is not None)
            return found
        for at in range(bisect_left(order, last_key), len(order)):
            key = order[at]
            if before_key is not None and key >= before_key:
                break
            seen = last_user_key if key == last_key else None
            value = content.get(key)
            if value is not None and seen is None:
                found.append(StateEntry(key, b"", value))
            inner = content.elements_of(key)
            if inner:
                names = self._sorted_user_keys((state, key_group, version, key), inner)
                start = 0 if seen is None else bisect_right(names, seen)
                found.extend(StateEntry(key, name, inner[name]) for name in names[start : start + limit - len(found)])
            if len(found) >= limit:
                return found[:limit]
        return found

    def apply(self, changes: pa.RecordBatch) -> None:
        """Apply change records in bulk; runs of puts, or of deletions, of plain values go in without a loop."""
        self._check_open()
        for run in change_runs(changes):
            if run.key_group in self._cold:
                self._cold[run.key_group].note(run)
            content = self._writable(run.state, run.key_group)
            if run.ops is None and run.user_keys is None:
                content.put_all(run.named, run.stored, run.value_width)
            elif run.deletes and run.user_keys is None:
                content.delete_all(run.named)
            else:
                _apply_one_by_one(content, run)

    def snapshot(self) -> HeapTableSnapshot:
        """Return this moment of the table: microseconds, whatever its size."""
        self._check_open()
        if self._cold:
            raise Unavailable(f"{len(self._cold)} key groups are not loaded yet: wait for the end of the restore")
        groups = {state: dict(groups) for state, groups in self._states.items()}
        epoch = self._epoch
        self._epoch += 1
        with self._lock:
            self._open_epochs.add(epoch)
            self._frozen = epoch
        return HeapTableSnapshot(groups, dict(self._versions), lambda: self._release(epoch))

    def restore(self, key_group: KeyGroup, pages: Iterable[pa.RecordBatch]) -> None:
        """Replace one key group by the entries of some pages; all or nothing."""
        self._check_open()
        restored: dict[int, HeapGroup] = {}
        for page in pages:
            if not page.schema.equals(ENTRY_SCHEMA):
                raise Invalid(f"a page of key group {key_group} has another schema: {page.schema}")
            states = page.column("state").to_numpy()
            for state, start, stop in key_group_runs(states):
                content = restored.setdefault(state, HeapGroup(self._epoch))
                part = page.slice(start, stop - start)
                keys, (values, width) = key_items(part.column("key")), value_items(part.column("value"))
                if is_all_empty(part.column("user_key")):
                    owned = part.num_rows == page.num_rows and _is_most(values, page)
                    content.put_all(keys, values, width, owned=owned)
                    continue
                user_keys = part.column("user_key").to_pylist()
                for key, user_key, value in zip(names_of(keys), user_keys, names_of(values), strict=True):
                    content.put(key, user_key, value)
        self.drop_key_group(key_group)
        for state, content in restored.items():
            self._states.setdefault(state, {})[key_group] = content
        self._touch(key_group)

    def drop_key_group(self, key_group: KeyGroup) -> None:
        """Forget one key group."""
        self._check_open()
        for groups in self._states.values():
            groups.pop(key_group, None)
        self._versions.pop(key_group, None)
        self._cold.pop(key_group, None)

    def _dropped(self, key_group: KeyGroup, expired: Expired) -> Iterator[int]:
        """Delete the expired entries of one key group, a bounded number of keys at a time."""
        for state, is_expired in expired.items():
            content = self._states.get(state, {}).get(key_group)
            keys: Keys = [] if content is None else content.keys()
            for at in range(0, len(keys), _EXPIRED_KEYS):
                yield self._drop_expired(state, key_group, keys[at : at + _EXPIRED_KEYS], is_expired)

    def _drop_expired(self, state: int, key_group: KeyGroup, keys: Keys, expired: ExpiredValue) -> int:
        self._check_open()
        content = self._states.get(state, {}).get(key_group)
        dead = [] if content is None else content.expired_entries(keys, expired)
        if dead:
            version = self._versions[key_group]
            content = self._writable(state, key_group)
            self._versions[key_group] = version
            self._elements_order = (None, [])
            for key, user_key in dead:
                content.delete(key, user_key)
        return len(dead)

    def key_groups(self) -> Sequence[KeyGroup]:
        """Return the key groups that were written or restored and not dropped."""
        return sorted(self._versions.keys() | self._cold.keys())

    def size(self) -> TableSize:
        """Return the exact size of what is there: a sum over groups, not over entries."""
        contents = [content for groups in self._states.values() for content in groups.values()]
        return TableSize(sum(c.entries for c in contents), sum(c.bytes for c in contents))

    def close(self) -> None:
        """Drop everything. Idempotent; open snapshots stay readable."""
        self._closed = True
        self._states, self._versions, self._cold = {}, {}, {}

    def _groups(self, state: int, key_groups: KeyGroups, keys: Sized) -> Mapping[KeyGroup, HeapGroup]:
        self._check_addresses(key_groups, keys)
        return self._states.get(state, {})

    def _writable(self, state: int, key_group: KeyGroup) -> HeapGroup:
        """Return the group to write to: another one than a living snapshot shows."""
        groups = self._states.setdefault(state, {})
        content = groups.get(key_group)
        if content is None:
            content = groups[key_group] = HeapGroup(self._epoch)
        elif content.epoch <= self._frozen:
            content = groups[key_group] = content.fork(self._epoch)
        elif content.point_layer is not None and self._frozen < 0:
            content.settle()
        self._touch(key_group)
        return content

    def _sorted_user_keys(self, owner: object, inner: Mapping[bytes, bytes]) -> list[bytes]:
        # Remembers the last key only: enough that paging through one huge map sorts it once.
        if self._elements_order[0] != owner:
            self._elements_order = (owner, sorted(inner))
        return self._elements_order[1]

    def _release(self, epoch: int) -> None:
        with self._lock:
            self._open_epochs.discard(epoch)
            self._frozen = max(self._open_epochs, default=-1)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the heap state table was closed: open another one")


class HeapTableSnapshot:
    """One moment of a heap table. Reading sorts one state of one key group at a time, and copies references only.

    Attributes:
        versions: Version of each key group at that moment.
    """

    def __init__(
        self,
        states: dict[int, dict[KeyGroup, HeapGroup]],
        versions: Mapping[KeyGroup, int],
        release: Callable[[], None],
    ) -> None:
        self._states = states
        self.versions = versions
        self._release = release
        self._closed = False

    def entries(self, key_group: KeyGroup) -> Iterator[pa.RecordBatch]:
        """Yield one key group's entries as pages, ordered by state, key, user key."""
        builder = PageBuilder()
        for state in sorted(self._states):
            if self._closed:
                raise Closed("the snapshot was closed while it was read: close it after its last reader")
            content = self._states[state].get(key_group)
            if content is None or not content.entries:
                continue
            yield from content.pages(state, builder)
        yield from builder.finish()

    def close(self) -> None:
        """Let the table write without copying. Idempotent, from any thread."""
        self._closed = True
        self._release()


def _slots_of(content: HeapGroup | None) -> ValueSlots | None:
    """Return a group's values where they all have one length and no layer is above them."""
    if content is None or content.point_layer or not isinstance(content.points, ValueSlots):
        return None
    return content.points


def _is_most(values: Keys, page: pa.RecordBatch) -> bool:
    """Return whether a page's values may stay where they are: what else lies there would be held with them."""
    return isinstance(values, np.ndarray) and values.flags.writeable and values.nbytes >= _MOST * page.nbytes


def _apply_one_by_one(content: HeapGroup, run: ChangeRun) -> None:
    user_keys = run.user_keys if run.user_keys is not None else repeat(b"", len(run.keys))
    ops = run.ops if run.ops is not None else repeat(OP_PUT, len(run.keys))
    for op, key, user_key, value in zip(ops, run.keys, user_keys, run.values, strict=True):
        if op == OP_PUT:
            content.put(key, user_key, value)
        elif op == OP_CLEAR:
            content.clear(key)
        else:
            content.delete(key, user_key)
