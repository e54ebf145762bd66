"""Reads files out of the segments that hold them: small segments whole and once, large ones by ranges."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from dstl.changelog.segment.read_plan import ReadSizes
from dstl.changelog.segment.reader import SegmentReader
from dstl.errors import CorruptData, MissingState
from dstl.files.file_log import file_bytes
from dstl.files.namespace import OBJECTS, is_of_a_query
from dstl.files.origins import Origins
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.patience import Patience
from handles.file_record import PLAIN, FileEntry, place_elsewhere
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumberRange

__all__ = ["FileReader"]

_WHOLE = 6 << 20
"""Above a segment's usual size: a restart then reads each of them once, however many files it holds."""
_CACHE = 256 << 20
_ATTEMPTS = 8
_LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class _Segment:
    reader: SegmentReader
    cost: int
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class FileReader:
    """Reads committed files; keeps what it has fetched while there is room. One event loop.

    Args:
        store: The directory's location.
        plain: The directory itself, for files that were adopted.
        runtime: Jitter of pauses between attempts.
        origins: Opens the locations whose objects a fork uses; those are closed with this. None: it is no fork.
        cache_bytes: Of segments and of files, in bytes each. More: fewer requests when partitions move; less: less
            memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        plain: ObjectStore,
        runtime: Runtime,
        cache_bytes: int = _CACHE,
        origins: Origins | None = None,
    ) -> None:
        self._origins = origins
        self._elsewhere: dict[str, ObjectStore] = {}
        self._store = store
        self._plain = plain
        self._patience = Patience(runtime, attempts=_ATTEMPTS, longest_s=_LONGEST_PAUSE_S)
        self._cache_bytes = cache_bytes
        self._segments: OrderedDict[SegmentHandle, _Segment] = OrderedDict()
        self._held = 0
        self._files: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._file_bytes = 0

    async def read(self, entry: FileEntry) -> bytes:
        """Return a file's bytes.

        Raises:
            CorruptData: They are not what was written.
            MissingState: The object is not there, or holds something else.
            Unavailable: The store did not answer.
        """
        if not entry.log_id:
            return await self._patience.repeat(lambda: self._read_plain(entry), f"reading {entry.path}")
        key = (entry.log_id, entry.sqn)
        if key in self._files:
            self._files.move_to_end(key)
            return self._files[key]
        segment = self._segment(entry)
        async with segment.turn:
            content = self._files.get(key)
            if content is None:
                content = await self._patience.repeat(
                    lambda: self._fetch(segment, entry), f"reading {entry.path} of {self._store.location}"
                )
                self._keep(key, content)
        return content

    def keep(self, files: Iterable[tuple[str, int, bytes]]) -> None:
        """Take files that this process has just written: log, number and bytes."""
        for log_id, sqn, content in files:
            self._keep((log_id, sqn), content)

    async def close(self) -> None:
        """Close the stores of other locations. Idempotent."""
        for store in self._elsewhere.values():
            await store.close()

    async def _read_plain(self, entry: FileEntry) -> bytes:
        plain, name = self._place(entry)
        if name != entry.path or not is_of_a_query(name):
            raise CorruptData(f"{self._store.location}: {entry.path} is said to be {name}, which Spark has not written")
        content = await plain.get(name)
        if len(content) != entry.size:
            raise CorruptData(
                f"{plain.location}/{entry.path} has {len(content)} bytes, and had {entry.size} when it was "
                "adopted: bring it back, or begin with another directory"
            )
        return content

    async def _fetch(self, segment: _Segment, entry: FileEntry) -> bytes:
        batches = []
        wanted = {entry.log_id: SequenceNumberRange(entry.sqn, entry.sqn + 1)}
        async with aclosing(segment.reader.read(logs=wanted)) as changes:
            async for _, _, _, batch in changes:
                batches.append(batch)
        content = file_bytes(batches)
        paths = {path for batch in batches for path in batch.column(3).to_pylist()}
        if paths != {entry.path.encode()} or len(content) != entry.size:
            raise CorruptData(
                f"{self._store.location}: {entry.segment.name} holds {len(content)} bytes of {sorted(paths)!r}, not "
                f"the {entry.size} of {entry.path}: restore the object from a replica"
            )
        return content

    def _place(self, entry: FileEntry) -> tuple[ObjectStore, str]:
        """Return the store of a file's object, and its name there."""
        name = entry.segment.name
        if name.startswith(PLAIN):
            return self._plain, name.removeprefix(PLAIN)
        found = place_elsewhere(name)
        if found is None:
            return self._store, name
        location, inner = found
        store = self._elsewhere.get(location)
        if store is None:
            if self._origins is None:
                raise MissingState(f"{name} is an object of {location}, which is not open here")
            if bool(entry.log_id) != location.endswith(f"/{OBJECTS}"):
                raise CorruptData(f"{self._store.location}: {entry.path} is said to lie in {location}, no log of files")
            store = self._elsewhere[location] = self._origins.open(location)
        return store, inner

    def _segment(self, entry: FileEntry) -> _Segment:
        handle = entry.segment
        known = self._segments.get(handle)
        if known is None:
            store, name = self._place(entry)
            reader = SegmentReader(store, replace(handle, name=name), sizes=ReadSizes(whole=_WHOLE))
            known = self._segments[handle] = _Segment(reader, handle.size if handle.size <= _WHOLE else 1 << 16)
            self._held += known.cost
        self._segments.move_to_end(handle)
        while self._held > self._cache_bytes and len(self._segments) > 1:
            _, oldest = self._segments.popitem(last=False)
            self._held -= oldest.cost
        return known

    def _keep(self, key: tuple[str, int], content: bytes) -> None:
        self._files[key] = content
        self._file_bytes += len(content)
        while self._file_bytes > self._cache_bytes:
            _, oldest = self._files.popitem(last=False)
            self._file_bytes -= len(oldest)
