"""Reading again what could not be read in passing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from dstl.errors import CorruptData, Unavailable
from dstl.runtime import Runtime

__all__ = ["repeated"]

T = TypeVar("T")
_ATTEMPTS = 6
_BACKOFF_S = 0.1


async def repeated(read: Callable[[], Awaitable[T]], runtime: Runtime) -> T:
    """Read, and again with growing pauses while the store does not answer; once more where damage was found.

    Damage may have happened on the way; found twice, it is in the store.

    Raises:
        Unavailable: The store did not answer several times in a row.
        CorruptData: Twice in a row.
    """
    damaged = 0
    for attempt in range(_ATTEMPTS):
        try:
            return await read()
        except (Unavailable, CorruptData) as error:
            damaged += isinstance(error, CorruptData)
            if attempt == _ATTEMPTS - 1 or damaged > 1:
                raise
            await runtime.clock.sleep(runtime.rng.uniform(0, _BACKOFF_S * 2.0**attempt))
    raise AssertionError("unreachable")
