"""Where the bytes of base files come from: the cache on this host, else the store."""

from __future__ import annotations

import asyncio

from dstl.errors import CorruptData
from dstl.runtime import Runtime
from dstl.store.base import ByteRange, ObjectStore
from handles.materialized_handle import KeyGroupBase
from materializer.bases.base_cache import BaseCache, CachedObject, CacheFill
from materializer.thread_call import call_in_thread

__all__ = ["BaseSource"]


class BaseSource:
    """The store, with the host's cache before it where there is one.

    Args:
        store: Where the files are.
        runtime: Clock and jitter for repeated reads.
        cache: Looked at first, and filled with files that come whole.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, cache: BaseCache | None) -> None:
        self.runtime = runtime
        self._store = store
        self._cache = cache
        self._opened: dict[str, asyncio.Task[CachedObject | CacheFill | None]] = {}

    async def get(self, base: KeyGroupBase, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)`` of the object of a base; those of the cache are of a file checked whole.

        Raises:
            CorruptData: The object ends before.
        """
        found = await self._open(self._cache, base) if self._cache is not None else None
        if isinstance(found, CachedObject):
            return await call_in_thread(found.read, start, stop)
        data = await self._store.get(base.name, ByteRange(start, stop))
        if len(data) != stop - start:
            raise CorruptData(f"base file {base.name} ends at byte {start + len(data)}, before {stop}")
        if found is not None:
            await call_in_thread(found.add, start, data)
        return data

    async def close(self) -> None:
        """Let go of the cache's files."""
        tasks, self._opened = list(self._opened.values()), {}
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, CachedObject | CacheFill):
                await call_in_thread(found.close)

    async def _open(self, cache: BaseCache, base: KeyGroupBase) -> CachedObject | CacheFill | None:
        if base.name not in self._opened:
            work = call_in_thread(_cached_or_fill, cache, base)
            self._opened[base.name] = asyncio.ensure_future(work)
        return await asyncio.shield(self._opened[base.name])


def _cached_or_fill(cache: BaseCache, base: KeyGroupBase) -> CachedObject | CacheFill | None:
    what = (base.name, base.object_size, base.object_checksum)
    return cache.open(*what) or cache.fill(*what)
