"""``spark.dstl.commit=with-next``: one record a batch, and nothing weaker than before."""

import asyncio
import contextlib

import pytest

from dstl.errors import AccessDenied, TaskManagerLost
from dstl.files import barriers
from dstl.store.base import ObjectInfo
from tests.simulation.faulty_store import FaultyStore
from worlds.files import Stores, application, changelog, denying, driven

HOST = "127.0.0.2"
LONGER = 0.2
"""Seconds after which a commit has a record of its own."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit waits as long as it takes for the next offsets, however slow the machine."""
    monkeypatch.setattr(barriers, "LINGER_S", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_commit_rides_with_the_next_offsets_and_is_seen_by_its_run_at_once(stores: Stores) -> None:
    async with application(stores, commit="with-next") as app:
        driver, far = await app.begun(HOST)
        before = app.puts
        for batch in range(5):
            await driver.put(changelog(0, batch + 1), b"near", attempt=batch)
            await far.put(changelog(1, batch + 1), b"far", attempt=batch)
            await driver.commit(batch)
            assert await driver.names("commits") == [str(each) for each in range(batch + 1)]
            await driver.offsets(batch + 1)
        assert app.puts - before == 5, "one record a batch"
        assert await driver.read(changelog(1, 5)) == b"far"
    async with driven(stores) as driver:
        assert await driver.names("commits") == ["0", "1", "2", "3", "4"]
        assert await driver.read(changelog(0, 5)) == b"near"


@pytest.mark.usefixtures("patient")
async def test_where_a_batch_has_begun_a_task_reads_the_attempt_that_its_commit_takes(stores: Stores) -> None:
    async with application(stores, commit="with-next") as app:
        driver, far = await app.begun(HOST)
        # A task has ended and runs again on the other host: its later attempt is what the record will hold.
        await far.put(changelog(0, 1), b"the first attempt's, which is longer", attempt=3)
        await driver.put(changelog(0, 1), b"the one that counts", attempt=4)
        await driver.put(changelog(1, 1), b"the first attempt's, which is longer", attempt=5)
        await far.put(changelog(1, 1), b"the one that counts", attempt=6)
        await driver.commit(0)
        for host in (far, driver):
            # As the JVM opens a file: its size, and then so many bytes.
            assert [await host.size(changelog(each, 1)) for each in (0, 1)] == [len(b"the one that counts")] * 2
            assert [await host.read(changelog(each, 1)) for each in (0, 1)] == [b"the one that counts"] * 2


async def test_a_commit_that_was_told_and_is_lost_ends_its_run(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in (False, True):
        stores.clear()
        monkeypatch.setattr(barriers, "LINGER_S", 0.01 if waits else 60.0)
        async with application(stores, denying(nth=(3,)), commit="with-next") as app:
            driver = await app.driver("run")
            await driver.batch(0, {changelog(0, 1): b"lost"})
            if waits:
                await asyncio.sleep(LONGER)
            with pytest.raises(TaskManagerLost if waits else AccessDenied, match="denied"):
                await driver.offsets(1)
            with pytest.raises(TaskManagerLost, match="denied"):
                await driver.put(changelog(0, 2))
            next_run = await app.driver("next")
            assert await next_run.names("commits") == []
            await next_run.put(changelog(0, 1), b"again")
            await next_run.commit(0)
            await next_run.offsets(1)
            assert await next_run.read(changelog(0, 1)) == b"again"


@pytest.mark.usefixtures("patient")
async def test_a_host_that_is_lost_with_a_told_commit_ends_its_run(stores: Stores) -> None:
    async with application(stores, commit="with-next") as app:
        driver, far = await app.begun(HOST)
        await far.put(changelog(0, 1), b"lost")
        await app.end_host(HOST)
        # The coordinator may notice it only when it asks.
        with contextlib.suppress(TaskManagerLost):
            await driver.commit(0)
        with pytest.raises(TaskManagerLost):
            await driver.offsets(1)
        assert await (await app.driver("next")).names("commits") == []


@pytest.mark.usefixtures("patient")
async def test_a_commit_that_names_what_nobody_has_put_is_never_durable(stores: Stores) -> None:
    async with application(stores, commit="with-next") as app:
        driver = await app.driver("run")
        await driver.offsets(0)
        await driver.put("state/0/0/1_aa.changelog")
        await driver.commit(0, "aa", "bb")
        with pytest.raises(TaskManagerLost, match="bb"):
            await driver.offsets(1)
        assert await (await app.driver("next")).names("offsets") == ["0"]


class _Slow(FaultyStore):
    """Keeps records back until it is told."""

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        if self.calls["put"] >= 2:
            await asyncio.sleep(0.3)
        return await super().put(name, data, if_absent=if_absent)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
async def test_where_sources_keep_their_rows_the_tasks_of_a_batch_wait_for_its_offsets(
    host: str, stores: Stores
) -> None:
    async with application(stores, _Slow, commit="with-next", sources="keep") as app:
        driver, task = await app.driver("run"), await app.executor(host, "run")
        loop = asyncio.get_running_loop()
        await driver.offsets(0)
        await task.put(changelog(0, 1), b"a", attempt=1)
        await driver.commit(0)
        began = loop.time()
        await driver.offsets(1)
        assert loop.time() - began < 0.25, "the batch begins at once"
        assert await driver.names("offsets") == ["0", "1"]
        async with application(stores) as other:
            assert await (await other.driver("")).names("offsets") == ["0"]
        await task.put(changelog(0, 2), b"b", attempt=2)
        async with application(stores) as other:
            assert await (await other.driver("")).names("offsets") == ["0", "1"], "no task ends before"
        await driver.commit(1)
        # While the host is there: another run's look makes the commit durable.
        assert await (await app.driver("next")).names("commits") == ["0", "1"]
    async with driven(stores, "last") as driver:
        assert await driver.names("commits") == ["0", "1"]
        assert await driver.read(changelog(0, 2)) == b"b"


@pytest.mark.usefixtures("patient")
async def test_a_query_without_state_waits_for_its_offsets_for_nothing_else_holds_its_sink(stores: Stores) -> None:
    async with driven(stores, "run", commit="with-next", sources="keep") as driver:
        await driver.batch(0, {})
        await driver.offsets(1)
        async with application(stores) as other:
            assert await (await other.driver("")).names("offsets") == ["0", "1"]
