"""The manifest log against a store that misbehaves: one number has one owner, and everybody learns whose it is."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest

from dstl.checkpoint.manifest.format import manifest_name, manifest_sequence
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import CorruptData, DstlError, Fenced, OutcomeUnknown, Unavailable
from dstl.store import MemoryStore, ObjectInfo, ObjectStore
from dstl.store.instrumented import InstrumentedStore
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime, virtual
from worlds.manifest_samples import QUERY, begun, checkpoint, commit, driver, kinds, names
from worlds.savepoints import replace


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(clock=None)


def faulty(store: ObjectStore, *rules: FaultRule) -> FaultyStore:
    return FaultyStore(store, rules, clock=LoopClock(), seed=1)


async def test_a_fence_stops_the_older_driver(store: MemoryStore) -> None:
    old, new = driver(store, 1), driver(store, 2)
    await old.fence(QUERY)
    await commit(old, 0)
    assert await new.fence(QUERY) == 3
    with pytest.raises(Fenced, match=r"fence of epoch 3; this driver \(epoch 1\) must stop"):
        await commit(old, 1)
    assert await commit(new, 1) == 4


async def test_a_log_whose_newest_record_is_damaged_is_not_taken_over(store: MemoryStore) -> None:
    await commit(await begun(store, 1), 0)
    await replace(store, manifest_name(2), b"rubbish")
    with pytest.raises(CorruptData, match=manifest_name(2)):
        await driver(store, 2).fence(QUERY)
    assert await names(store) == [manifest_name(2), manifest_name(1)]


async def test_nobody_commits_without_a_fence(store: MemoryStore) -> None:
    log = driver(store, 1)
    with pytest.raises(ValueError, match="not the next number"):
        await commit(log, 0)
    await log.fence(QUERY)
    with pytest.raises(ValueError, match="not the next number"):
        await log.commit(checkpoint(9, 0), [])
    assert await names(store) == [manifest_name(1)]


@pytest.mark.parametrize("shift", range(6))
def test_two_drivers_exactly_one_wins_each_number(seed: int, shift: int) -> None:
    """Several drivers fence and commit at will: every number has one record, and who was told so owns it."""

    async def run() -> None:
        inner = MemoryStore(clock=LoopClock())
        rng = random.Random(seed + shift)
        told: dict[int, int] = {}

        async def drive(number: int) -> None:
            rules = [
                FaultRule(Fault.LOST_RESPONSE, "put", chance=0.2),
                FaultRule(Fault.LATE_PUT, "put", chance=0.1, delay_s=rng.uniform(0, 3)),
                FaultRule(Fault.SLOW_DOWN, "put", chance=0.1),
                FaultRule(Fault.UNAVAILABLE, "list", chance=0.1),
                FaultRule(Fault.RESET, "get", chance=0.1),
            ]
            store = FaultyStore(
                inner,
                rules,
                seed=rng.randrange(1 << 32),
                clock=LoopClock(),
                latency=lambda verb, size, rng: rng.uniform(0, 0.2),
            )
            log = driver(store, number + 100 * seed, attempts=6)
            batch = 0
            for _ in range(25):
                await asyncio.sleep(rng.uniform(0, 1))
                try:
                    if not log.epoch or log.is_unknown:
                        await log.fence(QUERY)
                    committed = await commit(log, batch)
                    assert committed not in told, f"{committed} was promised twice"
                    told[committed] = log.epoch
                    batch += 1
                except Fenced:
                    log.epoch = 0
                except (OutcomeUnknown, Unavailable):
                    continue
            await store.drain()

        await asyncio.gather(*(drive(number) for number in range(3)))
        log = driver(inner, 7)
        scan = await log.scan()
        assert len(told) >= 10
        assert sorted(scan.records) == list(range(1, scan.tail + 1)), "numbers are dense"
        epoch = 0
        for sequence, found in sorted(scan.records.items()):
            if found.kind == "fence":
                epoch = sequence
            # Invariant 1: after a fence only its driver writes.
            assert found.epoch == epoch
        for sequence, epoch in told.items():
            assert (scan.records[sequence].kind, scan.records[sequence].epoch) == ("checkpoint", epoch)

    run_in_virtual_time(run(), shuffle=random.Random(seed + shift))


@virtual
async def test_766_a_lost_response_is_not_mistaken_for_another_driver() -> None:
    """SlateDB#766: the repeated put finds the name taken, by ourselves."""
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.LOST_RESPONSE, "put", nth=(1, 3)))
    log = driver(store, 1)
    assert await log.fence(QUERY) == 1
    assert await commit(log, 0) == 2
    assert [f.fault for f in store.fired] == [Fault.LOST_RESPONSE] * 2
    assert await kinds(inner) == {1: "fence", 2: "checkpoint"}


