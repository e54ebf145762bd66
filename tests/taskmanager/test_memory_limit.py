"""State that outgrows the memory is refused by name, before it is taken, and what was there is kept."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dstl.changelog.storage import StateChangelogStorage
from dstl.errors import Closed, StateTooLarge
from dstl.options import BatchingOptions, MemoryOptions
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.memory_limit import MemoryLimit, MemoryUse, read_memory_use
from dstl.taskmanager.task_manager import BackgroundBudget, Changelog, Components
from handles.key_group import KeyGroupRange
from materializer.tables import HeapStateTable
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime, virtual
from tests.worlds.backend import MAX_PARALLELISM, BackendWorld, content, groups_of, key_of
from worlds.restored import restore_tables

MB = 1 << 20


def test_what_fits_is_taken_and_what_does_not_is_named():
    limit = MemoryLimit(MemoryOptions(limit_bytes=100 * MB), lambda: MemoryUse(90 * MB, None))
    limit.check(10 * MB, "operator a: changes")
    with pytest.raises(
        StateTooLarge, match=r"operator a: changes of 12 MB .* has 94 MB, and memory.limit_bytes .* 105"
    ):
        limit.check(11 * MB, "operator a: changes")


def test_reserve_is_left_to_the_host():
    available = 400 * MB
    limit = MemoryLimit(MemoryOptions(reserve_bytes=256 * MB), lambda: MemoryUse(MB, available))
    limit.check(100 * MB, "it")
    available = 300 * MB
    with pytest.raises(StateTooLarge, match=r"memory\.reserve_bytes keeps 268 MB"):
        limit.check(100 * MB, "it")
    MemoryLimit(MemoryOptions(reserve_bytes=0), lambda: MemoryUse(MB, 0)).check(MB, "it")


def test_small_writes_are_looked_at_together():
    limit = MemoryLimit(MemoryOptions(), lambda: MemoryUse(0, None))
    assert limit.is_due(1)
    limit.check(1, "it")
    assert not limit.is_due(MB // 2)
    assert limit.is_due(MB // 2)


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path: Path):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/pods/one\n")
    own = groups / "pods" / "one"
    own.mkdir(parents=True)
    assert read_memory_use(proc, groups).available == 4000 * 1024
    (own / "memory.max").write_text("max\n")
    assert read_memory_use(proc, groups).available == 4000 * 1024
    (own / "memory.max").write_text(f"{3 * MB}\n")
    (own / "memory.current").write_text(f"{2 * MB}\n")
    (own / "memory.stat").write_text(f"anon {MB}\ninactive_file {MB // 2}\n")
    assert read_memory_use(proc, groups).available == 3 * MB - 2 * MB + MB // 2
    (groups / "pods" / "memory.max").write_text(f"{3 * MB}\n")
    (groups / "pods" / "memory.current").write_text(f"{3 * MB - 4096}\n")
    (groups / "pods" / "memory.stat").write_text("inactive_file 0\n")
    assert read_memory_use(proc, groups).available == 4096, "a group around it has less left"
    (own / "memory.max").write_text("max\n")
    assert read_memory_use(proc, groups).available == 4096, "and it alone has a limit"
    use = read_memory_use(tmp_path / "none", tmp_path / "none")
    assert use.available is None
    assert use.resident > MB


@pytest.mark.parametrize("inside", [False, True])
def test_memory_of_a_container_is_read_from_control_groups_of_version_1_too(tmp_path: Path, inside: bool):
    """Inside of a container the host's path stands in the process's file, and its own group is the root."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("3:cpu,cpuacct:/one\n2:memory:/docker/one\n1:name=systemd:/one\n")
    own = groups / "memory" / ("" if inside else "docker/one")
    own.mkdir(parents=True)
    (own / "memory.limit_in_bytes").write_text(f"{3 * MB}\n")
    (own / "memory.usage_in_bytes").write_text(f"{2 * MB}\n")
    (own / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {MB // 2}\n")
    assert read_memory_use(proc, groups).available == 3 * MB - 2 * MB + MB // 2
    (own / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert read_memory_use(proc, groups).available is None


@virtual
async def test_changes_that_outgrow_the_memory_are_refused_and_the_checkpoint_before_is_kept(seed):
    """The table's own overhead counts: entries of a few bytes take more in a dictionary than in the changes."""
    used = 0
    options = MemoryOptions(limit_bytes=200_000)
    world = BackendWorld(seed, memory=options, memory_use=lambda: MemoryUse(used, None))
    try:
        group = groups_of("a", 0)[0]
        first = world.open("a", 0, 0, None)
        world.write(first, [(key_of(group, name), b"1") for name in range(200)])
        checkpoint = await world.checkpoint([first], 0, None)
        large = [(key_of(group, name), b"x" * MB) for name in range(2)]
        second = world.open("a", 0, 1, checkpoint)
        with pytest.raises(StateTooLarge, match="operator a: changes of 2 MB"):
            world.write(second, large)
        used = 190_000  # and now entries alone are too much
        with pytest.raises(StateTooLarge):
            world.write(second, [(key_of(group, name), b"1") for name in range(200)])
        used = 0
        assert len((await world.restored(checkpoint))["a"]) == 200
        third = world.open("a", 0, 1, checkpoint)
        world.write(third, [(key_of(group, 0), b"2")])
        assert content(world.backend.table("a"))[key_of(group, 0)] == b"1"
    finally:
        await world.close()


@virtual
async def test_restore_that_outgrows_the_memory_stops_on_the_way(seed):
    used = 0
    options = MemoryOptions(limit_bytes=MB)
    world = BackendWorld(seed, memory=options, memory_use=lambda: MemoryUse(used, None))
    try:
        task = world.open("a", 0, 0, None)
        world.write(task, [(key_of(groups_of("a", 0)[0], 1), b"1")])
        checkpoint = await world.checkpoint([task], 0, None)
        used = 2 * MB
        owned = KeyGroupRange.all(MAX_PARALLELISM)
        with pytest.raises(StateTooLarge, match=r"checkpoint \d+ .* cannot be restored: what is being restored"):
            await restore_tables(
                checkpoint,
                world.disk,
                owned,
                lambda _: HeapStateTable(),
                world.runtime,
                on_progress=lambda _: world.backend.check_memory(),
            )
        used = 0
    finally:
        await world.close()


LIMIT = 1000


def with_share(work: Callable[[StateChangelogStorage, BackgroundBudget], Awaitable[None]]) -> None:
    async def run() -> None:
        runtime = seeded_runtime(1)
        store = MemoryStore(clock=LoopClock())
        config = TaskManagerConfig(store.location, batching=BatchingOptions(byte_budget=LIMIT))
        changelog = Changelog(config, Components(store=store, runtime=runtime), "query")
        try:
            await work(changelog.storage, BackgroundBudget(changelog.storage, runtime.clock))
        finally:
            await changelog.close()

    run_in_virtual_time(run())


class Holder:
    """Something that holds a reservation until it is told to let go."""

    def __init__(self, reserve: Callable[[int], object], nbytes: int) -> None:
        self.held = asyncio.Event()
        self._go = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(reserve, nbytes))

    async def _run(self, reserve: Callable[[int], object], nbytes: int) -> None:
        async with reserve(nbytes):  # type: ignore[attr-defined]
            self.held.set()
            await self._go.wait()

    async def has_it(self, after_s: float = 0.5) -> bool:
        await asyncio.sleep(after_s)
        return self.held.is_set()

    async def let_go(self) -> None:
        self._go.set()
        await self._task


def test_an_append_is_not_held_up_by_a_base_file_that_finds_no_room() -> None:
    async def work(storage: StateChangelogStorage, share: BackgroundBudget) -> None:
        first = Holder(storage.budget.reserve, 600)
        assert await first.has_it()
        base = Holder(share.reserve, 500)
        assert not await base.has_it()
        small = Holder(storage.budget.reserve, 300)
        assert await small.has_it(0.001)
        await first.let_go()
        assert await base.has_it()
        for each in (base, small):
            await each.let_go()
        assert storage.budget.used == 0

    with_share(work)


def test_base_files_never_hold_more_than_half() -> None:
    async def work(storage: StateChangelogStorage, share: BackgroundBudget) -> None:
        huge, other = Holder(share.reserve, 10 * LIMIT), Holder(share.reserve, 300)
        assert await huge.has_it()
        assert not await other.has_it(120.0), "patience was for appends, not for other base files"
        append = Holder(storage.budget.reserve, 500)
        assert await append.has_it()
        await huge.let_go()
        assert await other.has_it()
        for each in (other, append):
            await each.let_go()
        assert storage.budget.used == 0

    with_share(work)


def test_one_that_has_waited_for_long_gets_its_turn_among_appends_that_never_pause() -> None:
    async def work(storage: StateChangelogStorage, share: BackgroundBudget) -> None:
        old = Holder(storage.budget.reserve, 900)
        assert await old.has_it()
        base = Holder(share.reserve, 500)
        assert not await base.has_it(59.0)
        await asyncio.sleep(2.0)
        new = Holder(storage.budget.reserve, 900)
        assert not await new.has_it()
        await old.let_go()
        assert await base.has_it()
        assert not await new.has_it()
        await base.let_go()
        assert await new.has_it()
        await new.let_go()

    with_share(work)


def test_a_closed_storage_ends_it() -> None:
    async def work(storage: StateChangelogStorage, share: BackgroundBudget) -> None:
        await storage.close()
        with pytest.raises(Closed):
            async with share.reserve(10):
                pass

    with_share(work)
