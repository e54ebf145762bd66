"""Bases are named by a record where no batch comes to name them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.upkeep.cleaner import LiveDriver, clean
from dstl.checkpoint.upkeep.listing import list_checkpoints
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import DstlError
from dstl.options import MaterializationOptions
from dstl.rpc.messages import Begin
from dstl.runtime import system_runtime
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.materialization import SlowBases
from worlds.service import TWO, Driver, Job, check_durable, retained
from worlds.waiting import until

BY_SIZE = MaterializationOptions(min_log_bytes=1, publish_within_s=60.0)
"""A base is due where the log is longer than a fifth of the state, and by nothing else in a test's time."""


@pytest.fixture(autouse=True)
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE)


@contextlib.asynccontextmanager
async def with_unnamed_bases(job: Job) -> AsyncIterator[Driver]:
    """A run whose bases were finished after its second batch, so that no checkpoint names them."""
    job.store = FaultyStore(SlowBases(MemoryStore(), 0.5), seed=job.seed)
    async with job.driver(task_managers=2) as driver:
        await driver.run_batches("run-1", range(2))
        await until_finished(driver)
        yield driver


async def newest(job: Job) -> CompletedCheckpoint:
    """Return the newest checkpoint, whatever faults the store has."""
    return (await retained(job.store.inner))[-1]


async def check(job: Job, batch: int) -> None:
    """The newest checkpoint is that of the batch and is the model, and every reader is content with the location."""
    store = job.store.inner
    await check_durable(store, job.model, batch)
    assert not (await verify_location(store, system_runtime())).problems
    rows = (await list_checkpoints(store, system_runtime()))["checkpoints"]
    assert [row["batch_id"] for row in rows] == sorted({row["batch_id"] for row in rows}), rows


async def nobody() -> tuple[str, ...]:
    """Return the writers that are alive."""
    return ()


async def until_finished(driver: Driver) -> None:
    """Every TaskManager has materialized what is due, and no checkpoint names it."""
    managers = [member.backend.tracker.manager for member in driver.members.values()]
    await until(lambda: all(not m.running and len(m.waiting()) >= len(TWO) for m in managers), "every base")


async def test_runs_of_one_batch_get_their_bases(job: Job) -> None:
    """Prevents that log, storage and restores of a scheduled job grow for ever."""
    store = MemoryStore()
    # So that none is finished before the only batch is.
    job.store = SlowBases(store, 0.3)
    bases: list[int] = []
    for run in range(8):
        async with job.driver(task_managers=2) as driver:
            await driver.run_batch(job.run, run)
            await driver.service.bases.finish()
            assert "basesUnpublished" not in driver.recorder.sample().counters
        await check(job, run)
        left = LiveDriver(writer_ids=nobody, held=tuple)
        await clean(store, ManifestLog(store, system_runtime()), grace_s=0.0, driver=left, dry_run=False)
        await check(job, run)
        bases.append(len(await job.names(suffix=".base")))
        if run >= 4:
            # Of two generations, each a batch behind; a record holds the segments of two TaskManagers.
            assert (await newest(job)).materialized
            assert len((await newest(job)).segments) <= 2 * 3
    assert max(bases) <= 60, f"storage grows with the runs: {bases}"


async def test_an_idle_query_publishes_and_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that bases wait for the batch of the next hour."""
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 0.2}))
    # So that none is finished before its batch is.
    job.store = SlowBases(MemoryStore(), 1.0)
    async with job.driver(task_managers=2) as driver:
        for batch in range(4):
            await driver.run_batch(job.run, batch)
            made = len(driver.checkpoints)
            before = await newest(job)
            if batch:
                async with asyncio.timeout(20):
                    while (await newest(job)).checkpoint_id == before.checkpoint_id:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert (await newest(job)).materialized
            assert len(driver.checkpoints) == made
            await check(job, batch)
        assert len(driver.restores) == 1, "every TaskManager has gone on from the record"
    async with job.driver(task_managers=2) as driver:
        await driver.run_batch(job.run, 4)
        await check(job, 4)


async def test_a_batch_that_begins_while_its_parent_is_being_replaced_builds_on_the_new_one(job: Job) -> None:
    """Prevents that a checkpoint's parent is gone when it is assembled, and with it all state."""
    async with with_unnamed_bases(job) as driver:
        job.store._latency = lambda verb, size, rng: 0.3 if verb == "put" else 0.0
        before = await newest(job)
        finishing = asyncio.create_task(driver.service.bases.finish())
        await asyncio.sleep(0.1)
        await driver.run_batch(job.run, 2)
        await finishing
        await check(job, 2)
        parent = next(each for each in await retained(job.store.inner) if each.batch_id == 1)
        assert parent.checkpoint_id > before.checkpoint_id
        assert parent.materialized


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LATE_PUT])
@pytest.mark.parametrize("then", ["goes on", "ends"])
async def test_whatever_becomes_of_the_record_nothing_is_lost(job: Job, fault: Fault, then: str) -> None:
    batch = 2
    async with with_unnamed_bases(job) as driver:
        driver.service._log._retries.attempts = 2
        job.store.rules.append(FaultRule(fault, "put", chance=1.0, only="manifests/", delay_s=0.05))
        await driver.service.bases.finish()
        job.store.rules.clear()
        if then == "goes on":
            with contextlib.suppress(DstlError):
                # Where it is unknown what became of the record, only another run finds out.
                await driver.run_batch(job.run, batch)
                batch += 1
    await check(job, batch - 1)
    async with job.driver(job.store.inner, task_managers=2) as driver:
        await driver.run_batch(job.run, batch)
        await driver.service.bases.finish()
        await check(job, batch)
        assert (await newest(job)).materialized


