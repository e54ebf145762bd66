"""The committed tables of one TaskManager and their indexes by time, with the changes that wait to be folded in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import pyarrow as pa

from dstl.rpc.messages import ExpiryPlace
from dstl.taskmanager.expiry_index import ExpiryIndex
from dstl.taskmanager.timer_index import TimerIndex
from materializer.tables import StateTable

__all__ = ["CommittedTables", "Overlay"]

Overlay = Iterable[tuple[pa.RecordBatch, bool]]
"""Changes of an attempt in their order, each with whether its times are new to an index by time."""


class CommittedTables:
    """Tables by operator, and what is derived from them. One event loop; not thread-safe.

    Changes are noted when their checkpoint counts, and folded in at the next look at any table, or by :meth:`fold`
    before it: no look sees a table without them.

    Args:
        open_table: Makes an empty table for an operator.

    Attributes:
        open_table: The same, for whoever restores.
    """

    def __init__(self, open_table: Callable[[str], StateTable]) -> None:
        self.open_table = open_table
        self._tables: dict[str, StateTable] = {}
        self._timers: dict[str, TimerIndex] = {}
        self._expiries: dict[str, dict[tuple[int, ExpiryPlace], ExpiryIndex]] = {}
        self._unfolded: deque[tuple[str, pa.RecordBatch, bool]] = deque()

    @property
    def has_failed(self) -> bool:
        """True where a table cannot be used any more: all must be restored."""
        return any(table.has_failed for table in self._tables.values())

    @property
    def waiting_rows(self) -> int:
        """Changes that have been added and not folded in yet."""
        return sum(part.num_rows for _, part, _ in self._unfolded)

    def all(self) -> Mapping[str, StateTable]:
        """Return the tables by operator."""
        self.fold()
        return self._tables

    def table(self, operator: str) -> StateTable:
        """Return an operator's table, an empty one for a new operator."""
        self.fold()
        return self._opened(operator)

    def timers(self, operator: str) -> TimerIndex:
        """Return an operator's timers by time."""
        table = self.table(operator)
        if operator not in self._timers:
            self._timers[operator] = TimerIndex(table)
        return self._timers[operator]

    def expiries(self, operator: str, state: int, place: ExpiryPlace) -> ExpiryIndex:
        """Return the entries of an operator's state by their time."""
        table = self.table(operator)
        indexes = self._expiries.setdefault(operator, {})
        if (state, place) not in indexes:
            indexes[state, place] = ExpiryIndex(table, state, place)
        return indexes[state, place]

    def is_in_files(self, operator: str) -> bool:
        """True where an operator's table lies on a disk, so that its entries take no memory each."""
        return self._opened(operator).as_files is not None

    def add(self, operator: str, overlay: Overlay) -> None:
        """Note an operator's changes, to be folded in behind those that wait already."""
        self._unfolded.extend((operator, *part) for part in overlay)

    def fold(self) -> None:
        """Fold in what waits, now rather than at the next look. What fails stays, and all behind it."""
        while self._unfolded:
            operator, changes, expiring = self._unfolded[0]
            self._opened(operator).apply(changes)
            if operator in self._timers:
                self._timers[operator].apply(changes)
            if expiring:
                for index in self._expiries.get(operator, {}).values():
                    index.add(changes)
            self._unfolded.popleft()

    def replace(self, tables: dict[str, StateTable]) -> None:
        """Take other tables, close those that were here, and forget what waited for them."""
        self._unfolded.clear()
        self._timers.clear()
        self._expiries.clear()
        for table in self._tables.values():
            table.close()
        self._tables = tables

    def _opened(self, operator: str) -> StateTable:
        if operator not in self._tables:
            self._tables[operator] = self.open_table(operator)
        return self._tables[operator]
