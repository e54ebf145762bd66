"""Restart strategies decide purely; the runner restarts what a restart can cure and nothing else."""

import inspect
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from home import Home
from py4j.protocol import Py4JJavaError
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming import StreamingQuery

import dstl.checkpoint.fleet.fleet
import dstl.errors
import materializer.bases.table_directory
from dstl.errors import DstlError, Invalid, Unavailable, error_from_wire, error_to_wire
from dstl.spark.restart import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
    is_restartable,
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
    def __init__(self, error: str | None, batches: int = 0) -> None:
        self.error = error
        waits = [{"triggerExecution": 3, "latestOffset": 2}]
        self.recentProgress = [
            SimpleNamespace(durationMs=each) for each in (waits + [{"addBatch": 5}] * batches + waits)
        ]

    def awaitTermination(self) -> None:
        if self.error is not None:
            raise StreamingQueryException(self.error)


def run(
    *errors: str | None, strategy: RestartStrategy | None = None, batches: int = 0, **options: Any
) -> tuple[int, list[int]]:
    queries = iter([Query(error, batches) for error in errors])
    told: list[int] = []
    done = run_with_restarts(
        lambda: next(queries),  # type: ignore[arg-type, return-value]
        strategy or FixedDelay(attempts=3, delay_s=0.0),
        on_restart=lambda number, _: told.append(number),
        **options,
    )
    return done, told


def stopped_by(kind: type[DstlError], message: str = "why") -> str:
    """Return Spark's text of a query that a task's error has stopped."""
    return (
        "[STREAM_FAILED] Query terminated with exception: [PYTHON_EXCEPTION] An exception was thrown from the Python "
        'worker: Traceback (most recent call last):\n  File "task.py", line 1, in run\n    begin()\n'
        f"{kind.__module__}.{kind.__qualname__}: {message}\n SQLSTATE: 38000\n=== Streaming Query ===\nIdentifier: q"
    )


def every_class() -> list[type[DstlError]]:
    found = [DstlError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.split(".")[0] in ("dstl", "materializer", "handles")]


def made(kind: type[DstlError]) -> DstlError:
    return kind("what", "why") if inspect.isfunction(kind.__init__) else kind("why")


def test_a_query_that_fails_twice_is_started_three_times() -> None:
    lost, declined = stopped_by(dstl.errors.TaskManagerLost), stopped_by(dstl.errors.CheckpointDeclined)
    assert run(lost, declined, None) == (2, [1, 2])


def test_the_table_of_errors_says_of_every_class_whether_a_restart_helps() -> None:
    """A class that is added, or that changes its mind, has to be looked at in every place where it is raised."""
    table = dict(re.findall(r"^(\w+) +(yes|no) ", dstl.errors.__doc__ or "", re.MULTILINE))
    kinds = every_class()
    assert {dstl.checkpoint.fleet.fleet.FleetChanged, materializer.bases.table_directory.UnusableObject} <= set(kinds)
    own = {kind.__name__: kind for kind in kinds if kind.__module__ == "dstl.errors"}
    assert table == {name: "yes" if kind.restartable else "no" for name, kind in own.items()}
    for kind in kinds:
        assert is_restartable(StreamingQueryException(stopped_by(kind))) is kind.restartable
        assert is_restartable(made(kind)) is kind.restartable
    elsewhere = [kind for kind in kinds if kind not in own.values()]
    assert all(kind.restartable == kind.__bases__[0].restartable for kind in elsewhere), "the table does not say so"


@pytest.mark.parametrize("kind", every_class())
def test_an_error_of_another_module_crosses_the_wire_as_the_one_that_it_derives_from(kind: type[DstlError]) -> None:
    told = error_from_wire(*error_to_wire(made(kind)))
    assert issubclass(kind, type(told))
    assert (type(told).__module__, str(told)) == ("dstl.errors", str(made(kind)))
    assert told.restartable is kind.restartable


@pytest.mark.parametrize("kind", [kind for kind in every_class() if not kind.restartable])
def test_an_error_that_would_only_come_again_is_not_restarted(kind: type[DstlError]) -> None:
    with pytest.raises(StreamingQueryException, match=kind.__name__):
        run(stopped_by(kind), None)


