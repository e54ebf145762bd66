"""``verify`` finds every flipped byte of every object, and names object, checkpoint and next step."""

import random

import pytest

from dstl.checkpoint.manifest.format import MANIFEST_VERSION, encode_record, manifest_name
from dstl.checkpoint.upkeep.verification import LocationVerification, verify_location
from dstl.errors import Unavailable
from dstl.rpc.fleet_messages import PersistedSegment
from dstl.store import MemoryStore
from handles.checkpoint import referenced_objects
from handles.key_group import KeyGroupRange
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime
from worlds.manifest_samples import names
from worlds.real_location import GROUPS, Location, fill, piece, segment


def verified(store: MemoryStore | FaultyStore) -> LocationVerification:
    async def run() -> LocationVerification:
        return await verify_location(store, seeded_runtime(1))

    return run_in_virtual_time(run())


def filled() -> tuple[MemoryStore, Location]:
    store = MemoryStore()

    async def run() -> Location:
        return await fill(store, seeded_runtime(7))

    return store, run_in_virtual_time(run())


async def _bytes(store: MemoryStore) -> dict[str, bytes]:
    return {name: await store.get(name) for name in await names(store)}


def contents(store: MemoryStore) -> dict[str, bytes]:
    return run_in_virtual_time(_bytes(store))


def put(store: MemoryStore, name: str, data: bytes) -> None:
    async def run() -> None:
        await store.put(name, data)

    run_in_virtual_time(run())


def delete(store: MemoryStore, name: str) -> None:
    async def run() -> None:
        await store.delete([name])

    run_in_virtual_time(run())


def test_a_sound_location_has_no_problem() -> None:
    store, location = filled()
    done = verified(store)
    assert done.problems == ()
    assert [c.checkpoint_id for c in done.checkpoints] == [6, 7]
    assert done.objects == len(contents(store))
    assert (done.strays, done.others) == (1, 0)
    assert all(c.materialized for c in location.made[-2:])


def test_every_flipped_byte_of_every_object_is_reported(rng: random.Random) -> None:
    """Every byte of the small objects, and of each larger one some of every region; one bit of each, at random."""
    store, _ = filled()
    tried = 0
    for name, data in contents(store).items():
        places = {*range(0, len(data), 17), *range(0, 16, 3), *range(len(data) - 24, len(data), 2)}
        for at in sorted(places & set(range(len(data)))):
            damaged = bytearray(data)
            damaged[at] ^= 1 << rng.randrange(8)
            put(store, name, bytes(damaged))
            problems = verified(store).problems
            assert name in [p.object for p in problems], f"byte {at} of {name}"
            tried += 1
        put(store, name, data)
    assert tried > 250
    assert verified(store).problems == ()


def test_a_missing_object_is_reported_with_the_checkpoints_that_need_it() -> None:
    store, location = filled()
    needed = {s.segment[0] for c in location.made[-2:] for s in c.segments} | {
        m.name for c in location.made[-2:] for m in c.materialized
    }
    assert len(needed) >= 4
    for name in needed:
        data = contents(store)[name]
        delete(store, name)
        found = [p for p in verified(store).problems if p.object == name]
        assert {p.kind for p in found} == {"missing"}
        assert all(p.checkpoints for p in found)
        put(store, name, data)


@pytest.mark.parametrize("change", ["truncated", "emptied", "extended"])
def test_a_cut_or_extended_object_is_damaged(change: str) -> None:
    store, _ = filled()
    for name, data in contents(store).items():
        put(store, name, {"truncated": data[:-1], "emptied": b"", "extended": data + b"\0"}[change])
        assert name in [p.object for p in verified(store).problems], name
        put(store, name, data)


def test_swapped_objects_are_noticed() -> None:
    store, location = filled()
    one, two = (c.segments[-1].segment[0] for c in (location.made[2], location.made[4]))
    before = contents(store)
    put(store, one, before[two])
    put(store, two, before[one])
    assert {one, two} <= {p.object for p in verified(store).problems}


async def begun(store: MemoryStore) -> Location:
    """A location that a driver has taken over."""
    location = Location(store, seeded_runtime(3))
    await location.log.fence("real-query")
    return location


def test_a_sound_segment_that_lacks_what_the_manifest_says_is_noticed() -> None:
    """The handle fits, every byte is right, and still it is another segment: what it holds is compared as well."""
    store = MemoryStore()

    async def run() -> None:
        location = await begun(store)
        await location.commit([await location.stored(segment(("other", 0, (0,))))], [piece("a", 0)])

    run_in_virtual_time(run())
    (problem,) = verified(store).problems
    assert "holds 0 of the 1 change sets [0, 1) of log a" in problem.detail


