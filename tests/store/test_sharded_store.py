from collections.abc import AsyncIterator

import pytest

from dstl.errors import Invalid
from dstl.store import InstrumentedStore, MemoryStore, ObjectStore, ShardedStore, open_store, shard_names
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.latency import LatencyModel, LatencyParameters, LatencyStore
from worlds.store_contract import StoreContract


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
