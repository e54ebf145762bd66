"""The checkpoint coordinator's decisions, without any I/O: who may work, whose changes count, when a checkpoint starts.

A micro-batch is a checkpoint. Every task of every stateful operator begins, works and acknowledges; the
acknowledgement that completes the expected set triggers the checkpoint and waits for it. Spark retries tasks, runs
speculative copies, computes a DataFrame twice and re-runs whole batches, so each kind of extra message has a defined
answer:

======================================================  ============================================================
a message                                               its answer
======================================================  ============================================================
of a run that another has replaced                      ``Fenced``
of a batch before the current one                       ``Fenced``
of a batch before the newest checkpoint's               ``Fenced``: its driver has planned it long ago
of a batch whose predecessor has no checkpoint, but     the checkpoint is made first: all that it needs is still there
every partition acknowledged in this run
of a batch whose predecessor has no checkpoint          ``MissingState``: nothing sound to build on
acknowledgement with changes that count already         counted once, of whatever attempt, task or stage
with other changes than another task's of its           the batch fails, ``NotDeterministic``: Spark uses both outputs
partition: another stage or union branch
with other changes than an attempt of its own task      replaces it: Spark has dropped the other's output
whose connection had ended when this one began
with other changes than any other of its own task       the batch fails, ``CheckpointDeclined``: Spark may keep either
after the checkpoint, replacing an attempt              the checkpoint is made again from the same parent
any, every partition being acknowledged                 waits for the checkpoint: Spark may commit once it ends
any, the batch having failed                            the batch's error, until another run begins
======================================================  ============================================================

Partitions may be acknowledged by tasks of different stages: an action that consumes its input piece by piece
(``toLocalIterator``, ``take`` and then all) has a stage for each piece, and all of them agree.

In a run that is *committed by Spark* (``dstl/checkpoint/spark_commit.py``) acknowledgements decide nothing: the highest
attempt of each partition counts, and ``commits/N`` triggers the checkpoint, or is refused where a partition is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from dstl.checkpoint.acknowledgements import Acknowledgements
from dstl.checkpoint.batch_time import BatchTime
from dstl.checkpoint.finished_attempts import FinishedAttempts
from dstl.crash_points import reach
from dstl.errors import CheckpointDeclined, DstlError, Fenced, Invalid, MissingState, Superseded
from dstl.rpc.messages import Acknowledgement, TaskAttempt
from handles.checkpoint import CheckpointId, CompletedCheckpoint

__all__ = ["CheckpointCoordinator", "Decision", "Trigger", "nobody_consumed"]


class Decision(Enum):
    """The answer to an acknowledgement."""

    GO_ON = "the set is not complete yet: the task may end"
    WAIT = "the set is complete: the task waits for the checkpoint"


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


@dataclass(slots=True)
class _Batch:
    batch_id: int
    parent: CompletedCheckpoint | None
    operators: Mapping[str, Acknowledgements | FinishedAttempts]
    time: BatchTime
    version: int = 0
    completed_version: int = 0
    failure: DstlError | None = None

    @property
    def is_complete(self) -> bool:
        return all(op.is_complete for op in self.operators.values())

    @property
    def is_overdue(self) -> bool:
        """True where changes count that no checkpoint of the batch has, if there is one."""
        return self.completed_version not in (0, self.version)


class CheckpointCoordinator:
    """The state machine of one query's checkpoints. Pure and single-threaded.

    Invariants:
        1. At most one attempt's changes count per operator and partition of a batch.
        2. A trigger's winners cover every task of every operator.
        3. A batch is only begun on the checkpoint of the batch before it.

    Args:
        operators: Parallelism of each stateful operator, known from their construction.
        by_commit: Spark's own commit triggers the checkpoints, and not the acknowledgements.
        clock_hold_ms: See :meth:`BatchTime.after`.
    """

    def __init__(self, operators: Mapping[str, int], *, by_commit: bool = False, clock_hold_ms: int = 0) -> None:
        self._parallelism = dict(operators)
        self.by_commit = by_commit
        self._clock_hold_ms = clock_hold_ms
        self._clock_warning: str | None = None
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

    def has_checkpoint(self, batch_id: int) -> bool:
        """Return True where this is the current batch, and its checkpoint holds all that its tasks acknowledged.

        Where Spark's commit makes the checkpoint: where it can be made.
        """
        batch = self._batch
        return (
            batch is not None
            and batch.batch_id == batch_id
            and batch.is_complete
            and (self.by_commit or batch.version == batch.completed_version)
            and batch.failure is None
        )

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
    def batch_time(self) -> BatchTime:
        """The processing time of the current batch: the same for all its tasks, however often they run."""
        return self._batch.time if self._batch else BatchTime(0)

    def take_clock_warning(self) -> str | None:
        """Return, once, what to tell of the clock by which the current batch has begun."""
        warning, self._clock_warning = self._clock_warning, None
        return warning

    def begin(
        self, task: TaskAttempt, now_ms: int, is_alive: Callable[[int], bool] = lambda attempt_id: True
    ) -> CompletedCheckpoint | None:
        """Let a task work and return the checkpoint it builds on; None for an empty state.

        Args:
            task: Who asks.
            now_ms: Unix milliseconds; the first task's becomes the batch's time, unless the batch has run before.
            is_alive: Tells of an attempt id whether that attempt can still be running.

        Raises:
            Fenced: Its run or batch is over.
            MissingState: The batch before it has no checkpoint.
            Invalid: The operator is not one of this backend's, or the attempt has another partition already.
            DstlError: The batch has already failed.
        """
        batch = self._batch_of(task, now_ms)
        batch.operators[task.operator].begin(task, is_alive)
        return batch.parent

    def number_of(self, task: TaskAttempt) -> int:
        """Return the number that an attempt which has begun goes by from now on, with TaskManagers too."""
        return self._batch_of(task).operators[task.operator].begin(task, lambda attempt_id: True)

    def acknowledge(self, ack: Acknowledgement) -> Decision:
        """Count a task's change set.

        Raises:
            Fenced: Its run, batch or attempt is over.
            NotDeterministic, CheckpointDeclined: It differs from another attempt's: the batch has failed.
            DstlError: The batch has already failed.
        """
        task = ack.task
        batch = self._batch_of(task)
        operator = batch.operators[task.operator]
        if not operator.began(task.attempt_id):
            raise Superseded(f"attempt {task.attempt_id} of {task.operator} never began in batch {task.batch_id}")
        if self.by_commit and batch.completed_version:
            return Decision.GO_ON  # Spark has committed the batch: it comes too late to count
        try:
            batch.version += operator.add(ack)
        except DstlError as error:
            batch.failure = error
            _raise_failure(batch)
        reach("C2")
        return Decision.WAIT if not self.by_commit and batch.is_complete else Decision.GO_ON

    def check_complete(self, batch_id: int) -> None:
        """Check that every operator was run to its end in a batch that Spark is about to commit.

        Raises:
            Invalid: One was not run at all.
            CheckpointDeclined: One was run in part.
            DstlError: The batch has failed.
        """
        batch = self._batch
        if batch is None or batch.batch_id != batch_id:
            raise nobody_consumed(batch_id, self._parallelism)
        _raise_failure(batch)
        missing = {uid: op for uid, op in batch.operators.items() if not op.is_complete}
        idle = [uid for uid, op in missing.items() if not op.has_begun]
        if idle:
            raise nobody_consumed(batch_id, idle)
        if missing:
            parts = ", ".join(f"{uid!r} ({op.covered} of {op.parallelism} partitions)" for uid, op in missing.items())
            raise CheckpointDeclined(
                f"batch {batch_id} is not committed, for the output of operator {parts} was not consumed to its end: a "
                "sink that catches its own errors, or a limit, has left tasks out. Start the query again, and Spark "
                "replays the batch"
            )

    def trigger(self) -> Trigger | None:
        """Return the checkpoint that is due, or None where none is: the set is incomplete or already checkpointed.

        Raises:
            DstlError: The batch has failed since its set was complete.
        """
        batch = self._batch
        if batch is None or not batch.is_complete or batch.version == batch.completed_version:
            return None
        _raise_failure(batch)
        winners = {uid: operator.winners() for uid, operator in batch.operators.items()}
        parent = batch.parent.checkpoint_id if batch.parent else None
        return Trigger(self._run or "", batch.batch_id, batch.version, parent, winners)

    def overdue(self, task: TaskAttempt) -> Trigger | None:
        """Return the checkpoint that has to be made before this task's batch can begin; None where there is none.

        Spark has committed the batch before, which every partition acknowledged and whose checkpoint failed unseen (a
        sink may catch errors). Its changes are there until a task of the next batch opens its state.
        """
        batch = self._batch
        if (
            batch is None
            or self.by_commit
            or task.run_id != self._run
            or task.batch_id != batch.batch_id + 1
            or batch.failure is not None
        ):
            return None
        return self.trigger()

    def event_times(self) -> dict[str, int]:
        """Return, by operator, the latest event time that the counted attempts of the current batch have seen."""
        operators = self._batch.operators if self._batch else {}
        latest = {uid: operator.latest_event_time_ms for uid, operator in operators.items()}
        return {uid: time_ms for uid, time_ms in latest.items() if time_ms is not None}

    def late_rows(self) -> dict[str, int]:
        """Return, by operator, how many rows the counted attempts of the current batch have dropped as late."""
        operators = self._batch.operators if self._batch else {}
        counts = {uid: operator.late_rows for uid, operator in operators.items()}
        return {uid: count for uid, count in counts.items() if count}

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
            # What ended while the record of Spark's commit was on its way is no output that Spark keeps.
            self._batch.completed_version = self._batch.version if self.by_commit else trigger.version
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
        if self._batch is not None and any(op.any for op in self._batch.operators.values()):
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
        if self._batch is not None and self._batch.batch_id == task.batch_id - 1 and self._batch.is_overdue:
            before = []  # what it has been replaced by since is what Spark has kept
        if not before and self._batch is None and self._accept_older:
            before = [c for c in self._completed if c.batch_id < task.batch_id]
        if not before and task.batch_id != 0:
            # An empty state is sound for batch 0 alone: every later batch has a predecessor with effects.
            raise self._no_parent(task.batch_id)
        kind = FinishedAttempts if self.by_commit else Acknowledgements
        operators = {uid: kind(parallelism) for uid, parallelism in self._parallelism.items()}
        parent = before[-1] if before else None
        self._batch = _Batch(task.batch_id, parent, operators, self._time_of(task.batch_id, parent, now_ms))
        return self._batch

    def _time_of(self, batch_id: int, parent: CompletedCheckpoint | None, now_ms: int) -> BatchTime:
        """Return the batch's time: its own where it has been checkpointed, for a sink may have what it made then."""
        ran = [time for c in self._completed if c.batch_id == batch_id and (time := BatchTime.of(c)) is not None]
        if ran:
            return ran[-1]
        before = BatchTime.of(parent)
        time = BatchTime.after(before, now_ms, self._clock_hold_ms)
        self._clock_warning = time.warning(before, now_ms, self._clock_hold_ms)
        return time

    def _no_parent(self, batch_id: int) -> DstlError:
        """Return what to say where the batch before has no checkpoint: how to let Spark run that one again."""
        last, batch = batch_id - 1, self._batch
        why = f"batch {batch_id} needs the checkpoint of batch {last}, which Spark has committed, and there is none"
        if batch is not None and batch.batch_id == last:
            missing = ", ".join(
                f"{uid} ({op.covered} of {op.parallelism} tasks)"
                for uid, op in batch.operators.items()
                if not op.is_complete
            )
            failed = f"; it has failed: {batch.failure}" if batch.failure is not None else ""
            why += f": batch {last} ended with tasks missing: {missing or 'none'}{failed}"
        held = ", ".join(str(c.batch_id) for c in self._completed) or "none"
        if last == 0 or any(c.batch_id == last - 1 for c in self._completed):
            return MissingState(
                f"{why} (held: {held}). A sink must consume the whole output: limit() or head() in foreachBatch leaves "
                f"tasks out. Nothing is lost: mend the sink, remove commits/{last} and offsets/{batch_id} (and their "
                f".crc files, if there are any) from the query's checkpointLocation, so that Spark runs batch {last} "
                "again, and restart. Where the checkpoint was there and is lost, bring it back, or start with "
                "restore='previous', which goes on without it"
            )
        return MissingState(
            f"{why} (held: {held}). Spark's "
            "checkpoint directory and the state location do not belong together, or one of them was cleared: "
            "restore both, or start with a new directory and a new location"
        )


def nobody_consumed(batch_id: int, operators: Iterable[str]) -> Invalid:
    """Return the error of a batch that Spark is about to commit, and in which these operators have not run."""
    names = ", ".join(map(repr, operators))
    return Invalid(
        f"batch {batch_id} is not committed, for nobody has consumed the output of operator {names}: no task of it has "
        "run. Define what the query writes and nothing else, or write the results of all operators in one query (a "
        "union, say)"
    )


def _raise_failure(batch: _Batch) -> None:
    """Raise the batch's failure as a new error: one that many tasks raise would grow with each."""
    if batch.failure is not None:
        raise type(batch.failure)(*batch.failure.args)
