"""Work ahead of its consumer: its order, its bounds, its errors and its end."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from dstl.errors import CorruptData, Unavailable
from dstl.store.prefetcher import BudgetLease, Prefetcher
from tests.simulation.virtual_time import run_in_virtual_time, virtual


class Work:
    """Takes an item's time and bytes, and says what was under way at once."""

    def __init__(self, seconds: dict[int, float] | None = None, makes: dict[int, int] | None = None) -> None:
        self.seconds = seconds or {}
        self.makes = makes or {}
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.ended: list[int] = []

    async def __call__(self, item: int, lease: BudgetLease) -> int:
        self.begun.append(item)
        self.running.add(item)
        try:
            await asyncio.sleep(self.seconds.get(item, 1.0))
            await lease.take(self.makes.get(item, 0))
            self.ended.append(item)
            return item
        finally:
            self.running.discard(item)


def test_results_come_in_the_order_of_their_items_whatever_ends_first(rng: random.Random) -> None:
    work = Work({item: rng.uniform(0.0, 9.0) for item in range(50)})

    async def run() -> list[int]:
        async with aclosing(Prefetcher(range(50), work, cost=lambda _: 1, max_bytes=7, max_count=5)) as ahead:
            return [result async for result in ahead]

    assert run_in_virtual_time(run()) == list(range(50))
    assert work.ended != sorted(work.ended)


@virtual
@pytest.mark.parametrize(("max_bytes", "max_count", "at_most"), [(30, None, 3), (1000, 4, 4), (1, None, 1)])
async def test_no_more_is_begun_than_the_bounds_allow(max_bytes: int, max_count: int | None, at_most: int) -> None:
    work = Work()
    ahead = Prefetcher(range(9), work, cost=lambda _: 10, max_bytes=max_bytes, max_count=max_count)
    async with aclosing(ahead):
        await asyncio.sleep(100.0)
        assert len(work.begun) == at_most
        assert await anext(ahead) == 0
        await asyncio.sleep(100.0)
        # What the caller has in its hands counts still for bytes, and no more for the number.
        assert len(work.begun) == at_most + (max_count is not None)
        assert [result async for result in ahead] == list(range(1, 9))


def test_the_next_result_comes_whatever_it_costs_and_makes() -> None:
    """The second item fits beside nothing, and the third makes more than there is room for."""
    work = Work(makes={0: 1, 2: 999})
    costs = [1, 10**9, 1, 1]

    async def run() -> list[int]:
        ahead = Prefetcher(range(4), work, cost=costs.__getitem__, max_bytes=10, max_count=9, max_taken=5)
        async with aclosing(ahead):
            return [result async for result in ahead]

    assert run_in_virtual_time(run()) == [0, 1, 2, 3]


@virtual
async def test_work_that_is_not_due_waits_for_room_for_what_it_makes() -> None:
    work = Work(makes={0: 4, 1: 3, 2: 3, 3: 3})
    async with aclosing(Prefetcher(range(4), work, cost=lambda _: 0, max_bytes=0, max_taken=7)) as ahead:
        await asyncio.sleep(50.0)
        assert work.ended == [0, 1]
        assert ahead.taken == 7
        assert await anext(ahead) == 0
        await asyncio.sleep(50.0)
        assert work.ended == [0, 1], "the caller holds the first result still"
        assert await anext(ahead) == 1
        await asyncio.sleep(50.0)
        assert work.ended == [0, 1, 2]
        assert [result async for result in ahead] == [2, 3]
        assert ahead.taken == 0


def test_what_an_attempt_has_taken_is_given_back_before_the_next_attempt() -> None:
    async def twice(item: int, lease: BudgetLease) -> int:
        for _ in range(2):
            lease.give_back()
            for _ in range(3):
                await lease.take(2)
        return lease.taken

    async def run() -> list[int]:
        async with aclosing(Prefetcher(range(3), twice, cost=lambda _: 0, max_bytes=0, max_taken=18)) as ahead:
            await asyncio.sleep(1.0)
            assert ahead.taken == 18
            return [result async for result in ahead]

    assert run_in_virtual_time(run()) == [6, 6, 6]


def test_an_error_comes_in_its_place_and_leaves_nothing_running() -> None:
    work = Work({3: 1000.0})

    async def failing(item: int, lease: BudgetLease) -> int:
        if item == 2:
            raise CorruptData("the third")
        return await work(item, lease)

    async def run() -> None:
        async with aclosing(Prefetcher(range(9), failing, cost=lambda _: 1, max_bytes=5)) as ahead:
            assert [await anext(ahead), await anext(ahead)] == [0, 1]
            with pytest.raises(CorruptData, match="the third"):
                await anext(ahead)
        assert not work.running
        assert 3 in work.begun
        assert len(asyncio.all_tasks()) == 1

    run_in_virtual_time(run())


def test_an_error_of_the_items_comes_after_all_results() -> None:
    async def items() -> AsyncGenerator[int]:
        yield 0
        yield 1
        raise Unavailable("no more")

    async def run() -> None:
        async with aclosing(Prefetcher(items(), Work(), cost=lambda _: 1, max_bytes=9)) as ahead:
            assert [await anext(ahead), await anext(ahead)] == [0, 1]
            with pytest.raises(Unavailable):
                await anext(ahead)

    run_in_virtual_time(run())


def test_leaving_early_closes_the_items_and_discards_what_nobody_took() -> None:
    discarded: list[int] = []
    closed = []
    work = Work()

    async def items() -> AsyncGenerator[int]:
        try:
            for item in range(100):
                yield item
        finally:
            closed.append(True)

    async def run() -> None:
        ahead = Prefetcher(items(), work, cost=lambda _: 1, max_bytes=4, discard=discarded.append)
        async with aclosing(ahead):
            assert await anext(ahead) == 0
            assert await anext(ahead) == 1
            await asyncio.sleep(0.5)
            assert work.running
        assert not work.running
        await ahead.aclose()
        assert len(asyncio.all_tasks()) == 1

    run_in_virtual_time(run())
    assert closed == [True]
    # Three beside the one that was returned last, and the one that waits for room.
    assert discarded == [2, 3, 4, 5]


def test_a_fault_of_abandoned_work_is_said_and_its_expected_failure_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def failing(item: int, lease: BudgetLease) -> int:
        if item == 1:
            raise Unavailable("expected")
        if item == 2:
            raise ZeroDivisionError("a fault of the program")
        return item

    async def run() -> None:
        async with aclosing(Prefetcher(range(3), failing, cost=lambda _: 1, max_bytes=9)) as ahead:
            assert await anext(ahead) == 0
            await asyncio.sleep(1.0)

    with caplog.at_level(logging.WARNING):
        run_in_virtual_time(run())
    assert len(caplog.records) == 1
    assert "a fault of the program" in caplog.text
