"""The acknowledgements of one operator in one batch: which partitions are done, and whose changes count.

A *task* is a slot of a stage. Its attempts are retries and speculative copies of each other, and Spark uses the output
of one of them. Tasks of other stages (a second action, a join with itself), and other slots of one stage (a union with
itself), compute a partition once more, and Spark uses the output of each. State must belong to the output that was
used, so all attempts of a partition that may have been used have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dstl.checkpoint.finished_attempts import longest_row
from dstl.errors import CheckpointDeclined, DstlError, Invalid, NotDeterministic
from dstl.rpc.messages import Acknowledgement, TaskAttempt

__all__ = ["Acknowledgements"]


_Task = tuple[int, int]
"""A stage and a slot in it."""


@dataclass(slots=True)
class _Done:
    """One acknowledged change set, and the attempts that have said so, the one that counts first."""

    ack: Acknowledgement
    attempts: list[int]


class Acknowledgements:
    """The acknowledgements of one operator in one batch. Pure and single-threaded.

    Invariants:
        1. At most one attempt's changes count per partition.
        2. Attempts of a partition whose output Spark may have used agree, or :meth:`add` raises.
        3. All partitions have made the same changes to broadcast states, or :meth:`add` raises.

    Args:
        parallelism: How many partitions there are.
    """

    def __init__(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.is_complete = False
        """True once every partition was acknowledged. It stays so: an attempt only ever replaces the same task's."""
        self._invocations: dict[int, str] = {}
        self._heir_of: dict[int, frozenset[int]] = {}
        self._done: dict[_Task, _Done] = {}
        self._partitions: dict[int, dict[_Task, None]] = {}
        self._rowless: dict[_Task, None] = {}
        self._offsets: dict[int, set[int]] = {}

    @property
    def any(self) -> bool:
        """True once something was acknowledged."""
        return bool(self._done)

    @property
    def latest_event_time_ms(self) -> int | None:
        """The latest event time that was seen, Unix milliseconds; None where there is none."""
        seen = [d.ack.event_time_ms for d in self._done.values() if d.ack.event_time_ms is not None]
        return max(seen, default=None)

    @property
    def late_rows(self) -> int:
        """Number of rows that the counted attempts have dropped because they came behind the watermark."""
        return sum(self._done[key].ack.late_rows for key in self._chosen_tasks())

    @property
    def covered(self) -> int:
        """Number of partitions that are known to be done."""
        if not self._offsets:
            return min(len(self._done), self.parallelism)
        return len(self._covered_partitions())

    @property
    def has_begun(self) -> bool:
        """True once an attempt has begun."""
        return bool(self._invocations)

    def begin(self, task: TaskAttempt, is_alive: Callable[[int], bool]) -> int:
        """Note an attempt and return the number it goes by; it may take the place of those of its task that have ended.

        Args:
            task: The attempt.
            is_alive: Tells of an attempt id whether that attempt can still be running.

        Raises:
            Invalid: The attempt has another partition already.
        """
        if self._invocations.setdefault(task.attempt_id, task.invocation) != task.invocation:
            raise Invalid(
                f"one Spark task runs several partitions of operator {task.operator!r}, as a coalesce() behind it has "
                "it: take it out, or write repartition() instead"
            )
        if task.attempt_id not in self._heir_of:
            before = self._done.get((task.stage_id, task.slot))
            ended = (attempt for attempt in before.attempts if not is_alive(attempt)) if before else ()
            self._heir_of[task.attempt_id] = frozenset(ended)
        return task.attempt_id

    def began(self, attempt_id: int) -> bool:
        """True where this attempt has begun in this batch."""
        return attempt_id in self._heir_of

    def add(self, ack: Acknowledgement) -> bool:
        """Count an acknowledgement, and return True where other changes count than before.

        Raises:
            NotDeterministic: It differs from another computation of its partition, and Spark uses both outputs; or its
                changes to broadcast states differ from another partition's.
            CheckpointDeclined: It differs from another attempt of its task, and Spark may use either output.
        """
        task = ack.task
        own = (task.stage_id, task.slot)
        self._check_broadcast(own, ack)
        before = self._done.get(own)
        if before is not None and _agree(before.ack, ack):
            if task.attempt_id not in before.attempts:
                before.attempts.append(task.attempt_id)
            if before.ack.partition is not None or ack.partition is None:
                return False
        else:
            for one, other in self._differences(own, ack):
                raise _used_twice(one, other)
            if before is not None and not self._heir_of[task.attempt_id].issuperset(before.attempts):
                raise _rivals(before.ack, ack)
        if before is not None:
            self._forget(own, before.ack)
        return self._take(own, ack, replaces=before is not None)

    def winners(self) -> tuple[int, ...]:
        """Return the attempts whose changes count: one for each partition, those without rows included."""
        return tuple(self._done[key].attempts[0] for key in self._chosen_tasks())

    def _chosen_tasks(self) -> list[_Task]:
        """Return the task that counts for each partition, by partition."""
        chosen = {at: next(iter(tasks)) for at, tasks in self._partitions.items()}
        for key in sorted(self._rowless):
            # Where no offset is known there are no rows either: every task stands for itself.
            for at in self._places(key) or ([] if self._offsets else [key[1]]):
                chosen.setdefault(at, key)
        return [key for _, key in sorted(chosen.items())]

    def _check_broadcast(self, own: _Task, ack: Acknowledgement) -> None:
        """Refuse what differs from all others' changes to broadcast states: they agree, so one stands for them."""
        other = next((done.ack for key, done in self._done.items() if key != own), None)
        if other is not None and other.broadcast != ack.broadcast:
            raise _broadcast_apart(other, ack)

    def _differences(self, own: _Task, ack: Acknowledgement) -> Iterator[tuple[Acknowledgement, Acknowledgement]]:
        """Yield the tasks that have computed one partition for different uses, with different changes.

        Tasks without rows are compared where other tasks of their own stage tell which partition they were.
        """
        stage, slot = own
        known = self._offsets.get(stage, set())
        if ack.partition is None:
            for at in self._within(slot, known):
                yield from ((one, ack) for one in self._others(at, own, ack))
            return
        yield from ((one, ack) for one in self._others(ack.partition, own, ack))
        if ack.digest:
            for other, offsets in self._offsets.items():
                empty = ((other, ack.partition + offset) for offset in offsets)
                yield from ((self._done[key].ack, ack) for key in empty if key in self._rowless and key != own)
        if (offset := slot - ack.partition) not in known:
            for key in self._rowless:
                if key[0] == stage and key != own:
                    last = self._done[key].ack
                    for at in self._within(key[1], {offset}):
                        yield from ((one, last) for one in self._others(at, own, last))

    def _others(self, partition: int, own: _Task, ack: Acknowledgement) -> Iterator[Acknowledgement]:
        """Yield what other tasks have acknowledged for a partition, where it is not the same."""
        others = (self._done[key].ack for key in self._partitions.get(partition, ()) if key != own)
        return (other for other in others if other.digest != ack.digest)

    def _forget(self, own: _Task, ack: Acknowledgement) -> None:
        if ack.partition is None:
            del self._rowless[own]
        else:
            tasks = self._partitions[ack.partition]
            del tasks[own]
            if not tasks:
                del self._partitions[ack.partition]

    def _take(self, own: _Task, ack: Acknowledgement, *, replaces: bool) -> bool:
        is_new = replaces
        self._done[own] = _Done(ack, [ack.task.attempt_id])
        if ack.partition is None:
            # Once all is done, a task without rows has nothing to replace.
            is_new = is_new or not self.is_complete
            self._rowless[own] = None
        else:
            is_new = is_new or ack.partition not in self._partitions
            self._partitions.setdefault(ack.partition, {})[own] = None
            self._offsets.setdefault(own[0], set()).add(own[1] - ack.partition)
        self.is_complete = self.is_complete or self._is_covered()
        return is_new

    def _is_covered(self) -> bool:
        if len(self._partitions) + len(self._rowless) < self.parallelism:
            return False
        if not self._offsets:
            # Nobody knows its partition. Of a union with itself, the same empty partition is there twice.
            return longest_row(slot for _, slot in self._rowless) >= self.parallelism
        return len(self._covered_partitions()) >= self.parallelism

    def _covered_partitions(self) -> set[int]:
        return set(self._partitions).union(*map(self._places, self._rowless))

    def _places(self, key: _Task) -> list[int]:
        """Return the partition of a task without rows, or nothing.

        Tasks of one union branch are as far from their partitions as those with rows are. (A DataFrame that is in a
        union with itself has two branches in one stage.) Where the stage has none with rows, the other stages' distance
        counts, if they have one and the same.
        """
        stage, slot = key
        offsets = self._offsets.get(stage)
        if offsets is None:
            first, *others = self._offsets.values() or [set()]
            offsets = first if all(each == first for each in others) else set()
        return self._within(slot, offsets)

    def _within(self, slot: int, offsets: Iterable[int]) -> list[int]:
        return [slot - offset for offset in offsets if 0 <= slot - offset < self.parallelism]


