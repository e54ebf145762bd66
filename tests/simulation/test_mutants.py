"""Known bugs, built in again: the simulation must see each one within a bounded number of seeds.

Numbers are those of ``tests/KNOWN_BUGS.md`` where the bug stands there; the others were found by the simulation itself.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dstl.changelog.ledger import LogLedger, Ownership
from dstl.changelog.object_names import SegmentNames
from dstl.checkpoint import assembly, put_once
from dstl.checkpoint.acknowledgements import Acknowledgements
from dstl.checkpoint.batch_time import BatchTime
from dstl.checkpoint.checkpoint_execution import CheckpointExecution
from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.manifest import log as manifest_log
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.put_once import Check
from dstl.checkpoint.state_catalogue import StateCatalogue
from dstl.checkpoint.upkeep import cleaning_plan
from dstl.errors import DstlError, Fenced, OutcomeUnknown, Unavailable
from dstl.spark import task_attempt
from dstl.state import broadcast_rows
from dstl.state.timers import Timers
from dstl.state.ttl import TimeToLive
from dstl.taskmanager import service
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from dstl.testing.simulation import FaultKind, FaultPlan, run_seed
from handles.shared_state_registry import SharedStateRegistry
from materializer.manager import PeriodicMaterializationManager
from materializer.tables import rocksdb, rocksdb_ingestion

Patch = pytest.MonkeyPatch
MOST_SEEDS = 120
BOTH = (False, True)

LOSSY = {FaultKind.LOST_RESPONSE: 0.15, FaultKind.LATE_PUT: 0.1, FaultKind.RESET: 0.1}
TWO_DRIVERS = (FaultKind.SECOND_DRIVER, FaultKind.DRIVER_PAUSE)
RETRIES = {FaultKind.SPECULATION: 0.3, FaultKind.TASK_FAILURE: 0.2, FaultKind.LOST_RESULT: 0.2}


def cleaner_deletes_fences(patch: Patch) -> None:
    """Number 1: the collector makes put-if-absent forget that a newer driver had the number."""
    patch.setattr(cleaning_plan, "_record_reason", lambda sequence, scan, subsumed: "looks unused")


def commit_takes_any_record_for_its_own(patch: Patch) -> None:
    """Number 10: a driver that was paused believes it still leads, for it compares no put-id."""

    async def check_ours(self: ManifestLog, record: object) -> None:
        return None

    patch.setattr(ManifestLog, "_check_ours", check_ours)
    patch.setattr(ManifestLog, "_check_not_overtaken", check_ours)


def lost_response_taken_for_another_driver(patch: Patch) -> None:
    """Number 2: the answer to a commit is lost, the repeated request meets its own record, and the driver stops."""

    async def check_ours(self: ManifestLog, record: object) -> None:
        raise Fenced("somebody has this number")

    patch.setattr(ManifestLog, "_check_ours", check_ours)


def driver_starts_without_a_fence(patch: Patch) -> None:
    """Number 3: nothing in the log keeps the older driver out."""

    async def fence(self: ManifestLog, query_id: str) -> int:
        tail = await self.tail()
        await self._learn_boundary(tail)
        self.epoch, self.next_sequence, self.is_unknown = tail + 1, tail + 1, False
        return self.epoch

    patch.setattr(ManifestLog, "fence", fence)


def broadcast_rows_as_the_shuffle_has_them(patch: Patch) -> None:
    """Two partitions come to different broadcast states, and one of them is stored."""
    patch.setattr(broadcast_rows, "_sort", lambda table: table)


def broadcast_state_is_written_by_the_last_partition(patch: Patch) -> None:
    """The only copy is lost, for no log of its key group has it."""
    patch.setattr(task_attempt, "BROADCAST_KEY_GROUP", -1)


def names_shared_by_attempts(patch: Patch) -> None:
    """Number 5: a zombie overwrites what its successor has stored under the same name."""
    numbers = itertools.count()

    def new_object(self: SegmentNames) -> Callable[[int], str]:
        number = next(numbers) % 4
        return lambda attempt: f"0000/{self.query_id}/writer/{number:032x}.seg"

    patch.setattr(SegmentNames, "new_object", new_object)


def commit_given_up_without_a_marker(patch: Patch) -> None:
    """Number 7: a late request commits what was declared aborted."""

    async def abort(self: ManifestLog, record: object) -> bool:
        return True

    patch.setattr(ManifestLog, "_abort", abort)


def hole_in_the_recovered_prefix(patch: Patch) -> None:
    """Number 8: of a change set in two parts only the first reaches the table."""
    fold = TaskManagerStateBackend._advance

    def advance(self: TaskManagerStateBackend, parent: int | None) -> None:
        if self._completed is not None and parent == self._completed[0]:
            for key in self._completed[1]:
                del self._attempts[key].overlay[1:]
        fold(self, parent)

    patch.setattr(TaskManagerStateBackend, "_advance", advance)


def unknown_commit_taken_for_failed(patch: Patch) -> None:
    """Number 11: a commit whose outcome is unknown is called failed, and its segments are dropped."""
    real = CheckpointExecution._commit

    async def commit(self: CheckpointExecution, *args: object) -> None:
        try:
            await real(self, *args)  # type: ignore[arg-type]
        except OutcomeUnknown as error:
            self._log.is_unknown = False
            raise Unavailable(str(error)) from None

    patch.setattr(CheckpointExecution, "_commit", commit)


def stored_503_taken_for_failed(patch: Patch) -> None:
    """A commit that a gateway has answered with 503 is called failed, though its server has carried it out."""
    patch.setattr(put_once, "SlowDown", OutcomeUnknown)
    patch.setattr(manifest_log, "_says_the_same", lambda found, record: False)


def loser_shares_the_winners_log(patch: Patch) -> None:
    """Rule 5: the ranges of an attempt that lost are in the log of the one that won."""

    def writer_for(self: TaskManagerStateBackend, attempt: object, partition: int) -> object:
        key = (attempt.operator, partition)  # type: ignore[attr-defined]
        if key not in self._writers:
            self._writers[key] = self.storage.create_writer(self._runtime.new_id())
        return self._writers[key]

    patch.setattr(TaskManagerStateBackend, "_writer_for", writer_for)


def closing_deletes_what_a_checkpoint_may_name(patch: Patch) -> None:
    """FLINK-28440: a closed log gives claimed objects to deletion."""
    real = LogLedger.close

    def close(self: LogLedger[object], why: object) -> object:
        for entry in self._entries.values():
            entry.claims = 0
            if entry.state is Ownership.DURABLE and entry.location is not None and not entry.location.offset:
                entry.owned = False
        return real(self, why)  # type: ignore[arg-type]

    patch.setattr(LogLedger, "close", close)


def subsuming_ignores_other_holders(patch: Patch) -> None:
    """Rule 6: an object goes with the first checkpoint that no longer needs it."""

    def unregister(self: SharedStateRegistry, checkpoint_id: int) -> list[str]:
        return sorted(self._objects_of.pop(checkpoint_id, frozenset()), reverse=True)

    patch.setattr(SharedStateRegistry, "unregister", unregister)


def cleaner_asks_for_no_proof(patch: Patch) -> None:
    """Number 4: what was stored and not published yet is taken for an orphan."""
    real = cleaning_plan.plan_cleaning

    def hasty(*args: object, **options: object) -> object:
        return real(*args, **{**options, "grace_s": 0.0})  # type: ignore[arg-type]

    patch.setattr(cleaning_plan._Proofs, "reason", lambda self, parsed, modified: "nobody names it")
    patch.setattr("dstl.checkpoint.upkeep.cleaner.plan_cleaning", hasty)


def orphans_are_kept_for_ever(patch: Patch) -> None:
    """Number 6: what a dead TaskManager has stored, and no checkpoint names, is never taken for an orphan."""
    patch.setattr(cleaning_plan._Proofs, "reason", lambda self, parsed, modified: cleaning_plan.Kept.PERHAPS_PENDING)


def old_batch_voids_newer_checkpoints(patch: Patch) -> None:
    """Found here: a driver that planned its batch long ago opens last, and its checkpoint voids all later ones."""
    real = CheckpointCoordinator._open_batch

    def open_batch(self: CheckpointCoordinator, task: object, now_ms: int) -> object:
        everything = self._completed
        self._completed = [c for c in everything if c.batch_id <= task.batch_id]  # type: ignore[attr-defined]
        try:
            return real(self, task, now_ms)  # type: ignore[arg-type]
        finally:
            self._completed = everything

    patch.setattr(CheckpointCoordinator, "_open_batch", open_batch)


def second_action_need_not_agree(patch: Patch) -> None:
    """State belongs to the first action's output, and Spark has kept another one of the second's."""
    patch.setattr(Acknowledgements, "_differences", lambda self, own, ack: iter(()))


def failed_read_back_taken_for_failed_commit(patch: Patch) -> None:
    """Found here: the commit is there, reading it back fails, and its segments are dropped."""

    async def no_doubt(what: str, check: Check, taken: type[DstlError]) -> None:
        await check()

    for module in (put_once, manifest_log):
        patch.setattr(module, "or_unknown", no_doubt)


def offered_bases_are_discarded(patch: Patch) -> None:
    """Found here: bases that a commit of unknown outcome names are deleted, for no batch seems to have taken them."""
    real = PeriodicMaterializationManager.take_reports

    def take_reports(self: PeriodicMaterializationManager) -> object:
        self._offered.clear()
        return real(self)

    patch.setattr(PeriodicMaterializationManager, "take_reports", take_reports)


def replayed_batch_has_a_new_time(patch: Patch) -> None:
    """Found by reading: a batch that runs again fires other timers than those whose output its sink has."""

    def time_of(self: CheckpointCoordinator, batch_id: int, parent: object, now_ms: int) -> BatchTime:
        return BatchTime(now_ms)

    patch.setattr(CheckpointCoordinator, "_time_of", time_of)


def time_stands_still_until_the_clock_has_caught_up(patch: Patch) -> None:
    """Found by reading: one start with a clock a year ahead stopped timers and times to live for a year."""
    real = BatchTime.after
    patch.setattr(BatchTime, "after", lambda before, now_ms, hold_ms: real(before, now_ms, 1 << 60))


def watermark_falls(patch: Patch) -> None:
    """Found by reading: a batch's watermark is that of its own rows alone."""
    real = StateCatalogue.entries

    def entries(self: StateCatalogue, event_times: Mapping[str, int], parent: object) -> object:
        return real(self, event_times, None)

    patch.setattr(StateCatalogue, "entries", entries)


