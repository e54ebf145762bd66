"""Options of the changelog: when it is sealed, and how objects get into the store."""

from __future__ import annotations

from pydantic import Field

from dstl.options.section import OptionSection


class BatchingOptions(OptionSection, frozen=True):
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


class UploadOptions(OptionSection, frozen=True):
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


class HedgingOptions(OptionSection, frozen=True):
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
