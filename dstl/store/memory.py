"""Objects in this process's memory: for tests, simulations and the first minutes with the library."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import AsyncGenerator, Sequence

from dstl.errors import Closed, ObjectExists, ObjectNotFound
from dstl.runtime import Clock, SystemClock
from dstl.store.base import ByteRange, ObjectInfo, check_name


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
        location: ``memory://name/prefix``.

    Args:
        name: Stores of the same name in one process hold the same objects; empty for a store of its own.
        prefix: Objects are those whose names begin with it and a slash, under the rest of their names; empty for all.
        clock: Whose ``wall`` stamps new objects: the "store's clock".

    Raises:
        Invalid: Name or prefix breaks the grammar.
    """

    def __init__(self, name: str = "", prefix: str = "", *, clock: Clock | None = None) -> None:
        self.location = "memory://" + "/".join(filter(None, (name, prefix)))
        self._prefix = f"{check_name(prefix)}/" if prefix else ""
        self._clock = clock if clock is not None else SystemClock()
        self._closed = False
        if name:
            with _shared_lock:
                self._objects = _shared.setdefault(check_name(name), _Objects())
        else:
            self._objects = _Objects()

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`."""
        objects, key = self._objects, self._key(name)
        body = bytes(data)
        modified = self._clock.wall()
        with objects.lock:
            taken = key in objects.stored
            if taken and if_absent:
                raise ObjectExists(f"{self.location}/{name} exists already")
            objects.stored[key] = (body, modified)
            if not taken:
                insort(objects.names, key)
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
        self._check_open()
        objects, wanted = self._objects, self._prefix + prefix
        found = []
        with objects.lock:
            at = bisect_left(objects.names, wanted)
            while at < len(objects.names) and (key := objects.names[at]).startswith(wanted):
                body, modified = objects.stored[key]
                found.append(ObjectInfo(key.removeprefix(self._prefix), len(body), modified))
                at += 1
        for info in found:
            yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        self._check_open()
        objects, keys = self._objects, [self._key(name) for name in names]
        with objects.lock:
            for key in keys:
                if objects.stored.pop(key, None) is not None:
                    del objects.names[bisect_left(objects.names, key)]

    async def close(self) -> None:
        """Refuse further calls; the objects stay for other stores of this name. Idempotent."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the store {self.location} was closed: open a new one")

    def _key(self, name: str) -> str:
        self._check_open()
        return self._prefix + check_name(name)

    def _find(self, name: str) -> tuple[bytes, float]:
        key = self._key(name)
        with self._objects.lock:
            found = self._objects.stored.get(key)
        if found is None:
            raise ObjectNotFound(f"no object {self.location}/{name}")
        return found
