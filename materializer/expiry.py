"""Expiry of stored values: read off the value itself, without its schema.

A value whose first byte has the high bit set says in the next eight bytes (little-endian, Unix milliseconds) when it
was written; ``dstl.state.codec.value_codec`` writes it so.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from materializer.tables import Expired

__all__ = ["ExpiredAt", "deleted_states", "expired_at", "is_deleted", "times_to_live"]

_HAS_WRITE_TIME = 0x80
_WRITE_TIME = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ExpiredAt:
    """Says whether a value was written at this moment or before.

    Attributes:
        latest_dead_ms: Unix milliseconds.
    """

    latest_dead_ms: int

    def __call__(self, value: bytes, /) -> bool:
        """Return True to drop the entry; a value without a write time never expires."""
        if len(value) <= _WRITE_TIME.size or not value[0] & _HAS_WRITE_TIME:
            return False
        written: int = _WRITE_TIME.unpack_from(value, 1)[0]
        return written <= self.latest_dead_ms


def expired_at(ttl_ms: Mapping[int, int], now_ms: int | None) -> Expired:
    """Return the tests of one operator's states.

    Args:
        ttl_ms: Time to live by state id; 0 for states that live for ever.
        now_ms: Processing time of the last completed batch: what was gone then was gone for that batch already, so no
            batch can tell the difference. None: not known, nothing has expired.
    """
    if now_ms is None:
        return {}
    return {state: ExpiredAt(now_ms - ttl) for state, ttl in ttl_ms.items() if ttl > 0}


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
