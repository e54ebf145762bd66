"""Bases of tables that are stored as the files that they lie in: written file by file, fetched back as a directory.

A RocksDB snapshot is many large files that never change, which are objects of their own and shared by several bases,
and a few small ones (``CURRENT``, ``MANIFEST-*``, options), which are in the index. All integers are little-endian::

    index   = "DSTLTIDX" | format version u16 | flags u16 = 0 | stored size u32 | raw size u32 | stored bytes | crc u32
    stored bytes = one zstd frame that states its content size, of
    raw     = description length u32 | description | contents of the small files, back to back

The description is JSON: ``files``, the large ones as ``[id, size, checksum]``; ``contents``, the small ones as ``[name,
length]``; ``row_bytes``, the mean bytes of an entry. The crc is the CRC-32C of all bytes before it.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
import struct
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import zstandard
from pydantic_core import from_json

from dstl.changelog.upload.uploader import StoredObject
from dstl.errors import CorruptData, Invalid, MissingState, Unavailable
from dstl.runtime import Runtime, all_of, call_in_thread
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.retry_policy import RetryPolicy, read_range
from dstl.store.sealed import is_sealed
from dstl.store.zstd_frame import decompress
from handles.materialized_handle import MaterializedStateHandle, TableFile
from materializer.bases.base_cache import BaseCache
from materializer.bases.file_reader import TableFileReader
from materializer.bases.operator_bases import MaterializationPlan
from materializer.local_disk import ScratchDirectory, access
from materializer.tables import RocksDBTableSnapshot, SnapshotFile

_MAGIC = b"DSTLTIDX"
FORMAT_VERSION = 1  # nothing has changed since the first
_HEADER = struct.Struct("<8sHHII")
_U32 = struct.Struct("<I")
_MAX_RAW = 256 << 20  # above every list of files; a forged size must not be believed
_SMALL_FILE = re.compile(r"CURRENT|IDENTITY|MANIFEST-[0-9]+|OPTIONS-[0-9]+|rocksdict-config\.json")


@dataclass(frozen=True, slots=True)
class TableIndex:
    """The contents of an index.

    Attributes:
        contents: The small files by name.
        files: Id, length and CRC-32C of each large file.
        row_bytes: Mean bytes of keys and value of an entry; 0 where it is not known.
    """

    contents: Mapping[str, bytes]
    files: tuple[tuple[str, int, int], ...]
    row_bytes: int = 0


def encode_index(index: TableIndex) -> bytes:
    """Return an index's bytes.

    Raises:
        Invalid: A file has a name that no reader would take.
    """
    for name in index.contents:
        if not _SMALL_FILE.fullmatch(name):
            raise Invalid(f"a table has a file {name!r}, which this version cannot store: materialize by key groups")
    description = {
        "files": index.files,
        "contents": [[name, len(data)] for name, data in index.contents.items()],
        "row_bytes": index.row_bytes,
    }
    text = json.dumps(description, separators=(",", ":")).encode()
    raw = b"".join((_U32.pack(len(text)), text, *index.contents.values()))
    stored = zstandard.ZstdCompressor(level=1).compress(raw)
    front = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(stored), len(raw)) + stored
    return front + _U32.pack(google_crc32c.value(front))


def decode_index(data: bytes, files: Iterable[TableFile], name: str) -> TableIndex:
    """Check an index whole and read it.

    Args:
        data: The object.
        files: The large files as the base's handle names them.
        name: Object name, for messages.

    Raises:
        CorruptData: Any byte is not what was written, or it is another base's index.
        Invalid: A newer version wrote it.
    """

    def damaged(why: str) -> CorruptData:
        return CorruptData(f"table index {name} is damaged ({why}): restore from an older base")

    if len(data) < _HEADER.size + _U32.size:
        raise damaged(f"{len(data)} bytes")
    magic, version, flags, stored_size, raw_size = _HEADER.unpack_from(data)
    end = len(data) - _U32.size
    if magic != _MAGIC or google_crc32c.value(data[:end]) != _U32.unpack_from(data, end)[0]:
        raise damaged("checksum or magic is wrong")
    if version != FORMAT_VERSION or flags:
        raise Invalid(f"table index {name} is of format {version}.{flags}, newer than {FORMAT_VERSION}: upgrade DSTL")
    stored = data[_HEADER.size : end]
    try:
        if len(stored) != stored_size:
            raise damaged("sizes do not agree")
        raw = decompress(stored, raw_size, max_size=_MAX_RAW)
        at = _U32.size + _U32.unpack_from(raw)[0]
        description = from_json(raw[_U32.size : at], allow_inf_nan=False)
        contents = {}
        for file_name, length in description["contents"]:
            if not _SMALL_FILE.fullmatch(file_name):
                raise damaged(f"a file named {file_name!r}")
            contents[file_name] = raw[at : at + length]
            at += length
        index = TableIndex(
            contents, tuple((str(f), int(s), int(c)) for f, s, c in description["files"]), int(description["row_bytes"])
        )
    except (struct.error, ValueError, TypeError, KeyError) as error:
        raise damaged(str(error)) from None
    if at != len(raw):
        raise damaged("lengths do not add up")
    if sorted(index.files) != sorted((file.id, file.size, file.checksum) for file in files):
        raise damaged("it is the index of other files than its handle names")
    return index


_TOGETHER = 3
"""Files under way at once."""

_PIECE = 16 << 20
"""A file is fetched in pieces, for one that several runs were merged into may be large."""

StoreObject = Callable[[bytes | memoryview, int], Awaitable[StoredObject]]
"""Stores bytes with their CRC-32C."""


class UnusableObject(CorruptData):
    """One object of a base is damaged or missing.

    Attributes:
        name: Its name.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


