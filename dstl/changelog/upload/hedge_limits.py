"""Limits of hedging: the budget, the breaker, the pause after a 503 and the queue detector. All pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_IN_A_ROW = 3
"""Late attempts in a row that are an accident: at a target of 4 %, three come 64 times in a million, four twice."""
_BURST_OF_ONE_MORE = 8
"""PUTs of a burst that allow one more in a row, for its slowest come last, one after the other."""
_SHORTEST_MEMORY = 32
"""PUTs that the share of late ones is taken over, or two bursts: fewer, and the end of one looks like a change."""
_START_S = 10.0
"""How long a process begins with a quarter of its hedging: as long as a store's bucket of requests usually lasts."""
_CUT = 0.25
"""What one 503 leaves of the hedging: a half made 2.8 % of 503s where a store had 0.5 % of room (``odd-throttled``)."""
_LEAST_TRUST = 4
"""503s in close succession after which no less is left: 1/256, a hedge now and then that shows if there is room."""
_CALM_S = 60.0
"""Calm after which trust returns by one step, doubled for each step that was lost: S3 scales out in minutes."""
_STORM_S = 10.0
"""503s that come closer than this belong to one storm, and the pause doubles."""
_LONGEST_STORM = 7
"""Doublings of the pause: 64 s at its default, after which a store has usually scaled out."""
_KEPT = 512
"""PUTs that a late one is compared with: as many as begin within a median at 5,000 a second."""
_LATE_ONES = 32
"""Late PUTs that the share of overtakers is taken over: some seconds of a busy process."""
_NONE_BELOW, _ALL_ABOVE = 0.6, 0.78
"""Shares of overtakers between which hedging falls from all to next to nothing. On the latency models 0.82 to 0.96
overtake in stores without a queue, however heavy their tails; 0.29 to 0.53 in stores at 90 to 97 % of capacity."""
_LEAST = 1 / 64
"""What is left of hedging in a queue: a hedge now and then, whose PUT shows whether the queue is still there."""


class HedgeBudget:
    """Token buckets for requests and for bytes, filled by finished PUTs, emptied by hedges and retries alike.

    Invariants:
        1. Over any time, hedges are at most ``share`` x finished PUTs + ``burst``; the same holds for bytes, with one
           object's size on top, for a hedge that begins with a positive balance is paid whole.
        2. A retry is never refused (the upload would be lost) but puts the buckets into debt, down to ``-burst``:
           while much is retried, nothing is hedged.

    Attributes:
        tokens: Hedges that may be sent now.

    Args:
        share: Tokens that a finished PUT earns.
        burst: Most tokens saved up.
    """

    def __init__(self, share: float, burst: float) -> None:
        self._share = share
        self._burst = burst
        self.tokens = min(2.0, burst)
        self._bytes = 0.0
        self._mean_size = 0.0

    def earn(self, size: int, portion: float = 1.0) -> None:
        """A PUT of this many bytes has finished; ``portion`` in [0, 1] lessens what it earns."""
        if self._mean_size == 0.0:
            self._mean_size = float(size)
            self._bytes = self.tokens * size
        self._mean_size += (size - self._mean_size) * 0.01
        earned = self._share * portion
        self.tokens = min(self._burst, self.tokens + earned)
        self._bytes = min(self._burst * self._mean_size, self._bytes + earned * size)

    def refusal(self) -> str | None:
        """Return why a hedge cannot be paid for now, or None."""
        if self.tokens < 1.0:
            return "budget"
        if self._bytes < 0:
            return "bytes"
        return None

    def void(self) -> None:
        """Take back what is saved up: it was earned from a store that had room."""
        self.tokens = min(self.tokens, 0.0)

    def pay(self, size: int) -> None:
        """Take what one request of this many bytes costs, into debt if need be."""
        self.tokens = max(-self._burst, self.tokens - 1.0)
        floor = -self._burst * max(self._mean_size, size)
        self._bytes = max(floor, self._bytes - size)


