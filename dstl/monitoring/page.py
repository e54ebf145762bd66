"""The page: an overview as HTML, by templates that escape whatever comes from data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.state_catalogue import key_columns
from dstl.errors import Invalid
from dstl.metrics import Distribution, Sample
from dstl.metrics.registry import METRICS
from dstl.monitoring.charts import HEIGHT, WIDEST_COLUMN, WIDTH, Chart, bar_chart
from dstl.monitoring.overview import Overview
from dstl.monitoring.server import Reply, Route
from dstl.monitoring.skew import OperatorSizes
from dstl.monitoring.text import age_text, seconds_text, size_text, time_text

_ASSETS = Path(__file__).parent / "assets"
_PARTS = ("persist", "assemble", "commit", "notify")
_ROWS = 12
"""Rows of the history that a page begins with: what fits a screen below the charts."""
_RECENT = 240
"""Columns of a chart: four of its 1,000 units each, the narrowest that a pointer finds."""


def assets() -> dict[str, Route]:
    """Return the routes of the page's style and script."""

    def serve(name: str, kind: str) -> Route:
        return lambda _: Reply((_ASSETS / name).read_bytes(), kind)

    return {
        "/page.css": serve("page.css", "text/css; charset=utf-8"),
        "/page.js": serve("page.js", "text/javascript; charset=utf-8"),
    }


class Page:
    """Renders overviews. Thread-safe.

    Args:
        poll_s: Seconds between two looks of an open page.

    Raises:
        Invalid: ``jinja2`` is not installed.
    """

    def __init__(self, poll_s: float) -> None:
        try:
            from jinja2 import Environment, FileSystemLoader, StrictUndefined
        except ModuleNotFoundError:
            raise Invalid("the page needs jinja2: pip install 'dstl-pyspark[ui]'") from None
        self._poll_s = poll_s
        self._environment = Environment(
            loader=FileSystemLoader(_ASSETS),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "size": size_text,
            "seconds": seconds_text,
            "age": age_text,
            "time": time_text,
            "number": lambda value: f"{value:,}",
            "coordinate": lambda value: f"{value:.2f}",
        }

    def render(self, overview: Overview, asked: Mapping[str, str]) -> Reply:
        """Return the page; with ``part`` among the parameters only what changes, for the script of an open one."""
        everything = asked.get("rows") == "all"
        history = overview.history[-_RECENT:] if not everything else overview.history
        rows = list(reversed(overview.history))
        text = self._environment.get_template("parts.html" if "part" in asked else "page.html").render(
            overview=overview,
            poll_ms=int(self._poll_s * 1000),
            charts=_charts(history, overview.batch_s),
            parts=_PARTS,
            width=f"{WIDTH:g}",
            height=f"{HEIGHT:g}",
            drawn=len(history),
            ends=_ends(history),
            rows=rows if everything else rows[:_ROWS],
            rows_in_all=len(rows),
            operators=[_operator(overview, sizes) for sizes in overview.operators],
            members=member_rows(overview.members) if overview.members is not None else None,
            state=_state(overview),
        )
        return Reply(text.encode())


def _ends(history: Sequence[HistoryEntry]) -> tuple[str, ...]:
    """Return the labels of the horizontal axis; the left one where there is a column at the left."""
    if not history:
        return ()
    is_full = len(history) * WIDEST_COLUMN >= WIDTH
    return f"batch {history[0].batch_id}" if is_full else "", f"batch {history[-1].batch_id}"