def test_the_name_of_an_error_in_a_message_does_not_stop_a_query() -> None:
    quoted = stopped_by(dstl.errors.CheckpointDeclined, "the checkpoint failed: dstl.errors.Invalid: not this")
    assert run(quoted, None) == (1, [1])


def test_the_last_error_is_raised_when_the_strategy_gives_up() -> None:
    with pytest.raises(StreamingQueryException, match="second"):
        run("first", "second", None, strategy=FixedDelay(attempts=1, delay_s=0.0))


@pytest.mark.parametrize(
    "strategy",
    [
        ExponentialDelay(initial_s=0.0, maximum_s=0.0),
        FailureRate(max_failures=3, interval_s=0.0, delay_s=0.0),
        FixedDelay(attempts=1000, delay_s=0.0),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_runs_that_complete_no_batch_are_not_restarted_for_ever(strategy: RestartStrategy) -> None:
    """Moments without a batch are no progress: a source that waits for rows reports them all the time."""
    error = stopped_by(dstl.errors.Unavailable)
    told: list[int] = []
    with pytest.raises(StreamingQueryException, match="Unavailable"):
        run_with_restarts(
            lambda: Query(error),  # type: ignore[arg-type, return-value]
            strategy,
            on_restart=lambda number, _: told.append(number),
            fruitless_runs=5,
        )
    assert told == [1, 2, 3, 4]


def test_a_run_that_has_completed_a_batch_counts_anew() -> None:
    error = stopped_by(dstl.errors.TaskManagerLost)
    strategy = ExponentialDelay(initial_s=0.0, maximum_s=0.0)
    assert run(*[error] * 30, None, strategy=strategy, batches=1, fruitless_runs=2) == (30, list(range(1, 31)))


def test_a_start_that_fails_is_tried_again_where_a_restart_helps_and_counts_as_a_run() -> None:
    queries: list[Query | DstlError] = [Unavailable("the coordinator is gone"), Query("lost"), Unavailable("still")]

    def start() -> Any:
        found = queries.pop(0) if queries else Query(None)
        if isinstance(found, DstlError):
            raise found
        return found

    told: list[str] = []
    strategy = FixedDelay(attempts=5, delay_s=0.0)
    assert run_with_restarts(start, strategy, on_restart=lambda _, error: told.append(str(error))) == 3
    assert told == ["the coordinator is gone", "lost", "still"]
    queries = [Invalid("a name is taken"), Query(None)]
    with pytest.raises(Invalid, match="a name is taken"):
        run_with_restarts(start, FixedDelay(attempts=5, delay_s=0.0))
    queries = [Unavailable("down")] * 9
    with pytest.raises(Unavailable):
        run_with_restarts(start, FixedDelay(attempts=9, delay_s=0.0), fruitless_runs=3)
    assert len(queries) == 6


def test_a_start_that_spark_fails_for_its_checkpoint_directory_is_tried_again_and_a_stopped_query_is_not(
    home: Home,
) -> None:
    blocked = home.path / "blocked"
    blocked.write_text("a file where a directory is to be")
    started: list[StreamingQuery] = []

    def start() -> StreamingQuery:
        writer = home.spark.readStream.format("rate").load().writeStream.format("noop")
        started.append(writer.option("checkpointLocation", str(blocked / "checkpoint")).start())
        threading.Timer(0.5, started[0].stop).start()
        return started[0]

    def unblock(number: int, error: BaseException) -> None:
        assert number == 1
        assert isinstance(error, Py4JJavaError)
        blocked.unlink()

    assert run_with_restarts(start, FixedDelay(attempts=3, delay_s=0.0), on_restart=unblock) == 1
    assert len(started) == 1
    assert not started[0].isActive


def test_a_start_that_returns_no_query_is_refused() -> None:
    with pytest.raises(Invalid, match="writer"):
        run_with_restarts(lambda: Any, NoRestart())  # type: ignore[arg-type, return-value]
