"""A RocksDB checkpoint: a directory of hard links that never changes, to be read or uploaded file by file."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from dstl.errors import Closed, Unavailable
from handles.key_group import KeyGroup
from materializer.tables.base import PAGE_BYTES, PAGE_ROWS, SnapshotFile
from materializer.tables.columns import PageBuilder, binary_column
from materializer.tables.rocksdb_engine import (
    decode_key,
    encode_prefix,
    engine_options,
    open_database,
    translated_errors,
    walk,
)
from materializer.tables.rocksdb_options import RocksDBOptions

__all__ = ["RocksDBTableSnapshot", "entry_pages", "file_checksum"]

_READ_BYTES = 1 << 20
_CHUNK_ROWS = 1024


class RocksDBTableSnapshot:
    """One moment of a RocksDB table, as files and as entries.

    Args:
        path: The checkpoint directory; deleted on close.
        versions: Version of each key group at that moment.
        checksums: What the table knows of its unchanging files; filled and pruned here.
        incarnation: Which table has made the files that it does not know yet.
        row_bytes: Mean bytes of keys and value of an entry; 0 where it is not known.
    """

    def __init__(
        self,
        path: Path,
        versions: Mapping[KeyGroup, int],
        checksums: dict[str, SnapshotFile] | None = None,
        incarnation: str = "",
        row_bytes: int = 0,
    ) -> None:
        self.path = path
        self.row_bytes = row_bytes
        self._incarnation = incarnation
        self._versions = versions
        self._checksums = checksums if checksums is not None else {}
        self._database: Any = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def versions(self) -> Mapping[KeyGroup, int]:
        """Version of each key group at that moment."""
        return self._versions

    @property
    def as_files(self) -> RocksDBTableSnapshot:
        """This snapshot."""
        return self

    def files(self) -> list[SnapshotFile]:
        """Return what must be in the store for this moment to be opened again, ordered by name.

        Reads each new file once, for its checksum.

        Raises:
            Closed: The snapshot was closed.
            Unavailable: The disk cannot be read.
        """
        self._check_open()
        found: list[SnapshotFile] = []
        try:
            for path in sorted(self.path.iterdir()):
                # The write-ahead log is off, so the log files are empty; LOCK and LOG belong to a process.
                if path.suffix == ".log" or path.name in ("LOCK", "LOG"):
                    continue
                shared = path.suffix == ".sst"
                known = self._checksums.get(path.name) if shared else None
                if known is None:
                    file_id = f"{self._incarnation}-{path.name}" if shared else ""
                    known = SnapshotFile(path.name, path.stat().st_size, file_checksum(path), file_id)
                found.append(known)
        except OSError as error:
            raise Unavailable(f"cannot read {self.path}: {error.strerror}; check the disk") from error
        self._checksums.clear()
        self._checksums.update((file.name, file) for file in found if file.id)
        return found

    def entries(
        self, key_group: KeyGroup, *, page_rows: int = PAGE_ROWS, page_bytes: int = PAGE_BYTES
    ) -> Iterator[pa.RecordBatch]:
        """Yield one key group's entries as pages, ordered by state, key, user key."""
        with translated_errors(self.path):
            yield from entry_pages(walk(self._open().iter(), encode_prefix(key_group)[:2]), page_rows, page_bytes)

    def close(self) -> None:
        """Delete the links; files that nothing else names go with them. Idempotent, from any thread."""
        with self._lock:
            database, self._database = self._database, None
            was_open, self._closed = not self._closed, True
        if database is not None:
            database.close()
        if was_open:
            shutil.rmtree(self.path, ignore_errors=True)

    def _open(self) -> Any:
        with self._lock:
            self._check_open()
            if self._database is None:
                # Read once from end to end: a cache would only take memory from the table.
                native = engine_options(RocksDBOptions(block_cache_bytes=8 << 20))
                self._database = open_database(self.path, native, read_only=True)
            return self._database

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"the snapshot {self.path.name} was closed: take another one")


def entry_pages(
    entries: Iterable[tuple[bytes, bytes]], page_rows: int = PAGE_ROWS, page_bytes: int = PAGE_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield stored keys and values of one key group, which are in order, as pages.

    Raises:
        CorruptData: A key has no end.
    """
    builder = PageBuilder(page_rows, page_bytes)
    state = -1
    keys: list[bytes] = []
    user_keys: list[bytes] = []
    values: list[bytes] = []
    pending = 0
    for raw, value in entries:
        here = raw[2] << 8 | raw[3]
        if here != state or len(keys) >= _CHUNK_ROWS or pending >= page_bytes:
            yield from builder.add(state, *map(binary_column, (keys, user_keys, values)))
            state, keys, user_keys, values, pending = here, [], [], [], 0
        key, user_key = decode_key(raw)
        keys.append(key)
        user_keys.append(user_key)
        values.append(value)
        pending += len(raw) + len(value)
    yield from builder.add(state, *map(binary_column, (keys, user_keys, values)))
    yield from builder.finish()


def file_checksum(path: Path) -> int:
    """Return the CRC-32C of a file, a piece at a time."""
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            value = google_crc32c.extend(value, piece)
    return value
