"""The coordinator's table, row by row, and any history of tasks against a model."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dstl.checkpoint.coordinator import CheckpointCoordinator, Decision, Trigger
from dstl.errors import (
    CheckpointDeclined,
    DstlError,
    Fenced,
    Invalid,
    MissingState,
    NotDeterministic,
    TaskManagerLost,
)
from dstl.rpc.messages import Acknowledgement, TaskAttempt
from handles.checkpoint import CompletedCheckpoint
from worlds.manifest_samples import QUERY, checkpoint


class Cluster:
    """Plays Spark: hands out attempt ids and sequence numbers, and completes checkpoints."""

    def __init__(self, **operators: int) -> None:
        self.operators = operators or {"op": 2}
        self.coordinator = CheckpointCoordinator(self.operators)
        self.attempts = count(100)
        self.sequence = count(2)
        self.run = "run-1"
        self.gone: set[int] = set()
        self.coordinator.open_run(self.run, [])

    def task(
        self, slot: int, *, batch: int = 0, stage: int = 1, operator: str = "op", run: str | None = None
    ) -> TaskAttempt:
        return TaskAttempt(QUERY, run or self.run, operator, batch, slot, stage, next(self.attempts))

    def begun(self, slot: int, *, batch: int = 0, stage: int = 1, operator: str = "op") -> TaskAttempt:
        task = self.task(slot, batch=batch, stage=stage, operator=operator)
        self.coordinator.begin(task, 1000 + batch, lambda attempt: attempt not in self.gone)
        return task

    def ack(self, task: TaskAttempt, digest: bytes | None = None, partition: int | None = -1) -> Decision:
        """Acknowledge; the partition is the slot and the digest the partition's, unless said otherwise."""
        at = task.slot if partition == -1 else partition
        changes = (b"" if at is None else b"%d" % at) if digest is None else digest
        return self.coordinator.acknowledge(Acknowledgement(task, at, changes))

    def run_tasks(self, slots: Iterable[int], *, batch: int = 0, stage: int = 1, operator: str = "op") -> Decision:
        decision = Decision.GO_ON
        for slot in slots:
            decision = self.ack(self.begun(slot, batch=batch, stage=stage, operator=operator))
        return decision

    def complete(self, trigger: Trigger | None = None, retain: int = 3) -> list[CompletedCheckpoint]:
        trigger = trigger or self.coordinator.trigger()
        assert trigger is not None
        made = checkpoint(next(self.sequence), trigger.batch_id, parent=trigger.parent)
        return self.coordinator.complete(trigger, made, retain)

    def batch(self, batch: int, stage: int = 1, retain: int = 3) -> list[CompletedCheckpoint]:
        for operator, parallelism in self.operators.items():
            self.run_tasks(range(parallelism), batch=batch, stage=stage, operator=operator)
        return self.complete(retain=retain)


def winners(cluster: Cluster, operator: str = "op") -> tuple[int, ...]:
    trigger = cluster.coordinator.trigger()
    assert trigger is not None
    return trigger.winners[operator]


def broadcast_ack(task: TaskAttempt, changed: bytes, keyed: bytes = b"") -> Acknowledgement:
    return Acknowledgement(task, task.slot, keyed, broadcast=changed)


def test_partitions_that_have_changed_the_broadcast_state_differently_fail_the_batch() -> None:
    for tasks in ([(0, b"x"), (1, b"y")], [(0, b"x"), (1, b"")], [(0, b""), (1, b"x")]):
        cluster = Cluster(op=2)
        first, second = [(cluster.begun(slot), changed) for slot, changed in tasks]
        cluster.coordinator.acknowledge(broadcast_ack(*first))
        with pytest.raises(NotDeterministic, match=r"partitions 0 and 1 .*handleBroadcastRows a function of its rows"):
            cluster.coordinator.acknowledge(broadcast_ack(*second))
        with pytest.raises(NotDeterministic):
            cluster.begun(1)


