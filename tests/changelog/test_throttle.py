import asyncio
import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.throttle import ByteBudget, Reservation, Throttle
from dstl.errors import Closed
from dstl.metrics import MemoryRecorder
from dstl.runtime import LoopClock
from dstl.testing.virtual_time import run_in_virtual_time


def test_it_grants_until_the_limit():
    budget = ByteBudget(100)
    assert budget.ask(60).granted
    assert budget.ask(40).granted
    assert not budget.ask(1).granted
    assert budget.starving


def test_one_above_the_limit_goes_through_alone():
    budget = ByteBudget(100)
    assert budget.ask(1000).granted
    waiting = budget.ask(1)
    assert not waiting.granted
    budget.give_back(1000)
    assert budget.grant() == [waiting]


def test_a_large_one_is_not_starved_by_small_ones():
    budget = ByteBudget(100)
    budget.take(50)
    large = budget.ask(90)
    small = budget.ask(10)
    assert not small.granted
    budget.give_back(50)
    assert budget.grant() == [large, small]


def test_a_new_one_never_overtakes_or_grants_behind_the_throttles_back():
    """Found by the model: whoever is granted outside of ``grant`` is never woken."""
    budget = ByteBudget(100)
    budget.take(100)
    first = budget.ask(50)
    budget.give_back(100)
    second = budget.ask(50)
    assert (first.granted, second.granted) == (False, False)
    assert budget.grant() == [first, second]


def test_what_was_taken_without_asking_counts():
    budget = ByteBudget(100)
    budget.take(150)
    assert not budget.ask(1).granted


def test_ending_is_idempotent_and_leaves_the_queue():
    budget = ByteBudget(100)
    held, waiting = budget.ask(100), budget.ask(10)
    budget.end(waiting)
    budget.end(waiting)
    assert not budget.starving
    budget.end(held)
    budget.end(held)
    assert budget.used == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 150), st.just(None)), max_size=60), st.randoms(use_true_random=False))
def test_everyone_gets_through_in_order_and_the_sum_holds(steps, rng):
    budget = ByteBudget(100)
    held: list[Reservation] = []
    asked: list[Reservation] = []
    order: list[Reservation] = []
    for size in steps:
        if size is None and held:
            budget.end(held.pop(rng.randrange(len(held))))
        elif size is not None:
            wish = budget.ask(size)
            asked.append(wish)
            if wish.granted:
                held.append(wish)
                order.append(wish)
        granted = budget.grant()
        held += granted
        order += granted
        assert budget.used == sum(wish.nbytes for wish in held)
        assert budget.used <= 100 or sum(1 for wish in held if wish.nbytes) == 1
    while held:
        budget.end(held.pop())
        granted = budget.grant()
        held += granted
        order += granted
    assert order == asked
    assert budget.used == 0


def test_waiting_is_measured_and_ended_by_whoever_gives_back():
    async def main() -> None:
        budget, recorder, changes = ByteBudget(100), MemoryRecorder(), 0

        def changed() -> None:
            nonlocal changes
            changes += 1

        throttle = Throttle(budget, LoopClock(), recorder, changed)
        budget.take(100)

        async def append() -> float:
            async with throttle.reserve(10):
                return asyncio.get_running_loop().time()

        await asyncio.sleep(2)
        task = asyncio.create_task(append())
        await asyncio.sleep(3)
        assert changes == 1, "the storage must hear of it, to drain"
        budget.give_back(100)
        throttle.wake()
        assert await task == 5
        assert changes == 2, "and when the bytes are free again, to fill"
        assert recorder.counters["backpressureSeconds"] == 3
        assert recorder.counters["backpressuredAppends"] == 1
        assert budget.used == 0

    run_in_virtual_time(main())


def full_budget() -> tuple[ByteBudget, Throttle]:
    """A budget of 100 bytes, all taken, and its throttle."""
    budget = ByteBudget(100)
    budget.take(100)
    return budget, Throttle(budget, LoopClock(), MemoryRecorder(), lambda: None)


async def append_to(throttle: Throttle) -> None:
    async with throttle.reserve(10):
        pass


def test_a_cancelled_wait_leaves_nothing_behind():
    async def main() -> None:
        budget, throttle = full_budget()
        waiting, granted = (asyncio.create_task(append_to(throttle)) for _ in range(2))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.sleep(1)
        budget.give_back(100)
        throttle.wake()
        granted.cancel()  # granted, but not resumed yet
        await asyncio.wait([waiting, granted])
        assert not budget.starving
        assert budget.used == 0
        del waiting, granted  # a task that was cancelled remembers where
        gc.collect()
        assert sum(isinstance(each, Reservation) for each in gc.get_objects()) == 0

    run_in_virtual_time(main())


def test_a_wait_that_is_cancelled_as_its_turn_comes_lets_the_next_one_through():
    async def main() -> None:
        budget, throttle = full_budget()
        waiting, next_one = (asyncio.create_task(append_to(throttle)) for _ in range(2))
        await asyncio.sleep(1)
        waiting.cancel()  # its reservation is still in the queue
        budget.give_back(95)
        throttle.wake()
        await asyncio.wait([waiting])
        throttle.wake()
        await next_one
        assert budget.used == 5

    run_in_virtual_time(main())


def test_closing_fails_those_who_wait_and_those_who_come():
    async def main() -> None:
        budget, throttle = full_budget()
        task = asyncio.create_task(append_to(throttle))
        await asyncio.sleep(1)
        throttle.close()
        with pytest.raises(Closed, match="waited for memory"):
            await task
        with pytest.raises(Closed):
            await append_to(throttle)
        assert budget.used == 100

    run_in_virtual_time(main())
