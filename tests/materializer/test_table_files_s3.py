"""Bases of RocksDB tables as their files in S3: uploaded once, restored, damaged, cached on the host."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from dstl.options import S3Options
from dstl.store import S3Store
from dstl.testing.s3_server import S3Server
from worlds.materialization import EAGER, World

pytest.importorskip("rocksdict")
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")

_buckets = count()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server, server.credentials():
        yield server


@pytest.fixture
def bucket(server: S3Server) -> str:
    name = f"table-files-{next(_buckets)}"
    server.make_bucket(name)
    server.log.clear()
    return name


@asynccontextmanager
async def world_on(server: S3Server, bucket: str, seed: int, directory: Path) -> AsyncIterator[World]:
    store = S3Store(bucket, "job", S3Options(endpoint_url=server.endpoint_url))
    options = EAGER.model_copy(update={"cache_directory": str(directory / "cache"), "share_files": True})
    world = World(seed, store=store, options=options, table="rocksdb", directory=directory / "tables", partitions=1)
    world.memory = store  # type: ignore[assignment]
    try:
        await world.start(1)
        yield world
    finally:
        await world.close()
        await store.close()


async def batches(world: World, how_many: int, size: int) -> None:
    for _ in range(how_many):
        await world.batch_of(size)
        await world.materialized()


def objects(world: World) -> set[str]:
    assert world.newest is not None
    return {name for handle in world.newest.materialized for name in handle.objects()}


def requested(server: S3Server, method: str) -> list[str]:
    """Names of base objects that were asked for, once per request."""
    paths = [one.path.split("?")[0] for one in server.log if one.method == method]
    return [path.split("/job/", 1)[1] for path in paths if path.endswith(".base")]


async def test_only_new_files_go_up_before_and_after_a_restart_from_s3(
    server: S3Server, bucket: str, seed: int, tmp_path: Path
) -> None:
    async with world_on(server, bucket, seed, tmp_path) as world:
        await batches(world, 1, 8000)
        await batches(world, 4, 4)
        put = requested(server, "PUT")
        assert len(put) == len(set(put))
        assert objects(world) <= set(put)
        before = objects(world)
        last = max(handle.materialization_id for handle in world.newest.materialized)
        server.log.clear()
        reports = await world.start(1)
        assert reports[0].fallbacks == ()
        await world.check(world.newest)
        while any(handle.materialization_id <= last for handle in world.newest.materialized):
            await batches(world, 1, 4)
        for handle in world.newest.materialized:
            assert before & set(handle.objects()), "the restarted operator uploaded all of its state again"
        assert not before & set(requested(server, "PUT"))
        assert objects(world) - before <= set(requested(server, "PUT"))
        await world.check(world.newest, 2)


@pytest.mark.parametrize("kind", ["damaged", "missing"])
async def test_a_bad_file_in_s3_costs_the_newest_base_only(
    server: S3Server, bucket: str, seed: int, tmp_path: Path, kind: str
) -> None:
    async with world_on(server, bucket, seed, tmp_path) as world:
        await batches(world, 5, 80)
        assert world.newest is not None
        newest = max((h for h in world.newest.materialized if h.operator == "left"), key=lambda h: h.checkpoint)
        victim = newest.files[0].name
        data = bytearray(await world.memory.get(victim))
        await world.memory.delete([victim])
        if kind == "damaged":
            data[len(data) // 2] ^= 4
            await world.memory.put(victim, bytes(data))
        world.options = world.options.model_copy(update={"cache_bytes": 0})
        reports = await world.start(1)
        assert reports[0].fallbacks == (victim,)
        await world.check(world.newest)
        await batches(world, 3, 5)
        assert victim not in objects(world)
        await world.check(world.newest, 3)


async def test_the_hosts_cache_takes_the_place_of_s3_only_where_its_checksums_match(
    server: S3Server, bucket: str, seed: int, tmp_path: Path
) -> None:
    async with world_on(server, bucket, seed, tmp_path) as world:
        await batches(world, 5, 80)
        assert world.newest is not None
        files = {file.name for handle in world.newest.materialized for file in handle.files}
        server.log.clear()
        await world.start(1)
        assert not set(requested(server, "GET")) & files
        assert world.members[0].recorder.counters["baseCacheHits"] > 0
        for path in (tmp_path / "cache" / "dstl-bases").iterdir():
            data = path.read_bytes()
            path.unlink()  # The tables link the same file.
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        server.log.clear()
        await world.start(1)
        assert set(requested(server, "GET")) & files, "a cached file was believed whose checksum is another"
        await world.check(world.newest)
        server.log.clear()
        await world.start(1)
        assert not set(requested(server, "GET")) & files, "what was fetched again was not cached"
        await world.check(world.newest)