def test_a_retry_that_has_changed_the_broadcast_state_as_all_others_have_takes_its_place() -> None:
    cluster = Cluster(op=2)
    lost = cluster.begun(0)
    cluster.coordinator.acknowledge(broadcast_ack(lost, b"x", b"keyed"))
    rival = cluster.begun(0)
    with pytest.raises(CheckpointDeclined, match="one task"):
        cluster.coordinator.acknowledge(broadcast_ack(rival, b"y", b"keyed"))
    cluster = Cluster(op=2)
    lost = cluster.begun(0)
    cluster.coordinator.acknowledge(broadcast_ack(lost, b"x", b"keyed"))
    cluster.gone.add(lost.attempt_id)
    cluster.coordinator.acknowledge(broadcast_ack(cluster.begun(0), b"y", b"keyed"))
    assert cluster.coordinator.acknowledge(broadcast_ack(cluster.begun(1), b"y")) is Decision.WAIT


def test_the_acknowledgement_that_completes_the_set_waits() -> None:
    cluster = Cluster(a=2, b=1)
    assert cluster.run_tasks([0, 1], operator="a") is Decision.GO_ON
    assert cluster.coordinator.trigger() is None
    assert cluster.run_tasks([0], operator="b") is Decision.WAIT
    trigger = cluster.coordinator.trigger()
    assert trigger == Trigger("run-1", 0, 3, None, {"a": (100, 101), "b": (102,)})


def test_a_message_of_a_run_that_another_has_replaced_is_fenced() -> None:
    cluster = Cluster()
    old = cluster.begun(0)
    cluster.coordinator.open_run("run-2", [])
    for call in (lambda: cluster.coordinator.begin(old, 0), lambda: cluster.ack(old)):
        with pytest.raises(Fenced, match="run-2 has replaced it"):
            call()


def test_a_message_of_an_earlier_batch_is_fenced() -> None:
    cluster = Cluster()
    late = cluster.begun(0)
    cluster.batch(0)
    cluster.begun(0, batch=1)
    with pytest.raises(Fenced, match="batch 0 is over"):
        cluster.ack(late)
    with pytest.raises(Fenced, match="batch 0 is over"):
        cluster.begun(1, batch=0)


def test_a_batch_whose_predecessor_has_no_checkpoint_is_refused() -> None:
    cluster = Cluster()
    with pytest.raises(MissingState, match="batch 7 needs the checkpoint of batch 6"):
        cluster.begun(0, batch=7)
    cluster.batch(0)
    cluster.begun(0, batch=1)
    with pytest.raises(MissingState, match=r"batch 1 ended.*op \(0 of 2 tasks\).*remove commits/1 and offsets/2"):
        cluster.begun(0, batch=2)


def test_after_a_restart_the_error_names_the_batch_that_spark_has_to_run_again() -> None:
    cluster = Cluster()
    cluster.batch(0)
    cluster.coordinator.open_run("run-2", cluster.coordinator.completed)
    cluster.run = "run-2"
    with pytest.raises(MissingState, match=r"remove commits/1 and offsets/2 .*so that Spark runs batch 1 again"):
        cluster.begun(0, batch=2)
    cluster.batch(1)
    cluster.coordinator.open_run("run-3", [])
    cluster.run = "run-3"
    with pytest.raises(MissingState, match="do not belong together"):
        cluster.begun(0, batch=2)


def test_an_empty_state_is_sound_for_the_first_batch_alone() -> None:
    cluster = Cluster()
    assert cluster.coordinator.begin(cluster.task(0), 0) is None
    cluster.batch(0, stage=2)
    parent = cluster.coordinator.begin(cluster.task(0, batch=1), 0)
    assert parent is not None
    assert parent.batch_id == 0


def test_the_same_changes_count_once() -> None:
    cluster = Cluster()
    first = cluster.begun(0)
    assert cluster.ack(first) is Decision.GO_ON
    assert cluster.ack(first) is Decision.GO_ON
    assert cluster.ack(cluster.begun(0)) is Decision.GO_ON
    assert cluster.run_tasks([1]) is Decision.WAIT
    assert winners(cluster)[0] == first.attempt_id


def test_55328_of_two_copies_of_a_task_that_agree_exactly_one_counts() -> None:
    """apache/spark#55328, and 5 of reliability 3.4."""
    cluster = Cluster()
    first, copy = cluster.begun(0), cluster.begun(0)
    assert cluster.ack(copy) is Decision.GO_ON
    assert cluster.ack(first) is Decision.GO_ON
    assert cluster.run_tasks([1]) is Decision.WAIT
    assert winners(cluster)[0] == copy.attempt_id


