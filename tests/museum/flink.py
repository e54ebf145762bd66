"""Bugs of Flink's changelog backend, each built into ours by patching one decision."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import google_crc32c
import pytest
from museum.bug import Bug, Patch

from dstl.changelog.batcher import Batcher, SealDecision, SealReason
from dstl.changelog.ledger import LogLedger, Ownership, PersistTicket
from dstl.changelog.log_segment import LogSegment, SegmentReferences
from dstl.changelog.segment import encoder, reader
from dstl.changelog.segments_in_flight import SegmentsInFlight
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.throttle import ByteBudget
from dstl.changelog.upload.hedged_put import Upload
from dstl.changelog.writer import StateChangelogWriter
from dstl.checkpoint.savepoint.restore import SavepointRestore
from dstl.checkpoint.upkeep import cleaning_plan
from dstl.errors import CorruptData, Invalid, ObjectNotFound, OutcomeUnknown, Unavailable
from handles.sequence_number import SequenceNumberRange
from materializer.trigger import MaterializationTrigger, Phase

NOT_RAISED = pytest.fail.Exception
DEFECTS = "changelog/test_flink_defects.py::"


def failed_upload_is_remembered(patch: Patch) -> None:
    """``FsStateChangelogWriter.highestFailed``: every checkpoint fails until the next materialization."""
    failed, ask = LogLedger.failed, LogLedger.ask
    errors: dict[LogLedger[Any], BaseException] = {}

    def remember(self: LogLedger[Any], seal: int, error: BaseException) -> list[PersistTicket]:
        errors[self] = error
        return failed(self, seal, error)

    def refuse(self: LogLedger[Any], from_sqn: int, *, inline: bool) -> PersistTicket:
        ticket = ask(self, from_sqn, inline=inline)
        if self in errors and not ticket.settled:
            self._fail(ticket, errors[self])
        return ticket

    patch.setattr(LogLedger, "failed", remember)
    patch.setattr(LogLedger, "ask", refuse)


def failed_file_fails_every_task(patch: Patch) -> None:
    """One file per batch of tasks: when it fails, so does whoever waits for another one."""
    failed = SegmentsInFlight._failed

    def fail_all(self: SegmentsInFlight, seal: Any, error: BaseException) -> None:
        failed(self, seal, error)
        for writer in {writer for other in self._seals.values() for writer in other.writers}:
            writer.settle([writer.ledger._fail(ticket, error) for ticket in list(writer.ledger._open)])

    patch.setattr(SegmentsInFlight, "_failed", fail_all)


def tasks_fail_before_the_retry(patch: Patch) -> None:
    """``AbstractStateChangeFsUploader``: the tasks hear of an error before the executor tries again, in vain."""
    patch.setattr(Upload, "_lost", lambda self, attempt, error: self.fail(error))


def error_at_the_end_is_swallowed(patch: Patch) -> None:
    """``OutputStreamWithPos.close``: the result is there before the stream has ended, and its error is lost."""
    patch.setattr(Upload, "_lost", lambda self, attempt, error: self._succeed(attempt))


def closed_writer_discards_the_shared_file(patch: Patch) -> None:
    """``handleUploadSuccess`` of a closed writer: the file goes, and with it what others have in it."""

    def discard(self: SegmentReferences, name: str) -> None:
        self._counts.pop(name, None)
        self._deletable.append(name)

    patch.setattr(SegmentReferences, "release", discard)


def seal_waits_for_its_delay(patch: Patch) -> None:
    """The FLIP's rule that was never built: once all have asked, nobody has to be waited for."""
    decide = Batcher.decide

    def late(self: Batcher, now: float, **options: bool) -> SealDecision | None:
        decision = decide(self, now, **{**options, "all_asked": False})
        since = [log.since for log in self._logs.values() if log.since is not None]
        if decision is not None and decision.reason is SealReason.ALL_ASKED:
            return decision if now >= min(since) + self._options.persist_delay_s - 1e-6 else None
        return decision

    patch.setattr(Batcher, "decide", late)


