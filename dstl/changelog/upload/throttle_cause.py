"""Detection of why a store answers 503: because of the load, or a small share of requests whatever the load.

A store near its limit answers 503 for what exceeds it, so each hedge costs a 503. Another refuses one request in some
hundreds however few there are, and hedges change nothing about that. A single 503 does not tell which it is; how the
share of 503 follows the load does:

* *our own rate*: first attempts that were sent while the process sent much must not have been refused more often;
* *hedges*: after some 503s that were seen while hardly anything was hedged, a trial hedges a little. If the share has
  risen by what was hedged, it was the load; if it has not, the store is cleared, and watched from then on.

All processes of a job see the same store and its 503s at about the same time, so their trials overlap; a trial that
was too lonely to be seen in the share is made good by the watch, which sees what all of them add.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from math import exp, log, sqrt

from dstl.changelog.upload.queue_detector import Ticket

__all__ = ["ThrottleCause"]

_FEWEST = 8
_MOST = 64
_SMALL_SHARE = 0.01
_MEASURED_S = 40.0
_TRIAL_S = 20.0
_LONGEST_TRIAL_S = 300.0
_TRIAL_PORTION = 0.5
_CERTAIN_CLEAR = -2.0
_CERTAIN_LOAD = 2.5
_COST_OF_A_HEDGE = 0.75
_LOOK_EVERY = 32
_TREND = 1.64
_SHORT_GAP = 0.125
_SHORT_GAPS = 0.1175  # of gaps at random, 1 - exp(-0.125)
_RATE_S = 1.0
_RATE_STEP = 1.02
_RATE_CERTAIN = 1.9
_RISE = 0.015
_ALARM = 10.0
_GONE = 10.0
_HOLD_S = 300.0
_LONGEST_HOLD_S = 3600.0


class _Phase(Enum):
    IDLE = "no 503 lately"
    MEASURE = "503s, and little is hedged"
    TRIAL = "a little is hedged, to see what it does"
    CLEARED = "503s have another cause than the load"


class _Sample:
    """Requests under one amount of hedging."""

    __slots__ = ("at", "busy", "firsts", "hedges", "refused_busy", "refused_firsts", "requests", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.requests = self.hedges = self.firsts = self.busy = self.refused_firsts = self.refused_busy = 0
        self.at: list[int] = []
        """For each 503, how many requests had been sent before it came."""

    @property
    def refused(self) -> int:
        return len(self.at)

    @property
    def share(self) -> float:
        return len(self.at) / self.requests if self.requests else 0.0

    @property
    def hedged(self) -> float:
        return self.hedges / self.requests if self.requests else 0.0

    def trend(self) -> float:
        """Laplace's test of 503s that get more (above zero) or fewer: about normal where neither is so."""
        before = self.at[:-1]  # the last one has ended the observation
        if not before:
            return 0.0
        middle = sum(before) / len(before) / max(1, self.at[-1])
        return (middle - 0.5) * sqrt(12 * len(before))

    def is_clustered(self) -> bool:
        """Return whether 503s come in company: those of an overload do, and those that come at random seldom."""
        gaps = len(self.at) - 1
        short = _SHORT_GAP * self.requests / max(1, len(self.at))
        found = sum(after - before < short for before, after in pairwise(self.at))
        return found > gaps * _SHORT_GAPS + 2.5 * sqrt(gaps * _SHORT_GAPS) + 0.5

    def follows_rate(self) -> bool:
        """Return whether first attempts at busy times were refused more often than the others."""
        refused, busy = self.refused_firsts, self.refused_busy
        if not refused or not 0 < self.busy < self.firsts:
            return False
        expected = self.busy / self.firsts  # where the rate does not matter
        if busy / refused <= expected:
            return False
        calm = refused - busy
        found = busy * log(busy / (refused * expected))
        if calm:
            found += calm * log(calm / (refused * (1.0 - expected)))
        return found > _RATE_CERTAIN

    def newer_half(self, now: float) -> _Sample:
        """Return what came after the middle one of the 503s, with all that is known of rates; the time begins anew."""
        half = _Sample(now)
        half.firsts, half.busy = self.firsts, self.busy
        half.refused_firsts, half.refused_busy = self.refused_firsts, self.refused_busy
        start = self.at[len(self.at) // 2]
        half.requests = self.requests - start
        half.hedges = int(self.hedges * half.requests / max(1, self.requests))
        half.at = [at - start for at in self.at if at > start]
        return half


class ThrottleCause:
    """Decides whether 503s are blamed on the load. Pure; belongs to one loop.

    Invariants:
        1. They are, until a trial has shown that they are not; more than 1 of a hundred always are.
        2. Nothing but a 503 begins a trial, and a trial that has failed makes the next one wait, 5 minutes and longer
           each time.
        3. A cleared store whose share of 503 rises by about half of what is hedged is near its limit again.
    """

    __slots__ = (
        "_alarm",
        "_hold",
        "_hold_until",
        "_low",
        "_phase",
        "_quiet",
        "_rate",
        "_rate_at",
        "_share",
        "_trial",
        "_usual",
    )

    def __init__(self) -> None:
        self._phase = _Phase.IDLE
        self._low = _Sample(0.0)
        self._trial = _Sample(0.0)
        self._hold = _HOLD_S
        self._hold_until = float("-inf")
        self._share = 1e-4  # of 503, while the store was measured and tried
        self._alarm = 0.0
        self._quiet = 0
        self._rate = 0.0
        self._rate_at = 0.0
        self._usual = 1.0

    @property
    def is_load(self) -> bool:
        """True where a 503 asks for less: neither during a trial, nor for a store that is cleared."""
        return self._phase in (_Phase.IDLE, _Phase.MEASURE)

    @property
    def is_cleared(self) -> bool:
        """True once a trial has shown that the load is not the cause."""
        return self._phase is _Phase.CLEARED

    @property
    def portion(self) -> float:
        """The share of the usual hedging where 503s are not blamed on the load."""
        return _TRIAL_PORTION if self._phase is _Phase.TRIAL else 1.0

    def began(self, now: float, ticket: Ticket) -> bool:
        """A first attempt is sent; returns whether :attr:`is_load` or :attr:`portion` has changed."""
        self._rate = self._rate * exp((self._rate_at - now) / _RATE_S) + 1.0
        self._rate_at = now
        ticket.busy = self._rate > self._usual
        self._usual *= _RATE_STEP if ticket.busy else 1.0 / _RATE_STEP
        if self._phase is _Phase.IDLE:
            return False
        if self._phase is _Phase.MEASURE:
            self._low.firsts += 1
            self._low.busy += ticket.busy
        self.sent()
        return self._phase is not _Phase.MEASURE and self._quiet % _LOOK_EVERY == 0 and self._look(now)

    def sent(self, *, hedge: bool = False) -> None:
        """Another request is sent, a retry or a hedge."""
        if self._phase is _Phase.IDLE:
            return
        self._quiet += 1
        if self._phase is _Phase.CLEARED:
            self._alarm = max(0.0, self._alarm - _RISE)
            return
        sample = self._low if self._phase is _Phase.MEASURE else self._trial
        sample.requests += 1
        sample.hedges += hedge

    def throttled(self, now: float, first: Ticket | None = None) -> None:
        """A request was answered by 503.

        Args:
            now: The clock's time.
            first: The upload, where it was its first attempt.
        """
        self._quiet = 0
        if self._phase is _Phase.IDLE:
            self._phase, self._low = _Phase.MEASURE, _Sample(now)
        elif self._phase is _Phase.MEASURE:
            low = self._low
            low.at.append(low.requests)
            if first is not None:
                low.refused_firsts += 1
                low.refused_busy += first.busy
            self._consider_trial(now)
        else:
            if self._phase is _Phase.CLEARED:
                self._alarm += log((self._share + _RISE) / self._share)
            else:
                self._trial.at.append(self._trial.requests)
            self._look(now)

    def _consider_trial(self, now: float) -> None:
        low = self._low
        if low.refused < _FEWEST or now - low.since < _MEASURED_S:
            return
        if abs(low.trend()) > _TREND or low.refused > _MOST or low.is_clustered():
            self._low = low.newer_half(now)  # a storm, its end, or another store than it was
        elif low.share <= _SMALL_SHARE and now >= self._hold_until and not low.follows_rate():
            self._phase, self._trial = _Phase.TRIAL, _Sample(now)

    def _look(self, now: float) -> bool:
        """Judge a trial, or a cleared store; returns whether anything has changed."""
        trial = self._trial
        if self._phase is _Phase.CLEARED:
            if self._alarm > _ALARM:
                return self._blame_load(now)
            if self._quiet * self._share > _GONE:
                self._phase = _Phase.IDLE
                return True
            if now - trial.since > 2 * self._hold:
                self._hold = _HOLD_S
            return False
        for_load = self._evidence()
        is_stuck = now - trial.since > _LONGEST_TRIAL_S  # hardly anything was late enough to be hedged
        if is_stuck or for_load > _CERTAIN_LOAD or (trial.refused >= _FEWEST and trial.share > 3 * _SMALL_SHARE):
            return self._blame_load(now)
        if for_load < _CERTAIN_CLEAR and now - trial.since >= _TRIAL_S:
            requests = self._low.requests + trial.requests
            self._share = max(1e-4, (self._low.refused + trial.refused) / requests)
            self._phase, self._alarm = _Phase.CLEARED, 0.0
            return True
        return False

    def _blame_load(self, now: float) -> bool:
        self._phase, self._low = _Phase.MEASURE, _Sample(now)
        self._hold_until = now + self._hold
        self._hold = min(_LONGEST_HOLD_S, 2 * self._hold)
        return True

    def _evidence(self) -> float:
        """Return the logarithm of how much likelier the 503s are if each hedge costs one than if none does."""
        low, trial = self._low, self._trial
        effect = _COST_OF_A_HEDGE * (trial.hedged - low.hedged)
        if effect <= 0 or not trial.requests:
            return 0.0
        k, n = low.refused, low.requests
        more_k, more_n = trial.refused, trial.requests
        same = (k + more_k) / (n + more_n)
        no_effect = (k + more_k) * log(same) - same * (n + more_n)
        # The likeliest share under the effect solves k/p + more_k/(p + effect) = n + more_n.
        total = n + more_n
        half = (effect * total - k - more_k) / (2 * total)
        share = sqrt(half * half + k * effect / total) - half
        with_effect = k * log(share) - share * n - (share + effect) * more_n
        return with_effect + more_k * log(share + effect) - no_effect
