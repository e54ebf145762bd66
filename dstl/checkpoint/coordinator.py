"""The checkpoint coordinator's decisions, without any I/O: who may work, whose changes count, what may be committed.

A micro-batch is a checkpoint, and Spark's own commit of the batch is what triggers it: ``commits/N`` and the
checkpoint are one record. Tasks begin, work, and say that they have ended. Spark retries tasks, runs speculative
copies, computes a DataFrame twice and runs whole batches again; of each partition the highest attempt that has ended
counts, as in the stores that Spark has itself. Every message that cannot be taken has an answer in :data:`RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dstl.checkpoint.batch_time import BatchTime
from dstl.checkpoint.finished_attempts import FinishedAttempts
from dstl.crash_points import reach
from dstl.errors import CheckpointDeclined, DstlError, Fenced, Invalid, MissingState, Superseded
from dstl.rpc.messages import Acknowledgement, TaskAttempt
from handles.checkpoint import CheckpointId, CompletedCheckpoint

Message = Literal["begin", "end", "commit"]
"""A task begins, a task has ended, Spark commits a batch."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """A checkpoint to make.

    Attributes:
        run_id: The run that it belongs to.
        batch_id: The micro-batch.
        parent: The checkpoint it builds on; None for the first.
        winners: Per operator, the attempts whose changes count.
        event_times: By operator, the latest event time that those have seen, Unix milliseconds.
        late_rows: By operator, how many rows those have dropped as late.
    """

    run_id: str
    batch_id: int
    parent: CheckpointId | None
    winners: Mapping[str, tuple[int, ...]]
    event_times: Mapping[str, int] = field(default_factory=dict)
    late_rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Batch:
    batch_id: int
    parent: CompletedCheckpoint | None
    operators: Mapping[str, FinishedAttempts]
    time: BatchTime
    completed: Trigger | None = None
    failure: DstlError | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message, and what the coordinator knows when it comes."""

    run_id: str
    batch_id: int
    task: TaskAttempt | None
    run: str | None
    batch: _Batch | None
    parallelism: Mapping[str, int]
    completed: list[CompletedCheckpoint] = field(repr=False)
    parent: CompletedCheckpoint | None

    @property
    def is_new(self) -> bool:
        """True where no task of the batch has begun."""
        return self.batch is None or self.batch_id > self.batch.batch_id

    @property
    def attempts(self) -> FinishedAttempts:
        """Those of the task's operator in the current batch."""
        assert self.batch is not None
        assert self.task is not None
        return self.batch.operators[self.task.operator]

    @property
    def unread(self) -> list[str]:
        """Operators of the current batch of which no task has begun."""
        assert self.batch is not None
        return [uid for uid, op in self.batch.operators.items() if not op.has_begun and not op.is_complete]

    @property
    def incomplete(self) -> dict[str, FinishedAttempts]:
        """Operators of the current batch of which a partition was not run to its end."""
        assert self.batch is not None
        return {uid: op for uid, op in self.batch.operators.items() if not op.is_complete}


@dataclass(frozen=True, slots=True)
class Rule:
    """The answer to some messages.

    Attributes:
        messages: Which.
        when: In words, behind "a message".
        applies: Whether one of them is meant.
        answer: Returns the error; None: it is dropped, and counts for nothing.
    """

    messages: tuple[Message, ...]
    when: str
    applies: Callable[[_Asked], bool]
    answer: Callable[[_Asked], DstlError] | None


def _is_over(asked: _Asked) -> DstlError:
    return Fenced(f"run {asked.run_id} of the query is over: run {asked.run} has replaced it")


def _foreign(asked: _Asked) -> DstlError:
    assert asked.task is not None
    return Invalid(f"operator {asked.task.operator!r} is not one of this backend's: {', '.join(asked.parallelism)}")


def _superseded(asked: _Asked) -> DstlError:
    assert asked.batch is not None
    return Superseded(f"batch {asked.batch_id} is over: batch {asked.batch.batch_id} has begun")


