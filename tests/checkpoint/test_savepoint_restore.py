"""Starting a query from a savepoint: both modes over several checkpoints, crashes in between, and what is refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

import worlds.service
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.savepoint.creation import create_savepoint
from dstl.checkpoint.savepoint.deletion import delete_savepoint, list_savepoints
from dstl.checkpoint.savepoint.format import descriptor_name, marker_name
from dstl.checkpoint.savepoint.restore import RestoreMode, SavepointRestore
from dstl.errors import CorruptData, DstlError, Fenced, Invalid, MissingState
from dstl.options import MaterializationOptions
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import referenced_objects
from tests.simulation.faulty_store import Fault, FaultRule
from worlds import manifest_samples
from worlds.files import HastyClock
from worlds.savepoints import a_job, a_runtime, contents, replace
from worlds.service import TWO, Driver, Job, Model, copy_of, state_of, without_empty

MODES: tuple[RestoreMode, ...] = ("no_claim", "claim")
NEW = "query-2"
OFTEN = MaterializationOptions(interval_s=0.02, min_pause_s=0.0, log_to_state_ratio=None)


class RestoringDriver(Driver):
    """A driver whose query may begin with a savepoint."""

    query = NEW


class EagerDriver(RestoringDriver):
    materialization = OFTEN


@pytest.fixture
async def job(seed: int) -> Job:
    """A job whose location has a savepoint of another one; that one's state is what it must have."""
    job = Job(seed, repeat=10)
    job.drivers += 1  # the other's
    job.model = await saved(seed, job.store)
    return job


@contextlib.asynccontextmanager
async def a_query(
    job: Job,
    source: ObjectStore | None = None,
    *,
    mode: RestoreMode = "no_claim",
    materializes: bool = False,
    **settings: Any,
) -> AsyncIterator[Driver]:
    """Start a driver whose query begins with the savepoint, of its own location or of another."""
    kind = EagerDriver if materializes else RestoringDriver
    async with job.driver(kind=kind, **settings) as driver:
        restore = SavepointRestore(
            job.store if source is None else source, job.store, "mine", mode, a_runtime(job.seed + job.drivers)
        )
        await driver.service.runs.start_from(restore)
        yield driver


async def saved(seed: int, location: ObjectStore) -> Model:
    """Run a job, put a savepoint of it into another location, and return its state."""
    store = MemoryStore()
    state = (await a_job(store, seed))[-1]
    await create_savepoint(store, location, a_runtime(seed), "mine")
    return state


async def test_no_claim_is_self_contained_from_its_first_checkpoint_flink_38307(job: Job) -> None:
    """Flink's changelog backend restores with NO_CLAIM, its default, and fails at the first checkpoint."""
    elsewhere, job.store = job.store, MemoryStore()
    untouched = await contents(elsewhere)
    async with a_query(job, elsewhere) as driver:
        await driver.run_batch("run-1", 0)
        assert await contents(elsewhere) == untouched
        await delete_savepoint(elsewhere, a_runtime(), "mine", commit=True)
        await driver.run_batches("run-1", range(1, 5))
    for checkpoint in await job.retained():
        names = set(referenced_objects(checkpoint))
        assert names <= set(await contents(job.store))
        assert not [name for name in names if name.startswith("savepoints/")]
    # The program is started again as it is, restore_from included: its own checkpoints come first.
    async with a_query(job, elsewhere) as driver:
        await driver.run_batch("run-2", 5)
        assert driver.restores[0].checkpoint_id is not None
    await job.check()


@pytest.mark.parametrize("mode", MODES)
async def test_over_several_materializations_every_checkpoint_restores_and_a_claimed_file_goes_when_unneeded(
    job: Job, mode: RestoreMode
) -> None:
    named = 0
    async with a_query(job, mode=mode, materializes=True, task_managers=2) as driver:
        for batch in range(60):
            await driver.run_batch("run-1", batch)
            for checkpoint in await job.retained():
                assert set(referenced_objects(checkpoint)) <= set(await contents(job.store))
            await job.check()
            named = sum(report.materializations for report in driver.checkpoints)
            left = [name for name in await contents(job.store, "savepoints/") if name.endswith(".base")]
            if batch > 5 and named > 8 and (mode == "no_claim" or not left):
                break
            await asyncio.sleep(0.03)
    assert named > 8, "nothing was materialized"
    if mode == "no_claim":
        assert [each.state for each in await list_savepoints(job.store, a_runtime())] == ["complete"]
    else:
        # The job needed its files no more, and has deleted them by the ordinary rules; the marker keeps the name.
        assert list(await contents(job.store, "savepoints/")) == [marker_name("mine")]
        done = await delete_savepoint(job.store, a_runtime(), "mine", commit=True)
        assert done.state == "claimed"
        assert await contents(job.store, "savepoints/") == {}


