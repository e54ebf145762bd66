"""The handle of a stored segment: its place, its length and its checksum."""

from __future__ import annotations

from dataclasses import dataclass

SequenceNumber = int
"""A position in one log. Dense: every number below the next one labels exactly one non-empty change set."""

INITIAL_SQN: SequenceNumber = 0  # nothing has been appended


@dataclass(frozen=True, slots=True, order=True)
class SequenceNumberRange:
    """Change sets ``[from_sqn, to_sqn)`` of one log: half-open, possibly empty."""

    from_sqn: SequenceNumber
    to_sqn: SequenceNumber

    def __post_init__(self) -> None:
        if not 0 <= self.from_sqn <= self.to_sqn:
            raise ValueError(f"not a sequence number range: [{self.from_sqn}, {self.to_sqn})")

    def __len__(self) -> int:
        return self.to_sqn - self.from_sqn

    def __contains__(self, sqn: object) -> bool:
        return isinstance(sqn, int) and self.from_sqn <= sqn < self.to_sqn

    def intersect(self, other: SequenceNumberRange) -> SequenceNumberRange | None:
        """Return the common part, or None where there is none."""
        low, high = max(self.from_sqn, other.from_sqn), min(self.to_sqn, other.to_sqn)
        return SequenceNumberRange(low, high) if low < high else None


@dataclass(frozen=True, slots=True)
class SegmentHandle:
    """One segment: a whole object, or a part of one (a segment written inside a manifest).

    A handle holds names only; location, bucket and credentials come from the reader's configuration. That
    of a fork names a location too, which its reader opens only within what was named to it.

    Attributes:
        name: Object name relative to the store's location; the key under which shared state is counted.
        offset: Where the segment starts in the object, in bytes; 0 for an object of its own.
        size: Length of the segment in bytes.
        checksum: CRC-32C of those bytes.
    """

    name: str
    size: int
    checksum: int
    offset: int = 0