def last_timeout_fails_nobody(patch: Patch) -> None:
    """FLINK-26396: an attempt that times out leaves its future to the next one, and the last one to nobody."""
    lost = Upload._lost

    def leave(self: Upload, attempt: Any, error: BaseException) -> None:
        if isinstance(error, OutcomeUnknown) and self._tries >= self._owner.options.max_attempts:
            self._active.remove(attempt)
        else:
            lost(self, attempt, error)

    patch.setattr(Upload, "_lost", leave)


def loser_of_a_hedge_stays(patch: Patch) -> None:
    """FLINK-26485: what the slower of two requests has stored is nobody's."""

    def discard(self: Upload, attempt: Any) -> None:
        attempt.task.cancel()

    patch.setattr(Upload, "_discard", discard)


def capacity_comes_back_after_the_waiters(patch: Patch) -> None:
    """FLINK-26592: the upload's end waits for whom back-pressure holds, who waits for the upload's end."""
    give_back, end = ByteBudget.give_back, ByteBudget.end
    kept: Counter[ByteBudget] = Counter()

    def later(self: ByteBudget, nbytes: int) -> None:
        if self.starving:
            kept[self] += nbytes
        else:
            give_back(self, nbytes + kept.pop(self, 0))

    def leave(self: ByteBudget, reservation: Any) -> None:
        end(self, reservation)
        later(self, 0)

    patch.setattr(ByteBudget, "give_back", later)
    patch.setattr(ByteBudget, "end", leave)


def append_after_close_is_dropped(patch: Patch) -> None:
    """FLINK-30729: it is logged as a warning, and the change is gone."""
    append = StateChangelogWriter.append_batch

    def drop(self: StateChangelogWriter, batch: Any) -> None:
        if not self._closed:
            append(self, batch)

    patch.setattr(StateChangelogWriter, "append_batch", drop)


def only_the_open_change_set_counts(patch: Patch) -> None:
    """FLINK-30792: the threshold of the pre-emptive upload never sees what was closed before."""
    patch.setattr(StateChangelogWriter, "held_bytes", property(lambda self: self._open.nbytes))


def wake_up_is_lost(patch: Patch) -> None:
    """apache/flink#15371: a flag says that a flush is planned, nobody plans another, and the flag stays."""

    async def tick(self: StateChangelogStorage, wait: float) -> None:
        await self._runtime.clock.sleep(wait)
        self._look()

    def arm(self: StateChangelogStorage, now: float) -> None:
        deadline = self._batcher.deadline(now)
        if deadline is not None and self._timer is None:
            self._timer = self.loop.create_task(self._tick(max(0.0, deadline - now)))

    patch.setattr(StateChangelogStorage, "_tick", tick)
    patch.setattr(StateChangelogStorage, "_arm", arm)


def nothing_is_written_as_a_file(patch: Patch) -> None:
    """FLINK-31139: a checkpoint without changes writes an empty file for each task."""

    persist = StateChangelogWriter.persist

    def with_header(self: StateChangelogWriter, from_sqn: int, **options: bool) -> Any:
        if self._open.is_empty:
            self.append_metadata(b"nothing")
        return persist(self, from_sqn, **options)

    patch.setattr(StateChangelogWriter, "persist", with_header)


def truncation_takes_what_a_checkpoint_references(patch: Patch) -> None:
    """FLINK-28440: a materialization ends during a checkpoint, and deletes what that is about to name."""

    def forget(self: LogLedger[Any], entry: Any) -> None:
        if entry.truncated and entry.sqn in self._entries:
            self._drop(entry)

    patch.setattr(LogLedger, "_forget_truncated", forget)


