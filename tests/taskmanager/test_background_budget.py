"""Base files take what the log leaves of the byte budget: no append waits behind them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from dstl.changelog.storage import StateChangelogStorage
from dstl.errors import Closed
from dstl.options import BatchingOptions
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import BackgroundBudget, Changelog, Components
from tests.simulation.virtual_time import LoopClock, run_in_virtual_time, seeded_runtime

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
