"""One store over several buckets or prefixes, so that a checkpoint's PUTs do not queue at one of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Sequence

from dstl.errors import Invalid
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore, check_name

_SHARD = re.compile(r"s(0|[1-9][0-9]{0,3})")


def shard_names(store: ObjectStore) -> tuple[str, ...]:
    """Return the first path elements among which a writer should spread its segments: ``("s0", "s1", ...)``.

    One per location; ``("s0",)`` for any store that is not sharded. Wrappers are looked through (their ``inner``).
    """
    seen: ObjectStore | None = store
    while seen is not None:
        if isinstance(seen, ShardedStore):
            return tuple(f"s{index}" for index in range(len(seen.stores)))
        seen = getattr(seen, "inner", None)
    return ("s0",)


class ShardedStore:
    """Routes a name by its first path element.

    Invariants:
        1. ``s<i>/...`` is in the *i*-th location; every other name (manifests, savepoints, the marker) in the first.
        2. Locations may be appended later and none may be taken away or moved: names that exist keep their place.
        3. What one location holds of another's names is never seen.

    S3 scales by key prefix (3,500 PUT/s each), so several prefixes of one bucket are several locations here.

    Args:
        stores: One per location, in the order of the configuration; closed together with this one.

    Raises:
        Invalid: No store, or the same location twice.
    """

    def __init__(self, stores: Sequence[ObjectStore]) -> None:
        self.stores = tuple(stores)
        names = [store.location for store in stores]
        if not names or len(set(names)) < len(names):
            raise Invalid(f"not a list of different locations: {', '.join(names) or 'empty'}")

    @property
    def location(self) -> str:
        """All locations, joined by commas."""
        return ",".join(store.location for store in self.stores)

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`.

        Raises:
            Invalid: The name's shard has no location: one was taken out of the configuration.
        """
        return await self._of(name).put(name, data, if_absent=if_absent)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        return await self._of(name).get(name, byte_range)

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        return await self._of(name).head(name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield the objects of all locations, one after the other: no folder is in two of them."""
        for index, store in enumerate(self.stores):
            own = f"s{index}/"
            if index == _shard_of(prefix) or own.startswith(prefix):
                # The first one has other folders, too.
                listing = store.list(prefix if not index else max(own, prefix, key=len))
                async with contextlib.aclosing(listing) as found:
                    async for info in found:
                        if _shard_of(info.name) == index:
                            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects, in all locations at once; a name that is already gone is a success."""
        by_store: dict[int, list[str]] = {}
        for name in names:
            by_store.setdefault(self._index(name), []).append(name)
        outcomes = await asyncio.gather(
            *(self.stores[index].delete(of_one) for index, of_one in by_store.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        """Close all stores. Idempotent."""
        await asyncio.gather(*(store.close() for store in self.stores))

    def _index(self, name: str) -> int:
        index = _shard_of(check_name(name))
        if index >= len(self.stores):
            raise Invalid(
                f"{name} is in location number {index + 1}, and only {len(self.stores)} are configured: "
                f"give all locations that were used, in their old order"
            )
        return index

    def _of(self, name: str) -> ObjectStore:
        return self.stores[self._index(name)]


def _shard_of(name: str) -> int:
    found = _SHARD.fullmatch(name.partition("/")[0])
    return int(found[1]) if found is not None and "/" in name else 0
