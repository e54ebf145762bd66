"""Options of DSTL: frozen values from keyword arguments, the environment (``DSTL_*``) and Spark's configuration
(``spark.dstl.*``). Each says what it trades for what; Flink's name stands beside ours where there is one."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from dstl.errors import Invalid


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchingOptions(_Options):
    """Sealing of a TaskManager's changelog into segments."""

    segment_size: int = Field(default=5 << 20, gt=0)
    """A seal of more bytes (before compression) is cut into segments of at most about this many, encoded and
    stored side by side; a single change set is never cut. Larger: fewer paid PUTs; smaller: shorter checkpoints
    and cheaper retries and hedges, for one connection carries some 25 MB/s: 10 MB take twice as long as 4 MB.
    Flink stores a batch whole."""

    preemptive_persist_threshold: int = Field(default=5 << 20, gt=0)
    """Bytes of one writer that are uploaded before any checkpoint asks (Flink
    ``dstl.dfs.preemptive-persist-threshold``, 5 MB, which forgets closed change sets; here everything not yet
    sealed counts). Smaller: shorter checkpoints; larger: fewer objects, and fewer wasted ones when a batch is
    aborted. Above ``byte_budget`` it never acts."""

    byte_budget: int = Field(default=256 << 20, gt=0)
    """Bytes buffered, queued and in flight in one TaskManager before appends wait (Flink
    ``dstl.dfs.upload.max-in-flight``, 100 MB, which counts only what is being uploaded). Larger: rides out
    longer store hiccups; smaller: less memory (count about twice this while segments are encoded). A single
    append may be larger: it goes through alone."""

    inline_threshold: int = Field(default=256 << 10, ge=0)
    """A seal of at most this many bytes (encoded) travels to the coordinator and is written inside the
    manifest: no PUT of its own. Larger: fewer requests, and a checkpoint waits for one store round trip instead
    of two; smaller: smaller manifests, which every restart reads. 0 turns it off."""

    compression_level: int = Field(default=1, ge=-5, le=19)
    """zstd level of a block. Level 1 keeps within 2 % of level 3's ratio at twice its speed; negative levels
    are faster still and 15-25 % larger."""


class UploadOptions(_Options):
    """Upload of one object into the store."""

    max_attempts: int = Field(default=5, ge=1)
    """Attempts at one object, hedges not counted (Flink ``upload.max-attempts``, 3). More: rides out longer
    faults; fewer: the caller hears of a fault sooner and its bytes go back to the buffer."""

    attempt_timeout_s: float = Field(default=10.0, gt=0)
    """After this, plus ``size / min_throughput``, an attempt counts as lost and another begins (Flink
    ``upload.timeout``, 1 s, where it is the hedge as well; here hedging acts long before). Longer: a stuck
    attempt that nobody may hedge holds its checkpoint up longer; shorter: a slow store's attempts are thrown
    away just before they end, and paid twice."""

    min_throughput: float = Field(default=1e6, gt=0)
    """Bytes per second that an attempt may always take, on top of ``attempt_timeout_s``. Lower: large objects
    survive a thin network; higher: a stalled transfer of a large object is noticed sooner."""

    deadline_s: float = Field(default=60.0, gt=0)
    """After this the upload fails and its bytes go back to the buffer. Longer: fewer failed checkpoints in an
    outage; shorter: back-pressure and the operator's alarm come sooner."""

    backoff_base_s: float = Field(default=0.05, gt=0)
    """First back-off after a failure; doubles, with full jitter (Flink ``upload.next-attempt-delay``, 500 ms).
    Longer: kinder to a store in trouble; shorter: a single fault costs less."""

    throttle_backoff_s: float = Field(default=0.5, gt=0)
    """First back-off after a 503 SlowDown; doubles likewise, and more while 503s go on. Longer: each 503 is
    answered by fewer further requests, which are refused as well; shorter: a single 503 costs less."""

    backoff_cap_s: float = Field(default=5.0, gt=0)
    """Longest back-off. Longer: kinder to a store in trouble; shorter: faster return after it."""

    delete_grace_s: float = Field(default=5.0, ge=0)
    """How long after the end of an upload its losing attempts' objects are deleted: a cancelled PUT whose body
    has left still creates its object, a little later. Longer: fewer orphans for the cleaner; shorter: losers
    are paid for less long (5 s of storage cost nothing)."""

    delete_backlog: int = Field(default=10_000, ge=1)
    """Losing names remembered for deletion; beyond it they are left to the cleaner. More: memory (about 150
    bytes each); fewer: more orphans when the store cannot be reached."""