def test_two_copies_of_a_task_that_may_both_be_kept_and_differ_fail_the_batch() -> None:
    """A zombie acknowledged first, or a slow sink: the state was one attempt's and the output the other's."""
    cluster = Cluster()
    zombie, kept = cluster.begun(0), cluster.begun(0)
    cluster.ack(zombie, b"of the zombie")
    with pytest.raises(
        CheckpointDeclined, match=r"'op', partition 0: attempts 100 and 101 of one task.*determin"
    ) as no:
        cluster.ack(kept, b"of the one that Spark keeps")
    assert no.value.restartable, "a replay has no rival"
    for call in (lambda: cluster.begun(0), lambda: cluster.ack(zombie, b"of the zombie")):
        with pytest.raises(CheckpointDeclined, match="attempts 100 and 101"):
            call()


def test_an_attempt_that_ended_after_its_rival_had_begun_may_have_been_kept() -> None:
    """A speculative copy's original ends well, and its worker is reaped, before the copy is killed."""
    cluster = Cluster()
    kept = cluster.begun(0)
    cluster.ack(kept, b"kept")
    copy = cluster.begun(0)
    cluster.gone.add(kept.attempt_id)
    with pytest.raises(CheckpointDeclined, match="Restart the query"):
        cluster.ack(copy, b"of the copy")


def test_an_attempt_is_not_replaced_while_another_that_agreed_with_it_lives() -> None:
    cluster = Cluster()
    first, second = cluster.begun(0), cluster.begun(0)
    cluster.ack(first, b"same")
    cluster.ack(second, b"same")
    cluster.gone.add(first.attempt_id)
    with pytest.raises(CheckpointDeclined):
        cluster.ack(cluster.begun(0), b"other")


def test_a_speculative_copy_of_a_complete_set_waits_like_the_others() -> None:
    """Found in review: it ended at once, and Spark could commit the batch before its checkpoint was durable."""
    cluster = Cluster()
    copy = cluster.begun(1)
    assert cluster.run_tasks([0, 1]) is Decision.WAIT
    assert cluster.ack(copy) is Decision.WAIT
    trigger = cluster.coordinator.trigger()
    assert trigger is not None
    assert copy.attempt_id not in trigger.winners["op"]


def test_a_retry_replaces_the_attempt_whose_worker_has_died() -> None:
    cluster = Cluster()
    first = cluster.begun(0)
    cluster.ack(first, b"first")
    cluster.gone.add(first.attempt_id)
    retry = cluster.begun(0)
    assert cluster.ack(retry, b"second") is Decision.GO_ON
    cluster.run_tasks([1])
    assert winners(cluster)[0] == retry.attempt_id


def test_a_replacement_after_the_checkpoint_makes_it_again_from_the_same_parent() -> None:
    cluster = Cluster()
    cluster.batch(0)
    cluster.batch(1)
    cluster.gone.update(range(100, 200))  # the executors are lost with their output: the stage is run again
    retry = cluster.begun(1, batch=1, stage=1)
    assert cluster.ack(retry, b"again") is Decision.WAIT
    trigger = cluster.coordinator.trigger()
    assert trigger is not None
    assert (trigger.batch_id, trigger.parent) == (1, 2)
    assert retry.attempt_id in trigger.winners["op"]
    assert cluster.coordinator.overdue(cluster.task(0, batch=2)) == trigger
    with pytest.raises(MissingState, match="batch 2 needs the checkpoint of batch 1"):
        cluster.begun(0, batch=2)  # the one there is belongs to output that Spark has dropped
    assert [c.checkpoint_id for c in cluster.complete(trigger)] == [3]
    assert [c.checkpoint_id for c in cluster.coordinator.completed] == [2, 4]
    assert cluster.coordinator.trigger() is None
    assert cluster.coordinator.overdue(cluster.task(0, batch=2)) is None
    cluster.begun(0, batch=2)


