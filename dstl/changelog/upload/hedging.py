"""The hedging policy: a second request for an object whose first is late. Pure; :mod:`.uploader` executes it.

The delay is what only a share ``target`` of PUTs of that size outlives, here and now (:mod:`.latency_estimate`), and it
is worked out again when its timer fires, for the store may have turned slow meanwhile. A hedge is then sent unless

* the budget is spent (:class:`~.hedge_budget.HedgeBudget`),
* nearly everything is late (:class:`~.hedge_budget.Breaker`): that is the store, not this request,
* the store has said 503 SlowDown lately (:class:`~.hedge_budget.ThrottlePause`), after which a quarter is wanted, for
  minutes, and what was saved up is void; a process also begins with a quarter, for the store's room is not known.
  Where a small share of 503 does not follow the load, none of this applies (:class:`~.throttle_cause.ThrottleCause`),
* the upload is one that no checkpoint waits for (yet) and the budget is needed by those that are waited for.

When late uploads are not overtaken by later ones, they wait in a queue, which hedges would lengthen: then ``target``
and what the budget earns go down to a 64th (:class:`~.queue_detector.Overtaking`). They go down to a quarter while the
store is much slower than it uses to be: it may be near a limit that it has not told of yet.

Only a first attempt's own latency is learnt, or its age when its hedge won: the winner's latency would teach the
policy that the store is faster than it is, and it would hedge ever more.

Sources: FLIP-158 (request hedging); Dean and Barroso, *The Tail at Scale*; gRPC A6 (token bucket, push-back).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dstl.changelog.upload.hedge_budget import Breaker, HedgeBudget, ThrottlePause
from dstl.changelog.upload.latency_estimate import LatencyEstimate
from dstl.changelog.upload.queue_detector import Overtaking, Ticket
from dstl.changelog.upload.throttle_cause import ThrottleCause
from dstl.options import HedgingOptions

__all__ = ["HedgePolicy", "HedgeVerdict", "Verdict"]

_FLOOR_MEDIANS = 1.25  # binds where few are critical: with 1.3, p999 there is 53.9 % shorter, with this 54.5 %
_CEILING_MEDIANS = 3.0
_NOT_CRITICAL_QUANTILE = 0.998
_OPEN_SHARE = 0.2
_SHARE_MEMORY = 256
_SLOW_SCALE = 1.5
_SLOW_PORTION = 0.25
_SCARCE_DELAYS = 1.3
_SCARCE_TOKENS = 2.0
_LATE_QUANTILE = 0.95


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


class HedgePolicy:
    """Decides for all uploads of a process together.

    Invariants:
        1. It neither waits nor reads a clock: every time is an argument, in seconds of one monotonic clock.
        2. Hedges plus retries never exceed :class:`~.hedge_budget.HedgeBudget`'s bound.

    Not thread-safe; belongs to one loop.

    Args:
        options: See :class:`~dstl.options.HedgingOptions`.
    """

    def __init__(self, options: HedgingOptions) -> None:
        self._options = options
        self.estimate = LatencyEstimate()
        self.budget = HedgeBudget(options.budget, options.budget_burst)
        self.breaker = Breaker()
        self.pause = ThrottlePause(options.throttle_pause_s)
        self.cause = ThrottleCause()
        self.overtaking = Overtaking()
        self._in_flight = 0
        self._burst = 1.0
        self._slow = False
        self._critical_share = 1.0
        self._portion = 0.0  # until the first upload begins
        self._critical_q = 1.0 - options.target

    def began(self, now: float, size: int, critical: bool) -> Ticket:
        """An upload starts its first attempt; the ticket is given back to :meth:`finished`."""
        self._in_flight += 1
        if self._in_flight > self._burst:
            self._burst = float(self._in_flight)
        else:
            self._burst -= self._burst / 1024  # a peak is forgotten over a thousand PUTs
        if not critical or self._critical_share < 0.999 or self._portion == 0.0:
            self._critical_share += (critical - self._critical_share) / _SHARE_MEMORY
            self._aim(now)
        ticket = self.overtaking.began(now, size)
        if self._options.enabled and self.cause.began(now, ticket):
            if self.cause.is_load:
                self._be_careful(now)
            self._aim(now)
        return ticket

    def delay(self, size: int, critical: bool = True) -> float:
        """Age in seconds from which an attempt at an object of this size counts as late, as of now."""
        options = self._options
        median = self.estimate.median(size)
        if median is None:
            return options.cold_delay_s
        q = self._critical_q if critical else _NOT_CRITICAL_QUANTILE
        floor = max(options.min_delay_s, _FLOOR_MEDIANS * median)
        ceiling = max(options.max_delay_s, _CEILING_MEDIANS * median)
        return min(max(median * self.estimate.shape(q), floor), ceiling)

    def outlived(self, ticket: Ticket) -> None:
        """A first attempt has outlived its delay: told when the timer finds it so; only the first time counts."""
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
        if self.cause.is_load and now < self.pause.until:
            return HedgeVerdict(Verdict.DENY, self.pause.until - now, "throttled")
        again = max(options.min_delay_s, delay / 8)
        if self.breaker.is_open:
            return HedgeVerdict(Verdict.DENY, again, "breaker")
        if not critical and self.budget.tokens < options.budget_burst / 2:
            return HedgeVerdict(Verdict.DENY, again, "not_critical")
        if self.budget.tokens < min(_SCARCE_TOKENS, options.budget_burst / 4) and age < _SCARCE_DELAYS * delay:
            # The last tokens are for what is later still: of the merely late, most are about to finish.
            return HedgeVerdict(Verdict.DENY, _SCARCE_DELAYS * delay - age, "budget")
        refusal = self.budget.refusal()
        if refusal is not None:
            return HedgeVerdict(Verdict.DENY, again, refusal)
        self.budget.pay(size)
        self.cause.sent(hedge=True)
        return _SEND

    def retried(self, size: int) -> None:
        """A failed attempt is tried again: paid from the same budget."""
        self.budget.pay(size)
        self.cause.sent()

    def throttled(self, now: float, first: Ticket | None = None) -> None:
        """The store answered 503 SlowDown.

        Args:
            now: The clock's time.
            first: The upload, where it was its first attempt that was refused.
        """
        if self._options.enabled:
            self.cause.throttled(now, first)
        if self.cause.is_load:
            self._be_careful(now)
        self._aim(now)

    def learn(self, now: float, size: int, seconds: float) -> None:
        """Record a first attempt's latency, or its age when it was given up or its hedge won."""
        self.estimate.record(now, size, seconds, int(self._burst))
        if (self.estimate.scale > _SLOW_SCALE) is not self._slow:
            self._slow = not self._slow
            self._aim(now)

    def finished(self, now: float, ticket: Ticket, *, stored: bool = True) -> None:
        """An upload is over, ``stored`` or not."""
        self._in_flight -= 1
        ticket.done = True
        if not ticket.outlived:
            self.breaker.count(False, int(self._burst), self._open_share())
        median = self.estimate.median(ticket.size)
        if median is not None and now - ticket.began > median * self.estimate.shape(_LATE_QUANTILE):
            self.overtaking.late(now, ticket, median)
            self._aim(now)
        if stored:
            self.budget.earn(ticket.size, self._portion)

    def _be_careful(self, now: float) -> None:
        self.pause.throttled(now)
        self.budget.void()

    def _aim(self, now: float) -> None:
        """Choose the quantile that the wanted share of uploads outlives."""
        options = self._options
        trust = self.pause.portion(now) if self.cause.is_load else self.cause.portion
        self._portion = self.overtaking.portion * (_SLOW_PORTION if self._slow else 1.0) * trust
        wanted = 1.0 - options.target * self._portion / max(self._critical_share, 1e-3)
        # Rounded, so that the estimate can keep its quantiles.
        self._critical_q = min(round(max(options.critical_quantile, wanted), 3), _NOT_CRITICAL_QUANTILE)

    def _open_share(self) -> float:
        # With few critical uploads the delay is a lower quantile, and more of them outlive it.
        return max(_OPEN_SHARE, min(0.8, 3 * (1.0 - self._critical_q)))
