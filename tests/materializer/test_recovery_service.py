"""Materialization under the real coordinator, over real sockets: batches, lost TaskManagers, rescaling, deletions."""

import asyncio
import random

import pytest

import worlds.service
from dstl.options import MaterializationOptions
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from handles.checkpoint import referenced_objects
from materializer.restore.progress import RestoreStatus
from worlds.service import Driver, Events, Model, retained, state_of, without_empty

EAGER = MaterializationOptions(interval_s=1e-6, start_jitter_s=0, min_pause_s=0, file_bytes=1 << 16)
TWO = {"counts": 4, "sums": 3}


@pytest.fixture(autouse=True)
def _materializing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds.service.TaskManager, "materialization", EAGER)


def _events(rng: random.Random, batch: int) -> Events:
    def value(n: int) -> bytes | None:
        return None if rng.random() < 0.15 else f"{batch}/{n}".encode()

    return {uid: {f"key-{rng.randrange(60)}".encode(): value(n) for n in range(25)} for uid in TWO}


async def _check(store: MemoryStore, model: Model) -> None:
    found = await retained(store)
    assert without_empty(await state_of(found[-1], store)) == without_empty(model)
    names = {info.name async for info in store.list()}
    for checkpoint in found:
        assert set(referenced_objects(checkpoint)) <= names, "something that a retained checkpoint needs was deleted"


@pytest.mark.parametrize("task_managers", [1, 3])
async def test_a_long_run_stays_short_and_restores(seed: int, task_managers: int) -> None:
    store, model, rng = MemoryStore(clock=SystemClock()), {}, random.Random(seed)
    driver = await Driver(store, seed=seed, operators=TWO, task_managers=task_managers).start()
    try:
        for batch in range(25):
            await driver.run_batch("run", batch, _events(rng, batch), model)
            await asyncio.sleep(0.01)
        newest = (await retained(store))[-1]
        assert len(newest.segments) < 20, "the log was never truncated"
        assert sum(report.materializations for report in driver.checkpoints) >= 4
        assert driver.checkpoints[-1].estimated_recovery_seconds > 0
        await _check(store, model)
    finally:
        await driver.close()
    driver = await Driver(store, seed=seed + 1, operators=TWO, task_managers=4 - task_managers).start()
    try:
        for batch in range(25, 32):
            await driver.run_batch("run-2", batch, _events(rng, batch), model)
            await asyncio.sleep(0.01)
        await _check(store, model)
    finally:
        await driver.close()


async def test_a_task_manager_is_lost_between_batches_again_and_again(seed: int) -> None:
    store, model, rng = MemoryStore(clock=SystemClock()), {}, random.Random(seed)
    driver = await Driver(store, seed=seed, operators=TWO, task_managers=2).start()
    try:
        for batch in range(16):
            await driver.run_batch("run", batch, _events(rng, batch), model)
            await asyncio.sleep(rng.choice((0.0, 0.01)))
            if rng.random() < 0.3:
                victim = rng.choice([m for m in driver.members.values() if m.member_id not in driver.lost])
                await victim.kill()
        await _check(store, model)
    finally:
        await driver.close()


async def test_a_driver_restart_in_the_same_process_keeps_bases(seed: int) -> None:
    store, model, rng = MemoryStore(clock=SystemClock()), {}, random.Random(seed)
    driver = await Driver(store, seed=seed, operators=TWO).start()
    try:
        batch = 0
        for run in range(4):
            for _ in range(5):
                await driver.run_batch(f"run-{run}", batch, _events(rng, batch), model)
                await asyncio.sleep(0.01)
                batch += 1
        await _check(store, model)
        assert (await retained(store))[-1].materialized
    finally:
        await driver.close()


class SlowStore(MemoryStore):
    """Answers reads of bases and segments after a while, once it is told to."""

    delay_s = 0.0

    async def get(self, name: str, *rest: object) -> bytes:
        if not name.startswith("manifests"):
            await asyncio.sleep(self.delay_s)
        return await super().get(name, *rest)  # type: ignore[arg-type]


async def test_the_driver_is_told_how_far_a_restore_has_come(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that a long recovery looks like a hang."""
    monkeypatch.setattr("dstl.checkpoint.fleet.restore_watch._INTERVAL_S", 0.01)
    store, model, rng = SlowStore(clock=SystemClock()), {}, random.Random(seed)
    driver = await Driver(store, seed=seed, operators=TWO, task_managers=2).start()
    try:
        for batch in range(12):
            await driver.run_batch("run", batch, _events(rng, batch), model)
            await asyncio.sleep(0.01)
    finally:
        await driver.close()
    store.delay_s = 0.05
    told: list[RestoreStatus] = []

    def listen(status: RestoreStatus, /) -> None:
        told.append(status)
        raise RuntimeError("a listener's own fault")  # it must not harm the restore

    driver = await Driver(store, seed=seed + 1, operators=TWO, task_managers=2, on_progress=listen).start()
    try:
        await driver.run_batch("run-2", 12, _events(rng, 12), model)
        await _check(store, model)
        assert told[-1].finished
        assert told[-1].done == told[-1].total > 0
        assert set(told[-1].operators) == set(TWO)
        assert any(not status.finished for status in told), "nobody was told before the end"
        assert [status.done for status in told] == sorted(status.done for status in told)
        (report,) = driver.restores
        assert report.bytes == told[-1].done
    finally:
        await driver.close()