def test_the_actions_of_a_batch_cover_its_partitions_together() -> None:
    """``take(1)`` and then all, or ``toLocalIterator``: a stage for each piece, and no piece is the whole."""
    cluster = Cluster(op=3)
    cluster.run_tasks([0, 1], stage=1)
    assert cluster.run_tasks([0, 1], stage=2) is Decision.GO_ON
    assert cluster.coordinator.trigger() is None
    assert cluster.run_tasks([2], stage=3) is Decision.WAIT
    assert winners(cluster) == (100, 101, 104)


@pytest.mark.parametrize("first_with_rows", [0, 1, 2])
def test_a_stage_without_rows_is_placed_by_the_other_stages(first_with_rows: int) -> None:
    cluster = Cluster(op=3)
    for slot in range(3):
        assert cluster.coordinator.trigger() is None
        at = slot if slot == first_with_rows else None
        decision = cluster.ack(cluster.begun(slot, stage=slot), partition=at)
    assert decision is Decision.WAIT
    assert winners(cluster) == (100, 101, 102)


def test_a_stage_without_rows_is_not_placed_where_the_other_stages_are_shifted_differently() -> None:
    cluster = Cluster(op=3)
    cluster.ack(cluster.begun(0, stage=1), partition=0)
    cluster.ack(cluster.begun(4, stage=2), partition=1)
    # Partition 2 in a stage like the first, none of the operator's own in one like the second.
    assert cluster.ack(cluster.begun(2, stage=3), partition=None) is Decision.GO_ON
    assert cluster.coordinator.trigger() is None


def test_a_checkpoint_that_failed_unseen_is_made_before_the_next_batch_begins() -> None:
    """A sink that catches the error of its action: Spark commits the batch."""
    cluster = Cluster()
    cluster.run_tasks([0, 1])
    following = cluster.task(0, batch=1)
    trigger = cluster.coordinator.overdue(following)
    assert trigger is not None
    assert trigger.winners == {"op": (100, 101)}
    assert cluster.coordinator.overdue(cluster.task(0, batch=0)) is None
    cluster.complete(trigger)
    assert cluster.coordinator.overdue(following) is None
    cluster.coordinator.begin(following, 0)


def test_a_failed_batch_is_not_completed_behind_its_back() -> None:
    cluster = Cluster()
    cluster.run_tasks([0, 1])
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    assert cluster.coordinator.overdue(cluster.task(0, batch=1)) is None
    with pytest.raises(MissingState, match=r"it has failed: gone.*remove commits/0 and offsets/1"):
        cluster.begun(0, batch=1)


def test_a_second_action_with_the_same_changes_makes_no_second_checkpoint() -> None:
    """Found in review: with the slots shifted by a union, equal changes made the checkpoint again."""
    cluster = Cluster(op=3)
    cluster.batch(0)
    for slot in range(5, 8):
        assert cluster.ack(cluster.begun(slot, stage=2), partition=slot - 5) is Decision.WAIT
    assert cluster.coordinator.trigger() is None


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_second_action_that_differs_fails_the_batch_for_both_outputs_are_used(is_complete: bool) -> None:
    """Whether the first one's workers live or not; slot 1 of the second action is partition 0."""
    cluster = Cluster(op=3)
    cluster.run_tasks([0, 1, 2] if is_complete else [0])
    if is_complete:
        cluster.complete()
    cluster.gone.update(range(100, 103))
    shifted = cluster.begun(1, stage=2)
    with pytest.raises(NotDeterministic, match=r"'op', partition 0: attempt 100 .*persist\(\)") as caught:
        cluster.ack(shifted, b"changed", partition=0)
    assert not caught.value.restartable
    with pytest.raises(NotDeterministic, match="attempt 100 "):
        cluster.begun(2, stage=2)
    # Spark runs the batch again, from the same parent, and the first one's checkpoint is none.
    cluster.coordinator.open_run("run-2", cluster.coordinator.completed)
    cluster.run = "run-2"
    for slot in range(3):
        task = cluster.task(slot, stage=3)
        assert cluster.coordinator.begin(task, 0) is None
        cluster.ack(task, b"%d now" % slot)
    assert len(cluster.complete()) == is_complete