async def test_a_claimed_savepoint_is_none_any_more_and_cannot_be_deleted_while_it_is_needed(job: Job) -> None:
    files = [name for name in await contents(job.store) if name.endswith(".base")]
    async with a_query(job, mode="claim") as driver:
        await driver.run_batches("run-1", range(4))
    assert set(files) <= set(await contents(job.store))
    (listed,) = await list_savepoints(job.store, a_runtime())
    assert (listed.state, listed.detail, listed.savepoint) == ("claimed", f"by query {NEW}", None)
    for commit in (False, True):
        with pytest.raises(Invalid, match=f"claimed by query {NEW}.*needs its files"):
            await delete_savepoint(job.store, a_runtime(), "mine", commit=commit)
    with pytest.raises(MissingState, match="no savepoint 'mine'"):
        await SavepointRestore(job.store, MemoryStore(), "mine", "no_claim", a_runtime()).load(128)
    async with a_query(job, mode="claim") as driver:
        await driver.run_batch("run-2", 4)
    await job.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "rule",
    [
        FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="manifests/"),
        FaultRule(Fault.RESET, "put", chance=1.0, only="0002.dstl"),
        FaultRule(Fault.LOST_RESPONSE, "put", nth=(1,), only="0002.dstl"),
        FaultRule(Fault.UNAVAILABLE, "delete", chance=1.0, only="savepoint"),
        FaultRule(Fault.UNAVAILABLE, "get", chance=1.0, only=".base"),
    ],
    ids=["no-fence", "no-first-checkpoint", "lost-response", "descriptor-stays", "no-file"],
)
async def test_a_start_that_fails_anywhere_is_made_good_by_the_next(
    job: Job, mode: RestoreMode, rule: FaultRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds.service, "SystemClock", HastyClock)
    job.store.rules = [rule]
    with contextlib.suppress(DstlError):
        async with a_query(job, mode=mode) as driver:
            await driver.run_batch("run-1", 0)
    await job.store.drain()
    job.store.rules = []
    done = int(len(await job.retained()) > 1)
    if done:
        # It got through all the same: Spark would go on with batch 1.
        job.model = await state_of((await job.retained())[-1], job.store)
    async with a_query(job, mode=mode) as driver:
        await driver.run_batches("run-2", (done, done + 1))
    await job.check()
    (listed,) = await list_savepoints(job.store, a_runtime())
    assert listed.state == ("complete" if mode == "no_claim" else "claimed")
    assert (descriptor_name("mine") in await contents(job.store)) == (mode == "no_claim")


async def test_two_queries_cannot_claim_one_savepoint_and_a_deletion_cannot_overtake_a_claim(job: Job) -> None:
    def restore(seed: int) -> SavepointRestore:
        return SavepointRestore(job.store, job.store, "mine", "claim", a_runtime(seed))

    async def claim(by: SavepointRestore, query_id: str) -> None:
        savepoint = await by.load(128)
        new = {"checkpoint_id": 1, "batch_id": -1, "query_id": query_id, "run_id": "run"}
        await by.first_checkpoint(savepoint, **new, operators=list(TWO), check=lambda _: None)  # type: ignore[arg-type]

    await claim(restore(1), "query-a")
    await claim(restore(2), "query-a")
    with pytest.raises(Invalid, match="taken by query query-a"):
        await claim(restore(3), "query-b")
    with pytest.raises(Invalid, match="by query query-a, which has no checkpoint yet"):
        await delete_savepoint(job.store, a_runtime(), "mine", commit=True)
    with pytest.raises(Invalid, match="was claimed by query query-a"):
        await SavepointRestore(job.store, MemoryStore(), "mine", "no_claim", a_runtime()).load(128)
    assert len(await contents(job.store, "savepoints/mine/")) == 4


async def test_a_claim_needs_the_querys_own_location() -> None:
    with pytest.raises(Invalid, match=r"memory://a.*memory://b.*restore_mode='no_claim'"):
        SavepointRestore(MemoryStore("a"), MemoryStore("b"), "mine", "claim", a_runtime())
    with pytest.raises(Invalid, match="neither 'no_claim' nor 'claim'"):
        SavepointRestore(MemoryStore("a"), MemoryStore("b"), "mine", "legacy", a_runtime())  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
async def test_an_operator_that_the_query_does_not_have_is_refused_before_anything_is_written(
    job: Job, mode: RestoreMode
) -> None:
    before = await contents(job.store, "savepoints/")
    with pytest.raises(Invalid, match=r"'sums'.*allow_non_restored_state=True"):
        async with a_query(job, mode=mode, operators={"counts": 2}) as driver:
            await driver.run_batch("run-1", 0, {}, {})
    assert await contents(job.store, "savepoints/") == before
    assert not await job.retained()
    assert not [name for name in await contents(job.store) if name.endswith(".base") and "savepoints/" not in name]


@pytest.mark.parametrize("mode", MODES)
async def test_allowed_the_state_of_such_an_operator_is_left_behind(job: Job, mode: RestoreMode) -> None:
    savepoint = await SavepointRestore(job.store, job.store, "mine", mode, a_runtime()).load(128)
    async with a_query(job, mode=mode, operators={"counts": 2}, allow_non_restored_state=True) as driver:
        del job.model["sums"]
        await driver.run_batch("run-1", 0)
        await job.check()
    assert [entry.uid for entry in (await job.retained())[-1].operators] == ["counts"]
    dropped = {savepoint.object_name(f) for f in savepoint.files if f.operator == "sums"}
    assert dropped.issubset(await contents(job.store)) == (mode == "no_claim")


