"""Objects in this process's memory: for tests, simulations and the first minutes with the library."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from dstl.errors import Closed, ObjectExists, ObjectNotFound
from dstl.runtime import Clock, SystemClock
from dstl.store.base import ByteRange, ObjectInfo, ObjectStore, check_name


class _Objects:
    """The stored objects: bytes and time by name, and the names in order. Guarded by its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stored: dict[str, tuple[bytes, float]] = {}
        self.names: list[str] = []


_shared_lock = threading.Lock()
_shared: dict[str, _Objects] = {}


class MemoryStore:
    """An object store in memory.

    Invariants:
        1. Nothing waits and nothing yields to the loop: a simulation sees each call as one step.
        2. Thread-safe, unlike the protocol asks: stores of one name may be used by several loops of a process.
        3. Objects live as long as the process (shared by name) or the store (no name); ``close`` removes nothing.

    A forked child has its own copy of the objects.

    Attributes:
        location: ``memory://name``.

    Args:
        name: Stores of the same name in one process hold the same objects; empty for a store of its own.
        clock: Whose ``wall`` stamps new objects: the "store's clock".
    """

    def __init__(self, name: str = "", *, clock: Clock | None = None) -> None:
        self.location = f"memory://{name}"
        self._clock = clock if clock is not None else SystemClock()
        self._closed = False
        if name:
            with _shared_lock:
                self._objects = _shared.setdefault(check_name(name), _Objects())
        else:
            self._objects = _Objects()

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        objects = self._open(name)
        body = bytes(data)
        modified = self._clock.wall()
        with objects.lock:
            taken = name in objects.stored
            if taken and if_absent:
                raise ObjectExists(f"{self.location}/{name} exists already")
            objects.stored[name] = (body, modified)
            if not taken:
                insort(objects.names, name)
        return ObjectInfo(name, len(body), modified)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        body, _ = self._find(name)
        return body if byte_range is None else body[byte_range.start : byte_range.stop]

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        body, modified = self._find(name)
        return ObjectInfo(name, len(body), modified)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects in name order, as they were when the first was asked for."""
        objects = self._open()
        found = []
        with objects.lock:
            at = bisect_left(objects.names, prefix)
            while at < len(objects.names) and (name := objects.names[at]).startswith(prefix):
                body, modified = objects.stored[name]
                found.append(ObjectInfo(name, len(body), modified))
                at += 1
        for info in found:
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        for name in names:
            check_name(name)
        objects = self._open()
        with objects.lock:
            for name in names:
                if objects.stored.pop(name, None) is not None:
                    del objects.names[bisect_left(objects.names, name)]

    async def close(self) -> None:
        """Refuse further calls; the objects stay for other stores of this name. Idempotent."""
        self._closed = True

    def _open(self, name: str | None = None) -> _Objects:
        if self._closed:
            raise Closed(f"the store {self.location} was closed: open a new one")
        if name is not None:
            check_name(name)
        return self._objects

    def _find(self, name: str) -> tuple[bytes, float]:
        objects = self._open(name)
        with objects.lock:
            found = objects.stored.get(name)
        if found is None:
            raise ObjectNotFound(f"no object {self.location}/{name}")
        return found


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

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects."""
        async for info in self.inner.list(self._prefix + prefix):
            yield replace(info, name=info.name[len(self._prefix) :])

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        await self.inner.delete([self._full(name) for name in names])

    async def close(self) -> None:
        """Close the inner store. Idempotent."""
        await self.inner.close()

    def _full(self, name: str) -> str:
        return self._prefix + check_name(name)
