import asyncio
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstl.changelog.throttle import ByteBudget
from dstl.errors import Closed
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.memory_recorder import MemoryRecorder


class Appends:
    """Appends that hold their bytes until they are told to end, and the order in which they have got them."""

    def __init__(self, taken: int = 0) -> None:
        self.recorder, self.changes = MemoryRecorder(), 0
        self.budget = ByteBudget(100, LoopClock(), self.recorder, self._changed)
        self.budget.take(taken)
        self.asked: list[int] = []
        self.granted: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._ends: dict[int, asyncio.Event] = {}

    def _changed(self) -> None:
        self.changes += 1

    async def begin(self, nbytes: int) -> int:
        number = len(self.tasks)
        self.asked.append(nbytes)
        self._ends[number] = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._hold(number, nbytes)))
        await asyncio.sleep(0)
        return number

    async def end(self, number: int) -> None:
        self._ends[number].set()
        await self.wake()

    async def wake(self) -> None:
        await asyncio.sleep(0)
        self.budget.wake()
        await asyncio.sleep(0)

    async def _hold(self, number: int, nbytes: int) -> None:
        async with self.budget.reserve(nbytes):
            self.granted.append(number)
            await self._ends[number].wait()


@virtual
@pytest.mark.parametrize(
    ("taken", "sizes", "granted"),
    [
        (0, (60, 40, 1), [0, 1]),  # until the limit
        (0, (1000, 1), [0]),  # above the limit: alone
        (50, (90, 10), []),  # a small one does not overtake a large one
        (150, (1,), []),  # what was taken without asking counts
    ],
)
async def test_bytes_are_granted_in_order_until_the_limit(
    taken: int, sizes: tuple[int, ...], granted: list[int]
) -> None:
    appends = Appends(taken)
    for size in sizes:
        await appends.begin(size)
    assert appends.granted == granted
    assert appends.budget.starving
    appends.budget.give_back(appends.budget.used - sum(sizes[each] for each in granted))
    for number in range(len(sizes)):
        await appends.wake()
        await appends.end(number)
    assert appends.granted == list(range(len(sizes)))
    assert appends.budget.used == 0


@virtual
async def test_a_new_one_does_not_overtake_one_that_could_be_granted_by_now() -> None:
    appends = Appends(taken=100)
    await appends.begin(50)
    appends.budget.give_back(100)
    await appends.begin(50)
    assert appends.granted == []
    await appends.wake()
    assert appends.granted == [0, 1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 150), st.sampled_from(["end", "cancel"])), max_size=60),
    st.integers(0, 1 << 32),
)
@virtual
async def test_everyone_gets_through_in_order_and_the_sum_holds(steps: list[int | str], seed: int) -> None:
    rng = random.Random(seed)
    appends = Appends()
    held: deque[int] = deque()
    gone: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            await appends.begin(step)
        elif step == "end" and held:
            at = rng.randrange(len(held))
            await appends.end(held[at])
            del held[at]
        elif step == "cancel" and appends.tasks:
            number = rng.randrange(len(appends.tasks))
            if not appends.tasks[number].done():
                appends.tasks[number].cancel()
                if number not in appends.granted:
                    gone.add(number)
        await appends.wake()
        held = deque(each for each in appends.granted if not appends.tasks[each].done())
        sizes = [appends.asked[each] for each in held]
        assert appends.budget.used == sum(sizes)
        assert appends.budget.used <= 100 or sum(size > 0 for size in sizes) == 1
    while held:
        await appends.end(held.popleft())
        await appends.wake()
        held = deque(each for each in appends.granted if not appends.tasks[each].done())
    assert appends.granted == [each for each in range(len(appends.tasks)) if each not in gone]
    assert appends.budget.used == 0


@virtual
async def test_waiting_is_measured_and_ended_by_whoever_gives_back() -> None:
    appends = Appends(taken=100)
    await appends.begin(10)
    assert appends.changes == 1, "the storage must hear of it, to drain"
    await asyncio.sleep(3)
    appends.budget.give_back(100)
    await appends.wake()
    assert appends.granted == [0]
    await appends.end(0)
    assert appends.changes == 2, "and when the bytes are free again, to fill"
    assert appends.recorder.counters == {"backpressureSeconds": 3, "backpressuredAppends": 1}
    assert appends.budget.used == 0


@virtual
@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_cancelled_wait_leaves_nothing_behind_and_lets_the_next_one_through(is_granted: bool) -> None:
    appends = Appends(taken=100)
    for _ in range(2):
        await appends.begin(10)
    if is_granted:  # and not resumed yet
        appends.budget.give_back(95)
        appends.budget.wake()
        appends.tasks[0].cancel()
    else:
        appends.tasks[0].cancel()
        appends.budget.give_back(95)
        appends.budget.wake()
    await asyncio.wait([appends.tasks[0]])
    await appends.wake()
    assert appends.granted == [1]
    await appends.end(1)
    assert (appends.budget.used, appends.budget.starving) == (5, False)


@virtual
async def test_closing_fails_those_who_wait_and_those_who_come() -> None:
    appends = Appends(taken=100)
    await appends.begin(10)
    appends.budget.close()
    with pytest.raises(Closed, match="waited for memory"):
        await appends.tasks[0]
    await appends.begin(10)
    with pytest.raises(Closed, match="shutting down"):
        await appends.tasks[1]
    assert (appends.budget.used, appends.budget.starving) == (100, False)
