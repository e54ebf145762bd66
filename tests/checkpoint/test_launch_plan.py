"""Who launches a TaskManager: one for each host, whoever comes first, and another try where one fails."""

import random
from collections import Counter

import pytest

from dstl.checkpoint.fleet.resource_manager import LaunchPlan
from dstl.runtime import Backoff
from tests.simulation.manual_clock import ManualClock

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def plan_for(hosts: int) -> LaunchPlan:
    plan = LaunchPlan(start_s=30, spread_s=10, backoff=Backoff(1, 8))
    plan.hosts = hosts
    return plan


async def test_a_place_whose_host_stays_away_goes_to_another_after_a_time() -> None:
    """B is gone altogether: its key groups must not stay unserved."""
    plan, clock = plan_for(2), ManualClock()
    first = plan.ask(A, clock.now(), 2, {})
    assert first is not None
    plan.registered(first)
    assert plan.ask(A, clock.now(), 2, {A: 1}) is None
    wait = plan.next_time(A, clock.now()) - clock.now()
    assert wait == pytest.approx(10)
    await clock.advance(wait - 0.001)
    assert plan.ask(A, clock.now(), 2, {A: 1}) is None
    await clock.advance(0.002)
    assert plan.ask(A, clock.now(), 2, {A: 1}) is not None


async def test_the_time_counts_from_when_somebody_is_missing_and_not_from_when_somebody_was() -> None:
    plan, clock = plan_for(2), ManualClock()
    assert plan.ask(A, clock.now(), 2, {A: 1}) is None
    assert plan.ask(A, clock.now(), 2, {A: 1, B: 1}) is None
    await clock.advance(100)
    assert plan.ask(A, clock.now(), 2, {A: 1}) is None, "B's has died just now, and B may launch the next"
    assert plan.ask(B, clock.now(), 2, {A: 1}) is not None


async def test_a_place_that_stays_free_goes_to_the_host_with_least_first() -> None:
    plan, clock = plan_for(3), ManualClock()
    members = {A: 2, B: 1}
    assert plan.ask(A, clock.now(), 4, members) is None
    await clock.advance(10)
    assert plan.ask(A, clock.now(), 4, members) is None, "B has less"
    await clock.advance(10)
    assert plan.ask(A, clock.now(), 4, members) is not None, "nobody of B has asked"


async def test_a_launch_that_never_comes_is_given_up_and_another_try_is_let() -> None:
    """The worker died before it had started anything, or the process before it could connect."""
    plan, clock = plan_for(1), ManualClock()
    assert plan.ask(A, clock.now(), 1, {}) is not None
    assert plan.next_time(A, clock.now()) == pytest.approx(clock.now() + 30)
    await clock.advance(29.9)
    assert plan.ask(A, clock.now(), 1, {}) is None
    await clock.advance(0.2)
    assert plan.ask(A, clock.now(), 1, {}) is None, "not at once: it has just failed"
    await clock.advance(1)
    assert plan.ask(A, clock.now(), 1, {}) is not None


async def test_one_that_has_enlisted_has_the_time_again_to_register() -> None:
    plan, clock = plan_for(1), ManualClock()
    member_id = plan.ask(A, clock.now(), 1, {})
    assert member_id is not None
    await clock.advance(29)
    plan.enlisted(member_id, clock.now())
    await clock.advance(29)
    assert plan.ask(A, clock.now(), 1, {}) is None
    assert list(plan.coming) == [member_id]


async def test_failures_make_a_host_wait_longer_until_one_succeeds() -> None:
    plan, clock, waits = plan_for(1), ManualClock(), []
    for _ in range(6):
        member_id = plan.ask(A, clock.now(), 1, {})
        assert member_id is not None
        plan.failed(member_id, clock.now())
        waits.append(plan.next_time(A, clock.now()) - clock.now())
        assert plan.ask(A, clock.now(), 1, {}) is None
        await clock.advance(waits[-1])
    assert waits == pytest.approx([1, 2, 4, 8, 8, 8])
    member_id = plan.ask(A, clock.now(), 1, {})
    assert member_id is not None
    plan.registered(member_id)
    again = plan.ask(A, clock.now(), 1, {})
    assert again is not None, "the one that had registered has died: nothing speaks against another"


async def test_a_failing_host_leaves_its_place_to_another() -> None:
    plan, clock = plan_for(2), ManualClock()
    member_id = plan.ask(B, clock.now(), 2, {A: 1})
    assert member_id is not None
    plan.failed(member_id, clock.now())
    assert plan.ask(A, clock.now(), 2, {A: 1}) is None
    await clock.advance(10)
    assert plan.ask(A, clock.now(), 2, {A: 1}) is not None


def test_what_has_registered_or_is_unknown_cannot_fail() -> None:
    plan = plan_for(1)
    member_id = plan.ask(A, 0.0, 1, {})
    assert member_id is not None
    plan.registered(member_id)
    plan.failed(member_id, 0.0)
    plan.failed("by-hand", 0.0)
    plan.enlisted("by-hand", 0.0)
    assert plan.ask(A, 0.0, 1, {}) is not None


def test_whatever_happens_there_are_never_more_than_wanted_and_at_last_enough(rng: random.Random) -> None:
    for _ in range(200):
        size, hosts = rng.randint(1, 6), [A, B, C][: rng.randint(1, 3)]
        plan, now = plan_for(rng.randint(1, 4)), 0.0
        members: Counter[str] = Counter()
        for step in range(400):
            host = rng.choice(hosts)
            plan.ask(host, now, size, members)
            assert members.total() + len(plan.coming) <= size
            if plan.coming:
                member_id, where = rng.choice(sorted(plan.coming.items()))
                fate = rng.random()
                if fate < 0.4:
                    plan.registered(member_id)
                    members[where] += 1
                elif fate < 0.6 and step < 200:
                    plan.failed(member_id, now)
            if members and step < 200 and rng.random() < 0.2:
                members -= Counter([rng.choice(sorted(members.elements()))])
            now = rng.choice([now, now + 0.1, plan.next_time(host, now)])
        assert members.total() == size, (size, hosts, members, plan.coming)
