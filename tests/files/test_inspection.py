"""Looking into a checkpoint directory beside the query that writes it."""

from functools import partial

import pytest

from dstl.errors import Invalid, MissingState
from dstl.files.inspection import export_files, opened_files, verify_files
from dstl.files.namespace import location_of
from dstl.runtime import system_runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from worlds.files import BIG, ROOT, Stores, application, kept, noise


def place_of(stores: Stores, location: str) -> ObjectStore:
    return kept(stores.setdefault(location, MemoryStore()))


async def go_on(stores: Stores, batches: range) -> None:
    """Run batches with a file each, of which the last three are kept."""
    async with application(stores) as app:
        driver = await app.driver(f"run-{batches.start}")
        for batch in batches:
            await driver.batch(batch, {f"state/0/0/{batch + 1}.changelog": noise(BIG if batch < 3 else 8, batch)})
            if batch > 2:
                for old in (f"offsets/{batch - 3}", f"commits/{batch - 3}", f"state/0/0/{batch - 2}.changelog"):
                    await driver.delete(old)


async def test_what_a_running_query_lets_go_of_is_no_damage(stores: Stores) -> None:
    """It was reported as lost, to be restored from a replica, whenever the look took longer than the query kept it."""
    await go_on(stores, range(3))
    async with opened_files(ROOT, system_runtime(), partial(place_of, stores)) as files:
        before = {entry.segment.name for entry in files.entries.values()}
        await go_on(stores, range(3, 110))
        assert not before & {info.name async for info in stores[location_of(ROOT)].list()}, "all of them have gone"
        assert await verify_files(files) == []
        target = MemoryStore()
        with pytest.raises(Invalid, match="is no longer needed by the query, which runs: export it once"):
            await export_files(files, target)


async def test_what_is_lost_beside_a_running_query_is_damage(stores: Stores) -> None:
    await go_on(stores, range(3))
    async with opened_files(ROOT, system_runtime(), partial(place_of, stores)) as files:
        path = "state/0/0/2.changelog"
        await stores[location_of(ROOT)].delete([files.entries[path].segment.name])
        assert any(each.startswith(f"{path}: ") for each in await verify_files(files))
        with pytest.raises(MissingState, match="is lost"):
            await export_files(files, MemoryStore())