class CircuitBreaker:
    """Opens when first attempts outlive the delay far more often than expected: then everything is slow, and another
    request would only add to it.

    It also opens at a few in a row: four of a hundred are late, so four in a row are no accident
    (measurements: dstl/docs/decisions/hedging.md).

    Attributes:
        is_open: True while nothing may be hedged.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._in_a_row = 0
        self.is_open = False

    def count(self, outlived: bool, burst: int, threshold: float) -> None:
        """Learn whether one first attempt outlived its delay.

        Args:
            outlived: True at the moment when it did; False when it finished before.
            burst: PUTs in flight at once lately: the late ones of a burst come one after the other at its end, which
                must not look like a change.
            threshold: Share that opens; half of it closes.
        """
        # A longer burst has more late ones at its end, so its row must be longer.
        self.share += (outlived - self.share) / max(_SHORTEST_MEMORY, 2 * burst)
        self._in_a_row = self._in_a_row + 1 if outlived else 0
        if self._in_a_row >= _IN_A_ROW + burst / _BURST_OF_ONE_MORE:
            self.share = max(self.share, threshold * 1.01)
        if self.share > threshold:
            self.is_open = True
        elif self.share < threshold / 2:
            self.is_open = False


class ThrottlePause:
    """The pause after a 503: no hedge for a while, and few for minutes.

    A store that throttles near its load has little room, and each hedge beyond it costs some first attempt a 503 and a
    back-off. So each 503 leaves a quarter of the hedging that was left, trust returns the more slowly the more often it
    was lost, and the first 10 s have a quarter, too (measurements: dstl/docs/decisions/hedging.md).

    Attributes:
        until: The time at which hedging may resume, on the clock given to :meth:`throttled`.
        storm: The number of pauses in close succession, up to 7; each doubles the pause and the back-off of
            retries, but a lone 503 after a calm time costs the first back-off only.

    Args:
        first_s: Seconds of the first pause; doubles while 503s go on.
    """

    def __init__(self, first_s: float) -> None:
        self._first = first_s
        self.storm = 0
        self.until = float("-inf")
        self._level = 1
        self._since: float | None = None  # when the level changed or was confirmed

    def portion(self, now: float) -> float:
        """Return the share of the usual hedging that is sensible between pauses, from 1/256 to 1."""
        if self._since is None:
            self._since = now + _START_S - 2.0 * _CALM_S
        while self._level and now - self._since > _CALM_S * 2.0**self._level:
            self._since += _CALM_S * 2.0**self._level
            self._level -= 1
        return _CUT**self._level

    def throttled(self, now: float) -> None:
        """The store said SlowDown."""
        self.portion(now)
        if now >= self.until:  # else: one overload answers many requests in flight; they are one event
            self._level = min(_LEAST_TRUST, self._level + 1)
            self.storm = min(_LONGEST_STORM, self.storm + 1) if now - self.until < _STORM_S else 1
        self._since = now
        self.until = now + self._first * 2.0 ** (self.storm - 1)


@dataclass(slots=True, eq=False)
class Ticket:
    """One upload, as the policy sees it.

    Attributes:
        began: Clock time of its first attempt.
        size: Bytes.
        done: Whether it is over.
        outlived: Whether its first attempt has outlived the delay.
    """

    began: float
    size: int
    done: bool = False
    outlived: bool = False


class QueueDetector:
    """Tells a queue from a tail: a PUT that no younger one overtakes waits with the others, and is not late alone.

    When latencies are independent, nearly all PUTs that began a little after a late one are finished before it. When
    the store is at its capacity they queue behind it, and hardly any are: then a hedge only lengthens the queue. No
    absolute latency is needed for this, so it holds for a store that was overloaded from the first PUT on.
    """

    def __init__(self) -> None:
        self._recent: deque[Ticket] = deque(maxlen=_KEPT)
        self.share = 1.0
        self._seen = 0

    def began(self, now: float, size: int) -> Ticket:
        """An upload begins."""
        ticket = Ticket(now, size)
        self._recent.append(ticket)
        return ticket

    def late(self, now: float, ticket: Ticket, median: float) -> None:
        """Look who overtook an upload that is over and was late.

        Asked are the PUTs of its size class that began within one median after it and are at least one median old.
        """
        kind = ticket.size.bit_length()
        asked = overtook = 0
        for other in reversed(self._recent):
            if other.began <= ticket.began:
                break
            if other.began - ticket.began <= median <= now - other.began and other.size.bit_length() == kind:
                asked += 1
                overtook += other.done
        if asked:
            self._seen += 1
            self.share += (overtook / asked - self.share) / min(_LATE_ONES, 4 + self._seen)

    @property
    def portion(self) -> float:
        """The share of the usual hedging that is sensible: a power of two in [1/64, 1]."""
        wanted = (self.share - _NONE_BELOW) / (_ALL_ABOVE - _NONE_BELOW)
        portion = 1.0
        while portion > _LEAST and wanted < portion:
            portion /= 2
        return portion
