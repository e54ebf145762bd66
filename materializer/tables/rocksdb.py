"""State in RocksDB, for what does not fit in memory: snapshots are hard links, and only new files are uploaded.

The write-ahead log is off, for the changelog is one. A stored key is
``key group (2, big-endian) | state (2, big-endian) | key, each 00 written as 00 FF | 00 00 | user key``:
it sorts as (key group, state, key, user key), so each of them is one contiguous range.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from dstl.errors import Closed, CorruptData, DstlError, Invalid, Unavailable
from dstl.options import RocksDBOptions
from handles.key_group import MAX_MAX_PARALLELISM, KeyGroup
from materializer.local_disk import Access, access, link_or_copy
from materializer.tables.base import PAGE_ROWS, Expired, KeyGroups, SnapshotFile, StateEntry, StateTable, TableSize
from materializer.tables.columns import ChangeRun, change_runs, key_group_runs
from materializer.tables.rocksdb_engine import (
    RocksDBBatch,
    decode_key,
    encode_key,
    encode_keys,
    encode_prefix,
    engine_options,
    import_rocksdict,
    open_database,
    passing_reads,
    translated_errors,
    walk,
    write_buffer_for,
)
from materializer.tables.rocksdb_snapshot import RocksDBTableSnapshot, SortedFile, write_changes

_log = logging.getLogger(__name__)
_READ_CHUNK = 1024  # keys of one call of the library, which holds no other thread up meanwhile
_EXPIRED_ROWS = 512  # looked at in about a millisecond, for batches wait meanwhile
_EXPIRED_BYTES = 256 << 10  # the same of large values

_forked: list[Any] = []
"""Databases of a parent process: destroying one in a forked child would wait for threads that are not there."""


class RocksDBStateTable(StateTable):
    """See :class:`~materializer.tables.base.StateTable`; state may be larger than memory.

    Costs about 3 us for a value fetched from the block cache and 1.5 us for one put. The synchronous part of a snapshot
    is a flush of the current write buffer and one hard link per file; :meth:`prepare_snapshot` takes the flush out of
    it. The directory is scratch: it does not survive the process, the changelog does.

    Not fork-safe: a child that uses the parent's table is told so (the library would hang).

    Args:
        directory: Made here; snapshots lie in it too, for hard links need one file system.
        options: Bounds of memory and disk.

    Raises:
        Invalid: The extra is not installed, or the directory has a table already.
        Unavailable: The directory cannot be written.
    """

    _db: Any = None
    _compacting: bool

    def __init__(self, directory: Path, options: RocksDBOptions | None = None) -> None:
        super().__init__()
        self._claim(directory, options)
        self._snapshots = 0
        self._staged = count(1)
        self._flushing = threading.Lock()
        self._open({})

    def adopt(
        self, files: Path, key_groups: Collection[KeyGroup], known: Iterable[SnapshotFile] = (), row_bytes: int = 0
    ) -> None:
        """Go on with the files of a :class:`RocksDBTableSnapshot`, without reading their entries.

        Files are not merged until :meth:`resume_compaction`: a base may have waited for that for long, and a restore
        has better use for the processor.

        Args:
            files: Directory that holds all of the snapshot's files; they stay there, and are linked, or copied from
                another file system.
            key_groups: Key groups to keep; the others are dropped.
            known: Ids and checksums of the files, so that they are recognised in later snapshots.
            row_bytes: Mean bytes of an entry.

        Raises:
            Invalid: The table is not empty.
            CorruptData: The files are not a snapshot; the table is empty then.
        """
        self._check_open()
        if self._versions:
            raise Invalid(f"{self._path} holds key groups already: only an empty table takes files")
        with self._working("table-write"):
            self._replace_files()
        try:
            with self._working("table-write"):
                for file in files.iterdir():
                    link_or_copy(file, self._path / file.name)
            if not (self._path / "CURRENT").exists():
                raise CorruptData(f"{files} is no RocksDB checkpoint (no CURRENT): restore from an older base")
            self._open({key_group: at for at, key_group in enumerate(sorted(key_groups), 1)}, compacting=False)
            self._keep_only(sorted(key_groups))
        except BaseException:
            with self._working("table-write"):
                self._replace_files()
            self._open({})
            self.has_failed = False
            raise
        self._checksums.update((file.name, file) for file in known)
        self._put_rows = self._estimated_entries()
        self._put_bytes = self._put_rows * row_bytes

    def resume_compaction(self) -> None:
        """Merge files again, after :meth:`adopt`. Idempotent."""
        self._check_open()
        if not self._compacting:
            with self._working("table-write"):
                self._db.set_options({"disable_auto_compactions": "false"})
            self._compacting = True

    def _replace_files(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)

    @contextmanager
    def _working(self, how: Access = "table-read") -> Iterator[None]:
        """Translate the engine's errors, and remember that there was one."""
        with translated_errors(self._path):
            try:
                access(how, self._path)
                yield
            except Exception as error:
                # The engine's own, or the system's. After a full disk the engine refuses writes with room again, too.
                self.has_failed |= type(error) is Exception or isinstance(error, OSError)
                raise

    def _claim(self, directory: Path, options: RocksDBOptions | None) -> None:
        import_rocksdict()
        self._options = options or RocksDBOptions()
        self._directory = directory
        self._path = directory / "db"
        try:
            access("write", self._path)
            self._path.mkdir(parents=True)
        except FileExistsError as error:
            raise Invalid(f"{self._path} exists: give each RocksDB table a directory of its own") from error
        except OSError as error:
            raise Unavailable(f"cannot make {self._path}: {error.strerror}; choose a writable directory") from error

    def _open(self, versions: dict[KeyGroup, int], *, compacting: bool = True) -> None:
        self._pid = os.getpid()
        self._versions = versions
        self._clock = len(versions)
        self._checksums: dict[str, SnapshotFile] = {}
        # File numbers begin anew in each database, so a file's name says which one has made it.
        self._incarnation = os.urandom(8).hex()
        self._put_rows = self._put_bytes = 0
        self._write_buffer = write_buffer_for(self._options, 0)
        native = engine_options(self._options)
        native.set_disable_auto_compactions(not compacting)
        self._db = open_database(self._path, native)
        self._compacting = compacting

    def _keep_only(self, key_groups: Sequence[KeyGroup]) -> None:
        batch = RocksDBBatch(self._db)
        for low, high in zip([-1, *key_groups], [*key_groups, MAX_MAX_PARALLELISM], strict=True):
            if high - low > 1:
                batch.delete_range(encode_prefix(low + 1), encode_prefix(high))
        with self._working("table-write"):
            batch.flush()

    def get_many(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value under the empty user key of each key. Other threads run meanwhile."""
        self._check_addresses(key_groups, keys)
        raw_keys: list[bytes] = []
        for key_group, start, stop in key_group_runs(key_groups):
            raw_keys += encode_keys(encode_prefix(key_group, state), keys[start:stop])
        found: list[bytes | None] = []
        with self._working():
            for start in range(0, len(raw_keys), _READ_CHUNK):
                found += self._db.get(raw_keys[start : start + _READ_CHUNK])
        return found

    def get_entries(self, state: int, key_groups: KeyGroups, keys: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        """Return all (user key, value) of each key, in user key order."""
        self._check_addresses(key_groups, keys)
        found: list[list[tuple[bytes, bytes]]] = []
        with self._working():
            cursor = self._db.iter()
            for key_group, start, stop in key_group_runs(key_groups):
                head = encode_prefix(key_group, state)
                for key in keys[start:stop]:
                    stem = encode_key(head, key)
                    found.append([(raw[len(stem) :], value) for raw, value in walk(cursor, stem)])
        return found

    def get_entry(self, state: int, key_group: KeyGroup, key: bytes, user_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of some user keys of one key."""
        self._check_open()
        stem = encode_key(encode_prefix(key_group, state), key)
        with self._working():
            return list(self._db.get([stem + user_key for user_key in user_keys])) if user_keys else []

    def scan(
        self,
        state: int,
        key_group: KeyGroup,
        *,
        after: tuple[bytes, bytes] | None = None,
        before_key: bytes | None = None,
        limit: int = PAGE_ROWS,
    ) -> list[StateEntry]:
        """Return a page of one state's entries in one key group."""
        self._check_open()
        head = encode_prefix(key_group, state)
        # The smallest string above s is s + 00.
        start = head if after is None else encode_key(head, after[0]) + after[1] + b"\0"
        stop = None if before_key is None else head + before_key.replace(b"\0", b"\0\xff")
        found: list[StateEntry] = []
        with self._working():
            for raw, value in walk(self._db.iter(), head, start):
                if len(found) >= limit or (stop is not None and raw >= stop):
                    break
                found.append(StateEntry(*decode_key(raw), value))
        return found

    def apply(self, changes: pa.RecordBatch) -> None:
        """Apply change records in bulk, without the write-ahead log."""
        self._check_open()
        with self._working("table-write"):
            batch = RocksDBBatch(self._db)
            for run in change_runs(changes):
                self._apply_run(batch, run)
                self._touch(run.key_group)
            batch.flush()

    def prepare_snapshot(self) -> None:
        """Flush what was written so far, so that the next :meth:`snapshot` has little to flush. From any thread."""
        # The library refuses to close a database that another thread is flushing.
        with self._flushing, self._working("table-write"):
            self._check_open()
            self._db.flush()

    def snapshot(self) -> RocksDBTableSnapshot:
        """Return this moment of the table: a flush, then hard links to its files.

        Raises:
            Unavailable: The disk is full, or cannot be written.
        """
        self._check_open()
        self._snapshots += 1
        path = self._directory / f"snapshot-{self._snapshots}"
        with self._working("table-write"):
            # The checkpoint holds the interpreter's lock while it flushes; a flush before it does not.
            self._db.flush()
            import_rocksdict().Checkpoint(self._db).create_checkpoint(str(path))
            self._size_write_buffer()
        return RocksDBTableSnapshot(
            path, dict(self._versions), self._checksums, self._incarnation, self._put_bytes // max(1, self._put_rows)
        )

    def _size_write_buffer(self) -> None:
        stored = int(self._db.property_int_value("rocksdb.total-sst-files-size") or 0)
        wanted = write_buffer_for(self._options, stored)
        if not 0.5 < wanted / self._write_buffer < 2:
            self._db.set_options({"write_buffer_size": str(wanted)})
            self._write_buffer = wanted

    def restore(self, key_group: KeyGroup, pages: Iterable[pa.RecordBatch]) -> None:
        """Replace one key group by the entries of some pages: they become one file, which RocksDB takes in."""
        self._check_open()
        with self._working("table-write"):
            file = SortedFile(self._directory / f"restore-{key_group}.sst", self._options, (key_group,))
            try:
                for page in pages:
                    file.add_page(key_group, page)
                file.finish()
                self.drop_key_group(key_group)
                self._take(file)
            finally:
                file.delete()
        self._touch(key_group)

    def stage(self, changes: Sequence[pa.RecordBatch]) -> SortedFile | None:
        """Write changes to a file, each call to another; from any thread, beside any other call.

        The database itself is not touched, and need not be there yet. What is never taken goes with the table.

        Returns:
            For :meth:`take`, after which reads must look into it until it is merged. None where a clear is among them:
            only :meth:`apply` can do it.

        Raises:
            Invalid: As for :meth:`apply`.
            Unavailable: The disk cannot be written.
        """
        return write_changes(changes, self._directory / f"staged-{next(self._staged)}.sst", self._options)

    def take(self, staged: SortedFile) -> None:
        """Put staged changes over the table, which takes no time; the file is used up."""
        self._check_open()
        with self._working("table-write"):
            self._take(staged)
        for key_group in staged.key_groups:
            self._touch(key_group)

    def _take(self, file: SortedFile) -> None:
        file.take_into(self._db)
        self._put_rows += file.entries
        self._put_bytes += file.payload

    def drop_key_group(self, key_group: KeyGroup) -> None:
        """Forget one key group; its space is free after the next compaction."""
        self._check_open()
        if self._versions.pop(key_group, None) is not None:
            with self._working("table-write"):
                batch = RocksDBBatch(self._db)
                batch.delete_range(encode_prefix(key_group), encode_prefix(key_group + 1))
                batch.flush()

    def _dropped(self, key_group: KeyGroup, expired: Expired) -> Iterator[int]:
        """Delete the expired entries of one key group, a bounded number of entries at a time."""
        for state, is_expired in expired.items():
            prefix = encode_prefix(key_group, state)
            start = prefix
            while True:
                self._check_open()
                batch = RocksDBBatch(self._db)
                dropped = seen = 0
                raw = b""
                with self._working("table-write"):
                    # A new cursor each time: it is of its moment, and what was written since must not be deleted.
                    for raw, value in islice(walk(self._db.iter(passing_reads()), prefix, start), _EXPIRED_ROWS):
                        if is_expired(value):
                            batch.delete(raw)
                            dropped += 1
                        seen += len(raw) + len(value)
                        if seen >= _EXPIRED_BYTES:
                            break
                    batch.flush()
                yield dropped
                if not raw:
                    break
                start = raw + b"\0"

    def size(self) -> TableSize:
        """Return RocksDB's estimate; entries that were overwritten count until they are compacted away."""
        if self._db is None or not self._versions:
            return TableSize(0, 0)
        entries = self._estimated_entries()
        return TableSize(entries, entries * self._put_bytes // max(1, self._put_rows))

    def _estimated_entries(self) -> int:
        with self._working():
            return int(self._db.property_int_value("rocksdb.estimate-num-keys") or 0)

    def close(self) -> None:
        """Close the database and delete its files; snapshots keep theirs. Idempotent."""
        if self._db is None:
            return
        if os.getpid() != self._pid:
            _forked.append(self._db)
            self._db = None
            return
        with self._flushing:
            try:
                with translated_errors(self._path):
                    self._db.close()
            except DstlError as error:
                _log.info("a table was closed that had failed: %s", error)
            self._db = None
        self._versions = {}
        shutil.rmtree(self._path, ignore_errors=True)
        with suppress(OSError):
            for left in self._directory.glob("staged-*.sst"):
                left.unlink(missing_ok=True)

    def _apply_run(self, batch: RocksDBBatch, run: ChangeRun) -> None:
        head = encode_prefix(run.key_group, run.state)
        user_keys: Iterable[bytes] = run.user_keys if run.user_keys is not None else repeat(b"", len(run.keys))
        ops: Iterable[int] = run.ops if run.ops is not None else repeat(OP_PUT, len(run.keys))
        # A clear walks what is stored, so the puts that stand before it must be: those of earlier runs now, those of
        # this run when one of its keys is cleared again.
        written: set[bytes] | None = None
        if run.ops is not None and OP_CLEAR in run.ops:
            written = set()
            batch.flush()
        for op, key, user_key, value in zip(ops, run.keys, user_keys, run.values, strict=True):
            stem = encode_key(head, key)
            if op == OP_CLEAR:
                if written and stem in written:
                    batch.flush()
                    written.clear()
                for raw, _ in walk(self._db.iter(), stem):
                    batch.delete(raw)
            elif op == OP_PUT:
                batch.put(stem + user_key, value)
                self._put_rows += 1
                self._put_bytes += len(key) + len(user_key) + len(value)
                if written is not None:
                    written.add(stem)
            else:
                batch.delete(stem + user_key)

    def _check_open(self) -> None:
        if self._db is None:
            raise Closed("the RocksDB state table was closed: open another one")
        if os.getpid() != self._pid:
            raise Invalid(f"the RocksDB table {self._path} does not survive a fork: open one in the child process")