class HedgingOptions(_Options):
    """Second requests for objects whose first is late. See ``dstl/changelog/upload/hedging.py``."""

    enabled: bool = True
    """Off: every PUT waits for its first attempt up to ``attempt_timeout_s``; nothing extra is sent. On: about
    ``target`` more paid PUTs, and of small objects nearly as many more bytes, for a tail that is 50 to 75 % shorter at
    p999."""

    target: float = Field(default=0.036, gt=0, lt=1)
    """Share of PUTs that a hedge is wanted for: the delay is the latency that this share outlives. Larger:
    shorter tail, more paid PUTs; it must stay below ``budget``, or hedges are denied and wait out a stall."""

    budget: float = Field(default=0.043, gt=0, le=1)
    """Tokens that each finished PUT earns, for hedges and retries together; the same share holds for bytes. It
    bounds what hedging may ever cost, whatever the store does."""

    budget_burst: float = Field(default=12.0, ge=1)
    """Most tokens saved up. Larger: more stalls at once are hedged; smaller: a tighter bound on the worst minute."""

    max_hedges: int = Field(default=2, ge=1)
    """Hedges of one upload, one after the other. A second matters at p9999 only and costs under 0.3 % of the PUTs."""

    critical_quantile: float = Field(default=0.80, gt=0, lt=1)
    """Earliest delay, as a quantile of latency, for the uploads that a checkpoint waits for, reached when they
    are few among all uploads. Lower: hedges that save little; higher: a longer tail of checkpoints that mostly
    upload pre-emptively."""

    min_delay_s: float = Field(default=0.005, gt=0)
    """No hedge is sent before this. Lower: helps only stores faster than S3 Express; higher: hides their tail."""

    max_delay_s: float = Field(default=2.0, gt=0)
    """No hedge waits longer (AWS advises 2 s for small requests), unless three medians are longer. Lower:
    shorter tail in a very uneven store; higher: fewer hedges there."""

    cold_delay_s: float = Field(default=1.0, gt=0)
    """The delay while fewer than 20 PUTs of a size are known (Flink's fixed ``upload.timeout``). Lower: the
    first PUTs of a process are protected better; higher: fewer hedges where the store is simply slow."""

    throttle_pause_s: float = Field(default=1.0, gt=0)
    """After a 503 SlowDown nothing is hedged for so long; doubles while 503s go on, up to 64 times. Longer: the
    throttled store recovers sooner; shorter: hedging returns sooner."""

    warm_after_s: float = Field(default=10.0, gt=0)
    """When no hedge has used the hedges' connections for so long, one first attempt goes through them, which
    keeps them open at no cost. Shorter: always warm; longer: more first attempts keep the other pool's
    connections busy."""


class CheckpointOptions(_Options):
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


class ClusterOptions(_Options):
    """Coordinator and TaskManagers on another master than ``local[...]``."""

    host: str | None = None
    """The driver's address as executors and TaskManagers reach it. None: ``spark.driver.host``, which is right wherever
    Spark itself works; another is needed only where DSTL's port is reached by another name than Spark's."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the coordinator. 0: any free one, so that several drivers share a host. A fixed one can be opened in a
    firewall, and be told to a ``dstl taskmanager`` that is started by hand; but a second driver on the host is
    refused."""

    secret_file: str | None = None
    """File with the application's secret (at least 16 bytes of text, readable by its owner alone), shared with
    TaskManagers that are started by hand. None: a random one for each :class:`StateBackend`, which cannot leak; but
    then only the executors' own TaskManagers can register."""

    launch: bool = True
    """On: the first task on a host starts its TaskManager, which takes its memory beside the executor's
    (``spark.executor.memoryOverhead`` must allow for it where containers are limited). Off: nothing is started;
    ``task_managers`` of them have to be started by hand, and their operator replaces a lost one."""


class WorkerOptions(_Options):
    """Spark's Python workers that run the query's tasks."""

    freeze: bool = True
    """Whether a worker takes what it has imported out of the garbage collector's sight. PySpark forces a full
    collection after every task, which walks all that modules have left: 20 to 45 ms, as measured on one machine. On:
    workers freeze what lives after their first tasks, and after one that has imported something (:func:`gc.freeze`,
    after a collection); a cycle that was in use at one of these moments is never collected in that worker. Off: every
    task pays, and the collector sees everything: for processors that keep large cyclic structures from task to task,
    and drop them later."""


class MemoryOptions(_Options):
    """Memory of a TaskManager. What would outgrow it is refused (``StateTooLarge``), and the query ends with its last
    checkpoint, before the host kills the process."""

    limit_bytes: int | None = Field(default=None, gt=0)
    """Most resident memory of a TaskManager's process. Larger: more state in memory; smaller: more is left to the
    executors beside it. Leave a fifth for what comes and goes: uploads, base files, a restore. None: only
    ``reserve_bytes`` limits it."""

    reserve_bytes: int = Field(default=256 << 20, ge=0)
    """What the host, or the container, must have left (Linux only). More: whatever else runs there has more time to
    grow; less: more of the memory is of use. 0: it is not looked at."""


