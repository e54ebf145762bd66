"""The objects of one moment of a simulated world, as its checks read them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from dstl.errors import ObjectNotFound
from dstl.store.base import ByteRange, ObjectInfo
from tests.simulation.store import Stored


class RawStore:
    """The objects of one moment, read without latency or faults: what the checks restore from."""

    def __init__(self, objects: dict[str, Stored]) -> None:
        self._objects = objects

    @property
    def location(self) -> str:
        """``sim://``."""
        return "sim://"

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Refuse: a check writes nothing."""
        raise AssertionError(f"a check stored {name}")

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        found = self._objects.get(name)
        if found is None:
            raise ObjectNotFound(f"no object sim://{name}")
        return found.body if byte_range is None else found.body[byte_range.start : byte_range.stop]

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        body = await self.get(name)
        return ObjectInfo(name, len(body), self._objects[name].modified)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects in name order."""
        for name in sorted(self._objects):
            if name.startswith(prefix):
                yield await self.head(name)

    async def delete(self, names: Sequence[str]) -> None:
        """Refuse: a check deletes nothing."""
        raise AssertionError(f"a check deleted {names}")

    async def close(self) -> None:
        """There is nothing to release."""