async def test_another_number_of_key_groups_is_refused_with_both_sides_named(job: Job) -> None:
    with pytest.raises(Invalid, match=r"max_parallelism=128, and this backend 64.*Pass max_parallelism=128"):
        async with a_query(job, max_parallelism=64):
            pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
async def test_a_damaged_file_is_refused_naming_savepoint_and_object(job: Job, mode: RestoreMode, harm: str) -> None:
    savepoint = await SavepointRestore(job.store, job.store, "mine", mode, a_runtime()).load(128)
    name = savepoint.object_name(savepoint.files[0])
    data = await job.store.get(name)
    if harm == "missing":
        await job.store.delete([name])
    else:
        at = job.rng.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        await replace(job.store, name, data[:-3] if harm == "cut" else flipped)

    async def run_batches() -> None:
        async with a_query(job, mode=mode) as driver:
            # No batch sees state that is not there: each task checks what it reads against the model.
            await driver.run_batches("run-1", range(50))

    with pytest.raises((CorruptData, MissingState), match=name):
        await run_batches()
    if mode == "no_claim" or harm != "flipped":
        # A claim does not read the files; the TaskManagers do, behind the batches.
        assert not await job.retained()


async def test_its_own_query_may_go_on_from_a_savepoint_in_another_location(job: Job) -> None:
    # The move of a job to another bucket, or the way back to a checkpoint that was lost.
    source, job.store = job.store, MemoryStore()

    async def directory_of(query: str) -> ObjectStore:
        plain = MemoryStore()
        await plain.put("metadata", b'{"id":"%s"}' % query.encode())
        for batch in range(4):
            await plain.put(f"commits/{batch}", b"v1\n{}")
        return plain

    async with a_query(job, source, plain=await directory_of("query-2")) as another:
        assert await another.next_batch("run-1") == 4
        with pytest.raises(MissingState, match="query query-1 after batch 3, and batch 4 of query query-2"):
            await another.run_batch("run-1", 4, {}, {})
    job.store = source
    async with job.driver(plain=await directory_of("query-1")) as driver:
        await driver.service.runs.start_from(SavepointRestore(source, source, "mine", "no_claim", a_runtime()))
        await driver.run_batch("run-2", 4)
    await job.check()


async def test_list_elements_go_on_behind_the_restored_ones(job: Job) -> None:
    """A list's elements are ordered by the log's numbers, which begin anew: without a base, new ones would come first,
    and one with an old one's number would replace it."""
    before = (await SavepointRestore(job.store, job.store, "mine", "no_claim", a_runtime()).load(128)).sequence_base
    for _ in range(2):
        source, job.store = job.store, MemoryStore()
        async with a_query(job, source) as driver:
            for batch in range(3):
                async with driver.attempt(driver.who("run-1", "counts", batch, 0), {}, {}) as attempt:
                    number = attempt.begun.sequence
                assert isinstance(number, int)
                assert number > before
                before = number
                await driver.run_batch("run-1", batch)
        made = await create_savepoint(job.store, job.store, a_runtime(3), "mine")
        assert made.sequence_base >= before
        before = made.sequence_base


async def test_a_held_checkpoint_outlives_its_subsumption_and_no_longer(job: Job) -> None:
    async with a_query(job, mode="claim", materializes=True) as driver:
        with pytest.raises(MissingState, match="wait for its first batch"):
            driver.service.hold()
        await driver.run_batch("run-1", 0)
        then = copy_of(job.model)
        held, hold = driver.service.hold()
        # Its own record has Spark's files too, and stays as long as one of them does.
        objects = {name for name in referenced_objects(held) if not name.startswith("manifests/")}
        for batch in range(1, 120):
            await driver.run_batch("run-1", batch)
            live = {name for c in await job.retained() for name in referenced_objects(c)}
            if not objects & live:
                break
            await asyncio.sleep(0.03)
        assert not objects & live, "the held checkpoint was never subsumed"
        assert objects <= set(await contents(job.store))
        assert without_empty(await state_of(held, job.store)) == without_empty(then)
        driver.service.release(hold)
        for after in range(batch + 1, batch + 80):
            await driver.run_batch("run-1", after)
            if not objects & set(await contents(job.store)):
                break
        assert not objects & set(await contents(job.store))


async def test_a_fenced_start_leaves_the_savepoint_alone(job: Job) -> None:
    async with a_query(job) as driver:
        other = ManifestLog(job.store, a_runtime(4))
        await other.fence("another-query")
        await other.commit(manifest_samples.checkpoint(2, 0, query_id="another-query"), [])
        with pytest.raises((Invalid, Fenced), match="belongs to query another-query"):
            await driver.run_batch("run-1", 0, {}, {})
    (listed,) = await list_savepoints(job.store, a_runtime())
    assert listed.state == "complete"
