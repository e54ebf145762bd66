"""The bytes and names of a savepoint (``handles/FORMAT.md``, part 3).

::

    savepoints/<name>/<unique>/<number>.base   base files: state, key group by key group, in the canonical encoding
    savepoints/<name>/savepoint.dstl           the descriptor, written last and only if it is absent
    savepoints/<name>/ended.dstl               the marker of what ended it: a job that claimed it, or a deletion

A record (descriptor or marker) is ``"DSTLSAV1" | body | u32 body length | u32 raw length | u32 CRC-32C of all before |
"1VASLTSD"``, little-endian; the body is a zstd frame of JSON. Names in a descriptor are relative to its own directory,
so the directory can be copied to another location by any tool.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from dstl.checkpoint.record_frame import RecordFrame, complaint
from dstl.errors import (
    CorruptData,
    DstlError,
    Invalid,
    MissingState,
    ObjectExists,
    ObjectNotFound,
    OutcomeUnknown,
    Unavailable,
)
from dstl.runtime import Runtime
from dstl.store.base import ObjectInfo, ObjectStore, check_name
from dstl.store.retry_policy import ConditionalPut, RetryPolicy
from handles.checkpoint import BatchState, CheckpointId, OperatorEntry
from handles.materialized_handle import Frozen

SAVEPOINTS = "savepoints/"
"""Every object of a savepoint has this prefix; no cleanup looks below it."""

SAVEPOINT_VERSION = 1  # nothing has changed since the first
_FRAME = RecordFrame(
    magic=b"DSTLSAV1",
    end=b"1VASLTSD",
    what="a savepoint's record",
    max_raw=256 << 20,  # some 4 million key groups
    too_large="it has too many key groups",
    level=3,
    version=SAVEPOINT_VERSION,
)

_OBJECT = re.compile(
    rf"{SAVEPOINTS}[A-Za-z0-9_=.\-]{{1,128}}/(?:[0-9a-f]{{32}}/[0-9]+\.base|savepoint\.dstl|ended\.dstl)"
)

_Count = Annotated[int, Field(ge=0)]
_Record = TypeVar("_Record", bound=Frozen)


class SavepointFile(Frozen):
    """One base file: key groups of one operator, one behind the other.

    Attributes:
        operator: The operator's uid.
        name: Object name relative to the savepoint's directory.
        size: Length in bytes.
        checksum: CRC-32C of the object.
        parts: ``(key group, offset, length, entries)``, ascending by key group; each part is a whole file of
            ``materializer/bases/key_group_file.py``.
    """

    operator: str
    name: str
    size: _Count
    checksum: _Count
    parts: Annotated[tuple[tuple[_Count, _Count, _Count, _Count], ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _inside(self) -> SavepointFile:
        check_name(self.name)
        end = 0
        for group, offset, length, _ in self.parts:
            if offset != end or not length:
                raise ValueError(f"{self.name}: key group {group} does not begin where the one before it ends")
            end = offset + length
        if end != self.size:
            raise ValueError(f"{self.name}: its key groups have {end} bytes and it has {self.size}")
        return self


class Savepoint(BatchState):
    """The descriptor of a savepoint: its state's operators, and its files.

    A job that is restored from it must have its number of key groups, and goes on from its batch's time, as
    ``CheckpointOptions.clock_hold_s`` says.

    Invariants:
        1. Every operator has every key group exactly once, empty ones included: what is missing is damage, never
           emptiness.

    Attributes:
        version: Format version; a reader refuses a newer one.
        name: The savepoint's name.
        put_id: Random; tells its writer its own descriptor after a lost response.
        source: Location that it was copied from; shown to people.
        checkpoint_id: The checkpoint that was copied.
        sequence_base: Above every number by which an element of a list is ordered: see ``CompletedCheckpoint``.
        operators: The operators and their states.
        files: The base files, ordered by operator, then key group.
    """

    version: Annotated[int, Field(ge=1)] = SAVEPOINT_VERSION
    name: str
    put_id: str
    source: str
    checkpoint_id: Annotated[CheckpointId, Field(ge=1)]
    sequence_base: _Count
    operators: tuple[OperatorEntry, ...]
    files: tuple[SavepointFile, ...]

    @model_validator(mode="after")
    def _whole(self) -> Savepoint:
        held: dict[str, list[int]] = {entry.uid: [] for entry in self.operators}
        if len(held) != len(self.operators):
            raise ValueError("an operator is listed twice")
        for file in self.files:
            if file.operator not in held:
                raise ValueError(f"{file.name} is of operator {file.operator!r}, which is not listed")
            held[file.operator] += [part[0] for part in file.parts]
        for operator, groups in held.items():
            if groups != list(range(self.max_parallelism)):
                raise ValueError(f"operator {operator!r} does not have each of {self.max_parallelism} key groups once")
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("a base file is listed twice")
        return self

    @property
    def bytes(self) -> int:
        """Bytes of its base files."""
        return sum(file.size for file in self.files)

    @property
    def entries(self) -> int:
        """Entries of all states; each element of a list or map counts."""
        return sum(part[3] for file in self.files for part in file.parts)

    def object_name(self, file: SavepointFile) -> str:
        """Return the object name of one of its files, relative to the location."""
        return directory_of(self.name) + file.name

    def objects(self) -> Iterator[str]:
        """Yield the object names of its files, relative to the location."""
        return (self.object_name(file) for file in self.files)


class EndMarker(Frozen):
    """Ends a savepoint: it may not be restored any more. Put-if-absent: exactly one ends it.

    Attributes:
        version: Format version.
        kind: ``claim``: a job owns the files and deletes each when it needs it no more; ``delete``: being deleted.
        put_id: Random; tells its writer its own marker after a lost response.
        query_id: The query that claimed it; empty for a deletion.
        created_at: Unix seconds; shown to people.
    """

    version: Annotated[int, Field(ge=1)] = SAVEPOINT_VERSION
    kind: Literal["claim", "delete"]
    put_id: str
    query_id: str = ""
    created_at: float


def check_savepoint_name(name: str) -> str:
    """Return the name if it can be a savepoint's.

    Raises:
        Invalid: It cannot.
    """
    if not isinstance(name, str):
        raise Invalid(f"a savepoint's name is a text, not {type(name).__name__}")
    if re.fullmatch(r"[A-Za-z0-9_=\-]+(\.[A-Za-z0-9_=\-]+)*", name) is None or len(name) > 128:
        raise Invalid(f"not a savepoint name: {name[:160]!r}; use letters, digits, '-', '_', '=' and inner dots")
    return name


def is_savepoint_object(name: str) -> bool:
    """Return whether an object name is one that a savepoint's writer, claimer or deletion makes."""
    return _OBJECT.fullmatch(name) is not None


