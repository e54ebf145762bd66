"""A place on S3 for a test that any server must pass: on moto here, or on the server that ``--s3-endpoint`` names."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from uuid import uuid4

from dstl.options import S3Options
from dstl.store.s3_client import S3Client
from worlds.s3_server import S3Server

_buckets = count()


@dataclass(frozen=True)
class S3Place:
    """An empty bucket, and where its server is."""

    endpoint_url: str
    bucket: str

    @property
    def location(self) -> str:
        return f"s3://{self.bucket}"

    def options(self, **more: object) -> S3Options:
        return S3Options(endpoint_url=self.endpoint_url, **more)


@contextmanager
def moto_place(server: S3Server) -> Iterator[S3Place]:
    """A new bucket of a server that this process runs; it ends with the process."""
    bucket = f"place-{next(_buckets)}"
    with server.credentials():
        server.make_bucket(bucket)
        yield S3Place(server.endpoint_url, bucket)


@contextmanager
def foreign_place(endpoint_url: str) -> Iterator[S3Place]:
    """A bucket that is made on a server somewhere, with the environment's credentials, and deleted in the end."""
    place = S3Place(endpoint_url, f"dstl-test-{uuid4().hex[:12]}")
    asyncio.run(_make(place))
    try:
        yield place
    finally:
        asyncio.run(_delete(place))


async def _make(place: S3Place) -> None:
    async with _client(place) as client:
        await client.call("create_bucket", Bucket=place.bucket)


async def _delete(place: S3Place) -> None:
    async with _client(place) as client:
        while found := (await client.call("list_objects_v2", Bucket=place.bucket)).get("Contents"):
            keys = [{"Key": each["Key"]} for each in found]
            await client.call("delete_objects", Bucket=place.bucket, Delete={"Objects": keys, "Quiet": True})
        await client.call("delete_bucket", Bucket=place.bucket)


@asynccontextmanager
async def _client(place: S3Place) -> AsyncIterator[S3Client]:
    client = S3Client(place.options())
    try:
        yield client
    finally:
        await client.close()
