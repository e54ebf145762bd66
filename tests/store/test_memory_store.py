from collections.abc import AsyncIterator

import pytest

from dstl.store import MemoryStore, ObjectStore, PrefixedStore, open_store
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
