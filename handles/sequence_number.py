"""Sequence numbers label change *sets*, never single changes; ranges of them are half-open."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INITIAL_SQN", "SequenceNumber", "SequenceNumberRange"]

SequenceNumber = int
"""A position in one log. Dense: every number below the next one labels exactly one non-empty change set."""

INITIAL_SQN: SequenceNumber = 0


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
