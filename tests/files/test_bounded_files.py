"""What file processes hold and fetch is bounded: for a running batch, ended queries, restores, files half written."""

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Sequence

import pyarrow as pa
import pytest

from dstl.errors import CorruptData, Fenced, TaskManagerLost, Unavailable
from dstl.files import file_log
from dstl.files.directory import Directory
from dstl.files.file_cache import FileCache
from dstl.files.file_log import FileLog
from dstl.files.file_parts import PART, file_batch, key_groups_of
from dstl.files.leader import LeaderDirectory, own_directory
from dstl.files.open_directories import OpenDirectories
from dstl.files.reader import FileReader
from dstl.options import BatchingOptions
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.files import ROOT, Jvm, Stores, application, driven, kept
from worlds.memory_recorder import MemoryRecorder
from worlds.waiting import until
from worlds.wrapped_store import Gate, is_segment

HOST = "127.0.0.2"
LITTLE = {"batching.byte_budget": str(1 << 20), "batching.preemptive_persist_threshold": str(256 << 10)}
COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'


def sst(number: int) -> str:
    return f"state/0/{number}/SSTs/1-{number}.sst"


async def segments(store: ObjectStore) -> set[str]:
    return {each.name async for each in store.list("") if not each.name.startswith("manifests/")}


async def put_many(jvm: Jvm, count: int) -> list[bytes]:
    content = [os.urandom(512 << 10) for _ in range(count)]
    for number, each in enumerate(content):
        await jvm.put(sst(number), each, attempt=number)
        await jvm.put(f"state/0/{number}/1.zip", b"names it", attempt=number)
    return content


@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
@pytest.mark.parametrize("run", ["run", ""])
async def test_a_batch_larger_than_the_byte_budget_waits_for_its_commit_in_the_store(
    host: str, run: str, stores: Stores, request: pytest.FixtureRequest
) -> None:
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    async with application(stores, **LITTLE) as app:
        driver, task = await app.driver("run"), await app.executor(host, run)
        await driver.offsets(0)
        (store,) = [each for location, each in stores.items() if location.endswith("_dstl")]

        async def held() -> int:
            stored = sum([each.size async for each in store.list("")])
            return pa.total_allocated_bytes() + tracemalloc.get_traced_memory()[0] - stored

        before = await held()
        content = await put_many(task, 24)
        # The test has its own copy, and what is of no run stays in the cache, which is bounded.
        copies = 1 if run else 2
        assert await held() - before - copies * sum(map(len, content)) < 5 << 20
        # Its own run reads them before the commit.
        assert await task.read(sst(0)) == content[0]
        await driver.commit(0)
    async with driven(stores) as driver:
        for number, each in enumerate(content):
            assert await driver.read(sst(number)) == each


async def test_a_host_lost_between_its_early_upload_and_the_commit_fails_that_commit_alone(stores: Stores) -> None:
    async with application(stores, **LITTLE) as app:
        driver, task = await app.driver("first"), await app.executor(HOST, "first")
        await driver.offsets(0)
        await put_many(task, 12)
        await app.end_host(HOST)
        await asyncio.sleep(0.05)
        with pytest.raises(TaskManagerLost, match="restart the query"):
            await driver.commit(0)
        driver = await app.driver("second")
        assert await driver.names("state") == []
        content = await put_many(driver, 1)
        await driver.commit(0)
        assert await driver.read(sst(0)) == content[0]


async def test_a_file_for_which_a_store_makes_no_room_is_refused_in_time_and_taken_later(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_log, "_ROOM_S", 0.3)
    gate = Gate(which=is_segment)
    async with driven(stores, "run", gate, **LITTLE) as driver:
        await driver.offsets(0)
        with pytest.raises(Unavailable, match=r"no room for state/0/\d/SSTs/.*byte_budget"):
            await put_many(driver, 4)
        gate.opened.set()
        content = await put_many(driver, 4)
        await driver.commit(0)
        assert await driver.read(sst(3)) == content[3]


