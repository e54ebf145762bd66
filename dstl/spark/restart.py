"""Restarts of a query that has failed, by Flink's strategies.

A query stops with an error whenever Spark gives a task up or a TaskManager dies with changes that no checkpoint has.
Nothing is lost then: the next run goes on from the last checkpoint. :func:`run_with_restarts` starts it again, where
that helps: not after an error that would only come again (the table in :mod:`dstl.errors`), and not for ever where run
after run fails before it has completed a batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

from dstl.errors import DstlError, Invalid
from dstl.runtime import Clock, IoLoop, SystemClock
from dstl.spark.cause import cause

_log = logging.getLogger(__name__)
FRUITLESS_RUNS = 20
"""Runs in a row without a completed batch, after which it gives up: with :class:`ExponentialDelay` a quarter of an hour
of pauses, and the time in which each run has waited for what is away."""


class RestartStrategy(Protocol):
    """Decides after each failure. Stateful; one per run."""

    def next_delay(self, now: float) -> float | None:
        """Return how many seconds to wait before the next start, or None to give up.

        Args:
            now: Monotonic seconds at which the query failed.
        """


@dataclass
class NoRestart:
    """Give up at the first failure (Flink ``restart-strategy.type: none``)."""

    def next_delay(self, now: float) -> float | None:
        """Return None."""
        return None


@dataclass
class FixedDelay:
    """A fixed number of restarts with a fixed pause (Flink ``fixed-delay``).

    Attributes:
        attempts: Restarts in all. More: rides out longer trouble; fewer: a query that cannot succeed stops sooner.
        delay_s: Pause before each, in seconds. Longer: what failed has time to heal; shorter: less time is lost.
    """

    attempts: int = 3
    delay_s: float = 1.0
    _done: int = field(default=0, init=False)

    def next_delay(self, now: float) -> float | None:
        """Return the fixed pause until the attempts are used up."""
        self._done += 1
        return self.delay_s if self._done <= self.attempts else None


@dataclass
class ExponentialDelay:
    """Restarts as long as it helps, with pauses that grow (Flink ``exponential-delay``).

    Attributes:
        initial_s: First pause, in seconds.
        maximum_s: Longest pause.
        multiplier: Growth from one to the next.
        reset_after_s: A run at least this long counts as healthy: the pause starts over. Longer: a query that fails
            every now and then waits longer and longer; shorter: one that fails slowly is restarted too eagerly.
    """

    initial_s: float = 1.0
    maximum_s: float = 60.0
    multiplier: float = 1.5
    reset_after_s: float = 3600.0
    _delay: float = field(default=0.0, init=False)
    _last: float | None = field(default=None, init=False)

    def next_delay(self, now: float) -> float | None:
        """Return the next pause; never gives up by itself."""
        healthy = self._last is not None and now - self._last - self._delay >= self.reset_after_s
        fresh = self._last is None or healthy
        self._delay = self.initial_s if fresh else min(self.maximum_s, self._delay * self.multiplier)
        self._last = now
        return self._delay


@dataclass
class FailureRate:
    """Restarts until failures come too often (Flink ``failure-rate``).

    Attributes:
        max_failures: Most failures within the interval that are still answered by a restart.
        interval_s: Length of the interval, in seconds, ending now.
        delay_s: Pause before each restart.
    """

    max_failures: int = 3
    interval_s: float = 300.0
    delay_s: float = 1.0
    _failures: deque[float] = field(default_factory=deque, init=False)

    def next_delay(self, now: float) -> float | None:
        """Return the pause, or None where the rate is exceeded."""
        self._failures.append(now)
        while self._failures and now - self._failures[0] > self.interval_s:
            self._failures.popleft()
        return self.delay_s if len(self._failures) <= self.max_failures else None


def run_with_restarts(
    start: Callable[[], StreamingQuery],
    strategy: RestartStrategy,
    *,
    on_restart: Callable[[int, BaseException], None] | None = None,
    fruitless_runs: int = FRUITLESS_RUNS,
    clock: Clock | None = None,
    wait: Callable[[Coroutine[Any, Any, None]], object] | None = None,
) -> int:
    """Start a query, wait for its end, and start it again as the strategy says, also where the start has failed.

    A query that was stopped (``query.stop()``) has ended without an error, and is not started again.

    Args:
        start: Starts the query: usually ``writer.start``, which may be called again and again.
        strategy: Decides after each failure.
        on_restart: Called before each restart with its number, from 1, and the error.
        fruitless_runs: Runs in a row that failed before they completed a batch, after which it gives up, whatever the
            strategy says. More: rides out longer outages; fewer: a query that cannot succeed stops sooner. Batches are
            seen in ``query.recentProgress``, so ``spark.sql.streaming.numRecentProgressUpdates`` must not be 0.
        clock: Time; the machine's by default.
        wait: Runs a pause of the clock's to its end; by default on an event loop in a thread of its own. For a clock
            whose pauses end on another loop, as a simulated one's do.

    Returns:
        How many restarts it took until the query ended without an error.

    Raises:
        StreamingQueryException: The strategy gave up, or the error cannot be cured by a restart (wrong configuration,
            an error in user code, a newer driver has taken over), or too many runs were fruitless.
            :func:`dstl.spark.cause.cause` returns the typed error inside it.
        DstlError: The same, of an error that ``start`` raised.
        Py4JJavaError: The same; what is no input or output error of the JVM is not tried again.
        Invalid: ``start`` returned something else than a query.
    """
    clock = clock or SystemClock()
    restarts = fruitless = 0
    with ExitStack() as ends:
        if wait is None:
            loop = IoLoop("dstl-restart")
            ends.callback(loop.close)
            wait = loop.run
        while True:
            query = None
            try:
                query = start()
                if not hasattr(query, "awaitTermination"):
                    raise Invalid("start must return a StreamingQuery: pass writer.start, not writer")
                query.awaitTermination()
                return restarts
            except (DstlError, StreamingQueryException, Py4JJavaError) as error:
                delay = strategy.next_delay(clock.now()) if is_restartable(error) else None
                if delay is None:
                    raise
                fruitless = 0 if query is not None and _has_completed_a_batch(query) else fruitless + 1
                if fruitless >= fruitless_runs:
                    _log.error("%d runs in a row failed without a completed batch: no restart helps", fruitless)
                    raise
                restarts += 1
                said = error.java_exception.toString() if isinstance(error, Py4JJavaError) else str(error)
                _log.warning("restart %d in %.1f s after: %s", restarts, delay, said.splitlines()[0])
                if on_restart is not None:
                    on_restart(restarts, error)
                wait(clock.sleep(delay))


def is_restartable(error: BaseException) -> bool:
    """Return False for errors that would only come again; errors of others may pass.

    Of a call into the JVM only its input and output may: a context that was stopped, say, stays so.
    """
    found = cause(error)
    if found is None and isinstance(error, Py4JJavaError):
        return bool(is_instance_of(SparkContext._gateway, error.java_exception, "java.io.IOException"))
    return found is None or found.restartable


def _has_completed_a_batch(query: StreamingQuery) -> bool:
    """Return True where a batch has reached the sink: Spark reports progress without a batch, too."""
    return any("addBatch" in progress.durationMs for progress in query.recentProgress)
