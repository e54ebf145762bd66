"""Options of checkpoints, of materialization and of tables."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dstl.errors import Invalid
from dstl.options.section import OptionSection


class CheckpointOptions(OptionSection, frozen=True):
    """Making and keeping of checkpoints."""

    timeout_s: float = Field(default=600.0, gt=0)
    """A checkpoint that takes longer fails, and its batch is run again (Flink ``execution.checkpointing.timeout``,
    10 min). Shorter: a stuck store is noticed sooner; longer: rides out longer outages without a restart."""

    retained: int = Field(default=3, ge=2)
    """Completed checkpoints that are kept (Flink ``state.checkpoints.num-retained``, 1). Never below two: Spark may run
    the last batch again, from the one before. More: older states can be read; fewer: less storage. Older
    ones are deleted several at a time: a listing may show up to ten more, and those can be restored as well."""

    history: int = Field(default=100, ge=0, le=1000)
    """Checkpoints, failures and restores whose figures each manifest tells (``dstl ui`` shows them). More: a longer
    look back; fewer: smaller manifests, by some 15 to 40 bytes for each."""

    clean_interval_s: float = Field(default=3600.0, ge=0)
    """How often the location is searched for orphans: what crashes, lost hedges and aborted batches left. Shorter: they
    are paid for less long; longer: fewer LIST requests. 0 turns it off (``dstl gc`` does the same by hand)."""

    clean_grace_s: float = Field(default=86400.0, gt=0)
    """An object younger than this, by the store's clock, is never taken for an orphan. It must exceed ``timeout_s``.
    Shorter: orphans go sooner; longer: more margin for drivers that were paused."""

    clock_hold_s: float = Field(default=300.0, ge=0)
    """How long processing time stands still where the driver's clock is behind the batch before; then it follows the
    clock. Longer: a clock that is wrong now has more time to be corrected (NTP takes minutes); shorter: after one that
    was ahead, timers and times to live go on sooner. 0: as in Spark, each correction takes time back."""

    task_manager_timeout_s: float = Field(default=120.0, gt=0)
    """How long a query waits for its TaskManagers to register; a restore that comes no byte further for half a minute
    more than this is given up. Longer: slow hosts are waited for; shorter: a host that never comes, or hangs, fails the
    query sooner."""


def check_grace(checkpoints: CheckpointOptions) -> None:
    """Refuse options with which the cleaner could take for an orphan what is about to be named.

    Raises:
        Invalid: The grace period is not longer than a commit may take.
    """
    if checkpoints.clean_grace_s <= checkpoints.timeout_s:
        raise Invalid(
            f"checkpoints.clean_grace_s={checkpoints.clean_grace_s:g} is not above checkpoints.timeout_s="
            f"{checkpoints.timeout_s:g}: the cleaner would delete what a checkpoint is about to name; make the grace "
            "period longer"
        )


class TriggerOptions(OptionSection, frozen=True):
    """Reasons to start a materialization. Every reason but the interval can be turned off with None."""

    interval_s: float = Field(default=600.0, gt=0)
    """From one start to the next, if there is any log (Flink ``periodic-materialize.interval``, 10 min). After a
    restart the first one is cut at random, so that jobs do not upload all at once. Shorter: less log to store and
    replay; longer: fewer bytes of state uploaded."""

    log_to_state_ratio: float | None = Field(default=0.2, gt=0)
    """Start when the log has so many bytes per byte of state: it bounds what a restore reads at about (1 + ratio) times
    the state. Smaller: less space and faster recovery; larger: fewer uploads, for where every key group changes, each
    byte of log means 1 / ratio bytes of base uploaded (free on S3 but for the PUTs, and some 5 ms of a core per MB)."""

    min_log_bytes: int = Field(default=4 << 20, ge=0)
    """Below it the ratio is not looked at: a tiny state would be materialized all the time. Smaller: less space for
    small states, such as short windows; larger: fewer uploads."""

    replay_s: float | None = Field(default=30.0, gt=0)
    """Start when replaying the log would take so long. Shorter: faster recovery; longer: fewer uploads."""

    replay_bytes_per_s: float = Field(default=50e6, gt=0)
    """Replay rate that is assumed until one was measured."""

    replay_segment_s: float = Field(default=0.005, ge=0)
    """Added to the estimate per segment: a request, shared by those under way at once."""

    max_segments: int | None = Field(default=1000, ge=1)
    """Start when the log has so many segments. Fewer: small manifests and fewer requests on recovery; more: fewer
    uploads."""

    max_age_s: float | None = Field(default=None, gt=0)
    """Start when the oldest change is so old. For stores that expire objects: set it well below their lifetime."""

    min_pause_s: float = Field(default=10.0, ge=0)
    """From the end of one materialization to the start of the next, whatever the log does."""

    tolerated_failures: int = Field(default=3, ge=0)
    """Failures in a row that only delay (Flink ``state.changelog.max-failures-allowed``, 3). One more is reported: the
    log then grows for a reason that must be looked at."""

    backoff_base_s: float = Field(default=5.0, gt=0)
    """Wait after the first failure; doubles with each one more, and half of it is random."""

    backoff_cap_s: float = Field(default=300.0, gt=0)
    """Longest wait after a failure."""

    timeout_s: float = Field(default=1800.0, gt=0)
    """A materialization that runs longer is abandoned and counts as failed. Longer: slow stores get through with large
    states; shorter: a stuck one is noticed sooner."""

    overdue_s: float = Field(default=3600.0, gt=0)
    """When the oldest change that is not in a base is older than this, a warning is logged. Longer: fewer alarms;
    shorter: a log that grows is noticed sooner."""


class MaterializationOptions(TriggerOptions, frozen=True):
    """Materialization: tables are written as base files in the background."""

    enabled: bool = True
    """Off: nothing is materialized and the log grows for ever; for measurements of the log alone."""

    generations: int = Field(default=2, ge=1, le=2)
    """Bases of each key group that are kept, in different objects, with the log back to the older one. 2: a damaged or
    missing base costs a longer recovery; 1: about half the storage, and a damaged base costs the job."""

    file_bytes: int = Field(default=16 << 20, ge=1 << 16)
    """A base file is closed once it has so many bytes; key groups are packed into it whole, so it may be larger.
    Larger: fewer paid PUTs; smaller: less memory (two of them are held), and less of the byte budget is taken from
    appends at once."""

    share_files: bool = True
    """A RocksDB table's base is its files (Flink ``state.backend.incremental``): those that an earlier base has stored
    are named again. On: where 1 % of the keys change, some 6 % of the state is uploaded, and a restart opens the files
    as they are; but a restore that owns a part of the key groups reads all files, and a reader of such a checkpoint
    needs the ``rocksdb`` extra. Off: changed key groups are uploaded whole and restored one by one, in a form that is
    the same for all tables. What has expired leaves such a base as the table drops it: an eighth of the key groups, and
    all of a small table, before each materialization."""

    base_compression_level: int = Field(default=1, ge=-5, le=19)
    """zstd level of base files. Level 1 is within 2 % of level 3 at twice its speed."""

    min_live_share: float = Field(default=0.5, ge=0, lt=1)
    """A base file of which less is still of use is rewritten by the next materialization. Larger: less storage;
    smaller: fewer bytes uploaded."""

    cache_bytes: int = Field(default=1 << 30, ge=0)
    """Disk for a cache of bases on each host, shared by all TaskManagers of this user there, the least recently used go
    first (Flink ``state.backend.local-recovery``). Larger: a restart on the same host fetches less; smaller: less
    disk. 0: none. A cache is only used for state in S3, unless ``cache_directory`` is set."""

    cache_directory: str | None = None
    """Where it is: in a directory ``dstl-bases`` below this one, which must be, or become, this user's own with mode
    0700. None: ``dstl-cache-<uid>`` in the system's temporary directory. With RocksDB it has to be on the disk that has
    the TaskManager's temporary directory: files of its tables are linked, and not kept where they cannot be."""

    cache_max_age_s: float = Field(default=3 * 86400.0, gt=0)
    """A cached file that was not used for so long goes, when the next one comes or a TaskManager starts. Longer: a job
    that pauses restarts faster; shorter: less disk for jobs that are gone."""

    publish_within_s: float = Field(default=300.0, gt=0)
    """A finished materialization is named by the next batch's checkpoint. Where none comes for so long, the last
    batch's is made again, which is a PUT more; and the end of a run (``StateBackend.close``) waits at most so long for
    materializations that run. Longer: jobs in short runs get their bases whatever the size of their state (some 10 to
    20 s per GB of a TaskManager); shorter: a process ends sooner, and the next run uploads the same again."""


