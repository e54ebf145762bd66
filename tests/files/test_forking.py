"""Forks of a checkpoint directory: the same objects, which neither side deletes."""

from collections.abc import Callable

import pytest

from dstl.errors import Fenced, Invalid, MissingState
from dstl.files.forking import Fork, fork, release
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from worlds.files import BIG, ROOT, Stores, application, driven, kept, noise

FORK, SECOND = "dstl:///jobs/fork", "dstl:///jobs/second"
OLD, NEW = "/jobs/query/_dstl", "/jobs/fork/_dstl"


def opener(stores: Stores) -> Callable[[str], ObjectStore]:
    return lambda location: kept(stores.setdefault(location, MemoryStore()))


async def make(stores: Stores, source: str = ROOT, target: str = FORK, *also: str) -> Fork:
    return await fork(source, target, system_runtime(), opener(stores), also)


async def names(store: ObjectStore) -> set[str]:
    return {info.name async for info in store.list("")}


def changelog(version: int) -> str:
    return f"state/0/0/{version}.changelog"


async def fill(stores: Stores, batches: range, root: str = ROOT) -> None:
    async with application(stores) as app:
        driver = await app.driver(f"{root}-{batches.start}", root)
        for batch in batches:
            content = noise(BIG, batch) if batch < 3 else b"small %d" % batch
            await driver.batch(batch, {changelog(batch + 1): content})
            if batch > 2:
                for path in (f"offsets/{batch - 3}", f"commits/{batch - 3}", changelog(batch - 2)):
                    await driver.delete(path)


async def test_neither_side_deletes_what_the_other_needs_until_it_is_released(stores: Stores) -> None:
    await fill(stores, range(3))
    await make(stores)
    shared = {name for name in await names(stores[OLD]) if name.endswith(".seg")}
    assert len(shared) == 3
    await fill(stores, range(3, 110))
    await fill(stores, range(3, 110), FORK)
    for store in (stores[OLD], stores[NEW]):
        assert len(await names(store)) < 200, "what nobody needs has gone"
    assert shared < await names(stores[OLD])
    with pytest.raises(Invalid, match="delete it first"):
        await release(ROOT, FORK, system_runtime(), opener(stores))
    del stores[NEW]
    assert await release(ROOT, FORK, system_runtime(), opener(stores)) >= 3
    await fill(stores, range(110, 220))
    assert not shared & await names(stores[OLD])


async def test_a_fork_of_a_fork_is_held_by_the_objects_owner(stores: Stores) -> None:
    await fill(stores, range(3))
    await make(stores)
    before = await names(stores[NEW]), await names(stores[OLD])
    with pytest.raises(Invalid, match=f"{FORK} uses objects of {ROOT}.*--also {ROOT}"):
        await make(stores, FORK, SECOND)
    assert (await names(stores[NEW]), await names(stores[OLD])) == before, "what is refused fences nobody"
    assert await make(stores, FORK, SECOND, f"{ROOT}/") == Fork(3, ())
    del stores[NEW]
    await release(ROOT, FORK, system_runtime(), opener(stores))
    await fill(stores, range(3, 110))
    async with application(stores) as app:
        driver = await app.driver("second", SECOND)
        for version in (1, 2, 3):
            assert await driver.read(changelog(version)) == noise(BIG, version - 1)


async def test_a_running_query_is_fenced_and_a_target_in_use_is_refused(stores: Stores) -> None:
    with pytest.raises(MissingState, match="no query"):
        await make(stores)
    async with driven(stores, "run") as driver:
        await driver.batch(0, {})
        await make(stores)
        with pytest.raises(Fenced):
            await driver.offsets(1)
    for target in (ROOT, FORK):
        before = await names(stores[NEW])
        with pytest.raises(Invalid, match="not empty"):
            await make(stores, ROOT, target)
        assert await names(stores[NEW]) == before
