"""The coordinator's table, row by row, and any history of tasks against a model."""

from collections.abc import Callable, Iterable
from itertools import count, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dstl.checkpoint.coordinator import RULES, CheckpointCoordinator, Trigger
from dstl.errors import (
    CheckpointDeclined,
    DstlError,
    Fenced,
    Invalid,
    MissingState,
    Superseded,
    TaskManagerLost,
)
from dstl.rpc.messages import Acknowledgement, TaskAttempt
from handles.checkpoint import CompletedCheckpoint
from worlds.manifest_samples import QUERY, checkpoint


class Cluster:
    """Plays Spark: hands out attempt ids, runs tasks, commits batches."""

    def __init__(self, **operators: int) -> None:
        self.operators = operators or {"op": 2}
        self.coordinator = CheckpointCoordinator(self.operators)
        self.attempts = count(100)
        self.sequence = count(2)
        self.run = "run-1"
        self.coordinator.open_run(self.run, [])

    def new_run(self, completed: Iterable[CompletedCheckpoint] = ()) -> None:
        self.run = f"run-{int(self.run.removeprefix('run-')) + 1}"
        self.coordinator.open_run(self.run, completed)

    def task(
        self, slot: int, *, batch: int = 0, stage: int = 1, operator: str = "op", run: str | None = None
    ) -> TaskAttempt:
        return TaskAttempt(QUERY, run or self.run, operator, batch, slot, stage, next(self.attempts))

    def begun(self, slot: int, *, batch: int = 0, stage: int = 1, operator: str = "op") -> TaskAttempt:
        task = self.task(slot, batch=batch, stage=stage, operator=operator)
        self.coordinator.begin(task, 1000 + batch)
        return task

    def end(self, task: TaskAttempt, partition: int | None = -1, broadcast: bytes = b"") -> None:
        """End a task; the partition is its slot, unless said otherwise."""
        at = task.slot if partition == -1 else partition
        self.coordinator.end(Acknowledgement(task, at, broadcast=broadcast))

    def run_tasks(self, slots: Iterable[int], *, batch: int = 0, stage: int = 1, operator: str = "op") -> list[int]:
        tasks = [self.begun(slot, batch=batch, stage=stage, operator=operator) for slot in slots]
        for task in tasks:
            self.end(task)
        return [task.attempt_id for task in tasks]

    def commit(self, batch: int = 0, run: str | None = None) -> Trigger:
        return self.coordinator.commit(run or self.run, batch)

    def complete(self, trigger: Trigger, retain: int = 3) -> list[CompletedCheckpoint]:
        made = checkpoint(next(self.sequence), trigger.batch_id, parent=trigger.parent)
        return self.coordinator.complete(trigger, made, retain)

    def batch(self, batch: int, retain: int = 3) -> list[CompletedCheckpoint]:
        for operator, parallelism in self.operators.items():
            self.run_tasks(range(parallelism), batch=batch, operator=operator)
        return self.complete(self.commit(batch), retain)


def at_batch(batches: int, **operators: int) -> Cluster:
    """Return one that has completed so many batches."""
    cluster = Cluster(**operators)
    for batch in range(batches):
        cluster.batch(batch)
    return cluster


def of_an_old_run(message: str) -> Callable[[], object]:
    cluster = Cluster()
    old = cluster.begun(0)
    cluster.new_run()
    return {
        "begin": lambda: cluster.coordinator.begin(old, 0),
        "end": lambda: cluster.end(old),
        "commit": lambda: cluster.commit(0, old.run_id),
    }[message]


def of_a_foreign_operator(message: str) -> Callable[[], object]:
    cluster = Cluster(a=1, b=1)
    task = cluster.task(0, operator="c")
    return {"begin": lambda: cluster.coordinator.begin(task, 0), "end": lambda: cluster.end(task)}[message]


def of_an_earlier_batch(message: str) -> Callable[[], object]:
    cluster = Cluster()
    late = cluster.begun(0)
    cluster.batch(0)
    cluster.begun(0, batch=1)
    return {"begin": lambda: cluster.begun(1), "end": lambda: cluster.end(late)}[message]


