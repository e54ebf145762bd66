"""Budget, breaker and pause of hedging, by the number: what they are for is in ``test_hedging.py``."""

import pytest

from dstl.changelog.upload.hedge_limits import CircuitBreaker, HedgeBudget, ThrottlePause


@pytest.mark.parametrize(("burst", "tokens"), [(10.0, 2.0), (1.0, 1.0)])
def test_a_budget_begins_with_two_hedges_or_a_burst_of_fewer(burst: float, tokens: float) -> None:
    budget = HedgeBudget(share=0.1, burst=burst)
    assert budget.tokens == tokens
    assert budget.refusal() is None
    budget.pay(0)
    assert budget.tokens == tokens - 1


def test_bytes_are_paid_from_the_first_request_on() -> None:
    budget = HedgeBudget(share=0.1, burst=10.0)
    budget.pay(1)
    assert (budget.tokens, budget.refusal()) == (1.0, "bytes")
    budget.pay(1)
    assert budget.refusal() == "budget"


@pytest.mark.parametrize(("paid", "refusal"), [(202, None), (203, "bytes")])
def test_bytes_are_saved_up_to_a_burst_of_objects_of_the_mean_size(paid: int, refusal: str | None) -> None:
    budget = HedgeBudget(share=1.0, burst=2.0)
    budget.earn(100)
    budget.earn(200)  # the mean moves by a hundredth, to 101
    budget.pay(paid)
    assert (budget.tokens, budget.refusal()) == (1.0, refusal)


@pytest.mark.parametrize(("paid", "refusal"), [(200, None), (201, "bytes")])
def test_the_first_put_gives_the_first_hedges_their_bytes(paid: int, refusal: str | None) -> None:
    budget = HedgeBudget(share=0.0, burst=10.0)
    budget.earn(100)
    budget.pay(paid)
    assert (budget.tokens, budget.refusal()) == (1.0, refusal)


def test_debt_is_at_most_a_burst_of_the_mean_size_or_of_what_is_paid() -> None:
    budget = HedgeBudget(share=1.0, burst=2.0)
    budget.earn(100)
    budget.pay(1000)  # 200 - 1000, and at most 2 x 1000
    budget.pay(10)  # at most 2 x 100
    refusals = []
    for _ in range(3):
        budget.earn(100)
        refusals.append(budget.refusal())
    assert refusals == ["bytes", None, None]


def test_a_portion_lessens_what_is_earned_and_voiding_leaves_debts() -> None:
    budget = HedgeBudget(share=0.5, burst=10.0)
    budget.earn(100, portion=0.5)
    assert budget.tokens == 2.25
    budget.void()
    assert budget.tokens == 0.0
    budget.pay(100)
    budget.void()
    assert budget.tokens == -1.0
    for _ in range(20):
        budget.pay(100)
    assert budget.tokens == -10.0


def test_a_breaker_is_closed_at_first_and_opens_at_three_in_a_row() -> None:
    breaker = CircuitBreaker()
    opened = []
    for _ in range(3):
        opened.append(breaker.is_open)
        breaker.count(True, burst=0, threshold=0.5)
    assert opened == [False] * 3
    assert breaker.is_open
    assert breaker.share == 0.5 * 1.01


@pytest.mark.parametrize(("burst", "share"), [(0, 1 / 32), (16, 1 / 32), (20, 1 / 40)])
def test_each_attempt_counts_for_a_32nd_or_for_half_a_burst(burst: int, share: float) -> None:
    breaker = CircuitBreaker()
    breaker.count(True, burst=burst, threshold=share)
    assert breaker.share == share
    assert not breaker.is_open, "the threshold itself opens nothing"


@pytest.mark.parametrize(("threshold", "is_open"), [(2 * 31 / 32, True), (2.2, False)])
def test_a_breaker_closes_below_half_its_threshold(threshold: float, is_open: bool) -> None:
    breaker = CircuitBreaker()
    breaker.count(True, burst=0, threshold=0.01)
    assert breaker.is_open
    breaker.share = 1.0
    breaker.count(False, burst=0, threshold=threshold)
    assert breaker.share == 31 / 32
    assert breaker.is_open is is_open


def test_a_row_ends_with_one_that_is_in_time() -> None:
    breaker = CircuitBreaker()
    for outlived in (True, True, False, True, True):
        breaker.count(outlived, burst=0, threshold=0.5)
    assert not breaker.is_open
    longer = CircuitBreaker()
    for _ in range(5):
        longer.count(True, burst=17, threshold=0.5)  # a burst of 17 makes it six
    assert not longer.is_open
    longer.count(True, burst=17, threshold=0.5)
    assert longer.is_open


@pytest.mark.parametrize(("later", "storm", "until"), [(0.0, 2, 3.0), (9.9, 2, 12.9), (10.0, 1, 12.0), (-0.1, 1, 1.9)])
def test_a_storm_is_what_follows_within_ten_seconds_of_a_pause(later: float, storm: int, until: float) -> None:
    pause = ThrottlePause(first_s=1.0)
    assert (pause.storm, pause.until) == (0, float("-inf"))
    pause.throttled(0.0)
    assert (pause.storm, pause.until) == (1, 1.0)
    pause.throttled(1.0 + later)
    assert (pause.storm, pause.until) == (storm, pytest.approx(until))


def test_pauses_double_seven_times() -> None:
    pause, now = ThrottlePause(first_s=1.0), 0.0
    seen = []
    for _ in range(9):
        pause.throttled(now)
        seen.append(pause.until - now)
        now = pause.until
    assert seen == [1, 2, 4, 8, 16, 32, 64, 64, 64]


def test_trust_is_a_quarter_for_each_level_and_comes_back_a_level_at_a_time() -> None:
    pause = ThrottlePause(first_s=1.0)
    # A process begins on level 1, the end of which is ten seconds away.
    assert [pause.portion(now) for now in (0.0, 10.0, 10.1)] == [0.25, 0.25, 1.0]
    for now, portion in ((100.0, 1 / 4), (101.0, 1 / 16), (103.0, 1 / 64), (107.0, 1 / 256), (115.0, 1 / 256)):
        pause.throttled(now)
        assert pause.portion(now) == portion
    back = 115.0
    for level in (4, 3, 2, 1):
        back += 60.0 * 2**level
        assert (pause.portion(back), pause.portion(back + 0.1)) == (0.25**level, 0.25 ** (level - 1))


def test_trust_that_came_back_unseen_counts_when_it_is_lost_again() -> None:
    pause = ThrottlePause(first_s=1.0)
    pause.throttled(0.0)
    pause.throttled(1e6)
    assert pause.portion(1e6) == 0.25
