"""Which attempts count, and when an operator has been run to its end. Pure."""

import itertools
import random

import pytest

from dstl.checkpoint.finished_attempts import FinishedAttempts, covered_partitions
from dstl.errors import NotDeterministic
from dstl.rpc.messages import Acknowledgement, TaskAttempt


class Stage:
    """Runs tasks of one operator as Spark does."""

    attempts = itertools.count(1)

    def __init__(self, done: FinishedAttempts, stage: int = 1) -> None:
        self.done, self.stage = done, stage

    def run(self, slot: int, *partitions: int | None, ends: bool = True, broadcast: bytes = b"") -> list[int]:
        """Run one task over these partitions, None for one without rows; returns the numbers of its attempts."""
        attempt = next(self.attempts)
        numbers = []
        for place, partition in enumerate(partitions):
            task = TaskAttempt("q", "r", "op", 0, slot, self.stage, attempt, f"call-{attempt}-{place}")
            number = self.done.begin(task)
            assert self.done.begin(task) == number, "a task begins again once a TaskManager is there"
            assert self.done.began(number)
            numbers.append(number)
            if ends or place < len(partitions) - 1:
                told = TaskAttempt("q", "r", "op", 0, slot, self.stage, number)
                self.done.add(Acknowledgement(told, partition, late_rows=1, broadcast=broadcast))
        return numbers


def test_the_highest_attempt_of_each_partition_counts_whatever_the_order() -> None:
    done = FinishedAttempts(2)
    first, second = Stage(done), Stage(done, 2)
    old = first.run(0, 0)
    new = second.run(0, 0)
    other = first.run(1, 1)
    late = Stage(done)
    late.attempts = iter(old)  # type: ignore[assignment]
    late.run(0, 0)
    assert done.is_complete
    assert done.winners() == (*new, *other)
    assert done.late_rows == 2


def test_a_later_attempt_without_rows_replaces_one_that_had_some() -> None:
    done = FinishedAttempts(3)
    first, second = Stage(done), Stage(done, 2)
    first.run(0, 0)
    (kept,) = first.run(1, 1)
    # The second action saw other rows, and is behind a union: slot 5 is partition 1.
    (other,) = second.run(6, 2)
    (retried,) = first.run(0, None)
    assert done.winners() == (kept, other)
    second.run(5, None)
    assert done.winners() == (other,)
    (late,) = first.run(0, 0)
    assert done.winners() == (late, other)
    assert retried < late


def test_an_attempt_without_rows_whose_place_is_in_doubt_replaces_nothing() -> None:
    done = FinishedAttempts(2)
    kept = [*Stage(done).run(0, 0), *Stage(done).run(1, 1)]
    Stage(done, 2).run(1, None)  # of a stage without any rows: it may be behind a union
    united = Stage(done, 3)
    newer = [*united.run(0, 0), *united.run(2, 0)]
    united.run(3, None)
    assert done.winners() == (newer[-1], kept[1])
    merged = FinishedAttempts(2)
    stage = Stage(merged)
    (first,) = stage.run(0, 0)
    assert merged.winners() == (first,)
    stage.run(0, None, None)
    assert merged.winners() == (first,)


def test_the_first_task_of_an_application_may_run_several_partitions() -> None:
    done = FinishedAttempts(2)
    stage = Stage(done)
    stage.attempts = itertools.count(0)  # type: ignore[assignment]
    stage.run(0, None, None)
    assert done.is_complete


def test_partitions_without_rows_are_known_by_their_place_also_behind_a_union() -> None:
    done = FinishedAttempts(3)
    stage = Stage(done)
    stage.run(4, 1)
    stage.run(3, None)
    assert (done.covered, done.is_complete) == (2, False)
    stage.run(5, None)
    assert done.is_complete
    empty = FinishedAttempts(3)
    for slot in range(3):
        assert not empty.is_complete
        Stage(empty).run(slot, None)
    assert empty.is_complete
    assert empty.winners() == ()


def test_an_empty_partition_of_a_union_with_itself_is_not_counted_for_another() -> None:
    """Only partition 3 has rows, and its two tasks are at work: an empty checkpoint was made meanwhile."""
    done = FinishedAttempts(4)
    stage = Stage(done)
    for slot in (0, 1, 2, 4, 5, 6):
        stage.run(slot, None)
        assert not done.is_complete
    last = stage.run(7, 3)
    assert done.is_complete
    assert done.winners() == tuple(last)


