"""A driver's program in a simulated world: it starts its query by the product's own restart strategies."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, Protocol

from pyspark.errors import StreamingQueryException

from dstl.runtime import Clock
from dstl.spark.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
    run_with_restarts,
)
from tests.simulation.blocking import Wait
from tests.simulation.faults import FaultKind
from tests.simulation.process import Process
from tests.simulation.world import World


class _Driver(Protocol):
    process: Process

    def run_query(self, run: str, completed: Callable[[], None]) -> Coroutine[Any, Any, None]: ...


class _Query:
    """As much of PySpark's ``StreamingQuery`` as a restart looks at; its batches run while somebody waits for it."""

    def __init__(self, driver: _Driver, run: str, wait: Wait) -> None:
        self._driver = driver
        self._run = run
        self._wait = wait
        self.recentProgress = [SimpleNamespace(durationMs={"triggerExecution": 1})]

    def awaitTermination(self) -> None:
        self._wait(self._driver.run_query(self._run, self._completed))

    def _completed(self) -> None:
        self.recentProgress.append(SimpleNamespace(durationMs={"addBatch": 1}))


def run_program(driver: _Driver, world: World, clock: Clock, wait: Wait) -> None:
    """Run a query until it ends, or its strategy, or its error, says that no restart helps; seldom then once more."""
    name = driver.process.name
    rng, runs = world.rng(f"{name}:restarts"), 0

    def start() -> Any:
        nonlocal runs
        runs += 1
        return _Query(driver, f"run-{name}-{runs}", wait)

    def restarted(number: int, error: BaseException) -> None:
        world.count(FaultKind.RESTART_IN_DRIVER)

    while True:
        try:
            run_with_restarts(
                start,
                _draw_strategy(rng),
                on_restart=restarted,
                fruitless_runs=rng.choice((2, 20)),
                clock=clock,
                wait=wait,
            )
            return
        except StreamingQueryException:
            # A program may know better: also of one that was fenced.
            if rng.random() < 0.9:
                return
            world.count(FaultKind.RESTART_IN_DRIVER)
            wait(clock.sleep(rng.uniform(0.1, 2.0)))


def _draw_strategy(rng: random.Random) -> RestartStrategy:
    delay_s = rng.uniform(0.1, 2.0)
    return rng.choice(
        (
            NoRestart(),
            FixedDelay(attempts=rng.randrange(1, 4), delay_s=delay_s),
            ExponentialDelay(initial_s=delay_s, maximum_s=8.0, reset_after_s=rng.choice((5.0, 3600.0))),
            FailureRate(max_failures=rng.randrange(1, 4), interval_s=rng.choice((5.0, 300.0)), delay_s=delay_s),
        )
    )
