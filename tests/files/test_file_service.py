"""Checkpoint directories through the real services and sockets: durability, runs, hosts, two drivers, lost answers."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import AccessDenied, Fenced, Invalid, ObjectExists, ObjectNotFound, TaskManagerLost
from dstl.files.index import FileIndex, FileTree
from dstl.files.leader import LeaderDirectory
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from handles.file_record import FileEntry
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.files import BIG, FencesBehind, Stores, application, changelog, denying, driven, noise
from worlds.manifest_samples import QUERY, commit
from worlds.waiting import until
from worlds.wrapped_store import WrappedStore

LOCATION = "/jobs/query/_dstl"
HOST = "127.0.0.2"


async def test_two_drivers_that_begin_a_query_at_once_give_it_one_id(stores: Stores) -> None:
    async with application(stores) as first, application(stores) as second:
        slow = await first.driver("run-1")
        await slow.put("metadata", b"of the slow one", run="", overwrite=False)
        quick = await second.driver("run-2")
        await quick.put("metadata", b"of the quick one", run="", overwrite=False)
        await quick.batch(0, {})
        with pytest.raises(ObjectExists):
            await slow.offsets(0)
        again = await first.driver("run-3")
        assert await again.read("metadata") == b"of the quick one"
        with pytest.raises(ObjectExists):
            await again.put("metadata", b"another", run="", overwrite=True)
        await again.batch(1, {})
    async with application(stores) as app:
        assert await (await app.driver("next")).read("metadata") == b"of the quick one"


async def test_a_commit_asks_a_host_that_hears_late_that_it_takes_part_in_the_one_before(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files of the next batch were left out: a lower attempt's stood for them, or the batch failed."""
    serve, held, late = LeaderDirectory.serve, [], asyncio.Event()

    async def slow(directory: LeaderDirectory, member: str, run: str) -> int:
        batch = await serve(directory, member, run)
        if not held:
            held.append(member)
            await late.wait()
        return batch

    async with application(stores) as app:
        driver, host = await app.driver("run"), await app.executor(HOST, "run")
        await driver.offsets(0)
        monkeypatch.setattr(LeaderDirectory, "serve", slow)
        snapshot = asyncio.ensure_future(host.put("state/0/0/1.zip"))
        await until(lambda: held, "the host's word")
        await driver.put(changelog(0, 1))
        await driver.commit(0)
        late.set()
        await snapshot
        await driver.offsets(1)
        await driver.put(changelog(0, 2), b"first", attempt=1)
        await host.put(changelog(0, 2), b"second", attempt=2)
        await driver.commit(1)
        assert await driver.read(changelog(0, 2)) == b"second"


async def test_files_of_no_run_are_committed_when_another_host_was_lost_with_the_commit_before(stores: Stores) -> None:
    """As tasks of a job have them that gives state another number of partitions: the last ones were missing."""
    async with driven(stores, "run") as driver:
        await driver.batch(0, {f"state/0/{partition}/1.delta": b"old" for partition in (0, 1)})
    async with application(stores) as app:
        driver = await app.driver("")
        await driver.offsets(1)
        lost, stays = await app.executor(HOST, ""), await app.executor("127.0.0.3", "")
        await lost.put("state/0/0/2.delta", b"lost", attempt=1)
        await stays.put("state/0/1/2.delta", b"first", attempt=2)
        await app.end_host(HOST)
        with pytest.raises(TaskManagerLost, match="is gone with files of commits/1"):
            await driver.commit(1)
        another = await app.executor("127.0.0.4", "")
        await another.put("state/0/0/2.delta", b"again", attempt=3)
        await stays.put("state/0/1/2.delta", b"second", attempt=4)
        await driver.commit(1)
        assert await driver.read("state/0/0/2.delta") == b"again"
        assert await driver.read("state/0/1/2.delta") == b"second"


async def test_a_record_that_a_fenced_driver_has_written_without_hearing_of_it_keeps_its_objects(
    stores: Stores,
) -> None:
    async with application(stores, FencesBehind) as app:
        driver = await app.driver("run")
        host = await app.executor(HOST, "run")
        await driver.batch(0, {changelog(0, 1): b"old"})
        await driver.offsets(1)
        for jvm, partition in ((driver, 0), (host, 1)):
            await jvm.put(changelog(partition, 2), noise(BIG, partition))
        with pytest.raises(Fenced):
            await driver.commit(1)
    async with driven(stores) as driver:
        assert await driver.names("commits") == ["0", "1"]
        for partition in (0, 1):
            assert await driver.read(changelog(partition, 2)) == noise(BIG, partition)


async def test_hosts_take_part_in_a_commit_with_one_put_each_at_most(stores: Stores) -> None:
    async with application(stores) as app:
        driver = await app.driver("run")
        near, far = await app.executor("127.0.0.1", "run"), await app.executor(HOST, "run")
        again = await app.executor(HOST, "run")
        await driver.batch(0, {})
        await driver.offsets(1)
        before = app.puts
        await near.put(changelog(0, 2), b"near", attempt=1)
        await far.put(changelog(1, 2), b"far", attempt=2)
        assert await again.read(changelog(1, 2)) == b"far"
        assert await driver.size(changelog(1, 2)) is None, "readable at once where it was written"
        await driver.commit(1)
        assert app.puts - before == 1, "all of it is small, so it lies in the record"
        assert await driver.read(changelog(1, 2)) == await near.read(changelog(1, 2)) == b"far"
        assert await far.read(changelog(0, 2)) == b"near"
        await driver.offsets(2)
        before = app.puts
        for jvm, partition in ((near, 0), (far, 1)):
            await jvm.put(changelog(partition, 3), noise(BIG, partition), attempt=3)
        await driver.commit(2)
        assert app.puts - before == 3, "a segment of each host, and the record"
        assert await far.read(changelog(0, 3)) == noise(BIG, 0)
        assert await far.names("state/0") == ["0", "1"]
        await far.delete("state/0/0")
        assert await far.names("state/0/0") == []
        await driver.batch(3, {changelog(1, 4): b"on"})
        assert await driver.names("state/0/0") == []


