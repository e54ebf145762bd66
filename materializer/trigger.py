"""The trigger of materializations: a pure decision over the length of an operator's log, with back-off after failures.

Flink knows a timer alone (``state.changelog.periodic-materialize.interval``), so a busy job's log outgrows its state
between two ticks and a restored idle operator keeps its log for ever. Here the timer is one reason among five.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from dstl.options import TriggerOptions
from dstl.runtime import Backoff, Runtime


class Reason(StrEnum):
    """The reason of a materialization."""

    LOG_TO_STATE = "log_to_state"
    REPLAY = "replay"
    SEGMENTS = "segments"
    INTERVAL = "interval"
    AGE = "age"
    RETRY = "retry"


class Action(StrEnum):
    """The caller's next action."""

    WAIT = "wait"
    START = "start"
    ABANDON = "abandon"


@dataclass(frozen=True, slots=True)
class UnmaterializedLog:
    """The log behind the newest base of one operator, and the state it belongs to.

    Attributes:
        bytes: Stored bytes of log that recovery would replay; 0 means that there is nothing to materialize.
        segments: Segments that they lie in.
        oldest_at: When the oldest of these changes was committed, on the caller's clock; before its beginning perhaps,
            where an earlier run has logged it. Ignored when ``bytes`` is 0.
        state_bytes: Bytes of the table.
        replay_bytes_per_s: Measured rate of replay; None: none was measured yet.
    """

    bytes: int
    segments: int
    oldest_at: float
    state_bytes: int
    replay_bytes_per_s: float | None = None

    def replay_seconds(self, options: TriggerOptions) -> float:
        """Estimate how long a recovery would take for this log."""
        rate = self.replay_bytes_per_s or options.replay_bytes_per_s
        return self.bytes / rate + self.segments * options.replay_segment_s


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision, and the time to ask again.

    Attributes:
        action: What to do now.
        reason: Why, for ``START``.
        ask_again_at: Nothing changes before this moment unless the log grows: ask at the earlier of the two.
    """

    action: Action
    reason: Reason | None = None
    ask_again_at: float = math.inf


class MaterializationTrigger:
    """Decides for one operator. The caller reports what it did: ``started``, then ``succeeded`` or ``failed``.

    Invariants:
        1. At most one materialization runs: nothing starts between ``started`` and its end.
        2. Nothing starts without log, and any log is materialized at last: an idle operator's restored log too.
        3. A failure never makes the next start earlier.

    Pure: time is an argument, randomness injected. Not thread-safe.

    Attributes:
        is_running: One was started and has not ended.
        failures: Failures in a row.

    Args:
        options: The thresholds.
        runtime: Its generator spreads the starts; its clock is not read.
        now: The moment of the (re)start, in seconds of a monotonic clock.
    """

    def __init__(self, options: TriggerOptions, runtime: Runtime, now: float) -> None:
        self._options = options
        self._backoff = Backoff(options.backoff_base_s, options.backoff_cap_s)
        self._rng = runtime.rng
        first = self._rng.uniform(0.0, 1.0)
        self._interval_due = now + options.interval_s * first
        self._not_before = now
        self._restarted_at = now
        self._started_at = now
        self.failures = 0
        self.is_running = False

    def decide(self, now: float, log: UnmaterializedLog) -> Decision:
        """Say what to do at this moment."""
        if self.is_running:
            deadline = self._started_at + self._options.timeout_s
            return Decision(Action.ABANDON) if now >= deadline else Decision(Action.WAIT, ask_again_at=deadline)
        if log.bytes <= 0:
            return Decision(Action.WAIT)
        reason, due = self._due(now, log)
        due = max(due, self._not_before)
        if now >= due:
            return Decision(Action.START, reason)
        return Decision(Action.WAIT, ask_again_at=due)

    def overdue_at(self, log: UnmaterializedLog) -> float:
        """Return when the log will have been older than ``overdue_s``, for whatever reason; infinity without log.

        What earlier runs have logged counts from this run's start: runs that are shorter than the interval keep a log
        that is within its bounds for as long as they like. Where it is twice as long as any of them allows it is
        overdue at once: bases were due for some time, and none came.
        """
        since = log.oldest_at if self._bound(log, 2) is not None else max(log.oldest_at, self._restarted_at)
        return since + self._options.overdue_s if log.bytes > 0 else math.inf

    def started(self, now: float) -> None:
        """Report that a materialization began."""
        assert not self.is_running
        self.is_running = True
        self._started_at = now
        self._interval_due = now + self._options.interval_s

    def succeeded(self, now: float) -> None:
        """Report that it is complete."""
        assert self.is_running
        self.is_running = False
        self.failures = 0
        self._not_before = now + self._options.min_pause_s

    def failed(self, now: float) -> bool:
        """Report that it failed, or was abandoned; return whether the failure is tolerated.

        It is tried again all the same.
        """
        assert self.is_running
        self.is_running = False
        self.failures += 1
        self._not_before = now + self._backoff.after(self.failures, self._rng)
        return self.failures <= self._options.tolerated_failures

    def _due(self, now: float, log: UnmaterializedLog) -> tuple[Reason, float]:
        """Return the first reason that holds, or the one that will hold first, and when."""
        options = self._options
        if self.failures:
            return Reason.RETRY, now
        bound = self._bound(log)
        if bound is not None:
            return bound, now
        if options.max_age_s is not None and log.oldest_at + options.max_age_s < self._interval_due:
            return Reason.AGE, log.oldest_at + options.max_age_s
        return Reason.INTERVAL, self._interval_due

    def _bound(self, log: UnmaterializedLog, times: int = 1) -> Reason | None:
        """Return the bound that the log has reached, or so many times that; None where it is within all of them."""
        options = self._options
        if options.max_segments is not None and log.segments >= times * options.max_segments:
            return Reason.SEGMENTS
        if options.replay_s is not None and log.replay_seconds(options) >= times * options.replay_s:
            return Reason.REPLAY
        ratio = options.log_to_state_ratio
        if ratio is not None and log.bytes >= times * max(options.min_log_bytes, ratio * log.state_bytes):
            return Reason.LOG_TO_STATE
        return None
