"""One commit: Spark's checkpoint directory in the log of the query's own checkpoints, over the real sockets."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from dstl.checkpoint import retained_objects
from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.upkeep.cleaner import clean
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import CheckpointDeclined, CorruptData, Fenced, Invalid, ObjectExists, OutcomeUnknown
from dstl.files import query_directory
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.runtime import system_runtime
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import referenced_objects
from handles.file_record import FILES_OWNER
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.files import LaterClock
from worlds.query import QUERY, Query, open_query
from worlds.service import Driver, Job, Model, check_durable, copy_of


async def test_a_batch_is_two_requests_and_its_commit_is_its_checkpoint(job: Job, place: Path) -> None:
    job.store = InstrumentedStore(MemoryStore())
    async with open_query(job, place) as query:
        assert await query.start("run-1") == 0
        await query.run_batch(0)
        for batch in range(1, 5):
            before = job.store.calls.total()
            await query.run_batch(batch)
            assert job.store.calls.total() - before == 2, "offsets/N, and one record with commits/N and the checkpoint"
            await job.check(batch)
        assert [each.batch_id for each in query.driver.checkpoints] == [0, 1, 2, 3, 4]
        assert await query.jvm.names("commits") == ["0", "1", "2", "3", "4"]
    async with open_query(job, place) as query:
        assert await query.start("run-2") == 5
        await query.run_batch(5)
        await job.check(5)


async def test_whatever_checkpoint_a_reader_finds_has_its_objects(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark's files hold the cleanup boundary back, so readers find more checkpoints than the driver has retained.
    eager = MaterializationOptions(interval_s=0.001, min_pause_s=0.0, min_log_bytes=0, backoff_base_s=0.01)
    monkeypatch.setattr(Driver, "materialization", eager)
    monkeypatch.setattr(retained_objects, "_DELETE_TOGETHER", 1)
    first: set[str] = set()
    async with open_query(job, place, operators={"counts": 1}, inline_threshold=0) as query:
        await query.start("run-1")
        for batch in range(300):
            await query.run_batch(batch, {"counts": {b"key-%d" % job.rng.randrange(9): b"%d" % batch}})
            found = await verify_location(job.store, system_runtime())
            assert found.problems == ()
            there = {name for each in found.checkpoints for name in referenced_objects(each)}
            first = first or there
            if not first & await job.names():
                break
            await asyncio.sleep(0.001)
        assert batch < 299, "what no reader finds any more is deleted all the same"


async def test_an_operator_that_nobody_consumed_is_named_before_the_commit_exists(job: Job, place: Path) -> None:
    async with open_query(job, place) as query:
        driver = query.driver
        await query.start("run-1")
        await query.plan(0)
        with pytest.raises(Invalid, match=r"does not read operator 'counts', 'sums'"):
            await query.jvm.commit(0)
        await query.run_batch(0)
        await query.plan(1)
        events = job.events(1)
        for slot in range(4):
            await driver.task(driver.who("run-1", "counts", 1, slot), events["counts"])
        with pytest.raises(Invalid, match=r"does not read operator 'sums'"):
            await query.jvm.commit(1)
        await driver.task(driver.who("run-1", "sums", 1, 0), events["sums"])
        with pytest.raises(CheckpointDeclined, match=r"'sums' \(1 of 3 partitions\) have run to their end"):
            await query.jvm.commit(1)
        assert await query.jvm.names("commits") == ["0"]
        await query.start("run-2")
        await query.run_batch(1, events)
        await job.check(1)


async def test_a_checkpoint_whose_commit_landed_unseen_is_kept_until_the_next_run_has_read_it(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every record has the whole index, so that Spark's files need none but the last.
    monkeypatch.setattr(query_directory, "WHOLE_EVERY", 1)
    async with open_query(job, place, checkpoints=CheckpointOptions(timeout_s=1.0)) as query:
        await query.start("run-1")
        await query.run_batch(0)
        job.model = await query.run_uncommitted(1)
        await query.jvm.put("sources/0/1", job.rng.randbytes(400 << 10))  # too much to lie in the record itself
        await commit_without_an_answer(query, job.store, Fault.STUCK)
        # Spark's thread goes on in the same driver, and writes records before the first task asks for a run.
        assert await query.start("run-2") == 2
        await query.plan(2)
        await asyncio.sleep(0.05)  # whatever is deleted, is so in the background
        await job.check(1)
        await query.run_batch(2)
    await job.check(2)


async def test_a_driver_that_comes_back_keeps_the_checkpoints_of_the_one_that_led_meanwhile(
    job: Job, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_directory, "WHOLE_EVERY", 1)
    async with open_query(job, place) as old:
        await old.start("run-1")
        await old.run_batch(0)
        async with open_query(job, place) as new:
            await new.start("run-2")
            job.model = await new.run_uncommitted(1)
            await new.jvm.put("sources/0/1", job.rng.randbytes(400 << 10))  # too much to lie in the record itself
            await new.jvm.commit(1)
        with pytest.raises(Fenced):
            await old.plan(1)
        # Its run of before is still the last that it has opened: a new one opens with its first task.
        assert await old.start("run-3") == 2
        await old.plan(2)
        await asyncio.sleep(0.05)  # whatever is deleted, is so in the background
        await job.check(1)
        await old.run_batch(2)
    await job.check(2)


async def commit_without_an_answer(query: Query, store: FaultyStore, fault: Fault) -> None:
    """Commit batch 1 so that its driver does not know what has become of it."""
    store.rules.append(FaultRule(fault, "put", chance=1.0, only="manifests/", delay_s=0.0))
    with pytest.raises(OutcomeUnknown):
        await query.jvm.commit(1)
    await store.drain()
    store.rules.clear()


async def test_a_run_that_was_paused_while_another_driver_went_on_is_fenced_and_not_told_of_damage(
    job: Job, place: Path
) -> None:
    async with open_query(job, place) as old:
        await old.start("run-1")
        await old.run_batch(0)
        before = copy_of(job.model)
        # It has looked where the query is, and is stopped before its first task.
        assert await old.start("run-2") == 1
        await old.plan(1)
        async with open_query(job, place) as new:
            await new.start("run-3")
            await new.run_batches(range(1, 25))
            assert (await job.retained())[0].batch_id > 1
            with pytest.raises(Fenced, match="newer driver"):
                await old.driver.run_tasks("run-2", 1, {}, before)


async def test_an_older_driver_commits_nothing_once_a_task_of_the_newer_one_has_begun(job: Job, place: Path) -> None:
    """Also where the newer one writes nothing before: the batch is planned already."""
    async with open_query(job, place) as old:
        await old.start("run-1")
        await old.run_batch(0)
        events = job.events(1)
        await old.run_uncommitted(1, events)
        async with open_query(job, place) as new:
            assert await new.start("run-2") == 1
            job.model = await new.run_uncommitted(1, events)
            with pytest.raises(Fenced):
                await old.jvm.commit(1)
            await new.jvm.commit(1)
            await job.check(1)


async def test_a_small_file_is_read_back_beside_small_changes_in_one_record(job: Job, place: Path) -> None:
    async with open_query(job, place) as query:
        await query.start("run-1")
        for batch in range(3):
            job.model = await query.run_uncommitted(batch)
            await query.jvm.put(f"sources/0/{batch}", b"rows of %d" % batch)
            await query.jvm.commit(batch)
    async with open_query(job, place) as query:
        assert await query.start("run-2") == 3
        assert [await query.jvm.read(f"sources/0/{batch}") for batch in range(3)] == [
            b"rows of %d" % batch for batch in range(3)
        ]


async def test_retained_objects_are_what_either_half_needs(job: Job, place: Path) -> None:
    clock = LaterClock()
    store = job.store = MemoryStore(clock=clock)
    big = job.rng.randbytes(400 << 10)
    options = CheckpointOptions(retained=2, clean_interval_s=0)
    async with open_query(job, place, checkpoints=options) as query:
        await query.start("run-1")
        for batch in range(60):
            await query.jvm.put(f"sources/0/{batch}", big if batch == 30 else b"%d" % batch)
            await query.run_batch(batch)
            if batch >= 20:
                # As Spark purges its logs.
                for kind in ("offsets", "commits", *(["sources/0"] if batch not in (20, 50) else [])):
                    await query.jvm.delete(f"{kind}/{batch - 20}")
        await asyncio.sleep(0.05)
        held = await job.names()
    runtime = system_runtime()
    # 60 commits, whose changes no base has replaced, the offsets of 20 batches, and what the next whole index frees.
    assert len([name for name in held if name.startswith("manifests/")]) < 60 + 20 + 15
    report = await clean(store, ManifestLog(store, runtime), grace_s=0, dry_run=False)
    assert not [each for each in report.plan.deletions if not each.info.name.startswith("manifests/")]
    # What a driver that has crashed had stored of Spark's files goes once another one has taken the log over.
    orphan = f"0000/{FILES_OWNER}/{'a' * 32}/{'b' * 32}.seg"
    await store.put(orphan, b"x")
    clock.ahead_s = 3600.0
    async with open_query(job, place, checkpoints=options) as query:
        assert await query.start("run-2") == 60
        assert await query.jvm.read("sources/0/30") == big
        assert await query.jvm.read("sources/0/0") == b"0"
        # The last deletion has had its record when the directory was closed.
        assert sorted(map(int, await query.jvm.names("offsets"))) == list(range(40, 60))
        await query.run_batch(60)
        await job.check(60)
    report = await clean(store, ManifestLog(store, runtime), grace_s=0, dry_run=False)
    assert [each.info.name for each in report.plan.deletions if each.info.name.endswith(".seg")] == [orphan]
    assert not (await verify_location(store, runtime)).problems


async def test_another_query_s_location_is_refused_and_nothing_is_written(job: Job, place: Path) -> None:
    async with open_query(job, place) as query:
        await query.start("run-1")
        for batch in range(2):
            with pytest.raises(Invalid, match=f"belongs to query {QUERY}; this is query other"):
                await query.jvm.put("metadata", b'{"id":"other"}')
            await query.run_batch(batch)
    before = await job.names()
    async with open_query(job, place) as query:
        query.jvm.run = "run-2"
        with pytest.raises(Invalid, match=f"belongs to query {QUERY}; this is query other"):
            await query.jvm.put("metadata", b'{"id":"other"}')
    assert await job.names() == before


async def test_a_start_that_dies_before_its_first_record_leaves_its_location_to_the_next(job: Job, place: Path) -> None:
    """Prevents that a query whose first start is killed, as while Kafka is not there, can never be started again."""
    async with open_query(job, place) as dying, open_query(job, place) as query:
        await dying.jvm.put("metadata", b'{"id":"dying"}', run="")
        assert await query.start("run-1") == 0, "Spark finds no metadata, and makes up another query"
        await query.run_batch(0)
        await job.check(0)
        dying.jvm.run, dying.driver.query = "run-0", "dying"
        with pytest.raises(Invalid, match=f"belongs to query {QUERY}; this is query dying"):
            await dying.run_batch(1, job.events(1), {})


async def test_of_queries_that_start_on_one_empty_location_at_once_one_has_it(job: Job, place: Path) -> None:
    """Prevents that their fences, each of which names another query, make the location unreadable for all."""

    async def begin(query: Query, number: int) -> bool:
        query.jvm.run = f"run-{number}"
        try:
            await query.jvm.put("metadata", b'{"id":"query-%d"}' % number, run="")
            await asyncio.sleep(job.rng.choice([0.0, 0.002]))
            await query.jvm.offsets(0)
        except (Fenced, Invalid, ObjectExists):
            return False
        return True

    async with contextlib.AsyncExitStack() as stack:
        queries = [await stack.enter_async_context(open_query(job, place)) for _ in range(3)]
        for each in queries:
            assert not await each.jvm.is_there("metadata"), "each has looked before any has begun"
        begun = await asyncio.gather(*(begin(query, number) for number, query in enumerate(queries)))
    assert sum(begun) == 1
    async with open_query(job, place) as query:
        assert await query.jvm.read("metadata") == b'{"id":"query-%d"}' % begun.index(True)
        assert await query.jvm.names("offsets") == ["0"]


async def test_commits_that_a_user_takes_back_take_their_checkpoints_with_them(job: Job, place: Path) -> None:
    states: list[Model] = []
    async with open_query(job, place) as query:
        await query.start("run-1")
        for batch in range(4):
            await query.run_batch(batch)
            states.append(copy_of(job.model))
        for path in ("commits/3", "commits/2", "offsets/3", "offsets/2"):
            await query.jvm.delete(path, run="")
    async with open_query(job, place) as query:
        assert await query.start("run-2") == 2
        await query.run_batch(2, model=states[1])
        await check_durable(job.store, states[1], 2)


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_batch_whose_offsets_are_lost_is_run_again_with_previous(job: Job, place: Path, lost: int) -> None:
    """Its commit counted, and what to do was said in a circle: ``restore="previous"``, and ``dstl files rollback``."""
    async with open_query(job, place) as query:
        await query.start("run-1")
        before = {}
        for batch in range(3):
            before[batch] = copy_of(job.model)
            await query.run_batch(batch)
    scan = await ManifestLog(job.store, system_runtime()).scan()
    (number,) = (n for n, r in scan.records.items() if r.files is not None and r.files.barrier == f"offsets/{lost}")
    await job.store.delete([manifest_name(number)])
    async with open_query(job, place) as query:
        with pytest.raises(CorruptData, match=r'with offsets/. of Spark.* a StateBackend.*restore="previous"'):
            await query.start("run-2")
    job.model = before[lost]
    async with open_query(job, place, fall_back=True) as query:
        assert await query.start("run-3") == lost
        assert await query.jvm.names("offsets") == [str(batch) for batch in range(lost)]
        await query.run_batches((lost, lost + 1))
        assert [each.lost_batches for each in query.driver.restores] == [0]
    async with open_query(job, place) as query:
        assert await query.start("run-4") == lost + 2
        await job.check(lost + 1)