def test_a_retry_that_differs_from_what_another_action_has_used_fails_the_batch() -> None:
    cluster = Cluster(op=2)
    first = cluster.begun(0, stage=1)
    cluster.ack(first, b"same")
    cluster.ack(cluster.begun(0, stage=2), b"same")
    cluster.gone.add(first.attempt_id)
    with pytest.raises(NotDeterministic):
        cluster.ack(cluster.begun(0, stage=1), b"other")


@pytest.mark.parametrize("rows_first", [True, False])
def test_a_partition_with_rows_in_one_action_and_none_in_another_is_not_deterministic(rows_first: bool) -> None:
    cluster = Cluster(op=3)
    stages = (1, 2) if rows_first else (2, 1)
    for stage in stages:
        cluster.ack(cluster.begun(5, stage=stage), partition=0)
    acks = [(1, 1), (2, None)] if rows_first else [(2, None), (1, 1)]
    cluster.ack(cluster.begun(6, stage=acks[0][0]), partition=acks[0][1])
    with pytest.raises(NotDeterministic, match="partition 1"):
        cluster.ack(cluster.begun(6, stage=acks[1][0]), partition=acks[1][1])


def test_the_empty_partition_of_a_stage_is_compared_once_its_place_is_known() -> None:
    cluster = Cluster(op=3)
    cluster.ack(cluster.begun(1, stage=1), partition=1)
    assert cluster.ack(cluster.begun(6, stage=2), partition=None) is Decision.GO_ON
    with pytest.raises(NotDeterministic, match="partition 1"):
        cluster.ack(cluster.begun(5, stage=2), partition=0)


def test_a_task_of_an_older_stage_does_not_void_the_newer_ones_acknowledgements() -> None:
    """Found in review: a zombie of the first action threw out everything that the second had acknowledged."""
    cluster = Cluster(op=3)
    cluster.run_tasks([0], stage=1)
    cluster.run_tasks([0, 1], stage=2)
    zombie = cluster.begun(1, stage=1)
    cluster.ack(zombie)
    assert cluster.run_tasks([2], stage=2) is Decision.WAIT
    assert zombie.attempt_id not in winners(cluster)


def test_two_stages_of_one_job_that_both_compute_the_operator_do_not_disturb_each_other() -> None:
    """A DataFrame that is joined with itself: the tasks of both stages come interleaved."""
    cluster = Cluster(op=2)
    one, two = cluster.begun(0, stage=1), cluster.begun(0, stage=2)
    assert cluster.ack(one) is Decision.GO_ON
    assert cluster.ack(two) is Decision.GO_ON
    assert cluster.run_tasks([1], stage=2) is Decision.WAIT
    cluster.complete()
    assert cluster.run_tasks([1], stage=1) is Decision.WAIT
    assert cluster.coordinator.trigger() is None


def test_an_empty_partition_of_a_union_with_itself_is_not_counted_for_another() -> None:
    """Only partition 3 has rows, and its two tasks are at work: an empty checkpoint was made meanwhile."""
    cluster = Cluster(op=4)
    for slot in (0, 1, 2, 4, 5, 6):
        assert cluster.ack(cluster.begun(slot), partition=None) is Decision.GO_ON
    assert cluster.coordinator.trigger() is None
    last = cluster.begun(7)
    assert cluster.ack(last, partition=3) is Decision.WAIT
    assert last.attempt_id in winners(cluster)
    assert len(winners(cluster)) == 4


def test_the_branches_of_a_union_with_itself_have_to_agree() -> None:
    cluster = Cluster(op=2)
    first = cluster.begun(0)
    cluster.ack(first, partition=0)
    cluster.gone.add(first.attempt_id)
    with pytest.raises(NotDeterministic):
        cluster.ack(cluster.begun(2), b"other", partition=0)


