"""The cost of a job's storage for a day, by a formula that is shown with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstl.checkpoint.manifest.history import HistoryEntry

_DAY_S = 24 * 3600.0
"""What prices are shown for."""

_PER_1000_PUTS, _PER_1000_GETS, _PER_GB_MONTH = 0.005, 0.0004, 0.023
"""US dollars, of S3 Standard in us-east-1 without discounts, taxes and traffic: for a thousand PUT or LIST requests, a
thousand GET or HEAD requests, and a gigabyte for a month of 30 days."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A day's cost in US dollars, by the checkpoints that were looked at.

    Attributes:
        requests: For the requests of checkpoints.
        storage: For what the newest checkpoint refers to.
        formula: How they were computed, with the numbers.
        seconds: Of the checkpoints that the pace was taken from; a short time says little of a day.
    """

    requests: float
    storage: float
    formula: str
    seconds: float = _DAY_S

    @property
    def total(self) -> float:
        """Both together."""
        return self.requests + self.storage


def cost_per_day(entries: Sequence[HistoryEntry], stored_bytes: int) -> Cost | None:
    """Return what a day costs at the pace of these checkpoints; None before the second one.

    All requests count as PUTs, the dearest kind. Left out: uploads of bases, reads of restores, traffic, deletions
    (free).
    """
    made = [entry for entry in entries if entry.kind != "restore" and entry.requests]
    span = made[-1].at - made[0].at if len(made) > 1 else 0.0
    if span <= 0:
        return None
    # The first of them begins the span: it is not a part of it.
    of_day = cost_of_day(sum(entry.requests for entry in made[1:]) / span * _DAY_S, stored_bytes)
    return replace(of_day, seconds=span)


def cost_of_day(requests: float, stored_bytes: float, *, gets: float = 0.0) -> Cost:
    """Return what a day's requests and storage cost.

    Args:
        requests: PUT and LIST requests a day, and all others that are to count as such.
        stored_bytes: Held all day.
        gets: GET and HEAD requests a day.
    """
    gigabytes = stored_bytes / 1e9
    parts = [f"{requests:,.0f} requests a day × ${_PER_1000_PUTS:g} per 1,000"]
    if gets:
        parts.append(f"{gets:,.0f} GET and HEAD × ${_PER_1000_GETS:g} per 1,000")
    parts.append(f"{gigabytes:,.3f} GB × ${_PER_GB_MONTH:g} a month ÷ 30")
    return Cost(
        requests / 1000 * _PER_1000_PUTS + gets / 1000 * _PER_1000_GETS,
        gigabytes * _PER_GB_MONTH / 30,
        " + ".join(parts),
    )
