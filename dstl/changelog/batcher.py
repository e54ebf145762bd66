"""Batching rules of the FLIP: pure decisions, given the time, when a segment is sealed.

A seal is due on the first of: every writer with data has asked (at once; the FLIP's rule that Flink never built), the
oldest ask is ``persist_delay_s`` old, the asked bytes reach ``persist_size_threshold``. A writer that holds
``preemptive_persist_threshold`` bytes counts as asking without any checkpoint; and when appends wait for memory while
nothing is on its way out, everything is sealed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dstl.options import BatchingOptions

__all__ = ["Batcher", "SealDecision", "SealReason"]

_SLACK_S = 1e-6  # a sleep may end a rounding error early


class SealReason(enum.Enum):
    """The rule by which a segment was sealed; the metric ``seals.<value>`` counts them."""

    ALL_ASKED = "allAsked"
    DELAY = "delay"
    SIZE = "size"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class SealDecision:
    """Seal these logs now.

    Attributes:
        asked: Logs of which the change sets that persists wait for are sealed.
        whole: Logs of which everything is sealed, the open change set too.
        reason: The rule that was met first.
    """

    asked: tuple[str, ...]
    whole: tuple[str, ...]
    reason: SealReason


@dataclass(slots=True)
class _Log:
    held: int = 0
    asked: int = 0
    since: float | None = None


class Batcher:
    """Collects the asks of all logs of one storage.

    Invariants:
        1. :meth:`decide` is asked again after every change and at :meth:`deadline`, so no ask is ever forgotten: the
           state, not an event, decides (the lost wake-up of Flink's first batching scheduler cannot happen).
        2. Asks of persists are never held back. What nobody waits for (pre-emptive, memory) pauses after a failed
           upload, twice as long each time, so that a broken store is not hammered.

    Args:
        options: Delay and thresholds.
    """

    FIRST_PAUSE_S = 0.1
    LONGEST_PAUSE_S = 5.0

    def __init__(self, options: BatchingOptions) -> None:
        self._options = options
        self._logs: dict[str, _Log] = {}
        self._failures = 0
        self._paused_until = float("-inf")

    @property
    def queued(self) -> int:
        """The number of logs that wait for a seal."""
        return sum(1 for log in self._logs.values() if log.since is not None)

    def update(self, log_id: str, *, held: int, asked: int, now: float) -> None:
        """Tell what a log holds.

        Args:
            log_id: The log.
            held: Bytes that are in no seal: buffered change sets and the open one.
            asked: Bytes of those that a persist waits for; 0 when none waits.
            now: The time.
        """
        log = self._logs.setdefault(log_id, _Log())
        log.held, log.asked = held, asked
        if not asked and held < self._options.preemptive_persist_threshold:
            log.since = None
        elif log.since is None:
            log.since = now
        if not held:
            del self._logs[log_id]

    def succeeded(self) -> None:
        """A segment was stored."""
        self._failures = 0
        self._paused_until = float("-inf")

    def failed(self, now: float) -> None:
        """A segment could not be stored."""
        pause = min(self.LONGEST_PAUSE_S, self.FIRST_PAUSE_S * 2 ** min(self._failures, 10))
        self._failures += 1
        self._paused_until = now + pause

    def decide(
        self, now: float, *, starving: bool = False, draining: bool = False, all_asked: bool = False
    ) -> SealDecision | None:
        """Return what to seal now; the caller then seals it and updates the logs.

        Args:
            now: The time.
            starving: Appends wait for memory.
            draining: A seal is on its way, so memory will come back.
            all_asked: The caller knows that nobody else will ask (a checkpoint of the whole TaskManager).
        """
        paused = now < self._paused_until - _SLACK_S
        if starving and not draining and not paused and self._logs:
            return SealDecision((), tuple(self._logs), SealReason.MEMORY)
        ready = {name: log for name, log in self._logs.items() if log.asked or (log.since is not None and not paused)}
        if not ready:
            return None
        oldest = min(log.since for log in ready.values() if log.since is not None)
        if all_asked or len(ready) == len(self._logs):
            reason = SealReason.ALL_ASKED
        elif sum(log.asked or log.held for log in ready.values()) >= self._options.persist_size_threshold:
            reason = SealReason.SIZE
        elif now >= oldest + self._options.persist_delay_s - _SLACK_S:
            reason = SealReason.DELAY
        else:
            return None
        return SealDecision(
            asked=tuple(name for name, log in ready.items() if log.held < self._preemptive),
            whole=tuple(name for name, log in ready.items() if log.held >= self._preemptive),
            reason=reason,
        )

    def deadline(self, now: float, *, starving: bool = False) -> float | None:
        """Return when :meth:`decide` must be asked again though nothing changed; None when it need not be."""
        times = [
            max(log.since + self._options.persist_delay_s, 0.0 if log.asked else self._paused_until)
            for log in self._logs.values()
            if log.since is not None
        ]
        if starving and self._logs and now < self._paused_until:
            times.append(self._paused_until)
        return min(times, default=None)

    @property
    def _preemptive(self) -> int:
        return self._options.preemptive_persist_threshold