def test_a_task_that_runs_several_partitions_is_as_many_attempts() -> None:
    done = FinishedAttempts(4)
    numbers = Stage(done).run(0, 0, None, 2)
    assert len(set(numbers)) == 3
    assert not done.is_complete
    assert not done.began(numbers[-1] + (1 << 40))
    Stage(done).run(1, 3)
    assert done.is_complete
    assert len(done.winners()) == 3


def test_retries_of_a_merged_task_are_no_copies_of_its_partitions(rng: random.Random) -> None:
    done = FinishedAttempts(6)
    stage = Stage(done)
    for _ in range(3):
        stage.run(0, 0, 1, None)
    for _ in range(rng.randrange(1, 3)):
        assert not done.is_complete
        stage.run(1, None, 4, ends=False)
    stage.run(1, None, 4, None)
    assert done.is_complete


def test_both_halves_of_a_union_with_itself_are_needed_where_tasks_are_merged() -> None:
    done = FinishedAttempts(3)
    stage = Stage(done)
    stage.run(0, 0, None, ends=False)
    stage.run(1, 0, None, ends=False)
    assert not done.is_complete
    stage.run(2, None, 2)
    assert not done.is_complete  # four of six were run: the partition that stands there twice says so
    stage.run(3, 1, None)
    assert done.is_complete


def test_merged_tasks_without_any_row_are_counted_stage_by_stage() -> None:
    done = FinishedAttempts(3)
    Stage(done, 1).run(0, None)
    all_of_them = Stage(done, 2)
    all_of_them.run(0, None, None)
    assert (done.covered, done.is_complete) == (2, False)
    all_of_them.run(1, None)
    assert done.is_complete
    assert covered_partitions([], 3, merges=True) == covered_partitions([], 3) == 0


@pytest.mark.parametrize(
    ("places", "covered"),
    [
        # Behind a union: the first stage's tasks are as far from their partitions as one that had rows is.
        ([(1, 4, 1, 1), (1, 3, 2, None), (1, 5, 3, None)], 3),
        # One more slot than partitions, and one less: they are of the union's other side.
        ([(1, 0, 1, 0), (1, 3, 2, None)], 1),
        ([(1, 1, 1, 0), (1, 0, 2, None)], 1),
        # A stage without rows goes by the others', where these agree.
        ([(1, 1, 1, 0), (2, 2, 2, 1), (3, 3, 3, None)], 3),
        ([(1, 0, 1, 0), (2, 0, 2, 0), (3, 2, 3, 1), (4, 2, 4, None)], 2),
        # Of a union with itself, partition 1 is empty in either branch, and is one.
        ([(1, 0, 1, 0), (1, 1, 2, None), (1, 3, 3, 0), (1, 4, 4, None)], 2),
    ],
)
def test_a_task_without_rows_counts_where_its_partition_is_known(
    places: list[tuple[int, int, int, int | None]], covered: int
) -> None:
    assert covered_partitions(places, 3) == covered


def test_the_event_time_is_the_latest_that_a_counted_attempt_has_seen() -> None:
    done = FinishedAttempts(3)
    assert done.latest_event_time_ms is None
    for attempt, partition, seen in ((1, 0, 900), (2, 0, 100), (3, 1, 300), (4, 2, None)):
        task = TaskAttempt("q", "r", "op", 0, partition, 1, attempt)
        done.add(Acknowledgement(task, partition, event_time_ms=seen))
    assert done.latest_event_time_ms == 300


def test_winners_that_differ_in_the_broadcast_state_are_refused_and_replaced_ones_are_not() -> None:
    for changed in ((b"x", b"y"), (b"x", b""), (b"", b"x")):
        done = FinishedAttempts(2)
        stage = Stage(done)
        for slot in range(2):
            stage.run(slot, slot, broadcast=changed[slot])
        with pytest.raises(NotDeterministic, match=r"partitions 0 and 1 .*handleBroadcastRows a function of its rows"):
            done.winners()
        for slot in range(2):
            stage.run(slot, slot, broadcast=b"x")
        assert len(done.winners()) == 2
