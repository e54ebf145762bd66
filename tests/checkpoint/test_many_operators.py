"""One coordinator with many operators of many partitions: a checkpoint of all of them, and what it costs."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dstl.checkpoint.manifest.format import manifest_name
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.messages import Acknowledgement, Begin, OpenAttempt
from dstl.store.memory import MemoryStore
from worlds.service import Driver, retained

TOGETHER = 200
"""Tasks at once, each with a connection, as the workers of a large cluster."""


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


async def one_checkpoint(operators: int, parallelism: int, batches: int = 2) -> None:
    store = MemoryStore()
    names = {f"operator-{number:03d}": parallelism for number in range(operators)}
    driver = Driver(store, seed=1, operators=names, max_parallelism=256)
    await driver.start()
    before = resident_mb()
    try:
        async with AsyncExitStack() as stack:
            (member,) = driver.members.values()
            workers: asyncio.Queue[tuple[AsyncConnection, AsyncConnection]] = asyncio.Queue()
            for _ in range(TOGETHER):
                pair = [
                    await AsyncConnection.open(address, driver.secret)
                    for address in (driver.service.address, member.address)
                ]
                for connection in pair:
                    stack.callback(connection.close)
                workers.put_nowait((pair[0], pair[1]))

            async def run(operator: str, slot: int, batch: int) -> None:
                coordinator, state = worker = await workers.get()
                who = driver.who("run", operator, batch, slot)
                try:
                    begun = await coordinator.call(Begin(who.task, pid=who.attempt))
                    await state.call(OpenAttempt(operator, who.attempt, batch, begun.parent, parallelism))
                    await coordinator.call(Acknowledgement(who.task, None))
                finally:
                    workers.put_nowait(worker)

            for batch in range(batches):
                await driver.plan("run", batch)
                started = time.process_time()
                await asyncio.gather(*(run(name, slot, batch) for name in names for slot in range(parallelism)))
                seconds = time.process_time() - started
                await driver.commit("run", batch)
                tasks = operators * parallelism
                print(f"batch {batch}: {tasks} tasks, {1e6 * seconds / tasks:.0f} us of CPU each")
    finally:
        await driver.close()
    newest = (await retained(store))[-1]
    assert newest.batch_id == batches - 1
    assert len(newest.operators) == operators
    assert len(driver.checkpoints) == batches
    assert len(await store.get(manifest_name(newest.checkpoint_id))) < 2_000 + 300 * operators
    assert resident_mb() - before < 500


async def test_20_operators_of_50_partitions() -> None:
    await one_checkpoint(20, 50)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_200_operators_of_200_partitions() -> None:
    await one_checkpoint(200, 200)
