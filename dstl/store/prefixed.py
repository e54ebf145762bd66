"""A part of a store as a store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from dstl.store.base import ByteRange, ObjectInfo, ObjectStore, check_name

__all__ = ["PrefixedStore"]


class PrefixedStore:
    """The objects of another store whose names begin with ``prefix/``, under the rest of their names.

    Args:
        inner: Closed together with this one.
        prefix: One or more path elements of the names' grammar.

    Raises:
        Invalid: The prefix breaks the grammar.
    """

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self.inner = inner
        self._prefix = check_name(prefix) + "/"

    @property
    def location(self) -> str:
        """The inner location with the prefix behind it."""
        return f"{self.inner.location.rstrip('/')}/{self._prefix[:-1]}"

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        return replace(await self.inner.put(self._full(name), data, if_absent=if_absent), name=name)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        return await self.inner.get(self._full(name), byte_range)

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        return replace(await self.inner.head(self._full(name)), name=name)

    async def list(self, prefix: str = "", *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects in name order."""
        after = self._prefix + start_after if start_after else ""
        async for info in self.inner.list(self._prefix + prefix, start_after=after):
            yield replace(info, name=info.name[len(self._prefix) :])

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        await self.inner.delete([self._full(name) for name in names])

    async def close(self) -> None:
        """Close the inner store. Idempotent."""
        await self.inner.close()

    def _full(self, name: str) -> str:
        return self._prefix + check_name(name)
