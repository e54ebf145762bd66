"""Why a store answers 503: stores by a formula, a clock by hand, and chance from a seed."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from bench._hedging_run import Workload, run_arm
from bench._models import models
from dstl.changelog.upload.hedging import HedgePolicy, Verdict
from dstl.changelog.upload.queue_detector import Ticket
from dstl.changelog.upload.throttle_cause import ThrottleCause
from dstl.options import HedgingOptions
from dstl.testing.latency import LatencyParameters

PUTS_PER_S = 25
HEDGES = 0.036
CAREFUL = 1 / 64
KB = 1 << 10


class Store:
    """PUTs of one process, some hedged as the cause allows, against a formula for the share of 503."""

    def __init__(self, seed: int, share: Callable[[float, float, bool], float]) -> None:
        self.cause = ThrottleCause()
        self.now = 0.0
        self.trials = 0
        self.cleared_at: float | None = None
        self._rng = random.Random(seed)
        self._share = share

    def run(self, seconds: float) -> None:
        """``share`` is asked with the time, the share of hedges, and whether the process sends much."""
        cause, rng = self.cause, self._rng
        for put in range(int(seconds * PUTS_PER_S)):
            # In bursts: a second's PUTs within its first 100 ms.
            second, place = divmod(put, PUTS_PER_S)
            now = self.now + second + place / PUTS_PER_S / 10
            hedged = HEDGES * (CAREFUL if cause.is_load else cause.portion)
            was_load = cause.is_load
            ticket = Ticket(now, KB)
            cause.began(now, ticket)
            refused = self._share(now, hedged, place >= PUTS_PER_S // 2)
            if rng.random() < hedged:
                cause.sent(hedge=True)
                if rng.random() < refused:
                    cause.throttled(now)
            if rng.random() < refused:
                cause.throttled(now, ticket)
                cause.sent()
            self.trials += was_load and not cause.is_load
            if cause.is_cleared and self.cleared_at is None:
                self.cleared_at = now
        self.now += seconds


@pytest.mark.parametrize("seed", range(5))  # a bound on a sample: not for every seed
@pytest.mark.parametrize("share", [0.003, 0.006])
def test_constant_share_is_cleared_and_stays_so(seed, share):
    store = Store(seed, lambda now, hedged, busy: share)
    store.run(1200)
    assert store.cleared_at is not None
    assert store.cleared_at < 700
    assert not store.cause.is_load
    assert store.cause.portion == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_store_whose_503s_are_the_hedges_is_not_cleared(seed):
    """At its limit: each hedge costs a 503. The trials that find it out are short, and further apart each time."""
    store = Store(seed, lambda now, hedged, busy: 0.004 + hedged)
    held = 0
    for _ in range(3600):
        store.run(1)
        held += store.cause.is_load
    assert store.trials <= 6
    assert held > 0.9 * 3600


@pytest.mark.parametrize("seed", range(5))
def test_store_that_refuses_at_busy_moments_is_not_tried(seed):
    store = Store(seed, lambda now, hedged, busy: 0.012 if busy else 0.0)
    store.run(900)
    assert store.trials == 0


@pytest.mark.parametrize("seed", range(5))
def test_storm_is_not_tried(seed):
    store = Store(seed, lambda now, hedged, busy: 0.06 if now < 30 else 0.0)
    store.run(300)
    assert store.trials == 0
    assert store.cause.is_load


@pytest.mark.parametrize("seed", range(5))
def test_cleared_store_that_comes_near_its_limit_is_load_within_a_minute(seed):
    limit = float("inf")
    store = Store(seed, lambda now, hedged, busy: 0.005 + (hedged if now > limit else 0.0))
    while not store.cause.is_cleared:
        store.run(10)
        assert store.now < 1500
    limit = store.now
    store.run(60)
    assert store.cause.is_load


def test_store_without_503s_is_as_before_once_they_are_forgotten():
    share = 0.005
    store = Store(1, lambda now, hedged, busy: share)
    while not store.cause.is_cleared:
        store.run(10)
    share = 0.0
    store.run(600)
    assert store.cause.is_load


def test_lone_503_is_load():
    cause = ThrottleCause()
    ticket = Ticket(0.0, KB)
    cause.began(0.0, ticket)
    cause.throttled(0.1, ticket)
    assert cause.is_load
    assert not cause.is_cleared


def test_cleared_store_is_hedged_through_its_503s(seed):
    """Neither a pause, nor a smaller share, nor a void budget follow a 503 that does not ask for less."""
    policy, rng, now = HedgePolicy(HedgingOptions()), random.Random(seed), 0.0
    while not policy.cause.is_cleared:
        assert now < 3000
        now += 1 / PUTS_PER_S
        ticket = policy.began(now, KB, True)
        delay = policy.delay(KB)
        took = 0.1 * rng.lognormvariate(0, 0.3)
        if took > delay:
            policy.outlived(ticket)
            policy.ask(now + delay, size=KB, age=delay, hedges=0, critical=True)
        if rng.random() < 0.006:
            policy.throttled(now, ticket)
            policy.retried(KB)
        policy.learn(now + took, KB, took)
        policy.finished(now + took, ticket)
    tokens, delay = policy.budget.tokens, policy.delay(KB)
    policy.throttled(now, None)
    assert policy.budget.tokens == tokens
    assert policy.delay(KB) == delay
    policy.budget.earn(KB, 1e3)
    assert policy.ask(now, size=KB, age=9.0, hedges=0, critical=True).verdict is Verdict.SEND


def test_store_that_refuses_whatever_the_load_is_hedged():
    """Real uploaders over the latency model: p999 falls by more than half, and 503s do not get more."""
    workload = Workload(LatencyParameters.of(models()["odd-refusals"]), writers=50, rounds=400, per_process=25)
    none, hedged = (run_arm(workload, 1, hedge=hedge) for hedge in (False, True))
    assert np.quantile(hedged.latency, 0.999) < 0.5 * np.quantile(none.latency, 0.999)
    assert hedged.rejected / hedged.requests < none.rejected / none.requests + 0.002
    later = hedged.latency[200:]
    assert np.quantile(later, 0.99) < 0.8 * np.quantile(none.latency[200:], 0.99)
