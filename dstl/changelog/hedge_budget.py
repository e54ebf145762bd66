"""What keeps hedging from doing harm: the budget, the breaker and the pause after a 503. All pure."""

from __future__ import annotations

__all__ = ["Breaker", "HedgeBudget", "ThrottlePause"]

_CALM_S = 120.0
_HIGHEST_LEVEL = 7


class HedgeBudget:
    """Token buckets for requests and for bytes, filled by finished PUTs, emptied by hedges and retries alike.

    Invariants:
        1. Over any time, hedges are at most ``share`` x finished PUTs + ``burst``; the same holds for bytes, with one
           object's size on top, for a hedge that begins with a positive balance is paid whole.
        2. A retry is never refused (the upload would be lost) but puts the buckets into debt, down to ``-burst``:
           while much is retried, nothing is hedged.

    Args:
        share: Tokens that a finished PUT earns.
        burst: Most tokens saved up.
    """

    __slots__ = ("_burst", "_bytes", "_mean_size", "_share", "_tokens")

    def __init__(self, share: float, burst: float) -> None:
        self._share = share
        self._burst = burst
        self._tokens = min(2.0, burst)
        self._bytes = 0.0
        self._mean_size = 0.0

    @property
    def tokens(self) -> float:
        """Hedges that may be sent now."""
        return self._tokens

    def earn(self, size: int, portion: float = 1.0) -> None:
        """A PUT of this many bytes has finished; ``portion`` in [0, 1] lessens what it earns."""
        if self._mean_size == 0.0:
            self._mean_size = float(size)
            self._bytes = self._tokens * size
        self._mean_size += (size - self._mean_size) * 0.01
        earned = self._share * portion
        self._tokens = min(self._burst, self._tokens + earned)
        self._bytes = min(self._burst * self._mean_size, self._bytes + earned * size)

    def refusal(self) -> str | None:
        """Return why a hedge cannot be paid for now, or None."""
        if self._tokens < 1.0:
            return "budget"
        if self._bytes < 0:
            return "bytes"
        return None

    def pay(self, size: int) -> None:
        """Take what one request of this many bytes costs, into debt if need be."""
        self._tokens = max(-self._burst, self._tokens - 1.0)
        floor = -self._burst * max(self._mean_size, size)
        self._bytes = max(floor, self._bytes - size)


class Breaker:
    """Opens when first attempts outlive the delay far more often than expected: then everything is slow, and another
    request would only add to it."""

    __slots__ = ("_open", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self._open = False

    def count(self, outlived: bool, burst: int, threshold: float) -> None:
        """Learn whether one first attempt outlived its delay.

        Args:
            outlived: True at the moment when it did; False when it finished before.
            burst: PUTs in flight at once lately: the late ones of a burst come one after the other at its end, which
                must not look like a change.
            threshold: Share that opens; half of it closes.
        """
        self.share += (outlived - self.share) / max(32, 2 * burst)
        if self.share > threshold:
            self._open = True
        elif self.share < threshold / 2:
            self._open = False

    @property
    def is_open(self) -> bool:
        """True while nothing may be hedged."""
        return self._open


class ThrottlePause:
    """No hedge for a while after a 503; the while doubles with each new 503, and shrinks again in minutes of calm.

    Args:
        first_s: Seconds of the first pause.
    """

    __slots__ = ("_first", "_level", "_since", "_until")

    def __init__(self, first_s: float) -> None:
        self._first = first_s
        self._level = 0
        self._since = 0.0
        self._until = float("-inf")

    @property
    def until(self) -> float:
        """When hedging may resume, on the clock given to :meth:`throttled`."""
        return self._until

    def level(self, now: float) -> int:
        """How hard the store throttles, from 0 (not lately) to 7: each level doubles pause and back-off and halves
        what may be hedged between pauses."""
        if self._level and now - self._since > _CALM_S:
            steps = int((now - self._since) / _CALM_S)
            self._level = max(0, self._level - steps)
            self._since += steps * _CALM_S
        return self._level

    def throttled(self, now: float) -> None:
        """The store said SlowDown."""
        level = self.level(now)
        if now >= self._until:  # else: one overload answers many requests in flight; they are one event
            self._level = min(_HIGHEST_LEVEL, level + 1)
        self._since = now
        self._until = now + self._first * 2.0 ** (self._level - 1)