async def test_a_record_that_is_refused_leaves_nothing_and_a_lost_answer_is_looked_up(stores: Stores) -> None:
    async with driven(stores, "run", denying(nth=(3,))) as driver:
        await driver.offsets(0)
        await driver.put(changelog(0, 1), b"a")
        with pytest.raises(AccessDenied, match="denied"):
            await driver.commit(0)
        assert await driver.names("commits") == []
        # Kept for whoever tries again.
        await driver.commit(0)
        assert await driver.read(changelog(0, 1)) == b"a"
    lost = FaultRule(Fault.LOST_RESPONSE, "put", nth=(2, 3))
    async with application(stores, partial(FaultyStore, rules=[lost])) as app:
        driver = await app.driver("next")
        await driver.batch(1, {changelog(0, 2): b"b"})
        assert await driver.read(changelog(0, 2)) == b"b"
    async with application(stores) as app:
        assert await (await app.driver("last")).names("commits") == ["0", "1"]


async def test_objects_and_records_that_nobody_needs_go(stores: Stores) -> None:
    async with driven(stores, "run") as driver:
        await driver.put("metadata", b"{}")
        for batch in range(120):
            await driver.batch(batch, {changelog(0, batch + 1): noise(BIG, batch) if batch < 3 else b"small"})
            if batch >= 2:
                for path in (f"offsets/{batch - 2}", f"commits/{batch - 2}", changelog(0, batch - 1)):
                    await driver.delete(path)
    names = [info.name async for info in stores[LOCATION].list("")]
    assert not [name for name in names if name.endswith(".seg")]
    assert len(names) < 120, "241 were written"
    async with application(stores) as app:
        driver = await app.driver("next")
        assert await driver.names("commits") == ["118", "119"], "what was purged behind the last batch too"
        assert await driver.read("metadata") == b"{}"
        before = app.requests
        await driver.batch(120, {changelog(0, 121): b"on"})
        assert app.requests - before < 60, "the records since the last whole one, once"


async def test_bad_input_is_refused_with_one_clear_error_and_nothing_written(stores: Stores) -> None:
    async with driven(stores, "run") as driver:
        with pytest.raises(ObjectNotFound, match="nothing else"):
            await driver.put("_spark_metadata/0")
        assert stores == {}
        await driver.offsets(0)
    foreign = stores["/jobs/other/_dstl"] = MemoryStore()
    log = ManifestLog(foreign, system_runtime())
    await log.fence(QUERY)
    await commit(log, 0)
    async with application(stores) as app:
        other = await app.driver("run", "dstl:///jobs/other")
        with pytest.raises(Invalid, match=QUERY):
            await other.offsets(0)
        assert len([each async for each in foreign.list("")]) == 2


async def test_a_batch_touches_its_own_files_and_not_the_whole_index(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked, touched = [0], [0]

    def iterated(index: FileIndex, walk: Callable[[FileIndex], Iterator[FileEntry]] = FileIndex.__iter__) -> Any:
        walked[0] += len(index)
        return walk(index)

    def added(tree: FileTree, path: str, add: Callable[[FileTree, str], None] = FileTree.add) -> None:
        touched[0] += 1
        add(tree, path)

    monkeypatch.setattr(FileIndex, "__iter__", iterated)
    monkeypatch.setattr(FileTree, "add", added)
    partitions, versions = 20, 52
    async with driven(stores, "run") as driver:
        for batch in range(versions):
            if batch == versions - 2:
                walked[0] = touched[0] = 0
            await driver.batch(batch, {changelog(p, batch + 1): b"x" for p in range(partitions)})
            if batch >= versions - 2:
                for p in range(partitions):
                    await driver.delete(changelog(p, batch - 40))
                await driver.names("state/0/3")
        assert len(await driver.names("state/0/3")) == versions - 2
        files = (partitions + 2) * versions
    # One of the records is whole; each file is a rider once, and an entry once, and so is its deletion a rider.
    assert 0 < walked[0] <= files
    assert touched[0] <= 2 * (3 * partitions + 4)


async def test_second_requests_go_over_other_connections_than_the_first(stores: Stores) -> None:
    """A pool of which the store has lost sight holds up first and second alike."""
    lost: list[ObjectStore] = []

    class LosesFirst(WrappedStore):
        async def put(self, name: str, *given: Any, **options: Any) -> Any:
            if name.endswith(".seg"):
                if not lost:
                    lost.append(self)
                if lost[0] is self:
                    await asyncio.Event().wait()
            return await self.inner.put(name, *given, **options)

    async with (
        asyncio.timeout(20),
        application(stores, LosesFirst, **{"hedging.cold_delay_s": "0.05"}) as app,
    ):
        driver = await app.driver("run")
        await driver.batch(0, {changelog(0, 1): noise(BIG)})
        assert await driver.read(changelog(0, 1)) == noise(BIG)
    assert lost