def rows_are_late_as_soon_as_timers_are_due(patch: Patch) -> None:
    """Spark's late watermark lags one batch behind: with the newer one, rows are dropped that Spark keeps."""
    patch.setattr(assembly, "_late_watermark", lambda parent: None)


def fired_timer_stays(patch: Patch) -> None:
    """A timer that has fired fires again in every batch."""
    patch.setattr(Timers, "delete", lambda self, at_ms: None)


def expired_value_is_read(patch: Patch) -> None:
    """A value outlives its time."""
    patch.setattr(TimeToLive, "find_expired", lambda self, values: [])
    patch.setattr(TimeToLive, "is_dead", lambda self, value: False)


def late_attempt_stops_the_next_batch(patch: Patch) -> None:
    """Found here: an attempt ends while the record of Spark's commit is on its way, and the next batch is refused."""
    real = CheckpointCoordinator.complete

    def complete(self: CheckpointCoordinator, trigger: Any, *rest: Any) -> object:
        done = real(self, trigger, *rest)
        if self._batch is not None and self._batch.batch_id == trigger.batch_id:
            self._batch.completed_version = trigger.version
        return done

    patch.setattr(CheckpointCoordinator, "complete", complete)


def objects_of_listed_checkpoints_are_deleted(patch: Patch) -> None:
    """Found here: what Spark's files hold above the boundary is listed, and its segments are gone."""
    patch.setattr(CheckpointExecution, "_out_of_sight", lambda self, subsumed, batch_id: subsumed)


