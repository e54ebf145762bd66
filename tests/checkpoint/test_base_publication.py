"""Bases are named by a record where no batch comes to name them."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.upkeep.cleaner import LiveDriver, clean
from dstl.checkpoint.upkeep.listing import list_checkpoints
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import DstlError
from dstl.options import MaterializationOptions
from dstl.rpc.messages import Begin
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.materialization import SlowBases
from worlds.service import TWO, Driver, Events, Model, retained, some_events, state_of, without_empty

BY_SIZE = MaterializationOptions(min_log_bytes=1, publish_within_s=60.0)
"""A base is due where the log is longer than a fifth of the state, and by nothing else in a test's time."""
RunBatch = Callable[[int, Events, Model], Awaitable[None]]


@contextlib.asynccontextmanager
async def open_run(store: ObjectStore, number: int) -> AsyncIterator[tuple[Driver, RunBatch]]:
    """A driver process with one run of the query."""
    async with Driver(store, seed=number, operators=TWO, task_managers=2) as driver:
        yield driver, lambda batch, events, model: driver.run_batch(f"run-{number}", batch, events, model)


@contextlib.asynccontextmanager
async def with_unnamed_bases(
    store: ObjectStore, rng: random.Random, model: Model
) -> AsyncIterator[tuple[Driver, RunBatch]]:
    """A run whose bases were finished after its second batch, so that no checkpoint names them."""
    async with open_run(store, 1) as (driver, run_batch):
        for batch in range(2):
            await run_batch(batch, some_events(rng, batch), model)
        await until_finished(driver)
        yield driver, run_batch


async def check(store: ObjectStore, model: Model, batch: int) -> None:
    """The newest checkpoint is that of the batch and is the model, and every reader is content with the location."""
    newest = (await retained(store))[-1]
    assert newest.batch_id == batch
    assert without_empty(await state_of(newest, store)) == without_empty(model)
    assert not (await verify_location(store, system_runtime())).problems
    rows = (await list_checkpoints(store, system_runtime()))["checkpoints"]
    assert [row["batch_id"] for row in rows] == sorted({row["batch_id"] for row in rows}), rows


async def nobody() -> tuple[str, ...]:
    """Return the writers that are alive."""
    return ()


async def until_finished(driver: Driver) -> None:
    """Every TaskManager has materialized what is due, and no checkpoint names it."""
    async with asyncio.timeout(20):
        for member in driver.members.values():
            manager = member.backend.tracker.manager
            while manager.running or len(manager.waiting()) < len(TWO):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def begin_a_task(driver: Driver, run: str, batch: int) -> None:
    """The first task of a batch begins, and no more comes of it."""
    async with contextlib.AsyncExitStack() as stack:
        coordinator = await driver._connect(stack, driver.service.address)
        await coordinator.call(Begin(driver.who(run, "counts", batch, 0).task, pid=1))


async def test_runs_of_one_batch_get_their_bases(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that log, storage and restores of a scheduled job grow for ever."""
    monkeypatch.setattr(Driver, "materialization", BY_SIZE)
    rng, store, model = random.Random(seed), MemoryStore(), Model()
    # So that none is finished before the only batch is.
    slow = SlowBases(store, 0.3)
    bases: list[int] = []
    for run in range(12):
        async with open_run(slow, run + 1) as (driver, run_batch):
            await run_batch(run, some_events(rng, run), model)
            await driver.service.bases.finish()
            assert "basesUnpublished" not in driver.recorder.sample().counters
        await check(store, model, run)
        await clean(
            store,
            ManifestLog(store, system_runtime()),
            grace_s=0.0,
            driver=LiveDriver(writer_ids=nobody, held=tuple),
            dry_run=False,
        )
        await check(store, model, run)
        bases.append(sum([info.name.endswith(".base") async for info in store.list()]))
        newest = (await retained(store))[-1]
        if run >= 4:
            # Of two generations, each a batch behind; a record holds the segments of two TaskManagers.
            assert newest.materialized
            assert len(newest.segments) <= 2 * 3
    assert max(bases) <= 60, f"storage grows with the runs: {bases}"


async def test_an_idle_query_publishes_and_goes_on(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that bases wait for the batch of the next hour."""
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 0.2}))
    rng, model = random.Random(seed), Model()
    # So that none is finished before its batch is.
    store = SlowBases(MemoryStore(), 1.0)
    async with open_run(store, 1) as (driver, run_batch):
        for batch in range(4):
            await run_batch(batch, some_events(rng, batch), model)
            made = len(driver.checkpoints)
            before = (await retained(store.inner))[-1]
            if batch:
                async with asyncio.timeout(20):
                    while (await retained(store.inner))[-1].checkpoint_id == before.checkpoint_id:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert (await retained(store.inner))[-1].materialized
            assert len(driver.checkpoints) == made
            await check(store.inner, model, batch)
        assert len(driver.restores) == 1, "every TaskManager has gone on from the record"
    async with open_run(store, 2) as (driver, run_batch):
        await run_batch(4, some_events(rng, 4), model)
        await check(store.inner, model, 4)