@virtual
async def test_an_unknown_commit_result_is_not_retried_as_a_new_commit() -> None:
    """FoundationDB's commit_unknown_result, Materialize#14101: one number, one record, whatever is repeated."""
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.LATE_PUT, "put", nth=(2, 3), delay_s=600))
    log = await begun(store, 1)
    assert await commit(log, 0) == 2
    await asyncio.sleep(1000)
    assert await kinds(inner) == {1: "fence", 2: "checkpoint"}
    assert await commit(log, 1) == 3


@virtual
async def test_a_late_commit_after_giving_up_meets_the_abort_marker() -> None:
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.LATE_PUT, "put", nth=(2, 3, 4, 5), delay_s=3600))
    log = driver(store, 1, attempts=4)
    await log.fence(QUERY)
    with pytest.raises(Unavailable, match="given up"):
        await commit(log, 0)
    assert not log.is_unknown
    assert await commit(log, 0) == 3
    await asyncio.sleep(7200)
    assert store.late == 0
    assert await kinds(inner) == {1: "fence", 2: "abort", 3: "checkpoint"}
    assert [c.checkpoint_id for c in await log.checkpoints()] == [3]


@virtual
async def test_a_commit_that_lands_before_its_abort_marker_is_committed() -> None:
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.LATE_PUT, "put", nth=(2, 3), delay_s=0.001))
    log = driver(store, 1, attempts=2)
    await log.fence(QUERY)
    assert await commit(log, 0) == 2
    assert await kinds(inner) == {1: "fence", 2: "checkpoint"}


@pytest.mark.parametrize("of_marker", [Fault.LATE_PUT, Fault.UNAVAILABLE])
@virtual
async def test_an_unknown_commit_is_neither_reported_failed_nor_built_upon(of_marker: Fault) -> None:
    """The record got no answer, and the marker none or a refusal: nothing may be deleted, and the driver stops."""
    inner = MemoryStore(clock=LoopClock())
    late = FaultRule(Fault.LATE_PUT, "put", nth=(2, 3), delay_s=60)
    store = faulty(inner, late, FaultRule(of_marker, "put", nth=(2, 3), delay_s=61))
    log = driver(store, 1, attempts=2)
    await log.fence(QUERY)
    with pytest.raises(OutcomeUnknown):
        await commit(log, 0)
    assert log.is_unknown
    with pytest.raises(OutcomeUnknown, match="restart"):
        await commit(log, 0)
    await asyncio.sleep(100)
    successor = driver(inner, 2)
    assert await successor.fence(QUERY) == 3
    assert [c.batch_id for c in await successor.checkpoints()] == [0]


@virtual
async def test_a_commit_that_was_stored_and_cannot_be_read_back_is_unknown() -> None:
    """A read that fails says nothing about the record: its segments must stay."""
    inner = MemoryStore(clock=LoopClock())
    store = faulty(
        inner, FaultRule(Fault.LOST_RESPONSE, "put", nth=(2,)), FaultRule(Fault.SHORT_GET, "get", chance=1.0)
    )
    log = driver(store, 1, attempts=2)
    await log.fence(QUERY)
    with pytest.raises(OutcomeUnknown):
        await commit(log, 0)
    assert await kinds(inner) == {1: "fence", 2: "checkpoint"}


