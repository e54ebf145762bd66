"""Time to live: a value carries its write time, and is gone ``ttl_ms`` later.

Time is the batch's processing time, fixed for the whole batch and the same when the batch runs again, so a value never
disappears between two reads. A read of an expired value finds nothing, and removes nothing: whether it is still there
depends on the sweep that drops such values in the background (``materializer.expiry_sweep``), and attempts at one task
must make the same changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dstl.state.codec.value_codec import HAS_WRITE_TIME, WRITE_TIME

__all__ = ["TimeToLive", "is_expired", "write_time_ms"]


def write_time_ms(value: bytes) -> int | None:
    """Return when an encoded value was written (milliseconds since 1970), None where it does not say."""
    if len(value) > WRITE_TIME.size and value[0] & HAS_WRITE_TIME:
        written: int = WRITE_TIME.unpack_from(value, 1)[0]
        return written
    return None


def is_expired(value: bytes, ttl_ms: int, now_ms: int) -> bool:
    """Return True where an encoded value is gone at ``now_ms``; a value without a write time never is."""
    written = write_time_ms(value)
    return ttl_ms > 0 and written is not None and written + ttl_ms <= now_ms


class TimeToLive:
    """Tells which of a state's values are gone at one batch's time.

    Args:
        ttl_ms: 0 for states that live for ever.
        now_ms: The batch's processing time.
    """

    __slots__ = ("_latest_dead", "ttl_ms")

    def __init__(self, ttl_ms: int, now_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._latest_dead = now_ms - ttl_ms

    def find_expired(self, values: Sequence[bytes | None]) -> list[int]:
        """Return the positions of the values that are gone."""
        if not self.ttl_ms:
            return []
        return [i for i, value in enumerate(values) if value is not None and self.is_dead(value)]

    def is_dead(self, value: bytes) -> bool:
        """Return True where a value is gone."""
        if not self.ttl_ms:
            return False
        written = write_time_ms(value)
        return written is not None and written <= self._latest_dead
