"""TaskManagers as rows of a table: the figures that say how one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.metrics import Distribution, Sample
from dstl.metrics.registry import METRICS

__all__ = ["MemberRow", "member_rows", "quantile"]


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A TaskManager's figures.

    Attributes:
        name: Its name.
        place: Host and port; on the driver's host, where it serves by socket alone, the host.
        pid: Process id.
        key_groups: The key groups that it owns; ``spare`` for none.
        is_up: Whether it answers.
        memory: Resident bytes.
        state_bytes: Bytes of its tables.
        entries: Entries of its tables.
        log_held: Bytes of log that are not durable yet.
        cpu_s: Processor seconds.
        upload_p50_s: Median upload, at most; None where nothing was uploaded.
        upload_p99_s: 99 % of uploads, at most.
        uploads: Uploads that ended.
        hedges: Hedges sent.
        hedges_won: How many of them won.
        waited_s: Seconds that tasks have waited for room.
        materializations: Those that ended well.
        failed_materializations: The others.
    """

    name: str
    place: str
    pid: int
    key_groups: str
    is_up: bool
    memory: float
    state_bytes: float
    entries: int
    log_held: float
    cpu_s: float
    upload_p50_s: float | None
    upload_p99_s: float | None
    uploads: int
    hedges: int
    hedges_won: int
    waited_s: float
    materializations: int
    failed_materializations: int


def member_rows(members: Sequence[MemberMetrics]) -> list[MemberRow]:
    """Return the rows, by key groups."""
    return [
        _row(each) for each in sorted(members, key=lambda m: (m.member.key_groups is None, m.member.key_groups or 0))
    ]


def _row(each: MemberMetrics) -> MemberRow:
    member, sample = each.member, each.sample
    counters, gauges = sample.counters, sample.gauges
    return MemberRow(
        member.member_id,
        f"{member.address.host}:{member.address.port}" if member.address.port else member.address.host,
        member.pid,
        str(member.key_groups) if member.key_groups is not None else "spare",
        each.is_up,
        gauges.get("residentBytes", 0.0),
        _sum(sample, "stateBytes."),
        int(_sum(sample, "stateEntries.")),
        gauges.get("changelogBytesHeld", 0.0),
        counters.get("processCpuSeconds", 0.0),
        quantile(sample, "uploadLatenciesNanos", 0.5),
        quantile(sample, "uploadLatenciesNanos", 0.99),
        int(counters.get("numberOfUploadRequests", 0)),
        int(counters.get("hedgesSent", 0)),
        int(counters.get("hedgesWon", 0)),
        counters.get("backpressureSeconds", 0.0),
        int(counters.get("completedMaterialization", 0)),
        int(counters.get("failedMaterialization", 0)),
    )


def _sum(sample: Sample, prefix: str) -> float:
    return sum(value for name, value in sample.gauges.items() if name.startswith(prefix))


def quantile(sample: Sample, name: str, share: float) -> float | None:
    """Return the bound, in the metric's exposed unit, below which this share of a distribution lies; None for none.

    Above the last bound it is the last bound: at least.
    """
    found = sample.distributions.get(name, Distribution((), 0.0))
    if not found.count:
        return None
    unit = METRICS[name].unit
    reached = next(i for i, count in enumerate(accumulate(found.buckets)) if count >= share * found.count)
    return unit.bounds[min(reached, len(unit.bounds) - 1)] * unit.scale
