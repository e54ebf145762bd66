"""Sorted files that RocksDB takes in at once: a key group out of a base, or changes of the log behind it.

To write such a file needs no database, so it can be done while the database is not there yet; and taking it in is a
hard link and an entry of the database's own manifest, whatever the file's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dstl.changelog.change_set import OP_CLEAR, OP_PUT
from dstl.errors import Invalid
from handles.key_group import KeyGroup
from materializer.local_disk import access
from materializer.tables.base import ENTRY_SCHEMA
from materializer.tables.columns import ChangeRun, change_runs
from materializer.tables.rocksdb_engine import (
    KEY_OVERHEAD_BYTES,
    encode_key,
    encode_keys,
    encode_prefix,
    engine_options,
    import_rocksdict,
    translated_errors,
)
from materializer.tables.rocksdb_options import RocksDBOptions

__all__ = ["SortedFile", "StagedFile", "write_changes"]


class SortedFile:
    """One file of stored keys in ascending order; one thread at a time.

    Attributes:
        entries: Keys that were put.
        payload: Bytes of their keys, user keys and values, without what a stored key adds.

    Args:
        path: Made here, gone after :meth:`delete` or once it was taken in.
        options: Of the table that is to take it.
    """

    def __init__(self, path: Path, options: RocksDBOptions) -> None:
        self.path = path
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


class StagedFile:
    """Changes in a sorted file beside the table that it is for.

    Args:
        take: Merges it into the table.
        file: It.
        key_groups: Those that it changes.
    """

    def __init__(
        self, take: Callable[[SortedFile, Iterable[KeyGroup]], None], file: SortedFile, key_groups: frozenset[KeyGroup]
    ) -> None:
        self._take, self._file, self._key_groups = take, file, key_groups

    def apply(self) -> None:
        """Merge the changes into the table; the file is used up."""
        self._take(self._file, self._key_groups)

    def discard(self) -> None:
        """Delete the file."""
        self._file.delete()


def write_changes(
    changes: Sequence[pa.RecordBatch], path: Path, options: RocksDBOptions
) -> tuple[SortedFile, frozenset[KeyGroup]] | None:
    """Write change records, in their order, to a sorted file; returns it and the key groups that they change.

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
        file = SortedFile(path, options.model_copy(update={"compression": "none"}))
        try:
            file.add_all(last)
            file.finish()
        except BaseException:
            file.delete()
            raise
    return file, frozenset(key_groups)


def _records(run: ChangeRun) -> Iterator[tuple[bytes, bytes | None]]:
    head = encode_prefix(run.key_group, run.state)
    raws: Iterable[bytes] = encode_keys(head, run.keys)
    if run.user_keys is not None:
        raws = map(bytes.__add__, raws, run.user_keys)
    if run.ops is None:
        return zip(raws, run.values, strict=True)
    values = (value if op == OP_PUT else None for op, value in zip(run.ops, run.values, strict=True))
    return zip(raws, values, strict=True)
