"""The virtual-time loop: asyncio's behaviour, none of its waiting."""

import asyncio
import random

import pytest

from tests.simulation.virtual_time import LoopClock, VirtualTimeLoop, run_in_virtual_time


def test_time_jumps_to_the_next_timer():
    async def work() -> tuple[float, float]:
        clock = LoopClock()
        began = clock.now()
        await clock.sleep(3600)
        return began, clock.now()

    assert run_in_virtual_time(work(), start=5.0) == (5.0, 3605.0)


def test_timers_of_one_time_fire_in_the_order_they_were_set():
    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        for number in range(20):
            loop.call_at(7.0, fired.append, number)
        await asyncio.sleep(8)
        return fired

    assert run_in_virtual_time(work()) == list(range(20))


def test_executor_work_runs_at_once_and_its_error_arrives():
    async def work() -> int:
        loop = asyncio.get_running_loop()
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        return await loop.run_in_executor(None, sum, [1, 2, 3])

    assert run_in_virtual_time(work()) == 6


def test_deadlock_raises_instead_of_hanging():
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualTimeLoop()
    task = loop.create_task(work())
    with pytest.raises(RuntimeError, match="deadlock"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def _interleaving(seed: int | None) -> list[int]:
    async def work() -> list[int]:
        order: list[int] = []

        async def step(number: int) -> None:
            for _ in range(3):
                await asyncio.sleep(0)
                order.append(number)

        await asyncio.gather(*(step(number) for number in range(6)))
        return order

    return run_in_virtual_time(work(), shuffle=None if seed is None else random.Random(seed))


def test_one_seed_is_one_schedule(seed):
    assert _interleaving(seed) == _interleaving(seed)
    assert _interleaving(None) == list(range(6)) * 3
    assert len({tuple(_interleaving(seed + i)) for i in range(20)}) > 1


def test_what_is_left_running_is_cancelled():
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("cancelled")

    async def work() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(forever())
        await asyncio.sleep(1)
        return task

    assert run_in_virtual_time(work()).cancelled()
    assert ended == ["cancelled"]


def test_advance_makes_timers_late():
    async def work() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        seen: list[float] = []
        loop.call_later(1.0, lambda: seen.append(loop.time()))
        loop.call_later(0.5, loop.advance, 4.0)
        await asyncio.sleep(2)
        return seen[0]

    assert run_in_virtual_time(work()) == 4.5
