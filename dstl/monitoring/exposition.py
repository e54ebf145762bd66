"""The metrics of a driver and its TaskManagers in Prometheus's text format, by Prometheus's own client library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.errors import Invalid
from dstl.metrics import Distribution, MetricSet, Sample
from dstl.metrics.registry import METRICS, Kind, Metric, find

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Labelled:
    """A sample and the labels of all its series.

    Attributes:
        labels: By name.
        sample: The values.
        source: ``driver`` or ``taskmanager``: its counters that have not counted yet are shown as 0, for the first
            event of one that appears with it is no increase; empty: they are not shown.
    """

    labels: Mapping[str, str]
    sample: Sample
    source: str = ""


class Exposition:
    """Renders samples under the names of the registry; names that are not in it are left out. Thread-safe.

    Args:
        samples: Returns what there is to show; called for each rendering.

    Raises:
        Invalid: ``prometheus_client`` is not installed.
    """

    def __init__(self, samples: Callable[[], Iterable[Labelled]]) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError:
            raise Invalid(
                "an endpoint for metrics needs prometheus_client: pip install 'dstl-pyspark[prometheus]'"
            ) from None
        self._samples = samples
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """Return the text that a scrape gets."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        """Return nothing: the library need not collect in order to register."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the families of all samples."""
        found: dict[Metric, list[tuple[dict[str, str], float | Distribution]]] = {}
        for each in self._samples():
            sample = each.sample
            zeros = {
                name: 0.0
                for name, metric in METRICS.items()
                if metric.source == each.source and metric.kind is Kind.COUNTER and not metric.label
            }
            for values in (zeros | dict(sample.counters), sample.gauges, sample.distributions):
                for name, value in values.items():
                    known = find(name)
                    if known is not None:
                        metric, label = known
                        own = {metric.label: label} if metric.label else {}
                        found.setdefault(metric, []).append(({**each.labels, **own}, value))
        for metric, series in found.items():
            yield _family(metric, series)


def _family(metric: Metric, series: Sequence[tuple[dict[str, str], Any]]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    names = list(dict.fromkeys(name for labels, _ in series for name in labels))
    scale = metric.unit.scale
    kinds = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily}
    family: Any = kinds[metric.kind](metric.exposed, metric.help, labels=names)
    for labels, value in series:
        given = [labels.get(name, "") for name in names]
        if isinstance(value, Distribution) and metric.kind is Kind.HISTOGRAM:
            bounds = [f"{bound * scale:.9g}" for bound in metric.unit.bounds] + ["+Inf"]
            buckets = list(zip(bounds, map(float, accumulate(value.buckets)), strict=True))
            family.add_metric(given, buckets, value.total * scale)
        elif not isinstance(value, Distribution) and metric.kind is not Kind.HISTOGRAM:
            family.add_metric(given, value * scale)
    found: Family = family
    return found


@dataclass(frozen=True, slots=True)
class DriverMetrics:
    """Holds the metrics of a driver and its TaskManagers at one moment.

    Attributes:
        location: The job's location: a label of every series, so that several jobs share a Prometheus.
        recorder: The driver's own metrics.
        members: The TaskManagers, polled.
        wanted: How many of them there shall be.
    """

    location: str
    recorder: MetricSet
    members: Sequence[MemberMetrics]
    wanted: int

    def labelled_samples(self) -> Iterator[Labelled]:
        """Yield the driver's sample, then each TaskManager's."""
        levels: dict[str, float] = {"taskManagers": len(self.members), "taskManagersWanted": self.wanted}
        levels |= {f"taskManagerUp.{each.member.member_id}": float(each.is_up) for each in self.members}
        labels = {"location": self.location}
        yield Labelled(labels, self.recorder.sample(levels), "driver")
        for each in self.members:
            yield Labelled({**labels, "task_manager": each.member.member_id}, each.sample, "taskmanager")