def of_a_batch_that_has_not_begun(message: str) -> Callable[[], object]:
    cluster = Cluster()
    return {"end": lambda: cluster.end(cluster.task(0)), "commit": lambda: cluster.commit(0)}[message]


def of_a_failed_batch(message: str) -> Callable[[], object]:
    cluster = Cluster()
    cluster.run_tasks([0, 1])
    open_task = cluster.begun(1)
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    return {
        "begin": lambda: cluster.begun(1),
        "end": lambda: cluster.end(open_task),
        "commit": lambda: cluster.commit(0),
    }[message]


def behind_the_state(message: str) -> Callable[[], object]:
    """10 of reliability 3.4: a paused driver's plan is older than what another has completed."""
    cluster = at_batch(3)
    cluster.new_run(cluster.coordinator.completed)
    return lambda: cluster.begun(0, batch=1)


def without_predecessor(message: str) -> Callable[[], object]:
    cluster = at_batch(1)
    return lambda: cluster.begun(0, batch=2)


def that_never_began(message: str) -> Callable[[], object]:
    cluster = Cluster()
    cluster.begun(0)
    return lambda: cluster.end(cluster.task(0))


def behind_the_commit(message: str) -> Callable[[], object]:
    cluster = Cluster()
    copy = cluster.begun(0)
    cluster.run_tasks([0, 1])
    held = cluster.complete(cluster.commit())
    return lambda: (cluster.end(copy), held)[0]


def with_an_unread_operator(message: str) -> Callable[[], object]:
    cluster = Cluster(op=1, other=1)
    cluster.run_tasks([0])
    return lambda: cluster.commit(0)


def read_in_part(message: str) -> Callable[[], object]:
    cluster = Cluster(op=3, other=1)
    cluster.run_tasks([0], operator="other")
    cluster.run_tasks([0])
    cluster.begun(1)
    return lambda: cluster.commit(0)


WORLDS: dict[str, tuple[Callable[[str], Callable[[], object]], type[DstlError] | None, str]] = {
    "of a run that another has replaced": (of_an_old_run, Fenced, "run-2 has replaced it"),
    "of an operator that is not this backend's": (of_a_foreign_operator, Invalid, "'c' is not one of .*: a, b"),
    "of a batch before the current one": (of_an_earlier_batch, Superseded, "batch 0 is over: batch 1 has begun"),
    "of a batch that has not begun": (of_a_batch_that_has_not_begun, Superseded, "never began"),
    "of a batch of which no task has begun": (
        of_a_batch_that_has_not_begun,
        Invalid,
        "batch 0 is not committed: the query does not read operator 'op'. Define what the query writes and",
    ),
    "of a batch that has failed": (of_a_failed_batch, TaskManagerLost, "^gone$"),
    "of a batch before the newest checkpoint's": (behind_the_state, Fenced, "the state is at batch 2"),
    "of a batch whose predecessor has no checkpoint": (
        without_predecessor,
        MissingState,
        r"batch 2 needs the checkpoint of batch 1, .*\(held: 0\)",
    ),
    "of an attempt that never began": (that_never_began, Superseded, "never began in batch 0"),
    "of a batch that Spark has committed": (behind_the_commit, None, ""),
    "of a batch in which an operator was not run": (
        with_an_unread_operator,
        Invalid,
        "the query does not read operator 'other'. Define what the query writes and nothing else",
    ),
    "of a batch in which a partition was not run to its end": (
        read_in_part,
        CheckpointDeclined,
        r"'op' \(1 of 3 partitions\).*Spark replays the batch",
    ),
}


@pytest.mark.parametrize(
    ("when", "message"), [(each.when, message) for each in RULES for message in each.messages], ids=" ".join
)
def test_each_row_of_the_table_answers_as_it_says(when: str, message: str) -> None:
    world, error, says = WORLDS[when]
    send = world(message)
    if error is None:
        send()
        return
    for _ in range(3):
        with pytest.raises(error, match=says) as caught:
            send()
        # One and the same error would grow by a traceback with every task that raises it.
        assert len(caught.traceback) < 10


def test_the_rows_are_told_apart() -> None:
    assert [each.when for each in RULES] == list(WORLDS)


