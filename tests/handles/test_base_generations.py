"""Which bases of a key group are kept, and what a checkpoint that mixes bases and log must refuse."""

import pytest
from pydantic import ValidationError

from dstl.checkpoint.assembly import Bases, RecoveryWork, kept_log, recovery_work, with_reports
from handles.checkpoint import CompletedCheckpoint, LogEntry, SegmentEntry, TruncatedEntry
from handles.materialized_handle import (
    MaterializationReport,
    MaterializedStateHandle,
    TableFile,
    advance,
    generations_of,
    handles_of,
    live_bytes,
    reusable_files,
)
from worlds.manifest_samples import checkpoint


def _handle(number: int, checkpoint: int, groups: range, operator: str = "op") -> MaterializedStateHandle:
    parts = tuple((group, at * 10, 10) for at, group in enumerate(groups))
    return MaterializedStateHandle(
        operator=operator,
        materialization_id=number,
        checkpoint=checkpoint,
        name=f"file-{number}",
        size=10 * len(parts),
        checksum=1,
        parts=parts,
    )


def _report(
    number: int, checkpoint: int, written: range, unchanged: tuple[tuple[int, int], ...] = (), **more: object
) -> MaterializationReport:
    groups = {*written, *(group for group, _ in unchanged)}
    return MaterializationReport(
        operator="op",
        checkpoint=checkpoint,
        first_key_group=min(groups),
        last_key_group=max(groups),
        handles=(_handle(number, checkpoint, written),) if written else (),
        unchanged=unchanged,
        **more,
    )


def _checkpoint(**fields: object) -> CompletedCheckpoint:
    return checkpoint(9, 8, **{"parent": 8, "max_parallelism": 4, **fields})  # type: ignore[arg-type]


def test_two_generations_are_kept_and_an_unchanged_key_group_moves_on_in_both() -> None:
    known = advance({}, _report(1, 3, range(2)), 2)
    known = advance(known, _report(2, 5, range(1), ((1, 1),)), 2)
    assert [(b.file.name, b.checkpoint) for b in known[0]] == [("file-2", 5), ("file-1", 3)]
    assert [(b.file.name, b.checkpoint) for b in known[1]] == [("file-1", 5)]
    known = advance(known, _report(3, 7, range(1, 2), ((0, 2), (1, 1))), 2)
    # The older generation of group 0 has another content, so it stays valid at 3 alone.
    assert [(b.file.name, b.checkpoint) for b in known[0]] == [("file-2", 7), ("file-1", 3)]
    assert [(b.file.name, b.checkpoint) for b in known[1]] == [("file-3", 7), ("file-1", 7)]


def test_a_report_of_another_base_is_refused() -> None:
    known = advance({}, _report(1, 3, range(2)), 2)
    with pytest.raises(ValueError, match="unchanged since materialization 4"):
        advance(known, _report(2, 5, range(1), ((1, 4),)), 2)
    with pytest.raises(ValueError, match="unchanged since"):
        advance({}, _report(2, 5, range(1), ((1, 1),)), 2)


def test_damaged_files_are_no_generation_any_more() -> None:
    known = advance({}, _report(1, 3, range(2)), 2)
    known = advance(known, _report(2, 5, range(2)), 2)
    known = advance(known, _report(3, 7, range(2), damaged=("file-2",)), 2)
    assert [b.file.name for b in known[0]] == ["file-3", "file-1"]


def test_a_key_group_without_a_sound_base_has_none_any_more() -> None:
    known = advance({}, _report(1, 3, range(2)), 2)
    assert advance(known, _report(2, 5, range(1), ((1, 1),), damaged=("file-1",)), 2).keys() == {0}


def _table(number: int, *names: str) -> MaterializedStateHandle:
    files = [TableFile(f"{0:016x}-{ord(name)}.sst", name, 10, 1) for name in names]
    return _handle(number, number, range(2)).model_copy(update={"files": tuple(files)})


@pytest.mark.parametrize(
    ("damaged", "keep", "free"),
    [
        ((), 1, "xyz"),
        ((), 2, "z"),  # y is in the newest as well
        ((), 3, ""),
        (("z",), 2, ""),
        (("file-2",), 2, "x"),  # the newest goes, for its index is damaged, and the older one stays
        (("file-2", "x"), 2, ""),
        (("file-1", "file-2"), 2, "xyz"),
    ],
)
def test_a_new_base_names_files_of_those_alone_that_it_displaces(
    damaged: tuple[str, ...], keep: int, free: str
) -> None:
    known = generations_of([_table(2, "x", "y"), _table(1, "y", "z")])["op"]
    found = reusable_files(known, damaged, keep)
    assert {file.name for file in found.values()} == set(free)
    assert all(file.id == name for name, file in found.items())


