"""Locations as each release has written them restore: checkpoint and savepoint, every kind of state, both tables."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from dstl.checkpoint.savepoint.creation import choose_checkpoint
from dstl.checkpoint.upkeep.verification import verify_location, verify_savepoint
from dstl.runtime import system_runtime
from dstl.spark.saved_state import reader
from dstl.store import LocalStore
from worlds.released import EXPECTED, GOLDEN, Rows

LOCATIONS = sorted(path.name for path in GOLDEN.glob("location_*.zip"))


def test_there_is_a_location_of_each_table() -> None:
    assert {"location_0.1.0_heap.zip", "location_0.1.0_rocksdb.zip"} <= set(LOCATIONS)


@pytest.mark.parametrize("name", LOCATIONS)
async def test_a_location_of_a_release_restores(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(GOLDEN / name) as archive:
        archive.extractall(tmp_path)
    store, runtime = LocalStore(str(tmp_path)), system_runtime()
    try:
        checked = await verify_location(store, runtime)
        assert not checked.problems
        assert len(checked.checkpoints) == 3
        assert not (await verify_savepoint(store, runtime, "kept")).problems
        latest = await choose_checkpoint(store, runtime)
        assert latest.materialized, "a restore reads bases as well as log"
        for held in (latest, await reader.find_savepoint(store, runtime, "kept")):
            for (operator, state), rows in EXPECTED.items():
                found: Rows = [
                    (tuple(row.key), None if row.user_key is None else tuple(row.user_key), tuple(row.value))
                    async for row in reader.read_state(store, runtime, held, operator, state)
                ]
                assert sorted(found) == rows, (held.checkpoint_id, operator, state)
    finally:
        await store.close()
