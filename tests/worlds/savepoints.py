"""A job with two operators whose checkpoints are saved, and its store's contents."""

from __future__ import annotations

from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from tests.simulation.virtual_time import seeded_runtime
from worlds.files import HastyClock
from worlds.service import Job, Model, copy_of


def a_runtime(seed: int = 1) -> Runtime:
    return seeded_runtime(seed, HastyClock())


_jobs: dict[tuple[int, int, bool], tuple[dict[str, bytes], list[Model]]] = {}


async def a_job(store: ObjectStore, seed: int, batches: int = 4, *, inlined: bool = True) -> list[Model]:
    """Fill a store as a real job does, and return the job's state after each batch. Run once for all tests."""
    if (seed, batches, inlined) not in _jobs:
        _jobs[seed, batches, inlined] = await _run_job(MemoryStore(), seed, batches, inlined)
    objects, states = _jobs[seed, batches, inlined]
    for name, data in objects.items():
        await store.put(name, data)
    return [copy_of(state) for state in states]


async def _run_job(store: ObjectStore, seed: int, batches: int, inlined: bool) -> tuple[dict[str, bytes], list[Model]]:
    job, states = Job(seed, store, repeat=10), []
    async with job.driver(**({} if inlined else {"inline_threshold": 0})) as driver:
        for batch in range(batches):
            await driver.run_batch("run-1", batch)
            states.append(copy_of(job.model))
    return await contents(store), states


async def contents(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    return {info.name: await store.get(info.name) async for info in store.list(prefix)}


async def replace(store: ObjectStore, name: str, data: bytes) -> None:
    await store.delete([name])
    await store.put(name, data)
