"""The hedging policy and its parts: pure, so driven by plain numbers."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._hedging_run import Workload, run_arm
from bench._models import models
from dstl.changelog.upload.connection_pools import ConnectionPools
from dstl.changelog.upload.hedge_limits import HedgeBudget, QueueDetector
from dstl.changelog.upload.hedging import HedgePolicy, HedgeVerdict, Verdict
from dstl.options import HedgingOptions
from dstl.store.memory import MemoryStore
from tests.simulation.latency import LatencyParameters

KB = 1 << 10
MB = 1 << 20


def put(policy: HedgePolicy, now: float, size: int, seconds: float, critical: bool = True) -> None:
    """One PUT after the other, without hedges."""
    ticket = policy.began(now, size, critical)
    if seconds > policy.delay(size, critical):
        policy.outlived(ticket)
    policy.learn(now + seconds, size, seconds)
    policy.finished(now + seconds, ticket)


def taught(seed: int, puts: int = 3000, median: float = 0.1, sigma: float = 0.3, **options: object) -> HedgePolicy:
    policy, rng = HedgePolicy(HedgingOptions(**options)), random.Random(seed)
    for i in range(puts):
        put(policy, i * 0.04, 100 * KB, median * math.exp(sigma * rng.gauss(0, 1)))
    return policy


def ask(policy: HedgePolicy, now: float, age: float, **changes: object) -> HedgeVerdict:
    return policy.ask(now, **{"size": 100 * KB, "age": age, "hedges": 0, "critical": True, **changes})


def test_delay_is_what_the_target_share_outlives(seed):
    policy = taught(seed, target=0.04)
    assert policy.delay(100 * KB) == pytest.approx(0.1 * math.exp(0.3 * 1.751), rel=0.15)


def test_delay_is_cold_until_twenty_puts_are_known(seed):
    policy = HedgePolicy(HedgingOptions(cold_delay_s=0.7))
    for i in range(19):
        put(policy, i, KB, 0.02)
        assert policy.delay(KB) == 0.7
    put(policy, 19, KB, 0.02)
    assert policy.delay(KB) < 0.1


def test_large_object_is_not_late_for_being_large(seed):
    policy, rng = HedgePolicy(HedgingOptions()), random.Random(seed)
    for i in range(4000):
        size, median = (64 * KB, 0.05) if i % 4 else (16 * MB, 1.0)
        put(policy, i * 0.04, size, median * math.exp(0.2 * rng.gauss(0, 1)))
    assert policy.delay(64 * KB) < 0.1
    assert 1.2 < policy.delay(16 * MB) < 2.5
    # A class never seen: as late as its size could explain.
    assert policy.delay(32 * MB) > policy.delay(16 * MB)


def test_delay_keeps_its_floor_and_its_ceiling(seed):
    assert taught(seed, sigma=0.001).delay(100 * KB) == pytest.approx(0.13, rel=0.05)
    assert taught(seed, median=0.001, sigma=0.01).delay(100 * KB) == 0.005
    assert taught(seed, median=0.3, sigma=2.0).delay(100 * KB) == 2.0
    slow = taught(seed, median=3.0, sigma=0.1).delay(100 * KB)
    assert slow > 3.0 * 1.2  # never below the median, whatever the ceiling


@pytest.mark.parametrize("seed", [1, 2, 3])  # a bound on a sample: not for every seed
def test_delay_follows_a_slow_store_within_seconds_and_back_after_512_puts(seed):
    policy, rng = taught(seed), random.Random(seed)
    calm = policy.delay(100 * KB)
    for i in range(150):
        put(policy, 200 + i * 0.04, 100 * KB, 0.4 * math.exp(0.3 * rng.gauss(0, 1)))
    assert policy.delay(100 * KB) == pytest.approx(4 * calm, rel=0.5)
    for i in range(520):
        put(policy, 300 + i * 0.04, 100 * KB, 0.1 * math.exp(0.3 * rng.gauss(0, 1)))
    assert policy.delay(100 * KB) == pytest.approx(calm, rel=0.5)


def test_timer_that_fires_early_waits_for_the_rest(seed):
    policy = taught(seed)
    delay = policy.delay(100 * KB)
    answer = ask(policy, 1000.0, delay / 2)
    assert answer.verdict is Verdict.WAIT
    assert answer.ask_again_s == pytest.approx(delay / 2)
    assert ask(policy, 1000.0, delay).verdict is Verdict.SEND


def test_limit_and_switch(seed):
    policy = taught(seed, max_hedges=2)
    assert ask(policy, 1000.0, 9.0, hedges=2) == HedgeVerdict(Verdict.NEVER, reason="limit")
    off = HedgePolicy(HedgingOptions(enabled=False))
    assert ask(off, 1000.0, 9.0) == HedgeVerdict(Verdict.NEVER, reason="disabled")


def test_budget_bounds_hedges_however_late_everything_is(seed):
    policy = taught(seed, budget_burst=8.0)
    sent = sum(ask(policy, 1000.0, 9.0).verdict is Verdict.SEND for _ in range(100))
    assert sent == 8
    assert ask(policy, 1000.0, 9.0).reason == "budget"


@given(st.lists(st.tuples(st.sampled_from("erh"), st.integers(1, 64 * MB)), max_size=400))
@settings(deadline=None, max_examples=80)
def test_budget_never_grants_more_than_it_earned(steps):
    budget = HedgeBudget(0.05, 8.0)
    earned = hedges = 0
    for kind, size in steps:
        if kind == "e":
            budget.earn(size)
            earned += 1
        elif kind == "r":
            budget.pay(size)
        elif budget.refusal() is None:
            budget.pay(size)
            hedges += 1
        assert -8.0 <= budget.tokens <= 8.0
        assert hedges <= 8.0 + 0.05 * earned + 1e-6


def test_breaker_opens_when_everything_is_late_and_closes_again(seed):
    policy, now = taught(seed), 1000.0
    tickets = [policy.began(now, 100 * KB, True) for _ in range(25)]
    for ticket in tickets:
        policy.outlived(ticket)
        policy.outlived(ticket)  # told twice, counted once
    assert ask(policy, now, 9.0).reason == "breaker"
    for ticket in tickets:
        policy.finished(now + 1, ticket)
    for i in range(200):
        put(policy, now + 2 + i / 25, 100 * KB, 0.1)
    assert ask(policy, now + 20, 9.0).verdict is Verdict.SEND


def test_slow_down_lowers_what_is_wanted_afterwards(seed):
    policy = taught(seed)
    before = policy.delay(100 * KB)
    policy.throttled(1000.0)
    policy.throttled(1010.0)
    assert policy.delay(100 * KB) > before * 1.1


def test_little_room_of_a_throttling_store_is_left_alone():
    """With 0.5 % of room, hedging that is not cut back deep makes 2.8 % of 503s out of none, and p99 seven-fold."""
    values = models()["odd-throttled"]
    workload = Workload(LatencyParameters.of(values), writers=100, rounds=120, per_process=25)
    none, hedged = (run_arm(workload, 1, hedge=hedge) for hedge in (False, True))
    assert none.rejected == 0
    assert hedged.counters["hedgesSent"] > 0
    assert hedged.rejected < 0.01 * hedged.requests
    assert np.quantile(hedged.latency, 0.99) < 3 * np.quantile(none.latency, 0.99)


def test_queue_is_told_from_a_tail_by_who_overtakes(seed):
    rng = random.Random(seed)
    tail, queue = QueueDetector(), QueueDetector()
    for which, in_order in ((tail, False), (queue, True)):
        now = 0.0
        for _ in range(100):
            now += 10
            late = which.began(now, KB)
            others = [which.began(now + rng.random() * 0.1, KB) for _ in range(10)]
            for other in others:
                other.done = not in_order
            late.done = True
            which.late(now + 0.5, late, 0.1)
    assert tail.share == 1.0
    assert tail.portion == 1.0
    assert queue.share < 0.1
    assert queue.portion == 1 / 64


def test_overtaking_asks_only_puts_of_the_same_size_class():
    overtaking = QueueDetector()
    late = overtaking.began(0.0, 16 * MB)
    overtaking.began(0.1, KB).done = False
    overtaking.late(5.0, late, 1.0)
    assert overtaking.share == 1.0


@pytest.mark.parametrize("seed", [1, 2, 3])  # a bound on a sample: not for every seed
def test_few_critical_uploads_are_hedged_earlier(seed):
    policy, rng = HedgePolicy(HedgingOptions()), random.Random(seed)
    for i in range(4000):
        put(policy, i * 0.04, 100 * KB, 0.1 * math.exp(0.3 * rng.gauss(0, 1)), critical=rng.random() < 0.1)
    all_critical = taught(seed).delay(100 * KB)
    assert policy.delay(100 * KB, critical=True) < all_critical * 0.9
    assert policy.delay(100 * KB, critical=False) > all_critical * 1.15


def test_hedges_for_nobody_leave_half_the_budget_to_checkpoints(seed):
    policy = taught(seed, budget_burst=8.0)
    while ask(policy, 1000.0, 9.0, critical=False).verdict is Verdict.SEND:
        pass
    assert ask(policy, 1000.0, 9.0, critical=False).reason == "not_critical"
    assert ask(policy, 1000.0, 9.0, critical=True).verdict is Verdict.SEND


def test_recording_the_age_at_a_win_keeps_the_hedge_rate(seed):
    """Had the winner's latency been learnt, the delay would sink and the rate of hedges rise."""
    policy, rng, hedges, puts = HedgePolicy(HedgingOptions(target=0.04)), random.Random(seed), 0, 20_000
    for i in range(puts):
        now = i * 0.04
        own = 0.1 * math.exp(0.4 * rng.gauss(0, 1)) + (rng.random() < 0.02) * 2.0
        other = 0.1 * math.exp(0.4 * rng.gauss(0, 1))
        ticket = policy.began(now, 100 * KB, True)
        delay = policy.delay(100 * KB)
        took = own
        if own > delay:
            policy.outlived(ticket)
            if ask(policy, now + delay, delay).verdict is Verdict.SEND:
                hedges += 1
                took = min(own, delay + other)
        policy.learn(now + took, 100 * KB, took)
        policy.finished(now + took, ticket)
    assert 0.03 < hedges / puts < 0.05