def failed_table_is_looked_at_by_nobody(patch: Patch) -> None:
    """Found by reading: what a fold ahead of the first read meets on a failing disk, nobody handles."""
    patch.setattr(service, "_fold_ahead", TaskManagerStateBackend.fold)


def disks_errors_come_as_they_are(patch: Patch) -> None:
    """Found by reading: what a table in files meets on a failing disk is no error of ours."""

    @contextmanager
    def untranslated(path: Path) -> Iterator[None]:
        yield

    for module in (rocksdb, rocksdb_ingestion):
        patch.setattr(module, "translated_errors", untranslated)


@dataclass(frozen=True)
class Mutant:
    """A bug and the faults under which it shows.

    Attributes:
        build_in: Patches the product.
        modes: With Spark's commits as checkpoints (True), without (False), or both.
    """

    build_in: Callable[[Patch], None]
    requests: Mapping[FaultKind, float] = field(default_factory=dict)
    tasks: Mapping[FaultKind, float] = field(default_factory=dict)
    nemesis: tuple[FaultKind, ...] = ()
    mean_s: float = 1.0
    longest_delay_s: float = 10.0
    only: str = ""
    modes: tuple[bool, ...] = (False,)
    local_errors: float = 0.0

    def plan(self) -> FaultPlan:
        return FaultPlan(
            per_request=self.requests,
            per_task=self.tasks,
            nemesis=self.nemesis,
            nemesis_mean_s=self.mean_s,
            longest_delay_s=self.longest_delay_s,
            only=self.only,
            local_errors=self.local_errors,
        )


