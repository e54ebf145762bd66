"""A savepoint's objects in a store: patient reads and writes, and names that exactly one writer wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from dstl.checkpoint.put_once import PutOnce
from dstl.checkpoint.savepoint.format import (
    SAVEPOINTS,
    EndMarker,
    Savepoint,
    decode_marker,
    decode_savepoint,
    descriptor_name,
    encode_record,
    marker_name,
)
from dstl.errors import MissingState, ObjectExists, ObjectNotFound, OutcomeUnknown, Unavailable
from dstl.runtime import Runtime
from dstl.store.base import ObjectInfo, ObjectStore
from dstl.store.patience import Patience

__all__ = ["SavepointObjects"]

_ATTEMPTS = 8
_LONGEST_PAUSE_S = 5.0
_DELETE_TOGETHER = 1000

T = TypeVar("T")


class SavepointObjects:
    """The objects below ``savepoints/`` of one location. One event loop.

    Attributes:
        store: The location's store; stays the caller's.
        runtime: Clock, jitter, ids.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime) -> None:
        self.store = store
        self.runtime = runtime
        self._patience = Patience(runtime, attempts=_ATTEMPTS, longest_s=_LONGEST_PAUSE_S)
        self._puts = PutOnce(store, self._patience)

    async def get(self, name: str) -> bytes:
        """Return an object's bytes; a read that fails in passing is repeated.

        Raises:
            ObjectNotFound: No such object.
            Unavailable: The store did not answer several times in a row.
        """
        return await self._repeat(lambda: self.store.get(name))

    async def put(self, name: str, data: bytes) -> None:
        """Store an object under a name that only this writer uses.

        Repeating is sound: name and bytes are the same in each attempt.

        Raises:
            Unavailable: Certainly not stored.
            OutcomeUnknown: May be stored.
        """
        unknown: OutcomeUnknown | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self.store.put(name, data)
            except OutcomeUnknown as error:
                unknown = error
            except Unavailable as error:
                if attempt == _ATTEMPTS:
                    if unknown is not None:
                        raise unknown from error
                    raise
            else:
                return
            await self._patience.pause(attempt)
        raise unknown or OutcomeUnknown(f"whether {name} is in {self.store.location} is unknown")

    async def win(self, record: Savepoint | EndMarker, name: str) -> bool:
        """Create a descriptor or marker if nobody has; False where somebody else has.

        Args:
            record: What to store.
            name: The savepoint's name.

        Raises:
            Unavailable: Certainly not stored.
            OutcomeUnknown: May be stored: delete nothing that it refers to.
        """
        object_name = descriptor_name(name) if isinstance(record, Savepoint) else marker_name(name)
        read = self.descriptor if isinstance(record, Savepoint) else self.marker

        async def check_ours() -> None:
            found = await read(name)
            if found is None or found.put_id != record.put_id:
                raise ObjectExists(f"{object_name} in {self.store.location} is another's")

        try:
            await self._puts.put(
                object_name,
                encode_record(record),
                object_name,
                check_ours=check_ours,
                taken=ObjectExists,
            )
        except ObjectExists:
            return False
        except OutcomeUnknown as error:
            raise OutcomeUnknown(f"{error}; look with list") from error.__cause__
        except Unavailable as error:
            raise Unavailable(f"{error}; try again later") from error.__cause__
        return True

    async def descriptor(self, name: str) -> Savepoint:
        """Return a savepoint's descriptor.

        Raises:
            MissingState: There is no such savepoint.
            CorruptData: The descriptor is damaged.
            Invalid: A newer version wrote it.
        """
        try:
            data = await self.get(descriptor_name(name))
        except ObjectNotFound:
            raise MissingState(
                f"{self.store.location} has no savepoint {name!r} ({descriptor_name(name)} is not there): see "
                "dstl savepoint list; one that is still being written appears when it is complete"
            ) from None
        return decode_savepoint(data, name, self.store.location)

    async def marker(self, name: str) -> EndMarker | None:
        """Return the marker of whoever has ended a savepoint; None where nobody has.

        Raises:
            CorruptData: It is damaged.
            Invalid: A newer version wrote it.
        """
        try:
            data = await self.get(marker_name(name))
        except ObjectNotFound:
            return None
        return decode_marker(data, name, self.store.location)

    async def list(self, prefix: str = "") -> list[ObjectInfo]:
        """Return everything below ``savepoints/`` whose name goes on with ``prefix``, in name order."""

        async def listed() -> list[ObjectInfo]:
            return [info async for info in self.store.list(SAVEPOINTS + prefix)]

        return await self._repeat(listed)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; what is gone already is a success."""
        for at in range(0, len(names), _DELETE_TOGETHER):
            await self._repeat(partial(self.store.delete, names[at : at + _DELETE_TOGETHER]))

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._patience.repeat(call, self.store.location)
