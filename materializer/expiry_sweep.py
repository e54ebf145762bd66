"""The sweep of expired entries out of live tables, between batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock
from handles.key_group import KeyGroup
from materializer.tables import Expired, StateTable

__all__ = ["ExpirySweep"]

_REST = 9.0
"""Seconds of rest per second of work."""

_LONGEST_REST_S = 0.02
"""A machine that stalls makes a piece look long."""


class ExpirySweep:
    """Drops expired entries from one TaskManager's tables. One event loop.

    To look at an entry costs some 2 us of processor time: 20 s for ten million. So each run looks at a share of an
    operator's key groups, in turn, and at more while it has done little: small tables are looked at whole.

    Invariants:
        1. It works in pieces of a millisecond or so and rests after each, so that nine tenths of the loop are left.
        2. An entry is tested and deleted within a piece, so what was written meanwhile survives.
        3. ``share`` runs in a row look at every key group.

    Args:
        clock: Measures the pieces, and rests.
        recorder: ``expiredEntriesDropped``.
        share: One of so many key groups at least is looked at in each run.
        pieces: More are looked at until so many pieces were done.
    """

    def __init__(self, clock: Clock, recorder: Recorder = NullRecorder(), *, share: int = 8, pieces: int = 256) -> None:
        self._clock = clock
        self._recorder = recorder
        self._share = share
        self._enough = pieces
        self._next: dict[str, KeyGroup] = {}

    def reset(self) -> None:
        """Begin anew, for the tables were replaced."""
        self._next.clear()

    async def run(
        self, operator: str, table: StateTable, expired: Expired, outdated: Callable[[KeyGroup], None]
    ) -> None:
        """Drop what has expired in the operator's next key groups. What is done stays done when it is cancelled.

        Args:
            operator: Whose turn it is.
            table: Its table.
            expired: Tests by state id.
            outdated: Told of key groups that lose entries: their newest base may have them still.

        Raises:
            Closed: The table was closed meanwhile.
        """
        groups = table.key_groups() if expired else ()
        first = self._next.get(operator, 0)
        least = -(-len(groups) // self._share)
        pieces = 0
        for count, group in enumerate([*(g for g in groups if g >= first), *(g for g in groups if g < first)]):
            if count >= least and pieces >= self._enough:
                return
            pieces += await self._drop(table, group, expired, outdated)
            self._next[operator] = group + 1

    async def drop(self, groups: Iterable[KeyGroup], table: StateTable, expired: Expired) -> None:
        """Drop from these key groups what a new base has left out of them.

        Raises:
            Closed: The table was closed meanwhile.
        """
        for group in groups:
            await self._drop(table, group, expired, lambda _: None)

    async def _drop(
        self, table: StateTable, group: KeyGroup, expired: Expired, outdated: Callable[[KeyGroup], None]
    ) -> int:
        pieces = table.drop_expired(group, expired)
        count = 0
        before = self._clock.now()
        for dropped in pieces:
            count += 1
            if dropped:
                self._recorder.increment("expiredEntriesDropped", dropped)
                outdated(group)
            await self._clock.sleep(min(_LONGEST_REST_S, _REST * (self._clock.now() - before)))
            before = self._clock.now()
        return count
