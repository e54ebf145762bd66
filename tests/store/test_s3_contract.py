from collections.abc import AsyncIterator

import pytest

from dstl.options import S3Options
from dstl.store import ObjectStore, S3Store
from dstl.testing.store_contract import StoreContract


class TestS3Store(StoreContract):
    many = 130

    @pytest.fixture
    async def store(
        self, s3_bucket: str, s3_options: S3Options, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[ObjectStore]:
        # Three pages of a list, and three deletes, without the seconds that moto needs for 2,000 objects.
        monkeypatch.setattr("dstl.store.s3._PAGE", 50)
        store = S3Store(s3_bucket, "some/prefix", s3_options)
        yield store
        await store.close()
