"""A local disk that fails: what is only a copy costs a request more, and what is needed fails with an error of ours."""

import asyncio
import errno
import itertools
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from dstl.errors import DstlError, Unavailable
from dstl.options import RocksDBOptions
from dstl.rpc.fleet_messages import Resume
from dstl.rpc.messages import FetchMany, OpenAttempt
from dstl.rpc.protocol import Secret
from dstl.store.memory import MemoryStore
from dstl.taskmanager.service import TaskManagerService
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from materializer.bases import table_directory
from materializer.bases.base_cache import BaseCache
from materializer.bases.table_directory import FileBases
from materializer.local_disk import Access, listen
from materializer.tables import RocksDBStateTable
from tests.simulation.virtual_time import run_in_virtual_time
from worlds import service
from worlds.backend import MAX_PARALLELISM, BackendWorld, rows
from worlds.materialization import EAGER, World
from worlds.restored import restore_tables
from worlds.service import Driver, Model
from worlds.table_changes import content

FULL, BROKEN = errno.ENOSPC, errno.EIO
DATA = os.urandom(3000)


@pytest.fixture(autouse=True)
def a_sound_disk_afterwards() -> Iterator[None]:
    yield
    listen(lambda how, path: None)


class FailingDisk:
    """The n-th access fails."""

    def __init__(self) -> None:
        self.nth, self.number, self.accesses = 0, FULL, 0
        listen(self._access)

    def fail(self, nth: int, number: int) -> None:
        self.nth, self.number, self.accesses = nth, number, 0

    def _access(self, how: Access, path: Path) -> None:
        self.accesses += 1
        if self.accesses == self.nth:
            raise OSError(self.number, os.strerror(self.number), str(path))


@pytest.mark.parametrize("table", ["heap", "rocksdb"])
def test_a_restore_on_a_disk_that_fails_is_right_or_ends_with_an_error_of_ours(
    seed: int, tmp_path: Path, table: str
) -> None:
    """At drawn accesses; tables in memory never need the disk, so theirs is always right."""
    options = EAGER.model_copy(update={"cache_directory": str(tmp_path / "cache")})
    world = World(seed, options=options, table=table, directory=tmp_path / "tables", partitions=1)
    disk = FailingDisk()

    async def restored(checkpoint: CompletedCheckpoint) -> bool:
        cache = BaseCache.of(options, world.store.location)
        try:
            async with FileBases(world.store, world.runtime, cache) as files:
                found = await restore_tables(
                    checkpoint, world.store, world.members[0].owned, world.open_table, world.runtime, files=files
                )
        except DstlError as error:
            if table == "rocksdb" and type(error) is Unavailable:
                return False
            raise
        disk.nth = 0
        state = {}
        for operator, each in found.tables.items():
            snapshot = each.snapshot()
            state[operator] = content(snapshot, list(world.members[0].owned))
            snapshot.close()
            each.close()
        model = world.models[checkpoint.checkpoint_id]
        assert state == {operator: values for operator, values in model.items() if operator in state}
        return True

    async def live() -> None:
        await world.start(1)
        await world.batches(3, 12)
        newest = world.newest
        assert newest is not None
        rng = random.Random(seed)
        for is_cold in (True, False):
            for nth in [0, *rng.sample(range(1, 40), 5)]:
                if is_cold:
                    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
                disk.fail(nth, rng.choice((FULL, BROKEN)))
                assert await restored(newest) or nth
                assert nth or disk.accesses > 5
                disk.nth = 0
        await world.close()

    run_in_virtual_time(live())


def test_a_cache_on_a_disk_that_fails_fails_nobody(tmp_path: Path) -> None:
    disk, crc = FailingDisk(), google_crc32c.value(DATA)
    source = tmp_path / "source"
    source.write_bytes(DATA)

    def use(cache: BaseCache) -> None:
        cache.put("put", DATA)
        cache.link("linked", len(DATA), source)
        fill = cache.fill("filled", len(DATA), crc)
        if fill is not None:
            fill.add(0, DATA)
            fill.close()
        for at, name in enumerate(("put", "linked", "filled")):
            found = cache.open(name, len(DATA), crc)
            if found is not None:
                linked = tmp_path / f"to-{at}"
                linked.unlink(missing_ok=True)
                if found.link(linked):
                    assert linked.read_bytes() == DATA
                else:
                    assert not linked.exists()
                found.close()

    for nth in itertools.count(1):
        directory = tmp_path / f"cache-{nth}"
        disk.fail(nth, FULL if nth % 2 else BROKEN)
        use(BaseCache(directory, "s3://b", max_bytes=1 << 20, max_age_s=1e6))
        if disk.nth > disk.accesses:
            break
        assert not [path for path in directory.glob("*") if path.suffix == ".part"]
    assert nth > 15


