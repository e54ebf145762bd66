"""RocksDB for the tables: settings, keys, walks, batches and errors.

The only module that imports rocksdict, but for the child that reads others' files (``materializer.bases.file_child``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dstl.errors import CorruptData, Invalid, Unavailable
from dstl.options import RocksDBOptions
from dstl.system_limits import open_file_limit

_LEAST_WRITE_BUFFER = 4 << 20  # smaller ones make more files than their merging is worth

_FEWEST_OPEN_FILES = 20  # the engine takes fewer for so many
_BATCH_ROWS = 1024  # writes that wait in Python's memory, at most
_BATCH_BYTES = 1 << 20  # the same of large values
_PREFIX = struct.Struct(">HH")

KEY_OVERHEAD_BYTES = _PREFIX.size + 2
"""What a stored key has beside key and user key, where no byte of the key is 00."""


def import_rocksdict() -> Any:
    """Return the rocksdict module.

    Raises:
        Invalid: It is not installed.
    """
    try:
        import rocksdict
    except ImportError as error:
        raise Invalid("the RocksDB table needs an extra: pip install 'dstl-pyspark[rocksdb]'") from error
    return rocksdict


_FASTEST_ZSTD = (-14, 1, 0, 0)
"""The library's own window, level 1, no strategy, no dictionary: higher levels cost more than they save here."""


@cache
def _block_cache(nbytes: int) -> Any:
    # One for all tables of the process: what it takes does not grow with the number of operators.
    return import_rocksdict().Cache(nbytes)