@virtual
async def test_a_commit_that_a_deadline_cancels_is_unknown() -> None:
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.STUCK, "put", nth=(2,), delay_s=5))
    log = await begun(store, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(30):
            await commit(log, 0)
    assert log.is_unknown
    await log.fence(QUERY)
    assert not log.is_unknown
    await asyncio.sleep(10)
    # The stuck put came too late: the fence had its number.
    assert await kinds(inner) == {1: "fence", 2: "fence"}


@virtual
async def test_1622_a_zombie_whose_number_was_created_and_cleaned_cannot_commit() -> None:
    """SlateDB#352, #1622: put-if-absent forgets a name once it is deleted; fences and markers are not deleted."""
    store = MemoryStore(clock=LoopClock())
    zombie = await begun(store, 1, 1)
    newer = await begun(store, 2)
    for batch in range(1, 30):
        await commit(newer, batch, oldest=max(0, newer.next_sequence - 2))
    scan = await newer.scan()
    kind = await kinds(store)
    await store.delete([manifest_name(s) for s, k in kind.items() if k == "checkpoint" and s < scan.boundary])
    with pytest.raises(Fenced):
        await commit(zombie, 1)
    assert [c.batch_id for c in await newer.checkpoints()] == [27, 28, 29]


@virtual
async def test_1622_a_repeated_request_cannot_bring_a_cleaned_checkpoint_back_to_life() -> None:
    """The zombie's own record was committed, subsumed and cleaned while it waited to repeat the request."""
    inner = MemoryStore(clock=LoopClock())
    store = faulty(inner, FaultRule(Fault.LOST_RESPONSE, "put", nth=(2,)))
    zombie = await begun(store, 1)
    paused = asyncio.ensure_future(commit(zombie, 0))
    for _ in range(4):
        await asyncio.sleep(0)
    assert await names(inner) == [manifest_name(2), manifest_name(1)]
    newer = await begun(inner, 2)
    for batch in range(1, 6):
        await commit(newer, batch, oldest=max(0, newer.next_sequence - 2))
    await inner.delete([manifest_name(2)])
    with pytest.raises(Fenced):
        await paused
    assert manifest_name(2) in await names(inner), "the fault did not happen"
    assert 2 not in [c.checkpoint_id for c in await newer.checkpoints()]


@virtual
async def test_1682_a_fence_behind_the_cleanup_boundary_does_not_count() -> None:
    """SlateDB#1682: a slow starter wins a number that is free only because its checkpoint was cleaned away."""
    store = MemoryStore(clock=LoopClock())
    old = await begun(store, 1, 1)
    slow = driver(FaultyStore(store, clock=LoopClock(), latency=lambda v, s, r: 10.0 if v == "put" else 0.0), 2)
    starting = asyncio.ensure_future(slow.fence(QUERY))
    await asyncio.sleep(1)
    for batch in range(1, 9):
        await commit(old, batch, oldest=old.next_sequence - 1)
    await store.delete([manifest_name(s) for s in range(3, 9)])
    epoch = await starting
    assert epoch > 9, "the fence is behind the checkpoints of the older driver"
    with pytest.raises(Fenced):
        await commit(old, 9)
    assert await commit(slow, 9) == epoch + 1


@virtual
async def test_1682_a_fence_that_steps_aside_does_not_step_into_a_cleaned_number() -> None:
    """Its own fence was overtaken; the next number after it is free again, and far below the newer driver's."""
    store = MemoryStore(clock=LoopClock())
    answers = FaultyStore(store, [FaultRule(Fault.LOST_RESPONSE, "put", nth=(1,))], clock=LoopClock(), seed=3)
    slow = driver(answers, 2)
    starting = asyncio.ensure_future(slow.fence(QUERY))
    for _ in range(6):
        await asyncio.sleep(0)
    newer = driver(store, 3)
    assert await newer.fence(QUERY) == 2
    for batch in range(8):
        await commit(newer, batch, oldest=max(0, newer.next_sequence - 1))
    await store.delete([manifest_name(s) for s in range(3, 9)])
    assert await starting == 11
    with pytest.raises(Fenced):
        await commit(newer, 8)


@virtual
async def test_an_answer_that_comes_after_the_next_runs_fence_is_not_taken_for_its_own() -> None:
    """Found in review: the late answer moved the new run's number on, and its record was taken for a success."""

    class SlowAnswers(FaultyStore):
        slow = False

        async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
            slow = self.slow
            info = await super().put(name, data, if_absent=if_absent)
            if slow:
                await asyncio.sleep(50)
            return info

    store = SlowAnswers(MemoryStore(clock=LoopClock()), clock=LoopClock())
    log = await begun(store, 1)
    store.slow = True
    late = asyncio.ensure_future(commit(log, 0))
    await asyncio.sleep(1)
    store.slow = False
    assert await log.fence(QUERY) == 3
    with pytest.raises(Fenced, match="of epoch 1; this driver has begun 3"):
        await late
    assert log.next_sequence == 4
    assert not log.is_unknown
    assert [c.batch_id for c in await log.checkpoints()] == [0], "and the new run has seen it"


@virtual
async def test_a_stale_list_does_not_hide_the_newest_checkpoints() -> None:
    inner = MemoryStore(clock=LoopClock())
    old = await begun(inner, 1, 1)
    await asyncio.sleep(100)
    store = faulty(inner, FaultRule(Fault.STALE_LIST, "list", nth=tuple(range(1, 9)), delay_s=50))
    writer = driver(store, 2)
    writer.epoch, writer.next_sequence = old.epoch, old.next_sequence
    await commit(writer, 1)
    await commit(writer, 2)
    reader = driver(store, 3)
    assert [c.batch_id for c in await reader.checkpoints()] == [0, 1, 2]
    assert await reader.fence(QUERY) == 5
    assert store.fired


@virtual
async def test_a_stale_list_that_shows_nothing_does_not_hide_the_record_at_the_boundary() -> None:
    await asyncio.sleep(100)
    store = faulty(MemoryStore(clock=LoopClock()), FaultRule(Fault.STALE_LIST, "list", nth=(4,), delay_s=50))
    log = await begun(store, 1, 1)
    await commit(log, 1, oldest=2)
    reader = driver(store, 2)
    assert [c.checkpoint_id for c in await reader.checkpoints()] == [2, 3]
    assert [c.checkpoint_id for c in await reader.checkpoints()] == [2, 3], "whatever a listing leaves out"
    assert store.fired


@virtual
@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.UNAVAILABLE])
async def test_recovery_under_503_for_30_seconds(fault: Fault) -> None:
    """AutoMQ#3177, #3601: every request is refused for half a minute, the LIST among them."""
    inner = MemoryStore(clock=LoopClock())
    await begun(inner, 1, 1)
    store = faulty(inner, *(FaultRule(fault, verb, chance=1.0) for verb in ("put", "get", "head", "list")))
    asyncio.get_running_loop().call_later(30, store.rules.clear)
    log = ManifestLog(store, seeded_runtime(5))
    assert (await log.scan()).query_id == QUERY
    epoch = await log.fence(QUERY)
    assert [c.batch_id for c in await log.checkpoints()] == [0]
    store.rules[:] = [FaultRule(fault, "put", chance=1.0)]
    asyncio.get_running_loop().call_later(30, store.rules.clear)
    assert await commit(log, 1) == epoch + 1