class MetricsOptions(_Options):
    """The driver's endpoint for metrics and its page."""

    port: int | None = Field(default=None, ge=0, le=65535)
    """Port of one small HTTP server in the driver: ``/metrics`` has the figures of the driver and of all TaskManagers
    for Prometheus (extra ``prometheus``), ``/`` a page for people (extra ``ui``). 0: any free one, which
    ``StateBackend.metrics_url`` tells. None: no server, and nothing is asked of TaskManagers. With it each look, by a
    scraper or an open page, costs one small message to each TaskManager."""

    host: str = "127.0.0.1"
    """Address it listens at. The loopback: it cannot be reached from outside the driver's host, which needs a scraper
    or an SSH tunnel there. Another: anyone who reaches it sees names of operators, sizes and times, though never state,
    for there is no password and no TLS."""


class TriggerOptions(_Options):
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


class MaterializationOptions(TriggerOptions):
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
    0700. None: ``dstl-cache-<uid>`` in the system's temporary directory. Best on the disk that has the TaskManager's
    temporary directory, for then RocksDB opens cached files without copying them."""

    cache_max_age_s: float = Field(default=3 * 86400.0, gt=0)
    """A cached file that was not used for so long goes, when the next one comes or a TaskManager starts. Longer: a job
    that pauses restarts faster; shorter: less disk for jobs that are gone."""

    publish_within_s: float = Field(default=300.0, gt=0)
    """A finished materialization is named by the next batch's checkpoint. Where none comes for so long, the last
    batch's is made again, which is a PUT more; and the end of a run (``StateBackend.close``) waits at most so long for
    materializations that run. Longer: jobs in short runs get their bases whatever the size of their state (some 10 to
    20 s per GB of a TaskManager); shorter: a process ends sooner, and the next run uploads the same again."""


class S3Options(_Options):
    """Access to S3. Credentials are no option: they come from the SDK's provider chain (environment, profile,
    web identity, container or instance role), so that no secret is ever in a configuration."""

    endpoint_url: str | None = None
    """Another server that speaks S3, as ``http://host:port``. None: AWS."""

    region: str | None = None
    """None: from the SDK's configuration, else found out by one redirected request per client."""

    addressing_style: Literal["path", "virtual"] | None = None
    """Bucket in the path or in the host name. None: path for another ``endpoint_url`` (it needs no wildcard DNS),
    virtual for AWS (where path is going away)."""

    max_connections: int = Field(default=64, ge=1)
    """Connections to S3 of one store; a request beyond it waits in the client, where neither hedge nor retry helps it.
    More: sockets and TLS handshakes; fewer: PUTs of one checkpoint queue behind each other."""

    connect_timeout_s: float = Field(default=3.0, gt=0)
    """Then a connection counts as refused: certainly nothing was stored. Longer: rides out packet loss; shorter: a new
    attempt sooner."""

    read_timeout_s: float = Field(default=30.0, gt=0)
    """Silence on a connection after which the answer counts as lost, and with it what became of a PUT. It backs up
    ``UploadOptions.attempt_timeout_s``, which acts first; reads have only this."""

    multipart_threshold: int = Field(default=32 << 20, ge=5 << 20, le=5 << 30)
    """Objects of at least this many bytes go up in parts, several at once. Smaller: faster single objects, but three
    requests more each (a PUT costs $5 per million); larger: a retry repeats more bytes. Manifests and savepoints'
    descriptors are put on condition that their name is free, and go up whole whatever their size."""

    multipart_part_size: int = Field(default=16 << 20, ge=5 << 20, le=5 << 30)
    """Bytes of one part (at most 10,000 parts make an object). Smaller: more requests; larger: less at once."""

    multipart_concurrency: int = Field(default=4, ge=1)
    """Parts of one object under way at once. More: faster, and more memory for copies."""

    sse_kms_key_id: str | None = None
    """KMS key (id, ARN or alias) for all objects. None: the bucket's default encryption. With a key every PUT and GET
    needs ``kms:GenerateDataKey`` or ``kms:Decrypt``; bucket keys are asked for, which makes KMS requests (and their
    cost, $3 per million) rare."""

    expected_bucket_owner: str | None = Field(default=None, pattern=r"^[0-9]{12}$")
    """AWS account that must own the bucket; every request is refused otherwise. It protects from a bucket that was
    deleted and taken by another owner."""

    @field_validator("endpoint_url")
    @classmethod
    def _without_secret(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith(("http://", "https://")) or "@" in value):
            raise ValueError("write http://host:port or https://host:port, without user or secret")
        return value


class SealingOptions(_Options):
    """Sealing of stored objects with a key, so that who can write to the bucket cannot forge state."""

    key_file: str | None = None
    """File with the key, as text of at least 32 bytes (``openssl rand -hex 32``), which its owner alone may read; on
    every host of the cluster, and wherever the command line is used, at this path. With it, every object carries a
    HMAC of each 16 KiB, 0.1 % more bytes, and some 1 ms of processor per MB written or read. Without it, checksums find
    damage and not forgery. A location is sealed from its first object on or never, and always with the same key."""


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