def write_buffer_for(options: RocksDBOptions, stored_bytes: int) -> int:
    """Return the write buffer of a state that takes so many bytes on disk: an eighth of it, within bounds."""
    most = options.write_buffer_bytes
    return max(min(_LEAST_WRITE_BUFFER, most), min(stored_bytes // 8, most))


def engine_options(options: RocksDBOptions) -> Any:
    """Return RocksDB's own options; its memory stays within those of ours."""
    rocksdict = import_rocksdict()
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(_block_cache(options.block_cache_bytes))
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    blocks.set_format_version(5)
    blocks.set_block_size(options.block_bytes)
    if options.bloom_bits_per_key:
        blocks.set_bloom_filter(options.bloom_bits_per_key, False)
    native = rocksdict.Options(raw_mode=True)
    native.create_if_missing(True)
    native.set_block_based_table_factory(blocks)
    native.set_write_buffer_size(write_buffer_for(options, 0))
    native.set_max_write_buffer_number(options.max_write_buffers)
    native.set_target_file_size_base(options.target_file_bytes)
    # Sorted runs of like size are merged. By levels, a small change of keys all over the state would rewrite, and so
    # upload, a whole level each time.
    native.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    native.set_level_zero_file_num_compaction_trigger(options.max_runs)
    merging = rocksdict.UniversalCompactOptions()
    merging.max_size_amplification_percent = options.max_space_overhead_percent
    merging.size_ratio = 20
    native.set_universal_compaction_options(merging)
    native.set_max_background_jobs(options.background_jobs)
    native.set_max_open_files(min(options.max_open_files, max(_FEWEST_OPEN_FILES, open_file_limit() // 8)))
    native.set_compression_type(getattr(rocksdict.DBCompressionType, options.compression)())
    if options.compression == "zstd":
        native.set_compression_options(*_FASTEST_ZSTD)
    native.set_keep_log_file_num(1)
    native.set_max_log_file_size(1 << 20)
    native.set_stats_dump_period_sec(0)
    return native


def open_database(path: Path, native: Any, *, read_only: bool = False) -> Any:
    """Open a database with these options. (Without a name for them, those that lie beside its files are taken.)"""
    rocksdict = import_rocksdict()
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    with translated_errors(path):
        return rocksdict.Rdict(str(path), native, column_families={"default": native}, access_type=access)


def passing_reads() -> Any:
    """Return how to read what will not be asked for again soon: the block cache is left to the others."""
    reads = import_rocksdict().ReadOptions()
    reads.fill_cache(False)
    return reads


def encode_prefix(key_group: int, state: int = 0) -> bytes:
    """Return what the stored keys of one key group (and state) start with."""
    return _PREFIX.pack(key_group, state)


def encode_key(prefix: bytes, key: bytes) -> bytes:
    """Return what all entries of one key start with; the user key follows."""
    return prefix + key.replace(b"\0", b"\0\xff") + b"\0\0"


def encode_keys(prefix: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Return :func:`encode_key` of each key; a call for each would take as long again."""
    return [prefix + key.replace(b"\0", b"\0\xff") + b"\0\0" for key in keys]


def decode_key(raw: bytes) -> tuple[bytes, bytes]:
    """Return the key and the user key of a stored key.

    Raises:
        CorruptData: The key has no end.
    """
    # A 00 of the key is followed by FF, so the first pair of 00 is the end of the key.
    end = raw.find(b"\0\0", 4)
    if end < 0:
        raise CorruptData("a stored key has no end: restore the operator from its last checkpoint")
    return raw[4:end].replace(b"\0\xff", b"\0"), raw[end + 2 :]


def walk(cursor: Any, prefix: bytes, start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
    """Yield stored keys and values under a prefix, in order, from ``start`` on, as of the cursor's making."""
    cursor.seek(prefix if start is None else start)
    while cursor.valid():
        raw = cursor.key()
        if not raw.startswith(prefix):
            return
        yield raw, cursor.value()
        cursor.next()
    cursor.status()


class RocksDBBatch:
    """Collects writes and hands them over in bounded pieces, without the write-ahead log."""

    def __init__(self, database: Any) -> None:
        rocksdict = import_rocksdict()
        self._database = database
        self._new = rocksdict.WriteBatch
        self._pending = self._new(raw_mode=True)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self._rows = self._bytes = 0

    def put(self, raw: bytes, value: bytes) -> None:
        """Set one entry."""
        self._pending.put(raw, value)
        self._count(len(raw) + len(value))

    def delete(self, raw: bytes) -> None:
        """Remove one entry."""
        self._pending.delete(raw)
        self._count(len(raw))

    def delete_range(self, start: bytes, stop: bytes) -> None:
        """Remove every entry in ``[start, stop)``. For key groups only: many ranges slow reads down."""
        self._pending.delete_range(start, stop)
        self._count(len(start) + len(stop))

    def flush(self) -> None:
        """Write what is pending, in order."""
        if self._rows:
            self._database.write(self._pending, self._unlogged)
            self._pending = self._new(raw_mode=True)  # A batch that was written is spent.
            self._rows = self._bytes = 0

    def _count(self, size: int) -> None:
        self._rows += 1
        self._bytes += size
        if self._rows >= _BATCH_ROWS or self._bytes >= _BATCH_BYTES:
            self.flush()


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """Turn the library's untyped errors into ours.

    Raises:
        CorruptData: A file of the database is damaged.
        Invalid: Keys of a restored key group are out of order.
        Unavailable: Anything else, mostly the disk.
    """
    try:
        yield
    except OSError as error:
        raise unavailable(path, str(error.strerror)) from error
    except Exception as error:
        if type(error) is not Exception:
            raise
        text = str(error)
        if text.startswith("Corruption") or "No such file" in text:
            raise CorruptData(f"{path}: {text}; restore the operator from its last checkpoint") from error
        if "strict ascending order" in text:
            raise Invalid(f"pages of a key group are out of order: {text}") from error
        raise unavailable(path, text) from error


def unavailable(path: Path, why: str) -> Unavailable:
    """Return the error of files that cannot be read or written, with what to do."""
    step = "allow more open files (ulimit -n)" if "Too many open files" in why else "check the disk"
    return Unavailable(f"{path}: {why}; {step}, then restart the query")
