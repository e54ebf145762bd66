"""Truncation decides what a manifest keeps of bases and log once materializations have finished: pure.

The unit of truncation is what came with one checkpoint: a change set is dropped when every base that is kept, of every
key group that its log may hold, is as new as the checkpoint that it came with. A log that spans several TaskManagers
(after rescaling) thus waits for the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from handles.base_generations import Generations, advance, generations_of, handles_of
from handles.checkpoint import CompletedCheckpoint, LogEntry, SegmentEntry, TruncatedEntry
from handles.key_group import KeyGroup
from handles.materialized_handle import MaterializationReport, MaterializedStateHandle
from handles.sequence_number import SequenceNumber

__all__ = ["Bases", "RecoveryWork", "kept_log", "recovery_work", "with_reports"]

Floors = Mapping[str, Mapping[KeyGroup, int]]
"""Per operator and key group, the checkpoint up to which every kept base makes the log superfluous."""


@dataclass(frozen=True, slots=True)
class Bases:
    """The materialized part of a checkpoint.

    Attributes:
        materialized: The base files.
        truncated: How far the log may be cut off.
    """

    materialized: tuple[MaterializedStateHandle, ...]
    truncated: tuple[TruncatedEntry, ...]


@dataclass(frozen=True, slots=True)
class RecoveryWork:
    """The input of a restore: the newest bases and the log after them.

    Attributes:
        base_bytes: Bytes of base files.
        log_bytes: Bytes of segments.
        segments: Number of segments.
    """

    base_bytes: int
    log_bytes: int
    segments: int

    @property
    def bytes(self) -> int:
        """All bytes."""
        return self.base_bytes + self.log_bytes


def with_reports(parent: CompletedCheckpoint | None, reports: Sequence[MaterializationReport], keep: int) -> Bases:
    """Return the bases of a parent checkpoint after some finished materializations.

    Args:
        parent: What the new checkpoint builds on.
        reports: Of materializations of the parent or of one of its ancestors.
        keep: Generations to keep.

    Raises:
        ValueError: A report does not fit the parent.
    """
    materialized = parent.materialized if parent else ()
    truncated = parent.truncated if parent else ()
    if not reports:
        return Bases(materialized, truncated)
    generations = generations_of(materialized)
    floors = _floors(truncated)
    for report in reports:
        if parent is None or report.checkpoint > parent.checkpoint_id:
            raise ValueError(f"a materialization of checkpoint {report.checkpoint}, which is no ancestor")
        after = advance(generations.get(report.operator, {}), report, keep)
        generations[report.operator] = after
        floor = floors.setdefault(report.operator, {})
        for group in report.key_groups:
            bases = after.get(group, ())
            if len(bases) >= keep:
                floor[group] = max(floor.get(group, 0), bases[-1].checkpoint)
    return Bases(handles_of(generations), _entries(floors))


def kept_log(
    logs: Sequence[LogEntry],
    segments: Sequence[SegmentEntry],
    truncated: Iterable[TruncatedEntry],
    open_logs: Mapping[str, SequenceNumber],
) -> tuple[tuple[LogEntry, ...], tuple[SegmentEntry, ...]]:
    """Return the logs and segments without what is in every base, in the same order.

    Of each log a prefix goes, so that the rest stays contiguous. Segments that nothing is left of leave, and so do
    logs, unless they are open: those stay listed, so that the next checkpoint notices a gap.

    Args:
        logs: All logs.
        segments: All segments; their ranges name logs by place.
        truncated: How far the log may be cut off.
        open_logs: Open logs, and the number of each one's next change set.
    """
    floors = _floors(truncated)
    if not floors:
        return tuple(logs), tuple(segments)
    cut = [min(floors.get(log.operator, {}).get(group, 0) for group in log.key_groups) for log in logs]
    most = max(cut, default=0)
    lowest: dict[int, int] = {}
    left: list[tuple[SegmentEntry, Sequence[tuple[int, int, int]]]] = []
    for segment in segments:
        ranges: Sequence[tuple[int, int, int]] = segment.ranges
        if segment.checkpoint <= most:
            ranges = [each for each in ranges if segment.checkpoint > cut[each[0]]]
        if len(lowest) < len(logs):
            for log, from_sqn, _ in ranges:
                lowest.setdefault(log, from_sqn)  # they ascend
        if ranges:
            left.append((segment, ranges))
    for at, entry in enumerate(logs):
        if at not in lowest and entry.log_id in open_logs:
            lowest[at] = open_logs[entry.log_id]
    place = {log: at for at, log in enumerate(sorted(lowest))}
    moves = len(place) < len(logs)
    return (
        tuple(logs[log].model_copy(update={"from_sqn": lowest[log]}) for log in sorted(lowest)),
        tuple(
            # Most are as they were, and a checkpoint may have as many ranges as logs times segments.
            segment
            if len(ranges) == len(segment.ranges) and not moves
            else segment.model_copy(update={"ranges": tuple((place[log], a, b) for log, a, b in ranges)})
            for segment, ranges in left
        ),
    )


def recovery_work(checkpoint: CompletedCheckpoint) -> RecoveryWork:
    """Return what restoring a checkpoint would read, if nothing is damaged."""
    generations = generations_of(checkpoint.materialized)
    base_bytes = sum(bases[0].length for groups in generations.values() for bases in groups.values())
    replay_after = [
        min(_newest(generations.get(log.operator, {}), group) for group in log.key_groups) for log in checkpoint.logs
    ]
    read = [s for s in checkpoint.segments if any(s.checkpoint > replay_after[log] for log, _, _ in s.ranges)]
    return RecoveryWork(base_bytes, sum(s.handle.size for s in read), len(read))


def _newest(generations: Generations, group: KeyGroup) -> int:
    bases = generations.get(group)
    return bases[0].checkpoint if bases else 0


def _floors(truncated: Iterable[TruncatedEntry]) -> dict[str, dict[KeyGroup, int]]:
    floors: dict[str, dict[KeyGroup, int]] = {}
    for entry in truncated:
        floors.setdefault(entry.operator, {}).update(dict.fromkeys(entry.key_groups, entry.checkpoint))
    return floors


def _entries(floors: Floors) -> tuple[TruncatedEntry, ...]:
    """Return floors as runs of key groups with the same one."""
    entries: list[TruncatedEntry] = []
    for operator in sorted(floors):
        for group, checkpoint in sorted(floors[operator].items()):
            last = entries[-1] if entries else None
            if last and (last.operator, last.checkpoint, last.last_key_group + 1) == (operator, checkpoint, group):
                entries[-1] = last.model_copy(update={"last_key_group": group})
            else:
                entries.append(
                    TruncatedEntry(
                        operator=operator, first_key_group=group, last_key_group=group, checkpoint=checkpoint
                    )
                )
    return tuple(entries)