def test_empty_partitions_are_told_apart_by_the_branch_they_are_in() -> None:
    """Found in review: a union of a DataFrame with itself counted an empty partition twice, and another not at all."""
    cluster = Cluster(op=3)
    assert cluster.ack(cluster.begun(0), partition=0) is Decision.GO_ON
    assert cluster.ack(cluster.begun(1), partition=None) is Decision.GO_ON
    # The second branch: slots 3, 4, 5; its partition 1 is empty too, and partition 2 has not been heard of.
    assert cluster.ack(cluster.begun(3), partition=0) is Decision.GO_ON
    assert cluster.ack(cluster.begun(4), partition=None) is Decision.GO_ON
    assert cluster.coordinator.trigger() is None
    assert cluster.ack(cluster.begun(5), partition=2) is Decision.WAIT


def test_a_batch_without_any_row_is_complete_when_every_task_has_said_so() -> None:
    cluster = Cluster(op=3)
    for slot in (7, 8):
        assert cluster.ack(cluster.begun(slot), partition=None) is Decision.GO_ON
    assert cluster.ack(cluster.begun(9), partition=None) is Decision.WAIT


def test_an_attempt_that_never_began_is_fenced() -> None:
    cluster = Cluster()
    with pytest.raises(Fenced, match="never began"):
        cluster.ack(cluster.task(0))
    cluster.begun(0)
    with pytest.raises(Fenced, match="never began"):
        cluster.ack(cluster.task(0))


def test_a_task_that_runs_a_second_partition_is_refused_by_name() -> None:
    # coalesce() behind an operator: one attempt, one slot, and one acknowledgement that would count.
    cluster = Cluster(op=3)
    task = replace(cluster.task(0), invocation="first")
    for _ in range(2):
        cluster.coordinator.begin(task, 1000)  # asking again is no second partition
    with pytest.raises(Invalid, match=r"'op'.*coalesce\(\)"):
        cluster.coordinator.begin(replace(task, invocation="second"), 1000)
    cluster.coordinator.begin(replace(cluster.task(0), invocation="second"), 1000)


def test_an_unknown_operator_is_named() -> None:
    cluster = Cluster(a=1, b=1)
    with pytest.raises(Invalid, match="'c' is not one of this backend's: a, b"):
        cluster.begun(0, operator="c")


def test_a_lost_task_manager_fails_the_batch_that_it_had_changes_of() -> None:
    cluster = Cluster()
    cluster.coordinator.fail_batch(TaskManagerLost("nobody has acknowledged: nothing is lost"))
    cluster.run_tasks([0])
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    for _ in range(3):
        with pytest.raises(TaskManagerLost, match="gone") as caught:
            cluster.begun(1)
        # One and the same error would grow by a traceback with every task that raises it.
        assert len(caught.traceback) < 10
    cluster.coordinator.open_run("run-2", [])
    cluster.run = "run-2"
    cluster.batch(0)


def test_a_set_that_fails_while_its_last_task_waits_is_not_checkpointed() -> None:
    """Found in review: the task that waited for its turn made a checkpoint of changes that were lost meanwhile."""
    cluster = Cluster()
    assert cluster.run_tasks([0, 1]) is Decision.WAIT
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    with pytest.raises(TaskManagerLost, match="gone"):
        cluster.coordinator.trigger()


def test_a_failure_after_the_checkpoint_does_not_touch_the_next_batch() -> None:
    cluster = Cluster()
    cluster.batch(0)
    cluster.coordinator.fail_batch(TaskManagerLost("gone"))
    cluster.batch(1)


def test_a_checkpoint_of_a_replaced_run_does_not_count_in_the_new_one() -> None:
    """A.3, 8: two fast restarts. The second run's set had the same version as the one being committed."""
    cluster = Cluster()
    cluster.run_tasks([0, 1])
    trigger = cluster.coordinator.trigger()
    assert trigger is not None
    cluster.coordinator.open_run("run-2", [])
    cluster.run = "run-2"
    cluster.run_tasks([0, 1])
    with pytest.raises(Fenced, match="run-2 has replaced it"):
        cluster.complete(trigger)
    assert cluster.coordinator.trigger() is not None, "the new run's checkpoint is still due"


def test_all_tasks_of_a_batch_have_one_time() -> None:
    cluster = Cluster()
    cluster.coordinator.begin(cluster.task(0), 5)
    cluster.coordinator.begin(cluster.task(1), 9)
    assert cluster.coordinator.batch_time.ms == 5


