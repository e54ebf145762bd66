"""The attempts of one operator in one batch that have ended.

Of each partition the highest attempt counts, as in the state stores that Spark has itself: it is the latest that Spark
has started, for a retry, a speculative copy or a second action. What has to be known when Spark commits the batch is
whether every partition was run to its end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from dstl.errors import NotDeterministic
from dstl.rpc.messages import Acknowledgement, TaskAttempt

_ORDINAL = 1 << 40
"""A task that runs several partitions is an attempt for each: Spark's number, and this many times the partition's place
in it. Spark's own numbers count the tasks of an application."""


class FinishedAttempts:
    """The finished attempts of one operator in one batch. Pure and single-threaded.

    Args:
        parallelism: How many partitions there are.
    """

    def __init__(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self._invocations: dict[int, dict[str, int]] = {}
        self._done: dict[int, Acknowledgement] = {}

    @property
    def any(self) -> bool:
        """True once an attempt has ended."""
        return bool(self._done)

    @property
    def has_begun(self) -> bool:
        """True once an attempt has begun."""
        return bool(self._invocations)

    @property
    def is_complete(self) -> bool:
        """True where every partition was run to its end."""
        return self.covered >= self.parallelism

    @property
    def covered(self) -> int:
        """Number of partitions that are known to be done."""
        merges = any(number >= _ORDINAL for number in self._done)
        places = [
            (ack.task.stage_id, ack.task.slot, number % _ORDINAL, ack.partition) for number, ack in self._done.items()
        ]
        return covered_partitions(places, self.parallelism, merges=merges)

    @property
    def latest_event_time_ms(self) -> int | None:
        """The latest event time that a counted attempt has seen, Unix milliseconds; None where there is none."""
        seen = [ack.event_time_ms for ack in self._chosen_attempts() if ack.event_time_ms is not None]
        return max(seen, default=None)

    @property
    def late_rows(self) -> int:
        """Number of rows that the counted attempts have dropped because they came behind the watermark."""
        return sum(ack.late_rows for ack in self._chosen_attempts())

    def begin(self, task: TaskAttempt) -> int:
        """Note an attempt, and return the number that it goes by: another for each partition of one Spark task."""
        invocations = self._invocations.setdefault(task.attempt_id, {})
        place = invocations.setdefault(task.invocation, len(invocations))
        return task.attempt_id + place * _ORDINAL

    def began(self, number: int) -> bool:
        """True where the attempt of this number has begun in this batch."""
        return number // _ORDINAL < len(self._invocations.get(number % _ORDINAL, ()))

    def add(self, ack: Acknowledgement) -> None:
        """Take a finished attempt."""
        self._done[ack.task.attempt_id] = ack

    def winners(self) -> tuple[int, ...]:
        """Return the attempts whose changes count: one for each partition that had rows.

        Raises:
            NotDeterministic: Their changes to broadcast states differ, and there is one copy for all of them.
        """
        counted = self._chosen_attempts()
        for other in counted[1:]:
            one = counted[0]
            if other.broadcast != one.broadcast:
                raise NotDeterministic(
                    f"operator {other.task.operator!r}: partitions {one.partition} and {other.partition} have changed "
                    f"the broadcast state differently for the same rows of batch {other.task.batch_id}, and there is "
                    "one copy for both: make handleBroadcastRows a function of its rows and of broadcast states alone "
                    "(no random values, no clock, nothing kept from keyed rows)"
                )
        return tuple(ack.task.attempt_id for ack in counted)

    def _chosen_attempts(self) -> list[Acknowledgement]:
        """Return the attempt that counts for each partition that it had rows of, by partition."""
        best: dict[int, tuple[int, Acknowledgement]] = {}
        for number, ack in self._done.items():
            if ack.partition is not None:
                known = best.get(ack.partition)
                if known is None or number % _ORDINAL >= known[0]:
                    best[ack.partition] = number % _ORDINAL, ack
        emptied = self._emptied()
        return [ack for partition, (number, ack) in sorted(best.items()) if number > emptied.get(partition, -1)]

    def _emptied(self) -> dict[int, int]:
        """Return the highest attempt that had no rows of a partition, where its stage leaves no doubt of which."""
        offsets: dict[int, set[int]] = defaultdict(set)
        for number, ack in self._done.items():
            if number >= _ORDINAL:  # a slot is no place
                return {}
            if ack.partition is not None:
                offsets[ack.task.stage_id].add(ack.task.slot - ack.partition)
        emptied: dict[int, int] = {}
        for number, ack in self._done.items():
            # What another stage's tasks are from their partitions is no proof here: a change would be lost.
            if ack.partition is None and len(found := offsets[ack.task.stage_id]) == 1:
                partition = ack.task.slot - min(found)
                emptied[partition] = max(number, emptied.get(partition, -1))
        return emptied


def covered_partitions(
    places: Iterable[tuple[int, int, int, int | None]], parallelism: int, *, merges: bool = False
) -> int:
    """Return how many partitions the finished attempts have run at least.

    A task that had rows knows its partition. One without rows is known by its place: tasks of one stage are as far from
    their partitions as those with rows are (a union shifts them all).

    Args:
        places: Of each finished attempt its stage, its slot there, its number, and its partition where it is known.
        parallelism: How many partitions there are.
        merges: Some tasks ran several partitions, so that a slot is no place any more: those of each stage are counted.
            The partitions of one that stands in the stage twice (a union with itself) are halves then.
    """
    places = list(places)
    known = {partition for *_, partition in places if partition is not None}
    if merges:
        return max(len(known), _most_in_a_stage(places, parallelism))
    rowless = {(stage, slot) for stage, slot, _, partition in places if partition is None}
    offsets: dict[int, set[int]] = defaultdict(set)
    for stage, slot, _, partition in places:
        if partition is not None:
            offsets[stage].add(slot - partition)
    if not offsets:
        return min(longest_row(slot for _, slot in rowless), parallelism)
    first, *others = offsets.values()
    common = first if all(each == first for each in others) else set()
    for stage, slot in rowless:
        found = (slot - offset for offset in offsets.get(stage, common))
        known.update(partition for partition in found if 0 <= partition < parallelism)
    return len(known)


def _most_in_a_stage(places: Collection[tuple[int, int, int, int | None]], parallelism: int) -> int:
    """Return how many partitions the stage has run that has run most of them; each slot's highest attempt counts."""
    newest: dict[tuple[int, int], int] = {}
    for stage, slot, attempt, _ in places:
        newest[stage, slot] = max(attempt, newest.get((stage, slot), attempt))
    runs: Counter[int] = Counter()
    copies: dict[int, Counter[int]] = defaultdict(Counter)
    for stage, slot, attempt, partition in places:
        if attempt == newest[stage, slot]:
            runs[stage] += 1
            if partition is not None:
                copies[stage][partition] += 1
    each = (count // max(copies[stage].values(), default=1) for stage, count in runs.items())
    return min(max(each, default=0), parallelism)


def longest_row(slots: Iterable[int]) -> int:
    """Return how many of the numbers follow each other without a gap, at most."""
    longest, row, last = 0, 0, -2
    for slot in sorted(set(slots)):
        row = row + 1 if slot == last + 1 else 1
        longest, last = max(longest, row), slot
    return longest