def test_store_that_turned_slow_is_hedged_less(seed):
    policy, rng = taught(seed), random.Random(seed)
    for i in range(300):
        put(policy, 200 + i * 0.04, 100 * KB, 0.4 * math.exp(0.3 * rng.gauss(0, 1)))
    tokens = policy.budget.tokens
    policy.budget.pay(0)
    policy.budget.pay(0)
    for i in range(100):
        put(policy, 220 + i * 0.04, 100 * KB, 0.4)
    assert policy.budget.tokens == pytest.approx(tokens - 2 + 100 * 0.043 / 4, abs=0.05)


def test_hedges_use_the_other_pool_and_first_attempts_warm_it():
    store, hedge_store = MemoryStore(), MemoryStore()
    pools = ConnectionPools(store, hedge_store, 10.0, 0.0)
    assert pools.choose(0.0, [], first=True) == 1  # cold: a first attempt opens a connection
    assert pools.choose(1.0, [], first=True) == 0
    assert pools.choose(1.0, [0], first=False) == 1
    assert pools.choose(1.0, [1], first=False) == 0
    pools.closed_one(1)  # the hedge lost
    assert pools.choose(2.0, [], first=False) == 0  # a retry warms nothing
    assert pools.choose(2.0, [], first=True) == 1
    assert pools.choose(3.0, [], first=True) == 0
    assert pools.choose(13.5, [], first=True) == 1  # idle for too long