@pytest.mark.parametrize("retain", [2, 3, 5])
def test_retention_keeps_the_parent_and_the_count(retain: int) -> None:
    cluster = Cluster()
    for batch in range(8):
        cluster.run_tasks([0, 1], batch=batch)
        trigger = cluster.coordinator.trigger()
        assert trigger is not None
        boundary = cluster.coordinator.oldest_after(trigger, retain)
        subsumed = cluster.complete(trigger, retain)
        held = cluster.coordinator.completed
        assert [c.batch_id for c in held] == list(range(max(0, batch + 1 - retain), batch + 1))
        assert all(c.checkpoint_id < held[0].checkpoint_id for c in subsumed)
        # The record's cleanup boundary, known before the commit, is what is retained after it.
        assert boundary == (held[0].checkpoint_id if batch else 0)


def test_a_run_that_does_the_last_batch_again_subsumes_its_checkpoint_alone() -> None:
    cluster = Cluster()
    for batch in range(3):
        cluster.batch(batch)
    cluster.coordinator.open_run("run-2", cluster.coordinator.completed)
    cluster.run = "run-2"
    cluster.run_tasks([0, 1], batch=2)
    assert [c.checkpoint_id for c in cluster.complete()] == [4]
    assert [c.checkpoint_id for c in cluster.coordinator.completed] == [2, 3, 5]


def test_a_run_that_would_go_further_back_is_fenced() -> None:
    """10 of reliability 3.4: a paused driver's plan is older than what another has completed."""
    cluster = Cluster()
    for batch in range(3):
        cluster.batch(batch)
    cluster.coordinator.open_run("run-2", cluster.coordinator.completed)
    cluster.run = "run-2"
    with pytest.raises(Fenced, match="the state is at batch 2"):
        cluster.begun(0, batch=1)


