"""The metrics of a driver and of its TaskManagers, as one set of labelled samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.metrics import MetricSet
from dstl.monitoring.exposition import Labelled

__all__ = ["DriverMetrics"]


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
