"""Timers in the order in which they fire. Tables keep a timer under its key, as deleting one of a key's timers needs
it; finding the due ones there would be a pass over all timers in every batch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter

import numpy as np
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from materializer.tables import StateTable

_PAGE = 4096  # timers that are read in some 15 ms, while tasks wait
_FEW = 64
"""One timer is put into, or taken out of, a list of so many times as many in the time that making it anew takes."""

_Timer = tuple[bytes, bytes]
"""Expiry (eight bytes that sort as the time does) and grouping key."""


class TimerIndex:
    """The timers of one operator's table, by time.

    It is made from the table when a batch first asks for due timers, one key group at a time, and follows the table's
    changes from then on; an operator without timers never has one. A timer in it costs some 150 bytes, and some 4 us to
    take in: who serves others meanwhile lets it be made by :meth:`build` first. Not thread-safe.

    Args:
        table: The operator's committed state.
    """

    def __init__(self, table: StateTable) -> None:
        self._table = table
        self._order: dict[tuple[int, int], list[_Timer]] = {}
        self._states: set[int] = set()
        self._changes = 0

    def build(self, state: int, key_groups: Sequence[int]) -> Generator[None]:
        """Read key groups that were not asked for yet in pieces of some 15 ms, and yield after each; sorting one of
        half a million timers takes a quarter of a second.

        Between two of them table and index may be used in every way.
        """
        self._states.add(state)
        for group in key_groups:
            while (state, group) not in self._order:
                yield from self._read(state, group)

    def due(
        self, state: int, key_groups: Sequence[int], until: bytes, after: tuple[int, bytes, bytes] | None, limit: int
    ) -> list[tuple[int, bytes, bytes]]:
        """Return the next timers at or below ``until`` as (key group, key, expiry), by (expiry, key group, key).

        Args:
            state: The timers' state.
            key_groups: Where to look.
            until: Highest expiry, included.
            after: The last timer of the page before; None for the first page.
            limit: Most timers to return.
        """
        found = merge(*[self._of_group(state, group, until, after) for group in key_groups])
        return [(group, key, expiry) for expiry, group, key in islice(found, max(0, limit))]

    def apply(self, changes: pa.RecordBatch) -> None:
        """Follow changes that the table has taken: columns of ``CHANGE_SCHEMA``."""
        if not self._states or not changes.num_rows:
            return
        rows = np.flatnonzero(np.isin(np.asarray(changes.column("state")), list(self._states)))
        if not len(rows):
            return
        names = ("state", "key_group", "op", "key", "user_key")
        columns = [changes.column(name).take(pa.array(rows)).to_pylist() for name in names]
        self._changes += 1
        written: dict[tuple[int, int], dict[_Timer, bool]] = {}
        for state, group, op, key, expiry in zip(*columns, strict=True):
            if op == OP_CLEAR:
                # Which timers those were, the table does not say any more.
                self._order.pop((state, group), None)
            elif (state, group) in self._order:
                written.setdefault((state, group), {})[expiry, key] = op == OP_PUT
        for where, timers in written.items():
            if where in self._order:
                self._order[where] = _update(self._order[where], timers)

    def _of_group(
        self, state: int, group: int, until: bytes, after: tuple[int, bytes, bytes] | None
    ) -> Iterator[tuple[bytes, int, bytes]]:
        for _ in self.build(state, (group,)):
            pass
        order = self._order[state, group]
        start = 0
        if after is not None:
            of_group, key, expiry = after
            if group == of_group:
                start = bisect_right(order, (expiry, key))
            else:
                # A page ends with all of a moment's timers in the key groups before its last one's.
                start = bisect_left(order, (_above(expiry) if group < of_group else expiry, b""))
        stop = bisect_left(order, (_above(until), b""))
        return ((order[at][0], group, order[at][1]) for at in range(start, stop))

    def _read(self, state: int, group: int) -> Iterator[None]:
        """Read a key group; one that was written to meanwhile is left as it was."""
        timers: list[_Timer] = []
        seen: tuple[bytes, bytes] | None = None
        changes = self._changes
        while page := self._table.scan(state, group, after=seen, limit=_PAGE):
            timers.extend((entry.user_key, entry.key) for entry in page)
            if len(page) < _PAGE:
                break
            seen = (page[-1].key, page[-1].user_key)
            yield
            if self._changes != changes:
                return
        # By time alone, which is quicker: pages come in the order of their keys, and a sort keeps it.
        timers.sort(key=itemgetter(0))
        self._order[state, group] = timers
        yield


def _above(expiry: bytes) -> bytes:
    """Return the smallest bytes above an expiry."""
    return expiry + b"\0"


def _update(order: list[_Timer], written: dict[_Timer, bool]) -> list[_Timer]:
    if len(written) * _FEW > len(order):
        kept = [timer for timer in order if timer not in written]
        kept.extend(timer for timer, is_there in written.items() if is_there)
        kept.sort()
        return kept
    for timer, is_there in written.items():
        at = bisect_left(order, timer)
        found = at < len(order) and order[at] == timer
        if is_there and not found:
            order.insert(at, timer)
        elif found and not is_there:
            del order[at]
    return order