def test_handles_and_generations_are_inverse() -> None:
    known = advance({}, _report(1, 3, range(4)), 2)
    known = advance(known, _report(2, 5, range(1), ((1, 1), (2, 1), (3, 1))), 2)
    handles = handles_of({"op": known})
    assert handles_of(generations_of(handles)) == handles
    assert live_bytes(known.values()) == {"file-1": 40, "file-2": 10}
    assert {(h.name, h.checkpoint) for h in handles} == {("file-1", 3), ("file-1", 5), ("file-2", 5)}


@pytest.mark.parametrize(
    "report",
    [
        {"handles": (_handle(1, 3, range(1)),), "first_key_group": 0, "last_key_group": 1},
        {"handles": (_handle(1, 2, range(2)),), "first_key_group": 0, "last_key_group": 1},
        {"handles": (_handle(1, 3, range(2), "other"),), "first_key_group": 0, "last_key_group": 1},
        {"unchanged": ((0, 1), (2, 1)), "first_key_group": 0, "last_key_group": 1},
    ],
)
def test_a_report_that_does_not_cover_its_key_groups_is_refused(report: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MaterializationReport(operator="op", checkpoint=3, **report)


@pytest.mark.parametrize("parts", [(), ((1, 0, 5), (0, 5, 5)), ((0, 0, 5), (0, 5, 5)), ((0, 6, 5),)])
def test_a_handle_with_impossible_parts_is_refused(parts: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValidationError):
        MaterializedStateHandle(
            operator="op", materialization_id=1, checkpoint=1, name="f", size=10, checksum=1, parts=parts
        )


def _log(log_id: str, first: int, last: int, from_sqn: int = 0) -> LogEntry:
    return LogEntry(log_id=log_id, operator="op", first_key_group=first, last_key_group=last, from_sqn=from_sqn)


def _segment(name: str, checkpoint: int, *ranges: tuple[int, int, int]) -> SegmentEntry:
    return SegmentEntry(
        segment=(name, 100, 1, 0), first_key_group=0, last_key_group=3, ranges=ranges, checkpoint=checkpoint
    )


def test_a_log_is_cut_only_behind_the_oldest_base_of_all_its_key_groups() -> None:
    logs = (_log("wide", 0, 3), _log("narrow", 0, 1))
    segments = (
        _segment("a", 1, (0, 0, 1)),
        _segment("b", 3, (1, 0, 2)),
        _segment("c", 5, (1, 2, 3)),
    )
    cut = [TruncatedEntry(operator="op", first_key_group=0, last_key_group=1, checkpoint=4)]
    kept_logs, kept_segments = kept_log(logs, segments, cut, {})
    assert [(log.log_id, log.from_sqn) for log in kept_logs] == [("wide", 0), ("narrow", 2)]
    assert [(s.segment[0], s.ranges) for s in kept_segments] == [("a", ((0, 0, 1),)), ("c", ((1, 2, 3),))]
    everything = [TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=5)]
    assert kept_log(logs, segments, everything, {}) == ((), ())
    kept_logs, _ = kept_log(logs, segments, everything, {"narrow": 3})
    assert [(log.log_id, log.from_sqn) for log in kept_logs] == [("narrow", 3)]


def test_the_log_is_let_go_of_only_with_two_generations() -> None:
    parent = _checkpoint(checkpoint_id=6, parent=5)
    once = with_reports(parent, [_report(1, 4, range(4))], 2)
    assert once.truncated == ()
    parent = _checkpoint(checkpoint_id=7, parent=6, materialized=once.materialized, truncated=once.truncated)
    twice = with_reports(parent, [_report(2, 6, range(4))], 2)
    assert [(e.first_key_group, e.last_key_group, e.checkpoint) for e in twice.truncated] == [(0, 3, 4)]
    assert [(e.checkpoint) for e in with_reports(parent, [_report(2, 6, range(4))], 1).truncated] == [6]
    with pytest.raises(ValueError, match="no ancestor"):
        with_reports(parent, [_report(2, 8, range(4))], 2)