def test_key_groups_that_a_restore_would_not_look_for_are_noticed() -> None:
    store = MemoryStore()

    async def run() -> None:
        location = await begun(store)
        data = segment(("a", 0, (0, GROUPS - 1)))
        made = await location.stored(data)
        narrow = PersistedSegment(made.handle, KeyGroupRange(0, 1))
        await location.commit([narrow], [piece("a", 0, key_groups=KeyGroupRange(0, 1))])

    run_in_virtual_time(run())
    (problem,) = verified(store).problems
    assert f"key groups 0-{GROUPS - 1}" in problem.detail
    assert "outside 0-1" in problem.detail


def test_a_flip_in_a_part_of_a_base_that_is_no_longer_of_use_is_noticed() -> None:
    store = MemoryStore()

    async def run() -> str:
        location = await begun(store)
        await location.commit([await location.stored(segment(("a", 0, (0,))))], [piece("a", 0)])
        report = await location.base(2)
        (handle,) = report.handles
        partly = report.model_copy(
            update={"handles": (handle.model_copy(update={"parts": handle.parts[1:]}),), "first_key_group": 1}
        )
        await location.commit([], [], partly)
        return handle.name

    name = run_in_virtual_time(run())
    assert verified(store).problems == ()
    data = contents(store)[name]
    put(store, name, data[:5] + bytes([data[5] ^ 1]) + data[6:])
    assert [p.object for p in verified(store).problems] == [name]


def test_damage_on_the_way_is_not_damage_in_the_store() -> None:
    store, _ = filled()
    for number in range(1, 12):
        for fault in (Fault.CORRUPT_GET, Fault.SHORT_GET, Fault.SLOW_DOWN):
            faulty = FaultyStore(store, [FaultRule(fault, "get", nth=(number,), only=".seg")], clock=LoopClock())
            assert verified(faulty).problems == ()


def test_what_a_running_query_deletes_meanwhile_is_no_damage() -> None:
    """Read-only verbs are safe beside a running query: the oldest checkpoint is subsumed while it is being read."""
    store, location = filled()

    class Racing(FaultyStore):
        raced = False

        async def list(self, prefix: str = ""):  # type: ignore[no-untyped-def, override]
            shown = [info async for info in super().list(prefix)]
            if prefix and not self.raced:
                self.raced = True
                data = segment(("c", 3, (2,)))
                await location.commit([location.inlined(data)], [piece("c", 3)])
                needed = {n for c in location.made[-2:] for n in referenced_objects(c)}
                gone = {manifest_name(c.checkpoint_id) for c in location.made[:-2]}
                gone |= {n for c in location.made[:-2] for n in referenced_objects(c)}
                await self.inner.delete(sorted(gone - needed))
            for info in shown:
                yield info

    racing = Racing(store, clock=LoopClock())
    assert verified(racing).problems == ()
    assert racing.raced
    assert manifest_name(location.made[-4].checkpoint_id) not in contents(store)


def test_a_record_of_a_newer_version_asks_for_an_upgrade() -> None:
    store, location = filled()

    async def run() -> None:
        record = await location.log.read(location.log.next_sequence - 1)
        await store.put(
            manifest_name(location.log.next_sequence),
            encode_record(
                record.model_copy(
                    update={
                        "version": MANIFEST_VERSION + 1,
                        "sequence": location.log.next_sequence,
                        "kind": "fence",
                        "checkpoint": None,
                    }
                )
            ),
        )

    run_in_virtual_time(run())
    (problem,) = verified(store).problems
    assert (problem.kind, problem.next_step) == ("unsupported", "upgrade DSTL here")
    assert f"format {MANIFEST_VERSION + 1}" in problem.detail


def test_a_store_that_does_not_answer_is_no_damage() -> None:
    store, _ = filled()
    faulty = FaultyStore(store, [FaultRule(Fault.UNAVAILABLE, "get", chance=1.0, only=".seg")], clock=LoopClock())
    with pytest.raises(Unavailable):
        verified(faulty)


def test_a_segment_larger_than_the_memory_for_it_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.checkpoint.upkeep.object_checks._WHOLE", 64)
    store, location = filled()
    assert verified(store).problems == ()
    name = location.made[-1].segments[-1].segment[0]
    data = contents(store)[name]
    for at in range(0, len(data), 7):
        put(store, name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert name in [p.object for p in verified(store).problems]
