"""State tables: the committed state of an operator between checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from dstl.errors import Invalid
from dstl.options import RocksDBOptions
from materializer.tables.base import (
    ENTRY_SCHEMA,
    Expired,
    SnapshotFile,
    StateEntry,
    StateTable,
    TableSize,
    TableSnapshot,
)
from materializer.tables.heap import ENTRY_OVERHEAD_BYTES, HeapStateTable
from materializer.tables.rocksdb import RocksDBStateTable
from materializer.tables.rocksdb_snapshot import RocksDBTableSnapshot

__all__ = [
    "ENTRY_OVERHEAD_BYTES",
    "ENTRY_SCHEMA",
    "Expired",
    "HeapStateTable",
    "RocksDBStateTable",
    "RocksDBTableSnapshot",
    "SnapshotFile",
    "StateEntry",
    "StateTable",
    "TableKind",
    "TableSize",
    "TableSnapshot",
    "open_table",
]

TableKind = Literal["heap", "rocksdb"]


def open_table(kind: TableKind, directory: Path | None = None, *, rocksdb: RocksDBOptions | None = None) -> StateTable:
    """Open an empty state table.

    Args:
        kind: ``heap`` is five times as fast and must fit in memory; ``rocksdb`` may be larger than memory and uploads
            changes only, file by file.
        directory: Where a RocksDB table lies; a heap table needs none.
        rocksdb: Bounds of a RocksDB table.

    Raises:
        Invalid: No such kind, no directory for RocksDB, or its extra is not installed.
    """
    if kind == "heap":
        return HeapStateTable()
    if kind == "rocksdb":
        if directory is None:
            raise Invalid("a RocksDB table needs a directory: give it one on a local disk")
        return RocksDBStateTable(directory, rocksdb)
    raise Invalid(f"no state table of kind {kind!r}: choose 'heap' or 'rocksdb'")
