"""The completed checkpoint: the body of a manifest.

A checkpoint names, per key group, everything that its state is made of: the materialized part of each operator first,
then the change sets that later checkpoints logged, in the order of :attr:`CompletedCheckpoint.segments`. Models are
frozen and validate what they are given, for a manifest is read back from a place that others may have written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, model_validator

from handles.key_group import MAX_MAX_PARALLELISM
from handles.materialized_handle import (
    Count,
    Frozen,
    MaterializedStateHandle,
    OperatorUid,
    WithKeyGroups,
    generations_of,
)
from handles.segment_handle import INITIAL_SQN, SegmentHandle, SequenceNumberRange

CheckpointId = int
"""The number of the checkpoint's manifest in the manifest log: dense, growing, never reused."""


class OperatorEntry(Frozen):
    """One stateful operator of the query.

    Attributes:
        uid: Its name, stable over restarts.
        parallelism: Partitions it ran with; may differ at the next restart.
        key_types: Spark types of the grouping columns, joined by commas.
        registry: Its states, as plain data (``dstl.state`` owns its meaning); empty before the first batch.
        watermark_ms: Its own event-time watermark, Unix milliseconds; None for an operator without event time.
    """

    uid: OperatorUid
    parallelism: Annotated[int, Field(ge=1)]
    key_types: str
    registry: dict[str, Any] = Field(default_factory=dict)
    watermark_ms: int | None = None


class LogEntry(WithKeyGroups):
    """One log: what one writer incarnation wrote for one operator.

    Attributes:
        log_id: Unique per incarnation.
        operator: The operator's uid.
        first_key_group: Lowest key group that the log may hold.
        last_key_group: Highest, included.
        from_sqn: First sequence number that is still there; everything below is in every base of these key groups. An
            open log may be listed without any segment, so that the next checkpoint still notices a gap.
    """

    log_id: str
    operator: OperatorUid
    from_sqn: Count = 0


class SegmentEntry(WithKeyGroups):
    """One segment and what of it belongs to the checkpoint.

    Attributes:
        segment: Where it lies: ``(name, size, checksum, offset)``.
        first_key_group: Lowest key group in it.
        last_key_group: Highest, included: a reader of other key groups need not open it.
        ranges: ``(index into logs, from_sqn, to_sqn)``: the accepted change sets, half-open. Whatever else the segment
            holds (a losing attempt's change sets) is not part of the checkpoint.
        checkpoint: The checkpoint that these change sets came with: they are replayed over a base of an earlier one,
            and are part of a base of this one or a later one. 0, unknown, only where there is no base at all.
    """

    segment: tuple[str, Count, Count, Count]
    ranges: tuple[tuple[Count, Count, Count], ...]
    checkpoint: Count = 0

    def objects(self) -> Iterator[str]:
        """Yield the name of the object that the entry needs."""
        yield self.segment[0]

    @property
    def handle(self) -> SegmentHandle:
        """The segment's place as a handle."""
        return SegmentHandle(*self.segment)


class TruncatedEntry(WithKeyGroups):
    """Key groups of one operator whose older log is gone.

    Attributes:
        operator: The operator's uid.
        first_key_group: Lowest of the key groups.
        last_key_group: Highest, included.
        checkpoint: What came with this checkpoint or an earlier one may be gone: no base is older than it.
    """

    operator: OperatorUid
    checkpoint: Count


class BatchState(Frozen):
    """The state of a query behind a batch: what a checkpoint and a savepoint of it have in common.

    Attributes:
        checkpoint_id: Number of its manifest.
        batch_id: The micro-batch whose effects it holds.
        query_id: Spark's query id: stable over restarts.
        max_parallelism: Number of key groups; fixed for the job's life.
        created_at: Unix seconds by the clock of who wrote it; shown to people, decides nothing.
        watermark_ms: Event-time watermark for the next batch, in Unix milliseconds; None where there is none.
        late_watermark_ms: The watermark of this batch itself: in the next one rows at or before it are late. As in
            Spark, what is late lags one batch behind what is due.
        batch_time_ms: The batch's processing time, Unix milliseconds: what it has when it runs again. A later batch
            has an earlier one only where the driver's clock was behind for long. None where it is not known.
        operators: The operators and their states.
    """

    checkpoint_id: CheckpointId
    batch_id: Annotated[int, Field(ge=-1)]
    query_id: str
    max_parallelism: Annotated[int, Field(ge=1, le=MAX_MAX_PARALLELISM)]
    created_at: float
    watermark_ms: int | None = None
    late_watermark_ms: int | None = None
    batch_time_ms: int | None = None
    operators: tuple[OperatorEntry, ...] = ()

    def of_the_batch(self) -> dict[str, Any]:
        """Return these fields alone, by name."""
        return {name: getattr(self, name) for name in BatchState.model_fields}


