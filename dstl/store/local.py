"""Objects as files of a local directory: atomic, durable, and safe against links that lead outside it."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice

from dstl.crash_points import reach
from dstl.errors import (
    AccessDenied,
    Closed,
    DstlError,
    Invalid,
    ObjectExists,
    ObjectNotFound,
    OutcomeUnknown,
    Unavailable,
)
from dstl.store.base import ByteRange, ObjectInfo, check_name

# An element of a name never begins with a dot, so no object can be in here and no list shows it.
_TEMPORARY = ".dstl-tmp"
_ABANDONED_AFTER_S = 24 * 3600.0  # no PUT takes a day
_LIST_CHUNK = 1000  # as many as S3 lists at once

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO there would wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LocalStore:
    """An object store in a directory of a POSIX file system with hard links.

    Invariants:
        1. An object appears whole: it is written to a reserved directory, synced, and then linked (``if_absent``: the
           kernel lets exactly one link win) or renamed to its name.
        2. When ``put`` returns, file *and* directory entries are synced, up to the location itself (RocksDB #10573:
           without that a power cut takes the file back). ``delete`` syncs too, so that deletions reach the disk in the
           order in which they were asked for.
        3. Symbolic links below the location are never followed. Directories are 0700, files 0600.
        4. One name is never a directory of another: ``a`` and ``a/b`` exclude each other here, unlike in S3.

    Every call runs in a thread of the loop's executor. A small put would be faster inline (0.41 against 0.57 ms where
    an fsync costs 0.2 ms), but an fsync on a busy disk takes as long as it likes, and the loop's timers, which decide
    on hedges and heartbeats, would stand still. So a cancelled put goes on in its thread.

    The store holds no file open between calls: it may be used after a fork, in a new loop.

    Attributes:
        location: The directory as the user wrote it.

    Args:
        directory: Made by the first put (0700) if it is not there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.location = os.fspath(directory)
        self._root = os.path.abspath(os.path.expanduser(self.location))
        self._closed = False
        self._swept = False
        # Directories whose entry in their parent is known to be on disk. Only ever grows by what was synced here;
        # directories are never removed, so it stays true (a put that finds one gone forgets them all).
        self._durable: set[str] = set()

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Store an object; see :meth:`ObjectStore.put <dstl.store.base.ObjectStore.put>`.

        Raises:
            Unavailable: No space left, or another fault of the file system before the object had its name.
            OutcomeUnknown: The object has its name, but the directory could not be synced.
        """
        self._check(name)
        return await asyncio.to_thread(self._put, name, data, if_absent)

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        """Return an object's bytes, or a range of them."""
        self._check(name)
        return await asyncio.to_thread(self._get, name, byte_range)

    async def head(self, name: str) -> ObjectInfo:
        """Return size and age of an object."""
        self._check(name)
        return await asyncio.to_thread(self._head, name)

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        """Yield objects; files whose names are not of our grammar, and links, are passed over."""
        self._check()
        found = self._walk("", prefix)
        while chunk := await asyncio.to_thread(lambda: list(islice(found, _LIST_CHUNK))):
            for info in chunk:
                yield info

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; a name that is already gone is a success."""
        for name in names:
            check_name(name)
        self._check()
        if names:
            await asyncio.to_thread(self._delete, names)

    async def close(self) -> None:
        """Refuse further calls. Idempotent."""
        self._closed = True

    def _check(self, name: str | None = None) -> None:
        if self._closed:
            raise Closed(f"the store {self.location} was closed: open a new one")
        if name is not None:
            check_name(name)

    def _put(self, name: str, data: bytes | memoryview, if_absent: bool) -> ObjectInfo:
        folder, _, leaf = name.rpartition("/")
        with self._writing(f"write {name}"), self._folder(_TEMPORARY, make=True) as temporary_fd:
            self._sweep(temporary_fd)
            temporary = self._write(data)
            try:
                with self._folder(folder, make=True) as folder_fd:
                    source = f"{_TEMPORARY}/{temporary}"
                    with self._folder("") as root_fd:
                        self._name_it(source, root_fd, leaf, folder_fd, if_absent, name)
                    info = os.stat(leaf, dir_fd=folder_fd, follow_symlinks=False)
                    try:
                        os.fsync(folder_fd)
                    except OSError as error:
                        raise OutcomeUnknown(f"{self.location}: {name} may not survive a power cut: {error}") from error
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=temporary_fd)
        return ObjectInfo(name, info.st_size, info.st_mtime)

    def _write(self, data: bytes | memoryview) -> str:
        descriptor, path = tempfile.mkstemp(dir=os.path.join(self._root, _TEMPORARY), prefix="put-")
        try:
            rest = memoryview(data).cast("B")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        return os.path.basename(path)

    def _name_it(self, source: str, root_fd: int, leaf: str, folder_fd: int, if_absent: bool, name: str) -> None:
        try:
            if if_absent:
                os.link(source, leaf, src_dir_fd=root_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
            else:
                os.replace(source, leaf, src_dir_fd=root_fd, dst_dir_fd=folder_fd)
        except FileExistsError as error:
            if stat.S_ISDIR(os.stat(leaf, dir_fd=folder_fd, follow_symlinks=False).st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory", name) from error
            raise ObjectExists(f"{self.location}/{name} exists already") from error
        except OSError as error:
            if if_absent and error.errno in (errno.EPERM, errno.ENOTSUP):
                raise Invalid(
                    f"{self.location}: this file system has no hard links, which put-if-absent needs; "
                    f"choose a directory on another one"
                ) from error
            raise

    def _sweep(self, temporary_fd: int) -> None:
        """Remove what writers that died left behind, once per store, by the file system's own clock."""
        if self._swept:
            return
        self._swept = True
        os.utime(temporary_fd)
        newest = os.fstat(temporary_fd).st_mtime
        for leftover in os.listdir(temporary_fd):
            with suppress(OSError):
                if os.stat(leftover, dir_fd=temporary_fd).st_mtime < newest - _ABANDONED_AFTER_S:
                    os.unlink(leftover, dir_fd=temporary_fd)

    def _get(self, name: str, byte_range: ByteRange | None) -> bytes:
        folder, _, leaf = name.rpartition("/")
        with self._reading(f"read {name}"), self._folder(folder) as folder_fd:
            descriptor = os.open(leaf, _FILE, dir_fd=folder_fd)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
                at = byte_range.start if byte_range else 0
                stop = min(byte_range.stop, status.st_size) if byte_range else status.st_size
                pieces = []
                while at < stop and (piece := os.pread(descriptor, stop - at, at)):
                    pieces.append(piece)
                    at += len(piece)
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            finally:
                os.close(descriptor)

    def _head(self, name: str) -> ObjectInfo:
        folder, _, leaf = name.rpartition("/")
        with self._reading(f"look at {name}"), self._folder(folder) as folder_fd:
            status = os.stat(leaf, dir_fd=folder_fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
            return ObjectInfo(name, status.st_size, status.st_mtime)

    def _delete(self, names: Sequence[str]) -> None:
        failed: DstlError | None = None
        by_folder: dict[str, list[str]] = {}
        for name in names:
            folder, _, leaf = name.rpartition("/")
            by_folder.setdefault(folder, []).append(leaf)
        for folder, leaves in by_folder.items():
            try:
                with self._reading(f"delete in {folder or '.'}"), self._folder(folder) as folder_fd:
                    for leaf in leaves:
                        with suppress(FileNotFoundError, IsADirectoryError):
                            os.unlink(leaf, dir_fd=folder_fd)
                        reach("C9")
                    os.fsync(folder_fd)
            except ObjectNotFound:
                continue
            except DstlError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with self._reading(f"list {folder or '.'}"), self._folder(folder) as folder_fd:
                entries = _entries(folder_fd)
        except ObjectNotFound:
            return
        base = f"{folder}/" if folder else ""
        for key, status in sorted(entries.items()):
            path = base + key
            if key.endswith("/"):
                if prefix.startswith(path) or path.startswith(prefix):
                    yield from self._walk(path[:-1], prefix)
            elif path.startswith(prefix):
                yield ObjectInfo(path, status.st_size, status.st_mtime)

    @contextmanager
    def _folder(self, folder: str, make: bool = False) -> Iterator[int]:
        """Open a directory below the location, one element after the other, so that no link is followed."""
        if make and "" not in self._durable:
            _make_durable(self._root)
            self._durable.add("")
        try:
            descriptor = os.open(self._root, _DIRECTORY)
        except NotADirectoryError as error:
            raise Invalid(f"{self.location} is not a directory; choose another location") from error
        try:
            path = ""
            for element in folder.split("/") if folder else ():
                path += f"/{element}"
                unsure = make and path not in self._durable
                if unsure:
                    with suppress(FileExistsError):
                        os.mkdir(element, 0o700, dir_fd=descriptor)
                    # Also where another process made it: that one may not have come to its sync yet.
                    os.fsync(descriptor)
                below = os.open(element, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = below
                if unsure:
                    self._durable.add(path)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # A file or a link where a directory should be: whatever the name means, it is no object.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise ObjectNotFound(f"{self.location}: cannot {doing}: no such object") from error
            raise _to_typed(error, self.location, doing) from error

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._durable.clear()
            raise _to_typed(error, self.location, doing) from error


def _to_typed(error: OSError, location: str, doing: str) -> DstlError:
    reason = f"{location}: cannot {doing}: {error.strerror}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return Unavailable(f"{reason}; free some space, nothing was stored")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return AccessDenied(f"{reason}; let this process's user read and write that directory")
        case errno.ENOTDIR | errno.EISDIR | errno.ELOOP:
            return Invalid(f"{reason}; a file, a directory or a link stands where another kind is needed")
        case errno.EXDEV | errno.ENAMETOOLONG | errno.ENOSYS | errno.EOPNOTSUPP:
            return Invalid(f"{reason}; choose another directory")
    return Unavailable(reason)


def _entries(folder_fd: int) -> dict[str, os.stat_result]:
    """Return the objects and directories (with a slash behind their names) of one directory."""
    entries = {}
    with os.scandir(folder_fd) as scan:
        for entry in scan:
            with suppress(Invalid, FileNotFoundError):
                check_name(entry.name)
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    entries[f"{entry.name}/"] = status
                elif stat.S_ISREG(status.st_mode):
                    entries[entry.name] = status
    return entries


def _make_durable(directory: str) -> None:
    """Make a directory with its parents, and sync every entry on the way that is new."""
    parent = os.path.dirname(directory)
    if os.path.isdir(directory) or parent == directory:
        return
    _make_durable(parent)
    try:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
    except FileNotFoundError as error:
        # Though its parent is there: a file system of the kernel's own, say.
        raise Invalid(f"no directory {directory} can be made; choose another location") from error
    descriptor = os.open(parent, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
