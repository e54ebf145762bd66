from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dstl.store import LocalStore, ObjectStore
from worlds.store_contract import StoreContract


class TestLocalStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        store = LocalStore(tmp_path / "not" / "yet" / "there")
        yield store
        await store.close()