async def write_table_files(
    operator: str,
    plan: MaterializationPlan,
    snapshot: RocksDBTableSnapshot,
    stored: Mapping[str, TableFile],
    store: StoreObject,
    cache: BaseCache | None = None,
) -> MaterializedStateHandle | None:
    """Store those files of a snapshot that are not stored yet, then the index.

    None, and nothing stored, where there is no file: a handle without any is one of key groups, and so must be that of
    a table that is empty.

    Args:
        operator: The operator's uid.
        plan: All of its key groups are in the snapshot.
        snapshot: The moment to store.
        stored: By id, files that the base may name again.
        store: Stores one object.
        cache: Keeps the files for a restart on this host.

    Raises:
        DstlError: The store did not take a file, or the snapshot cannot be read.
    """
    found = await call_in_thread(snapshot.files)
    if not any(file.id for file in found):
        return None
    turn = asyncio.Semaphore(2)

    async def name_file(file: SnapshotFile) -> TableFile:
        again = stored.get(file.id)
        if again is not None and (again.size, again.checksum) == (file.size, file.checksum):
            return again
        async with turn:
            data = await call_in_thread(_map_file, snapshot.path / file.name)
            stored_as = await store(data, file.checksum)
            if cache is not None:
                await call_in_thread(cache.link, stored_as.name, stored_as.size, snapshot.path / file.name)
            return TableFile(file.id, stored_as.name, stored_as.size, stored_as.checksum)

    files = tuple(await all_of(name_file(file) for file in found if file.id))
    small = {file.name: await call_in_thread(_read, snapshot.path / file.name) for file in found if not file.id}
    index = encode_index(TableIndex(small, tuple((f.id, f.size, f.checksum) for f in files), snapshot.row_bytes))
    written = await store(index, google_crc32c.value(index))
    total = written.size + sum(file.size for file in files)
    groups = plan.key_groups
    cuts = [total * at // len(groups) for at in range(len(groups) + 1)]
    return MaterializedStateHandle(
        operator=operator,
        materialization_id=plan.materialization_id,
        checkpoint=plan.checkpoint,
        name=written.name,
        size=written.size,
        checksum=written.checksum,
        parts=tuple((group, cuts[at], cuts[at + 1] - cuts[at]) for at, group in enumerate(groups)),
        files=files,
    )


@dataclass(frozen=True, slots=True)
class FetchedFiles:
    """A base's files on this host.

    Attributes:
        path: Directory of all files of the table.
        known: What the table should know of the unchanging ones.
        row_bytes: Mean bytes of an entry.
    """

    path: Path
    known: tuple[SnapshotFile, ...]
    row_bytes: int


class FileBases:
    """Fetches bases that are files, each once for as long as this is open; an async context manager. One event loop.

    A child process reads each of them whole before anybody else opens it: see :class:`TableFileReader`. Where the store
    is sealed this is left out, for a holder of the key has made the files.

    Args:
        store: Where the objects are.
        runtime: Clock and jitter for repeated reads.
        cache: Objects that are on this host already; what is fetched is added.

    Attributes:
        store: Where the objects are.
        runtime: Clock and jitter for repeated reads.
        cache: Objects that are on this host already, if any are kept.
        passes: How many times :meth:`fetch` tells of each byte: when it has come, and when it was read.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, cache: BaseCache | None = None) -> None:
        self.cache = cache
        self.passes = 1 if is_sealed(store) else 2
        self.store = store
        self.runtime = runtime
        self._directory: ScratchDirectory | None = None
        self._making = threading.Lock()
        self._fetched: dict[str, FetchedFiles] = {}

    async def fetch(self, base: MaterializedStateHandle, progress: Callable[[int], None]) -> FetchedFiles:
        """Return a base's files; every byte has been checked.

        Args:
            base: The base.
            progress: Told of bytes that have come, and of those that the child has read.

        Raises:
            UnusableObject: An object is damaged or missing, or the child has died of them.
            Unavailable: The store did not answer several times in a row, or the disk cannot be written.
            Invalid: A newer version wrote it.
        """
        found = self._fetched.get(base.name)
        if found is None:
            found = self._fetched[base.name] = await self._fetch(base, progress)
        return found

    async def __aenter__(self) -> FileBases:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Delete all files. Idempotent."""
        self._fetched.clear()
        directory, self._directory = self._directory, None
        if directory is not None:
            await call_in_thread(directory.close)

    async def _fetch(self, base: MaterializedStateHandle, progress: Callable[[int], None]) -> FetchedFiles:
        path = await call_in_thread(self._new_directory)
        data = await self._get(base.name, None, base.size, base.checksum)
        try:
            index = decode_index(data, base.files, base.name)
        except CorruptData as error:
            raise UnusableObject(base.name, str(error)) from error
        progress(len(data))
        turn = asyncio.Semaphore(_TOGETHER)

        async def fetch(file: TableFile) -> None:
            async with turn:
                await self._to_disk(file, path / file.file_name)
            progress(file.size)

        for name, content in index.contents.items():
            await call_in_thread(_append, path / name, 0, content, 0)
        await all_of(map(fetch, base.files))
        if self.passes > 1:
            await self._check(path, base, progress)
        known = tuple(SnapshotFile(file.file_name, file.size, file.checksum, file.id) for file in base.files)
        return FetchedFiles(path, known, index.row_bytes)

    async def _check(self, path: Path, base: MaterializedStateHandle, progress: Callable[[int], None]) -> None:
        with closing(TableFileReader(path, base.name)) as reader:
            shares = reader.check()
            try:
                while share := await call_in_thread(next, shares, 0.0):
                    progress(int(share * base.total_size))
            except CorruptData as error:
                raise UnusableObject(base.name, str(error)) from error

    async def _to_disk(self, file: TableFile, path: Path) -> None:
        if self.cache is not None and await call_in_thread(_from_cache, self.cache, file, path):
            return
        for last in (False, True):
            checksum = 0
            for at in range(0, max(1, file.size), _PIECE):
                stop = min(file.size, at + _PIECE)
                data = await self._get(file.name, ByteRange(at, stop), stop - at)
                checksum = await call_in_thread(_append, path, at, data, checksum)
            if checksum == file.checksum:
                break
            # Once more: it may have happened on the way.
            if last:
                raise UnusableObject(file.name, f"{file.name} has another CRC-32C than its handle names")
        if self.cache is not None:
            await call_in_thread(self.cache.link, file.name, file.size, path)

    async def _get(self, name: str, part: ByteRange | None, size: int, checksum: int | None = None) -> bytes:
        async def read() -> bytes:
            data = await read_range(self.store, name, part)
            is_other = checksum is not None and await call_in_thread(google_crc32c.value, data) != checksum
            if len(data) != size or is_other:
                found = f"{len(data)} bytes" + " of another checksum" * is_other
                at = part.start if part else 0
                raise CorruptData(f"{name} is not what its handle names: {size} bytes at {at}, and there are {found}")
            return data

        try:
            return await RetryPolicy(self.runtime).read(read)
        except (CorruptData, MissingState) as error:
            raise UnusableObject(name, str(error)) from error

    def _new_directory(self) -> Path:
        try:
            access("write", Path(tempfile.gettempdir()))
            with self._making:  # several operators are loaded side by side
                if self._directory is None:
                    self._directory = ScratchDirectory("dstl-base-")
            return Path(tempfile.mkdtemp(dir=self._directory.path))
        except OSError as error:
            raise Unavailable(f"cannot make a directory for base files: {error.strerror}; check TMPDIR") from error


def _from_cache(cache: BaseCache, file: TableFile, path: Path) -> bool:
    found = cache.open(file.name, file.size, file.checksum)
    if found is None:
        return False
    try:
        return found.link(path)
    finally:
        found.close()


def _read(path: Path) -> bytes:
    try:
        access("read", path)
        return path.read_bytes()
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}; check the disk") from error


def _map_file(path: Path) -> memoryview:
    """Return a file's bytes without reading them: the system may let go of them at any time."""
    try:
        access("read", path)
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}; check the disk") from error


def _append(path: Path, at: int, data: bytes, checksum: int) -> int:
    """Write the next piece of a file; returns the CRC-32C of all pieces so far."""
    try:
        access("write", path)
        if not at:
            # A link to a file of the cache may be here, which must not be changed.
            path.unlink(missing_ok=True)
        with path.open("r+b" if at else "xb") as file:
            file.seek(at)
            file.write(data)
    except OSError as error:
        raise Unavailable(f"cannot write {path}: {error.strerror}; check the disk") from error
    return int(google_crc32c.extend(checksum, data))
