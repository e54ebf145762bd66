"""Expiry of stored values: read off the value itself, without its schema, and swept out of live tables between batches.

A value whose first byte has the high bit set says in the next eight bytes (little-endian, Unix milliseconds) when it
was written; ``dstl.state.codec.value_codec`` writes it so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from dstl.metrics import NullRecorder, Recorder
from dstl.runtime import Clock
from handles.key_group import KeyGroup
from materializer.tables import Expired, StateTable

_HAS_WRITE_TIME = 0x80  # as dstl.state.codec.value_codec writes it
_WRITE_TIME = struct.Struct("<q")

_REST = 9.0
"""Seconds of rest per second of work."""

_LONGEST_REST_S = 0.02
"""A machine that stalls makes a piece look long."""


def is_written_by(latest_ms: int, value: bytes, /) -> bool:
    """Return whether a value was written at this Unix millisecond or before; one without a write time never expires."""
    if len(value) <= _WRITE_TIME.size or not value[0] & _HAS_WRITE_TIME:
        return False
    written: int = _WRITE_TIME.unpack_from(value, 1)[0]
    return written <= latest_ms


def expired_at(ttl_ms: Mapping[int, int], now_ms: int | None) -> Expired:
    """Return the tests of one operator's states.

    Args:
        ttl_ms: Time to live by state id; 0 for states that live for ever.
        now_ms: Processing time of the last completed batch: what was gone then was gone for that batch already, so no
            batch can tell the difference. None: not known, nothing has expired.
    """
    if now_ms is None:
        return {}
    return {state: partial(is_written_by, now_ms - ttl) for state, ttl in ttl_ms.items() if ttl > 0}


def times_to_live(registry: Mapping[str, Any]) -> dict[int, int]:
    """Return the time to live in milliseconds by state id, of those states that have one.

    Args:
        registry: An operator's states as plain data, as a checkpoint and the log's metadata hold them.
    """
    found: dict[int, int] = {}
    for state in registry.get("states", ()):
        ttl = int(state.get("ttl_ms", 0))
        if ttl > 0:
            found[int(state["id"])] = ttl
    return found


def deleted_states(registry: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of the states that the query has deleted: nothing of them is read again, and no id comes back.

    Args:
        registry: See :func:`times_to_live`.
    """
    return frozenset(map(int, registry.get("removed", ())))


def is_deleted(value: bytes, /) -> bool:
    """Return True: the test of a value of a deleted state."""
    return True


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
