"""When a table is materialized: each reason alone, the spread of starts, failures, and any schedule of all of them."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dstl.runtime import SystemClock
from materializer.trigger import Action, MaterializationTrigger, Reason, TriggerOptions, UnmaterializedLog
from tests.simulation.virtual_time import seeded_runtime

QUIET = TriggerOptions(interval_s=600, log_to_state_ratio=None, replay_s=None, max_segments=None, min_pause_s=0)
NO_LOG = UnmaterializedLog(0, 0, 0.0, 1 << 30)


def _log(
    size: int = 1000, segments: int = 1, oldest_at: float = 0.0, state: int = 1 << 30, rate: float | None = None
) -> UnmaterializedLog:
    return UnmaterializedLog(size, segments, oldest_at, state, rate)


def _trigger(options: TriggerOptions = QUIET, seed: int = 1, now: float = 0.0) -> MaterializationTrigger:
    return MaterializationTrigger(options, seeded_runtime(seed, SystemClock()), now)


def _with(**changed: object) -> TriggerOptions:
    return QUIET.model_copy(update=changed)


def _settled(options: TriggerOptions) -> MaterializationTrigger:
    """A trigger whose last materialization began and ended at 0, so that the interval is due at ``interval_s``."""
    trigger = _trigger(options)
    trigger.started(0.0)
    trigger.succeeded(0.0)
    return trigger


def test_without_log_nothing_ever_starts() -> None:
    trigger = _trigger()
    for now in (0.0, 1e3, 1e9):
        decision = trigger.decide(now, NO_LOG)
        assert (decision.action, decision.ask_again_at) == (Action.WAIT, math.inf)


def test_the_interval_runs_from_start_to_start() -> None:
    trigger = _settled(QUIET)
    assert trigger.decide(599.9, _log()).ask_again_at == 600
    assert trigger.decide(599.9, _log()).action is Action.WAIT
    decision = trigger.decide(600, _log())
    assert (decision.action, decision.reason) == (Action.START, Reason.INTERVAL)
    trigger.started(600)
    trigger.succeeded(900)
    assert trigger.decide(1199, _log()).action is Action.WAIT
    assert trigger.decide(1200, _log()).action is Action.START


def test_a_restored_log_of_an_idle_operator_is_materialized() -> None:
    """No change ever comes; Flink keeps such a log for ever."""
    trigger = _trigger(now=5000.0)
    restored = _log(oldest_at=5000.0)
    decision = trigger.decide(5000.0, restored)
    assert decision.action is Action.WAIT
    assert 5000 <= decision.ask_again_at <= 5600
    assert trigger.decide(decision.ask_again_at, restored).action is Action.START


@pytest.mark.parametrize(
    ("options", "below", "at", "reason"),
    [
        (
            _with(log_to_state_ratio=0.5, min_log_bytes=100),
            _log(499, state=1000),
            _log(500, state=1000),
            Reason.LOG_TO_STATE,
        ),
        (_with(log_to_state_ratio=0.5, min_log_bytes=100), _log(99, state=0), _log(100, state=0), Reason.LOG_TO_STATE),
        (_with(replay_s=10.0, replay_segment_s=0), _log(999, rate=100.0), _log(1000, rate=100.0), Reason.REPLAY),
        (_with(replay_s=10.0, replay_segment_s=0, replay_bytes_per_s=50), _log(499), _log(500), Reason.REPLAY),
        (_with(replay_s=10.0, replay_segment_s=1.0), _log(1, 9), _log(1, 10), Reason.REPLAY),
        (_with(max_segments=7), _log(segments=6), _log(segments=7), Reason.SEGMENTS),
    ],
)
def test_the_size_of_the_log_starts_at_once(
    options: TriggerOptions, below: UnmaterializedLog, at: UnmaterializedLog, reason: Reason
) -> None:
    trigger = _settled(options)
    assert trigger.decide(1.0, below).action is Action.WAIT
    decision = trigger.decide(1.0, at)
    assert (decision.action, decision.reason) == (Action.START, reason)


def test_age_starts_before_the_interval() -> None:
    trigger = _settled(_with(max_age_s=100.0))
    assert trigger.decide(149.0, _log(oldest_at=50.0)).ask_again_at == 150.0
    decision = trigger.decide(150.0, _log(oldest_at=50.0))
    assert (decision.action, decision.reason) == (Action.START, Reason.AGE)
    assert trigger.decide(550.0, _log(oldest_at=549.0)).ask_again_at == 600.0


def test_a_log_that_outgrows_its_state_all_the_time_waits_for_the_pause() -> None:
    trigger = _settled(_with(max_segments=1, min_pause_s=10.0))
    assert trigger.decide(3.0, _log()).ask_again_at == 10.0
    assert trigger.decide(10.0, _log()).action is Action.START


def test_the_first_starts_of_many_operators_are_spread() -> None:
    """After a restart the interval does not make all of them upload at once."""
    starts = sorted(_trigger(QUIET, seed).decide(0.0, _log()).ask_again_at for seed in range(400))
    assert starts[0] >= 0
    assert starts[-1] <= 600.0
    quarters = [sum(150.0 * q <= s < 150.0 * (q + 1) for s in starts) for q in range(4)]
    assert min(quarters) > 60, quarters


def test_a_restored_log_beyond_its_bound_is_materialized_without_waiting() -> None:
    """A run may be over in seconds; half a minute of chance would leave it without a base for ever."""
    for seed in range(20):
        assert _trigger(_with(max_segments=1), seed).decide(0.0, _log()).reason is Reason.SEGMENTS


def test_failures_delay_more_and_more_then_are_reported() -> None:
    options = _with(tolerated_failures=2, backoff_base_s=10.0, backoff_cap_s=60.0)
    trigger = _trigger(options)
    now = 1000.0
    tolerated = []
    for failure in range(8):
        assert trigger.decide(now, _log()).action is Action.START
        trigger.started(now)
        tolerated.append(trigger.failed(now))
        bound = min(60.0, 10.0 * 2**failure)
        wait = trigger.decide(now, _log()).ask_again_at - now
        assert bound / 2 <= wait <= bound
        now += wait
        assert trigger.decide(now, _log()).reason is Reason.RETRY
    assert tolerated == [True, True] + [False] * 6
    assert trigger.failures == 8
    trigger.started(now)
    trigger.succeeded(now)
    assert (trigger.failures, trigger.is_running) == (0, False)


def test_endless_failures_do_not_overflow() -> None:
    trigger = _trigger(_with(backoff_cap_s=1.0))
    for _ in range(3000):
        trigger.started(0.0)
        trigger.failed(0.0)
    assert trigger.decide(0.0, _log()).ask_again_at <= 1.0


def test_a_stuck_materialization_is_abandoned() -> None:
    trigger = _trigger(_with(timeout_s=100.0))
    trigger.started(1000.0)
    assert trigger.decide(1099.0, _log(10**15)).ask_again_at == 1100.0
    assert trigger.decide(1100.0, NO_LOG).action is Action.ABANDON
    assert trigger.failed(1100.0)


def test_the_watchdog_looks_at_age_alone() -> None:
    """Also while one is running or backing off; never without log."""
    trigger = _trigger(_with(overdue_s=50.0))
    trigger.started(0.0)
    assert trigger.overdue_at(_log(oldest_at=70.0)) == trigger.overdue_at(_log(1, oldest_at=70.0)) == 120.0
    assert trigger.overdue_at(NO_LOG) == math.inf


def test_the_age_of_a_log_of_many_short_runs_counts_once_it_is_twice_as_long_as_it_may_be() -> None:
    """A run that begins with it would have to live for an hour to notice; within its bound a log may be old."""
    options = _with(overdue_s=50.0, log_to_state_ratio=0.5, min_log_bytes=100)
    trigger = _trigger(options, now=1000.0)
    assert trigger.overdue_at(_log(999, oldest_at=-5000.0, state=1000)) == 1050.0
    assert trigger.overdue_at(_log(1000, oldest_at=-5000.0, state=1000)) == -4950.0


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            st.floats(0, 400), st.integers(0, 5000), st.sampled_from(["ok", "ok", "fail", "stuck"]), st.floats(0, 200)
        ),
        min_size=20,
        max_size=60,
    ),
)
def test_any_schedule_keeps_the_promises(seed: int, steps: list[tuple[float, int, str, float]]) -> None:
    """One at a time; never without log; never within pause or back-off; a log waits no longer than it may."""
    options = TriggerOptions(
        interval_s=300, min_log_bytes=1000, replay_bytes_per_s=100, max_segments=20, backoff_cap_s=50, timeout_s=150
    )
    trigger = MaterializationTrigger(options, seeded_runtime(seed, SystemClock()), 0.0)
    now = size = 0.0
    segments, oldest, ended, ok = 0, 0.0, -math.inf, True
    for gap, added, outcome, takes in steps:
        now += gap
        if added and not size:
            oldest = now
        size, segments = size + added, segments + (added > 0)
        log = UnmaterializedLog(int(size), segments, oldest, 3000)
        decision = trigger.decide(now, log)
        if decision.action is Action.WAIT:
            assert decision.ask_again_at > now
            assert size == 0 or decision.ask_again_at <= max(now, ended) + options.interval_s
            if size:
                later = trigger.decide(decision.ask_again_at, log)
                assert later.action is Action.START
            continue
        assert decision.action is Action.START
        assert size > 0
        assert now >= ended + (options.min_pause_s if ok else options.backoff_base_s / 2)
        trigger.started(now)
        if outcome == "stuck":
            now = trigger.decide(now, log).ask_again_at
            assert trigger.decide(now, log).action is Action.ABANDON
        else:
            now += min(takes, 149.0)
            assert trigger.decide(now, log).action is Action.WAIT
        ended, ok = now, outcome == "ok"
        if ok:
            trigger.succeeded(now)
            size, segments = 0.0, 0
        else:
            trigger.failed(now)
