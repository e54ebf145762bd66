"""The cache of base objects in a directory of the host, for restarts there.

It is never needed: whatever goes wrong with it counts as not found. It may be used by several processes at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import google_crc32c

from dstl.errors import Closed, CorruptData
from dstl.metrics import NullRecorder, Recorder
from dstl.options import MaterializationOptions
from dstl.private_file import make_private_directory
from dstl.runtime import Runtime, call_in_thread
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.retry_policy import read_range
from handles.materialized_handle import MaterializedStateHandle
from materializer.local_disk import access

_log = logging.getLogger(__name__)
_PIECE = 4 << 20  # of a file's checksum: what it takes from memory at a time
_OWN_DIRECTORY = "dstl-bases"
_UNFINISHED = ".part"
_OWN_NAME = re.compile(rf"[0-9a-f]{{40}}(-[0-9a-f]{{12}}\{_UNFINISHED})?")
"""Nothing else is ever deleted here."""
_UNFINISHED_S = 3600.0  # no object takes an hour to come


class CachedObject:
    """An object that was found whole and undamaged; the caller closes it.

    Attributes:
        path: Its file, which may be deleted at any moment, and never changes.
        size: Its length.
    """

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes ``[start, stop)``: of the file as it was checked, also when it has been deleted meanwhile.

        Raises:
            OSError: The disk does not give them.
        """
        access("read", self.path)
        return os.pread(self._descriptor, (self.size if stop is None else stop) - start, start)

    def link(self, path: Path) -> bool:
        """Make the object's file appear under another name too; False where that cannot be done."""
        try:
            access("write", path)
            os.link(self.path, path)
            access("read", path)
            linked = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.path.sameopenfile(self._descriptor, linked):
                    return True
            finally:
                os.close(linked)
        except OSError:
            pass
        # Replaced meanwhile, so not the file that was checked; or it cannot be told.
        with suppress(OSError):
            path.unlink()
        return False

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class BaseCache:
    """Files by object name. Every call reads or writes the disk: make it from a thread; any may.

    Invariants:
        1. What it returns has the length and the CRC-32C that were asked for; what has not is deleted.
        2. Files appear whole (written aside, then renamed) and never change.
        3. After each new file the least recently used ones go until ``max_bytes`` hold; files that were not used for
           ``max_age_s`` go too. Processes that add at the same moment may exceed it by a file each. Files that have
           no name of the cache's stay, and do not count.
        4. Only this user can read or replace a file: the directory is the user's own, mode 0700.

    Args:
        directory: Made if it is missing.
        location: Of the object store: one directory may serve several.
        max_bytes: Bytes to keep.
        max_age_s: Seconds since the last use.
        recorder: ``baseCacheHits``, ``baseCacheMisses``, ``baseCacheDamaged``.
    """

    def __init__(
        self,
        directory: Path,
        location: str,
        *,
        max_bytes: int,
        max_age_s: float,
        recorder: Recorder = NullRecorder(),
    ) -> None:
        self._directory = directory
        self._location = location
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._recorder = recorder
        self._usable: bool | None = None
        self._lock = threading.Lock()

    @staticmethod
    def of(options: MaterializationOptions, location: str, recorder: Recorder = NullRecorder()) -> BaseCache | None:
        """Return the cache of a location, None where there is none: see ``MaterializationOptions.cache_bytes``."""
        if not options.cache_bytes or (options.cache_directory is None and not location.startswith("s3")):
            return None
        default = Path(tempfile.gettempdir()) / f"dstl-cache-{os.geteuid()}"
        return BaseCache(
            Path(options.cache_directory) / _OWN_DIRECTORY if options.cache_directory else default,
            location,
            max_bytes=options.cache_bytes,
            max_age_s=options.cache_max_age_s,
            recorder=recorder,
        )

    def open(self, name: str, size: int, checksum: int) -> CachedObject | None:
        """Return an object if it is here and is what it should be; it counts as used then."""
        path = self._path(name)
        found = None
        try:
            access("read", path)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW) if self._ready() else -1
        except OSError:
            descriptor = -1
        if descriptor >= 0:
            found = CachedObject(path, descriptor, size)
            try:
                if os.fstat(descriptor).st_size != size or _checksum(found) != checksum:
                    raise ValueError("another length or checksum")
                access("write", path)
                os.utime(descriptor)
            except (OSError, ValueError) as error:
                _log.warning("deleting a damaged file of the base cache, %s (%s)", path, error)
                self._recorder.increment("baseCacheDamaged")
                found.close()
                found = None
                with suppress(OSError):
                    path.unlink()
        self._recorder.increment("baseCacheMisses" if found is None else "baseCacheHits")
        return found

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Keep an object that was stored, or read and found to be what it should be."""
        with self._new_file(name, len(data)) as path:
            if path is not None:
                access("write", path)
                path.write_bytes(data)

    def link(self, name: str, size: int, source: Path) -> None:
        """Keep an object that lies in a file that will not change; where no hard link can be made, do not."""
        with self._new_file(name, size) as path:
            if path is not None:
                access("write", path)
                os.link(source, path)

    def fill(self, name: str, size: int, checksum: int) -> CacheFill | None:
        """Return what takes an object piece by piece; None where the object would not be kept."""
        try:
            return CacheFill(self, name, size, checksum) if self._takes(name, size) else None
        except OSError as error:
            _log.info("the base cache does not take %s: %s", name, error.strerror)
            return None

    def aside(self, name: str) -> Path:
        """Return where an object may be written until it is whole; what is forgotten there goes after an hour."""
        return self._directory / f"{self._path(name).name}-{os.urandom(6).hex()}{_UNFINISHED}"

    @contextmanager
    def _new_file(self, name: str, size: int) -> Iterator[Path | None]:
        """Give a place to write to; what lies there at the end is kept. Yields None where nothing is to be kept."""
        aside = self.aside(name)
        try:
            if not self._takes(name, size):
                yield None
                return
            yield aside
            access("write", aside)
            os.utime(aside)
            aside.replace(self._path(name))
            self._trim()
        except OSError as error:
            _log.info("the base cache does not take %s: %s", name, error.strerror)
        finally:
            with suppress(OSError):
                aside.unlink()

    def _takes(self, name: str, size: int) -> bool:
        """Return whether an object is to be kept that is not here yet."""
        if size > self._max_bytes or not self._ready():
            return False
        try:
            access("read", self._path(name))
            return not self._path(name).exists()
        except OSError:
            return False

    def _trim(self) -> None:
        # The file system's own clock, for it is compared with the times of files.
        access("write", self._directory)
        os.utime(self._directory)
        now = self._directory.stat().st_mtime
        kept: list[tuple[float, int, str]] = []
        total = 0
        for entry in os.scandir(self._directory):
            if not _OWN_NAME.fullmatch(entry.name):
                continue
            with suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                idle = now - info.st_mtime
                if idle > (_UNFINISHED_S if entry.name.endswith(_UNFINISHED) else self._max_age_s):
                    os.unlink(entry.path)
                else:
                    kept.append((info.st_mtime, info.st_size, entry.path))
                    total += info.st_size
        kept.sort()
        for _, size, path in kept:
            if total <= self._max_bytes:
                return
            with suppress(OSError):
                os.unlink(path)
            total -= size

    def _path(self, name: str) -> Path:
        digest = hashlib.blake2b(f"{self._location}\0{name}".encode(), digest_size=20)
        return self._directory / digest.hexdigest()

    def _ready(self) -> bool:
        with self._lock:
            if self._usable is None:
                self._usable = self._prepare()
            return self._usable

    def _prepare(self) -> bool:
        try:
            make_private_directory(self._directory)
            self._trim()
        except OSError as error:
            _log.warning("no base cache in %s: %s", self._directory, error.strerror)
            return False
        return True


class CacheFill:
    """Takes an object piece by piece, in any order, and keeps it once it is whole. Any thread.

    Args:
        cache: Where it goes.
        name: The object.
        size: Its length.
        checksum: Its CRC-32C.
    """

    def __init__(self, cache: BaseCache, name: str, size: int, checksum: int) -> None:
        self._cache = cache
        self._name = name
        self._size = size
        self._checksum = checksum
        self._missing = size
        self._lock = threading.Lock()
        self._aside = cache.aside(name)
        access("write", self._aside)
        self._file = self._aside.open("w+b")

    def add(self, start: int, data: bytes) -> None:
        """Take a piece; each byte comes once."""
        with self._lock:
            if self._file.closed:
                return
            try:
                access("write", self._aside)
                os.pwrite(self._file.fileno(), data, start)
                self._missing -= len(data)
                if self._missing == 0:
                    whole = CachedObject(Path(), self._file.fileno(), self._size)
                    if _checksum(whole) == self._checksum:
                        self._cache.link(self._name, self._size, self._aside)
                    self._give_up()
            except OSError as error:
                _log.info("the base cache does not take %s: %s", self._name, error.strerror)
                self._give_up()

    def close(self) -> None:
        """Give up what is not whole. Idempotent."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._aside.unlink()


