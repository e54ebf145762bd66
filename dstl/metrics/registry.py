"""The registry: every metric with its unit, its meaning, and what to do about it. The only source of names.

The reference for people (:func:`reference`), the Prometheus endpoint, the dashboard and the alerts follow it;
``tests/metrics`` compares it with the code, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from dstl.metrics.catalogue import ROWS


class Kind(Enum):
    """Says how a metric is read."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as it is recorded, and as it is exposed.

    Attributes:
        name: Prometheus's base unit; empty for a plain number.
        scale: What recorded values are multiplied by.
        bounds: Upper bounds of a distribution's buckets, as recorded.
    """

    name: str
    scale: float
    bounds: tuple[float, ...]


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_UNITS = {
    "s": Unit("seconds", 1.0, _SECONDS),
    "ns": Unit("seconds", 1e-9, tuple(each * 1e9 for each in _SECONDS)),
    "ms": Unit("seconds", 1e-3, tuple(each * 1e3 for each in _SECONDS)),
    "B": Unit("bytes", 1.0, tuple(float(1 << bits) for bits in range(10, 31, 2))),
    "": Unit("", 1.0, (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: The name that the code records, up to the first dot.
        exposed: Its name for Prometheus, without the suffixes that Prometheus's format adds.
        kind: Counter, gauge or histogram.
        unit: As recorded and as exposed.
        label: Name of the label whose value follows the dot; empty where there is none.
        source: ``taskmanager`` or ``driver``: whose process records it.
        help: What it counts or measures.
        when_high: What a high (or, where it says so, low) value means, and what to do.
    """

    name: str
    exposed: str
    kind: Kind
    unit: Unit
    label: str
    source: str
    help: str
    when_high: str

    @property
    def series(self) -> str:
        """The name of the time series that a query names: a counter's and a histogram's have suffixes."""
        return self.exposed + {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}[self.kind]


def _read() -> Iterator[tuple[str, Metric]]:
    for source, rows in ROWS.items():
        for name, exposed, kind, unit, label, text, when_high in rows:
            known = _UNITS[unit]
            full = f"dstl_{exposed}{'_' + known.name if known.name and not exposed.endswith(known.name) else ''}"
            yield name, Metric(name, full, Kind(kind), known, label, source, text, when_high)


METRICS: Mapping[str, Metric] = dict(_read())
"""Every metric by the name that the code records."""


def find(recorded: str) -> tuple[Metric, str] | None:
    """Return the metric of a recorded name and its label's value; None for a name that is not in the registry."""
    name, _, value = recorded.partition(".")
    metric = METRICS.get(name)
    return None if metric is None else (metric, value)


def reference() -> str:
    """Return the reference as Markdown: one table for each process that records."""
    lines = ["# Metrics", "", "Written by `python -m dstl.metrics` from `dstl/metrics/catalogue.py`.", ""]
    for source, title in (("taskmanager", "TaskManagers"), ("driver", "The driver")):
        lines += [
            f"## {title}",
            "",
            "| series | kind | labels | recorded as | meaning | when it is high |",
            "|---|---|---|---|---|---|",
        ]
        for metric in METRICS.values():
            if metric.source == source:
                own = ("task_manager",) if source == "taskmanager" else ()
                labels = ", ".join(("location", *own, *((metric.label,) if metric.label else ())))
                lines.append(
                    f"| `{metric.series}` | {metric.kind.value} | {labels} | `{metric.name}` | {metric.help} "
                    f"| {metric.when_high} |"
                )
        lines.append("")
    return "\n".join(lines)