@virtual
@pytest.mark.parametrize("verb", ["get", "head", "list"])
async def test_a_start_is_told_within_a_minute_that_the_store_is_away_whatever_it_still_answers(verb: str) -> None:
    """The newest record is read within its list: attempts at both must not multiply to a quarter of an hour."""
    inner = MemoryStore(clock=LoopClock())
    await begun(inner, 1, 1)
    store = faulty(inner, FaultRule(Fault.UNAVAILABLE, verb, chance=1.0))
    async with asyncio.timeout(60):
        with pytest.raises(Unavailable):
            await ManifestLog(store, seeded_runtime(5)).scan()


@virtual
async def test_a_store_that_stays_away_is_reported_and_nothing_is_unknown() -> None:
    """It was never reached. Where it answered 503, something was: then a marker must be won first."""
    store = faulty(MemoryStore(clock=LoopClock()))
    log = await begun(store, 1)
    store.rules[:] = [FaultRule(Fault.UNAVAILABLE, "put", chance=1.0)]
    with pytest.raises(Unavailable, match=r"did not take record 2 in \d+ attempts: .*unavailable \(injected\)"):
        await commit(log, 0)
    assert not log.is_unknown
    store.rules[:] = [FaultRule(Fault.SLOW_DOWN, "put", nth=(1, 2, 3, 4))]
    with pytest.raises(Unavailable, match=r"record 2 could not be stored .*given up: .*slow-down \(injected\)"):
        await commit(log, 0)
    assert not log.is_unknown
    store.rules.clear()
    assert await commit(log, 0) == 3
    assert await kinds(store) == {1: "fence", 2: "abort", 3: "checkpoint"}