def parse_savepoint_location(text: str | os.PathLike[str]) -> tuple[str, str]:
    """Return location and name of ``LOCATION/savepoints/NAME``.

    Raises:
        Invalid: It is not of that form.
    """
    text = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(text, str):
        raise Invalid(f"not a savepoint: {type(text).__name__}; write LOCATION/savepoints/NAME")
    location, found, name = text.rstrip("/").rpartition("/" + SAVEPOINTS)
    if not found or not location or "/" in name:
        raise Invalid(f"not a savepoint: {text!r}; write LOCATION/savepoints/NAME (dstl savepoint list LOCATION)")
    return location, check_savepoint_name(name)


def savepoint_location(location: str, name: str) -> str:
    """Return ``LOCATION/savepoints/NAME``; the inverse of :func:`parse_savepoint_location`."""
    return f"{location.rstrip('/')}/{SAVEPOINTS}{name}"


def directory_of(name: str) -> str:
    """Return the prefix of a savepoint's objects, with the slash."""
    return f"{SAVEPOINTS}{name}/"


def descriptor_name(name: str) -> str:
    """Return the object name of a savepoint's descriptor."""
    return directory_of(name) + "savepoint.dstl"


def marker_name(name: str) -> str:
    """Return the object name of the marker that ends a savepoint."""
    return directory_of(name) + "ended.dstl"


def encode_record(record: Savepoint | EndMarker) -> bytes:
    """Return the bytes of a descriptor or marker.

    Raises:
        Invalid: More operators and key groups than any reader would take.
    """
    return _FRAME.pack(record.model_dump(mode="json"))


def decode_savepoint(data: bytes, name: str, where: str) -> Savepoint:
    """Read a descriptor back; everything is verified before anything is parsed.

    Args:
        data: The object.
        name: The savepoint's name.
        where: The location, for messages.

    Raises:
        CorruptData: The bytes are not what was written, or another savepoint's.
        Invalid: A newer version wrote it.
    """
    found = _decode(Savepoint, data, name, where, descriptor_name(name))
    if found.name != name:
        raise CorruptData(
            f"savepoint {name!r} in {where}: {descriptor_name(name)} describes savepoint {found.name!r}; give the "
            "directory its own name back"
        )
    return found


def decode_marker(data: bytes, name: str, where: str) -> EndMarker:
    """Read a marker back.

    Raises:
        CorruptData: The bytes are not what was written.
        Invalid: A newer version wrote it.
    """
    return _decode(EndMarker, data, name, where, marker_name(name))


def _decode(kind: type[_Record], data: bytes, name: str, where: str, object_name: str) -> _Record:
    subject = f"savepoint {name!r} in {where}"

    def damaged(why: str) -> CorruptData:
        return CorruptData(
            f"{subject}: {object_name} is damaged ({why}); restore that object from a replica, or use another savepoint"
        )

    plain = _FRAME.unpack(data, subject, damaged)
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        raise damaged(complaint(error)) from None


_ATTEMPTS = 8  # with the pauses, some 10 s: a user waits for the savepoint
_LONGEST_PAUSE_S = 5.0  # a store that is back is noticed within seconds
_DELETE_TOGETHER = 1000  # S3's most in one request

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
        self._retries = RetryPolicy(runtime, attempts=_ATTEMPTS, longest_s=_LONGEST_PAUSE_S)
        self._puts = ConditionalPut(store, self._retries)

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
        for attempt in range(_ATTEMPTS):
            if attempt:
                await self._retries.pause(attempt)
            try:
                await self.store.put(name, data)
                return
            except OutcomeUnknown as error:
                failure: DstlError = error
            except Unavailable as error:
                if not attempt or isinstance(failure, Unavailable):
                    failure = error
        raise failure

    async def win(self, record: Savepoint | EndMarker, name: str) -> bool:
        """Create a descriptor or marker if there is none yet; False where another writer was first.

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
        """Return the marker that has ended a savepoint; None where it has not ended.

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
        """Return everything below ``savepoints/`` whose name goes on with ``prefix``."""

        async def listed() -> list[ObjectInfo]:
            return [info async for info in self.store.list(SAVEPOINTS + prefix)]

        return await self._repeat(listed)

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; what is gone already is a success."""
        for at in range(0, len(names), _DELETE_TOGETHER):
            await self._repeat(partial(self.store.delete, names[at : at + _DELETE_TOGETHER]))

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._retries.repeat(call, self.store.location)
