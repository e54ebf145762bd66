"""What a deleted state held leaves the table and the next base; other states, and new ones, stay."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

from pyspark.sql.types import StructType

from dstl.state.registry import StateRegistry
from handles.key_group import KeyGroupRange
from materializer.bases.key_group_file import encode_key_group
from materializer.tables import HeapStateTable
from worlds.backend import BackendWorld
from worlds.table_changes import changes, content, put

GROUPS = range(4)


def table_of_two_states() -> HeapStateTable:
    table = HeapStateTable()
    table.apply(
        changes(
            *[
                put(group, state, b"k%d" % n, b"", b"%d" % state)
                for group in GROUPS
                for state in (0, 1)
                for n in range(9)
            ]
        )
    )
    return table


def registry(removed: list[int]) -> dict[str, Any]:
    return StateRegistry(StructType(), next_id=8, removed=removed).to_wire()


def states_of(table: HeapStateTable) -> set[int]:
    with closing(table.snapshot()) as snapshot:
        return {state for _, state, _, _ in content(snapshot, GROUPS)}


async def test_its_entries_are_left_out_of_bases_and_dropped_from_the_table_once(seed: int) -> None:
    world = BackendWorld(seed)
    backend, table = world.backend, table_of_two_states()
    backend.replace_tables({"a": table}, None, KeyGroupRange.all(8), registries={"a": registry([])})
    assert backend.expired("a") == {}
    world.open("a", 0, 0, None)
    # As a task of the new version sends it with its first changes.
    backend.tracker.declared("a", json.dumps(registry([0])).encode())
    expired = backend.expired("a")
    assert set(expired) == {0}
    with closing(table.snapshot()) as snapshot:
        assert encode_key_group(snapshot, 1, expired=expired).expired == 9
    for group in GROUPS:
        assert sum(table.drop_expired(group, backend.expired("a"))) == 9
    assert states_of(table) == {1}
    await world.close()


async def test_a_restored_run_drops_it_where_the_version_before_has_deleted_it(seed: int) -> None:
    world = BackendWorld(seed)
    world.backend.replace_tables(
        {"a": table_of_two_states()}, None, KeyGroupRange.all(8), registries={"a": registry([1, 7])}
    )
    assert set(world.backend.expired("a")) == {1, 7}
    await world.close()