def test_a_checkpoint_whose_bases_and_log_leave_a_gap_is_refused() -> None:
    sound = {
        "materialized": (_handle(1, 4, range(4)), _handle(2, 6, range(4))),
        "truncated": (TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=4),),
        "logs": (_log("wide", 0, 3, 2),),
        "segments": (_segment("c", 5, (0, 2, 3)), _segment("d", 9, (0, 3, 4))),
    }
    checkpoint = _checkpoint(**sound)
    assert recovery_work(checkpoint).segments == 1
    assert recovery_work(checkpoint).bytes == 140
    for broken in (
        {"materialized": (_handle(1, 3, range(4)), _handle(2, 6, range(4)))},
        {"materialized": (_handle(2, 6, range(3)),)},
        {"materialized": (_handle(1, 4, range(4)), _handle(2, 10, range(4)))},
        {"materialized": (_handle(1, 4, range(5)),)},
        {"truncated": ()},
        {"segments": (_segment("c", 5, (0, 2, 3)), _segment("d", 10, (0, 3, 4)))},
        {"segments": (_segment("c", 9, (0, 2, 3)), _segment("d", 5, (0, 3, 4)))},
        {"segments": (_segment("c", 0, (0, 2, 3)), _segment("d", 9, (0, 3, 4)))},
        {"logs": (_log("wide", 0, 3, 1),)},
    ):
        with pytest.raises(ValidationError):
            _checkpoint(**{**sound, **broken})


def test_without_reports_and_without_a_cut_everything_stays() -> None:
    truncated = (TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=4),)
    materialized = (_handle(1, 4, range(4)), _handle(2, 6, range(4)))
    parent = _checkpoint(materialized=materialized, truncated=truncated)
    for reports in ([], [_report(3, 9, range(4))]):
        bases = with_reports(parent, reports, 2)
        # One that was made of the parent itself fits.
        assert {base.materialization_id for base in bases.materialized} == ({1, 2} if not reports else {2, 3})
        assert [entry.checkpoint for entry in bases.truncated] == ([4] if not reports else [6])
    assert with_reports(None, [], 2) == Bases((), ())
    logs, segments = [_log("wide", 0, 3)], [_segment("a", 1, (0, 0, 1))]
    assert kept_log(logs, segments, (), {}) == (tuple(logs), tuple(segments))


def test_a_log_begins_with_the_lowest_number_that_is_left_of_it_in_any_segment() -> None:
    segments = [_segment("a", 1, (0, 0, 1)), _segment("b", 5, (0, 1, 3)), _segment("c", 6, (0, 3, 4))]
    cut = [TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=4)]
    (log,), kept = kept_log([_log("wide", 0, 3)], segments, cut, {})
    assert (log.from_sqn, [each.segment[0] for each in kept]) == (1, ["b", "c"])


def test_segments_that_no_cut_touches_are_carried_and_not_copied() -> None:
    """With 200 partitions and 1,200 segments copies took 130 of the driver's 170 ms for a checkpoint."""
    segments = [_segment("a", 1, (0, 0, 1)), _segment("b", 5, (0, 1, 3), (1, 0, 1))]
    cut = [TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=4)]
    _, (kept,) = kept_log([_log("wide", 0, 3), _log("narrow", 0, 1)], segments, cut, {})
    assert kept is segments[1]
    _, (kept,) = kept_log(
        [_log("gone", 0, 3), _log("narrow", 0, 1)], [segments[0], _segment("c", 5, (1, 0, 1))], cut, {}
    )
    assert kept.ranges == ((0, 0, 1),)


def test_a_restore_reads_the_newest_bases_and_what_any_of_their_key_groups_lacks() -> None:
    bases = (_handle(1, 4, range(4)), _handle(2, 6, range(1)))
    cut = (TruncatedEntry(operator="op", first_key_group=0, last_key_group=3, checkpoint=4),)
    logs = (_log("wide", 0, 3, 2), _log("narrow", 0, 0, 1))
    segments = (
        _segment("narrow, in the newest base", 6, (1, 1, 2)),
        _segment("wide, in the older one", 6, (0, 2, 3), (1, 2, 3)),
        _segment("in none", 7, (0, 3, 4), (1, 3, 4)),
        _segment("in none either", 8, (0, 4, 5)),
    )
    work = recovery_work(_checkpoint(materialized=bases, truncated=cut, logs=logs, segments=segments))
    assert work == RecoveryWork(base_bytes=40, log_bytes=300, segments=3)
    without = _checkpoint(logs=(_log("wide", 0, 3),), segments=(_segment("first", 1, (0, 0, 1)),))
    assert recovery_work(without) == RecoveryWork(base_bytes=0, log_bytes=100, segments=1)
