"""What a persist returns: which change sets of a log lie where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumber, SequenceNumberRange

__all__ = ["InlineSegment", "LogSegment", "join_segments"]


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


def join_segments(
    change_sets: Iterable[tuple[SequenceNumber, SegmentHandle | InlineSegment, int]],
) -> tuple[LogSegment, ...]:
    """Join neighbours that lie in the same place, so that a handle grows by segments and not by change sets.

    Args:
        change_sets: Number, place and bytes of each, in order and without a gap.
    """
    joined: list[LogSegment] = []
    for sqn, place, nbytes in change_sets:
        if joined and joined[-1].location == place:
            last = joined.pop()
            span = SequenceNumberRange(last.range.from_sqn, sqn + 1)
            joined.append(LogSegment(span, place, last.nbytes + nbytes))
        else:
            joined.append(LogSegment(SequenceNumberRange(sqn, sqn + 1), place, nbytes))
    return tuple(joined)