def _agree(one: Acknowledgement, other: Acknowledgement) -> bool:
    """True where two attempts of one task have changed the same; where neither has, rows or none is no difference."""
    same = one.digest == other.digest and one.broadcast == other.broadcast
    return same and (one.partition == other.partition or not one.digest)


_CAUSE = (
    "changed the state differently for the same rows of batch {batch}, so the processor, or what comes before it, is "
    "not deterministic (random values, the wall clock, the order of rows)"
)


def _what(one: Acknowledgement, other: Acknowledgement) -> tuple[str, str]:
    at = other.partition if other.partition is not None else one.partition
    where = f"operator {other.task.operator!r}, partition {'?' if at is None else at}"
    return where, _CAUSE.format(batch=other.task.batch_id)


def _used_twice(one: Acknowledgement, other: Acknowledgement) -> DstlError:
    where, cause = _what(one, other)
    return NotDeterministic(
        f"{where}: attempt {one.task.attempt_id} (stage {one.task.stage_id}, task {one.task.slot}) and attempt "
        f"{other.task.attempt_id} (stage {other.task.stage_id}, task {other.task.slot}) {cause}, and the output of "
        "both is used: the state can belong to one of them only. Make it a function of the set of rows, or persist() "
        "the DataFrame before it is used twice"
    )


def _rivals(one: Acknowledgement, other: Acknowledgement) -> DstlError:
    where, cause = _what(one, other)
    return CheckpointDeclined(
        f"{where}: attempts {one.task.attempt_id} and {other.task.attempt_id} of one task (stage "
        f"{other.task.stage_id}, task {other.task.slot}) {cause}, and Spark may keep the output of either: the state "
        "can belong to one of them only. Restart the query, which runs the batch again; to be rid of this, make it a "
        "function of the set of rows"
    )


def _broadcast_apart(one: Acknowledgement, other: Acknowledgement) -> DstlError:
    at = ["?" if ack.partition is None else str(ack.partition) for ack in (one, other)]
    return NotDeterministic(
        f"operator {other.task.operator!r}: partitions {at[0]} and {at[1]} have changed the broadcast state "
        f"differently for the same rows of batch {other.task.batch_id}, and there is one copy for both: make "
        "handleBroadcastRows a function of its rows and of broadcast states alone (no random values, no clock, nothing "
        "kept from keyed rows)"
    )
