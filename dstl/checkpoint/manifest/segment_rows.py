"""The segments of a checkpoint as rows, so that a manifest grows by about a name for each segment and no more.

Per log the change sets of a checkpoint are contiguous and in order from the log's first, so a range needs no sequence
numbers: only how many change sets come next. And neighbouring logs mostly bring the same number, so a *run* says it for
several at once.
"""

from __future__ import annotations

from typing import Any

from dstl.errors import Invalid
from handles.checkpoint import CompletedCheckpoint, SegmentEntry

__all__ = ["pack_segments", "unpack_segments"]

_MAX_RANGES = 1 << 20
"""Most ranges of a checkpoint: a run may stand for many, so the length of the body does not bound them."""


def pack_segments(checkpoint: CompletedCheckpoint) -> dict[str, Any]:
    """Return ``segments`` with a row for each.

    A row is ``[name, size, checksum, offset, first key group, last key group, checkpoint, runs]``; ``runs`` is a flat
    list of ``log, logs, change sets``: so many logs, beginning with that one, each have so many change sets here.

    Raises:
        Invalid: More ranges than a reader takes.
    """
    rows = []
    ranges = 0
    for entry in checkpoint.segments:
        runs: list[int] = []
        log_after, sets_before = -1, -1
        for log, from_sqn, to_sqn in entry.ranges:
            if log == log_after and to_sqn - from_sqn == sets_before:
                runs[-2] += 1
            else:
                sets_before = to_sqn - from_sqn
                runs += (log, 1, sets_before)
            log_after = log + 1
        ranges += len(entry.ranges)
        rows.append([*entry.segment, entry.first_key_group, entry.last_key_group, entry.checkpoint, runs])
    if ranges > _MAX_RANGES:
        raise Invalid(f"a checkpoint of {ranges} ranges is too large for a manifest: materialize more often")
    return {"segments": rows}


def unpack_segments(checkpoint: dict[str, Any]) -> dict[str, list[SegmentEntry]]:
    """Return ``segments`` as entries; the inverse of :func:`pack_segments`. The input is not trusted.

    Raises:
        ValueError, TypeError, KeyError: Not rows.
    """
    following = [int(log["from_sqn"]) for log in checkpoint["logs"]]
    ranges = 0
    entries = []
    for name, size, checksum, offset, first, last, came_with, runs in checkpoint["segments"]:
        held = []
        for at in range(0, len(runs), 3):
            log, logs, sets = runs[at : at + 3]
            ranges += logs
            if not (0 <= log < log + logs <= len(following) and sets > 0 and ranges <= _MAX_RANGES):
                raise ValueError(f"a run of {logs} logs from {log}, {sets} change sets each, cannot be")
            for each in range(log, log + logs):
                held.append((each, following[each], following[each] + sets))
                following[each] += sets
        entries.append(
            SegmentEntry(
                segment=(name, size, checksum, offset),
                first_key_group=first,
                last_key_group=last,
                ranges=tuple(held),
                checkpoint=came_with,
            )
        )
    return {"segments": entries}
