"""Repeated calls: what is repeated, how often, and with which pauses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from dstl.errors import CorruptData, MissingState, Unavailable
from dstl.store.retry_policy import RetryPolicy
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime


def failing(*errors: Exception) -> tuple[Callable[[], Awaitable[int]], list[int]]:
    left, calls = list(errors), [0]

    async def call() -> int:
        calls[0] += 1
        if left:
            raise left.pop(0)
        return 7

    return call, calls


def retries(seed: int, attempts: int = 4) -> RetryPolicy:
    return RetryPolicy(seeded_runtime(seed), attempts=attempts, longest_s=0.3)


def test_a_store_that_answers_late_is_waited_for_with_growing_bounded_pauses(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    call, calls = failing(*[Unavailable("try again")] * 3)

    async def measured() -> float:
        clock = LoopClock()
        began = clock.now()
        assert await retries(seed).repeat(call, "reading") == 7
        return clock.now() - began

    took = run_in_virtual_time(measured())
    assert calls == [4]
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once, not three times"
    assert 0.5 * (0.1 + 0.2 + 0.3) <= took <= 0.1 + 0.2 + 0.3


def test_the_last_attempts_error_is_raised_and_nothing_is_tried_after_it(seed: int) -> None:
    for repeat in (lambda p, c: p.repeat(c, "reading"), lambda p, c: p.read(c)):
        call, calls = failing(*[Unavailable("try again")] * 9)
        with pytest.raises(Unavailable):
            run_in_virtual_time(repeat(retries(seed), call))
        assert calls == [4]


def test_damage_is_read_once_more_and_no_more(seed: int) -> None:
    call, calls = failing(CorruptData("on the way"))
    assert run_in_virtual_time(retries(seed).read(call)) == 7
    assert calls == [2]
    call, calls = failing(CorruptData("once"), Unavailable("between"), CorruptData("again"))
    with pytest.raises(CorruptData, match="again"):
        run_in_virtual_time(retries(seed).read(call))
    assert calls == [3]


def test_what_no_repetition_mends_is_raised_at_once(seed: int) -> None:
    call, calls = failing(CorruptData("a call that does not check has no second chance"))
    with pytest.raises(CorruptData):
        run_in_virtual_time(retries(seed).repeat(call, "reading"))
    assert calls == [1]
    call, calls = failing(MissingState("gone"))
    with pytest.raises(MissingState):
        run_in_virtual_time(retries(seed).read(call))
    assert calls == [1]
