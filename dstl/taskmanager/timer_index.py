"""Timers in the order in which they fire. Tables keep a timer under its key, as deleting one of a key's timers needs
it; finding the due ones there would be a pass over all timers in every batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from operator import itemgetter

import numpy as np
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from materializer.tables import StateTable

_PAGE = 4096  # timers that are read in some 15 ms, while tasks wait
REPLY_BYTES = 1 << 20
"""About how many bytes of timers are answered at once, in some 15 ms."""
_FEW = 64
"""One timer is put into, or taken out of, a list of so many times as many in the time that making it anew takes."""

_Timer = tuple[bytes, bytes]
"""Expiry (eight bytes that sort as the time does) and grouping key."""


class TimerIndex:
    """The timers of one state, by time.

    It is made from the table when a batch first asks for due timers, one key group at a time, and follows the table's
    changes from then on; an operator without timers never has one. A timer in it costs some 150 bytes, and some 4 us to
    take in: who serves others meanwhile lets it be made by :meth:`build` first. Not thread-safe.

    Args:
        table: The operator's committed state.
        state: The timers' state.
    """

    def __init__(self, table: StateTable, state: int) -> None:
        self._table = table
        self._state = state
        self._order: dict[int, list[_Timer]] = {}
        self._changes = 0

    def build(self, key_groups: Sequence[int]) -> Generator[None]:
        """Read key groups that were not asked for yet in pieces of some 15 ms, and yield after each; sorting one of
        half a million timers takes a quarter of a second.

        Between two of them table and index may be used in every way.
        """
        for group in key_groups:
            while group not in self._order:
                yield from self._read(group)

    def due(
        self, key_group: int, until: int, skip: int = 0, most: int | None = None, *, with_values: bool = True
    ) -> tuple[pa.Array, pa.Array]:
        """Return keys and expiries of the timers of a key group at or below ``until``, by expiry, then key.

        It takes as long as those are many that it returns: at most ``most``, behind the first ``skip``. The expiries
        come always, for a timer is nothing without.
        """
        for _ in self.build((key_group,)):
            pass
        order = self._order[key_group]
        # Behind it: the smallest bytes above an expiry.
        end = bisect_left(order, (until.to_bytes(8, "big") + b"\0", b""))
        found = order[skip : end if most is None else min(end, skip + most)]
        return pa.array([key for _, key in found], pa.binary()), pa.array([at for at, _ in found], pa.binary())

    def add(self, changes: pa.RecordBatch) -> None:
        """Follow changes that the table has taken: columns of ``CHANGE_SCHEMA``."""
        rows = np.flatnonzero(np.asarray(changes.column("state")) == self._state)
        if not len(rows):
            return
        columns = [
            changes.column(name).take(pa.array(rows)).to_pylist() for name in ("key_group", "op", "key", "user_key")
        ]
        self._changes += 1
        written: dict[int, dict[_Timer, bool]] = {}
        for group, op, key, expiry in zip(*columns, strict=True):
            if op == OP_CLEAR:
                # Which timers those were, the table does not say any more.
                self._order.pop(group, None)
            elif group in self._order:
                written.setdefault(group, {})[expiry, key] = op == OP_PUT
        for group, timers in written.items():
            if group in self._order:
                self._order[group] = _update(self._order[group], timers)

    def _read(self, group: int) -> Iterator[None]:
        """Read a key group; one that was written to meanwhile is left as it was."""
        timers: list[_Timer] = []
        seen: tuple[bytes, bytes] | None = None
        changes = self._changes
        while page := self._table.scan(self._state, group, after=seen, limit=_PAGE):
            timers.extend((entry.user_key, entry.key) for entry in page)
            if len(page) < _PAGE:
                break
            seen = (page[-1].key, page[-1].user_key)
            yield
            if self._changes != changes:
                return
        # By time alone, which is quicker: pages come in the order of their keys, and a sort keeps it.
        timers.sort(key=itemgetter(0))
        self._order[group] = timers
        yield


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
