"""Settings of the RocksDB table: what it may take of memory, disk and processor."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["RocksDBOptions"]

_LEAST_WRITE_BUFFER = 4 << 20


class RocksDBOptions(BaseModel):
    """Bounds of one RocksDB table; a TaskManager has one table per operator.

    Memory is about ``block_cache_bytes + max_write_buffers * write_buffer_bytes``: index and filter blocks live in the
    block cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_cache_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Uncompressed blocks kept in memory (Flink ``state.backend.rocksdb.block.cache-size``). Larger: fewer reads from
    disk; smaller: less memory. Reads slow down by ten where indexes and filters do not fit: 1.5 bytes per key."""

    block_bytes: int = Field(default=16 << 10, ge=1 << 10)
    """Bytes of a block, before it is compressed (Flink ``block.blocksize``, 4 KB). Larger: less space and a smaller
    index; smaller: a read of one key decompresses less."""

    write_buffer_bytes: int = Field(default=32 << 20, ge=64 << 10)
    """Most memory in which writes collect before they become a file (Flink ``writebuffer.size``, 64 MB). A small state
    has a smaller one (:meth:`write_buffer_for`), since files in front of the merged ones are space. Larger: fewer files
    and less compaction; smaller: shorter flush in a snapshot's synchronous part (about 3 ms per MB)."""

    max_write_buffers: int = Field(default=3, ge=2)
    """Write buffers at once; when all are full, writes wait for a flush (Flink ``writebuffer.count``, 2)."""

    target_file_bytes: int = Field(default=32 << 20, ge=64 << 10)
    """Size of a file after compaction (Flink ``compaction.level.target-file-size-base``, 64 MB). Smaller: a change
    re-uploads less; larger: fewer objects and requests."""

    max_runs: int = Field(default=4, ge=2)
    """Sorted runs from which on neighbours of like size are merged. More: fewer bytes are rewritten and uploaded;
    fewer: a read looks into fewer files."""

    max_space_overhead_percent: int = Field(default=25, ge=1)
    """All runs become one when the newer ones have so many bytes per byte of the oldest: then the whole state is
    uploaded anew. More: rarer; less: less space for what was overwritten."""

    background_jobs: int = Field(default=2, ge=1)
    """Threads for flush and compaction (Flink ``thread.num``, 2). More: less write stall; fewer: more processor for the
    job."""

    bloom_bits_per_key: int = Field(default=10, ge=0)
    """Bits of filter per key: 10 spare 99 % of the reads for keys that are not there (new keys of a stream), for 1.25
    bytes per key. 0: none."""

    compression: Literal["lz4", "zstd", "none"] = "zstd"
    """Of blocks on disk, and so of what is uploaded: ``zstd`` (at its lowest level) is a third smaller than ``lz4``,
    which is faster to write and read; ``none`` reads fastest."""

    max_open_files: int = Field(default=512, ge=16)
    """File descriptors kept open. Fewer: files are reopened on reads."""

    def write_buffer_for(self, stored_bytes: int) -> int:
        """Return the write buffer of a state that takes so many bytes on disk: an eighth of it, within bounds."""
        return max(min(_LEAST_WRITE_BUFFER, self.write_buffer_bytes), min(stored_bytes // 8, self.write_buffer_bytes))
