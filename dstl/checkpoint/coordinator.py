"""The checkpoint coordinator's decisions, without any I/O: who may work, whose changes count, when a checkpoint starts.

A micro-batch is a checkpoint. Every task of every stateful operator begins, works and acknowledges; the
acknowledgement that completes the expected set triggers the checkpoint and waits for it. Spark retries tasks, runs
speculative copies and re-runs whole batches, so each kind of extra message has a defined answer:

==================================================  =====================================================
a message                                            its answer
==================================================  =====================================================
of a run that another has replaced                   ``Fenced``
of a batch before the current one                    ``Fenced``
of a batch before the newest checkpoint's            ``Fenced``: its driver has planned it long ago
of a batch whose predecessor has no checkpoint       ``MissingState``: nothing sound to build on
second acknowledgement with the same changes         counted once
of a speculative copy that began before the first    superseded: its changes are dropped, its task ends well
of a retry that began after it                       replaces it (Spark has dropped the first one's output)
of another stage, no stage's set being complete      counts in a set of its own: sets are never mixed half-way
of another stage, the operator's set being complete  equal changes are counted once, others replace a partition's
after the checkpoint, replacing one partition        the checkpoint is made again from the same parent
any, the set being complete                          waits for the checkpoint: Spark may commit the batch once it ends
==================================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dstl.errors import CheckpointDeclined, DstlError, Fenced, Invalid, MissingState, Superseded
from handles.checkpoint import CheckpointId, CompletedCheckpoint

__all__ = ["Acknowledgement", "CheckpointCoordinator", "Decision", "TaskAttempt", "Trigger"]


@dataclass(frozen=True, slots=True)
class TaskAttempt:
    """One execution of one task.

    Attributes:
        query_id: Spark's query id: stable over restarts.
        run_id: Spark's run id: new at every start.
        operator: The operator's uid.
        batch_id: The micro-batch.
        slot: The task's index in its stage; not the partition, because a union shifts it.
        stage_id: Spark's stage id.
        attempt_id: Spark's task attempt id: unique in the application.
        invocation: Of our function; one attempt calls it once, unless partitions were merged behind the operator.
    """

    query_id: str
    run_id: str
    operator: str
    batch_id: int
    slot: int
    stage_id: int
    attempt_id: int
    invocation: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A task says that its change set is complete and held by the TaskManagers.

    Attributes:
        task: Who.
        partition: The operator's partition that the task's keys belong to; None where it had no row.
        digest: Digest of the change set, empty where there is none: equal digests are equal changes.
        event_time_ms: Latest event time among its rows, Unix milliseconds; None where there is none.
    """

    task: TaskAttempt
    partition: int | None
    digest: bytes
    event_time_ms: int | None = None


class Decision(Enum):
    """What an acknowledgement leads to."""

    GO_ON = "the set is not complete yet: the task may end"
    WAIT = "the set is complete: the task waits for the checkpoint"
    SUPERSEDED = "another attempt's changes count: the task may end"


@dataclass(frozen=True, slots=True)
class Trigger:
    """A checkpoint to make.

    Attributes:
        run_id: The run that it belongs to.
        batch_id: The micro-batch.
        version: Which set of winners it is made of; a later replacement makes another.
        parent: The checkpoint it builds on; None for the first.
        winners: Per operator, the attempts whose changes count.
    """

    run_id: str
    batch_id: int
    version: int
    parent: CheckpointId | None
    winners: Mapping[str, tuple[int, ...]]


_Set = dict[tuple[int, int], tuple[Acknowledgement, int]]
"""Accepted acknowledgements and when they came, by stage and slot."""


@dataclass(slots=True)
class _Operator:
    parallelism: int
    began: dict[int, int] = field(default_factory=dict)
    invocations: dict[int, str] = field(default_factory=dict)
    collected: dict[int, _Set] = field(default_factory=dict)
    winners: _Set | None = None

    @property
    def best(self) -> _Set:
        """The complete set, or else the one that has most."""
        if self.winners is not None:
            return self.winners
        return max(self.collected.values(), key=len, default={})

    @property
    def is_complete(self) -> bool:
        # It stays so: another stage's attempt only ever takes the place of the same partition's, and may be the one
        # that the offset of a task without rows was read off.
        return self.winners is not None


