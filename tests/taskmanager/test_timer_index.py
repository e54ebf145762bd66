"""The index of timers against the table that it follows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dstl.taskmanager.timer_index import TimerIndex
from handles.key_group import KeyGroupRange
from materializer.tables import HeapStateTable
from worlds.backend import BackendWorld
from worlds.table_changes import changes, clear, delete, put

STATE = 3


def at(ms: int) -> bytes:
    return ms.to_bytes(8, "big")


def paged(index: TimerIndex, groups: list[int], until: bytes, limit: int) -> list[tuple[int, bytes, bytes]]:
    found: list[tuple[int, bytes, bytes]] = []
    while page := index.due(STATE, groups, until, found[-1] if found else None, limit):
        assert len(page) <= limit
        found += page
    return found


def in_order(timers: set[tuple[int, bytes, bytes]], groups: list[int], until: bytes) -> list[tuple[int, bytes, bytes]]:
    return sorted((t for t in timers if t[0] in groups and t[2] <= until), key=lambda t: (t[2], t[0], t[1]))


@pytest.mark.parametrize("limit", [1, 7, 10_000])
def test_due_timers_come_once_and_in_the_order_in_which_they_fire(limit: int, seed: int) -> None:
    rng = random.Random(seed)
    timers = {(rng.randrange(4), b"%d" % rng.randrange(40), at(rng.randrange(50))) for _ in range(1500)}
    table = HeapStateTable()
    table.apply(changes(*[put(group, STATE, key, expiry, b"") for group, key, expiry in timers]))
    assert paged(TimerIndex(table), [0, 1, 3], at(25), limit) == in_order(timers, [0, 1, 3], at(25))


@pytest.mark.parametrize("writes", [3, 400])
def test_it_follows_every_change_of_its_table(writes: int, seed: int) -> None:
    rng = random.Random(seed)
    table, held = HeapStateTable(), set[tuple[int, bytes, bytes]]()
    index = TimerIndex(table)
    for _ in range(40):
        rows: list[Any] = [put(rng.randrange(4), STATE + 1, b"other", at(1), b"")]
        for _ in range(rng.randrange(writes)):
            group, key, expiry = rng.randrange(4), b"%d" % rng.randrange(60), at(rng.randrange(99))
            kind = rng.choice(["put", "put", "delete", "clear"] if writes < 10 else ["put", "put", "delete"])
            if kind == "put":
                held.add((group, key, expiry))
                rows.append(put(group, STATE, key, expiry, b""))
            elif kind == "delete":
                held.discard((group, key, expiry))
                rows.append(delete(group, STATE, key, expiry))
            else:
                held -= {one for one in held if one[:2] == (group, key)}
                rows.append(clear(group, STATE, key))
        batch = changes(*rows)
        table.apply(batch)
        index.apply(batch)
        # Not all groups each time: one that was never asked for is read when it is.
        groups = sorted(rng.sample(range(4), rng.randrange(1, 5)))
        assert paged(index, groups, at(60), 16) == in_order(held, groups, at(60))


def test_what_is_written_while_it_is_made_is_in_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstl.taskmanager.timer_index._PAGE", 7)
    rng = random.Random(seed)
    held = {(rng.randrange(3), b"%d" % rng.randrange(40), at(rng.randrange(50))) for _ in range(400)}
    table = HeapStateTable()
    table.apply(changes(*[put(group, STATE, key, expiry, b"") for group, key, expiry in held]))
    index = TimerIndex(table)
    pieces = 0
    for _ in index.build(STATE, [0, 1, 2]):
        pieces += 1
        if pieces % 11 == 0 and pieces < 100:
            new, old = (rng.randrange(3), b"%d" % rng.randrange(40), at(rng.randrange(50))), rng.choice(sorted(held))
            held = held - {old} | {new}
            batch = changes(delete(old[0], STATE, old[1], old[2]), put(new[0], STATE, new[1], new[2], b""))
            table.apply(batch)
            index.apply(batch)
    assert pieces > 400 / 7
    assert paged(index, [0, 1, 2], at(60), 16) == in_order(held, [0, 1, 2], at(60))


async def test_tables_that_were_replaced_bring_their_own_timers(seed: int) -> None:
    world = BackendWorld(seed)
    everything = KeyGroupRange(0, 7)
    for expiry in (5, 6):
        table = HeapStateTable()
        table.apply(changes(put(0, STATE, b"k", at(expiry), b"")))
        world.backend.replace_tables({"op": table}, None, everything)
        assert world.backend.committed.source("op").timers.due(STATE, [0], at(9), None, 9) == [(0, b"k", at(expiry))]
    await world.close()
