"""Assembly of a manifest: the parent's parts, then what the TaskManagers have persisted for this batch, less the log
that finished materializations have made superfluous. Pure.

The unit of truncation is what came with one checkpoint: a change set is dropped when every base that is kept, of every
key group that its log may hold, is as new as the checkpoint that it came with. A log that spans several TaskManagers
(after rescaling) thus waits for the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dstl.checkpoint.manifest.format import inline_offsets, manifest_name
from dstl.rpc.fleet_messages import Persisted, PersistedLog
from handles.checkpoint import CompletedCheckpoint, LogEntry, SegmentEntry, TruncatedEntry, log_coverage
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import (
    Generations,
    MaterializationReport,
    MaterializedStateHandle,
    advance,
    generations_of,
    handles_of,
)
from handles.segment_handle import INITIAL_SQN, SegmentHandle, SequenceNumber, SequenceNumberRange

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


def assemble(
    begun: CompletedCheckpoint, parent: CompletedCheckpoint | None, parts: Sequence[Persisted], generations: int = 2
) -> tuple[CompletedCheckpoint, list[bytes]]:
    """Return the checkpoint and the segments to be inlined in its manifest, in order.

    Args:
        begun: The checkpoint as far as it follows neither from parent nor from parts: number, batch, query, run,
            times, operators and their watermark.
        parent: The checkpoint that it builds on; None for an empty state.
        parts: What the TaskManagers have persisted.
        generations: So many bases of each key group are kept, and the log back to the oldest of them.

    Raises:
        ValueError: The parts leave a gap or an overlap, or a log belongs to two operators (nothing was written yet).
    """
    sequence = begun.checkpoint_id
    logs: dict[str, LogEntry] = {entry.log_id: entry for entry in parent.logs} if parent else {}
    next_sqn = {log_id: sqns.to_sqn for log_id, sqns in log_coverage(parent).items()} if parent else {}
    for part in parts:
        for log in part.logs:
            if log.pieces:
                logs[log.log_id] = _entry(logs.get(log.log_id), log)
                next_sqn.setdefault(log.log_id, INITIAL_SQN)
    index = {log_id: i for i, log_id in enumerate(logs)}
    located = iter(inlined_handles(parts, sequence).values())
    entries: list[SegmentEntry] = []
    for part in parts:
        handles = [next(located) if s.seal else s.handle for s in part.segments]
        entries += _in_order(part, handles, index, next_sqn, sequence)
    bases = with_reports(parent, [report for part in parts for report in part.materializations], generations)
    kept_logs, kept_segments = kept_log(
        tuple(logs.values()),
        (*(parent.segments if parent else ()), *entries),
        bases.truncated,
        {log_id: next_sqn[log_id] for part in parts for log_id in part.open_logs if log_id in next_sqn},
    )
    times = {**dict(parent.logged_at if parent else ()), sequence: int(begun.created_at)}
    checkpoint = CompletedCheckpoint(
        **dict(begun)
        | {
            "parent": parent.checkpoint_id if parent else None,
            "late_watermark_ms": _late_watermark(parent),
            "sequence_base": parent.sequence_base if parent else 0,
            "materialized": bases.materialized,
            "truncated": bases.truncated,
            "logs": kept_logs,
            "segments": kept_segments,
            "logged_at": tuple((n, times[n]) for n in sorted({s.checkpoint for s in kept_segments} & times.keys())),
        }
    )
    return checkpoint, [data for part in parts for data in part.inlined_segments()]


def _late_watermark(parent: CompletedCheckpoint | None) -> int | None:
    """Return the watermark of the batch itself, which does not fall either."""
    known = (parent.watermark_ms, parent.late_watermark_ms) if parent else ()
    return max((each for each in known if each is not None), default=None)


def inlined_handles(
    parts: Sequence[Persisted], sequence: int, in_front: Sequence[int] = ()
) -> dict[str, SegmentHandle]:
    """Return, by seal, where the manifest of this number holds the inlined segments, in the order of the parts.

    Args:
        parts: What TaskManagers or hosts have persisted.
        sequence: The manifest's number.
        in_front: Sizes of the inlined segments that it holds in front of these.
    """
    inlined = [s for part in parts for s in part.segments if s.seal]
    offsets = inline_offsets([*in_front, *(s.handle.size for s in inlined)])[len(in_front) :]
    return {
        s.seal: SegmentHandle(manifest_name(sequence), s.handle.size, s.handle.checksum, offset)
        for s, offset in zip(inlined, offsets, strict=True)
    }


def _entry(known: LogEntry | None, log: PersistedLog) -> LogEntry:
    """Return the log's entry; its key groups may have grown since it was first listed."""
    if known is None:
        return LogEntry(
            log_id=log.log_id,
            operator=log.operator,
            first_key_group=log.key_groups.start,
            last_key_group=log.key_groups.end,
        )
    if known.operator != log.operator:
        raise ValueError(f"log {log.log_id} belongs to operator {known.operator!r} and to {log.operator!r}")
    first, last = min(known.first_key_group, log.key_groups.start), max(known.last_key_group, log.key_groups.end)
    if (first, last) == (known.first_key_group, known.last_key_group):
        return known
    return known.model_copy(update={"first_key_group": first, "last_key_group": last})


