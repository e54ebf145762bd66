"""The cleaner's decisions, pure: the objects of a location that may be deleted, and why.

An *orphan* is an object that no retained checkpoint refers to and none ever will: left by a process that died, by a
batch that was aborted, by a hedge or retry that lost late (FLINK-24852: Flink cannot delete these). That nobody refers
to an object proves nothing by itself, for a running batch has stored it before its checkpoint names it. The proofs are:

==========================  ==========================================================================================
of a segment                its writer is not live; or it is older than the newest fence, whose run has dropped every
                            attempt of the runs before; or older than the oldest of two retained checkpoints, so its
                            batch is over
of a base file              its writer is not live; or it is a day older than the oldest of two retained checkpoints:
                            a finished materialization is named by the next one, however long that takes to come
of a record                 it is below the cleanup boundary, a day old, and not the fence of the driver at work
of a checkpoint's record    its batch was run again and it holds no files
of a segment of files       it is older than the newest fence: what a driver has put before it lost the log, or died, no
                            record will name
of a probe                  the grace period
==========================  ==========================================================================================

Each needs the grace period as well, by the store's own clock. And no savepoint may be reading it, which can take longer
than any grace: the driver knows what its own hold. Where it cannot be asked, nothing but probes goes while a savepoint
is being written in the location: files without a descriptor, the newest less than an hour old. A savepoint's own files
are never touched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest

from dstl.changelog.object_names import SegmentName, parse_segment_name
from dstl.checkpoint.manifest.format import FORGOTTEN_S, manifest_name, manifest_sequence
from dstl.checkpoint.manifest.reader import ManifestScan
from dstl.checkpoint.savepoint.deletion import WRITING_GRACE_S
from dstl.checkpoint.savepoint.format import SAVEPOINTS, descriptor_name, is_savepoint_object, marker_name
from dstl.store.base import ObjectInfo
from handles.checkpoint import referenced_objects
from handles.file_record import FILES_OWNER

_PROBE = re.compile(r"(?:s[0-9]{1,4}/)?probe/[0-9a-f]{32}")
_CLOCK_MARGIN_S = 60.0
"""Servers of one store may disagree by so much, and S3 stamps an object with the second of its upload's beginning."""
_MATERIALIZATION_S = 86_400.0
"""No materialization takes longer; its first files wait for its last before anything names them."""


