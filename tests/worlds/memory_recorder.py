"""A recorder that remembers, for what a test or benchmark looks at afterwards."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping


class MemoryRecorder:
    """Keeps counters, levels and the last samples of each distribution in memory.

    Args:
        samples: How many samples of a distribution are kept; older ones fall out, so memory is bounded.
    """

    def __init__(self, samples: int = 4096) -> None:
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.gauges: dict[str, float] = {}
        self.samples: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=samples))

    def increment(self, name: str, value: float = 1.0) -> None:
        """Add to a counter."""
        self.counters[name] += value

    def observe(self, name: str, value: float) -> None:
        """Add one sample to a distribution."""
        self.samples[name].append(value)

    def gauge(self, name: str, value: float) -> None:
        """Set a level."""
        self.gauges[name] = value

    def snapshot(self) -> Mapping[str, float]:
        """Return all counters and levels, and count and p50/p99 of each distribution, as one flat mapping."""
        flat: dict[str, float] = {**self.counters, **self.gauges}
        for name, kept in self.samples.items():
            ordered = sorted(kept)
            flat[f"{name}.count"] = float(len(ordered))
            for label, share in (("p50", 0.50), ("p99", 0.99)):
                flat[f"{name}.{label}"] = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return flat
