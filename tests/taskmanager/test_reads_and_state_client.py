"""Bounded reads of collections, and the worker's client over several TaskManagers against one table that has it all."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dstl.changelog.change_set import OP_META
from dstl.changelog.segment.reader import decode_segment
from dstl.errors import Fenced, Invalid, Superseded, Unavailable
from dstl.options import MaterializationOptions
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address, Connection
from dstl.rpc.codec import Message
from dstl.rpc.fleet_messages import Restore
from dstl.rpc.handshake import Role
from dstl.rpc.messages import (
    ENTRY_COLUMNS,
    KEY_COLUMNS,
    VALUE_COLUMN,
    Done,
    DueEntries,
    Entries,
    ExpiryPlace,
    FetchDue,
    Fetched,
    FetchEntries,
    FetchMany,
    FetchValues,
    OpenAttempt,
    Values,
    Write,
    read_columns,
    write_columns,
)
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.rpc.state_client import StateClient
from dstl.runtime import SystemClock
from dstl.taskmanager.reads import CommittedTables, TableSource, bounded_entries, client_of, count_within
from dstl.taskmanager.service import TaskManagerService
from dstl.taskmanager.timer_index import TimerIndex
from handles.key_group import KeyGroupRange, range_of_partition
from materializer.bases.operator_bases import OperatorBases
from materializer.manager import PeriodicMaterializationManager
from materializer.tables import HeapStateTable
from tests.simulation.virtual_time import seeded_runtime
from worlds.backend import MAX_PARALLELISM, BackendWorld
from worlds.table_changes import changes, put


def table_of(*rows: Any) -> HeapStateTable:
    table = HeapStateTable()
    table.apply(changes(*rows))
    return table


def paged(read: Callable[[Any], list[Any]], last: Callable[[Any], Any]) -> list[Any]:
    found: list[Any] = []
    after = None
    while page := read(after):
        found += page
        after = last(page[-1])
    return found


@pytest.mark.parametrize("max_bytes", [1, 10, 35, 1000, 1 << 20])
def test_pages_of_entries_join_to_all_of_one_key(max_bytes: int, rng: random.Random) -> None:
    mine = sorted({b"%04d" % rng.randrange(3000) for _ in range(700)})
    rows = [
        put(1, 0, key, user_key, b"v" * rng.randrange(9)) for key in (b"k", b"k\0", b"j", b"ka") for user_key in mine
    ]
    table = table_of(*rows)
    client = client_of(TableSource(table))
    found = paged(lambda after: client.scan_entries(0, 1, b"k", after, max_bytes), lambda entry: entry[0])
    assert found == [(user_key, table.get_entry(0, 1, b"k", [user_key])[0]) for user_key in mine]
    for page in (client.scan_entries(0, 1, b"k", None, max_bytes),):
        assert len(page) == 1 or sum(len(v) for _, v in page[:-1]) <= max_bytes


def test_keys_with_too_much_are_left_to_be_read_by_the_page() -> None:
    small, large = [(b"u", b"v")], [(b"u", b"v" * 100)]
    assert bounded_entries([small, large, [], small], 50) == [small, None, [], small]
    ten = [[(b"u", b"v" * 9)]] * 6
    assert bounded_entries(ten, 10) == [*ten[:4], None, None], "a reply holds at most four times as much"


def test_a_reply_holds_the_first_keys_that_fit_and_never_none() -> None:
    columns = [[b"12", None, b"1234", b""], [b"1", b"12", None, None]]
    assert [count_within(columns, limit) for limit in (0, 2, 3, 5, 8, 9, 99)] == [1, 1, 1, 2, 2, 4, 4]
    assert (count_within([], 9), count_within([[]], 9)) == (0, 0)


@pytest.mark.parametrize("reply_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("request_bytes", [1, 40, 1 << 20])
async def test_values_that_do_not_fit_one_message_come_in_several(
    reply_bytes: int, request_bytes: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstl.rpc.state_client._REQUEST_BYTES", request_bytes)
    rng = random.Random(seed)
    keys = [b"key-%d" % n for n in range(40)]
    rows = [
        put(n % 8, state, key, b"", rng.randbytes(rng.randrange(30))) for n, key in enumerate(keys) for state in (1, 2)
    ]
    whole = table_of(*[row for row in rows if rng.random() < 0.8])
    groups = [n % 8 for n in range(40)]
    secret, runtime = Secret.generate(), seeded_runtime(seed, SystemClock())
    world = BackendWorld(seed)
    world.backend.replace_tables({"b": whole}, None, KeyGroupRange.all(MAX_PARALLELISM))
    service = TaskManagerService(lambda _: world.backend, world.store, runtime, secret, reply_bytes)
    service._claimed = world.backend
    address = Address("127.0.0.1", await service.server.listen_tcp("127.0.0.1"))

    def work() -> None:
        connection = Connection(address, secret, timeout=20.0)
        client = StateClient([(KeyGroupRange.all(MAX_PARALLELISM), connection)], "b", 7)
        client.open(0, None, 4)
        want = [whole.get_many(state, groups, keys) for state in (1, 2, 9)]
        assert client.fetch_many([1, 2, 9], groups, keys) == want
        assert client.fetch_many([], groups, keys) == client.fetch_many([], [], []) == []
        found = client.fetch_values(1, np.array(groups, np.uint16), pa.array(keys, pa.binary()))
        assert found.to_pylist() == want[0]
        assert len(client.fetch_values(1, np.array([], np.uint16), pa.array([], pa.binary()))) == 0
        connection.close()

    await asyncio.to_thread(work)
    await service.server.close()
    await world.close()


async def test_a_restore_of_what_is_no_checkpoint_is_refused(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """By whom it was asked for is a mistake of theirs, and no traceback of ours."""
    secret, world = Secret.generate(), BackendWorld(seed)
    service = TaskManagerService(lambda _: world.backend, world.store, seeded_runtime(seed, SystemClock()), secret)
    service._claimed = world.backend
    address = Address("127.0.0.1", await service.server.listen_tcp("127.0.0.1"))
    connection = await AsyncConnection.open(address, secret, role=Role.COORDINATOR)
    with pytest.raises(Invalid, match="the request to restore holds no valid checkpoint"):
        await connection.call(Restore(KeyGroupRange.all(MAX_PARALLELISM), b'{"a": 1}'))
    assert not caplog.records
    connection.close()
    await service.server.close()
    await world.close()


async def test_a_task_manager_serves_others_while_it_makes_an_index_by_time(seed: int) -> None:
    """In the first batch after a restart; before, half a million timers held its loop for two seconds."""
    rows = [put(0, 3, b"%d" % n, n.to_bytes(8, "big"), b"\1") for n in range(20_000)]
    rows += [put(group, 4, n.to_bytes(8, "little"), b"", b"") for group in range(8) for n in range(100)]
    world, runtime = BackendWorld(seed), seeded_runtime(seed, SystemClock())
    service = TaskManagerService(lambda _: world.backend, world.store, runtime, Secret.generate())
    service._claimed = world.backend
    world.backend.replace_tables({"b": table_of(*rows)}, None, KeyGroupRange.all(MAX_PARALLELISM))
    world.backend.open_attempt(("b", 7), 0, None, 1)
    peer: Any = None
    timers = FetchDue("b", 7, 3, None, 5, 0, True, (0,))
    for asked in (timers, FetchDue("b", 7, 4, ExpiryPlace(True, 0), 5, 0, False, (0,))):
        answer, turns = asyncio.ensure_future(service._read(peer, asked)), 0
        while not answer.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 5
    assert len(read_columns((await service._read(peer, timers)).data, ENTRY_COLUMNS)[0]) == 6
    given_up = asyncio.ensure_future(service._read(peer, replace(timers, state=4)))
    await asyncio.sleep(0)
    world.backend.resume(None)
    with pytest.raises(Superseded):
        await given_up
    await world.close()


async def test_a_task_manager_serves_others_while_it_folds_a_large_batch(seed: int) -> None:
    """Before, it was silent meanwhile: with 18 million changed rows of a RocksDB table it was given up for hung."""
    world, runtime = BackendWorld(seed), seeded_runtime(seed, SystemClock())
    service = TaskManagerService(lambda _: world.backend, world.store, runtime, Secret.generate())
    service._claimed = world.backend
    world.backend.replace_tables({}, None, KeyGroupRange.all(MAX_PARALLELISM))
    before, after = (changes(*[put(0, 1, b"%d" % n, b"", value) for n in range(30_000)]) for value in (b"old", b"new"))
    parts = [before] * 39 + [after]
    peer: Any = None
    for ahead in (True, False):
        world.backend.committed.add("b", [(part, False) for part in parts])
        if ahead:
            await service._open_attempt(peer, OpenAttempt("b", 7, 0, None, 1))
        read = asyncio.ensure_future(service._read(peer, FetchMany("b", 7, (1,), (0,), (b"9",))))
        waiting = []
        while not read.done():
            await asyncio.sleep(0)
            waiting.append(world.backend.committed.waiting_rows)
        assert len(set(waiting)) > 3, waiting
        assert (await read).columns == ((b"new",),)
    world.backend.committed.add("b", [(part, False) for part in parts])
    given_up = asyncio.ensure_future(service._read(peer, FetchMany("b", 7, (1,), (0,), (b"9",))))
    await asyncio.sleep(0)
    world.backend.resume(None)
    with pytest.raises(Superseded):
        await given_up
    await world.close()


async def test_a_look_for_a_materialization_folds_nothing_while_a_task_waits_for_its_opening(seed: int) -> None:
    """It asked for the table's size, and that folded all of the batch before, at once: as silent as without pieces."""
    world = BackendWorld(seed)
    backend, waiting = world.backend, changes(put(0, 1, b"k", b"", b"v"))
    manager = PeriodicMaterializationManager(
        backend,
        None,  # type: ignore[arg-type]
        options=MaterializationOptions(),
        runtime=world.runtime,
    )
    backend.tracker.manager = manager
    backend.tracker.bases["b"] = OperatorBases()
    backend.committed.add("b", [(waiting, False)])
    manager.look()
    assert backend.committed.waiting_rows == 1
    assert backend.table("b").size().entries == 1
    await manager.close()
    await world.close()


