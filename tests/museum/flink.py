"""Bugs of Flink's changelog backend, each built into ours by patching one decision."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import google_crc32c
import pytest
from museum.bug import Bugs, Patch

from dstl.changelog.ledger import LogLedger, Ownership
from dstl.changelog.log_segment import LogSegment, SegmentReferences
from dstl.changelog.segment import encoder, reader
from dstl.changelog.segments_in_flight import Seal, SegmentsInFlight
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.throttle import ByteBudget
from dstl.changelog.upload.hedged_put import Upload
from dstl.changelog.writer import StateChangelogWriter
from dstl.checkpoint.savepoint.restore import SavepointRestore
from dstl.checkpoint.upkeep import cleaning_plan
from dstl.errors import CorruptData, Invalid, ObjectNotFound, OutcomeUnknown, Unavailable
from handles.segment_handle import SequenceNumberRange
from materializer.trigger import MaterializationTrigger, Phase

NOT_RAISED = pytest.fail.Exception
DEFECTS = "changelog/test_flink_defects.py::"

BUGS = Bugs()


def _steps() -> list[tuple[float, int, str, float]]:
    rng = random.Random(1)
    return [(rng.uniform(0, 400), 900, ("ok", "fail")[n % 2], 10.0) for n in range(20)]


SCHEDULE = {"seed": 1, "steps": _steps()}
FILTER = {"number": 1, "groups": [0, 15], "sqns": [3, 4], "logs": ("a", "b"), "split": False}


@BUGS.built_in(
    "highestFailed", DEFECTS + "test_a_failed_upload_does_not_poison_later_checkpoints", Unavailable, "the test says no"
)
def failed_upload_is_remembered(patch: Patch) -> None:
    """``FsStateChangelogWriter.highestFailed``: every checkpoint fails until the next materialization."""
    failed, claim = SegmentsInFlight._failed, LogLedger.claim
    errors: dict[LogLedger[Any], Exception] = {}

    def remember(self: SegmentsInFlight, seal: Seal) -> None:
        failed(self, seal)
        if seal.error is not None:
            errors.update((writer.ledger, seal.error) for writer in seal.writers)

    def refuse(self: LogLedger[Any], from_sqn: int) -> SequenceNumberRange:
        if self in errors:
            raise errors[self]
        return claim(self, from_sqn)

    patch.setattr(SegmentsInFlight, "_failed", remember)
    patch.setattr(LogLedger, "claim", refuse)


@BUGS.built_in(
    "one file per batch",
    DEFECTS + "test_a_failed_segment_fails_only_those_who_are_in_it",
    Unavailable,
    "the test says no",
)
def failed_file_fails_every_task(patch: Patch) -> None:
    """One file per batch of tasks: when it fails, so does whoever waits for another one."""
    failed = SegmentsInFlight._failed

    def fail_all(self: SegmentsInFlight, seal: Seal) -> None:
        failed(self, seal)
        for other in self._seals.values():
            other.error = seal.error

    patch.setattr(SegmentsInFlight, "_failed", fail_all)


@BUGS.built_in("uploadInternal", DEFECTS + "test_a_retry_after_an_error_rescues_the_upload")
def tasks_fail_before_the_retry(patch: Patch) -> None:
    """``AbstractStateChangeFsUploader``: the tasks hear of an error before the executor tries again, in vain."""
    patch.setattr(Upload, "_lost", lambda self, attempt, error: self.fail(error))


@BUGS.built_in(
    "OutputStreamWithPos.close",
    DEFECTS + "test_an_error_at_the_end_of_an_upload_is_not_a_success",
    NOT_RAISED,
    "DID NOT RAISE",
)
def error_at_the_end_is_swallowed(patch: Patch) -> None:
    """``OutputStreamWithPos.close``: the result is there before the stream has ended, and its error is lost."""
    patch.setattr(Upload, "_lost", lambda self, attempt, error: self._succeed(attempt))


@BUGS.built_in(
    "handleUploadSuccess",
    DEFECTS + "test_a_writer_closed_during_an_upload_leaves_the_others_their_segment",
    ObjectNotFound,
    "no object",
)
def closed_writer_discards_the_shared_file(patch: Patch) -> None:
    """``handleUploadSuccess`` of a closed writer: the file goes, and with it what others have in it."""

    def discard(self: SegmentReferences, name: str) -> None:
        self._counts.pop(name, None)
        self._deletable.append(name)

    patch.setattr(SegmentReferences, "release", discard)


@BUGS.built_in("early seal", DEFECTS + "test_a_checkpoint_seals_at_once_and_waits_for_nobody")
def seal_waits_for_its_delay(patch: Patch) -> None:
    """The FLIP's rule that was never built: once all have asked, nobody has to be waited for."""
    complete = StateChangelogStorage._complete

    async def late(self: StateChangelogStorage, claimed: Any, *, allow_inline: bool) -> None:
        await asyncio.sleep(0.010)
        await complete(self, claimed, allow_inline=allow_inline)

    patch.setattr(StateChangelogStorage, "_complete", late)