def test_a_cached_base_that_cannot_be_read_any_more_is_read_from_the_store(seed: int, tmp_path: Path) -> None:
    options = EAGER.model_copy(update={"cache_directory": str(tmp_path / "cache")})
    world = World(seed, options=options, partitions=1)
    checked: set[Path] = set()
    failed: list[Path] = []

    def disk(how: Access, path: Path) -> None:
        # A file is checked in one piece and read again for its pages.
        if how == "read" and path.parent.name == "dstl-bases" and path in checked:
            failed.append(path)
            raise OSError(BROKEN, os.strerror(BROKEN), str(path))
        if how == "write" and path.parent.name == "dstl-bases":
            checked.add(path)

    async def live() -> None:
        await world.start(1)
        for _ in range(3):
            newest = await world.batch_of(12)
            await world.materialized()
        cached = set((tmp_path / "cache" / "dstl-bases").iterdir())
        assert newest.materialized
        assert cached
        listen(disk)
        cache = BaseCache.of(options, world.store.location)
        async with FileBases(world.store, world.runtime, cache) as files:
            found = await restore_tables(
                newest, world.store, world.members[0].owned, world.open_table, world.runtime, files=files
            )
        assert set(failed) & cached
        for each in found.tables.values():
            each.close()
        await world.close()

    run_in_virtual_time(live())


def test_a_copy_out_of_the_cache_is_never_written_over_a_link_to_it(tmp_path: Path) -> None:
    cached, copy = tmp_path / "cached", tmp_path / "copy"
    cached.write_bytes(DATA)
    os.link(cached, copy)
    table_directory._append(copy, 0, b"other", 0)
    assert cached.read_bytes() == DATA
    assert copy.read_bytes() == b"other"


def test_a_table_whose_write_has_failed_refuses_writes_for_good_and_says_so(tmp_path: Path) -> None:
    """The engine's own behaviour, which the simulation's disk imitates: it is not asked, but a file may not grow."""
    table = RocksDBStateTable(tmp_path / "table", RocksDBOptions(compression="none"))
    table.apply(rows([(b"key-%d" % number, os.urandom(500)) for number in range(300)]))
    assert not table.has_failed
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(Unavailable, match="check the disk"):
            table.snapshot()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(Unavailable, match="check the disk"):
        table.apply(rows([(b"another", b"value")]))
    assert table.has_failed
    table.close()


async def test_a_fold_ahead_of_the_first_read_leaves_it_to_that_what_it_has_met(seed: int, tmp_path: Path) -> None:
    """Nobody waits for it: what it raises would be the event loop's to log, and no task's to fail with."""
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    disk, world, owned = FailingDisk(), BackendWorld(seed), KeyGroupRange.all(MAX_PARALLELISM)
    table = RocksDBStateTable(tmp_path / "table", RocksDBOptions(compression="none"))
    world.backend.replace_tables({"b": table}, None, owned)
    taskmanager = TaskManagerService(lambda _: world.backend, world.store, world.runtime, Secret.generate())
    peer: Any = None
    await taskmanager._resume(peer, Resume("query", None, owned))
    world.backend.committed.add("b", [(rows([(b"key", b"value")]), False)])
    disk.fail(1, FULL)
    await taskmanager._open_attempt(peer, OpenAttempt("b", 7, 0, None, 1))
    await asyncio.sleep(0.01)
    assert disk.accesses == 1
    assert not unhandled
    disk.fail(1, FULL)
    with pytest.raises(Unavailable, match="check the disk"):
        await taskmanager._read(peer, FetchMany("b", 7, (1,), (0,), (b"key",)))
    await world.close()


async def test_a_table_that_has_met_a_full_disk_is_restored_by_the_next_run_and_not_kept(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, refusing, is_full = itertools.count(), set[Path](), False

    def open_table(operator: str) -> RocksDBStateTable:
        return RocksDBStateTable(tmp_path / str(next(numbers)))

    def disk(how: Access, path: Path) -> None:
        if how == "table-write" and (is_full or path in refusing):
            refusing.add(path)
            raise OSError(FULL, os.strerror(FULL), str(path))

    monkeypatch.setattr(service.TaskManager, "open_table", staticmethod(open_table))
    unhandled: list[dict[str, object]] = []
    listen(disk)
    driver = await Driver(MemoryStore(), seed=seed, operators={"counts": 2}, inline_threshold=0).start()
    run: Callable[[str, int, bytes], object] = lambda name, batch, value: driver.run_batch(  # noqa: E731
        name, batch, {"counts": {b"key-%d" % number: value for number in range(6)}}, model
    )
    model: Model = {}
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        await run("run-1", 0, b"first")
        is_full = True
        with pytest.raises(Unavailable, match="check the disk"):
            await run("run-1", 1, b"second")
        is_full = False
        with pytest.raises(Unavailable, match="check the disk"):
            await run("run-1", 1, b"second")
        await run("run-2", 1, b"second")
        await run("run-2", 2, b"third")
        assert refusing
        assert driver.lost == []
        assert len({report.checkpoint_id for report in driver.checkpoints}) == 3
    finally:
        await driver.close()
    assert unhandled == []
