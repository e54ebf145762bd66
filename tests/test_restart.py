"""Restart strategies decide purely; the runner restarts what a restart can cure and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from dstl.errors import Invalid
from dstl.spark.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
    run_with_restarts,
)


def delays(strategy: RestartStrategy, *failures_at: float) -> list[float | None]:
    return [strategy.next_delay(at) for at in failures_at]


def test_no_restart() -> None:
    assert delays(NoRestart(), 0.0) == [None]


def test_fixed_delay_gives_up_after_its_attempts() -> None:
    assert delays(FixedDelay(attempts=2, delay_s=3.0), 0, 1, 2) == [3.0, 3.0, None]


def test_exponential_delay_grows_to_its_cap_and_starts_over_after_a_healthy_run() -> None:
    strategy = ExponentialDelay(initial_s=1.0, maximum_s=4.0, multiplier=2.0, reset_after_s=100.0)
    assert delays(strategy, 0, 1, 3, 7) == [1.0, 2.0, 4.0, 4.0]
    # The last pause does not count towards the healthy time.
    assert delays(strategy, 110) == [4.0]
    assert delays(strategy, 214) == [1.0]


def test_failure_rate_counts_a_sliding_interval() -> None:
    strategy = FailureRate(max_failures=2, interval_s=10.0, delay_s=0.5)
    assert delays(strategy, 0, 5, 11, 12) == [0.5, 0.5, 0.5, None]


class Query:
    def __init__(self, error: str | None) -> None:
        self.error = error

    def awaitTermination(self) -> None:
        if self.error is not None:
            raise StreamingQueryException(self.error)


def run(*errors: str | None, strategy: RestartStrategy | None = None) -> tuple[int, list[int]]:
    queries = iter([Query(error) for error in errors])
    told: list[int] = []
    done = run_with_restarts(
        lambda: next(queries),  # type: ignore[arg-type, return-value]
        strategy or FixedDelay(attempts=3, delay_s=0.0),
        on_restart=lambda number, _: told.append(number),
    )
    return done, told


def test_a_query_that_fails_twice_is_started_three_times() -> None:
    assert run("dstl.errors.TaskManagerLost: gone", "dstl.errors.CheckpointDeclined: late", None) == (2, [1, 2])


@pytest.mark.parametrize("kind", ["Invalid", "UserCodeError", "AccessDenied", "Fenced"])
def test_an_error_that_would_only_come_again_is_not_restarted(kind: str) -> None:
    with pytest.raises(StreamingQueryException, match=kind):
        run(f"dstl.errors.{kind}: never", None)


def test_the_last_error_is_raised_when_the_strategy_gives_up() -> None:
    with pytest.raises(StreamingQueryException, match="second"):
        run("first", "second", None, strategy=FixedDelay(attempts=1, delay_s=0.0))


def test_a_start_that_returns_no_query_is_refused() -> None:
    with pytest.raises(Invalid, match="writer"):
        run_with_restarts(lambda: Any, NoRestart())  # type: ignore[arg-type, return-value]
