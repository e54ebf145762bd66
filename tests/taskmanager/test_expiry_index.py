"""The index of entries by time against the table that it follows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from dstl.errors import Invalid
from dstl.rpc.messages import ENTRY_COLUMNS, ExpiryPlace, FetchDue, ScanValues, read_columns
from dstl.rpc.state_client import StateClient
from dstl.taskmanager.expiry_index import ExpiryIndex, expiries_of
from dstl.taskmanager.reads import Answered, LocalTransport, TableSource
from dstl.taskmanager.timer_index import TimerIndex
from handles.key_group import KeyGroupRange
from materializer.tables import HeapStateTable
from worlds.backend import BackendWorld
from worlds.table_changes import changes, clear, delete, put

STATE = 3
IN_KEY = ExpiryPlace(in_key=True, offset=1, null_bit=0)
IN_VALUE = ExpiryPlace(in_key=False, offset=2)
Held = dict[tuple[int, bytes], bytes]


def timed_key(name: int, at: int | None) -> bytes:
    return bytes([at is None]) + (at or 0).to_bytes(8, "little", signed=True) + b"%d" % name


def timed_value(at: int) -> bytes:
    return b"\1\0" + at.to_bytes(8, "little", signed=True)


def time_of(place: ExpiryPlace, key: bytes, value: bytes) -> int | None:
    if place.in_key and key[0] & 1:
        return None
    return int.from_bytes((key if place.in_key else value)[place.offset : place.offset + 8], "little", signed=True)


def expected(held: Held, place: ExpiryPlace, group: int, until: int) -> list[tuple[int, bytes, bytes]]:
    due = [(time_of(place, key, value), key, value) for (of, key), value in held.items() if of == group]
    return sorted((at, key, value) for at, key, value in due if at is not None and at <= until)


def found(index: ExpiryIndex, place: ExpiryPlace, group: int, until: int) -> list[tuple[int, bytes, bytes]]:
    keys, values = index.due(group, until)
    rows = [(time_of(place, k, v), k, v) for k, v in zip(keys.to_pylist(), values.to_pylist(), strict=True)]
    times = [at for at, _, _ in rows]
    assert times == sorted(times)  # type: ignore[type-var]
    again, part = index.due(group, until), index.due(group, until, 1, 2)
    assert [each.to_pylist() for each in again] == [keys.to_pylist(), values.to_pylist()]
    assert [each.to_pylist() for each in part] == [keys.to_pylist()[1:3], values.to_pylist()[1:3]]
    return sorted(rows)  # type: ignore[arg-type]


def test_times_are_read_where_they_stand() -> None:
    keys = pa.array([timed_key(1, 7), timed_key(2, None), b"", timed_key(3, -5)], pa.binary()).slice(1)
    never = (1 << 63) - 1
    assert expiries_of(keys, IN_KEY).tolist() == [never, never, -5]
    assert expiries_of(pa.array([], pa.binary()), IN_KEY).tolist() == []


@pytest.mark.parametrize("place", [ExpiryPlace(True, -1), ExpiryPlace(True, 1 << 20), ExpiryPlace(True, 1, 72)])
def test_places_outside_of_every_entry_are_refused(place: ExpiryPlace) -> None:
    with pytest.raises(Invalid, match="no entry has a time at"):
        ExpiryIndex(HeapStateTable(), STATE, place)


@pytest.mark.parametrize("place", [IN_KEY, IN_VALUE], ids=["key", "value"])
@pytest.mark.parametrize("most", [4, 200])
def test_what_is_due_is_what_the_table_holds(place: ExpiryPlace, most: int, rng: random.Random) -> None:
    """Entries come, are written again, get another time, go; the index hears of new times alone."""
    table, held = HeapStateTable(), Held()
    at = 0

    def rows(count: int) -> list[tuple[bool, Any]]:
        made: list[tuple[bool, Any]] = []
        for _ in range(count):
            group, name, when = rng.randrange(3), rng.randrange(80), at + rng.randrange(-5, 30)
            missing = place.in_key and rng.random() < 0.1
            key = timed_key(name, None if missing else when) if place.in_key else b"%d" % name
            value = b"%d" % rng.randrange(9) if place.in_key else timed_value(when)
            if any(row[0] == group and row[3] == key for _, row in made):
                continue  # within one batch a key has one change
            before = held.get((group, key))
            is_new = before is None or time_of(place, key, before) != time_of(place, key, value)
            held[group, key] = value
            made.append((is_new, put(group, STATE, key, b"", value)))
        return made

    def apply(index: ExpiryIndex | None, made: list[tuple[bool, Any]]) -> None:
        for expiring in (True, False):
            batch = changes(*sorted((row for is_new, row in made if is_new is expiring), key=lambda row: row[0]))
            table.apply(batch)
            if index is not None and expiring:
                index.add(batch)

    apply(None, rows(most))
    index = ExpiryIndex(table, STATE, place)
    for _ in range(30):
        at += rng.randrange(6)
        apply(index, rows(rng.randrange(most)))
        for group in range(3):
            assert found(index, place, group, at) == expected(held, place, group, at)
            gone = [key for _, key, _ in expected(held, place, group, at) if rng.random() < 0.8]
            table.apply(changes(*[delete(group, STATE, key) for key in gone]))
            for key in gone:
                del held[group, key]
    for group in range(3):
        found(index, place, group, at)
    # What has gone was forgotten when it was due.
    assert sum(len(run) for runs in index._runs.values() for run in runs) <= 3 * len(held) + 3 * most


def test_the_cost_of_what_is_due_does_not_follow_what_is_held() -> None:
    """Searches and copies touch the due entries: reads of the table are counted."""

    class Counting(HeapStateTable):
        asked = 0

        def get_values(self, state: int, key_groups: Any, keys: Any) -> Any:
            Counting.asked += len(keys)
            return super().get_values(state, key_groups, keys)

    for held in (1_000, 100_000):
        table = Counting()
        table.apply(changes(*[put(0, STATE, timed_key(i, 1_000 + i), b"", b"v") for i in range(held)]))
        index = ExpiryIndex(table, STATE, IN_KEY)
        Counting.asked = 0
        assert len(index.due(0, 1_009)[0]) == 10
        assert Counting.asked == 10


@pytest.mark.parametrize("max_bytes", [1, 60, 1 << 20])
def test_replies_are_pages(max_bytes: int, rng: random.Random) -> None:
    table = HeapStateTable()
    held = {(rng.randrange(4), timed_key(i, rng.randrange(50))): b"v" * rng.randrange(9) for i in range(60)}
    table.apply(changes(*sorted(put(group, STATE, key, b"", value) for (group, key), value in held.items())))
    source = TableSource(table)

    def pages(ask: Callable[[int], memoryview]) -> list[tuple[int, bytes, bytes]]:
        rows: list[tuple[int, bytes, bytes]] = []
        while len(page := read_columns(ask(len(rows)), ENTRY_COLUMNS)[0]):
            columns = read_columns(ask(len(rows)), ENTRY_COLUMNS)
            rows += zip(*(column.to_pylist() for column in columns), strict=True)
            assert len(page) == 1 or max_bytes > 1
        return rows

    want = [(g, k, v) for (g, k), v in held.items() if g != 2 and (time_of(IN_KEY, k, v) or 0) <= 30]

    in_order = sorted(g for g, _, _ in want)

    def due_page(known: int, with_values: bool) -> memoryview:
        last = in_order[known - 1] if known else 0
        groups = tuple(g for g in (0, 1, 3) if g >= last)
        asked = FetchDue("op", 1, STATE, IN_KEY, 30, in_order[:known].count(last), with_values, groups)
        page = source.answer(asked, max_bytes)
        assert page.more == (known + len(read_columns(memoryview(page.data), ENTRY_COLUMNS)[0]) < len(want))
        return memoryview(page.data)

    due = pages(lambda skip: due_page(skip, True))
    assert sorted(due) == sorted(want)
    without = pages(lambda skip: due_page(skip, False))
    assert without == [(g, k, b"") for g, k, _ in due]
    rows: list[tuple[int, bytes, bytes]] = []
    for group in range(4):
        after: bytes | None = None
        while True:
            page = source.answer(ScanValues("op", 1, STATE, group, after), max_bytes)
            columns = read_columns(memoryview(page.data), ENTRY_COLUMNS)
            if not len(columns[0]):
                break
            rows += zip(*(column.to_pylist() for column in columns), strict=True)
            after = rows[-1][1]
    assert rows == [(g, k, v) for (g, k), v in sorted(held.items())]


def at(ms: int) -> bytes:
    return ms.to_bytes(8, "big")


def due_timers(index: TimerIndex, groups: list[int], until: int) -> list[tuple[int, bytes, bytes]]:
    found: list[tuple[int, bytes, bytes]] = []
    for group in groups:
        # Page by page, as replies are.
        while len((page := index.due(group, until, sum(of == group for of, _, _ in found), 7))[0]):
            found += [(group, *timer) for timer in zip(*(column.to_pylist() for column in page), strict=True)]
    return found


def in_order(timers: set[tuple[int, bytes, bytes]], groups: list[int], until: int) -> list[tuple[int, bytes, bytes]]:
    return sorted((t for t in timers if t[0] in groups and t[2] <= at(until)), key=lambda t: (t[0], t[2], t[1]))


@pytest.mark.parametrize("max_bytes", [1, 100, 1 << 20])
def test_due_timers_come_once_and_in_the_order_in_which_they_fire(max_bytes: int, rng: random.Random) -> None:
    timers = {(rng.randrange(4), b"%d" % rng.randrange(40), at(rng.randrange(50))) for _ in range(1500)}
    source = TableSource(HeapStateTable())
    source.apply(changes(*[put(group, STATE, key, expiry, b"") for group, key, expiry in timers]))

    class Paged(LocalTransport):
        def send(self, message: Any) -> Answered:
            return Answered(self.source.answer(message, max_bytes))

    client = StateClient([(KeyGroupRange(0, 1), Paged(source)), (KeyGroupRange(2, 7), Paged(source))], "", 0)
    pages = list(client.fetch_due(STATE, [0, 1, 3], None, 25, with_values=True))
    found = [row for page in pages for row in zip(*(column.to_pylist() for column in page.columns), strict=True)]
    assert found == in_order(timers, [0, 1, 3], 25)
    assert len(pages) == 2 if max_bytes > 1 << 16 else len(pages) > 9


@pytest.mark.parametrize("writes", [3, 400])
def test_it_follows_every_change_of_its_table(writes: int, rng: random.Random) -> None:
    table = HeapStateTable()
    held = {(rng.randrange(4), b"%d" % rng.randrange(60), at(rng.randrange(99))) for _ in range(2000)}
    table.apply(changes(*[put(group, STATE, key, expiry, b"") for group, key, expiry in held]))
    index = TimerIndex(table, STATE)
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
        index.add(batch)
        # Not all groups each time: one that was never asked for is read when it is.
        groups = sorted(rng.sample(range(4), rng.randrange(1, 5)))
        assert due_timers(index, groups, 60) == in_order(held, groups, 60)


def test_what_is_written_while_the_timers_index_is_made_is_in_it(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstl.taskmanager.timer_index._PAGE", 7)
    held = {(rng.randrange(3), b"%d" % rng.randrange(40), at(rng.randrange(50))) for _ in range(400)}
    table = HeapStateTable()
    table.apply(changes(*[put(group, STATE, key, expiry, b"") for group, key, expiry in held]))
    index = TimerIndex(table, STATE)
    pieces = 0
    for _ in index.build([0, 1, 2]):
        pieces += 1
        if pieces % 11 == 0 and pieces < 100:
            new, old = (rng.randrange(3), b"%d" % rng.randrange(40), at(rng.randrange(50))), rng.choice(sorted(held))
            held = held - {old} | {new}
            batch = changes(delete(old[0], STATE, old[1], old[2]), put(new[0], STATE, new[1], new[2], b""))
            table.apply(batch)
            index.add(batch)
    assert pieces > 400 / 7
    assert due_timers(index, [0, 1, 2], 60) == in_order(held, [0, 1, 2], 60)


async def test_tables_that_were_replaced_bring_their_own_timers(seed: int) -> None:
    world = BackendWorld(seed)
    everything = KeyGroupRange(0, 7)
    for expiry in (5, 6):
        table = HeapStateTable()
        table.apply(changes(put(0, STATE, b"k", at(expiry), b"")))
        world.backend.replace_tables({"op": table}, None, everything)
        found = world.backend.committed.source("op").answer(FetchDue("op", 0, STATE, None, 9, 0, True, (0,)))
        assert read_columns(memoryview(found.data), ENTRY_COLUMNS)[2].to_pylist() == [at(expiry)]
    await world.close()