def _never_began(asked: _Asked) -> DstlError:
    assert asked.task is not None
    task = asked.task
    return Superseded(f"attempt {task.attempt_id} of {task.operator} never began in batch {task.batch_id}")


def _failure(asked: _Asked) -> DstlError:
    """Return the batch's failure as a new error: one that many tasks raise would grow with each."""
    assert asked.batch is not None
    assert asked.batch.failure is not None
    return type(asked.batch.failure)(*asked.batch.failure.args)


def _is_behind(asked: _Asked) -> DstlError:
    newest = asked.completed[-1]
    return Fenced(
        f"run {asked.run_id} runs batch {asked.batch_id}, and the state is at batch {newest.batch_id} (checkpoint "
        f"{newest.checkpoint_id}) already: another driver has gone on meanwhile. Keep the newer driver; to go back on "
        "purpose, take state and offsets back together with dstl files rollback"
    )


def _no_parent(asked: _Asked) -> DstlError:
    held = ", ".join(str(c.batch_id) for c in asked.completed)
    missing = (
        f"it is missing (held: {held}). Where it was there and is lost, bring it back, or start with "
        "restore='previous', which goes on without it"
        if held
        else "this location has none"
    )
    return MissingState(
        f"batch {asked.batch_id} needs the checkpoint of batch {asked.batch_id - 1}, which Spark has committed, and "
        f"{missing}. A checkpoint directory that comes from another place needs the state that belongs to it: start "
        "with restore_from=, or with a new location"
    )


def _unread(asked: _Asked) -> DstlError:
    names = ", ".join(map(repr, asked.parallelism if asked.is_new else asked.unread))
    return Invalid(
        f"batch {asked.batch_id} is not committed: the query does not read operator {names}. Define what the query "
        "writes and nothing else, or write the results of all operators in one query (a union, say). If this query is "
        "of another StateBackend at the same location, Spark asks the newer of the two: start the query again with it"
    )


def _read_in_part(asked: _Asked) -> DstlError:
    parts = ", ".join(f"{uid!r} ({op.covered} of {op.parallelism} partitions)" for uid, op in asked.incomplete.items())
    return CheckpointDeclined(
        f"batch {asked.batch_id} is not committed: of operator {parts} have run to their end, and the "
        "others did not when the batch was run again: start the query again, and Spark replays the batch"
    )


RULES: tuple[Rule, ...] = (
    Rule(("begin", "end", "commit"), "of a run that another has replaced", lambda a: a.run_id != a.run, _is_over),
    Rule(
        ("begin", "end"),
        "of an operator that is not this backend's",
        lambda a: a.task is not None and a.task.operator not in a.parallelism,
        _foreign,
    ),
    Rule(
        ("begin", "end"),
        "of a batch before the current one",
        lambda a: a.batch is not None and a.batch_id < a.batch.batch_id,
        _superseded,
    ),
    Rule(("end",), "of a batch that has not begun", lambda a: a.is_new, _never_began),
    Rule(
        ("commit",),
        "of a batch of which no task has begun",
        lambda a: a.batch is None or a.batch_id != a.batch.batch_id,
        _unread,
    ),
    Rule(
        ("begin", "end", "commit"),
        "of a batch that has failed",
        lambda a: not a.is_new and a.batch is not None and a.batch.failure is not None,
        _failure,
    ),
    Rule(
        ("begin",),
        "of a batch before the newest checkpoint's",
        # Spark replays the last batch at most, so this driver's plan is older than the state: a checkpoint of its batch
        # would void everything that another driver has completed since.
        lambda a: a.is_new and bool(a.completed) and a.completed[-1].batch_id > a.batch_id,
        _is_behind,
    ),
    Rule(
        ("begin",),
        "of a batch whose predecessor has no checkpoint",
        # An empty state is sound for batch 0 alone: every later batch has a predecessor with effects.
        lambda a: a.is_new and a.parent is None and a.batch_id != 0,
        _no_parent,
    ),
    Rule(("end",), "of an attempt that never began", lambda a: a.task is not None and not _began(a), _never_began),
    Rule(
        ("end",),
        "of a batch that Spark has committed",
        lambda a: a.batch is not None and a.batch.completed is not None,
        None,
    ),
    Rule(("commit",), "of a batch in which an operator was not run", lambda a: bool(a.unread), _unread),
    Rule(
        ("commit",),
        "of a batch in which a partition was not run to its end",
        lambda a: bool(a.incomplete),
        _read_in_part,
    ),
)
"""Asked from the first to the last; what none of them applies to is taken."""


