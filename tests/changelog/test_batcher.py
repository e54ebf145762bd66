import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.batcher import Batcher, SealReason
from dstl.options import BatchingOptions

OPTIONS = BatchingOptions(persist_delay_s=0.010, persist_size_threshold=1000, preemptive_persist_threshold=500)


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(OPTIONS)


def test_nothing_is_sealed_before_anybody_asks(batcher: Batcher):
    batcher.update("a", held=100, asked=0, now=0.0)
    assert batcher.decide(100.0) is None
    assert batcher.deadline(100.0) is None


def test_it_seals_at_once_when_every_log_with_data_has_asked(batcher: Batcher):
    batcher.update("a", held=100, asked=100, now=0.0)
    batcher.update("b", held=50, asked=0, now=0.0)
    assert batcher.decide(0.0) is None
    batcher.update("b", held=50, asked=50, now=0.0)
    decision = batcher.decide(0.0)
    assert decision is not None
    assert (set(decision.asked), decision.whole, decision.reason) == ({"a", "b"}, (), SealReason.ALL_ASKED)


def test_it_does_not_wait_for_a_log_without_data(batcher: Batcher):
    batcher.update("idle", held=0, asked=0, now=0.0)
    batcher.update("a", held=100, asked=100, now=0.0)
    assert batcher.decide(0.0) is not None


def test_it_waits_for_others_until_the_oldest_ask_is_old_enough(batcher: Batcher):
    batcher.update("idle", held=1, asked=0, now=0.0)
    batcher.update("a", held=100, asked=100, now=1.0)
    batcher.update("b", held=100, asked=100, now=1.008)
    assert batcher.deadline(1.0) == pytest.approx(1.010)
    assert batcher.decide(1.009) is None
    decision = batcher.decide(1.010)
    assert decision is not None
    assert (set(decision.asked), decision.reason) == ({"a", "b"}, SealReason.DELAY)


def test_it_seals_at_once_when_enough_bytes_are_asked_for(batcher: Batcher):
    batcher.update("idle", held=400, asked=0, now=0.0)
    for name in ("a", "b"):
        batcher.update(name, held=450, asked=450, now=0.0)
    assert batcher.decide(0.0) is None
    batcher.update("c", held=450, asked=450, now=0.0)
    decision = batcher.decide(0.0)
    assert decision is not None
    assert decision.reason is SealReason.SIZE


def test_the_size_is_that_of_what_is_asked_for_and_is_reached_exactly(batcher: Batcher):
    batcher.update("idle", held=400, asked=0, now=0.0)
    batcher.update("a", held=5000, asked=400, now=0.0)
    batcher.update("b", held=599, asked=599, now=0.0)
    assert batcher.decide(0.0) is None
    batcher.update("b", held=600, asked=600, now=0.0)
    decision = batcher.decide(0.0)
    assert decision is not None
    assert decision.reason is SealReason.SIZE


def test_it_counts_the_logs_that_wait_for_a_seal(batcher: Batcher):
    for name, held, asked in (("idle", 100, 0), ("a", 100, 100), ("b", 500, 0)):
        batcher.update(name, held=held, asked=asked, now=0.0)
    assert batcher.queued == 2
    batcher.update("a", held=0, asked=0, now=0.0)
    assert batcher.queued == 1


def test_a_checkpoint_of_everybody_does_not_wait(batcher: Batcher):
    batcher.update("idle", held=1, asked=0, now=0.0)
    batcher.update("a", held=100, asked=100, now=0.0)
    decision = batcher.decide(0.0, all_asked=True)
    assert decision is not None
    assert (decision.asked, decision.reason) == (("a",), SealReason.ALL_ASKED)


def test_a_log_above_the_preemptive_threshold_is_sealed_whole_without_being_asked(batcher: Batcher):
    batcher.update("idle", held=1, asked=0, now=0.0)
    batcher.update("a", held=500, asked=0, now=0.0)
    decision = batcher.decide(0.010)
    assert decision is not None
    assert (decision.asked, decision.whole) == ((), ("a",))


def test_what_nobody_waits_for_pauses_after_a_failure_longer_each_time(batcher: Batcher):
    batcher.update("a", held=500, asked=0, now=0.0)
    pauses = []
    now = 0.0
    for _ in range(9):
        batcher.failed(now)
        assert batcher.decide(now) is None
        due = batcher.deadline(now)
        assert due is not None
        assert batcher.decide(due) is not None
        pauses.append(due - now)
        now = due
    assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert pauses[-1] == pytest.approx(Batcher.LONGEST_PAUSE_S)
    batcher.failed(now)
    batcher.succeeded()
    assert batcher.decide(now) is not None
    batcher.failed(now)
    assert batcher.deadline(now) == pytest.approx(now + Batcher.FIRST_PAUSE_S)


def test_a_persist_is_not_held_back_by_failures(batcher: Batcher):
    batcher.failed(0.0)
    batcher.update("a", held=100, asked=100, now=0.0)
    assert batcher.decide(0.0) is not None


def test_memory_pressure_seals_everything_once_nothing_is_on_its_way(batcher: Batcher):
    batcher.update("a", held=100, asked=0, now=0.0)
    batcher.update("b", held=100, asked=0, now=0.0)
    assert batcher.decide(0.0, starving=True, draining=True) is None
    decision = batcher.decide(0.0, starving=True)
    assert decision is not None
    assert (set(decision.whole), decision.reason) == ({"a", "b"}, SealReason.MEMORY)


def test_memory_pressure_on_a_broken_store_is_tried_again_at_the_deadline(batcher: Batcher):
    batcher.update("a", held=100, asked=0, now=0.0)
    batcher.failed(0.0)
    assert batcher.decide(0.0, starving=True) is None
    due = batcher.deadline(0.0, starving=True)
    assert due is not None
    assert batcher.decide(due, starving=True) is not None


_UPDATES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 700), st.integers(0, 700), st.sampled_from([0.0, 0.004, 0.02])),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(updates=_UPDATES, failures=st.integers(0, 3))
def test_no_ask_is_ever_forgotten(updates: list[tuple[str, int, int, float]], failures: int):
    """Whatever came before: at the deadline, and not before it is due by some rule, every ask is sealed."""
    batcher = Batcher(OPTIONS)
    now = 0.0
    waiting: dict[str, float] = {}
    for name, held, asked, step in updates:
        now += step
        asked = min(held, asked)
        batcher.update(name, held=held, asked=asked, now=now)
        if asked:
            waiting.setdefault(name, now)
        else:
            waiting.pop(name, None)
    for _ in range(failures):
        batcher.failed(now)
    if not waiting:
        return
    due = batcher.deadline(now)
    assert due is not None
    assert due <= min(waiting.values()) + OPTIONS.persist_delay_s + 1e-9
    decision = batcher.decide(max(now, due))
    assert decision is not None
    assert set(waiting) <= set(decision.asked) | set(decision.whole)
