"""Blocking code in a simulated world: it waits on virtual time, takes turns, and ends with its world."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.blocking import BlockingThreads, Wait
from tests.simulation.virtual_time import run_in_virtual_time, virtual


def in_a_world(work: Callable[[BlockingThreads], Awaitable[None]]) -> None:
    async def run() -> None:
        threads, before = BlockingThreads(), threading.active_count()
        await work(threads)
        threads.close()
        assert threading.active_count() == before

    run_in_virtual_time(run())


def test_blocking_code_waits_in_virtual_time_and_returns_or_raises() -> None:
    async def work(threads: BlockingThreads) -> None:
        loop = asyncio.get_running_loop()

        def sleeper(wait: Wait) -> float:
            began = loop.time()
            wait(asyncio.sleep(3600.0))
            return loop.time() - began

        def failing(wait: Wait) -> None:
            async def fail() -> None:
                await asyncio.sleep(1.0)
                raise ValueError("from the loop")

            with pytest.raises(ValueError, match="from the loop"):
                wait(fail())
            raise KeyError("from the thread")

        assert await threads.run(sleeper) == 3600.0
        with pytest.raises(KeyError, match="from the thread"):
            await threads.run(failing)

    in_a_world(work)


def test_one_of_the_loop_and_the_threads_runs_at_any_time_and_always_in_the_same_order() -> None:
    orders = []
    for _ in range(2):
        order: list[str] = []

        async def work(threads: BlockingThreads, order: list[str] = order) -> None:
            running = 0

            def code(name: str, pause: float) -> Callable[[Wait], None]:
                def run(wait: Wait) -> None:
                    nonlocal running
                    for step in range(20):
                        running += 1
                        assert running == 1
                        order.append(f"{name}{step}")
                        running -= 1
                        wait(asyncio.sleep(pause))

                return run

            await asyncio.gather(*(threads.run(code(f"t{n}-", 0.1 * (n % 3))) for n in range(8)))

        in_a_world(work)
        orders.append(order)
    assert orders[0] == orders[1]
    assert len(orders[0]) == 160


def test_code_that_waits_for_ever_unwinds_when_its_world_ends() -> None:
    unwound: list[str] = []

    async def work(threads: BlockingThreads) -> None:
        def code(wait: Wait) -> None:
            try:
                wait(asyncio.sleep(1e9))
            finally:
                # It has no connections any more either.
                try:
                    wait(asyncio.sleep(1.0))
                finally:
                    unwound.append("unwound")

        task = asyncio.ensure_future(threads.run(code))
        await asyncio.sleep(1.0)
        threads.end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    in_a_world(work)
    assert unwound == ["unwound"]


@virtual
async def test_a_thread_that_never_ended_fails_the_world() -> None:
    threads = BlockingThreads()
    task = asyncio.ensure_future(threads.run(lambda wait: wait(asyncio.sleep(1e9))))
    await asyncio.sleep(1.0)
    with pytest.raises(RuntimeError, match="1 threads of a simulated world never ended"):
        threads.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    threads.close()
