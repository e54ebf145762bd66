"""The contract of a store on an S3 server, and what every server must do that DSTL relies on."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from moto.s3.models import S3Backend

from dstl.errors import AccessDenied, ObjectExists
from dstl.options import S3Options
from dstl.store import ObjectStore, S3Store, probe
from dstl.store.s3_client import S3Client
from worlds.s3_place import S3Place
from worlds.store_contract import StoreContract

pytestmark = [
    pytest.mark.s3server,
    pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning"),
]
BIG = bytes(range(256)) * (12 << 12)  # 12 MB: three parts of 5 MB


@pytest.fixture
def options(s3_place: S3Place) -> S3Options:
    # The smallest sizes that S3 allows, so that the contract's large object goes up in parts.
    return s3_place.options(multipart_threshold=5 << 20, multipart_part_size=5 << 20, read_timeout_s=10.0)


@pytest.fixture
async def s3_store(s3_place: S3Place, options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(s3_place.bucket, "some/prefix", options)
    yield store
    await store.close()


class TestS3Store(StoreContract):
    many = 130

    @pytest.fixture
    def store(self, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        # Three pages of a list, and three deletes, without the seconds that moto needs for 2,000 objects.
        monkeypatch.setattr("dstl.store.s3._PAGE", 50)
        return s3_store


async def test_moto_gives_a_free_name_to_one_of_two_puts(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = S3Backend.put_object

    def late(*args: Any, **more: Any) -> Any:
        time.sleep(0.02)
        return stores(*args, **more)

    monkeypatch.setattr(S3Backend, "put_object", late)
    puts = [s3_store.put("name", body, if_absent=True) for body in (b"one", b"other")]
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(one) for one in outcomes].count(ObjectExists) == 1


async def test_the_probe_accepts_the_server(s3_store: S3Store) -> None:
    await probe(s3_store)
    assert not [info async for info in s3_store.list()]


async def test_an_upload_that_was_given_up_leaves_no_parts(
    s3_store: S3Store, s3_place: S3Place, options: S3Options
) -> None:
    for after_s in (0.0, 0.01, 0.03, 0.1):
        putting = asyncio.create_task(s3_store.put("large", BIG * 3))
        await asyncio.sleep(after_s)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
    # Waits for the aborts.
    await s3_store.close()
    client = S3Client(options)
    answer = await client.call("list_multipart_uploads", Bucket=s3_place.bucket)
    await client.close()
    # An upload whose creation was cancelled before its answer came has no id to abort it by: the lifecycle rule's.
    assert len(answer.get("Uploads", ())) <= 1


async def test_a_wrong_secret_is_refused(
    s3_place: S3Place, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.config.getoption("--s3-endpoint") is None:
        pytest.skip("moto checks no signatures: --s3-endpoint")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    store = S3Store(s3_place.bucket, "", s3_place.options())
    with pytest.raises(AccessDenied, match="SignatureDoesNotMatch") as caught:
        await store.put("x", b"1", if_absent=True)
    await store.close()
    assert "another" not in str(caught.value)
