"""TaskManagers as rows of a table: the figures that say how one is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.metrics import Distribution, Sample
from dstl.metrics.registry import METRICS

_COUNTERS = {
    "cpu_s": "processCpuSeconds",
    "uploads": "numberOfUploadRequests",
    "hedges": "hedgesSent",
    "hedges_won": "hedgesWon",
    "waited_s": "backpressureSeconds",
    "materializations": "completedMaterialization",
    "failed_materializations": "failedMaterialization",
}


def member_rows(members: Sequence[MemberMetrics]) -> list[dict[str, Any]]:
    """Return the rows, by key groups.

    Returns:
        ``name``, ``pid`` and whether each ``is_up``, that is, answers. ``place``: host and port; on the driver's host,
        where it serves by socket alone, the host. ``key_groups``: those that it owns; ``spare`` for none. ``memory``:
        resident bytes. ``state_bytes`` and ``entries`` of its tables. ``log_held``: bytes of log that are not durable
        yet. ``cpu_s``: processor seconds. ``uploads`` that ended; ``upload_p50_s`` and ``upload_p99_s``: the time that
        half, and 99 %, of them took at most, None where nothing was uploaded. ``hedges`` sent, and ``hedges_won``.
        ``waited_s``: seconds that tasks have waited for room. ``materializations`` that ended well, and
        ``failed_materializations``.
    """
    return [
        _row(each) for each in sorted(members, key=lambda m: (m.member.key_groups is None, m.member.key_groups or 0))
    ]


def _row(each: MemberMetrics) -> dict[str, Any]:
    member, sample = each.member, each.sample
    counters = {name: sample.counters.get(counter, 0) for name, counter in _COUNTERS.items()}
    return {name: count if name.endswith("_s") else int(count) for name, count in counters.items()} | {
        "name": member.member_id,
        "place": f"{member.address.host}:{member.address.port}" if member.address.port else member.address.host,
        "pid": member.pid,
        "key_groups": str(member.key_groups) if member.key_groups is not None else "spare",
        "is_up": each.is_up,
        "memory": sample.gauges.get("residentBytes", 0.0),
        "state_bytes": _sum(sample, "stateBytes."),
        "entries": int(_sum(sample, "stateEntries.")),
        "log_held": sample.gauges.get("changelogBytesHeld", 0.0),
        "upload_p50_s": quantile(sample, "uploadLatenciesNanos", 0.5),
        "upload_p99_s": quantile(sample, "uploadLatenciesNanos", 0.99),
    }


def _sum(sample: Sample, prefix: str) -> float:
    return sum(value for name, value in sample.gauges.items() if name.startswith(prefix))


def quantile(sample: Sample, name: str, share: float) -> float | None:
    """Return the bound, in the metric's exposed unit, below which a share of a distribution lies; None if it is empty.

    Above the last bound it is the last bound: at least.
    """
    found = sample.distributions.get(name, Distribution((), 0.0))
    if not found.count:
        return None
    unit = METRICS[name].unit
    reached = next(i for i, count in enumerate(accumulate(found.buckets)) if count >= share * found.count)
    return unit.bounds[min(reached, len(unit.bounds) - 1)] * unit.scale
