import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from dstl.errors import Invalid, ObjectExists, Unavailable
from dstl.store import InstrumentedStore, MemoryStore, ObjectStore, ShardedStore, open_store, shard_names
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from tests.simulation.manual_clock import ManualClock
from worlds.memory_recorder import MemoryRecorder
from worlds.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = MemoryStore()
        yield store
        await store.close()


class TestPrefixOfAMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        whole = MemoryStore(name := uuid.uuid4().hex)  # its objects stay for as long as the process
        for neighbour in ("job", "job-2/x", "jo/x", "jobs/x"):
            await whole.put(neighbour, b"not ours")
        store = MemoryStore(name, "job/a")
        yield store
        await store.close()


async def test_stores_of_one_name_share_their_objects() -> None:
    one, other = open_store("memory://shared-name"), open_store("memory://shared-name")
    await one.put("a", b"1")
    await one.close()
    assert await other.get("a") == b"1"


def _stores(count: int) -> list[MemoryStore]:
    stores = [MemoryStore() for _ in range(count)]
    for index, store in enumerate(stores):
        store.location = f"memory://shard-{index}"
    return stores


class TestShardedStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = ShardedStore(_stores(3))
        yield store
        await store.close()


async def test_names_go_to_the_location_of_their_shard_and_all_others_to_the_first() -> None:
    stores = _stores(3)
    sharded = ShardedStore(stores)
    names = ["manifests/1", "marker", "s0/a", "s1/a", "s1/b", "s2/a", "s01/x", "s1x/y", "s1", "savepoints/s2/x"]
    for name in names:
        await sharded.put(name, name.encode(), if_absent=True)
    held = [[info.name async for info in store.list()] for store in stores]
    assert held[1] == ["s1/a", "s1/b"]
    assert held[2] == ["s2/a"]
    assert sorted([name for names in held for name in names]) == sorted(names)
    assert sorted([info.name async for info in sharded.list()]) == sorted(names)
    assert [await sharded.get(name) for name in names] == [name.encode() for name in names]
    assert shard_names(sharded) == ("s0", "s1", "s2")


async def test_a_location_that_was_taken_away_is_named_and_not_guessed() -> None:
    stores = _stores(2)
    await ShardedStore(stores).put("s1/a", b"x")
    fewer = ShardedStore(stores[:1])
    for call in (fewer.get("s1/a"), fewer.put("s1/b", b""), fewer.delete(["s1/a"])):
        with pytest.raises(Invalid, match="location number 2"):
            await call
    more = ShardedStore([*stores, *_stores(3)[2:]])
    assert await more.get("s1/a") == b"x"


async def test_what_lies_in_the_wrong_location_is_not_seen() -> None:
    stores = _stores(2)
    await stores[0].put("s1/foreign", b"x")
    await stores[1].put("manifests/foreign", b"x")
    assert not [info async for info in ShardedStore(stores).list()]


async def test_wrappers_are_looked_through() -> None:
    assert shard_names(InstrumentedStore(ShardedStore(_stores(2)))) == ("s0", "s1")
    assert shard_names(InstrumentedStore(MemoryStore())) == ("s0",)
    parameters = LatencyParameters(sizes=((1000, 1.0),), body_med=30.0, body_sig=0.3, bw_med=80.0, bw_sig=0.3)
    slow = LatencyStore(ShardedStore(_stores(2)), LatencyModel(parameters, seed=1))
    assert shard_names(slow) == ("s0", "s1"), "the model hides the shards from their writers"
    assert shard_names(FaultyStore(InstrumentedStore(ShardedStore(_stores(3))))) == ("s0", "s1", "s2")


def test_the_same_location_twice_is_refused() -> None:
    with pytest.raises(Invalid, match="different locations"):
        open_store("memory://twice/x,memory://twice/x")
    with pytest.raises(Invalid):
        ShardedStore([])


class TestInstrumentedStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = InstrumentedStore(MemoryStore())
        yield store
        await store.close()


async def test_each_call_is_counted_and_recorded_with_what_it_has_moved() -> None:
    recorder = MemoryRecorder()
    store = InstrumentedStore(MemoryStore(), recorder=recorder)
    await store.put("a", b"12345")
    with pytest.raises(ObjectExists):
        await store.put("a", b"12345", if_absent=True)
    await store.get("a")
    await store.head("a")
    async with aclosing(store.list()) as listed:
        async for _ in listed:
            break
    await store.delete(["a", "b"])
    assert store.calls == {"put": 2, "get": 1, "head": 1, "list": 1, "delete": 1}
    recorded = {f"storeRequests.{verb}": count for verb, count in store.calls.items()}
    assert recorder.counters == recorded | {"storeRequestFailures.put": 1}
    moved = {verb: list(recorder.samples[f"storeRequestBytes.{verb}"]) for verb in ("put", "get", "delete")}
    assert moved == {"put": [5], "get": [5], "delete": [2]}


async def test_seconds_and_failures_are_recorded() -> None:
    clock, recorder = ManualClock(), MemoryRecorder()
    rules = [FaultRule(Fault.UNAVAILABLE, "put", nth=(2,))]
    slow = FaultyStore(MemoryStore(), rules, clock=clock, latency=lambda *_: 0.25)
    store = InstrumentedStore(slow, recorder=recorder, clock=clock)
    first = asyncio.create_task(store.put("a", b"123"))
    await clock.advance(1)
    await first
    second = asyncio.create_task(store.put("b", b"123"))
    await clock.advance(1)
    with pytest.raises(Unavailable):
        await second
    assert recorder.counters == {"storeRequests.put": 2, "storeRequestFailures.put": 1}
    assert list(recorder.samples["storeRequestNanos.put"]) == pytest.approx([0.25e9, 0.25e9])
    assert list(recorder.samples["storeRequestBytes.put"]) == [3]
