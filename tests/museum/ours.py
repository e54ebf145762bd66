"""Bugs of our own that got past review, found by seeds that nobody chose, by kills and by reading; built in again."""

from collections import Counter
from typing import Any

from museum.bug import Bugs, Patch, load_tests

from dstl.checkpoint.finished_attempts import FinishedAttempts
from dstl.checkpoint.fleet.fleet import Fleet, FleetChanged
from dstl.checkpoint.run_opening import RunOpening
from dstl.errors import CheckpointDeclined, CorruptData, ObjectNotFound, Superseded
from dstl.rpc.fleet_messages import Restored
from dstl.state.entry_state import EntryState
from dstl.state.value_state import PointState
from dstl.taskmanager.state_backend import TaskManagerStateBackend

SERVICE = "checkpoint/test_service.py::"

BUGS = Bugs()


def _processors(*arguments: Any) -> Any:
    return load_tests(CHANGES.partition("::")[0]).processors(*arguments)


BACKEND = "taskmanager/test_task_manager_state_backend.py::"
CHANGES = "state/test_change_sets.py::test_a_change_set_knows_no_order_of_rows_and_no_parts"
TIMES = "state/test_runner_times.py::"


@BUGS.built_in(
    "402375812",
    BACKEND + "test_nothing_at_work_is_ended_by_the_checkpoint_of_its_batch",
    Superseded,
    "another attempt or batch has taken its place",
)
def attempts_at_work_are_ended(patch: Patch) -> None:
    """Seed 402375812: a checkpoint ended every attempt that it did not hold, until Spark's four tries were spent."""
    complete = TaskManagerStateBackend.complete

    def end_others(self: TaskManagerStateBackend, checkpoint_id: int, winners: Any, *rest: Any) -> None:
        complete(self, checkpoint_id, winners, *rest)
        chosen = {(operator, attempt) for operator, ids in winners.items() for attempt in ids}
        self._drop([key for key in self._attempts if key not in chosen])

    patch.setattr(TaskManagerStateBackend, "complete", end_others)


@BUGS.built_in(
    "402377153",
    SERVICE + "test_a_driver_that_finds_objects_gone_because_another_has_gone_on_is_fenced",
    ObjectNotFound,
    "cannot be restored: no object",
)
def objects_gone_are_called_damage(patch: Patch) -> None:
    """Seed 402377153: a fenced driver said of what its successor had cleaned away that a replica must bring it back."""

    async def prepare(self: RunOpening, query_id: str, parent: Any) -> Any:
        return await self._fleet.prepare(query_id, parent)

    patch.setattr(RunOpening, "prepare", prepare)


@BUGS.built_in(
    "500031",
    "checkpoint/test_savepoint.py::test_a_subsumed_checkpoint_whose_base_is_gone_is_not_called_damaged",
    CorruptData,
    "is damaged or missing",
)
def subsumed_checkpoint_is_called_damaged(patch: Patch) -> None:
    """Seed 500031: a savepoint failed when its checkpoint was subsumed while it was copied."""

    async def save_first(take: Any, save: Any, is_retained: Any, takes: int = 1) -> Any:
        async with take() as checkpoint:
            return await save(checkpoint)

    patch.setattr(load_tests("checkpoint/test_savepoint.py"), "save_newest", save_first)


@BUGS.built_in("1560942375", CHANGES, kind=_processors)
def elements_are_numbered_across_keys(patch: Patch) -> None:
    """Seed 1560942375: a retry with its keys in another order had other changes, and the batch was declined."""
    count = EntryState._next_number
    numbers: Counter[EntryState] = Counter()

    def across(self: EntryState) -> int:
        count(self)
        numbers[self] += 1
        return numbers[self] - 1

    patch.setattr(EntryState, "_next_number", across)


@BUGS.built_in(
    "1560942701",
    SERVICE + "test_a_task_manager_lost_while_another_is_restored_leaves_no_key_group_without_its_owner",
    CheckpointDeclined,
    "are lost",
)
def key_groups_are_left_without_an_owner(patch: Patch) -> None:
    """Seeds 1560942701 and 1560943442: a TaskManager was lost during another's restore: state read as empty."""
    prepare = Fleet.prepare

    async def good_enough(self: Fleet, query_id: str, parent: Any) -> Restored:
        try:
            return await prepare(self, query_id, parent)
        except FleetChanged as error:
            if "while others were being restored" not in str(error):
                raise
            return Restored(0.0, 0, 0, None)

    patch.setattr(Fleet, "prepare", good_enough)


@BUGS.built_in(
    "1560943206",
    TIMES + "test_a_value_past_its_time_to_live_is_gone_and_changes_nothing_whether_it_is_still_there",
    AssertionError,
    "another attempt may find that it was swept away",
    how="value",
)
def read_removes_an_expired_value(patch: Patch) -> None:
    """Seed 1560943206: whether there was anything to remove differed between attempts, and so did their changes."""
    opened = PointState.open_window

    def remove(self: PointState, values: list[bytes | None], overlay: Any) -> None:
        expired = self._ttl.find_expired(values)
        opened(self, values, overlay)
        for at in expired:
            self._dirty[at] = 1

    patch.setattr(PointState, "open_window", remove)


@BUGS.built_in(
    "empty union",
    "checkpoint/test_finished_attempts.py::test_an_empty_partition_of_a_union_with_itself_is_not_counted_for_another",
)
def halves_of_a_union_stand_for_each_other(patch: Patch) -> None:
    """Found by reading: two empty tasks of one partition counted as two partitions, and the checkpoint was empty."""

    def covered(self: FinishedAttempts) -> int:
        return len({ack.partition for ack in self._done.values() if ack.partition is not None}) + len(
            [ack for ack in self._done.values() if ack.partition is None]
        )

    patch.setattr(FinishedAttempts, "covered", property(covered))