async def test_what_the_end_of_a_run_cuts_off_is_counted_and_told(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 0.3}))
    job.store.rules.append(FaultRule(Fault.STUCK, "put", chance=1.0, only=".base"))
    async with job.driver(task_managers=2) as driver:
        await driver.run_batches(job.run, range(2))
        await driver.service.bases.finish()
        assert driver.recorder.sample().counters["basesUnpublished"] == 2
    assert "raise materialization.publish_within_s" in caplog.text
    await check(job, 1)


@pytest.mark.parametrize("is_on", [True, False])
async def test_the_end_of_a_run_waits_for_nothing_where_nothing_is_due(
    job: Job, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that every run of a scheduled job is held up, or writes a record, for bases that nobody makes."""
    options = MaterializationOptions() if is_on else MaterializationOptions(enabled=False, publish_within_s=0.2)
    monkeypatch.setattr(Driver, "materialization", options)
    store = job.store = InstrumentedStore(MemoryStore())
    async with job.driver(task_managers=2) as driver:
        await driver.service.bases.finish()
        await driver.run_batch(job.run, 0)
        await driver.service._cleaner.close()
        calls, began = store.calls.total(), asyncio.get_running_loop().time()
        await driver.service.bases.finish()
        assert asyncio.get_running_loop().time() - began < 1.0
        if not is_on:
            await asyncio.sleep(0.3)
        assert store.calls.total() == calls
        assert "basesUnpublished" not in driver.recorder.sample().counters


async def test_a_task_manager_that_hangs_while_bases_are_named_holds_the_end_up_for_a_bounded_time(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Driver, "materialization", BY_SIZE.model_copy(update={"publish_within_s": 3.0}))
    monkeypatch.setattr("dstl.checkpoint.base_publication._ENDING_S", 0.5)
    job.store = SlowBases(MemoryStore(), 0.5)
    async with job.driver(task_managers=2) as driver:
        await driver.run_batches(job.run, range(2))
        await driver.service.bases.close()
        await until_finished(driver)
        hung = next(iter(driver.members.values()))
        async with asyncio.timeout(10), hung.service._turn:
            await driver.service.bases.finish()
        assert driver.recorder.sample().counters["basesUnpublished"] == 2 * len(TWO)
    assert "their uploads are lost" in caplog.text
    await check(job, 1)
    async with job.driver(job.store.inner, task_managers=2) as driver:
        await driver.run_batch(job.run, 2)
        await driver.service.bases.finish()
        await check(job, 2)


@pytest.mark.parametrize("how", ["a batch is cut off", "the store has refused before", "another driver"])
async def test_bases_that_cannot_be_named_while_the_query_runs_are_named_or_counted_at_its_end(
    job: Job, how: str
) -> None:
    async with with_unnamed_bases(job) as driver:
        bases, before = driver.service.bases, await newest(job)
        if how == "a batch is cut off":
            # The first task of a batch begins, and no more comes of it.
            async with contextlib.AsyncExitStack() as stack:
                coordinator = await driver._connect(stack, driver.service.address)
                await coordinator.call(Begin(driver.who(job.run, "counts", 2, 0).task, pid=1))
        elif how == "the store has refused before":
            driver.service._log._retries.attempts = 1
            job.store.rules.append(FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="manifests/"))
            await bases._look(0.0)
            job.store.rules.clear()
        else:
            await ManifestLog(job.store.inner, system_runtime()).fence("query-1")
        await bases.finish()
        lost = driver.recorder.sample().counters.get("basesUnpublished", 0)
        now = await newest(job)
        if how == "the store has refused before":
            assert (lost, bool(now.materialized)) == (0, True)
        else:
            assert (lost, now.checkpoint_id) == (2 * len(TWO), before.checkpoint_id)
        await check(job, 1)
