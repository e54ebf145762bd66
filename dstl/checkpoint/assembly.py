"""Putting a manifest together: the parent's parts, then what the TaskManagers have persisted for this batch, less the
log that finished materializations have made superfluous."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from dstl.checkpoint.batch_time import BatchTime
from dstl.checkpoint.manifest.format import inline_offsets, manifest_name
from dstl.checkpoint.truncation import kept_log, with_reports
from dstl.rpc.fleet_messages import Persisted, PersistedLog
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry, log_coverage
from handles.key_group import KeyGroupRange
from handles.segment_handle import SegmentHandle
from handles.sequence_number import INITIAL_SQN, SequenceNumberRange

__all__ = ["assemble", "inlined_handles"]


def assemble(
    parent: CompletedCheckpoint | None,
    parts: Sequence[Persisted],
    *,
    sequence: int,
    batch_id: int,
    query_id: str,
    run_id: str,
    max_parallelism: int,
    created_at: float,
    watermark_ms: int | None,
    operators: Sequence[OperatorEntry],
    batch_time: BatchTime | None = None,
    generations: int = 2,
) -> tuple[CompletedCheckpoint, list[bytes]]:
    """Return the checkpoint and the segments to be inlined in its manifest, in order.

    ``generations`` bases of each key group are kept, and the log back to the older one.

    Raises:
        ValueError: The parts leave a gap or an overlap, or a log belongs to two operators (nothing was written yet).
    """
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
    checkpoint = CompletedCheckpoint(
        checkpoint_id=sequence,
        batch_id=batch_id,
        query_id=query_id,
        run_id=run_id,
        parent=parent.checkpoint_id if parent else None,
        max_parallelism=max_parallelism,
        created_at=created_at,
        watermark_ms=watermark_ms,
        batch_time_ms=batch_time.ms if batch_time else None,
        held_since_ms=batch_time.held_since_ms if batch_time else None,
        late_watermark_ms=_late_watermark(parent),
        sequence_base=parent.sequence_base if parent else 0,
        operators=tuple(operators),
        materialized=bases.materialized,
        truncated=bases.truncated,
        logs=kept_logs,
        segments=kept_segments,
    )
    return checkpoint, [data for part in parts for _, data in part.inlined_segments()]


def _late_watermark(parent: CompletedCheckpoint | None) -> int | None:
    """Return the watermark of the batch itself, which does not fall either."""
    known = (parent.watermark_ms, parent.late_watermark_ms) if parent else ()
    return max((each for each in known if each is not None), default=None)


def inlined_handles(parts: Sequence[Persisted], sequence: int) -> dict[str, SegmentHandle]:
    """Return, by seal, where the manifest of this number holds the inlined segments, in the order of the parts."""
    inlined = [s for part in parts for s in part.segments if s.seal]
    offsets = inline_offsets([s.handle.size for s in inlined])
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
