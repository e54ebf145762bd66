"""A RocksDB checkpoint: a directory of hard links that never changes, to be read or uploaded file by file.

And sorted files that RocksDB takes in at once: a key group out of a base, or changes of the log behind it. To write
such a file needs no database, so it can be done while the database is not there yet; and taking it in is a hard link
and an entry of the database's own manifest, whatever the file's size.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from dstl.errors import Closed, Invalid, Unavailable
from dstl.options import RocksDBOptions
from handles.key_group import KeyGroup
from materializer.local_disk import access
from materializer.tables.base import ENTRY_SCHEMA, PAGE_BYTES, SnapshotFile
from materializer.tables.columns import ChangeRun, PageBuilder, binary_column, change_runs
from materializer.tables.rocksdb_engine import (
    KEY_OVERHEAD_BYTES,
    decode_key,
    encode_key,
    encode_keys,
    encode_prefix,
    engine_options,
    import_rocksdict,
    open_database,
    translated_errors,
    walk,
)

_READ_BYTES = 1 << 20  # of a file's checksum: what it takes from memory at a time
_CHUNK_ROWS = 1024  # entries whose Python objects exist at once


class RocksDBTableSnapshot:
    """One moment of a RocksDB table, as files and as entries.

    Attributes:
        versions: Version of each key group at that moment.

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
        self.versions = versions
        self._checksums = checksums if checksums is not None else {}
        self._database: Any = None
        self._closed = False
        self._lock = threading.Lock()

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

    def entries(self, key_group: KeyGroup) -> Iterator[pa.RecordBatch]:
        """Yield one key group's entries as pages, ordered by state, key, user key."""
        with translated_errors(self.path):
            yield from entry_pages(walk(self._open().iter(), encode_prefix(key_group)[:2]))

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


def entry_pages(entries: Iterable[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
    """Yield stored keys and values of one key group, which are in order, as pages.

    Raises:
        CorruptData: A key has no end.
    """
    builder = PageBuilder()
    state = -1
    keys: list[bytes] = []
    user_keys: list[bytes] = []
    values: list[bytes] = []
    pending = 0
    for raw, value in entries:
        here = raw[2] << 8 | raw[3]
        if here != state or len(keys) >= _CHUNK_ROWS or pending >= PAGE_BYTES:
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


class SortedFile:
    """One file of stored keys in ascending order; one thread at a time.

    Attributes:
        entries: Keys that were put.
        payload: Bytes of their keys, user keys and values, without what a stored key adds.
        key_groups: As given.

    Args:
        path: Made here, gone after :meth:`delete` or once it was taken in.
        options: Of the table that is to take it.
        key_groups: Those whose changes are put.
    """

    def __init__(self, path: Path, options: RocksDBOptions, key_groups: Iterable[KeyGroup]) -> None:
        self.path, self.key_groups = path, key_groups
        self.entries = self.payload = 0
        self._records = 0
        self._writer = import_rocksdict().SstFileWriter(engine_options(options))
        self._writer.open(str(path))

    def add_page(self, key_group: KeyGroup, page: pa.RecordBatch) -> None:
        """Write a page of entries of one key group.

        Raises:
            Invalid: It has another schema.
        """
        if not page.schema.equals(ENTRY_SCHEMA):
            raise Invalid(f"a page of key group {key_group} has another schema: {page.schema}")
        columns = (page.column(name).to_pylist() for name in ENTRY_SCHEMA.names)
        heads = {state: encode_prefix(key_group, state) for state in page.column("state").unique().to_pylist()}
        writer, payload = self._writer, 0
        for state, key, user_key, value in zip(*columns, strict=True):
            writer[encode_key(heads[state], key) + user_key] = value
            payload += len(key) + len(user_key) + len(value)
        self.entries += page.num_rows
        self._records += page.num_rows
        self.payload += payload

    def add_all(self, records: Mapping[bytes, bytes | None]) -> None:
        """Write stored keys and their values; None deletes what a table has under the key."""
        writer = self._writer
        for raw in sorted(records):
            value = records[raw]
            if value is None:
                del writer[raw]
            else:
                writer[raw] = value
        puts = [len(raw) + len(value) for raw, value in records.items() if value is not None]
        self._records += len(records)
        self.entries += len(puts)
        self.payload += sum(puts) - len(puts) * KEY_OVERHEAD_BYTES

    def finish(self) -> None:
        """Complete the file; no more may be added."""
        if self._records:
            self._writer.finish()
        self._writer = None

    def take_into(self, database: Any) -> None:
        """Put everything over what a database has. The file must be complete, and is gone afterwards."""
        if self._records:
            moving = import_rocksdict().IngestExternalFileOptions()
            moving.set_move_files(True)
            database.ingest_external_file([str(self.path)], moving)
        self.delete()

    def delete(self) -> None:
        """Delete the file; where that cannot be done it goes with the table's directory. Idempotent."""
        self._writer = None
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def write_changes(changes: Sequence[pa.RecordBatch], path: Path, options: RocksDBOptions) -> SortedFile | None:
    """Write change records, in their order, to a sorted file.

    Args:
        changes: Batches of change records; of several changes of one key the last stays.
        path: Of the file.
        options: Of the table that is to take it.

    Returns:
        None where a clear is among them: which entries it removes only a table knows.

    Raises:
        Invalid: As for :meth:`~materializer.tables.base.StateTable.apply`.
        Unavailable: The disk cannot be written.
    """
    last: dict[bytes, bytes | None] = {}
    key_groups: set[KeyGroup] = set()
    for batch in changes:
        for run in change_runs(batch):
            if run.ops is not None and OP_CLEAR in run.ops:
                return None
            last.update(_records(run))
            key_groups.add(run.key_group)
    with translated_errors(path):
        access("write", path)
        # Not compressed, which would take as long again: the file is merged into others soon.
        file = SortedFile(path, options.model_copy(update={"compression": "none"}), key_groups)
        try:
            file.add_all(last)
            file.finish()
        except BaseException:
            file.delete()
            raise
    return file


def _records(run: ChangeRun) -> Iterator[tuple[bytes, bytes | None]]:
    head = encode_prefix(run.key_group, run.state)
    raws: Iterable[bytes] = encode_keys(head, run.keys)
    if run.user_keys is not None:
        raws = map(bytes.__add__, raws, run.user_keys)
    if run.ops is None:
        return zip(raws, run.values, strict=True)
    values = (value if op == OP_PUT else None for op, value in zip(run.ops, run.values, strict=True))
    return zip(raws, values, strict=True)