@virtual
@pytest.mark.parametrize("refused", [3, 4])
async def test_a_commit_that_was_stored_and_answered_503_is_no_other_drivers(refused: int) -> None:
    """A gateway's answer while its server restarts. Before, the driver's next try fenced the driver itself."""
    gateway = FaultRule(Fault.STORED_SLOW_DOWN, "put", nth=(2,))
    restarting = FaultRule(Fault.SLOW_DOWN, "put", nth=tuple(range(1, refused + 1)))
    store = faulty(MemoryStore(clock=LoopClock()), gateway, restarting)
    log = driver(store, 1)
    store.rules.remove(restarting)
    await log.fence(QUERY)
    store.rules.append(restarting)
    assert await commit(log, 0) == 2
    assert await kinds(store) == {1: "fence", 2: "checkpoint"}
    assert await commit(log, 1) == 3


@pytest.mark.parametrize("differs", [False, True])
async def test_a_record_of_our_own_earlier_try_is_not_another_drivers(store: MemoryStore, differs: bool) -> None:
    """Whatever the store said of that try: an epoch is one driver's."""
    log = await begun(store, 1)
    earlier = driver(store, 2)
    earlier.epoch, earlier.next_sequence = log.epoch, log.next_sequence
    await commit(earlier, 0, objects=("a/b",) if differs else ())
    if differs:
        with pytest.raises(OutcomeUnknown, match=r"record 2 .* earlier try of this driver.*restart the query"):
            await commit(log, 0)
        assert log.is_unknown
        assert await log.fence(QUERY) == 3
    else:
        assert await commit(log, 0) == 2
    assert [c.batch_id for c in await log.checkpoints()] == [0]
    assert await commit(log, 1) == log.next_sequence - 1


async def test_swapped_manifests_are_noticed(store: MemoryStore) -> None:
    log = await begun(store, 1, 2)
    first, second = await store.get(manifest_name(2)), await store.get(manifest_name(3))
    await store.put(manifest_name(2), second)
    await store.put(manifest_name(3), first)
    with pytest.raises(CorruptData, match="swapped"):
        await log.checkpoints()


async def test_a_manifest_of_another_location_is_noticed(store: MemoryStore) -> None:
    log = await begun(store, 1, 1)
    other = MemoryStore()
    stranger = driver(other, 2)
    await stranger.fence("another-query")
    await stranger.commit(checkpoint(2, 0, query_id="another-query"), [])
    await commit(log, 1)
    await store.put(manifest_name(2), await other.get(manifest_name(2)))
    with pytest.raises(CorruptData, match=f"another-query.*belongs to query {QUERY}"):
        await log.checkpoints()


