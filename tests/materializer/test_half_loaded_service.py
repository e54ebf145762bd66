"""A TaskManager that serves half loaded answers each kind of read as one that has everything: a machine with a twin."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dstl.errors import Unavailable
from dstl.rpc.fleet_messages import LookUp, Restore, Resume
from dstl.rpc.messages import (
    KEY_COLUMNS,
    AttemptCall,
    ExpiryPlace,
    FetchDue,
    FetchEntries,
    FetchEntry,
    FetchMany,
    FetchValues,
    ScanEntries,
    ScanValues,
    write_columns,
)
from dstl.rpc.protocol import Secret
from dstl.taskmanager import reads
from dstl.taskmanager.reads import TableSource
from dstl.taskmanager.service import TaskManagerService
from handles.checkpoint import CompletedCheckpoint
from handles.materialized_handle import generations_of
from materializer.tables import HeapStateTable
from tests.materializer.test_cold_key_groups import small
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.materialization import EAGER, GROUPS, OPERATORS, World
from worlds.restored import fallbacks, restore_tables
from worlds.table_changes import changes, content
from worlds.wrapped_store import Gate

KEYS = [bytes([n]) for n in range(256)]
REPLY_BYTES = 40


def some_read(rng: random.Random, operator: str, attempt: int) -> AttemptCall[Any]:
    """A read of any kind, of few keys or of whole states."""
    (kind,), state = rng.choices(range(8), (6, 6, 6, 6, 6, 6, 1, 6)), rng.randrange(2)
    keys = rng.sample(KEYS, rng.randrange(1, 8))
    groups = tuple(key[0] % GROUPS for key in keys)
    some = tuple(sorted(rng.sample(range(GROUPS), rng.randrange(1, 6))))
    names = tuple(bytes([n]) for n in rng.sample(range(256), 3))
    if kind == 0:
        return FetchMany(operator, attempt, (0, 1), groups, tuple(keys))
    if kind == 1:
        columns = [pa.array(np.array(groups, np.uint16)), pa.array(keys, pa.binary())]
        return FetchValues(operator, attempt, state, write_columns(KEY_COLUMNS, columns))
    if kind == 2:
        return FetchEntries(operator, attempt, state, 60, groups, tuple(keys))
    if kind == 3:
        return FetchEntry(operator, attempt, state, groups[0], keys[0], names)
    if kind == 4:
        return ScanEntries(operator, attempt, 1, groups[0], 30, keys[0], None)
    if kind == 5:
        return FetchDue(operator, attempt, 1, None, rng.randrange(1 << 64), 0, True, some)
    if kind == 6:
        place = ExpiryPlace(False, 0)
        return FetchDue(operator, attempt, 0, place, rng.randrange(-(1 << 63), 1 << 63), 0, True, some)
    return ScanValues(operator, attempt, 0, groups[0], None)


def plain(reply: Any) -> Any:
    return tuple(
        bytes(v) if isinstance(v, memoryview) else v for v in (getattr(reply, n) for n in type(reply).__slots__)
    )


async def damage_newest(world: World, checkpoint: CompletedCheckpoint, rng: random.Random) -> None:
    """Flip a bit in the newest base of each key group."""
    for groups in generations_of(checkpoint.materialized).values():
        for base in (bases[0] for bases in groups.values()):
            body = bytearray(await world.memory.get(base.file.name))
            body[base.offset + rng.randrange(base.length)] ^= 1 << rng.randrange(8)
            await world.memory.delete([base.file.name])
            await world.memory.put(base.file.name, bytes(body))


class Twin:
    """The same service half loaded, and sources that have everything."""

    def __init__(self, world: World, store: FaultyStore) -> None:
        self.world, self.store = world, store
        self.member = world.members[0]
        self.service = TaskManagerService(
            lambda _: self.member.backend, store, world.runtime, Secret(b"s" * 32), reply_bytes=REPLY_BYTES
        )
        self.sources: dict[str, TableSource] = {}
        self.half = self.answered = 0

    async def restore(self) -> None:
        newest = self.world.newest
        assert newest is not None
        tables = await restore_tables(
            newest, self.world.memory, self.member.owned, lambda _: HeapStateTable(), self.world.runtime
        )
        self.sources = {op: TableSource(tables.tables.get(op, HeapStateTable())) for op in OPERATORS}
        await self.service._resume(None, Resume("query", None, self.member.owned))  # type: ignore[arg-type]
        await self.service._restore(  # type: ignore[arg-type]
            None, Restore(self.member.owned, newest.model_dump_json().encode())
        )

    async def ask(self, rng: random.Random, attempt: int) -> None:
        """Read something, page by page, at one's own pace."""
        call = some_read(rng, rng.choice(OPERATORS), attempt)
        source = self.sources[call.operator]
        for _ in range(30):
            self.half += self.member.backend.loading is not None
            try:
                reply = await self.service._read(None, call)  # type: ignore[arg-type]
            except Unavailable:
                await asyncio.sleep(1)
                continue
            with_all = source.answer(call, REPLY_BYTES)
            assert plain(reply) == plain(with_all), call
            self.answered += 1
            return

    async def look_up(self, rng: random.Random) -> None:
        key, state, operator = rng.choice(KEYS), rng.randrange(2), rng.choice(OPERATORS)
        newest = self.world.newest
        assert newest is not None
        truth = {
            a[3]: v for a, v in self.world.models[newest.checkpoint_id][operator].items() if a[1:3] == (state, key)
        }
        try:
            found = await self.service._look_up(
                None, LookUp(newest.checkpoint_id, operator, state, key[0] % GROUPS, key)
            )  # type: ignore[arg-type]
        except Unavailable:
            return
        assert dict(zip(found.user_keys, found.values, strict=True)) == truth


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.0])
@virtual
async def test_every_read_of_a_half_loaded_task_manager_is_answered_as_by_one_that_has_everything(
    share: float, damage: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are committed and bases made meanwhile; what none needs is deleted; the store fails at times."""
    small(monkeypatch, share, 40, 0)
    monkeypatch.setattr(reads, "_PAGE", 3)
    rng = random.Random(seed)
    async with World(seed, partitions=1, options=EAGER) as world:
        await world.batches(8, 80)
        for member in world.members:
            member.manager._options = EAGER.model_copy(update={"enabled": False})
        for _ in range(3):
            await world.batch_of(60)
        newest = world.newest
        assert newest is not None
        if damage:
            await damage_newest(world, newest, rng)
        for member in world.members:
            member.manager._options = EAGER
        rules = [FaultRule(Fault.UNAVAILABLE, "get", chance=0.05), FaultRule(Fault.SHORT_GET, "get", nth=(7, 30, 50))]
        store = FaultyStore(world.memory, rules, clock=LoopClock(), latency=lambda *_: rng.uniform(0.001, 0.6))
        twin = Twin(world, store)
        write = twin.member.backend.write
        monkeypatch.setattr(twin.member.backend, "write", lambda *args: write(*args, expiring=True))
        for _ in range(2):
            await twin.restore()
            for _ in range(5):
                world.attempt += 1
                parent = world.newest.checkpoint_id
                for operator in OPERATORS:
                    twin.member.backend.open_attempt((operator, world.attempt), world.batch, parent, 1)
                mine = world.attempt
                await asyncio.gather(*(twin.ask(rng, mine) for _ in range(12)), twin.look_up(rng))
                applied = world.random_changes(20)
                checkpoint = await world.checkpoint(world.run_attempts(applied))
                world.take(checkpoint, applied)
                await world.subsume()
                for operator, rows in applied.items():
                    twin.sources[operator].apply(changes(*sorted(rows, key=lambda row: row[0])))
                await twin.look_up(rng)
                await asyncio.sleep(rng.uniform(0, 1))
        while twin.member.backend.loading is not None:
            assert twin.member.backend.loading.failure is None
            await asyncio.sleep(1)
        await world.materialized()
        world.members[0].backend.resume(world.newest.checkpoint_id)
        await world.check(world.newest)
        assert twin.half


@virtual
async def test_a_damaged_base_that_is_found_many_batches_later_still_has_its_older_base_and_log(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents that a TaskManager's neighbour, which makes bases all the while, lets what it needs be deleted."""
    small(monkeypatch, 0.0)
    rng = random.Random(seed)
    async with World(seed, options=EAGER, retained=2) as world:
        await world.batches(8, 80)
        newest = world.newest
        assert newest is not None
        await world.start(2)
        await damage_newest(world, newest, rng)
        gate = Gate("get", lambda name: name.endswith(".base"))
        late = world.members[1]
        service = TaskManagerService(lambda _: late.backend, gate(world.memory), world.runtime, Secret(b"s" * 32))
        await service._resume(None, Resume("query", None, late.owned))  # type: ignore[arg-type]
        restore = Restore(late.owned, newest.model_dump_json().encode())
        await service._restore(None, restore)  # type: ignore[arg-type]
        for _ in range(10):
            await world.batch_of(40)
            await world.materialized()
        made = {m.checkpoint for m in world.newest.materialized if m.checkpoint > newest.checkpoint_id}
        assert made, "the neighbour has made no base"
        assert newest not in world.completed
        assert world.deleted
        assert late.backend.loading is not None
        restored = late.backend.loading._restore.restored
        gate.opened.set()
        while late.backend.loading is not None:
            assert late.backend.loading.failure is None
            await asyncio.sleep(1)
        assert fallbacks(restored)
        for _ in range(3):
            await world.batch_of(10)
            await world.materialized()
        await world.check(world.newest, 2)
        late.backend.resume(world.newest.checkpoint_id)
        for operator in OPERATORS:
            with closing(late.backend.table(operator).snapshot()) as snapshot:
                mine = {at: value for at, value in world.model[operator].items() if at[0] in late.owned}
                assert content(snapshot, list(late.owned)) == mine