class History(RuleBasedStateMachine):
    """Tasks begin, acknowledge, are retried, speculated and re-run; runs are replaced; TaskManagers are lost.

    Slots of a stage are shifted by a random offset, as a union shifts them; some partitions have no rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(op=3, other=2)
        self.coordinator = self.cluster.coordinator
        self.batch = 0
        self.stage = 1
        self.offset = 0
        self.runs = 1
        self.open: list[tuple[TaskAttempt, int]] = []
        self.acked: dict[int, tuple[str, int, bytes]] = {}
        self.gone: set[int] = set()
        self.ended_before: dict[int, set[int]] = {}
        self.agreed: dict[tuple[str, int], list[TaskAttempt]] = {}
        self.content: dict[tuple[str, int], bytes] = {}
        self.empty: set[tuple[str, int]] = set()
        self.failed: type[DstlError] | None = None
        self.last: Trigger | None = None

    @rule(operator=st.sampled_from(["op", "other"]), partition=st.integers(0, 2))
    def begin(self, operator: str, partition: int) -> None:
        if partition >= self.cluster.operators[operator]:
            return
        task = self.cluster.task(
            partition + self.offset, batch=self.batch, stage=self.stage, operator=operator, run=self.cluster.run
        )
        if self.failed:
            with pytest.raises(self.failed):
                self.coordinator.begin(task, self.batch)
            return
        parent = self.coordinator.begin(task, self.batch, lambda attempt: attempt not in self.gone)
        self.ended_before[task.attempt_id] = set(self.gone)
        assert (parent.batch_id if parent else -1) == self.batch - 1
        self.open.append((task, partition))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), changed=st.booleans())
    def acknowledge(self, data: st.DataObject, changed: bool) -> None:
        task, partition = data.draw(st.sampled_from(self.open))
        rowless = (task.operator, partition) in self.empty
        digest = b"" if rowless else b"%d" % partition + (b"!" if changed else b"")
        ack = Acknowledgement(task, None if rowless else partition, digest)
        if task.run_id != self.coordinator.run_id or task.batch_id < self.batch:
            with pytest.raises(Fenced):
                self.coordinator.acknowledge(ack)
            return
        if self.failed:
            with pytest.raises(self.failed):
                self.coordinator.acknowledge(ack)
            return
        error = self._expected(task, partition, digest)
        if error is not None:
            with pytest.raises(error):
                self.coordinator.acknowledge(ack)
            self.failed = error
            return
        self.coordinator.acknowledge(ack)
        self.acked[task.attempt_id] = (task.operator, partition, digest)

    def _expected(self, task: TaskAttempt, partition: int, digest: bytes) -> type[DstlError] | None:
        """Which error two attempts that differ lead to; where they agree, the newcomer joins the others."""
        place = (task.operator, partition)
        agreed = self.agreed.setdefault(place, [])
        if self.content.setdefault(place, digest) == digest:
            agreed.append(task)
            return None
        if any((other.stage_id, other.slot) != (task.stage_id, task.slot) for other in agreed):
            return NotDeterministic
        if any(other.attempt_id not in self.ended_before[task.attempt_id] for other in agreed):
            return CheckpointDeclined
        self.content[place], self.agreed[place] = digest, [task]
        return None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.open))
        self.open.remove(victim)
        self.gone.add(victim[0].attempt_id)

    @rule()
    def checkpoint(self) -> None:
        if self.failed:
            return
        trigger = self.coordinator.trigger()
        if trigger is None:
            return
        assert (trigger.batch_id, trigger.run_id) == (self.batch, self.cluster.run)
        assert self.last is None or trigger.version > self.last.version or trigger.batch_id > self.last.batch_id
        self.last = trigger
        for operator, parallelism in self.cluster.operators.items():
            won = [self.acked[attempt] for attempt in trigger.winners[operator]]
            assert {name for name, _, _ in won} == {operator}
            with_rows = [p for _, p, digest in won if digest]
            assert len(with_rows) == len(set(with_rows)), "two change sets of one partition"
            assert {p for _, p, _ in won} == set(range(parallelism)), "a trigger covers every partition"
        boundary = self.coordinator.oldest_after(trigger, 2)
        self.cluster.complete(trigger, retain=2)
        assert boundary in (0, self.coordinator.completed[0].checkpoint_id)
        assert self.coordinator.trigger() is None

    @precondition(lambda self: any(c.batch_id == self.batch for c in self.coordinator.completed))
    @rule(empty=st.sets(st.tuples(st.sampled_from(["op", "other"]), st.integers(0, 2))), offset=st.integers(0, 4))
    def next_batch(self, empty: set[tuple[str, int]], offset: int) -> None:
        self.batch, self.stage, self.offset = self.batch + 1, self.stage + 1, offset
        self.empty, self.failed = empty, None
        self.agreed, self.content = {}, {}
        self.begin("op", 0)

    @rule(offset=st.integers(0, 4))
    def second_action(self, offset: int) -> None:
        """Another stage, other slots; the same input has the same empty partitions."""
        self.stage, self.offset = self.stage + 1, offset

    @rule(again=st.booleans(), empty=st.sets(st.tuples(st.sampled_from(["op", "other"]), st.integers(0, 2))))
    def new_run(self, again: bool, empty: set[tuple[str, int]]) -> None:
        """A restart; Spark may run the last completed batch again."""
        self.runs += 1
        self.cluster.run = f"run-{self.runs}"
        held = self.coordinator.completed
        self.coordinator.open_run(self.cluster.run, held)
        latest = held[-1].batch_id if held else -1
        can_go_back = again and (latest == 0 or any(c.batch_id == latest - 1 for c in held))
        self.batch = latest if can_go_back else latest + 1
        self.stage, self.failed, self.last, self.empty = self.stage + 1, None, None, empty
        self.agreed, self.content = {}, {}
        if held and not can_go_back:
            assert held[-1].batch_id == self.batch - 1

    @rule()
    def lose_a_task_manager(self) -> None:
        self.coordinator.fail_batch(TaskManagerLost("gone"))
        if any(self.agreed.values()):
            self.failed = TaskManagerLost

    @invariant()
    def keeps_two_batches_once_there_were_two(self) -> None:
        held = [c.batch_id for c in self.coordinator.completed]
        assert held == sorted(set(held))
        assert all(after == before + 1 for before, after in pairwise(held))
        assert len(held) >= min(2, (held[-1] + 1) if held else 0)


TestHistory = History.TestCase
TestHistory.settings = settings(deadline=None, max_examples=120, stateful_step_count=40)