def _in_order(
    part: Persisted,
    handles: Sequence[SegmentHandle],
    index: Mapping[str, int],
    next_sqn: dict[str, int],
    sequence: int,
) -> list[SegmentEntry]:
    """Return the part's segments in an order in which the change sets of every log ascend, for so they are replayed.

    A failed upload puts change sets back, so a log's earlier ones may lie in a later segment. Where no order of whole
    segments will do, one is listed again with the rest of its change sets.
    """
    held: list[list[tuple[str, SequenceNumberRange]]] = [[] for _ in part.segments]
    for log in part.logs:
        for piece, place in log.pieces:
            held[place].append((log.log_id, piece))
    entries: list[SegmentEntry] = []
    waiting = deque(place for place, pieces in enumerate(held) if pieces)
    passed = 0
    while waiting:
        place = waiting.popleft()
        # Whole segments first; once all that wait have been looked at in vain, the first that has anything due.
        taken = _due(held[place], next_sqn)
        if not taken or (len(taken) < len(held[place]) and passed < len(waiting) + 1):
            waiting.append(place)
            passed += 1
            if passed > 2 * len(waiting):
                raise ValueError(f"change sets are missing, or twice, before {held[place][0]} of {handles[place].name}")
            continue
        passed = 0
        for log_id, piece in taken:
            next_sqn[log_id] = piece.to_sqn
        if len(taken) < len(held[place]):
            for each in taken:
                held[place].remove(each)
            waiting.append(place)
        entries.append(_segment_entry(handles[place], part.segments[place].key_groups, taken, index, sequence))
    return entries


def _due(
    pieces: Sequence[tuple[str, SequenceNumberRange]], next_sqn: Mapping[str, int]
) -> list[tuple[str, SequenceNumberRange]]:
    """Return those pieces that continue their logs, in order."""
    reached: dict[str, int] = {}
    due = []
    for log_id, piece in pieces:
        if piece.from_sqn == reached.get(log_id, next_sqn[log_id]):
            reached[log_id] = piece.to_sqn
            due.append((log_id, piece))
    return due


def _segment_entry(
    handle: SegmentHandle,
    key_groups: KeyGroupRange,
    pieces: Sequence[tuple[str, SequenceNumberRange]],
    index: Mapping[str, int],
    sequence: int,
) -> SegmentEntry:
    ranges: list[tuple[int, int, int]] = []
    for log_id, piece in pieces:
        if ranges and ranges[-1][0] == index[log_id]:
            ranges[-1] = (index[log_id], ranges[-1][1], piece.to_sqn)
        else:
            ranges.append((index[log_id], piece.from_sqn, piece.to_sqn))
    return SegmentEntry(
        segment=(handle.name, handle.size, handle.checksum, handle.offset),
        first_key_group=key_groups.start,
        last_key_group=key_groups.end,
        ranges=tuple(ranges),
        checkpoint=sequence,
    )
