from collections.abc import AsyncIterator

import pytest

from dstl.store import MemoryStore, ObjectStore, PrefixedStore, open_store
from tests.simulation.manual_clock import ManualClock
from worlds.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = MemoryStore()
        yield store
        await store.close()


class TestPrefixedStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        inner = MemoryStore()
        for neighbour in ("job", "job-2/x", "jo/x", "jobs/x"):
            await inner.put(neighbour, b"not ours")
        store = PrefixedStore(inner, "job/a")
        yield store
        await store.close()


async def test_stores_of_one_name_share_their_objects() -> None:
    one, other = open_store("memory://shared-name"), open_store("memory://shared-name")
    await one.put("a", b"1")
    await one.close()
    assert await other.get("a") == b"1"


async def test_stores_without_a_name_share_nothing() -> None:
    await MemoryStore().put("a", b"1")
    assert not [info async for info in MemoryStore().list()]


async def test_the_injected_clock_stamps_objects() -> None:
    clock = ManualClock(wall=1000.0)
    store = MemoryStore(clock=clock)
    await store.put("a", b"1")
    await clock.advance(5)
    await store.put("b", b"1")
    times = [info.modified async for info in store.list()]
    assert times == [1000.0, 1005.0]