def test_tasks_are_missing_until_every_partition_was_run_and_not_of_a_batch_that_is_over_or_lost() -> None:
    cluster = Cluster(a=1, b=2)
    assert cluster.coordinator.lacks_tasks(0)
    cluster.run_tasks([0], operator="a")
    cluster.run_tasks([0], operator="b")
    assert cluster.coordinator.lacks_tasks(0)
    cluster.run_tasks([1], operator="b")
    assert not cluster.coordinator.lacks_tasks(0)
    cluster.complete(cluster.commit())
    assert cluster.coordinator.lacks_tasks(1)
    cluster.run_tasks([0], batch=1, operator="a")
    assert not cluster.coordinator.lacks_tasks(0)
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    assert not cluster.coordinator.lacks_tasks(1), "what is lost stays lost in this run"


def test_55328_of_two_copies_of_a_task_the_later_one_counts_whichever_ends_first() -> None:
    """apache/spark#55328, and 5 of reliability 3.4. Spark's own stores keep what was put last, by the same order."""
    for in_order in (True, False):
        cluster = Cluster(op=1)
        first, copy = cluster.begun(0), cluster.begun(0)
        for task in (first, copy) if in_order else (copy, first):
            cluster.end(task)
            cluster.end(task)  # a reply that was lost: it is said again
        assert cluster.commit().winners == {"op": (copy.attempt_id,)}


def test_an_attempt_that_ends_while_the_commit_is_on_its_way_counts_for_nothing() -> None:
    cluster = Cluster(op=1)
    first, copy = cluster.begun(0), cluster.begun(0)
    cluster.end(first)
    trigger = cluster.commit()
    cluster.end(copy)
    assert trigger.winners == {"op": (first.attempt_id,)}
    cluster.complete(trigger)
    (held,) = cluster.coordinator.completed
    assert cluster.coordinator.begin(cluster.task(0, batch=1), 6) is held


def test_a_checkpoint_of_a_replaced_run_does_not_count_in_the_new_one() -> None:
    """A.3, 8: two fast restarts."""
    cluster = Cluster()
    cluster.run_tasks([0, 1])
    trigger = cluster.commit()
    cluster.new_run()
    cluster.run_tasks([0, 1])
    with pytest.raises(Fenced, match="run-2 has replaced it"):
        cluster.complete(trigger)
    assert cluster.coordinator.completed == ()
    cluster.complete(cluster.commit())


@pytest.mark.parametrize("retain", [2, 3, 5])
def test_retention_keeps_the_parent_and_the_count(retain: int) -> None:
    cluster = Cluster()
    for batch in range(8):
        cluster.run_tasks([0, 1], batch=batch)
        trigger = cluster.commit(batch)
        boundary = cluster.coordinator.oldest_after(trigger, retain)
        subsumed = cluster.complete(trigger, retain)
        held = cluster.coordinator.completed
        assert [c.batch_id for c in held] == list(range(max(0, batch + 1 - retain), batch + 1))
        assert all(c.checkpoint_id < held[0].checkpoint_id for c in subsumed)
        # The record's cleanup boundary, known before the commit, is what is retained after it.
        assert boundary == (held[0].checkpoint_id if batch else 0)


def test_a_run_that_does_the_last_batch_again_subsumes_its_checkpoint_alone() -> None:
    cluster = at_batch(3)
    cluster.new_run(cluster.coordinator.completed)
    assert [c.checkpoint_id for c in cluster.batch(2)] == [4]
    assert [c.checkpoint_id for c in cluster.coordinator.completed] == [2, 3, 5]


