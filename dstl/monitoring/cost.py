"""The cost of a job's storage for a day, by a formula that is shown with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dstl.checkpoint.manifest.history import HistoryEntry

_DAY_S = 24 * 3600.0
"""What prices are shown for."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars: by default those of S3 Standard in us-east-1, without discounts, taxes and traffic.

    Attributes:
        per_1000_puts: A thousand PUT or LIST requests.
        per_gb_month: A gigabyte for a month of 30 days.
        per_1000_gets: A thousand GET or HEAD requests.
    """

    per_1000_puts: float = 0.005
    per_gb_month: float = 0.023
    per_1000_gets: float = 0.0004


PRICES = Prices()


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


def cost_per_day(entries: Sequence[HistoryEntry], stored_bytes: int, prices: Prices = PRICES) -> Cost | None:
    """Return what a day costs at the pace of these checkpoints; None before the second one.

    All requests count as PUTs, the dearest kind. Left out: uploads of bases, reads of restores, traffic, deletions
    (free).
    """
    made = [entry for entry in entries if entry.kind != "restore" and entry.requests]
    span = made[-1].at - made[0].at if len(made) > 1 else 0.0
    if span <= 0:
        return None
    # The first of them begins the span: it is not a part of it.
    of_day = cost_of_day(sum(entry.requests for entry in made[1:]) / span * _DAY_S, stored_bytes, prices)
    return replace(of_day, seconds=span)


def cost_of_day(requests: float, stored_bytes: float, prices: Prices = PRICES, *, gets: float = 0.0) -> Cost:
    """Return what a day's requests and storage cost.

    Args:
        requests: PUT and LIST requests a day, and all others that are to count as such.
        stored_bytes: Held all day.
        prices: Of one request, and of storage.
        gets: GET and HEAD requests a day.
    """
    gigabytes = stored_bytes / 1e9
    parts = [f"{requests:,.0f} requests a day × ${prices.per_1000_puts:g} per 1,000"]
    if gets:
        parts.append(f"{gets:,.0f} GET and HEAD × ${prices.per_1000_gets:g} per 1,000")
    parts.append(f"{gigabytes:,.3f} GB × ${prices.per_gb_month:g} a month ÷ 30")
    return Cost(
        requests / 1000 * prices.per_1000_puts + gets / 1000 * prices.per_1000_gets,
        gigabytes * prices.per_gb_month / 30,
        " + ".join(parts),
    )
