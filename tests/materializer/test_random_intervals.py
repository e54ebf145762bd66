"""The main job's core, without Spark, under random materialization intervals: real flights by aircraft, the real
coordinator and TaskManagers over sockets, kills and restarts; every batch compares each state that it reads with a
plain fold.

The long form, 100 intervals over 20,000 flights each (eight minutes on two busy cores)::

    DSTL_TEST_SEED=1 python -m pytest -m long --timeout 7200 tests/materializer/test_random_intervals.py
"""

import asyncio
import random
import struct
from pathlib import Path

import pytest

import worlds.service
from dstl.demo.flights import load_flights
from dstl.errors import DstlError
from dstl.options import MaterializationOptions
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from dstl.taskmanager.task_manager import table_opener
from handles.checkpoint import referenced_objects
from worlds.service import Driver, Events, Model, retained, state_of, without_empty

pytest.importorskip("rocksdict")

AIRCRAFT = {"aircraft": 4}
_STATE = struct.Struct("<qqq")
Flights = list[tuple[bytes, int, int]]


def random_options(rng: random.Random) -> MaterializationOptions:
    """From many materializations per batch to one in many batches."""
    return MaterializationOptions(
        interval_s=10 ** rng.uniform(-4, 0.5),
        start_jitter_s=rng.choice((0.0, 0.05)),
        min_pause_s=rng.choice((0.0, 0.02)),
        min_log_bytes=rng.choice((0, 4 << 20)),
        file_bytes=rng.choice((1 << 16, 16 << 20)),
        min_live_share=rng.choice((0.0, 0.5, 0.9)),
        share_files=rng.random() < 0.7,
    )


def read_flights(count: int) -> Flights:
    table = load_flights().slice(0, count)
    rows = zip(*(table.column(name).to_pylist() for name in ("tail", "delay", "distance")), strict=True)
    return [(tail.encode(), delay or 0, distance) for tail, delay, distance in rows if tail is not None]


def after(flights: Flights, model: Model) -> Events:
    """The states that a batch writes: flights, minutes late and miles of each aircraft that flew."""
    known = model.get("aircraft", {})
    found: dict[bytes, tuple[int, int, int]] = {}
    for tail, delay, distance in flights:
        number, late, miles = found.get(tail) or _STATE.unpack(known.get(tail, bytes(_STATE.size)))
        found[tail] = (number + 1, late + delay, miles + distance)
    return {"aircraft": {tail: _STATE.pack(*each) for tail, each in found.items()}}


async def check_run(
    number: int, flights: Flights, batches: int, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> int:
    """Run the job once; returns how many checkpoints were the first to name a base."""
    rng = random.Random(number)
    kind = rng.choice(("heap", "rocksdb"))
    options = random_options(rng)
    monkeypatch.setattr(worlds.service.TaskManager, "materialization", options)
    monkeypatch.setattr(worlds.service.TaskManager, "open_table", staticmethod(table_opener(kind, directory)))
    store, model = MemoryStore(clock=SystemClock()), {}
    materialized = 0
    size, driver = rng.randrange(1, 4), None
    try:
        for batch in range(batches):
            if driver is None:
                driver = await Driver(
                    store, seed=rng.randrange(1 << 20), operators=AIRCRAFT, task_managers=size
                ).start()
            part = flights[len(flights) * batch // batches : len(flights) * (batch + 1) // batches]
            killer = None
            if rng.random() < 0.25:
                victim = rng.choice([m for m in driver.members.values() if m.member_id not in driver.lost])
                killer = asyncio.ensure_future(_kill_after(rng.uniform(0, 0.3), victim))
            for attempt in range(6):
                try:
                    await driver.run_batch(f"run-{batch}-{attempt}", batch, after(part, model), model)
                    break
                except DstlError:
                    assert attempt < 5, f"interval {number}: batch {batch} does not get through"
                    await asyncio.sleep(0.05)
            if killer is not None:
                await killer
            if rng.random() < 0.15:
                materialized += sum(report.materializations for report in driver.checkpoints)
                await driver.close()
                driver, size = None, rng.randrange(1, 4)
        found = await retained(store)
        assert without_empty(await state_of(found[-1], store)) == without_empty(model), (number, kind, options)
        names = {info.name async for info in store.list()}
        assert all(set(referenced_objects(checkpoint)) <= names for checkpoint in found)
        return materialized + (sum(report.materializations for report in driver.checkpoints) if driver else 0)
    finally:
        if driver is not None:
            await driver.close()


async def _kill_after(seconds: float, victim: worlds.service.TaskManager) -> None:
    await asyncio.sleep(seconds)
    await victim.kill()


@pytest.mark.parametrize("run", range(2))
async def test_random_materialization_intervals_make_no_difference(
    seed: int, run: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await check_run(seed * 10 + run, read_flights(3_000), 6, monkeypatch, tmp_path)


@pytest.mark.long
async def test_a_hundred_random_materialization_intervals_make_no_difference(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flights = read_flights(20_000)
    materialized = []
    for run in range(100):
        directory = tmp_path / str(run)
        directory.mkdir()
        materialized.append(await check_run(seed * 1000 + run, flights, 10, monkeypatch, directory))
        print(f"interval {run}: {materialized[-1]} materializations", flush=True)
    assert sum(each > 0 for each in materialized) > 50, "most runs had no base: this shows nothing"
