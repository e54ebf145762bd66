"""Segments as the logs see them: where change sets lie, and how many of a segment are still needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from handles.segment_handle import SegmentHandle, SequenceNumber, SequenceNumberRange


@dataclass(frozen=True, slots=True)
class InlineSegment:
    """An encoded segment too small for an object of its own: the coordinator writes it inside the manifest.

    Attributes:
        id: Names this seal, in ``confirm``'s ``located``.
        data: The encoded segment.
        checksum: CRC-32C of ``data``.
    """

    id: str
    data: bytes = field(repr=False)
    checksum: int

    @property
    def size(self) -> int:
        """Length of the segment in bytes."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Change sets of one log and where they lie.

    Attributes:
        range: Their sequence numbers: half-open, never empty.
        location: A stored object, or a seal that travels with the answer.
        nbytes: Bytes of the changes before encoding: the replay work that they mean.
    """

    range: SequenceNumberRange
    location: SegmentHandle | InlineSegment
    nbytes: int


@dataclass(frozen=True, slots=True)
class PersistResult:
    """The answer of ``StateChangelogStorage.persist_all``: durable segments, and segments to be made durable.

    Attributes:
        ranges: What was asked of each log, by log id; may be empty ranges.
        segments: Where it lies, by log id: in order, without a gap.
    """

    ranges: Mapping[str, SequenceNumberRange]
    segments: Mapping[str, tuple[LogSegment, ...]]


def join_segments(
    change_sets: Iterable[tuple[SequenceNumber, SegmentHandle | InlineSegment, int]],
) -> tuple[LogSegment, ...]:
    """Join neighbours that lie in the same place, so that a handle grows by segments and not by change sets.

    Args:
        change_sets: Number, place and bytes of each, in order and without a gap.
    """
    joined: list[LogSegment] = []
    for place, run in groupby(change_sets, key=itemgetter(1)):
        sqns, _, sizes = zip(*run, strict=True)
        joined.append(LogSegment(SequenceNumberRange(sqns[0], sqns[-1] + 1), place, sum(sizes)))
    return tuple(joined)


class SegmentReferences:
    """Counts the change sets of each unconfirmed segment that are still needed, over all logs of a storage.

    One object holds change sets of many writers, so none of them may delete it alone (Flink 2.6-c does, and FLINK-28440
    counted wrongly). Pure: the storage deletes what :meth:`take_deletable` returns. Objects that were never tracked
    (manifests) are not counted.

    Invariants:
        1. Each change set of a tracked object ends exactly once: released, or given up to the coordinator.
        2. An object becomes deletable when its last change set ended and none was given up.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._kept: set[str] = set()
        self._deletable: list[str] = []

    def __len__(self) -> int:
        return len(self._left)

    def track(self, name: str, change_sets: int) -> None:
        """An object was stored that holds this many change sets (at least one)."""
        self._left[name] = change_sets

    def release(self, name: str) -> None:
        """One of its change sets is no longer needed, and no checkpoint can reference it."""
        self._end(name, kept=False)

    def give_up(self, name: str) -> None:
        """One of its change sets belongs, or may belong, to a checkpoint: the object is no longer ours to delete."""
        self._end(name, kept=True)

    def take_deletable(self) -> list[str]:
        """Return the objects that became deletable since the last call."""
        taken, self._deletable = self._deletable, []
        return taken

    def _end(self, name: str, *, kept: bool) -> None:
        if name not in self._left:
            return
        if kept:
            self._kept.add(name)
        self._left[name] -= 1
        if not self._left[name]:
            del self._left[name]
            if name not in self._kept:
                self._deletable.append(name)
            self._kept.discard(name)