def a_directory(store: ObjectStore, cache: FileCache | None = None, plain: ObjectStore | None = None) -> Directory:
    runtime, plain = system_runtime(), plain or MemoryStore()
    config = TaskManagerConfig("", batching=BatchingOptions(byte_budget=64 << 20))
    return own_directory(ROOT, FileLog(config, runtime, FileReader(store, plain, runtime, cache)), {}, runtime)


async def written(store: ObjectStore, content: Sequence[bytes]) -> None:
    directory = a_directory(store)
    await directory.put("metadata", "", -1, [b"{}"])
    await directory.put("offsets/0", "run", -1, [b"v1\n{}"])
    for number, each in enumerate(content):
        await directory.put(sst(number), "run", -1, [each])
        await directory.put(f"state/0/{number}/1.zip", "run", -1, [b"names it"])
    await directory.put("commits/0", "run", -1, [COMMIT])
    await directory.close()


@pytest.mark.parametrize(("files", "size"), [(3, 17 << 20), (1, 70 << 20), (12, 5 << 20)])
async def test_files_that_are_restored_side_by_side_are_fetched_once(files: int, size: int) -> None:
    """As JVMs read, in parts of 4 MiB in turn; the cache is smaller than one of them, or than all of them."""
    store, content = MemoryStore(), [os.urandom(size + number) for number in range(files)]
    await written(kept(store), content)
    recorder, cache = MemoryRecorder(), FileCache(32 << 20)
    directory = a_directory(InstrumentedStore(store, recorder=recorder), cache)
    got: list[list[bytes]] = [[] for _ in content]
    for offset in range(0, size + files, PART):
        for number in range(files):
            got[number].append(await directory.read(sst(number), "next", offset, PART))
            assert cache.used <= 32 << 20
    assert [b"".join(each) for each in got] == content
    total = sum(map(len, content))
    assert sum(recorder.samples["storeRequestBytes.get"]) < 1.2 * total + (1 << 20)
    await directory.close()
    assert not cache.used


async def test_a_driver_does_not_grow_by_the_files_that_spark_has_deleted() -> None:
    """Prevents that a query of many short batches takes 256 MB, and as much again that nobody counted."""
    cache, used = FileCache(), []
    directory = a_directory(MemoryStore(), cache)
    for batch in range(40):
        await directory.put(f"offsets/{batch}", "run", -1, [b"v1\n{}" + bytes(5000)])
        await directory.put(f"commits/{batch}", "run", -1, [COMMIT])
        if batch >= 5:
            await directory.delete(f"offsets/{batch - 5}", "run")
            await directory.delete(f"commits/{batch - 5}", "run")
        used.append(cache.used)
    assert 5 * 5000 < used[10] == used[-1]
    await directory.close()
    little = FileCache(20_000)
    for number in range(100):
        little.keep((number,), b"", 0)
    assert sum(little.find((number,)) is not None for number in range(100)) < 20


async def test_a_plain_file_that_was_taken_over_is_fetched_once_and_checked(stores: Stores) -> None:
    plain, content = MemoryStore(), os.urandom(21 << 20)
    for name, body in {"metadata": b'{"id":"a"}', "offsets/0": b"v1\n{}", "commits/0": COMMIT, sst(0): content}.items():
        await plain.put(name, body)
    recorder = MemoryRecorder()
    directory = a_directory(MemoryStore(), plain=InstrumentedStore(plain, recorder=recorder))
    got = [await directory.read(sst(0), "run", offset, PART) for offset in range(0, len(content), PART)]
    assert b"".join(got) == content
    assert sum(recorder.samples["storeRequestBytes.get"]) < 1.2 * len(content)
    for other, wrong in ((content[:-1], "shorter"), (content + b"x", "longer")):
        await plain.put(sst(0), other)
        with pytest.raises(CorruptData, match=f"is {wrong} than the {len(content)} bytes"):
            await directory.read(sst(0), "run")
    await directory.close()


async def test_each_request_that_looks_for_plain_files_may_fail_once() -> None:
    for verb in ("list", "get"):
        inner = MemoryStore()
        for name, body in {"metadata": b'{"id":"a"}', "offsets/0": b"v1\n{}", "commits/0": COMMIT}.items():
            await inner.put(name, body)
        plain = FaultyStore(inner, [FaultRule(Fault.RESET, verb, nth=(1,))])
        directory = a_directory(MemoryStore(), plain=plain)
        assert await directory.read("commits/0", "run") == COMMIT
        assert plain.fired
        await directory.close()


