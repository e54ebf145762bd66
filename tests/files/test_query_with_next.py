"""A ``StateBackend``'s commit in the record of the next offsets: one request a batch, and nothing weaker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dstl.errors import AccessDenied, DstlError, Fenced, TaskManagerLost
from dstl.files import barriers
from dstl.files.options import FileOptions
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from tests.simulation.faulty_store import Fault, FaultRule
from worlds.query import Query, open_query
from worlds.service import Job, Model, check_durable, copy_of
from worlds.wrapped_store import Gate

WITH_NEXT = FileOptions(commit="with-next")
KEEP = FileOptions(commit="with-next", sources="keep")
either = pytest.mark.parametrize("files", [WITH_NEXT, KEEP], ids=["with-next", "keep"])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits as long as it takes for the next offsets, however slow the machine."""
    monkeypatch.setattr(barriers, "LINGER_S", 60.0)


@contextlib.asynccontextmanager
async def two_batches(
    job: Job, place: Path, files: FileOptions, **settings: object
) -> AsyncIterator[tuple[Query, Model]]:
    """A query whose batch 1 Spark has been told of; yields the model of batch 0 too, which alone is durable."""
    async with open_query(job, place, files=files, **settings) as query:
        await query.start("run-1")
        await query.run_batch(0)
        before = copy_of(job.model)
        await query.run_batch(1)
        await check_durable(job.store, before, 0)
        yield query, before


async def go_on(query: Query, job: Job, before: Model) -> int:
    """Begin the next run; return its batch, which is 1 again, from the model before, if its commit is not there."""
    batch = await query.start("run-2")
    if batch == 1:
        job.model = before
    await query.run_batch(batch)
    await query.directory.settle()
    await job.check(batch)
    return batch


@pytest.mark.parametrize(("files", "partitions"), [(WITH_NEXT, 64), (KEEP, 4)], ids=["with-next", "keep"])
async def test_a_batch_is_one_request_whatever_the_partitions(
    job: Job, place: Path, files: FileOptions, partitions: int
) -> None:
    job.store = InstrumentedStore(MemoryStore())
    async with open_query(job, place, operators={"counts": partitions, "sums": 3}, files=files) as query:
        assert await query.start("run-1") == 0
        await query.run_batch(0)
        for batch in range(1, 5):
            before, calls = copy_of(job.model), job.store.calls.total()
            await query.run_batch(batch)
            assert job.store.calls.total() - calls == 1, "offsets/N with commits/N-1 and its checkpoint"
            await check_durable(job.store, before, batch - 1)
            assert await query.jvm.names("commits") == [str(each) for each in range(batch + 1)], "its run sees it"
        await query.directory.settle()
        await job.check(4)
        assert [each.batch_id for each in query.driver.checkpoints] == [0, 1, 2, 3, 4]
    async with open_query(job, place) as query:
        assert await query.start("run-2") == 5
        await query.run_batch(5)
        await job.check(5)


@either
@pytest.mark.parametrize("comes_with", ["the offsets", "a look"])
@pytest.mark.parametrize("error", [AccessDenied("not today"), RuntimeError("a defect shows today")], ids=repr)
async def test_a_record_that_is_lost_ends_its_run_and_the_next_one_has_the_state_before(
    job: Job, place: Path, files: FileOptions, comes_with: str, error: Exception
) -> None:
    """Prevents, too, that the commit is written later without its checkpoint, whatever the record was lost by."""
    gate = Gate()
    gate.opened.set()
    job.store = gate(MemoryStore())
    async with two_batches(job, place, files) as (query, before):
        gate.refusal = error
        if comes_with == "a look":
            await query.directory.settle()
            gate.refusal = None
        with contextlib.suppress(DstlError):
            await query.plan(2)
        with pytest.raises(TaskManagerLost, match="today"):
            await query.driver.run_tasks("run-1", 2, {}, {})
        with pytest.raises(TaskManagerLost, match="today"):
            await query.jvm.commit(2)
        gate.refusal = None
        assert await go_on(query, job, before) == 1


@either
async def test_nobody_knows_of_a_record_and_the_next_run_finds_out(seed: int, place: Path, files: FileOptions) -> None:
    for fault, lands in ((Fault.LOST_RESPONSE, True), (Fault.RESET, False)):
        job = Job(seed)
        async with two_batches(job, place, files, commit_attempts=1) as (query, before):
            # The record's answer is lost, and so is everything that would tell.
            job.store.rules = [FaultRule(fault, "put", nth=(1,)), FaultRule(Fault.UNAVAILABLE, "get", chance=1.0)]
            job.store.rules += [FaultRule(Fault.UNAVAILABLE, verb, chance=1.0) for verb in ("list", "head")]
            job.store.calls.clear()
            with contextlib.suppress(DstlError):
                await query.plan(2)
            with pytest.raises(DstlError):
                await query.driver.run_tasks("run-1", 2, {}, {})
            job.store.rules = []
            assert await go_on(query, job, before) == 1 + lands


@either
async def test_a_run_that_restarts_in_the_same_driver_waits_for_the_commit(
    job: Job, place: Path, files: FileOptions
) -> None:
    async with two_batches(job, place, files) as (query, _):
        assert await query.start("run-2") == 2, "the restarted query need not run the batch again"
        await job.check(1)
        with pytest.raises(Fenced):
            await query.driver.run_tasks("run-1", 2, {}, {})
        await query.run_batch(2)
    await job.check(2)


async def test_bases_are_published_and_savepoints_held_beside_commits_that_wait(job: Job, place: Path) -> None:
    async with two_batches(job, place, WITH_NEXT) as (query, _):
        held, hold = query.driver.service.hold()
        assert held.batch_id == 0
        finishing = asyncio.ensure_future(query.driver.service.bases.finish())
        await query.plan(2)
        await finishing
        query.driver.service.release(hold)
        await job.check(1)
