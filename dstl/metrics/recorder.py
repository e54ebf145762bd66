"""Metrics without a dependency: a recorder protocol, a silent one, one that remembers, one whose samples travel.

Names are Flink's where Flink has them (``numberOfUploadRequests``, ``uploadLatenciesNanos``, ...); what follows the
first dot is the value of the metric's label (``hedgesDenied.budget``). All of them stand in
:mod:`dstl.metrics.registry`. An adapter for a metrics system implements three methods; it must be cheap and never
raise, for it is called from the upload path.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dstl.metrics.registry import find

_DEFAULT_BOUNDS = tuple(10.0**power for power in range(-3, 10))


class Recorder(Protocol):
    """Receives measurements. Implementations must be thread-safe and must not raise."""

    def increment(self, name: str, value: float = 1.0) -> None:
        """Add to a counter."""

    def observe(self, name: str, value: float) -> None:
        """Add one sample to a distribution."""

    def gauge(self, name: str, value: float) -> None:
        """Set a level."""


class NullRecorder:
    """Forgets everything: the default."""

    def increment(self, name: str, value: float = 1.0) -> None:
        """Do nothing."""

    def observe(self, name: str, value: float) -> None:
        """Do nothing."""

    def gauge(self, name: str, value: float) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution's samples so far.

    Attributes:
        buckets: How many samples lie in each bucket of the metric's unit, those above all bounds last; not cumulated.
        total: The samples' sum, as recorded.
    """

    buckets: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(self.buckets)


@dataclass(frozen=True, slots=True)
class Sample:
    """The values of a set of metrics at one moment, by recorded name.

    Attributes:
        counters: Sums since the process began.
        gauges: Levels.
        distributions: Samples since the process began, by bucket.
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    distributions: Mapping[str, Distribution] = field(default_factory=dict)


class MetricSet:
    """Records metrics in bounded memory: distributions as buckets, whose bounds the registry knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._distributions: dict[str, tuple[tuple[float, ...], list[int], list[float]]] = {}

    def increment(self, name: str, value: float = 1.0) -> None:
        """Add to a counter."""
        with self._lock:
            self._counters[name] = self._counters.get(name, 0.0) + value

    def observe(self, name: str, value: float) -> None:
        """Add one sample to a distribution."""
        with self._lock:
            kept = self._distributions.get(name)
            if kept is None:
                known = find(name)
                bounds = known[0].unit.bounds if known else _DEFAULT_BOUNDS
                kept = self._distributions[name] = (bounds, [0] * (len(bounds) + 1), [0.0])
            bounds, buckets, total = kept
            buckets[bisect_left(bounds, value)] += 1
            total[0] += value

    def gauge(self, name: str, value: float) -> None:
        """Set a level."""
        with self._lock:
            self._gauges[name] = value

    def sample(self, gauges: Mapping[str, float] | None = None, counters: Mapping[str, float] | None = None) -> Sample:
        """Return all values at this moment, with these levels and sums beside the recorded ones."""
        with self._lock:
            return Sample(
                self._counters | dict(counters or {}),
                self._gauges | dict(gauges or {}),
                {n: Distribution(tuple(buckets), total[0]) for n, (_, buckets, total) in self._distributions.items()},
            )