def _charts(history: Sequence[HistoryEntry], batch_s: Mapping[int, float]) -> dict[str, Chart]:
    flags = {
        i: "restore" if entry.kind == "restore" else "failed" for i, entry in enumerate(history) if _is_event(entry)
    }

    def chart(label: Any, values_of: Any) -> Chart:
        return bar_chart([({} if _is_event(e) else values_of(e), _tip(e, batch_s)) for e in history], label, flags)

    return {
        "time": chart(seconds_text, lambda e: {part: getattr(e, f"{part}_s") or 0.0 for part in _PARTS}),
        "new": chart(size_text, lambda e: {"persist": e.new_bytes}),
        "requests": chart(
            lambda value: f"{value:g}", lambda e: {"persist": max(0, e.requests - e.hedges), "hedge": e.hedges}
        ),
        "state": chart(size_text, lambda e: {"tables": e.state_bytes}),
        "full": chart(size_text, lambda e: {"tables": e.full_bytes}),
        "batch": chart(seconds_text, lambda e: _of_batch(e, batch_s)),
    }


def _of_batch(entry: HistoryEntry, batch_s: Mapping[int, float]) -> dict[str, float]:
    """Return what a batch took by Spark's clock: its checkpoint, and the rest."""
    whole, waited = batch_s.get(entry.batch_id, 0.0), entry.seconds or 0.0
    return {"persist": min(waited, whole), "tables": max(0.0, whole - waited)}


def _is_event(entry: HistoryEntry) -> bool:
    return entry.kind != "checkpoint"


def _tip(entry: HistoryEntry, batch_s: Mapping[int, float]) -> str:
    """Return what is shown beside the pointer: plain lines."""
    head = f"{time_text(entry.at)}"
    if entry.kind == "restore":
        what = f"checkpoint {entry.checkpoint_id}" if entry.checkpoint_id else "an empty state"
        read = f"{seconds_text(entry.seconds)}, {size_text(entry.new_bytes)} read"
        return f"Restored {what} for batch {entry.batch_id}\n{head}\n{read}"
    if entry.kind == "failed":
        return (
            f"Checkpoint of batch {entry.batch_id} failed\n{head}\nafter {seconds_text(entry.seconds)}\n{entry.error}"
        )
    parts = ", ".join(f"{part} {seconds_text(getattr(entry, f'{part}_s'))}" for part in _PARTS)
    hedges = f" ({entry.hedges} hedges)" if entry.hedges else ""
    whole = f"\nSpark's batch took {seconds_text(batch_s[entry.batch_id])}" if entry.batch_id in batch_s else ""
    return (
        f"Checkpoint {entry.checkpoint_id}, batch {entry.batch_id}\n{head}\n{seconds_text(entry.seconds)}: {parts}\n"
        f"{size_text(entry.new_bytes)} new, {size_text(entry.full_bytes)} in all\n"
        f"{entry.requests} requests{hedges}{whole}"
    )


def _operator(overview: Overview, sizes: OperatorSizes) -> dict[str, Any]:
    """Return an operator's row, with a chart of its key groups."""
    assert overview.newest is not None
    entry = next(each for each in overview.newest.operators if each.uid == sizes.operator)
    columns = [
        ({"base": base, "log": log}, f"Key group {group}\nbase {size_text(base)}\nlog about {size_text(log)}")
        for group, (base, log) in enumerate(zip(sizes.bases, sizes.log, strict=True))
    ]
    states = [str(each.get("name")) for each in entry.registry.get("states", ()) if isinstance(each, dict)]
    chart = bar_chart(columns, size_text)
    return {"entry": entry, "sizes": sizes, "states": states, "chart": chart, "key": key_columns(entry)}


def _state(overview: Overview) -> tuple[str, str]:
    """Return in a word how the job is, and the class of that word."""
    if overview.restoring is not None:
        return "restoring", "busy"
    if not overview.history and overview.newest is None:
        return "empty", "plain"
    last = overview.history[-1] if overview.history else None
    if last is not None and last.kind == "failed":
        return "last checkpoint failed", "bad"
    if overview.members is not None and (
        len(overview.members) < overview.wanted or not all(member.is_up for member in overview.members)
    ):
        return "TaskManagers missing", "bad"
    if overview.damaged:
        return "damaged records", "bad"
    return ("running", "good") if overview.source == "driver" else ("as stored", "plain")


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