class History(RuleBasedStateMachine):
    """Tasks begin, end, are retried, speculated and run again; Spark commits; runs and TaskManagers go.

    Slots of a stage are shifted by a random offset, as a union shifts them; some partitions have no rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(op=3, other=2)
        self.coordinator = self.cluster.coordinator
        self.batch = 0
        self.stage = 1
        self.offset = 0
        self.open: list[tuple[TaskAttempt, int]] = []
        self.ended: dict[tuple[str, int], set[int]] = {}
        self.empty: set[tuple[str, int]] = set()
        self.failed = False
        self.committed = False

    @rule(operator=st.sampled_from(["op", "other"]), partition=st.integers(0, 2))
    def begin(self, operator: str, partition: int) -> None:
        if partition >= self.cluster.operators[operator]:
            return
        task = self.cluster.task(partition + self.offset, batch=self.batch, stage=self.stage, operator=operator)
        if self.failed:
            with pytest.raises(TaskManagerLost):
                self.coordinator.begin(task, self.batch)
            return
        parent = self.coordinator.begin(task, self.batch)
        assert (parent.batch_id if parent else -1) == self.batch - 1
        self.open.append((task, partition))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        task, partition = data.draw(st.sampled_from(self.open))
        at = None if (task.operator, partition) in self.empty else partition
        if task.run_id != self.coordinator.run_id or task.batch_id < self.batch:
            with pytest.raises(Fenced):
                self.cluster.end(task, at)
        elif self.failed:
            with pytest.raises(TaskManagerLost):
                self.cluster.end(task, at)
        else:
            self.cluster.end(task, at)
            if not self.committed:
                self.ended.setdefault((task.operator, partition), set()).add(task.attempt_id)

    @precondition(lambda self: not self.committed)
    @rule()
    def commit(self) -> None:
        places = {(uid, at) for uid, parallelism in self.cluster.operators.items() for at in range(parallelism)}
        if self.failed or not places <= set(self.ended):
            # Also where it is whole, and a place without rows cannot be told: see the tests of covered partitions.
            with pytest.raises((TaskManagerLost, Invalid, CheckpointDeclined)):
                self.cluster.commit(self.batch)
            return
        try:
            trigger = self.cluster.commit(self.batch)
        except CheckpointDeclined:
            assert self.empty, "every partition was run to its end"
            return
        for operator, parallelism in self.cluster.operators.items():
            best = [max(self.ended[operator, at]) for at in range(parallelism) if (operator, at) not in self.empty]
            assert list(trigger.winners[operator]) == best
        boundary = self.coordinator.oldest_after(trigger, 2)
        self.cluster.complete(trigger, retain=2)
        assert boundary in (0, self.coordinator.completed[0].checkpoint_id)
        self.committed = True

    @precondition(lambda self: self.committed)
    @rule(empty=st.sets(st.tuples(st.sampled_from(["op", "other"]), st.integers(0, 2))), offset=st.integers(0, 4))
    def next_batch(self, empty: set[tuple[str, int]], offset: int) -> None:
        self._enter(self.batch + 1, empty)
        self.offset = offset
        self.begin("op", 0)

    @rule(offset=st.integers(0, 4))
    def second_action(self, offset: int) -> None:
        """Another stage, other slots; the same input has the same empty partitions."""
        self.stage, self.offset = self.stage + 1, offset

    @rule(again=st.booleans(), empty=st.sets(st.tuples(st.sampled_from(["op", "other"]), st.integers(0, 2))))
    def new_run(self, again: bool, empty: set[tuple[str, int]]) -> None:
        """A restart; Spark may run the last completed batch again."""
        held = self.coordinator.completed
        self.cluster.new_run(held)
        latest = held[-1].batch_id if held else -1
        can_go_back = again and (latest == 0 or any(c.batch_id == latest - 1 for c in held))
        self._enter(latest if can_go_back else latest + 1, empty)

    @rule()
    def lose_a_task_manager(self) -> None:
        self.coordinator.fail_batch(TaskManagerLost("gone"))
        # What a committed batch has is durable: only a task that comes behind it hears of the loss.
        self.failed = self.failed or bool(self.ended)

    @invariant()
    def keeps_two_batches_once_there_were_two(self) -> None:
        held = [c.batch_id for c in self.coordinator.completed]
        assert held == sorted(set(held))
        assert all(after == before + 1 for before, after in pairwise(held))
        assert len(held) >= min(2, (held[-1] + 1) if held else 0)

    def _enter(self, batch: int, empty: set[tuple[str, int]]) -> None:
        self.batch, self.stage, self.empty = batch, self.stage + 1, empty
        self.ended, self.failed, self.committed = {}, False, False


TestHistory = History.TestCase
TestHistory.settings = settings(deadline=None, max_examples=50, stateful_step_count=40)