MUTANTS = [
    Mutant(broadcast_rows_as_the_shuffle_has_them, tasks={FaultKind.REORDERED_ROWS: 0.5}),
    Mutant(broadcast_state_is_written_by_the_last_partition),
    Mutant(cleaner_deletes_fences, modes=BOTH),
    Mutant(commit_takes_any_record_for_its_own, modes=BOTH, nemesis=TWO_DRIVERS, mean_s=0.5),
    Mutant(lost_response_taken_for_another_driver, modes=BOTH, requests={FaultKind.LOST_RESPONSE: 0.3}),
    Mutant(driver_starts_without_a_fence, modes=BOTH, nemesis=TWO_DRIVERS, mean_s=0.5),
    Mutant(names_shared_by_attempts, modes=BOTH),
    Mutant(
        commit_given_up_without_a_marker,
        modes=BOTH,
        requests={FaultKind.LATE_PUT: 0.4, FaultKind.RESET: 0.4},
        longest_delay_s=400.0,
        only="manifests/",
    ),
    Mutant(hole_in_the_recovered_prefix, modes=BOTH),
    Mutant(unknown_commit_taken_for_failed, requests={FaultKind.LOST_RESPONSE: 0.5, FaultKind.RESET: 0.4}),
    Mutant(
        stored_503_taken_for_failed,
        modes=BOTH,
        requests={FaultKind.STORED_SLOW_DOWN: 0.3},
        only="manifests/",
        longest_delay_s=400.0,
    ),
    Mutant(loser_shares_the_winners_log, modes=BOTH, tasks=RETRIES),
    Mutant(closing_deletes_what_a_checkpoint_may_name, requests=LOSSY, nemesis=TWO_DRIVERS),
    Mutant(subsuming_ignores_other_holders, modes=BOTH),
    Mutant(cleaner_asks_for_no_proof, modes=BOTH, requests={FaultKind.SLOW: 0.4}),
    Mutant(orphans_are_kept_for_ever, modes=BOTH, nemesis=(FaultKind.TASK_MANAGER_CRASH,)),
    Mutant(old_batch_voids_newer_checkpoints, nemesis=TWO_DRIVERS, mean_s=0.3),
    Mutant(second_action_need_not_agree, tasks={FaultKind.SECOND_ACTION: 0.5, FaultKind.CHANGING_OUTPUT: 0.3}),
    Mutant(
        failed_read_back_taken_for_failed_commit,
        modes=BOTH,
        requests={FaultKind.LOST_RESPONSE: 0.2, FaultKind.SHORT_GET: 0.5},
    ),
    Mutant(
        offered_bases_are_discarded,
        requests={FaultKind.STUCK: 0.2, FaultKind.LOST_RESPONSE: 0.3},
        only="manifests/",
    ),
    Mutant(replayed_batch_has_a_new_time, tasks={FaultKind.TASK_FAILURE: 0.3}, nemesis=(FaultKind.DRIVER_CRASH,)),
    Mutant(time_stands_still_until_the_clock_has_caught_up, nemesis=(FaultKind.CLOCK_JUMP,), mean_s=0.5),
    Mutant(watermark_falls),
    Mutant(rows_are_late_as_soon_as_timers_are_due),
    Mutant(fired_timer_stays),
    Mutant(expired_value_is_read),
    Mutant(failed_table_is_looked_at_by_nobody, nemesis=(FaultKind.LOCAL_FULL,), local_errors=0.02),
    Mutant(disks_errors_come_as_they_are, nemesis=(FaultKind.LOCAL_FULL,), local_errors=0.02),
    Mutant(late_attempt_stops_the_next_batch, tasks={FaultKind.SPECULATION: 0.4}, modes=(True,)),
    Mutant(objects_of_listed_checkpoints_are_deleted, modes=(True,)),
]


CASES = [
    pytest.param(mutant, mode, id=f"{mutant.build_in.__name__}{'-one-commit' if mode else ''}")
    for mutant in MUTANTS
    for mode in mutant.modes
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("mutant", "one_commit"), CASES)
def test_each_known_bug_is_seen_when_it_is_built_in_again(mutant: Mutant, one_commit: bool, monkeypatch: Patch) -> None:
    mutant.build_in(monkeypatch)
    for seed in range(MOST_SEEDS):
        result = run_seed(seed, plan=mutant.plan(), one_commit=one_commit)
        if result.violations:
            print(f"seen with seed {seed}: {result.violations[0]}")
            return
    pytest.fail(f"{MOST_SEEDS} seeds have not seen it: {mutant.build_in.__doc__}")
