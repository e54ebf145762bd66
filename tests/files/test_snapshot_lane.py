"""Snapshots never delay a commit that does without them, and enter the index in their order."""

import asyncio

import pytest

from worlds.files import BIG, Stores, application, changelog, driven, noise
from worlds.waiting import until
from worlds.wrapped_store import Gate, is_segment

HOST = "127.0.0.2"
ZIP, SST = "state/0/0/1.zip", "state/0/0/SSTs/1-aa.sst"


@pytest.fixture
def gate() -> Gate:
    return Gate(which=is_segment)


@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
async def test_a_large_snapshot_rides_later_and_behind_its_files(host: str, stores: Stores, gate: Gate) -> None:
    async with application(stores, gate) as app:
        driver, task = await app.driver("run"), await app.executor(host, "run")
        await driver.offsets(0)
        await task.put(changelog(0, 1), b"changes")
        await task.put(SST, noise(BIG))
        await task.put(ZIP, b"names the file")
        await driver.commit(0)
        assert await driver.names("commits") == ["0"]
        async with application(stores) as other:
            assert await (await other.driver("")).names("state/0/0") == ["1.changelog"]
        # Deleted is only what a snapshot that is there makes dispensable.
        await task.delete(changelog(0, 1))
        await driver.batch(1, {changelog(0, 2): b"changes"})
        async with application(stores) as other:
            assert await (await other.driver("")).names("state/0/0") == ["1.changelog", "2.changelog"]
        assert await task.read(SST) == noise(BIG)
        gate.opened.set()
        batch = 2

        async def has_zip() -> bool:
            async with application(stores) as other:
                return "1.zip" in await (await other.driver("")).names("state/0/0")

        for batch in range(2, 60):
            await driver.batch(batch, {changelog(0, batch + 1): b"changes"})
            if await has_zip():
                break
            await asyncio.sleep(0.05)
        assert batch < 59
    async with driven(stores) as driver:
        later = [f"{version}.changelog" for version in range(2, batch + 2)]
        assert await driver.names("state/0/0") == sorted(["1.zip", "SSTs", *later])
        assert await driver.read(SST) == noise(BIG)
        assert await driver.read(ZIP) == b"names the file"


@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
async def test_what_is_deleted_after_it_was_stored_and_before_its_record_is_in_none(
    host: str, stores: Stores, gate: Gate
) -> None:
    """Prevents that what Spark has deleted stays for ever, or a snapshot without its files (seed 408 of files)."""
    async with application(stores, gate) as app:
        driver, task = await app.driver("run"), await app.executor(host, "run")
        await driver.offsets(0)
        for path, content in ((changelog(0, 1), b"changes"), (SST, noise(BIG)), (ZIP, b"names the file")):
            await task.put(path, content)
        await driver.commit(0)
        gate.opened.set()
        await asyncio.sleep(0.1)  # both are stored, and in no record yet
        await task.delete(ZIP)
        await task.delete(SST)
        await driver.batch(1, {changelog(0, 2): b"changes"})
        await driver.batch(2, {changelog(0, 3): b"changes"})
        async with application(stores) as other:
            kept = ["1.changelog", "2.changelog", "3.changelog"]
            assert await (await other.driver("")).names("state/0/0") == kept


async def test_a_snapshot_that_is_a_versions_only_copy_is_waited_for(stores: Stores, gate: Gate) -> None:
    async with application(stores, gate) as app:
        driver, far = await app.begun(HOST)
        await far.put(SST, noise(BIG))
        await far.put(ZIP, b"names the file")
        commit = asyncio.ensure_future(driver.commit(0))

        await until(lambda: gate.waiting, "the upload")
        await asyncio.sleep(0.1)
        assert not commit.done()
        gate.opened.set()
        await commit
    async with application(stores) as app:
        assert await (await app.driver("next")).names("state/0/0") == ["1.zip", "SSTs"]


async def test_a_host_that_is_lost_with_snapshots_fails_the_next_commit_for_spark_takes_them_for_stored(
    stores: Stores, gate: Gate
) -> None:
    async with application(stores, gate) as app:
        driver, far = await app.begun(HOST)
        await far.put(changelog(0, 1), b"changes")
        await far.put(SST, noise(BIG))
        await driver.commit(0)
        await driver.offsets(1)
        gate.opened.set()
        await app.end_host(HOST)
        with pytest.raises(Exception, match="restart the query"):
            await driver.commit(1)
