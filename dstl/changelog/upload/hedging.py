"""The hedging policy: a second request for an object whose first is late. Pure; :mod:`.uploader` executes it.

A PUT is late at an age that only a share ``target`` of the last PUTs of its size outlived, and that age is looked up
again when its timer fires, for the store may have turned slow meanwhile. A hedge is then sent unless

* the budget is spent (:class:`~.hedge_limits.HedgeBudget`),
* nearly everything is late (:class:`~.hedge_limits.CircuitBreaker`): that is the store, not this request,
* the store has said 503 SlowDown lately (:class:`~.hedge_limits.ThrottlePause`), after which a quarter is wanted, for
  minutes, and what was saved up is void; a process also begins with a quarter, for the store's room is not known,
* the upload is one that no checkpoint waits for (yet) and the budget is needed by those that are waited for.

When late uploads are not overtaken by later ones, they wait in a queue, which hedges would lengthen: then ``target``
and what the budget earns go down to a 64th (:class:`~.hedge_limits.QueueDetector`). They go down to a quarter while the
store is much slower than usual: it may be near a limit of which no 503 has come yet.

Only a first attempt's own latency is learnt, or its age when its hedge won: the winner's latency would teach the
policy that the store is faster than it is, and it would hedge ever more.

Sources: FLIP-158 (request hedging); Dean and Barroso, *The Tail at Scale*; gRPC A6 (token bucket, push-back).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from dstl.changelog.upload.hedge_limits import CircuitBreaker, HedgeBudget, QueueDetector, ThrottlePause, Ticket
from dstl.options import HedgingOptions

_KEPT = 512
"""Latencies that are kept by size: the last 4 % are 20 of them, enough for a quantile, and a store that turns slow has
raised it after as many PUTs."""
_COLD_SAMPLES = 20
"""Latencies below which a size is not known: fewer have no 96 % quantile."""
_REFRESH_EVERY = 16
"""Latencies between two looks at the quantiles: sorting 512 floats takes 13 us."""
_FLOOR_MEDIANS = 1.25
"""A PUT is never late before this: with an even store, half of the PUTs would be. With 1.3, p999 of few critical
uploads is 53.9 % shorter, with this 54.5 %."""
_CEILING_MEDIANS = 3.0
"""A PUT is always late then, unless ``max_delay_s`` is longer: in a very uneven store the quantile says nothing."""
_NOT_CRITICAL_QUANTILE = 0.998
"""The quantile for uploads that no checkpoint waits for, and the latest of all: beyond it lies one of 512 latencies."""
_OPEN_SHARE = 0.2
"""Share of late PUTs that opens the breaker: five times the target."""
_SHARE_MEMORY = 256
"""Uploads over which the share of critical ones is taken: a few checkpoints' worth."""
_BURST_MEMORY = 1024
"""PUTs after which most of a peak in the number in flight is forgotten."""
_SLOW = 1.5
"""How much longer than usual the last PUTs of a slow store take: more than chance makes of a median of 32."""
_SLOW_PORTION = 0.25
"""What is left of hedging then: the store may be near a limit of which no 503 has come yet. In ``odd-queue-brownout``
p99 is 6 % worse than without hedging, and 15 % where all of it is left."""
_LAST = 32
"""PUTs that show how the store is now: their median is right within a fifth."""
_USUAL_STEP = 0.008
"""How far a look may move what is usual: a store that stays slow for some 800 PUTs of a size is so usually."""
_SCARCE_TOKENS, _SCARCE_DELAYS = 2.0, 1.3
"""The last two tokens are for PUTs that are later still, by 30 %: of the merely late, most are about to finish."""
_LATE_QUANTILE = 0.95
"""PUTs beyond it are asked who has overtaken them, hedged or not."""


