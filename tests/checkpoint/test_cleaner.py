"""The cleaner: what nobody needs goes, and whatever happens nothing is deleted that is needed.

That nothing stays behind a crash, wherever it comes, is for the simulation to show (I5 and I14).
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import pytest

from dstl.changelog.object_names import SegmentName, SegmentNames
from dstl.checkpoint.manifest.format import FORGOTTEN_S, encode_record, manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.upkeep.cleaner import CleanerReport, LiveDriver, PeriodicCleaner, clean
from dstl.checkpoint.upkeep.cleaning_plan import Kept
from dstl.errors import AccessDenied, CorruptData, Fenced, Invalid, OutcomeUnknown, Unavailable
from dstl.options import CheckpointOptions
from dstl.runtime import Runtime, SystemClock
from dstl.store import MemoryStore, ObjectInfo, ObjectStore
from dstl.store.instrumented import InstrumentedStore
from handles.file_record import FILES_OWNER
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.manual_clock import ManualClock
from tests.simulation.virtual_time import seeded_runtime
from worlds.manifest_samples import QUERY, commit, kinds, names
from worlds.wrapped_store import WrappedStore

GRACE = 3600.0
DAY = 86_400.0


@dataclass
class World:
    clock: ManualClock
    store: MemoryStore
    runtime: Runtime
    log: ManifestLog

    async def put(self, kind: str = "seg", writer: str = "old-writer", query: str = QUERY) -> str:
        made = SegmentNames(query, writer, self.runtime).new_object
        name = made(kind)(0) if kind != "seg" else made()(0)  # type: ignore[arg-type]
        await self.store.put(name, b"12345")
        return name

    async def commit(self, batch_id: int, *objects: str, oldest: int = 0) -> int:
        return await commit(self.log, batch_id, oldest=oldest, objects=objects)

    async def clean(
        self,
        *,
        live: Collection[str] | None = (),
        store: ObjectStore | None = None,
        held: Callable[[], Collection[str]] | None = None,
        **options: object,
    ) -> CleanerReport:
        async def ask() -> Collection[str]:
            assert live is not None
            return live

        driver = LiveDriver(lambda: self.log.epoch, None if live is None else ask, held)
        given = {"grace_s": GRACE, "dry_run": False} | options
        return await clean(store or self.store, self.log, driver=driver, **given)  # type: ignore[arg-type]

    async def has(self, name: str) -> bool:
        return name in await names(self.store)


async def a_world() -> World:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    runtime = seeded_runtime(1, clock)
    log = ManifestLog(store, runtime, attempts=2)
    await log.fence(QUERY)
    return World(clock, store, runtime, log)


@pytest.fixture
async def world() -> World:
    return await a_world()


async def test_the_grace_period_goes_by_the_stores_clock(world: World) -> None:
    orphan = await world.put()
    await world.commit(0)
    await world.clock.advance(GRACE - 1)
    world.runtime = seeded_runtime(3, ManualClock(wall=9e9))
    assert not (await world.clean()).plan.deletions
    await world.clock.advance(2)
    assert (await world.clean()).deleted == 1
    assert not await world.has(orphan)


async def test_other_queries_and_unknown_names_are_never_touched(world: World) -> None:
    others = [await world.put(kind, query=of) for of in ("other", QUERY + "x", QUERY[:-1]) for kind in ("seg", "base")]
    strangers = [
        "savepoints/x/0001.base",
        "README.md",
        f"abcd/{QUERY}/w/not-unique.seg",
        f"ABCD/{QUERY}/w/{'0' * 32}.seg",
        f"abcd/{QUERY}/{'0' * 32}.seg",
        f"abcd/{QUERY}/w/{'0' * 32}.seg.tmp",
        "manifests/boundary",
        "manifests/0000000000000000000x.dstl",
        "probe/short",
        "probe/a/0123456789abcdef0123456789abcdef",
    ]
    for name in strangers:
        await world.store.put(name, b"?")
    await world.commit(0)
    await world.clock.advance(30 * DAY)
    report = await world.clean()
    assert report.deleted == 0
    assert {*others, *strangers} <= set(await names(world.store))
    assert report.plan.kept == {Kept.OTHER_QUERY: 6, Kept.UNKNOWN: 10, Kept.LOG_RECORD: 1, Kept.REFERENCED: 1}


async def test_records_below_the_boundary_go_after_a_day_except_the_fence_of_the_driver_at_work(world: World) -> None:
    """Prevents that each start leaves a fence for ever, which every later start lists and reads again."""
    for batch in range(6):
        await world.commit(batch, oldest=max(0, world.log.next_sequence - 1))
    marker = world.log.next_sequence
    record = (await world.log.read(2)).model_copy(
        update={"kind": "abort", "sequence": marker, "checkpoint": None, "oldest": marker - 1}
    )
    await world.store.put(manifest_name(marker), encode_record(record))
    await world.log.fence(QUERY)
    await world.commit(6, oldest=world.log.next_sequence)
    before = await kinds(world.store)
    await world.clock.advance(FORGOTTEN_S - 1)
    await world.clean()
    assert await kinds(world.store) == before, "an older driver that is paused may not have noticed yet"
    await world.clock.advance(1)
    await world.clean()
    assert sorted((await kinds(world.store)).values()) == ["checkpoint", "fence"]
    assert (await world.log.scan()).epoch == world.log.epoch


async def go_on_for_days(world: World, free: int) -> None:
    """Let another driver work until this number is cleaned away."""
    await world.log.fence(QUERY)
    await world.log.fence(QUERY)
    for batch in (0, 1, 2):
        await world.commit(batch, oldest=world.log.next_sequence - 1)
    await world.clock.advance(FORGOTTEN_S)
    await world.clean()
    assert free not in await kinds(world.store)


@pytest.mark.parametrize("stopped", ["process", "host and its clock"])
async def test_a_driver_that_was_paused_for_days_is_fenced_by_a_fence_that_is_gone(world: World, stopped: str) -> None:
    """Put-if-absent forgets a name that is deleted: the driver would go on, and delete what its successor needs."""
    own = world.clock if stopped == "process" else ManualClock()
    paused = ManifestLog(world.store, seeded_runtime(4, own), attempts=2)
    await paused.fence(QUERY)
    await commit(paused, 0)
    free = paused.next_sequence
    world.log = ManifestLog(world.store, world.runtime, attempts=2)
    await go_on_for_days(world, free)
    with pytest.raises(Fenced, match="was taken over"):
        await commit(paused, 1)
    assert [c.batch_id for c in await world.log.checkpoints()] == [1, 2]
    assert [c.batch_id for c in await ManifestLog(world.store, world.runtime).checkpoints()] == [1, 2]
    await world.commit(3)


async def test_a_driver_that_sleeps_for_days_behind_a_fence_whose_answer_was_lost_is_fenced(world: World) -> None:
    """It knows no moment at which a record of its own was stored, and looked at the log when it fenced, days ago."""
    lost = FaultyStore(world.store, [FaultRule(Fault.LOST_RESPONSE, "put", nth=(1,))], clock=world.clock)
    asleep = ManifestLog(lost, seeded_runtime(4, world.clock), attempts=2)
    fencing = asyncio.ensure_future(asleep.fence(QUERY))
    while not fencing.done():
        await world.clock.advance(1.0)
    free = asleep.next_sequence
    await go_on_for_days(world, free)
    with pytest.raises(Fenced, match="was taken over"):
        await commit(asleep, 0)


async def test_a_driver_with_a_batch_a_day_looks_once_whether_it_leads(world: World) -> None:
    store = InstrumentedStore(world.store)
    log = ManifestLog(store, world.runtime, attempts=2)
    await log.fence(QUERY)
    asked = []
    for pause_s in (FORGOTTEN_S / 2, FORGOTTEN_S / 2 + 1, 10 * DAY, 1):
        await world.clock.advance(pause_s)
        before = store.calls.total()
        await commit(log, 0)
        asked.append(store.calls.total() - before)
    assert asked == [1, 3, 3, 1], "a PUT; a LIST and a HEAD behind it where the driver may have been replaced"


async def test_an_attempt_of_the_first_batch_may_still_replace_a_partition_of_its_only_checkpoint(world: World) -> None:
    retry = await world.put(writer="alive")
    await world.clock.advance(DAY)
    await world.commit(0)
    await world.clock.advance(DAY)
    assert (await world.clean(live={"alive"})).deleted == 0
    assert await world.has(retry)


async def test_a_living_writers_losers_go_once_their_batch_is_over(world: World) -> None:
    """A TaskManager may live for months: its late losers must not wait for its end."""
    await world.commit(0)
    loser = await world.put(writer="alive")
    await world.clock.advance(100)
    await world.commit(1)
    await world.clock.advance(2 * GRACE)
    assert (await world.clean(live={"alive"})).deleted == 0, "batch 1 may still be replaced by a retry"
    await world.commit(2, oldest=world.log.next_sequence - 1)
    await world.clock.advance(2 * GRACE)
    assert (await world.clean(live={"alive"})).deleted == 1, "the loser; the record of batch 0 stays for a day"
    assert not await world.has(loser)


async def test_what_is_older_by_seconds_alone_stays_for_servers_of_one_store_disagree(world: World) -> None:
    await world.commit(0)
    pending = await world.put(writer="alive")
    await world.clock.advance(30)
    await world.commit(1)
    await world.commit(2, oldest=world.log.next_sequence - 1)
    await world.clock.advance(2 * GRACE)
    assert (await world.clean(live={"alive"})).deleted == 0
    assert await world.has(pending)


async def test_files_of_sparks_stay_from_the_newest_fence_on(world: World) -> None:
    """The driver at work has stored them, and names them with its next commit, which may take days to come."""
    names = [str(SegmentName("", "0000", FILES_OWNER, "driver", f"{at:032x}", "seg")) for at in range(2)]
    await world.commit(0)
    await world.store.put(names[0], b"of an older driver")
    await world.clock.advance(100)
    await world.log.fence(QUERY)
    await world.store.put(names[1], b"of the driver at work")
    await world.clock.advance(30 * DAY)
    await world.clean(live=None)
    assert [await world.has(name) for name in names] == [False, True]


async def test_nobody_asked_means_everybody_may_live(world: World) -> None:
    """The command line beside a running query: what it cannot prove dead stays, however old."""
    await world.commit(0)
    await world.clock.advance(100)
    pending = await world.put()
    base = await world.put("base")
    await world.clock.advance(30 * DAY)
    assert (await world.clean(live=None)).deleted == 0
    await world.commit(1)
    await world.commit(2, oldest=world.log.next_sequence - 1)
    report = await world.clean(live=None)
    assert {(d.info.name, d.reason) for d in report.plan.deletions if "manifests" not in d.info.name} == {
        (pending, "no checkpoint needs it and its batch is over"),
        (base, "no checkpoint needs it and its materialization is over"),
    }


async def test_24852_a_new_run_ends_the_attempts_of_the_old_one_and_their_orphans_go() -> None:
    world = await a_world()
    await world.commit(0)
    orphan, base = await world.put(), await world.put("base")
    await world.clock.advance(100)
    await world.log.fence(QUERY)
    await world.clock.advance(2 * GRACE)
    report = await world.clean(live=None)
    # A TaskManager outlives a run, and with it a finished materialization.
    assert [d.info.name for d in report.plan.deletions] == [orphan]
    assert await world.has(base)


async def test_an_idle_stream_keeps_a_base_that_no_checkpoint_has_named_yet(world: World) -> None:
    await world.commit(0)
    await world.commit(1)
    base = await world.put("base", writer="alive")
    await world.clock.advance(30 * DAY)
    assert (await world.clean(live={"alive"})).deleted == 0
    assert await world.has(base)


async def test_a_long_materialization_loses_none_of_its_first_files(world: World) -> None:
    base = await world.put("base", writer="alive")
    for batch in range(6):
        await world.clock.advance(2 * GRACE)
        await world.commit(batch)
    assert (await world.clean(live={"alive"})).deleted == 0
    assert await world.has(base)


async def test_a_manifest_whose_inlined_segments_are_needed_stays(world: World) -> None:
    await world.commit(0)
    await world.commit(1, manifest_name(2))
    await world.commit(2, manifest_name(2), oldest=3)
    await world.clock.advance(30 * DAY)
    assert (await world.clean()).deleted == 0
    await world.commit(3, oldest=4)
    await world.clock.advance(30 * DAY)
    report = await world.clean()
    assert [(d.info.name, d.reason) for d in report.plan.deletions] == [
        (manifest_name(3), "it is below the cleanup boundary")
    ]


async def test_a_replaced_checkpoint_goes_when_its_driver_did_not_come_to_it(world: World) -> None:
    for batch in (0, 1, 1):
        await world.commit(batch)
    await world.clock.advance(30 * DAY)
    report = await world.clean()
    assert [(d.info.name, d.reason) for d in report.plan.deletions] == [(manifest_name(3), "its batch was run again")]
    assert [c.checkpoint_id for c in await world.log.checkpoints()] == [2, 4]


async def test_a_checkpoint_that_a_late_request_revived_is_deleted_again(world: World) -> None:
    await world.commit(0)
    revived = await world.store.get(manifest_name(2))
    for batch in range(1, 5):
        await world.commit(batch, oldest=world.log.next_sequence - 1)
    await world.store.delete([manifest_name(2)])
    await world.store.put(manifest_name(2), revived)
    await world.clock.advance(FORGOTTEN_S)
    report = await world.clean()
    assert manifest_name(2) in [d.info.name for d in report.plan.deletions]
    assert [c.batch_id for c in await world.log.checkpoints()] == [3, 4]


async def test_a_zombie_driver_deletes_nothing(world: World) -> None:
    """10 of reliability 3.4: a paused leader that acts on its old epoch (etcd#20418)."""
    orphan = await world.put()
    await world.commit(0)
    await world.clock.advance(2 * GRACE)
    newer = ManifestLog(world.store, seeded_runtime(8, world.clock))
    await newer.fence(QUERY)
    with pytest.raises(Fenced, match=r"taken over by epoch 3; this driver \(1\) deletes nothing"):
        await world.clean()
    assert await world.has(orphan)


async def test_the_periodic_cleaner_of_a_driver_that_was_replaced_ends() -> None:
    """It went on for ever, with a listing of the location and a warning in every interval."""
    store, runtime = MemoryStore(), seeded_runtime(1, SystemClock())
    mine = ManifestLog(store, runtime)
    await mine.fence(QUERY)

    async def nobody() -> set[str]:
        return set()

    options = CheckpointOptions(clean_interval_s=0.001)
    cleaner = PeriodicCleaner(store, runtime, LiveDriver(lambda: mine.epoch, nobody, set), options)
    cleaner.start()
    await asyncio.sleep(0.02)
    assert not cleaner._task.done()
    await ManifestLog(store, seeded_runtime(2, SystemClock())).fence(QUERY)
    async with asyncio.timeout(10):
        await cleaner._task
    await mine.fence(QUERY)
    cleaner.start()
    await asyncio.sleep(0.02)
    assert not cleaner._task.done(), "a new run of the driver has no cleaner"
    await cleaner.close()


async def test_a_damaged_manifest_stops_the_cleaner(world: World) -> None:
    await world.put()
    await world.commit(0)
    await world.commit(1)
    await world.clock.advance(2 * GRACE)
    await world.store.put(manifest_name(2), b"rubbish")
    before = await names(world.store)
    with pytest.raises(CorruptData, match=f"nothing is deleted.*{manifest_name(2)}"):
        await world.clean()
    assert await names(world.store) == before


async def test_where_every_record_has_vanished_nothing_is_deleted(world: World) -> None:
    await world.put()
    await world.clock.advance(2 * GRACE)
    await world.store.delete([manifest_name(1)])
    before = await names(world.store)
    with pytest.raises(Invalid, match="it holds no manifest"):
        await world.clean()
    assert await names(world.store) == before


class Hooked(WrappedStore):
    """Does something at the end of the cleaner's list: races it."""

    def __init__(self, inner: MemoryStore, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self.then = then

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        async for info in self.inner.list(prefix):
            yield info
        if not prefix:
            await self.then()  # type: ignore[misc]


async def test_1086_a_checkpoint_that_is_committed_while_the_cleaner_runs_loses_nothing(world: World) -> None:
    """Arroyo#1086, litestream#1307: its segments were listed as orphans, and are needed when the deletes come."""
    await world.commit(0)
    await world.clock.advance(100)
    pending = await world.put()
    await world.clock.advance(2 * GRACE)

    async def race() -> None:
        await world.commit(1, pending)

    report = await world.clean(store=Hooked(world.store, race), live=())
    assert report.plan.kept[Kept.REFERENCED] == 2, "the log is read after the list"
    assert await world.has(pending)


async def test_a_manifest_that_vanishes_between_list_and_read_is_no_error(world: World) -> None:
    for batch in range(4):
        await world.commit(batch)
    await world.clock.advance(2 * GRACE)

    async def race() -> None:
        await world.commit(4, oldest=4)
        await world.store.delete([manifest_name(2), manifest_name(3)])

    report = await world.clean(store=Hooked(world.store, race))
    assert report.plan.deletions == ()
    assert [c.batch_id for c in await world.log.checkpoints()] == [2, 3, 4]


async def test_a_driver_that_takes_over_while_the_cleaner_lists_stops_it(world: World) -> None:
    orphan = await world.put()
    await world.commit(0)
    await world.clock.advance(2 * GRACE)

    async def race() -> None:
        await ManifestLog(world.store, seeded_runtime(8, world.clock)).fence(QUERY)

    with pytest.raises(Fenced):
        await world.clean(store=Hooked(world.store, race))
    assert await world.has(orphan)


async def test_writers_are_asked_after_the_list(world: World) -> None:
    """RFC-29 of SlateDB, 4 of reliability 3.4: an object must not be listed and its writer already forgotten."""
    order = []
    await world.commit(0)

    async def listed() -> None:
        order.append("listed")

    async def ask() -> Collection[str]:
        order.append("asked")
        return ()

    await clean(Hooked(world.store, listed), world.log, grace_s=GRACE, driver=LiveDriver(writer_ids=ask))
    assert order == ["listed", "asked"]


async def test_a_pass_is_bounded_and_goes_from_records_to_the_oldest(world: World) -> None:
    orphans = []
    for _ in range(5):
        orphans.append(await world.put())
        await world.clock.advance(10)
    for batch in range(3):
        await world.commit(batch, oldest=max(0, world.log.next_sequence - 1))
    await world.clock.advance(FORGOTTEN_S)
    report = await world.clean(max_deletions=3)
    assert [d.info.name for d in report.plan.deletions] == [manifest_name(2), *orphans[:2]]
    assert report.plan.kept[Kept.BOUND] == 3
    assert (await world.clean(max_deletions=3)).deleted == 3
    assert (await world.clean(max_deletions=3)).deleted == 0


async def test_a_hedge_that_lands_after_its_deletion_is_an_orphan_and_no_resurrection(world: World) -> None:
    """A.3, 5: the loser was deleted, then its put arrived. Its name is its own, so nobody refers to it, ever."""
    rule = FaultRule(Fault.LATE_PUT, "put", nth=(1,), delay_s=2 * DAY)
    slow = FaultyStore(world.store, [rule], clock=world.clock)
    loser = f"abcd/{QUERY}/dead-writer/{'5' * 32}.seg"
    with pytest.raises(OutcomeUnknown):
        await slow.put(loser, b"late")
    winner = await world.put()
    await world.store.delete([loser])
    await world.commit(0, winner)
    await world.clock.advance(DAY)
    assert (await world.clean()).deleted == 0
    await world.clock.advance(DAY + 1)
    assert await world.has(loser)
    assert (await world.clean()).plan.kept[Kept.YOUNG] == 1, "young again, by the store's clock"
    await world.clock.advance(2 * GRACE)
    assert [d.info.name for d in (await world.clean()).plan.deletions] == [loser]


async def test_probes_that_were_not_finished_go(world: World) -> None:
    await world.store.put(f"probe/{'a' * 32}", b"x")
    await world.store.put(f"s1/probe/{'a' * 32}", b"x")
    await world.commit(0)
    await world.clock.advance(2 * GRACE)
    assert (await world.clean()).deleted == 2
    assert not await names(world.store, "probe/"), "its own probe is gone as well"


async def test_a_dry_run_needs_no_right_to_write(world: World) -> None:
    orphan = await world.put()
    await world.commit(0)
    await world.clock.advance(2 * GRACE)
    await world.commit(1)
    read_only = FaultyStore(world.store, [FaultRule(Fault.DENIED, "put", chance=1.0)])
    report = await world.clean(store=read_only, dry_run=True)
    assert [d.info.name for d in report.plan.deletions] == [orphan]
    with pytest.raises(AccessDenied):
        await world.clean(store=read_only)


class FullDisk(WrappedStore):
    async def put(self, name: str, data: bytes, **options: Any) -> ObjectInfo:
        if data:
            raise Unavailable("No space left on device")
        return await self.inner.put(name, data, **options)


async def test_a_full_disk_is_cleaned(world: World) -> None:
    """The object that tells the store's time had a content, for which there was no space."""
    await world.put()
    await world.commit(0)
    await world.clock.advance(2 * GRACE)
    await world.commit(1)
    assert (await world.clean(store=cast("ObjectStore", FullDisk(world.store)))).deleted == 1


@pytest.mark.parametrize("in_driver", [True, False], ids=["the driver's cleaner", "gc"])
async def test_a_savepoint_that_takes_longer_than_any_grace_loses_nothing_that_it_reads(
    world: World, in_driver: bool
) -> None:
    """Its checkpoint is subsumed meanwhile; gc knows of it from the files that it writes."""
    objects = RetainedObjects(world.store)
    read = await world.put()
    held = await world.commit(0, read)
    scan = await world.log.scan()
    objects.retain(scan.retained)
    hold = objects.hold(scan.retained[-1])
    newest = await world.commit(1)
    await world.commit(2, oldest=newest)
    for passes in range(5):
        await world.clock.advance(30 * DAY)
        await world.store.put(f"savepoints/mine/{'0' * 32}/{passes:06d}.base", b"a file")
        await world.clock.advance(3000)
        report = await world.clean(held=objects.held if in_driver else None)
        assert not report.plan.deletions
        assert report.plan.kept[Kept.HELD] == 2
    assert await world.has(read)
    assert await world.has(manifest_name(held))
    objects.release(hold)
    await world.store.put("savepoints/mine/savepoint.dstl", b"its descriptor")
    assert (await world.clean(held=objects.held if in_driver else None)).deleted == 2
    assert not await world.has(read)
    assert len(await names(world.store, "savepoints/")) == 6


async def test_what_a_savepoint_was_given_up_with_holds_nothing_up_for_ever(world: World) -> None:
    orphan = await world.put()
    await world.commit(0)
    await world.clock.advance(2 * GRACE)
    await world.store.put(f"savepoints/crashed/{'0' * 32}/000000.base", b"a file")
    assert (await world.clean()).plan.kept[Kept.HELD] == 1
    await world.clock.advance(3500)
    assert (await world.clean()).plan.kept[Kept.HELD] == 1
    await world.clock.advance(200)
    assert [each.info.name for each in (await world.clean()).plan.deletions] == [orphan]
