"""Reads files out of the segments that hold them: small segments whole and once, large files by stretches."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from weakref import WeakValueDictionary

from dstl.changelog.segment.reader import ReadSizes, SegmentReader
from dstl.errors import CorruptData, MissingState, ObjectNotFound
from dstl.files.file_cache import FileCache, Stretch
from dstl.files.file_parts import PART, cut, key_groups_of, part_count, parts_of
from dstl.files.namespace import OBJECTS, is_of_a_query
from dstl.files.origins import Origins
from dstl.runtime import Runtime
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.retry_policy import RetryPolicy
from handles.file_record import PLAIN, FileEntry, foreign_object
from handles.segment_handle import SegmentHandle, SequenceNumberRange

_WHOLE = 6 << 20
"""Above a segment's usual size: a restart then reads each of them once, however many files it holds."""
_INDEX_BYTES = 64 << 10
"""What an open segment counts for in the cache beside its content: an index of some hundred blocks and logs."""
_ATTEMPTS = 8
"""About seven seconds of pauses: Spark fails a task whose file cannot be read, and a store's hiccup is shorter."""


class FileReader:
    """Reads committed files, and those that are stored and wait for their record. One event loop.

    Args:
        store: The directory's location.
        plain: The directory itself, for files that were adopted.
        runtime: Jitter of pauses between attempts.
        cache: Keeps what was fetched; None: one of its own.
        origins: Opens the locations whose objects a fork uses; those are closed with this. None: it is no fork.

    Attributes:
        store: The same.
        plain: The same.
    """

    def __init__(
        self,
        store: ObjectStore,
        plain: ObjectStore,
        runtime: Runtime,
        cache: FileCache | None = None,
        origins: Origins | None = None,
    ) -> None:
        self._origins = origins
        self._elsewhere: dict[str, ObjectStore] = {}
        self.store = store
        self.plain = plain
        self._retries = RetryPolicy(runtime, attempts=_ATTEMPTS)
        self._cache = FileCache() if cache is None else cache
        self._turns: WeakValueDictionary[SegmentHandle, asyncio.Lock] = WeakValueDictionary()

    async def read(self, entry: FileEntry, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or a part of them; no more of a large file is fetched than a few parts ahead.

        Args:
            entry: The file.
            offset: Where to begin; behind its end there is nothing.
            length: How many bytes, if there are; None: all that follow.

        Raises:
            CorruptData: They are not what was written.
            MissingState: The object that holds it is not there. Never ``ObjectNotFound``: Spark takes that for a
                file which nobody has written, and goes on without it.
            Unavailable: The store did not answer.
        """
        if offset >= entry.size > 0:
            return b""
        stop = entry.size if length is None else min(entry.size, offset + length)
        found: list[bytes] = []
        while not found or offset < stop:
            stretch = await self._stretch(entry, offset)
            found.append(stretch.content[offset - stretch.start : stop - stretch.start])
            offset += len(found[-1])
            if stretch.is_passing and offset == entry.size:
                self._cache.drop(self._key(entry))
        return found[0] if len(found) == 1 else b"".join(found)

    def keep(self, log_id: str, sqn: int, content: bytes) -> None:
        """Take a small file that this process writes: Spark reads it back soon."""
        self._cache.keep((log_id, sqn), Stretch(0, content), len(content))

    def forget(self, log_id: str, sqn: int) -> None:
        """Let go of a file that is deleted: nobody reads it any more."""
        self._cache.drop((log_id, sqn))

    async def close(self) -> None:
        """Forget what was fetched, and close the stores of other locations. Idempotent."""
        self._cache.drop_all_of(self)
        for store in self._elsewhere.values():
            await store.close()

    def _key(self, entry: FileEntry) -> tuple[object, ...]:
        return (entry.log_id, entry.sqn) if entry.log_id else (self, entry.segment, entry.size)

    async def _stretch(self, entry: FileEntry, offset: int) -> Stretch:
        """Return a stretch of a file that holds a place."""
        key = self._key(entry)
        found = self._cache.find(key)
        if isinstance(found, Stretch) and found.holds(offset):
            return found
        async with self._turns.setdefault(entry.segment, asyncio.Lock()):
            found = self._cache.find(key)
            if isinstance(found, Stretch) and found.holds(offset):
                return found
            first, count = _parts_from(offset, entry.size, self._cache.stretch)
            try:
                content = await self._retries.repeat(
                    lambda: self._fetch(entry, first, count), f"reading {entry.path} of {self.store.location}"
                )
            except ObjectNotFound as error:
                raise MissingState(
                    f"{self.store.location}: {entry.path} is lost, for its object {entry.segment.name} is not there; "
                    "restore the object from a replica, or go back to an older batch with dstl files rollback"
                ) from error
            stretch = Stretch(first * PART, content, entry.size > PART)
            self._cache.keep(key, stretch, len(content))
            return stretch

    async def _fetch(self, entry: FileEntry, first: int, count: int) -> bytes:
        """Return some parts of a file, checked."""
        start, stop = first * PART, min((first + count) * PART, entry.size)
        if not entry.log_id:
            return await self._fetch_plain(entry, start, stop)
        # Behind the last part there must be no other one.
        is_last = stop == entry.size
        wanted = {entry.log_id: SequenceNumberRange(entry.sqn, entry.sqn + 1)}
        batches = []
        for key_groups in key_groups_of(entry.sqn, first, count + is_last):
            async with aclosing(self._segment(entry).read(key_groups, wanted)) as changes:
                async for found in changes:
                    batches.append(found.batch)
        parts = parts_of(batches)
        paths = {path for batch in batches for path in batch.column(3).to_pylist()}
        expected = {number: min(PART, entry.size - number * PART) for number in range(first, first + count)}
        held = {number: len(parts[number].as_buffer()) for number in parts if first <= number <= first + count}
        if paths != {entry.path.encode()} or held != expected:
            raise CorruptData(
                f"{self.store.location}: {entry.segment.name} holds {start + sum(held.values())} bytes of "
                f"{sorted(paths)!r}, not the {entry.size} of {entry.path}: restore the object from a replica"
            )
        return cut(parts, start, stop)

    async def _fetch_plain(self, entry: FileEntry, start: int, stop: int) -> bytes:
        plain, name = self._place(entry)
        if name != entry.path or not is_of_a_query(name):
            raise CorruptData(f"{self.store.location}: {entry.path} is said to be {name}, which Spark has not written")
        # Behind its end there must be nothing.
        content = await plain.get(name, ByteRange(start, stop + (stop == entry.size)) if start or stop else None)
        if len(content) != stop - start:
            which = "shorter" if len(content) < stop - start else "longer"
            raise CorruptData(
                f"{plain.location}/{entry.path} is {which} than the {entry.size} bytes that it had when it was "
                "adopted: bring it back, or begin with another directory"
            )
        return content

    def _place(self, entry: FileEntry) -> tuple[ObjectStore, str]:
        """Return the store of a file's object, and its name there."""
        name = entry.segment.name
        if name.startswith(PLAIN):
            return self.plain, name.removeprefix(PLAIN)
        found = foreign_object(name)
        if found is None:
            return self.store, name
        location, inner = found
        store = self._elsewhere.get(location)
        if store is None:
            if self._origins is None:
                raise MissingState(f"{name} is an object of {location}, which is not open here")
            if bool(entry.log_id) != location.endswith(f"/{OBJECTS}"):
                raise CorruptData(f"{self.store.location}: {entry.path} is said to lie in {location}, no log of files")
            store = self._elsewhere[location] = self._origins.open(location)
        return store, inner

    def _segment(self, entry: FileEntry) -> SegmentReader:
        size = entry.segment.size
        # Of one that is more than a part, and mostly one file, no part is fetched with each of the others.
        is_whole = size <= PART or (size <= _WHOLE and entry.size <= PART)
        key = (self, entry.segment, is_whole)
        found = self._cache.find(key)
        if isinstance(found, SegmentReader):
            return found
        store, name = self._place(entry)
        sizes = ReadSizes(whole=size if is_whole else 0)
        reader = SegmentReader(store, replace(entry.segment, name=name), sizes=sizes)
        self._cache.keep(key, reader, size if is_whole else _INDEX_BYTES)
        return reader


def _parts_from(offset: int, size: int, most: int) -> tuple[int, int]:
    """Return the first part and the number of those to be fetched for a place: all, where they are not too much."""
    count, ahead = part_count(size), max(1, most // PART)
    if count <= ahead:
        return 0, count
    first = min(offset // PART, count - 1)
    return first, min(ahead, count - first)