def test_parts_are_folded_together_in_their_order_and_stay_where_that_fails() -> None:
    """Of many small tasks most of the time of a fold is what a call takes before its first row."""
    applied: list[int] = []

    class Table(HeapStateTable):
        def apply(self, given: pa.RecordBatch) -> None:
            applied.append(given.num_rows)
            if len(applied) == 1:
                raise Unavailable("the disk is full")
            super().apply(given)

    tables = CommittedTables(lambda _: Table())
    parts = [changes(put(group, 1, b"k", b"", b"%d" % n)) for n in range(3) for group in (0, 1)]
    tables.add("b", [(part, False) for part in parts])
    tables.add("c", [(parts[0], False)])
    tables.add("b", [(parts[1], True), (changes(put(1, 1, b"k", b"", b"last")), True)])
    with pytest.raises(Unavailable):
        tables.fold()
    assert tables.waiting_rows == 9
    assert tables.size("b").entries == 0
    assert tables.fold(most_rows=1)
    assert tables.waiting_rows == 3
    assert not tables.fold()
    assert applied == [6, 6, 1, 2]
    assert tables.source("b").table.get_many(1, [0, 1], [b"k", b"k"]) == [b"2", b"last"]


async def test_a_client_of_several_task_managers_reads_as_from_one(seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        put(
            rng.randrange(MAX_PARALLELISM), state, b"%d" % rng.randrange(9), b"%d" % n if state == 2 else b"", b"%d" % n
        )
        for n in range(300)
        for state in (1, 2)
    ]
    rows += [put(n % 8, 3, b"%d" % n, (n % 5).to_bytes(8, "big"), b"\1") for n in range(40)]
    whole = table_of(*rows)
    secret, runtime = Secret.generate(), seeded_runtime(seed, SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        where: list[tuple[KeyGroupRange, Address]] = []
        for place in range(3):
            owned = range_of_partition(place, MAX_PARALLELISM, 3)
            world = BackendWorld(seed + place)
            world.backend.replace_tables({"b": table_of(*[r for r in rows if r[0] in owned])}, None, owned)
            service = TaskManagerService(lambda _, w=world: w.backend, world.store, runtime, secret)
            service._claimed = world.backend
            stack.push_async_callback(world.close)
            stack.push_async_callback(service.server.close)
            where.append((owned, Address("127.0.0.1", await service.server.listen_tcp("127.0.0.1"))))

        def work() -> None:
            connections = [(owned, Connection(address, secret, timeout=20.0)) for owned, address in where]
            client = StateClient(connections, "b", 7)
            with pytest.raises(Fenced):
                client.fetch_many([1], [0], [b"1"])
            client.open(0, None, 4)
            asked = [(rng.randrange(MAX_PARALLELISM), b"%d" % rng.randrange(12)) for _ in range(60)]
            groups, keys = [g for g, _ in asked], [k for _, k in asked]
            assert client.fetch_many([1, 9], groups, keys) == [whole.get_many(1, groups, keys), [None] * 60]
            assert client.fetch_entries(2, groups, keys, 1 << 20) == whole.get_entries(2, groups, keys)
            assert client.fetch_entry(2, 5, b"3", [b"1", b"x"]) == whole.get_entry(2, 5, b"3", [b"1", b"x"])
            assert client.scan_entries(2, 5, b"3", None, 1 << 20) == whole.get_entries(2, [5], [b"3"])[0]
            every = list(range(MAX_PARALLELISM))
            due = [pa.table(TimerIndex(whole, 3).due(group, 3), names=["key", "value"]) for group in every]
            found = pa.Table.from_batches(client.fetch_due(3, every, None, 3, with_values=True), ENTRY_COLUMNS)
            assert found.select(["key", "value"]).to_pylist() == pa.concat_tables(due).to_pylist()
            assert found.num_rows
            client.write(1, changes(put(2, 1, b"k", b"", b"v"), put(3, 1, b"k", b"", b"v")), b"{}")
            client.flush()
            with pytest.raises(Invalid, match="not an Arrow batch"):
                connections[0][1].send(Write("b", 7, 1, b"", False, b"rubbish")).result()
            with pytest.raises(Invalid, match="field 'keys' that is malformed"):
                connections[0][1].send(FetchMany("b", 7, (1,), (1,), (5,))).result()  # type: ignore[arg-type]
            client.write(1, changes(put(7, 1, b"k", b"", b"v")), b"{}")
            client.write(1, changes(put(3, 1, b"k", b"", b"w")), b"{}")
            for late in (client.flush, lambda: client.fetch_many([1], [7], [b"k"]), client.flush):
                with pytest.raises(Invalid, match="key groups"):
                    late()
            for _, connection in connections:
                connection.close()

        await asyncio.get_running_loop().run_in_executor(None, work)


@pytest.mark.parametrize("read", ["fetch_many", "fetch_values", "fetch_entries", "fetch_due"])
async def test_every_owner_is_asked_before_any_is_waited_for(read: str) -> None:
    """Each of them answers only once all of them were asked."""
    together = {kind: asyncio.Barrier(3) for kind in (OpenAttempt, FetchMany, FetchValues, FetchEntries, FetchDue)}

    async def open_attempt(peer: Peer, call: OpenAttempt) -> Done:
        await together[OpenAttempt].wait()
        return Done()

    async def fetch(peer: Peer, call: Any) -> Message:
        await together[type(call)].wait()
        if isinstance(call, FetchValues):
            return Fetched(write_columns(VALUE_COLUMN, [pa.array([b"v"], pa.binary())]))
        timer = [pa.array([0], pa.uint16()), pa.array([b"k"], pa.binary()), pa.array([b"8 bytes."], pa.binary())]
        return {
            FetchMany: Values(((b"v",),)),
            FetchEntries: Entries((1,), (b"u",), (b"v",)),
            FetchDue: DueEntries(False, write_columns(ENTRY_COLUMNS, timer)),
        }[type(call)]

    secret = Secret.generate()
    handlers = {OpenAttempt: open_attempt, **dict.fromkeys([FetchMany, FetchValues, FetchEntries, FetchDue], fetch)}
    servers = [RpcServer(secret, handlers) for _ in range(3)]
    ports = [await server.listen_tcp("127.0.0.1") for server in servers]

    def work() -> None:
        connections = [Connection(Address("127.0.0.1", port), secret, timeout=10.0) for port in ports]
        owners = [(range_of_partition(place, 3, 3), each) for place, each in enumerate(connections)]
        client = StateClient(owners, "b", 7)
        client.open(0, None, 3)
        groups, keys = [0, 1, 2], [b"a", b"b", b"c"]
        if read == "fetch_many":
            assert client.fetch_many([1], groups, keys) == [[b"v"] * 3]
        elif read == "fetch_values":
            found = client.fetch_values(1, np.array(groups, np.uint16), pa.array(keys, pa.binary()))
            assert found.to_pylist() == [b"v"] * 3
        elif read == "fetch_entries":
            assert client.fetch_entries(1, groups, keys, 100) == [[(b"u", b"v")]] * 3
        else:
            assert [page.num_rows for page in client.fetch_due(1, groups, None, 9, with_values=True)] == [1] * 3
        client.flush()
        for connection in connections:
            connection.close()

    async with asyncio.timeout(20):
        await asyncio.to_thread(work)
    for server in servers:
        await server.close()


async def test_an_attempt_that_could_not_be_opened_says_why_and_not_what_came_of_it(seed: int) -> None:
    """What is sent behind the opening is refused too, as another error."""
    secret, world = Secret.generate(), BackendWorld(seed)
    service = TaskManagerService(lambda _: world.backend, world.store, seeded_runtime(seed, SystemClock()), secret)
    service._claimed = world.backend
    address = Address("127.0.0.1", await service.server.listen_tcp("127.0.0.1"))

    def work() -> None:
        connection = Connection(address, secret, timeout=20.0)
        client = StateClient([(KeyGroupRange.all(MAX_PARALLELISM), connection)], "b", 7)
        client.open(0, 5, 4)
        client.write(1, changes(put(2, 1, b"k", b"", b"v")), b"{}")
        for late in (lambda: client.fetch_many([1], [2], [b"k"]), client.flush):
            with pytest.raises(Unavailable, match="holds the state of checkpoint None, not of 5"):
                late()
        connection.close()

    await asyncio.to_thread(work)
    assert not world.backend._attempts
    await service.server.close()
    await world.close()


async def test_every_log_has_its_attempts_states_once_whichever_task_manager_is_written_to_first(seed: int) -> None:
    """One attempt goes on with the log of another, a third has to open one of its own; one sends what is refused."""
    secret, runtime = Secret.generate(), seeded_runtime(seed, SystemClock())
    worlds = [BackendWorld(seed + place, inline_threshold=0) for place in range(2)]
    where = []
    for world, owned in zip(worlds, (KeyGroupRange(0, 2), KeyGroupRange(3, MAX_PARALLELISM - 1)), strict=True):
        world.backend.replace_tables({}, None, owned)
        service = TaskManagerService(lambda _, w=world: w.backend, world.store, runtime, secret)
        service._claimed = world.backend
        where.append((owned, Address("127.0.0.1", await service.server.listen_tcp("127.0.0.1")), service))
    sent: list[bytes] = []

    class Watched(Connection):
        def send(self, message: Any) -> Any:
            sent.extend([message.metadata] if isinstance(message, Write) else [])
            return super().send(message)

    left, right = put(2, 1, b"k", b"", b"v"), put(3, 1, b"k", b"", b"v")

    def work(attempt: int, batch: int, parent: int | None, parts: list[list[Any]]) -> None:
        connections = [(owned, Watched(address, secret, timeout=20.0)) for owned, address, _ in where]
        client = StateClient(connections, "b", attempt)
        client.open(batch, parent, 4)
        for part in parts:
            client.write(1, changes(*part), b"states of %d" % attempt)
        client.flush()
        for _, connection in connections:
            connection.close()

    async def told(attempt: int) -> list[list[bytes]]:
        found = []
        for world in worlds:
            before = {info.name async for info in world.disk.list()}
            await world.backend.persist({"b": [attempt]})
            (name,) = {info.name async for info in world.disk.list()} - before
            rows = [row for *_, batch in decode_segment(await world.disk.get(name), name) for row in batch.to_pylist()]
            found.append([row["value"] for row in rows if row["op"] == OP_META])
        return found

    await asyncio.to_thread(work, 1, 0, None, [[right], [left, right], [left], [right]])
    assert await told(1) == [[b"states of 1"]] * 2
    for world in worlds:
        world.backend.complete(1, {"b": [1]}, {})
    await asyncio.to_thread(work, 2, 1, 1, [[left], [right], [left, right]])
    await asyncio.to_thread(work, 3, 1, 1, [[left, right], [left], [right]])
    logs = [len({each._attempts["b", n].writer.log_id for n in (2, 3)}) for each in (w.backend for w in worlds)]
    assert logs == [2, 2], "the attempts do not run side by side"
    assert await told(3) == [[b"states of 3"]] * 2
    assert len(sent) == 13
    assert sorted(filter(None, sent)) == [b"states of %d" % n for n in (1, 1, 2, 2, 3, 3)], "sent again"
    for world in worlds:
        world.backend.abort()
    assert await told(2) == [[b"states of 2"]] * 2
    for world, (_, _, service) in zip(worlds, where, strict=True):
        await service.server.close()
        await world.close()


def request(key_groups: list[int], keys: list[bytes]) -> memoryview:
    return write_columns(KEY_COLUMNS, [pa.array(key_groups, pa.uint16()), pa.array(keys, pa.binary())])


def test_what_is_no_request_is_refused() -> None:
    whole = request([1, 2], [b"a", b"bc"])
    null = write_columns(VALUE_COLUMN, [pa.array([None], pa.binary())])
    with pytest.raises(Invalid, match="not an Arrow batch of key_group, key"):
        read_columns(null, KEY_COLUMNS)
    with pytest.raises(Invalid, match="null"):
        read_columns(
            write_columns(KEY_COLUMNS, [pa.array([1], pa.uint16()), pa.array([None], pa.binary())]), KEY_COLUMNS
        )
    for size in range(len(whole)):
        with pytest.raises(Invalid):
            read_columns(whole[:size], KEY_COLUMNS)