class BaseSource:
    """The store, with the host's cache before it where there is one.

    Args:
        store: Where the files are.
        runtime: Clock and jitter for repeated reads.
        cache: Looked at first, and filled with files that come whole.
        fills: Each byte of a file comes once at most, so that the cache can be filled.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, cache: BaseCache | None, *, fills: bool = True) -> None:
        self._fills = fills
        self.runtime = runtime
        self._store = store
        self._cache = cache
        self._opened: dict[str, asyncio.Task[CachedObject | CacheFill | None]] = {}
        self._is_closed = False

    async def get(self, base: MaterializedStateHandle, start: int, stop: int) -> bytes:
        """Return bytes ``[start, stop)`` of the object of a base; those of the cache are of a file checked whole.

        Raises:
            Closed: This was closed: a file opened now would stay open.
            CorruptData: The object ends before.
            Unavailable: The store does not answer.
        """
        if self._is_closed:
            raise Closed("the restore has ended")
        found = await self._open(self._cache, base) if self._cache is not None else None
        if isinstance(found, CachedObject):
            cached = await call_in_thread(_read_cached, found, start, stop)
            if cached is not None:
                return cached
        data = await read_range(self._store, base.name, ByteRange(start, stop))
        if len(data) != stop - start:
            raise CorruptData(f"base file {base.name} ends at byte {start + len(data)}, before {stop}")
        if isinstance(found, CacheFill):
            await call_in_thread(found.add, start, data)
        return data

    async def close(self) -> None:
        """Let go of the cache's files. Idempotent; what is being read comes to its end."""
        self._is_closed = True
        tasks, self._opened = list(self._opened.values()), {}
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, CachedObject | CacheFill):
                await call_in_thread(found.close)

    async def _open(self, cache: BaseCache, base: MaterializedStateHandle) -> CachedObject | CacheFill | None:
        if base.name not in self._opened:
            work = call_in_thread(_cached_or_fill, cache, base, self._fills)
            self._opened[base.name] = asyncio.ensure_future(work)
        return await asyncio.shield(self._opened[base.name])


def _cached_or_fill(cache: BaseCache, base: MaterializedStateHandle, fills: bool) -> CachedObject | CacheFill | None:
    what = (base.name, base.size, base.checksum)
    return cache.open(*what) or (cache.fill(*what) if fills else None)


def _read_cached(found: CachedObject, start: int, stop: int) -> bytes | None:
    """Return bytes of a file of the cache; None where the disk does not give them."""
    try:
        data = found.read(start, stop)
    except OSError as error:
        _log.warning("cannot read the base cache any more, %s (%s)", found.path, error.strerror)
        return None
    return data if len(data) == stop - start else None


def _checksum(found: CachedObject) -> int:
    value = 0
    for at in range(0, found.size, _PIECE):
        value = google_crc32c.extend(value, found.read(at, min(found.size, at + _PIECE)))
    return value