class RocksDBOptions(OptionSection, frozen=True):
    """RocksDB tables (``table="rocksdb"``). A TaskManager has one for each operator and one block cache for them all:
    its memory is about ``block_cache_bytes``, and ``max_write_buffers * write_buffer_bytes`` for each operator."""

    block_cache_bytes: int = Field(default=256 << 20, ge=1 << 20, le=1 << 50)
    """Uncompressed blocks, indexes and filters that a TaskManager keeps in memory (Flink
    ``state.backend.rocksdb.block.cache-size``, for each operator). Larger: fewer reads from disk; smaller: less memory.
    Reads slow down by ten where indexes and filters do not fit: 1.5 bytes per key."""

    block_bytes: int = Field(default=16 << 10, ge=1 << 10, le=16 << 20)
    """Bytes of a block, before it is compressed (Flink ``block.blocksize``, 4 KB). Larger: less space and a smaller
    index; smaller: a read of one key decompresses less."""

    write_buffer_bytes: int = Field(default=32 << 20, ge=64 << 10, le=1 << 36)
    """Most memory in which writes collect before they become a file (Flink ``writebuffer.size``, 64 MB). A small state
    has a smaller one, an eighth of it, since files in front of the merged ones are space. Larger: fewer files and less
    compaction; smaller: shorter flush in a snapshot's synchronous part (about 3 ms per MB)."""

    max_write_buffers: int = Field(default=3, ge=2, le=1 << 16)
    """Write buffers at once; when all are full, writes wait for a flush (Flink ``writebuffer.count``, 2)."""

    target_file_bytes: int = Field(default=32 << 20, ge=64 << 10, le=1 << 40)
    """Size of a file after compaction (Flink ``compaction.level.target-file-size-base``, 64 MB). Smaller: a change
    re-uploads less; larger: fewer objects and requests."""

    max_runs: int = Field(default=4, ge=2, le=1 << 16)
    """Sorted runs from which on neighbours of like size are merged. More: fewer bytes are rewritten and uploaded;
    fewer: a read looks into fewer files."""

    max_space_overhead_percent: int = Field(default=25, ge=1, le=1 << 20)
    """All runs become one when the newer ones have so many bytes per byte of the oldest: then the whole state is
    uploaded anew. More: rarer; less: less space for what was overwritten."""

    background_jobs: int = Field(default=2, ge=1, le=64)
    """Threads for flush and compaction (Flink ``thread.num``, 2). More: less write stall; fewer: more processor for the
    job."""

    bloom_bits_per_key: int = Field(default=10, ge=0, le=100)
    """Bits of filter per key: 10 spare 99 % of the reads for keys that are not there (new keys of a stream), for 1.25
    bytes per key. 0: none."""

    compression: Literal["lz4", "zstd", "none"] = "zstd"
    """Of blocks on disk, and so of what is uploaded: ``zstd`` (at its lowest level) is a third smaller than ``lz4``,
    which is faster to write and read; ``none`` reads fastest."""

    max_open_files: int = Field(default=512, ge=16, le=1 << 30)
    """File descriptors kept open, if that is no more than an eighth of what the process may open (``ulimit -n``).
    Fewer: files are reopened on reads."""