def count_directories() -> int:
    gc.collect()
    return sum(isinstance(each, Directory) for each in gc.get_objects())


async def test_queries_one_after_the_other_leave_no_directory_open(stores: Stores) -> None:
    # Those that tests before have left to an error's traceback are none of this one's.
    before = count_directories()

    async with application(stores) as app:
        for number in range(12):
            root = f"dstl:///jobs/query{number}"
            driver, task = await app.driver(f"run{number}", root), await app.executor(HOST, f"run{number}", root)
            await driver.put("metadata", b"{}", run="")
            await driver.offsets(0)
            await task.put(f"state/0/0/{1}.changelog", b"x" * 100_000)
            await driver.commit(0)
            await driver.end_run()
        await until(lambda: count_directories() <= before + 2, "the directories' end")
        # What an executor's maintenance still brings takes no directory over.
        with pytest.raises(Fenced, match="its query has ended"):
            await task.put("state/0/0/2.changelog")
        again = await app.driver("again", root)
        assert await again.names("commits") == ["0"]
        await again.batch(1, {"state/0/0/2.changelog": b"more"})
        assert await again.read("state/0/0/1.changelog") == b"x" * 100_000


async def test_a_directory_stays_open_while_a_call_or_a_run_is_at_work() -> None:
    closed: list[str] = []

    class _Directory(LeaderDirectory):
        async def close(self) -> None:
            closed.append(self.root)
            await super().close()

    def opened(root: str) -> LeaderDirectory:
        found = a_directory(MemoryStore())
        assert isinstance(found, LeaderDirectory)
        found.__class__ = _Directory
        found.root = root
        return found

    open_ = OpenDirectories(opened)
    one = await open_.of("one")
    one.writers |= {"a", "b"}
    open_.end_run("a")
    assert await open_.of("one") is one, "b is at work"
    one.calls += 1
    open_.end_run("b")
    assert await open_.of("one") is one
    one.calls -= 1
    one.run.serve("host", "")
    await open_.of("two")
    assert await open_.of("one") is one, "a host has files of no run"
    one.run.take_hosts("commits/0")
    await open_.of("three")
    assert await open_.of("one") is not one
    assert "one" in closed
    await open_.close()


async def test_large_files_of_all_tasks_of_a_host_are_written_side_by_side(stores: Stores) -> None:
    """17 tasks, each with a file of 64 MiB, none of which is whole before all are nearly."""
    tasks, parts, part = 17, 4, bytes(16 << 20)

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async with application(stores) as app:
        driver, task = await app.begun(HOST)
        before = resident()
        for _ in range(parts):
            for number in range(tasks):
                await task.stage(f"token{number}", part)
        assert resident() - before < 200 << 20, "they wait on the disk"
        for number in (0, tasks - 1):
            await task.put(sst(number), b"end", token=f"token{number}", staged=parts * len(part), attempt=number)
            await task.put(f"state/0/{number}/1.zip", b"names it", attempt=number)
        await driver.commit(0)
        assert await driver.size(sst(tasks - 1)) == parts * len(part) + 3


async def test_a_disk_without_room_for_a_large_file_is_named(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    async with driven(stores, "run") as task:
        monkeypatch.setattr("tempfile.tempdir", "/proc/no-such-directory")
        with pytest.raises(Unavailable, match=r"/proc/no-such-directory.*TMPDIR"):
            await task.stage("token", b"part")


@pytest.mark.parametrize("sqn", [0, 31_997, 31_998, 31_999, 64_000])
def test_parts_are_looked_for_in_the_key_groups_they_are_written_to_when_those_begin_again(sqn: int) -> None:
    written = file_batch("state/0/0/1.sst", [bytes(2 * PART + 1)], sqn).column("key_group").to_pylist()
    for first in range(3):
        assert [group for part in key_groups_of(sqn, first, 3 - first) for group in part] == written[first:]