def _covers(accepted: _Set, parallelism: int) -> bool:
    """True where every partition has acknowledged.

    A task without rows does not know its partition, but tasks of one union branch are as far from their partitions as
    those with rows are. (A DataFrame that is in a union with itself has two branches in one stage.)
    """
    partitions = {ack.partition for ack, _ in accepted.values() if ack.partition is not None}
    rowless = [(stage, slot) for (stage, slot), (ack, _) in accepted.items() if ack.partition is None]
    if not partitions:
        return len(rowless) >= parallelism
    offsets = {(s, slot - ack.partition) for (s, slot), (ack, _) in accepted.items() if ack.partition is not None}
    for stage, slot in rowless:
        partitions |= {slot - offset for s, offset in offsets if s == stage and 0 <= slot - offset < parallelism}
    return len(partitions) >= parallelism


@dataclass(slots=True)
class _Batch:
    batch_id: int
    parent: CompletedCheckpoint | None
    operators: dict[str, _Operator]
    time_ms: int
    clock: int = 0
    version: int = 0
    completed_version: int = 0
    failure: DstlError | None = None

    @property
    def is_complete(self) -> bool:
        return all(op.is_complete for op in self.operators.values())


class CheckpointCoordinator:
    """The state machine of one query's checkpoints. Pure and single-threaded.

    Invariants:
        1. At most one attempt's changes count per operator and partition of a batch.
        2. A trigger's winners cover every task of every operator.
        3. A batch is only begun on the checkpoint of the batch before it.

    Args:
        operators: Parallelism of each stateful operator, known from their construction.
    """

    def __init__(self, operators: Mapping[str, int]) -> None:
        self._parallelism = dict(operators)
        self._run: str | None = None
        self._retired: set[str] = set()
        self._batch: _Batch | None = None
        self._accept_older = False
        self._completed: list[CompletedCheckpoint] = []

    @property
    def run_id(self) -> str | None:
        """The run that may work; None before the first."""
        return self._run

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """Retained checkpoints, oldest first."""
        return tuple(self._completed)

    def open_run(self, run_id: str, completed: Iterable[CompletedCheckpoint], *, accept_older: bool = False) -> None:
        """Let a run work, from the checkpoints that were found; every other run is fenced from now on.

        Args:
            run_id: The run.
            completed: The checkpoints.
            accept_older: The run's first batch may go on from the newest checkpoint before it, where the batch just
                before it has none: the effects of the batches in between are lost.
        """
        self._accept_older = accept_older
        if self._run is not None:
            self._retired.add(self._run)
        self._run = run_id
        self._batch = None
        self._completed = sorted(completed, key=lambda each: each.checkpoint_id)

    @property
    def batch_time_ms(self) -> int:
        """The processing time of the current batch: the same for all its tasks, however often they run."""
        return self._batch.time_ms if self._batch else 0

    def begin(self, task: TaskAttempt, now_ms: int) -> CompletedCheckpoint | None:
        """Let a task work and return the checkpoint it builds on; None for an empty state.

        Args:
            task: Who asks.
            now_ms: Unix milliseconds; the first task's becomes the batch's time, unless the batch has run before.

        Raises:
            Fenced: Its run or batch is over.
            MissingState: The batch before it has no checkpoint.
            Invalid: The operator is not one of this backend's, or the attempt has another partition already.
            DstlError: The batch has already failed.
        """
        batch = self._batch_of(task, now_ms)
        operator = batch.operators[task.operator]
        if operator.invocations.setdefault(task.attempt_id, task.invocation) != task.invocation:
            raise Invalid(
                f"one Spark task runs several partitions of operator {task.operator!r}, as a coalesce() behind it has "
                "it: take it out, or write repartition() instead"
            )
        batch.clock += 1
        operator.began[task.attempt_id] = batch.clock
        return batch.parent

    def acknowledge(self, ack: Acknowledgement) -> Decision:
        """Count a task's change set, or say why not.

        Raises:
            Fenced: Its run, batch or attempt is over.
            DstlError: The batch has already failed.
        """
        task = ack.task
        batch = self._batch_of(task)
        operator = batch.operators[task.operator]
        began = operator.began.get(task.attempt_id)
        if began is None:
            raise Superseded(f"attempt {task.attempt_id} of {task.operator} never began in batch {task.batch_id}")
        accepted = operator.winners
        if accepted is None:
            accepted = operator.collected.setdefault(task.stage_id, {})
        decision = self._accept(batch, accepted, ack, began)
        if operator.winners is None and _covers(accepted, operator.parallelism):
            operator.winners = accepted
            operator.collected.clear()
        return Decision.WAIT if batch.is_complete else decision

    def _accept(self, batch: _Batch, accepted: _Set, ack: Acknowledgement, began: int) -> Decision:
        task = ack.task
        own = (task.stage_id, task.slot)
        rivals = {
            key: other
            for key, other in accepted.items()
            if key == own or (ack.partition is not None and other[0].partition == ack.partition)
        }
        for other, since in rivals.values():
            if (other.partition, other.digest) == (ack.partition, ack.digest):
                return Decision.GO_ON
            if other.task.attempt_id != task.attempt_id and began < since:
                return Decision.SUPERSEDED
        if ack.partition is None and not rivals and batch.operators[task.operator].winners is not None:
            # No row in another stage than the one that counts: there is nothing to replace.
            return Decision.GO_ON
        for key in rivals:
            del accepted[key]
        batch.clock += 1
        batch.version += 1
        accepted[own] = (ack, batch.clock)
        return Decision.GO_ON

    def trigger(self) -> Trigger | None:
        """Return the checkpoint that is due, or None where none is: the set is incomplete or already checkpointed.

        Raises:
            DstlError: The batch has failed since its set was complete.
        """
        batch = self._batch
        if batch is None or not batch.is_complete or batch.version == batch.completed_version:
            return None
        _raise_failure(batch)
        winners = {
            uid: tuple(ack.task.attempt_id for _, (ack, _) in sorted((operator.winners or {}).items()))
            for uid, operator in batch.operators.items()
        }
        parent = batch.parent.checkpoint_id if batch.parent else None
        return Trigger(self._run or "", batch.batch_id, batch.version, parent, winners)

    def event_times(self) -> dict[str, int]:
        """Return, by operator, the latest event time that the counted attempts of the current batch have seen."""
        latest: dict[str, int] = {}
        for uid, operator in (self._batch.operators if self._batch else {}).items():
            seen = [ack.event_time_ms for ack, _ in operator.best.values() if ack.event_time_ms is not None]
            if seen:
                latest[uid] = max(seen)
        return latest

    def complete(self, trigger: Trigger, checkpoint: CompletedCheckpoint, retain: int) -> list[CompletedCheckpoint]:
        """Take a committed checkpoint and return those that are subsumed by it, newest first.

        A checkpoint of the same batch that it replaces is subsumed at once. The parent is always kept, and never are
        fewer than two restorable batches left once there were two.

        Raises:
            Fenced: Another run has begun since the trigger; whether the checkpoint counts, that run has decided.
        """
        if trigger.run_id != self._run:
            raise Fenced(f"run {trigger.run_id} is over: run {self._run} has replaced it")
        if self._batch is not None and self._batch.batch_id == trigger.batch_id:
            self._batch.completed_version = trigger.version
        kept, subsumed = self._retention(checkpoint.batch_id, retain)
        self._completed = [*kept, checkpoint]
        return sorted(subsumed, key=lambda each: each.checkpoint_id, reverse=True)

    def oldest_after(self, trigger: Trigger, retain: int) -> CheckpointId:
        """Return the oldest checkpoint that stays when the triggered one completes; 0 where none does.

        It is the cleanup boundary that the new record carries: see ``ManifestRecord.oldest``.
        """
        kept, _ = self._retention(trigger.batch_id, retain)
        return kept[0].checkpoint_id if kept else 0

    def _retention(self, batch_id: int, retain: int) -> tuple[list[CompletedCheckpoint], list[CompletedCheckpoint]]:
        """Return what stays and what is subsumed once a checkpoint of this batch completes."""
        replaced = [c for c in self._completed if c.batch_id >= batch_id]
        before = [c for c in self._completed if c.batch_id < batch_id]
        cut = max(0, len(before) + 1 - max(2, retain))
        return before[cut:], [*before[:cut], *replaced]

    def fail_batch(self, error: DstlError) -> None:
        """Void the current batch where it has acknowledged changes, for they are lost.

        Every further message of the batch raises ``error``; the next batch is not touched, for a completed checkpoint
        has lost nothing.
        """
        if self._batch is not None and any(op.best for op in self._batch.operators.values()):
            self._batch.failure = error

    def _batch_of(self, task: TaskAttempt, now_ms: int | None = None) -> _Batch:
        if task.run_id != self._run:
            raise Fenced(f"run {task.run_id} of query {task.query_id} is over: run {self._run} has replaced it")
        if task.operator not in self._parallelism:
            raise Invalid(f"operator {task.operator!r} is not one of this backend's: {', '.join(self._parallelism)}")
        batch = self._batch
        if batch is None or task.batch_id > batch.batch_id:
            if now_ms is None:
                raise Superseded(f"attempt {task.attempt_id} of {task.operator} never began in batch {task.batch_id}")
            batch = self._open_batch(task, now_ms)
        if task.batch_id < batch.batch_id:
            raise Superseded(f"batch {task.batch_id} is over: batch {batch.batch_id} has begun")
        _raise_failure(batch)
        return batch

    def _open_batch(self, task: TaskAttempt, now_ms: int) -> _Batch:
        newest = self._completed[-1] if self._completed else None
        if newest is not None and newest.batch_id > task.batch_id:
            # Spark replays the last batch at most, so this driver's plan is older than the state: a checkpoint of its
            # batch would void everything that another driver has completed since.
            raise Fenced(
                f"run {task.run_id} runs batch {task.batch_id}, and the state is at batch {newest.batch_id} "
                f"(checkpoint {newest.checkpoint_id}) already: another driver has gone on meanwhile, or Spark's "
                "checkpoint directory was set back. Keep the newer driver; to go back on purpose, start from a "
                "savepoint"
            )
        before = [c for c in self._completed if c.batch_id == task.batch_id - 1]
        if not before and self._batch is None and self._accept_older:
            before = [c for c in self._completed if c.batch_id < task.batch_id]
        if not before and task.batch_id != 0:
            # An empty state is sound for batch 0 alone: every later batch has a predecessor with effects.
            raise self._no_parent(task.batch_id)
        operators = {uid: _Operator(parallelism) for uid, parallelism in self._parallelism.items()}
        parent = before[-1] if before else None
        self._batch = _Batch(task.batch_id, parent, operators, self._time_of(task.batch_id, parent, now_ms))
        return self._batch

    def _time_of(self, batch_id: int, parent: CompletedCheckpoint | None, now_ms: int) -> int:
        """Return the batch's time: its own where it has been checkpointed, for a sink may have what it made then."""
        ran = [c.batch_time_ms for c in self._completed if c.batch_id == batch_id and c.batch_time_ms is not None]
        if ran:
            return ran[-1]
        return max(now_ms, parent.batch_time_ms or 0) if parent else now_ms

    def _no_parent(self, batch_id: int) -> DstlError:
        batch = self._batch
        if batch is not None and batch.batch_id == batch_id - 1:
            missing = ", ".join(
                f"{uid} ({len(op.best)} of {op.parallelism} tasks)"
                for uid, op in batch.operators.items()
                if not op.is_complete
            )
            return CheckpointDeclined(
                f"batch {batch.batch_id} ended without a checkpoint; tasks missing: {missing or 'none'}"
                ". The sink must consume the whole output: limit() or head() in foreachBatch leaves tasks out"
            )
        held = ", ".join(str(c.batch_id) for c in self._completed) or "none"
        return MissingState(
            f"batch {batch_id} needs the checkpoint of batch {batch_id - 1}, and there is none (held: {held}). Spark's "
            "checkpoint directory and the state location do not belong together, or one of them was cleared: "
            "restore both, or start with a new directory and a new location"
        )


def _raise_failure(batch: _Batch) -> None:
    """Raise the batch's failure as a new error: one that many tasks raise would grow with each."""
    if batch.failure is not None:
        raise type(batch.failure)(*batch.failure.args)
