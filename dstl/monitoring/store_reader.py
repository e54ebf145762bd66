"""A reader makes overviews of a location from its store, and reads it again no more often than it must."""

from __future__ import annotations

import asyncio

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.savepoint.deletion import list_savepoints
from dstl.errors import Invalid
from dstl.monitoring.overview import Overview, of_store
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore


class StoreReader:
    """Reads what a location holds; never writes. One event loop.

    Args:
        store: The location's; stays the caller's.
        runtime: Clock and jitter.
        fresh_s: What was read is shown for so long. Longer: fewer requests to the store while many look.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, fresh_s: float = 2.0) -> None:
        self._store = store
        self._runtime = runtime
        self._fresh_s = fresh_s
        self._turn = asyncio.Lock()
        self._found: Overview | None = None
        self._found_at = 0.0

    async def overview(self) -> Overview:
        """Return the overview; of an empty location, one without a query.

        Raises:
            Unavailable: The store did not answer several times in a row.
        """
        async with self._turn:
            now = self._runtime.clock.now()
            if self._found is None or now - self._found_at >= self._fresh_s:
                self._found = await self._read()
                self._found_at = self._runtime.clock.now()
            return self._found

    async def _read(self) -> Overview:
        scan = await ManifestReader(self._store, self._runtime).scan()
        try:
            savepoints = await list_savepoints(self._store, self._runtime)
        except Invalid:
            savepoints = []  # no location of DSTL, as the scan says as well
        return of_store(self._store.location, self._runtime.clock.wall(), scan, savepoints)