class Kept(StrEnum):
    """The reason why an object stays."""

    REFERENCED = "a retained checkpoint needs it"
    YOUNG = "younger than the grace period"
    HELD = "a savepoint that is being made may read it"
    PERHAPS_PENDING = "a running batch or materialization may still need it"
    LOG_RECORD = "record of the manifest log that is not below its cleanup boundary, or not for a day"
    OTHER_QUERY = "of another query"
    SAVEPOINT = "of a savepoint, which no cleanup touches (dstl savepoint list)"
    UNKNOWN = "not a name of ours"
    BOUND = "left to the next pass"


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object that may go, and why."""

    info: ObjectInfo
    reason: str


@dataclass(frozen=True, slots=True)
class CleaningPlan:
    """The deletions of a pass, and the objects that stay.

    Attributes:
        deletions: In the order of deletion: records before what they name, then by age, the oldest first.
        kept: How many objects stay, by reason.
        kept_bytes: Their bytes.
    """

    deletions: tuple[Deletion, ...]
    kept: dict[Kept, int]
    kept_bytes: dict[Kept, int]


def plan_cleaning(
    listing: Collection[ObjectInfo],
    scan: ManifestScan,
    live_writer_ids: Collection[str] | None,
    held: Collection[str] | None,
    *,
    now: float,
    grace_s: float,
    max_deletions: int,
) -> CleaningPlan:
    """Return the objects that may be deleted.

    Args:
        listing: Every object of the location, listed *before* ``scan`` was read and the writers were asked for: what
            they do not know of was then not there yet.
        scan: The manifest log, without damage.
        live_writer_ids: Writers that may still hand out what they have stored; None where that is unknown.
        held: What the query's savepoints read; None where that is unknown.
        now: Unix seconds by the store's clock.
        grace_s: Seconds that any object is left alone.
        max_deletions: Bound of one pass.
    """
    needed = {name for c in scan.retained for name in (*referenced_objects(c), manifest_name(c.checkpoint_id))}
    # Whatever a step of the index of Spark's files has named: some of it may have been removed by a later step.
    needed |= {name for r in scan.records.values() if r.files is not None for name, *_ in r.files.segments}
    proofs = _Proofs(listing, scan, live_writer_ids)
    is_saving = held is None and _is_saving(listing, now)
    held = frozenset(held or ())
    kept: Counter[Kept] = Counter()
    kept_bytes: Counter[Kept] = Counter()

    def dead() -> Iterator[tuple[bool, float, str, Deletion]]:
        for info in listing:
            is_record = False
            if info.name in needed:
                reason: str | Kept = Kept.REFERENCED
            elif (sequence := manifest_sequence(info.name)) is not None:
                is_record, reason = True, _record_reason(sequence, scan, now - info.modified)
            elif (parsed := parse_segment_name(info.name)) is not None:
                reason = proofs.reason(parsed, info.modified)
            elif is_savepoint_object(info.name):
                reason = Kept.SAVEPOINT
            else:
                reason = "a probe that was not finished" if _is_probe(info.name) else Kept.UNKNOWN
            if not isinstance(reason, Kept) and info.modified + grace_s > now:
                reason = Kept.YOUNG
            if not isinstance(reason, Kept) and (info.name in held or (is_saving and not _is_probe(info.name))):
                reason = Kept.HELD
            # What is dead counts as left to the next pass until it is known to be among the first.
            why = reason if isinstance(reason, Kept) else Kept.BOUND
            kept[why] += 1
            kept_bytes[why] += info.size
            if not isinstance(reason, Kept):
                yield not is_record, info.modified, info.name, Deletion(info, reason)

    deletions = tuple(each for _, _, _, each in nsmallest(max_deletions, dead()))
    kept[Kept.BOUND] -= len(deletions)
    kept_bytes[Kept.BOUND] -= sum(each.info.size for each in deletions)
    return CleaningPlan(deletions, dict(+kept), {reason: kept_bytes[reason] for reason in +kept})


def _record_reason(sequence: int, scan: ManifestScan, age_s: float) -> str | Kept:
    """Return the reason to delete or keep a record that is neither retained nor referenced."""
    if sequence >= scan.tail or sequence == scan.epoch:
        return Kept.LOG_RECORD
    if sequence < scan.boundary:
        return "it is below the cleanup boundary" if age_s >= FORGOTTEN_S else Kept.LOG_RECORD
    record = scan.records.get(sequence)
    if record is not None and record.checkpoint is not None and record.files is None:
        return "its batch was run again"
    return Kept.LOG_RECORD


class _Proofs:
    """Decides whether anybody may still come to refer to an unreferenced object."""

    def __init__(
        self, listing: Collection[ObjectInfo], scan: ManifestScan, live_writer_ids: Collection[str] | None
    ) -> None:
        self._query_id = scan.query_id
        self._live = None if live_writer_ids is None else frozenset(live_writer_ids)
        fence = manifest_name(scan.epoch)
        # It may lie below what the scan has listed.
        self._fenced_at = max((info.modified for info in listing if info.name == fence), default=float("-inf"))
        retained = scan.retained
        oldest = scan.listed.get(retained[0].checkpoint_id) if len(retained) > 1 else None
        self._retained_at = oldest.modified if oldest is not None else float("-inf")

    def reason(self, name: SegmentName, modified: float) -> str | Kept:
        if self._query_id and name.query_id == FILES_OWNER != self._query_id:
            # Spark's files in a backend's log: the driver has stored them, whom no TaskManager knows of.
            is_over = modified + _CLOCK_MARGIN_S < self._fenced_at
            return "no record needs it and its run has ended" if is_over else Kept.PERHAPS_PENDING
        if not self._query_id or name.query_id != self._query_id:
            return Kept.OTHER_QUERY
        if self._live is not None and name.writer_id not in self._live:
            return "no checkpoint needs it and its writer has ended"
        if name.kind == "seg":
            if modified + _CLOCK_MARGIN_S < self._fenced_at:
                return "no checkpoint needs it and its run has ended"
            if modified + _CLOCK_MARGIN_S < self._retained_at:
                return "no checkpoint needs it and its batch is over"
        elif modified + _MATERIALIZATION_S < self._retained_at:
            return "no checkpoint needs it and its materialization is over"
        return Kept.PERHAPS_PENDING


def _is_saving(listing: Collection[ObjectInfo], now: float) -> bool:
    """Return True where a savepoint's files were written a short while ago, and nothing has decided on it yet."""
    newest: dict[str, float] = {}
    decided: set[str] = set()
    for info in listing:
        if is_savepoint_object(info.name):
            name = info.name[len(SAVEPOINTS) :].partition("/")[0]
            newest[name] = max(newest.get(name, 0.0), info.modified)
            if info.name in (descriptor_name(name), marker_name(name)):
                decided.add(name)
    return any(modified + WRITING_GRACE_S > now for name, modified in newest.items() if name not in decided)


def _is_probe(name: str) -> bool:
    return _PROBE.fullmatch(name) is not None