def file_is_counted_by_logs(patch: Patch) -> None:
    """FLINK-30561: a file of many change sets of one log goes with the first of them."""
    track = SegmentReferences.track

    def undercount(self: SegmentReferences, name: str, change_sets: int) -> None:
        track(self, name, max(1, change_sets // 2))

    patch.setattr(SegmentReferences, "track", undercount)


def open_changes_go_with_the_materialized(patch: Patch) -> None:
    """FLINK-25492: what is appended while a materialization runs is truncated with what it has."""

    def truncate(self: StateChangelogWriter, to_sqn: int) -> None:
        self.ledger.truncate(self.next_sequence_number())
        self._touch()

    patch.setattr(StateChangelogWriter, "truncate", truncate)


def boundary_is_put_inside_a_change_set(patch: Patch) -> None:
    """FLINK-25987: what a materialization has and what it has not lie in one change set."""
    patch.setattr(StateChangelogWriter, "next_sequence_number", lambda self: self.ledger.next_sqn)


def writer_discards_what_was_confirmed(patch: Patch) -> None:
    """FLINK-25524: after a checkpoint has completed its changes are still the writer's to delete."""
    patch.setattr(LogLedger, "_own", lambda self, entry: None)


def log_is_never_truncated(patch: Patch) -> None:
    """FLINK-25261: files and memory of materialized changes stay."""
    patch.setattr(LogLedger, "truncate", lambda self, to_sqn: None)


def close_leaves_futures_open(patch: Patch) -> None:
    """FLINK-25429, ``FsStateChangelogWriter.close``: who waits for an upload waits for ever."""
    close = LogLedger.close

    def forget(self: LogLedger[Any], why: Any) -> list[PersistTicket]:
        close(self, why)
        return []

    patch.setattr(LogLedger, "close", forget)


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


def change_sets_of_one_file_are_mixed_up(patch: Patch) -> None:
    """FLINK-26799: a reader of one file's change sets stands at a wrong place when it comes to the next."""
    decode = reader._decode_runs

    def all_logs(key_groups: Any, logs: Any, data: bytes, start: int, unit: Any, where: str) -> Any:
        whole = {log_id: SequenceNumberRange(0, 1 << 40) for log_id in logs or ()}
        return decode(key_groups, whole or None, data, start, unit, where)

    patch.setattr(reader, "_decode_runs", all_logs)


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


def all_materialize_at_the_same_moment(patch: Patch) -> None:
    """FLINK-28976: every backend of a job starts its first materialization an interval after its start."""
    init = MaterializationTrigger.__init__

    def at_once(self: MaterializationTrigger, options: Any, runtime: Any, now: float) -> None:
        init(self, options, runtime, now)
        self._not_before, self._interval_due = now, now + options.interval_s

    patch.setattr(MaterializationTrigger, "__init__", at_once)


def orphans_stay_after_a_crash(patch: Patch) -> None:
    """FLINK-24852, FLINK-23139: what was stored and not acknowledged when a process died is never deleted."""
    patch.setattr(cleaning_plan._Proofs, "reason", lambda self, parsed, modified: cleaning_plan.Kept.PERHAPS_PENDING)


def no_claim_shares_files(patch: Patch) -> None:
    """FLINK-38307, FLINK-40476: a query that was told not to claim a savepoint needs its files all the same."""

    async def copy(self: SavepointRestore, savepoint: Any, wanted: Any, query_id: str) -> dict[str, str]:
        return {}

    patch.setattr(SavepointRestore, "_copy", copy)


def failed_materialization_is_the_last(patch: Patch) -> None:
    """FLINK-40302: after an error nothing is planned any more, and the log grows without bound."""

    def failed(self: MaterializationTrigger, now: float) -> bool:
        self._end(Phase.WAITING)
        self._not_before = float("inf")
        return True

    patch.setattr(MaterializationTrigger, "failed", failed)


def abort_deletes_up_to_it(patch: Patch) -> None:
    """FLINK-29913, ``LocalChangelogRegistry``: with a checkpoint that is aborted go files that later ones share."""

    def reset(self: LogLedger[Any], wanted: SequenceNumberRange) -> None:
        for entry in self._within(wanted):
            entry.claims -= 1
            if entry.state is Ownership.DURABLE and entry.location is not None:
                self._references.release(entry.location.name)

    patch.setattr(LogLedger, "reset", reset)


def files_have_no_checksum(patch: Patch) -> None:
    """Flink's changelog file has none: a flipped bit is replayed."""
    patch.setattr(google_crc32c, "value", lambda data: 0)


def handle_names_its_file_for_each_change_set(patch: Patch) -> None:
    """The metadata of a checkpoint grows with every change set, and not with files."""

    def join(change_sets: Any) -> Sequence[LogSegment]:
        return tuple(LogSegment(SequenceNumberRange(sqn, sqn + 1), place, n) for sqn, place, n in change_sets)

    patch.setattr("dstl.changelog.ledger.join_segments", join)


def _steps() -> list[tuple[float, int, str, float]]:
    rng = random.Random(1)
    return [(rng.uniform(0, 400), 900, ("ok", "fail")[n % 2], 10.0) for n in range(20)]


SCHEDULE = {"seed": 1, "steps": _steps()}
FILTER = {"number": 1, "groups": [0, 15], "sqns": [3, 4], "logs": ("a", "b"), "split": False}

BUGS = [
    Bug(
        "highestFailed",
        failed_upload_is_remembered,
        DEFECTS + "test_a_failed_upload_does_not_poison_later_checkpoints",
        Unavailable,
        "the test says no",
    ),
    Bug(
        "one file per batch",
        failed_file_fails_every_task,
        DEFECTS + "test_a_failed_segment_fails_only_those_who_are_in_it",
        Unavailable,
        "the test says no",
    ),
    Bug("uploadInternal", tasks_fail_before_the_retry, DEFECTS + "test_a_retry_after_an_error_rescues_the_upload"),
    Bug(
        "OutputStreamWithPos.close",
        error_at_the_end_is_swallowed,
        DEFECTS + "test_an_error_at_the_end_of_an_upload_is_not_a_success",
        NOT_RAISED,
        "DID NOT RAISE",
    ),
    Bug(
        "handleUploadSuccess",
        closed_writer_discards_the_shared_file,
        DEFECTS + "test_a_writer_closed_during_an_upload_leaves_the_others_their_segment",
        ObjectNotFound,
        "no object",
    ),
    Bug(
        "early seal",
        seal_waits_for_its_delay,
        DEFECTS + "test_a_seal_does_not_wait_once_all_writers_with_data_have_asked",
    ),
    Bug(
        "FLINK-26396",
        last_timeout_fails_nobody,
        DEFECTS + "test_flink_26396_a_last_attempt_without_an_answer_fails_the_persist_and_keeps_the_bytes",
        TimeoutError,
    ),
    Bug(
        "FLINK-26485",
        loser_of_a_hedge_stays,
        "changelog/test_uploader.py::test_cold_hedge_wins_and_the_loser_leaves_nothing_flink_26485",
    ),
    Bug(
        "FLINK-26592",
        capacity_comes_back_after_the_waiters,
        DEFECTS + "test_flink_26592_appending_from_an_uploads_completion_does_not_deadlock",
        TimeoutError,
    ),
    Bug(
        "FLINK-30729",
        append_after_close_is_dropped,
        DEFECTS + "test_flink_30729_an_append_after_close_is_refused_and_not_dropped",
        NOT_RAISED,
        "DID NOT RAISE",
    ),
    Bug(
        "FLINK-30792",
        only_the_open_change_set_counts,
        DEFECTS + "test_flink_30792_a_preemptive_upload_counts_closed_change_sets_too",
    ),
    Bug(
        "apache/flink#15371",
        wake_up_is_lost,
        DEFECTS + "test_flink_15371_a_threshold_crossed_while_the_timer_runs_is_not_a_lost_wake_up",
        TimeoutError,
    ),
    Bug(
        "FLINK-31139", nothing_is_written_as_a_file, DEFECTS + "test_flink_31139_a_persist_of_nothing_writes_no_object"
    ),
    Bug(
        "FLINK-28440",
        truncation_takes_what_a_checkpoint_references,
        DEFECTS + "test_flink_28440_truncation_waits_for_a_checkpoint_that_references_the_segment",
        ObjectNotFound,
        "no object",
    ),
    Bug(
        "FLINK-30561",
        file_is_counted_by_logs,
        DEFECTS + "test_flink_28440_a_segment_is_counted_by_change_sets_and_not_by_logs",
    ),
    Bug(
        "FLINK-25492",
        open_changes_go_with_the_materialized,
        DEFECTS + "test_flink_25492_25987_what_is_appended_at_the_materialization_boundary_is_kept",
        Invalid,
        "changes from 1 were truncated up to 2",
    ),
    Bug(
        "FLINK-25987",
        boundary_is_put_inside_a_change_set,
        DEFECTS + "test_flink_25492_25987_what_is_appended_at_the_materialization_boundary_is_kept",
    ),
    Bug(
        "FLINK-25524",
        writer_discards_what_was_confirmed,
        DEFECTS + "test_flink_25524_a_confirmed_segment_is_the_coordinators_whatever_happens_to_its_log",
        ObjectNotFound,
        "no object",
    ),
    Bug(
        "FLINK-25261",
        log_is_never_truncated,
        DEFECTS + "test_flink_25261_truncated_changes_are_gone_from_memory_and_from_the_store",
    ),
    Bug("FLINK-25429", close_leaves_futures_open, DEFECTS + "test_close_settles_futures"),
    Bug(
        "FLINK-28602",
        closing_twice_gives_back_twice,
        DEFECTS + "test_flink_28602_25429_closing_twice_is_closing_once",
        saying="bytes were not given back",
    ),
    Bug(
        "FLINK-26799",
        change_sets_of_one_file_are_mixed_up,
        "changelog/test_reader.py::test_filters_return_exactly_what_they_name",
        arguments=FILTER,
    ),
    Bug(
        "FLINK-26799, seek",
        seek_is_off,
        "changelog/test_reader.py::test_neighbours_are_fetched_in_one_request",
        CorruptData,
        "block at byte 16",
    ),
    Bug(
        "FLINK-28976",
        all_materialize_at_the_same_moment,
        "materializer/test_trigger.py::test_the_first_starts_of_many_operators_are_spread",
    ),
    Bug(
        "FLINK-24852",
        orphans_stay_after_a_crash,
        "checkpoint/test_cleaner.py::test_24852_two_sweeps_after_any_crash_leave_no_orphan",
        arguments={"after": True},
    ),
    Bug(
        "FLINK-38307",
        no_claim_shares_files,
        "checkpoint/test_savepoint_restore.py::test_no_claim_is_self_contained_from_its_first_checkpoint_flink_38307",
        CorruptData,
        "is damaged or missing: savepoints/mine/",
    ),
    Bug(
        "FLINK-40302",
        failed_materialization_is_the_last,
        "materializer/test_trigger.py::test_any_schedule_keeps_the_promises",
        arguments=SCHEDULE,
    ),
    Bug(
        "FLINK-29913",
        abort_deletes_up_to_it,
        DEFECTS + "test_an_aborted_checkpoint_deletes_nothing_that_later_ones_reference",
        ObjectNotFound,
        "no object",
    ),
    Bug(
        "no checksum",
        files_have_no_checksum,
        "changelog/test_segment_damage.py::test_every_flipped_bit_is_found_before_a_change_is_seen",
        NOT_RAISED,
        "DID NOT RAISE",
    ),
    Bug(
        "handles per change set",
        handle_names_its_file_for_each_change_set,
        DEFECTS + "test_a_handle_grows_by_segments_and_not_by_change_sets",
    ),
]
