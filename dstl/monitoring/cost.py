"""The cost of a job's storage for a day, by a formula that is shown with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dstl.checkpoint.manifest.history import HistoryEntry

__all__ = ["PRICES", "Cost", "Prices", "cost_per_day"]

_DAY_S = 86_400.0
_LEAST_SPAN_S = 60.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars: by default those of S3 Standard in us-east-1, without discounts, taxes and traffic.

    Attributes:
        per_1000_puts: A thousand PUT or LIST requests.
        per_gb_month: A gigabyte for a month of 30 days.
    """

    per_1000_puts: float = 0.005
    per_gb_month: float = 0.023


PRICES = Prices()


@dataclass(frozen=True, slots=True)
class Cost:
    """A day's cost in US dollars, by the checkpoints that were looked at.

    Attributes:
        requests: For the requests of checkpoints.
        storage: For what the newest checkpoint refers to.
        formula: How they were computed, with the numbers.
    """

    requests: float
    storage: float
    formula: str

    @property
    def total(self) -> float:
        """Both together."""
        return self.requests + self.storage


def cost_per_day(entries: Sequence[HistoryEntry], stored_bytes: int, prices: Prices = PRICES) -> Cost | None:
    """Return what a day costs at the pace of these checkpoints; None where they cover less than a minute.

    All requests count as PUTs, the dearest kind. Left out: uploads of bases, reads of restores, traffic, deletions
    (free).
    """
    made = [entry for entry in entries if entry.kind != "restore" and entry.requests]
    span = made[-1].at - made[0].at if len(made) > 1 else 0.0
    if span < _LEAST_SPAN_S:
        return None
    # The first of them begins the span: it is not a part of it.
    per_day = sum(entry.requests for entry in made[1:]) / span * _DAY_S
    gigabytes = stored_bytes / 1e9
    requests, storage = per_day / 1000 * prices.per_1000_puts, gigabytes * prices.per_gb_month / 30
    return Cost(
        requests,
        storage,
        f"{per_day:,.0f} requests a day × ${prices.per_1000_puts:g} per 1,000 + {gigabytes:,.3f} GB × "
        f"${prices.per_gb_month:g} a month ÷ 30",
    )
