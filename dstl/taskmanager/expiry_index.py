"""Entries in the order in which they expire: the due ones are found by a search, whatever is held beside them.

An operator's tables keep an entry under its key; finding the due ones there would be a pass over all entries in every
batch. Times are read out of the keys, or values, of many entries at once, and nothing runs per entry in Python.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dstl.changelog.change_set import OP_PUT
from dstl.column_buffers import content_of
from dstl.errors import Invalid
from dstl.rpc.messages import ExpiryPlace
from materializer.tables import StateTable
from materializer.tables.columns import key_group_runs

_NEVER = np.iinfo(np.int64).max
_MAX_OFFSET = 1 << 16  # beyond any row's slots; a forged place must not be believed
_RATIO = 4
"""A run is merged into the one before it unless that is so many times as long: there are few runs, and each entry is
copied a few times in its life."""

Times = npt.NDArray[np.int64]


def expiries_of(encoded: pa.Array, place: ExpiryPlace) -> Times:
    """Return the time that each key, or value, holds at a place; the largest number for one that has none."""
    data, offsets = content_of(encoded)
    found = np.full(len(encoded), _NEVER, np.int64)
    rows = np.flatnonzero(np.diff(offsets) >= place.offset + 8)
    at = offsets[rows]
    if place.null_bit is not None:
        is_null = data[at + place.null_bit // 8] >> np.uint8(place.null_bit % 8) & np.uint8(1)
        rows, at = rows[is_null == 0], at[is_null == 0]
    found[rows] = np.ascontiguousarray(data[(at + place.offset)[:, None] + np.arange(8)]).view("<i8")[:, 0]
    return found


@dataclass(slots=True)
class _Run:
    """Entries of one key group by time, ascending."""

    times: Times
    keys: pa.Array

    def __len__(self) -> int:
        return len(self.times)


class ExpiryIndex:
    """The entries of one state by their time, key group by key group. Not thread-safe.

    It is made from the table when a batch first asks for what is due, and told of new entries from then on. It holds at
    least the entries that are there: one that is gone, or has another time by now, is found out when it is due, and
    forgotten. An entry costs the bytes of its key and twelve more. Who serves others while it is made lets
    :meth:`build` do it first.

    Args:
        table: The operator's committed state.
        state: The state, whose entries have no user keys.
        place: Where the time stands.

    Raises:
        Invalid: No key or value has such a place.
    """

    def __init__(self, table: StateTable, state: int, place: ExpiryPlace) -> None:
        if not 0 <= place.offset <= _MAX_OFFSET or not 0 <= (place.null_bit or 0) < 8 * (place.offset + 8):
            raise Invalid(f"no entry has a time at {place}: do worker and TaskManager run the same version of DSTL?")
        self._table = table
        self._state = state
        self._place = place
        self._runs: defaultdict[int, list[_Run]] = defaultdict(list)
        self._is_built = False

    def due(
        self, key_group: int, until: int, skip: int = 0, most: int | None = None, *, with_values: bool = True
    ) -> tuple[pa.Array, pa.Array]:
        """Return keys and values of the entries of a key group whose time is at or below ``until``, by their time.

        At most ``most`` of them, behind the first ``skip``. Without ``with_values`` the values are empty. Asked again,
        with nothing added in between, it returns the same in the same order.
        """
        for _ in self.build():
            pass
        runs = self._runs[key_group]
        cuts = [int(np.searchsorted(run.times, until, side="right")) for run in runs]
        taken = [_Run(run.times[:cut], run.keys.slice(0, cut)) for run, cut in zip(runs, cuts, strict=True) if cut]
        if not taken:
            return pa.array([], pa.binary()), pa.array([], pa.binary())
        found = _merge(taken)
        held = self._table.get_values(self._state, np.full(len(found), key_group, np.uint16), found.keys)
        if self._place.in_key:
            is_there = held.is_valid().to_numpy(zero_copy_only=False)
        else:
            is_there = expiries_of(held.fill_null(b""), self._place) == found.times
        # What went and came again is here twice.
        first = np.unique(np.asarray(found.keys.dictionary_encode().indices)[is_there], return_index=True)[1]
        kept = np.flatnonzero(is_there)[np.sort(first)]
        rest = [_Run(run.times[cut:], run.keys.slice(cut)) for run, cut in zip(runs, cuts, strict=True)]
        found = _take(found, kept)
        self._runs[key_group] = [run for run in (*rest, found) if len(run)]
        keys, kept = found.keys.slice(skip, most), kept[skip:][:most]
        if not with_values:
            return keys, pa.repeat(pa.scalar(b"", pa.binary()), len(kept))
        return keys, held.take(pa.array(kept))

    def build(self, key_groups: Sequence[int] = ()) -> Generator[None]:
        """Read the table, where that was not done yet, in pieces of some milliseconds, and yield after each.

        All key groups at once, whichever are asked for: of a table in files a snapshot costs a flush. Between two
        pieces the table may be used in every way, and entries be added. It is read again from the start where a build
        before has not come to its end.
        """
        if self._is_built:
            return
        self._runs.clear()
        with closing(self._table.snapshot()) as snapshot:
            for key_group in snapshot.versions:
                for page in snapshot.entries(key_group):
                    mine = pa.array(np.asarray(page.column("state")) == self._state)
                    found = page.filter(mine)
                    self._insert(key_group, found.column("key"), found.column("value"))
                    yield
        self._is_built = True

    def add(self, changes: pa.RecordBatch) -> None:
        """Take in entries that were put: columns of ``CHANGE_SCHEMA``, sorted by key group."""
        mine = (np.asarray(changes.column("state")) == self._state) & (np.asarray(changes.column("op")) == OP_PUT)
        if not mine.all():
            changes = changes.filter(pa.array(mine))
        for key_group, start, stop in key_group_runs(np.asarray(changes.column("key_group"))):
            part = changes.slice(start, stop - start)
            self._insert(key_group, part.column("key"), part.column("value"))

    def _insert(self, key_group: int, keys: pa.Array, values: pa.Array) -> None:
        times = expiries_of(keys if self._place.in_key else values, self._place)
        lasting = np.flatnonzero(times != _NEVER)
        if not len(lasting):
            return
        run = _take(_Run(times, keys), lasting[np.argsort(times[lasting], kind="stable")])
        runs = self._runs[key_group]
        while runs and len(runs[-1]) < _RATIO * len(run):
            run = _merge([runs.pop(), run])
        runs.append(run)


def _take(run: _Run, rows: npt.NDArray[np.intp]) -> _Run:
    return _Run(run.times[rows], run.keys.take(pa.array(rows)))


def _merge(runs: Sequence[_Run]) -> _Run:
    if len(runs) == 1:
        return runs[0]
    times = np.concatenate([run.times for run in runs])
    keys = pa.concat_arrays([run.keys.cast(pa.binary()) for run in runs])
    return _take(_Run(times, keys), np.argsort(times, kind="stable"))