@BUGS.built_in(
    "FLINK-26396",
    DEFECTS + "test_flink_26396_a_last_attempt_without_an_answer_fails_the_persist_and_keeps_the_bytes",
    TimeoutError,
)
def last_timeout_fails_nobody(patch: Patch) -> None:
    """FLINK-26396: an attempt that times out leaves its future to the next one, and the last one to nobody."""
    lost = Upload._lost

    def leave(self: Upload, attempt: Any, error: BaseException) -> None:
        if isinstance(error, OutcomeUnknown) and self._tries >= self._owner.options.max_attempts:
            self._active.remove(attempt)
        else:
            lost(self, attempt, error)

    patch.setattr(Upload, "_lost", leave)


@BUGS.built_in(
    "FLINK-26485", "changelog/test_uploader.py::test_cold_hedge_wins_and_the_loser_leaves_nothing_flink_26485"
)
def loser_of_a_hedge_stays(patch: Patch) -> None:
    """FLINK-26485: what the slower of two requests has stored is nobody's."""

    def discard(self: Upload, attempt: Any) -> None:
        attempt.task.cancel()

    patch.setattr(Upload, "_discard", discard)


@BUGS.built_in(
    "FLINK-26592", DEFECTS + "test_flink_26592_appending_from_an_uploads_completion_does_not_deadlock", TimeoutError
)
def capacity_comes_back_after_the_waiters(patch: Patch) -> None:
    """FLINK-26592: the upload's end waits for whom back-pressure holds, who waits for the upload's end."""
    give_back = ByteBudget.give_back
    kept: Counter[ByteBudget] = Counter()

    def later(self: ByteBudget, nbytes: int) -> None:
        if self.starving:
            kept[self] += nbytes
        else:
            give_back(self, nbytes + kept.pop(self, 0))

    patch.setattr(ByteBudget, "give_back", later)


@BUGS.built_in(
    "FLINK-30729",
    DEFECTS + "test_flink_30729_an_append_after_close_is_refused_and_not_dropped",
    NOT_RAISED,
    "DID NOT RAISE",
)
def append_after_close_is_dropped(patch: Patch) -> None:
    """FLINK-30729: it is logged as a warning, and the change is gone."""
    append = StateChangelogWriter.append_batch

    def drop(self: StateChangelogWriter, batch: Any) -> None:
        if not self._closed:
            append(self, batch)

    patch.setattr(StateChangelogWriter, "append_batch", drop)


@BUGS.built_in("FLINK-30792", DEFECTS + "test_flink_30792_a_preemptive_upload_counts_closed_change_sets_too")
def only_the_open_change_set_counts(patch: Patch) -> None:
    """FLINK-30792: the threshold of the pre-emptive upload never sees what was closed before."""
    patch.setattr(StateChangelogWriter, "held_bytes", property(lambda self: self._open.nbytes))


@BUGS.built_in(
    "apache/flink#15371", DEFECTS + "test_flink_15371_a_threshold_crossed_while_the_timer_runs_is_not_a_lost_wake_up"
)
def wake_up_is_lost(patch: Patch) -> None:
    """apache/flink#15371: a flag says that a flush is planned, nobody plans another, and the flag stays."""

    def resume(self: SegmentsInFlight) -> None:
        if self._pause is not None:
            self._host.look_soon()

    patch.setattr(SegmentsInFlight, "_resume", resume)


@BUGS.built_in("FLINK-31139", DEFECTS + "test_flink_31139_a_persist_of_nothing_writes_no_object")
def nothing_is_written_as_a_file(patch: Patch) -> None:
    """FLINK-31139: a checkpoint without changes writes an empty file for each task."""
    persist_all = StateChangelogStorage.persist_all

    async def with_header(self: StateChangelogStorage, requests: Any, **options: bool) -> Any:
        for writer, _ in requests:
            if writer._open.is_empty:
                writer.append_metadata(b"nothing")
        return await persist_all(self, requests, **options)

    patch.setattr(StateChangelogStorage, "persist_all", with_header)