class CompletedCheckpoint(BatchState):
    """A checkpoint that can be restored.

    Invariants:
        1. Every segment range names a log of :attr:`logs`; per log the ranges are contiguous from ``from_sqn``, without
           gap or overlap, and ascend along :attr:`segments`, which are replayed in this order. A segment is listed
           again where its change sets belong both before and after another's.
        2. Key groups lie in ``[0, max_parallelism)``.
        3. Replay order per key group is: a base, then every segment that came with a later checkpoint than the base, in
           list order (which is the order of the checkpoints). It must be exact: an older change that was replayed over
           a newer base would come back, where the newer changes of another log are truncated already.
        4. Whatever is of an operator is of one of :attr:`operators`, of which no two have one name.
        5. Where log is truncated, every base of the key group is at least as new as what was cut off: any of them, with
           the log that is there, is the whole state.

    Attributes:
        run_id: Spark's run id: new at every start.
        parent: The checkpoint it was built on; None for the first.
        held_since_ms: What the driver's clock said when time began to stand still at an earlier batch's; None where it
            did not.
        sequence_base: Added to the numbers of the log that tasks order list elements by: in a job that began with a
            savepoint they go on from the job that it was made of.
        logged_at: ``(checkpoint, Unix seconds by its driver's clock)`` of every checkpoint that :attr:`segments` came
            with: how old the log is. Empty in checkpoints of before it was kept.
    """

    run_id: str
    parent: CheckpointId | None = None
    held_since_ms: int | None = None
    sequence_base: Count = 0
    materialized: tuple[MaterializedStateHandle, ...] = ()
    truncated: tuple[TruncatedEntry, ...] = ()
    logs: tuple[LogEntry, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    logged_at: tuple[tuple[Count, Count], ...] = ()

    @model_validator(mode="after")
    def _covered(self) -> CompletedCheckpoint:
        for entry in self.logs:
            if entry.last_key_group >= self.max_parallelism or entry.last_key_group < entry.first_key_group:
                raise ValueError(f"log {entry.log_id} has key groups outside [0, {self.max_parallelism})")
        if len({entry.log_id for entry in self.logs}) != len(self.logs):
            raise ValueError("a log is listed twice")
        for part in self.segments:
            if not part.first_key_group <= part.last_key_group < self.max_parallelism:
                raise ValueError(f"segment {part.segment[0]} has key groups outside [0, {self.max_parallelism})")
        _check_operators(self)
        log_coverage(self)
        _check_bases(self)
        return self

    def sizes(self) -> dict[object, int]:
        """Return the bytes of everything that it refers to, each object of bases and each segment once."""
        return {s.segment: s.segment[1] for s in self.segments} | dict(b for m in self.materialized for b in m.sizes())

    @property
    def full_bytes(self) -> int:
        """Bytes of everything that the checkpoint refers to: the older generation of bases and its log included."""
        return sum(self.sizes().values())


def log_coverage(checkpoint: CompletedCheckpoint) -> dict[str, SequenceNumberRange]:
    """Return the sequence numbers that a checkpoint holds of each log: half-open, contiguous.

    Raises:
        ValueError: A log has a gap, an overlap, change sets out of order, or a range that names no log.
    """
    # Plain numbers: a checkpoint may have as many ranges as logs times segments, and this runs at each commit.
    following = [entry.from_sqn for entry in checkpoint.logs]
    for segment in checkpoint.segments:
        for log, from_sqn, to_sqn in segment.ranges:
            if log >= len(following):
                raise ValueError(f"checkpoint {checkpoint.checkpoint_id} refers to a log that it does not list")
            if from_sqn != following[log] or to_sqn <= from_sqn:
                what = "a gap" if from_sqn > following[log] else "an overlap or disorder"
                raise ValueError(
                    f"checkpoint {checkpoint.checkpoint_id} has {what} in log {checkpoint.logs[log].log_id}: "
                    f"[{from_sqn}, {to_sqn}) of {segment.segment[0]} comes where {following[log]} is due"
                )
            following[log] = to_sqn
    covered: dict[str, SequenceNumberRange] = {}
    for entry, end in zip(checkpoint.logs, following, strict=True):
        if end == INITIAL_SQN:
            raise ValueError(f"checkpoint {checkpoint.checkpoint_id} has a gap: it holds nothing of log {entry.log_id}")
        covered[entry.log_id] = SequenceNumberRange(entry.from_sqn, end)
    return covered


def _check_operators(checkpoint: CompletedCheckpoint) -> None:
    """Check that bases, logs and truncations are of operators that the checkpoint lists.

    Raises:
        ValueError: One is not, or an operator is listed twice.
    """
    listed = {entry.uid for entry in checkpoint.operators}
    if len(listed) != len(checkpoint.operators):
        raise ValueError(f"checkpoint {checkpoint.checkpoint_id} lists an operator twice")
    named = {each.operator for each in checkpoint.materialized} | {each.operator for each in checkpoint.logs}
    for operator in sorted((named | {each.operator for each in checkpoint.truncated}) - listed):
        raise ValueError(
            f"checkpoint {checkpoint.checkpoint_id} has state of {operator}, an operator that it does not list"
        )


def _check_bases(checkpoint: CompletedCheckpoint) -> None:
    """Check that bases and log together leave no gap, for every base that a restore may choose.

    Raises:
        ValueError: They do; or a base or a segment cannot be of this checkpoint.
    """
    here = f"checkpoint {checkpoint.checkpoint_id}"
    if any(s.checkpoint > checkpoint.checkpoint_id for s in checkpoint.segments):
        raise ValueError(f"{here} has a segment of a later checkpoint")
    if any(a.checkpoint > b.checkpoint for a, b in zip(checkpoint.segments, checkpoint.segments[1:], strict=False)):
        raise ValueError(f"{here} lists its segments in another order than that of their checkpoints")
    generations = generations_of(checkpoint.materialized)
    if generations and any(not s.checkpoint for s in checkpoint.segments):
        raise ValueError(f"{here} has bases, and a segment that does not say which checkpoint it came with")
    for handle in checkpoint.materialized:
        if handle.checkpoint > checkpoint.checkpoint_id or handle.parts[-1][0] >= checkpoint.max_parallelism:
            raise ValueError(f"{here} has a base of a later checkpoint or beyond its key groups: {handle.name}")
    cut: dict[str, set[int]] = {}
    for entry in checkpoint.truncated:
        bases_of = generations.get(entry.operator, {})
        for group in entry.key_groups:
            bases = bases_of.get(group, ())
            if not bases or bases[-1].checkpoint < entry.checkpoint:
                raise ValueError(
                    f"{here} has a gap: the log of {entry.operator}, key group {group}, is gone up to checkpoint "
                    f"{entry.checkpoint}, and {'its oldest base is older' if bases else 'it has no base'}"
                )
        cut.setdefault(entry.operator, set()).update(entry.key_groups)
    for log in checkpoint.logs:
        if log.from_sqn and not cut.get(log.operator, set()).issuperset(log.key_groups):
            raise ValueError(f"{here} has a gap: log {log.log_id} begins at {log.from_sqn} without bases below it")


def referenced_objects(checkpoint: CompletedCheckpoint) -> Iterator[str]:
    """Yield the name of every object that a checkpoint needs, manifests that hold inlined segments included."""
    for entry in checkpoint.segments:
        yield from entry.objects()
    for handle in checkpoint.materialized:
        yield from handle.objects()