class Verdict(Enum):
    """The policy's answer about an upload that is not finished."""

    SEND = "send"
    WAIT = "wait"
    DENY = "deny"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class HedgeVerdict:
    """The policy's answer.

    Attributes:
        verdict: ``SEND`` (it is paid for), ``WAIT`` (not late yet), ``DENY`` (late, but not allowed now) or ``NEVER``.
        ask_again_s: Seconds until it is worth asking again, for ``WAIT`` and ``DENY``.
        reason: Why it was denied: ``budget``, ``bytes``, ``breaker``, ``throttled``, ``not_critical``, ``limit`` or
            ``disabled``; empty otherwise.
    """

    verdict: Verdict
    ask_again_s: float = 0.0
    reason: str = ""


_SEND = HedgeVerdict(Verdict.SEND)
_DISABLED = HedgeVerdict(Verdict.NEVER, reason="disabled")
_LIMIT = HedgeVerdict(Verdict.NEVER, reason="limit")


class RecentLatencies:
    """The last first attempts' latencies by size class (powers of two), and their quantiles.

    Nothing is forgotten by the passing of time alone: an idle process keeps what it knows.

    Attributes:
        is_slow: Whether the last ones took much longer than is usual for their size.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self._recent: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._sorted: dict[int, list[float]] = {}
        self._usual: dict[int, float] = {}

    def learn(self, size: int, seconds: float) -> None:
        """Record one latency of a PUT of this many bytes."""
        kind = size.bit_length()
        recent = self._recent.get(kind)
        if recent is None:
            recent = self._recent[kind] = deque(maxlen=_KEPT)
        recent.append(seconds)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count == _COLD_SAMPLES or (count > _COLD_SAMPLES and count % _REFRESH_EVERY == 0):
            self._sorted[kind] = sorted(recent)
            last = sorted(islice(reversed(recent), _LAST))
            median = last[len(last) // 2]
            usual = self._usual.setdefault(kind, median)
            self.is_slow = median > _SLOW * usual
            self._usual[kind] = usual * (1 + (_USUAL_STEP if median > usual else -_USUAL_STEP))

    def quantile(self, size: int, q: float) -> float | None:
        """Return what a share ``q`` of them lies below, in seconds; None while it cannot be told."""
        kind = size.bit_length()
        known, factor = self._sorted.get(kind), 1.0
        if known is None:
            if not self._sorted:
                return None
            # A larger object takes at most in proportion to its size, a smaller one at most as long: rather too late.
            nearest = min(self._sorted, key=lambda each: (abs(each - kind), each))
            known, factor = self._sorted[nearest], 2.0 ** max(0, kind - nearest)
        return known[int(q * len(known))] * factor


class HedgePolicy:
    """Decides for all uploads of a process together.

    Invariants:
        1. It neither waits nor reads a clock: every time is an argument, in seconds of one monotonic clock.
        2. Hedges plus retries never exceed :class:`~.hedge_limits.HedgeBudget`'s bound.

    Not thread-safe; belongs to one loop.

    Args:
        options: See :class:`~dstl.options.HedgingOptions`.
    """

    def __init__(self, options: HedgingOptions) -> None:
        self._options = options
        self.latencies = RecentLatencies()
        self.budget = HedgeBudget(options.budget, options.budget_burst)
        self.breaker = CircuitBreaker()
        self.pause = ThrottlePause(options.throttle_pause_s)
        self.queue = QueueDetector()
        self._in_flight = 0
        self._burst = 1.0
        self._critical_share = 1.0
        self._portion = 0.0  # until the first upload begins
        self._critical_q = 1.0 - options.target

    def began(self, now: float, size: int, critical: bool) -> Ticket:
        """An upload starts its first attempt; the ticket is given back to :meth:`finished`."""
        self._in_flight += 1
        if self._in_flight > self._burst:
            self._burst = float(self._in_flight)
        else:
            self._burst -= self._burst / _BURST_MEMORY
        if not critical or self._critical_share < 0.999 or self._portion == 0.0:
            self._critical_share += (critical - self._critical_share) / _SHARE_MEMORY
            self._aim(now)
        return self.queue.began(now, size)

    def delay(self, size: int, critical: bool = True) -> float:
        """Age in seconds from which an attempt at an object of this size counts as late, as of now."""
        options = self._options
        late = self.latencies.quantile(size, self._critical_q if critical else _NOT_CRITICAL_QUANTILE)
        median = self.latencies.quantile(size, 0.5)
        if late is None or median is None:
            return options.cold_delay_s
        floor = max(options.min_delay_s, _FLOOR_MEDIANS * median)
        ceiling = max(options.max_delay_s, _CEILING_MEDIANS * median)
        return min(max(late, floor), ceiling)

    def outlived(self, ticket: Ticket) -> None:
        """A first attempt has outlived its delay: called when the timer finds it so; only the first time counts."""
        if not ticket.outlived:
            ticket.outlived = True
            self.breaker.count(True, int(self._burst), self._open_share())

    def ask(self, now: float, *, size: int, age: float, hedges: int, critical: bool) -> HedgeVerdict:
        """Decide about an upload whose youngest attempt is not finished.

        Args:
            now: The clock's time.
            size: Bytes of the body.
            age: Seconds since its youngest attempt began, without what a busy loop is to blame for.
            hedges: Hedges it has had.
            critical: Whether a checkpoint waits for it.
        """
        options = self._options
        if not options.enabled:
            return _DISABLED
        if hedges >= options.max_hedges:
            return _LIMIT
        delay = self.delay(size, critical)
        if age < delay * 0.999:
            return HedgeVerdict(Verdict.WAIT, delay - age)
        if now < self.pause.until:
            return HedgeVerdict(Verdict.DENY, self.pause.until - now, "throttled")
        again = max(options.min_delay_s, delay / 8)
        if self.breaker.is_open:
            return HedgeVerdict(Verdict.DENY, again, "breaker")
        if not critical and self.budget.tokens < options.budget_burst / 2:
            return HedgeVerdict(Verdict.DENY, again, "not_critical")
        if self.budget.tokens < min(_SCARCE_TOKENS, options.budget_burst / 4) and age < _SCARCE_DELAYS * delay:
            return HedgeVerdict(Verdict.DENY, _SCARCE_DELAYS * delay - age, "budget")
        refusal = self.budget.refusal()
        if refusal is not None:
            return HedgeVerdict(Verdict.DENY, again, refusal)
        self.budget.pay(size)
        return _SEND

    def throttled(self, now: float) -> None:
        """The store answered 503 SlowDown."""
        self.pause.throttled(now)
        self.budget.void()
        self._aim(now)

    def learn(self, now: float, size: int, seconds: float) -> None:
        """Record a first attempt's latency, or its age when it was given up or its hedge won."""
        was_slow = self.latencies.is_slow
        self.latencies.learn(size, seconds)
        if self.latencies.is_slow is not was_slow:
            self._aim(now)

    def finished(self, now: float, ticket: Ticket, *, stored: bool = True) -> None:
        """An upload is over, ``stored`` or not."""
        self._in_flight -= 1
        ticket.done = True
        if not ticket.outlived:
            self.breaker.count(False, int(self._burst), self._open_share())
        late, median = self.latencies.quantile(ticket.size, _LATE_QUANTILE), self.latencies.quantile(ticket.size, 0.5)
        if late is not None and median is not None and now - ticket.began > late:
            self.queue.late(now, ticket, median)
            self._aim(now)
        if stored:
            self.budget.earn(ticket.size, self._portion)

    def _aim(self, now: float) -> None:
        """Choose the quantile that the wanted share of uploads outlives."""
        options = self._options
        slow = _SLOW_PORTION if self.latencies.is_slow else 1.0
        self._portion = self.queue.portion * self.pause.portion(now) * slow
        wanted = 1.0 - options.target * self._portion / max(self._critical_share, 1e-3)
        self._critical_q = min(max(options.critical_quantile, wanted), _NOT_CRITICAL_QUANTILE)

    def _open_share(self) -> float:
        # With few critical uploads the delay is a lower quantile, and more of them outlive it.
        return max(_OPEN_SHARE, min(0.8, 3 * (1.0 - self._critical_q)))