@BUGS.built_in(
    "FLINK-28440",
    DEFECTS + "test_flink_28440_truncation_waits_for_a_checkpoint_that_references_the_segment",
    ObjectNotFound,
    "no object",
)
def truncation_takes_what_a_checkpoint_references(patch: Patch) -> None:
    """FLINK-28440: a materialization ends during a checkpoint, and deletes what that is about to name."""

    def forget(self: LogLedger[Any], entry: Any) -> None:
        if entry.truncated and entry.sqn in self._entries:
            self._drop(entry)

    patch.setattr(LogLedger, "_forget_truncated", forget)


@BUGS.built_in("FLINK-30561", DEFECTS + "test_flink_28440_a_segment_is_counted_by_change_sets_and_not_by_logs")
def file_is_counted_by_logs(patch: Patch) -> None:
    """FLINK-30561: a file of many change sets of one log goes with the first of them."""
    track = SegmentReferences.track

    def undercount(self: SegmentReferences, name: str, change_sets: int) -> None:
        track(self, name, max(1, change_sets // 2))

    patch.setattr(SegmentReferences, "track", undercount)


@BUGS.built_in(
    "FLINK-25492",
    DEFECTS + "test_flink_25492_25987_what_is_appended_at_the_materialization_boundary_is_kept",
    Invalid,
    "changes from 1 were truncated up to 2",
)
def open_changes_go_with_the_materialized(patch: Patch) -> None:
    """FLINK-25492: what is appended while a materialization runs is truncated with what it has."""

    def truncate(self: StateChangelogWriter, to_sqn: int) -> None:
        self.ledger.truncate(self.next_sequence_number())
        self._host.touched(self)

    patch.setattr(StateChangelogWriter, "truncate", truncate)


@BUGS.built_in(
    "FLINK-25987", DEFECTS + "test_flink_25492_25987_what_is_appended_at_the_materialization_boundary_is_kept"
)
def boundary_is_put_inside_a_change_set(patch: Patch) -> None:
    """FLINK-25987: what a materialization has and what it has not lie in one change set."""
    patch.setattr(StateChangelogWriter, "next_sequence_number", lambda self: self.ledger.next_sqn)


@BUGS.built_in(
    "FLINK-25524",
    DEFECTS + "test_flink_25524_a_confirmed_segment_is_the_coordinators_whatever_happens_to_its_log",
    ObjectNotFound,
    "no object",
)
def writer_discards_what_was_confirmed(patch: Patch) -> None:
    """FLINK-25524: after a checkpoint has completed its changes are still the writer's to delete."""
    patch.setattr(LogLedger, "_own", lambda self, entry: None)


@BUGS.built_in("FLINK-25261", DEFECTS + "test_flink_25261_truncated_changes_are_gone_from_memory_and_from_the_store")
def log_is_never_truncated(patch: Patch) -> None:
    """FLINK-25261: files and memory of materialized changes stay."""
    patch.setattr(LogLedger, "truncate", lambda self, to_sqn: None)


@BUGS.built_in("FLINK-25429", DEFECTS + "test_close_settles_futures")
def close_leaves_futures_open(patch: Patch) -> None:
    """FLINK-25429, ``FsStateChangelogWriter.close``: who waits for an upload waits for ever."""
    patch.setattr(SegmentsInFlight, "give_up_unneeded", lambda self: None)


@BUGS.built_in(
    "FLINK-28602",
    DEFECTS + "test_flink_28602_25429_closing_twice_is_closing_once",
    AssertionError,
    "bytes were not given back",
)
def closing_twice_gives_back_twice(patch: Patch) -> None:
    """FLINK-28602, FLINK-25429: the second close does again what the first has done."""
    close = StateChangelogWriter.truncate_and_close

    def again(self: StateChangelogWriter, from_sqn: int) -> None:
        held = self.held_bytes
        if self._closed:
            self._host.budget.give_back(getattr(self, "_given_back", 0))
        self._given_back = held  # type: ignore[attr-defined]
        close(self, from_sqn)

    patch.setattr(StateChangelogWriter, "truncate_and_close", again)


@BUGS.built_in("FLINK-26799", "changelog/test_reader.py::test_filters_return_exactly_what_they_name", **FILTER)
def change_sets_of_one_file_are_mixed_up(patch: Patch) -> None:
    """FLINK-26799: a reader of one file's change sets stands at a wrong place when it comes to the next."""
    decode = reader._decode_runs

    def all_logs(key_groups: Any, logs: Any, data: bytes, start: int, unit: Any, where: str) -> Any:
        whole = {log_id: SequenceNumberRange(0, 1 << 40) for log_id in logs or ()}
        return decode(key_groups, whole or None, data, start, unit, where)

    patch.setattr(reader, "_decode_runs", all_logs)


@BUGS.built_in(
    "FLINK-26799, seek",
    "changelog/test_reader.py::test_neighbours_are_fetched_in_one_request",
    CorruptData,
    "block at byte 16",
)
def seek_is_off(patch: Patch) -> None:
    """FLINK-26799: the place of a block is counted from another beginning than that of the bytes at hand."""

    def blocks(data: bytes, start: int, unit: Any, where: str) -> Any:
        for log, entry in unit.blocks:
            yield (
                log,
                reader.decode_block(data[entry.offset : entry.offset + entry.length], entry, log.sqns.from_sqn, where),
            )

    patch.setattr(encoder, "_SMALL_BLOCK", 0)  # as the fixture small_blocks does
    patch.setattr(reader, "_blocks", blocks)


@BUGS.built_in("FLINK-28976", "materializer/test_trigger.py::test_the_first_starts_of_many_operators_are_spread")
def all_materialize_at_the_same_moment(patch: Patch) -> None:
    """FLINK-28976: every backend of a job starts its first materialization an interval after its start."""
    init = MaterializationTrigger.__init__

    def at_once(self: MaterializationTrigger, options: Any, runtime: Any, now: float) -> None:
        init(self, options, runtime, now)
        self._not_before, self._interval_due = now, now + options.interval_s

    patch.setattr(MaterializationTrigger, "__init__", at_once)


@BUGS.built_in(
    "FLINK-24852", "checkpoint/test_cleaner.py::test_24852_two_sweeps_after_any_crash_leave_no_orphan", after=True
)
def orphans_stay_after_a_crash(patch: Patch) -> None:
    """FLINK-24852, FLINK-23139: what was stored and not acknowledged when a process died is never deleted."""
    patch.setattr(cleaning_plan._Proofs, "reason", lambda self, parsed, modified: cleaning_plan.Kept.PERHAPS_PENDING)


@BUGS.built_in(
    "FLINK-38307",
    "checkpoint/test_savepoint_restore.py::test_no_claim_is_self_contained_from_its_first_checkpoint_flink_38307",
    CorruptData,
    "is damaged or missing: savepoints/mine/",
)
def no_claim_shares_files(patch: Patch) -> None:
    """FLINK-38307, FLINK-40476: a query that was told not to claim a savepoint needs its files all the same."""

    async def copy(self: SavepointRestore, savepoint: Any, wanted: Any, query_id: str) -> dict[str, str]:
        return {}

    patch.setattr(SavepointRestore, "_copy", copy)


@BUGS.built_in("FLINK-40302", "materializer/test_trigger.py::test_any_schedule_keeps_the_promises", **SCHEDULE)
def failed_materialization_is_the_last(patch: Patch) -> None:
    """FLINK-40302: after an error nothing is planned any more, and the log grows without bound."""

    def failed(self: MaterializationTrigger, now: float) -> bool:
        self._end(Phase.WAITING)
        self._not_before = float("inf")
        return True

    patch.setattr(MaterializationTrigger, "failed", failed)


@BUGS.built_in(
    "FLINK-29913",
    DEFECTS + "test_an_aborted_checkpoint_deletes_nothing_that_later_ones_reference",
    ObjectNotFound,
    "no object",
)
def abort_deletes_up_to_it(patch: Patch) -> None:
    """FLINK-29913, ``LocalChangelogRegistry``: with a checkpoint that is aborted go files that later ones share."""

    def reset(self: LogLedger[Any], wanted: SequenceNumberRange) -> None:
        for entry in self._within(wanted):
            entry.claims -= 1
            if entry.state is Ownership.DURABLE and entry.location is not None:
                self._references.release(entry.location.name)

    patch.setattr(LogLedger, "reset", reset)


@BUGS.built_in(
    "no checksum",
    "changelog/test_segment_damage.py::test_every_flipped_bit_is_found_before_a_change_is_seen",
    NOT_RAISED,
    "DID NOT RAISE",
)
def files_have_no_checksum(patch: Patch) -> None:
    """Flink's changelog file has none: a flipped bit is replayed."""
    patch.setattr(google_crc32c, "value", lambda data: 0)


@BUGS.built_in("handles per change set", DEFECTS + "test_a_handle_grows_by_segments_and_not_by_change_sets")
def handle_names_its_file_for_each_change_set(patch: Patch) -> None:
    """The metadata of a checkpoint grows with every change set, and not with files."""

    def join(change_sets: Any) -> Sequence[LogSegment]:
        return tuple(LogSegment(SequenceNumberRange(sqn, sqn + 1), place, n) for sqn, place, n in change_sets)

    patch.setattr("dstl.changelog.ledger.join_segments", join)
