"""The estimate of a PUT's latency, which hedging compares an upload's age with.

A latency is taken apart into three factors, each learnt at its own speed, because they change at different speeds:

* the *level* of its size class (powers of two): a long-run median, so that a large object is not called late for
  being large;
* the *service scale*: the median of the last seconds relative to that level, shared by all classes, so that a store
  that turns slow is noticed after a few dozen PUTs;
* the *shape*: the distribution around level x scale, shared by all classes and kept for thousands of PUTs, so that a
  far quantile rests on many samples.

A latency cut short (its hedge won) counts as its age then: a lower bound that lies beyond the delay, which is all
that the quantile near the delay needs to know.
"""

from __future__ import annotations

from itertools import accumulate
from math import exp, log

__all__ = ["LatencyEstimate", "LogHistogram"]

_COLD_SAMPLES = 20
_GENERATION_S = 2.0
_GENERATION_SAMPLES = 32
_SHAPE_SAMPLES = 4096
_REFRESH_EVERY = 16
_SMALLEST_LATENCY_S = 1e-5


class LogHistogram:
    """Weights of logarithms in equal buckets over ``[low, high)``; what lies outside counts in the outermost.

    Args:
        low: Lower edge, a natural logarithm.
        high: Upper edge.
        width: Of one bucket: the relative resolution.
    """

    __slots__ = ("_low", "_per_unit", "_top", "_weights", "_width", "total")

    def __init__(self, low: float, high: float, width: float) -> None:
        self._low = low
        self._width = width
        self._per_unit = 1.0 / width
        self._weights = [0.0] * (int((high - low) / width) + 1)
        self._top = len(self._weights) - 1
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one logarithm."""
        bucket = int((value - self._low) * self._per_unit)
        if bucket < 0:
            bucket = 0
        elif bucket > self._top:
            bucket = self._top
        self._weights[bucket] += 1.0
        self.total += 1.0

    def halve(self) -> None:
        """Let what is known weigh half of what comes."""
        self._weights = [weight * 0.5 for weight in self._weights]
        self.total *= 0.5

    def quantile(self, q: float, other: LogHistogram | None = None) -> float:
        """Return the logarithm that a share ``q`` lies below, interpolated within its bucket.

        Args:
            q: In (0, 1).
            other: Counted as if its weights were in this histogram; must have the same buckets.
        """
        weights = self._weights
        total = self.total
        if other is not None:
            weights = [mine + theirs for mine, theirs in zip(weights, other._weights, strict=True)]
            total += other.total
        rank = q * total
        below = 0.0
        for bucket, reached in enumerate(accumulate(weights)):
            if reached >= rank and reached > below:
                inside = (rank - below) / (reached - below)
                return self._low + (bucket + inside) * self._width
            below = reached
        return self._low + (self._top + 1) * self._width


class _Level:
    """Long-run median of one size class, as a logarithm: a step towards each sample, ever shorter."""

    __slots__ = ("count", "first", "value")

    def __init__(self) -> None:
        self.first: list[float] = []
        self.count = 0
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.count += 1
        if self.count <= _COLD_SAMPLES:
            self.first.append(sample)
            self.value = sorted(self.first)[len(self.first) // 2]
            return
        step = max(0.5 / self.count, 0.0005)
        self.value += step if sample > self.value else -step


class LatencyEstimate:
    """Latency by size, shared by all PUTs of a process.

    Invariants:
        1. Nothing is forgotten by the passing of time alone: an idle process keeps what it knows.
        2. The scale rests on at least one whole *generation*: at least 2 s, 32 PUTs and as many as were ever in flight
           at once lately, for the last to finish of a burst are its slowest.

    Not thread-safe; belongs to one loop.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._residuals = self._previous = LogHistogram(-5.0, 5.0, 0.04)
        self._generation_began: float | None = None
        self._samples: list[float] = []
        self._shape = LogHistogram(-2.0, 6.0, 0.04)
        self._scale = 0.0
        self._since_refresh = 0
        self._quantiles: dict[float, float] = {}

    @property
    def scale(self) -> float:
        """The median of the last seconds, as a multiple of the long-run median."""
        return exp(self._scale)

    def median(self, size: int) -> float | None:
        """Current median in seconds of PUTs of this size; None while it cannot be told."""
        level = self._level_of(size)
        return None if level is None else exp(level + self._scale)

    def shape(self, q: float) -> float:
        """The quantile ``q`` as a multiple of the median; 1 while nothing is known."""
        known = self._quantiles.get(q)
        if known is None:
            known = self._quantiles[q] = self._shape_quantile(q)
        return known

    def record(self, now: float, size: int, seconds: float, burst: int) -> None:
        """Learn from one first attempt.

        Args:
            now: The clock's time.
            size: Bytes of its body.
            seconds: Its latency, or its age when a hedge won.
            burst: PUTs in flight at once lately.
        """
        sample = log(max(seconds, _SMALLEST_LATENCY_S))
        kind = size.bit_length()
        level = self._levels.get(kind)
        if level is None:
            level = self._levels[kind] = _Level()
        level.add(sample)
        residual = sample - level.value
        self._residuals.add(residual)
        self._samples.append(residual)
        if self._generation_began is None:
            self._generation_began = now
        elif now - self._generation_began >= _GENERATION_S and len(self._samples) >= max(_GENERATION_SAMPLES, burst):
            self._close_generation(now)
        self._since_refresh += 1
        if self._since_refresh >= _REFRESH_EVERY or self._shape.total == 0:
            self._refresh()

    def _close_generation(self, now: float) -> None:
        centre = self._residuals.quantile(0.5)
        for residual in self._samples:
            self._shape.add(residual - centre)
        if self._shape.total > _SHAPE_SAMPLES:
            self._shape.halve()
        self._quantiles.clear()
        self._samples.clear()
        self._previous = self._residuals
        self._residuals = LogHistogram(-5.0, 5.0, 0.04)
        self._generation_began = now

    def _refresh(self) -> None:
        self._since_refresh = 0
        older = None if self._previous is self._residuals else self._previous
        self._scale = self._residuals.quantile(0.5, older)
        if self._shape.total == 0:
            self._quantiles.clear()

    def _shape_quantile(self, q: float) -> float:
        if self._shape.total:
            return exp(self._shape.quantile(q))
        if self._residuals.total:  # the first generation is still open
            return exp(self._residuals.quantile(q) - self._scale)
        return 1.0

    def _level_of(self, size: int) -> float | None:
        kind = size.bit_length()
        level = self._levels.get(kind)
        if level is not None and level.count >= _COLD_SAMPLES:
            return level.value
        known = [(abs(k - kind), k) for k, found in self._levels.items() if found.count >= _COLD_SAMPLES]
        if not known:
            return None
        _, nearest = min(known)
        # A larger object takes at most in proportion to its size, a smaller one at most as long: late is the safe side.
        return self._levels[nearest].value + max(0, kind - nearest) * log(2)
