"""The bytes of the log's budget that background work may take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dstl.changelog.storage import StateChangelogStorage
from dstl.runtime import Clock

__all__ = ["BackgroundShare"]

_LOOK_S = 0.02
_PATIENCE_S = 60.0


class BackgroundShare:
    """The part of the log's byte budget that base files may hold: half of it, and what nobody waits for.

    Reservations are granted in the order of asking, so a large file that waited among them would hold up the appends
    behind it, and two of them could hold all of the budget for as long as the store takes. Where there is no room for a
    minute it waits among them all the same, for a log that is never materialized is worse.

    Args:
        storage: Whose budget it is.
        clock: Waits.
    """

    def __init__(self, storage: StateChangelogStorage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._held = 0

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold so many bytes, or half of the budget where that is less, for the body; waits until they are free.

        Raises:
            Closed: The storage was closed.
        """
        budget = self._storage.budget
        share = budget.limit // 2
        nbytes = min(nbytes, share)
        patient_until = self._clock.now() + _PATIENCE_S
        while self._held + nbytes > share or (
            (budget.starving or budget.used + nbytes > budget.limit) and self._clock.now() < patient_until
        ):
            await self._clock.sleep(_LOOK_S)
        self._held += nbytes
        try:
            async with self._storage.reserve(nbytes):
                yield
        finally:
            self._held -= nbytes