async def test_a_batch_that_begins_while_its_parent_is_being_replaced_builds_on_the_new_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that a checkpoint's parent is gone when it is assembled, and with it all state."""
    monkeypatch.setattr(Driver, "materialization", BY_SIZE)
    rng, model = random.Random(seed), Model()
    store = FaultyStore(SlowBases(MemoryStore(), 0.5), seed=seed)
    async with with_unnamed_bases(store, rng, model) as (driver, run_batch):
        store._latency = lambda verb, size, rng: 0.3 if verb == "put" else 0.0
        before = (await retained(store.inner))[-1]
        finishing = asyncio.create_task(driver.service.bases.finish())
        await asyncio.sleep(0.1)
        await run_batch(2, some_events(rng, 2), model)
        await finishing
        await check(store.inner, model, 2)
        parent = next(each for each in await retained(store.inner) if each.batch_id == 1)
        assert parent.checkpoint_id > before.checkpoint_id
        assert parent.materialized


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LATE_PUT])
@pytest.mark.parametrize("then", ["goes on", "ends"])
async def test_whatever_becomes_of_the_record_nothing_is_lost(
    seed: int, fault: Fault, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE)
    rng, model = random.Random(seed), Model()
    store = FaultyStore(SlowBases(MemoryStore(), 0.5), seed=seed)
    async with with_unnamed_bases(store, rng, model) as (driver, run_batch):
        driver.service._log._retries.attempts = 2
        store.rules.append(FaultRule(fault, "put", chance=1.0, only="manifests/", delay_s=0.05))
        await driver.service.bases.finish()
        store.rules.clear()
        expected, batch = 1, 2
        if then == "goes on":
            with contextlib.suppress(DstlError):
                # Where it is unknown what became of the record, only another run finds out.
                before = {uid: dict(values) for uid, values in model.items()}
                await run_batch(2, some_events(rng, 2), model)
                expected, batch, before = 2, 3, model
            model = before
    await check(store.inner, model, expected)
    async with open_run(store.inner, 2) as (driver, run_batch):
        await run_batch(batch, some_events(rng, batch), model)
        await driver.service.bases.finish()
        await check(store.inner, model, batch)
        assert (await retained(store.inner))[-1].materialized


async def test_what_the_end_of_a_run_cuts_off_is_counted_and_told(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 0.3}))
    rng, model = random.Random(seed), Model()
    store = FaultyStore(MemoryStore(), rules=[FaultRule(Fault.STUCK, "put", chance=1.0, only=".base")], seed=seed)
    async with open_run(store, 1) as (driver, run_batch):
        for batch in range(2):
            await run_batch(batch, some_events(rng, batch), model)
        await driver.service.bases.finish()
        assert driver.recorder.sample().counters["basesUnpublished"] == 2
    assert "raise materialization.publish_within_s" in caplog.text
    await check(store.inner, model, 1)


async def test_the_end_of_a_run_waits_for_nothing_where_nothing_is_due(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that every run of a scheduled job is held up, or writes a record, for bases that nobody makes."""
    off = MaterializationOptions(enabled=False, publish_within_s=0.2)
    for number, options in enumerate([MaterializationOptions(), off], 1):
        monkeypatch.setattr(Driver, "materialization", options)
        rng, store, model = random.Random(seed), InstrumentedStore(MemoryStore()), Model()
        async with open_run(store, number) as (driver, run_batch):
            await driver.service.bases.finish()
            await run_batch(0, some_events(rng, 0), model)
            await driver.service._cleaner.close()
            calls, began = store.totals.calls, asyncio.get_running_loop().time()
            await driver.service.bases.finish()
            assert asyncio.get_running_loop().time() - began < 1.0
            if options is off:
                await asyncio.sleep(0.3)
            assert store.totals.calls == calls
            assert "basesUnpublished" not in driver.recorder.sample().counters


async def test_a_task_manager_that_hangs_while_bases_are_named_holds_the_end_up_for_a_bounded_time(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 3.0}))
    monkeypatch.setattr("dstl.checkpoint.base_publication._ENDING_S", 0.5)
    rng, model = random.Random(seed), Model()
    store = SlowBases(MemoryStore(), 0.5)
    async with open_run(store, 1) as (driver, run_batch):
        for batch in range(2):
            await run_batch(batch, some_events(rng, batch), model)
        await driver.service.bases.close()
        await until_finished(driver)
        hung = next(iter(driver.members.values()))
        async with asyncio.timeout(10), hung.service._turn:
            await driver.service.bases.finish()
        assert driver.recorder.sample().counters["basesUnpublished"] == 2 * len(TWO)
    assert "their uploads are lost" in caplog.text
    await check(store.inner, model, 1)
    async with open_run(store.inner, 2) as (driver, run_batch):
        await run_batch(2, some_events(rng, 2), model)
        await driver.service.bases.finish()
        await check(store.inner, model, 2)


@pytest.mark.parametrize("how", ["a batch is cut off", "the store has refused before", "another driver"])
async def test_bases_that_cannot_be_named_while_the_query_runs_are_named_or_counted_at_its_end(
    seed: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE)
    rng, model = random.Random(seed), Model()
    store = FaultyStore(SlowBases(MemoryStore(), 0.5), seed=seed)
    async with with_unnamed_bases(store, rng, model) as (driver, _):
        bases, before = driver.service.bases, (await retained(store.inner))[-1]
        if how == "a batch is cut off":
            await begin_a_task(driver, "run-1", 2)
        elif how == "the store has refused before":
            driver.service._log._retries.attempts = 1
            store.rules.append(FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="manifests/"))
            await bases._look(0.0)
            store.rules.clear()
        else:
            await ManifestLog(store.inner, system_runtime()).fence("query-1")
        await bases.finish()
        lost = driver.recorder.sample().counters.get("basesUnpublished", 0)
        newest = (await retained(store.inner))[-1]
        if how == "the store has refused before":
            assert (lost, bool(newest.materialized)) == (0, True)
        else:
            assert (lost, newest.checkpoint_id) == (2 * len(TWO), before.checkpoint_id)
        await check(store.inner, model, 1)