def _began(asked: _Asked) -> bool:
    assert asked.task is not None
    return asked.attempts.began(asked.task.attempt_id)


class CheckpointCoordinator:
    """The state machine of one query's checkpoints. Pure and single-threaded.

    Invariants:
        1. At most one attempt's changes count per operator and partition of a batch.
        2. A trigger's winners cover every partition of every operator that had rows.
        3. A batch is only begun on the checkpoint of the batch before it.

    Attributes:
        run_id: The run that may work; None before the first.

    Args:
        operators: Parallelism of each stateful operator, known from their construction.
        clock_hold_ms: See :meth:`BatchTime.after`.
    """

    def __init__(self, operators: Mapping[str, int], *, clock_hold_ms: int = 0) -> None:
        self._parallelism = dict(operators)
        self._clock_hold_ms = clock_hold_ms
        self._clock_warning: str | None = None
        self.run_id: str | None = None
        self._batch: _Batch | None = None
        self._first_parent: CompletedCheckpoint | None = None
        self._completed: list[CompletedCheckpoint] = []

    @property
    def completed(self) -> tuple[CompletedCheckpoint, ...]:
        """Retained checkpoints, oldest first."""
        return tuple(self._completed)

    @property
    def committed(self) -> CompletedCheckpoint | None:
        """The checkpoint of the last committed batch: the current one, or else its parent; None for an empty state."""
        if self._batch is not None and self._batch.completed is not None:
            return self._completed[-1]
        return self._batch.parent if self._batch is not None else None

    def open_run(
        self, run_id: str, completed: Iterable[CompletedCheckpoint], first_parent: CompletedCheckpoint | None = None
    ) -> None:
        """Let a run work, from the checkpoints that were found; every other run is fenced from now on.

        Args:
            run_id: The run.
            completed: The checkpoints.
            first_parent: What the run's first batch goes on from, where the batch just before it has no checkpoint: the
                effects of the batches in between are lost.
        """
        self.run_id = run_id
        self._batch = None
        self._first_parent = first_parent
        self._completed = sorted(completed, key=lambda each: each.checkpoint_id)

    @property
    def batch_time(self) -> BatchTime:
        """The processing time of the current batch: the same for all its tasks, however often they run."""
        return self._batch.time if self._batch else BatchTime(0)

    def take_clock_warning(self) -> str | None:
        """Return, once, what to tell of the clock by which the current batch has begun."""
        warning, self._clock_warning = self._clock_warning, None
        return warning

    def begin(self, task: TaskAttempt, now_ms: int) -> CompletedCheckpoint | None:
        """Let a task work and return the checkpoint it builds on; None for an empty state.

        Args:
            task: Who asks.
            now_ms: The batch's time by the driver's clock, Unix milliseconds; of the batch's first task.

        Raises:
            DstlError: As :data:`RULES` say.
        """
        parent = self._parent_of(task.batch_id)
        self._check("begin", task.run_id, task.batch_id, task, parent)
        if self._batch is None or task.batch_id > self._batch.batch_id:
            operators = {uid: FinishedAttempts(parallelism) for uid, parallelism in self._parallelism.items()}
            self._batch = _Batch(task.batch_id, parent, operators, self._time_of(parent, now_ms))
        self._batch.operators[task.operator].begin(task)
        return self._batch.parent

    def number_of(self, task: TaskAttempt) -> int:
        """Return the number that an attempt which has begun goes by from now on, with TaskManagers too."""
        self._check("begin", task.run_id, task.batch_id, task, self._parent_of(task.batch_id))
        assert self._batch is not None
        return self._batch.operators[task.operator].begin(task)

    def end(self, ended: Acknowledgement) -> None:
        """Take a finished attempt: it counts, unless a higher one of its partition has ended or does so.

        Raises:
            DstlError: As :data:`RULES` say.
        """
        task = ended.task
        if self._check("end", task.run_id, task.batch_id, task):
            assert self._batch is not None
            self._batch.operators[task.operator].add(ended)
            reach("C2")

    def lacks_tasks(self, batch_id: int) -> bool:
        """Return True where more tasks of a batch have to run before its commit can be taken."""
        batch = self._batch
        if batch is None or batch_id != batch.batch_id:
            return batch is None or batch_id > batch.batch_id
        return batch.failure is None and not all(operator.is_complete for operator in batch.operators.values())

    def commit(self, run_id: str, batch_id: int) -> Trigger:
        """Return the checkpoint of a batch that Spark is about to commit: every operator was run to its end in it.

        Raises:
            NotDeterministic: Partitions have changed the broadcast state differently.
            DstlError: As :data:`RULES` say.
        """
        self._check("commit", run_id, batch_id)
        batch = self._batch
        assert batch is not None
        return Trigger(
            run_id,
            batch_id,
            batch.parent.checkpoint_id if batch.parent else None,
            {uid: op.winners() for uid, op in batch.operators.items()},
            # Now, as the winners: an attempt may end while the record is made, or waits for the next offsets.
            {uid: time for uid, op in batch.operators.items() if (time := op.latest_event_time_ms) is not None},
            {uid: late for uid, op in batch.operators.items() if (late := op.late_rows)},
        )

    def again(self) -> Trigger | None:
        """Return the current batch's checkpoint, to be made again from its parent for bases that were finished since.

        None where it has none yet.
        """
        return self._batch.completed if self._batch is not None and self._batch.failure is None else None

    def complete(self, trigger: Trigger, checkpoint: CompletedCheckpoint, retain: int) -> list[CompletedCheckpoint]:
        """Take a committed checkpoint and return those that are subsumed by it, newest first.

        One of a batch that Spark did not commit is subsumed at once. The parent is always kept, and never are fewer
        than two restorable batches left once there were two.

        Raises:
            Fenced: Another run has begun since the trigger; whether the checkpoint counts, that run has decided.
        """
        if trigger.run_id != self.run_id:
            raise Fenced(f"run {trigger.run_id} is over: run {self.run_id} has replaced it")
        if self._batch is not None and self._batch.batch_id == trigger.batch_id:
            # What ended while the record of Spark's commit was on its way is no output that Spark keeps.
            self._batch.completed = trigger
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

    def _parent_of(self, batch_id: int) -> CompletedCheckpoint | None:
        """Return the checkpoint that a batch which begins now goes on from; None where there is none."""
        before = [c for c in self._completed if c.batch_id == batch_id - 1]
        if not before and self._batch is None:
            return self._first_parent
        return before[-1] if before else None

    def _check(
        self,
        message: Message,
        run_id: str,
        batch_id: int,
        task: TaskAttempt | None = None,
        parent: CompletedCheckpoint | None = None,
    ) -> bool:
        """Return True where a message is taken, False where it is dropped, or raise its answer."""
        asked = _Asked(run_id, batch_id, task, self.run_id, self._batch, self._parallelism, self._completed, parent)
        for rule in RULES:
            if message in rule.messages and rule.applies(asked):
                if rule.answer is None:
                    return False
                raise rule.answer(asked)
        return True

    def _time_of(self, parent: CompletedCheckpoint | None, now_ms: int) -> BatchTime:
        before = BatchTime.of(parent)
        time = BatchTime.after(before, now_ms, self._clock_hold_ms)
        self._clock_warning = time.warning(before, now_ms, self._clock_hold_ms)
        return time
