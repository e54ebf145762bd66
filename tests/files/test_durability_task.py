"""``spark.dstl.durability=task``: what a task has put is stored when the task ends, and a lost host costs nothing."""

import asyncio

import pytest

from dstl.errors import AccessDenied, Fenced
from worlds.files import BIG, Stores, application, changelog, denying, driven, noise

HOST = "127.0.0.2"


@pytest.mark.parametrize("commit", ["now", "with-next"])
async def test_a_host_that_is_lost_before_the_commit_loses_nothing(commit: str, stores: Stores) -> None:
    async with application(stores, durability="task", commit=commit) as app:
        driver, far = await app.begun(HOST)
        await far.put(changelog(0, 1), b"of the first host", attempt=1)
        await far.put("state/0/0/SSTs/1-aa.sst", noise(BIG), attempt=1)
        await app.end_host(HOST)
        again = await app.executor(HOST, "run")
        await again.put(changelog(1, 1), b"of the second", attempt=2)
        await driver.put(changelog(2, 1), b"of the driver's", attempt=3)
        await driver.commit(0)
        await driver.offsets(1)
        for partition in range(3):
            await again.put(changelog(partition, 2), b"on", attempt=4)
        await driver.commit(1)
    async with driven(stores) as driver:
        assert await driver.names("commits") == ["0", "1"]
        assert [await driver.read(changelog(p, 1)) for p in range(3)] == [
            b"of the first host",
            b"of the second",
            b"of the driver's",
        ]
        assert await driver.read("state/0/0/SSTs/1-aa.sst") == noise(BIG)
        assert await driver.read(changelog(0, 2)) == b"on"


async def test_files_that_are_closed_together_share_a_request(stores: Stores) -> None:
    async with application(stores, durability="task") as app:
        driver = await app.driver("run")
        tasks = [await app.executor(HOST, "run") for _ in range(16)]
        await driver.offsets(0)
        before = app.puts
        await asyncio.gather(*(task.put(changelog(p, 1), b"x", attempt=p) for p, task in enumerate(tasks)))
        stored = app.puts - before
        assert 1 <= stored <= 8, "far fewer than files"
        assert [info.name async for info in stores["/jobs/query/_dstl"].list("") if info.name.endswith(".seg")]
        await driver.commit(0)
        assert app.puts - before == stored + 1, "nothing is left to be stored"
        assert await driver.names("state/0") == sorted(map(str, range(16)))


async def test_a_task_whose_file_is_not_stored_fails_and_may_try_again(stores: Stores) -> None:
    async with application(stores, denying(nth=(1,), only=".seg"), durability="task") as app:
        driver, far = await app.begun(HOST)
        with pytest.raises(AccessDenied, match="denied"):
            await far.put(changelog(0, 1), b"first", attempt=1)
        await far.put(changelog(0, 1), b"second", attempt=2)
        await app.end_host(HOST)
        await driver.commit(0)
        assert await driver.read(changelog(0, 1)) == b"second"


async def test_what_a_run_that_is_over_has_stored_is_in_no_commit(stores: Stores) -> None:
    async with application(stores, durability="task") as app:
        driver, old = await app.driver("old"), await app.executor(HOST, "old")
        await driver.offsets(0)
        await old.put(changelog(0, 1), b"old", attempt=9)
        next_run, new = await app.driver("new"), await app.executor(HOST, "new")
        await new.put(changelog(0, 1), b"new", attempt=1)
        await next_run.commit(0)
        assert await next_run.read(changelog(0, 1)) == b"new"
        with pytest.raises(Fenced):
            await old.put(changelog(0, 2), b"old")
        await app.end_host(HOST)
    # The old run's object was never named, and its host has deleted it.
    segments = [info.name async for info in stores["/jobs/query/_dstl"].list("") if info.name.endswith(".seg")]
    assert len(segments) == 1