async def test_what_is_below_the_boundary_is_not_read_however_damaged(store: MemoryStore) -> None:
    log = await begun(store, 1)
    for batch in range(5):
        await commit(log, batch, oldest=max(0, log.next_sequence - 1))
    await store.put(manifest_name(2), b"rubbish")
    assert [c.checkpoint_id for c in await driver(store, 2).checkpoints()] == [5, 6]
    successor = await begun(store, 3)
    assert (await successor.scan()).boundary == 5
    assert (await successor.read(successor.epoch)).oldest == 5, "the fence carries the boundary on"


async def test_the_owner_is_found_behind_gaps_and_fences_which_own_nothing(store: MemoryStore) -> None:
    """A gap below the tail must not make the location look free for another query."""
    log = driver(store, 1)
    await log.fence("of-a-start-that-died")
    assert (await log.scan()).query_id == ""
    await log.fence(QUERY)
    for batch in range(3):
        await commit(log, batch)
    await log.fence("")
    await log.fence("of-a-start-that-looked-before-the-first-record")
    await store.delete([manifest_name(5), manifest_name(4)])
    scan = await log.scan()
    assert (scan.query_id, dict(scan.damaged)) == (QUERY, {})


@pytest.mark.parametrize(
    "name",
    [
        "manifests/1.dstl",
        "manifests/99999999999999999999.dstl",
        "manifests/9999999999999999999８.dstl",
        "manifests/99999999999999999998.dst",
        "x/manifests/99999999999999999998.dstl",
        "manifests/+9999999999999999998.dstl",
        "manifests/199999999999999999998.dstl",
        "manifests/99999999999999999998.dstl.dstl",
    ],
)
def test_what_is_no_record_is_none(name: str) -> None:
    assert manifest_sequence(name) is None


def test_every_read_that_fails_once_is_repeated() -> None:
    """Fail-the-n-th-call: whichever request of a start fails, the start succeeds."""

    async def run(verb: str, number: int) -> bool:
        inner = MemoryStore(clock=LoopClock())
        await begun(inner, 1, 1)
        store = faulty(inner, FaultRule(Fault.RESET, verb, nth=(number,)))
        log = driver(store, 2)
        try:
            await log.scan()
            await log.fence(QUERY)
            assert [c.batch_id for c in await log.checkpoints()] == [0]
            assert await commit(log, 1) == log.epoch + 1
        except DstlError as error:
            raise AssertionError(f"{verb} number {number} failed: {error!r}") from error
        return bool(store.fired)

    for verb in ("put", "get", "head", "list"):
        number = 1
        while run_in_virtual_time(run(verb, number)):
            number += 1
        assert number > 1


@virtual
async def test_a_start_does_not_ask_for_more_the_longer_the_query_has_run() -> None:
    """Records below the boundary stay for a day: of a batch a second a listing of them all takes 87 requests."""

    async def asked(batches: int) -> tuple[int, int]:
        inner = MemoryStore(clock=LoopClock())
        before = await begun(inner, 1)
        for batch in range(batches):
            await commit(before, batch, oldest=max(0, before.next_sequence - 2))
        store = Counted(inner)
        after = driver(store, 2)
        scan = await after.scan()
        await after.fence(QUERY)
        assert [c.batch_id for c in scan.retained] == [batches - 3, batches - 2, batches - 1]
        return store.listed, store.calls.total()

    few, many = await asked(4), await asked(100)
    assert few == many
    assert many[0] < 20


class Counted(InstrumentedStore):
    """Counts the names that listings have shown."""

    listed = 0

    async def list(self, prefix: str = "") -> AsyncGenerator[ObjectInfo, None]:
        async for info in super().list(prefix):
            self.listed += 1
            yield info
