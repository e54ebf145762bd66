"""What one TaskManager contributes to a checkpoint, and how its reply says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstl.errors import CorruptData
from handles.key_group import KeyGroupRange
from handles.materialized_handle import MaterializationReport
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumberRange

__all__ = ["PersistedLog", "PersistedSegment", "TaskManagerPart", "part_from_wire"]


@dataclass(frozen=True, slots=True)
class PersistedSegment:
    """A segment that a TaskManager has sealed: stored already, or to be written inside the manifest.

    Attributes:
        handle: Where it lies; for an inlined one, only size and checksum mean anything.
        key_groups: The key groups in it.
        inlined: Its bytes, to be inlined; None for a stored one.
    """

    handle: SegmentHandle
    key_groups: KeyGroupRange
    inlined: bytes | None = None


@dataclass(frozen=True, slots=True)
class PersistedLog:
    """Change sets of one log, and the segments that hold them.

    Attributes:
        log_id: The log.
        operator: Its operator's uid.
        key_groups: Key groups that the log may hold.
        pieces: ``(range, index of the segment)`` in order.
    """

    log_id: str
    operator: str
    key_groups: KeyGroupRange
    pieces: tuple[tuple[SequenceNumberRange, int], ...]


@dataclass(frozen=True, slots=True)
class TaskManagerPart:
    """What one TaskManager contributes to a checkpoint.

    Attributes:
        segments: What it has sealed.
        logs: What of it belongs to the checkpoint.
        materializations: Those that have finished since the parent, of the parent's state or of an ancestor's.
        open_logs: Logs that it may go on with: they stay listed when they are materialized to their end.
    """

    segments: tuple[PersistedSegment, ...]
    logs: tuple[PersistedLog, ...]
    materializations: tuple[MaterializationReport, ...] = ()
    open_logs: tuple[str, ...] = ()


def part_from_wire(fields: Mapping[str, Any], payload: memoryview) -> tuple[TaskManagerPart, tuple[str, ...]]:
    """Rebuild a TaskManager's part from its reply to ``persist``.

    Args:
        fields: The reply.
        payload: Its inlined segments, back to back in the order of ``fields["segments"]``.

    Returns:
        The part, and the ids of its inlined segments in order.

    Raises:
        CorruptData: The reply is not one.
    """
    try:
        segments, seals, at = [], [], 0
        for row in fields["segments"]:
            key_groups = KeyGroupRange(int(row["first"]), int(row["last"]))
            if "seal" in row:
                data = bytes(payload[at : at + int(row["size"])])
                at += len(data)
                handle = SegmentHandle("", int(row["size"]), int(row["checksum"]))
                segments.append(PersistedSegment(handle, key_groups, data))
                seals.append(str(row["seal"]))
            else:
                segments.append(PersistedSegment(SegmentHandle.from_wire(row["handle"]), key_groups))
        logs = tuple(
            PersistedLog(
                str(log["log"]),
                str(log["operator"]),
                KeyGroupRange(int(log["first"]), int(log["last"])),
                tuple((SequenceNumberRange(int(a), int(b)), int(s)) for a, b, s in log["pieces"]),
            )
            for log in fields["logs"]
        )
        materializations = tuple(MaterializationReport.model_validate(each) for each in fields["materializations"])
        open_logs = tuple(str(each) for each in fields["open_logs"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptData(f"a TaskManager sent handles that are none: {error!r}") from None
    return TaskManagerPart(tuple(segments), logs, materializations, open_logs), tuple(seals)
