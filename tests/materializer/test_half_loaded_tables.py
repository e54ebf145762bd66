"""What ends, fails or is taken away while a table is half loaded: no read is answered without its rows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from dstl.errors import CorruptData, DstlError, Unavailable
from dstl.rpc.fleet_messages import LookUp, Restore, Resume
from dstl.rpc.messages import FetchMany
from dstl.rpc.protocol import Secret
from dstl.taskmanager.service import TaskManagerService
from materializer.bases import base_fetch
from materializer.tables import HeapStateTable
from tests.materializer.test_cold_key_groups import Opened, small, some_world
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.materialization import OPERATORS


@pytest.fixture(autouse=True)
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


class GatedStore(FaultyStore):
    """Reads wait at a gate that a test opens for the ranges that it chooses."""

    gate: Any = None

    async def get(self, name: str, *rest: Any) -> bytes:
        if self.gate is not None:
            await self.gate(name, *rest)
        return await super().get(name, *rest)


def held_key(opened: Opened, operator: str) -> tuple[int, int, bytes]:
    """A key that the base alone has."""
    table = opened.restore.restored.tables[operator]
    assert isinstance(table, HeapStateTable)
    for group, state, key, _ in sorted(opened.truth[operator]):
        if state == 0 and table.is_cold(group) and table.get_many(0, [group], [key]) == [None]:
            return group, state, key
    raise AssertionError("no key is in the base alone")


@pytest.mark.parametrize("how", ["fails for good", "is given up"])
@virtual
async def test_a_read_in_place_that_outlives_its_load_is_not_answered_without_its_rows(
    how: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is on its way while all bases of another key group turn out to be damaged, or the run ends."""
    async with some_world(seed) as world:
        store = GatedStore(world.memory, clock=LoopClock())
        async with Opened(world, store) as opened:
            operator = OPERATORS[0]
            group, state, key = held_key(opened, operator)
            table = opened.restore.restored.tables[operator]
            gate, at_gate = asyncio.Event(), asyncio.Event()

            async def stop(name: str, *_: Any) -> None:
                at_gate.set()
                await gate.wait()

            for task in opened.restore._running.values():
                task.cancel()  # the load comes later than the read
            reads = opened.restore._reads[operator]
            await reads._index(reads._bases[group])
            store.gate = stop
            read = asyncio.ensure_future(opened.restore.bring(operator, {group: [(state, key)]}))
            await at_gate.wait()
            if how == "fails for good":
                monkeypatch.setattr(opened.restore._loads[operator], "run", damaged)
                with pytest.raises(CorruptData):
                    await opened.restore.load()
            await opened.restore.close()
            gate.set()
            try:
                async with asyncio.timeout(100):
                    await read
            except DstlError:
                return
            assert table.get_many(state, [group], [key]) == [opened.truth[operator][group, state, key, b""]]


async def damaged() -> None:
    raise CorruptData("every base is damaged")


@virtual
async def test_no_read_is_answered_from_a_half_loaded_table_while_another_restore_takes_its_place(seed: int) -> None:
    """A task of the run before asks at any moment of the restore that ends it: it is refused, or told what is true."""
    async with some_world(seed) as world:
        store = GatedStore(world.memory, clock=LoopClock())
        member, gate, newest = world.members[0], asyncio.Event(), world.newest
        service = TaskManagerService(lambda _: member.backend, store, world.runtime, Secret(b"s" * 32))
        await service._resume(None, Resume("query", None, member.owned))  # type: ignore[arg-type]

        async def stop(name: str, *_: Any) -> None:
            if name.endswith(".base"):
                await gate.wait()

        store.gate = stop
        restore = Restore(member.owned, newest.model_dump_json().encode())
        await service._restore(None, restore)  # type: ignore[arg-type]
        backend, truth = member.backend, world.models[newest.checkpoint_id]
        operator = OPERATORS[0]
        table = backend.table(operator)
        held = [at for at in truth[operator] if at[1] == 0 and table.get_many(0, [at[0]], [at[2]]) == [None]]
        backend.open_attempt((operator, 1), newest.batch_id + 1, newest.checkpoint_id, 1)

        async def ask(group: int, key: bytes) -> None:
            try:
                found = await service._read(None, FetchMany(operator, 1, (0,), (group,), (key,)))  # type: ignore[arg-type]
            except DstlError:
                return
            assert found.columns == ((truth[operator][group, 0, key, b""],),)

        asks = [asyncio.ensure_future(ask(held[0][0], held[0][2]))]
        await asyncio.sleep(1)
        again = asyncio.ensure_future(service._restore(None, restore))  # type: ignore[arg-type]
        while not again.done():
            asks.append(asyncio.ensure_future(ask(held[-1][0], held[-1][2])))
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(again, *asks)
        await backend.end_loading()


@pytest.mark.parametrize("how", ["given up", "ended"])
@virtual
async def test_no_lookup_is_answered_by_tables_that_came_after_those_it_has_waited_for(how: str, seed: int) -> None:
    """Its block is on its way while the same checkpoint is restored again: the new tables are as cold as the old."""
    async with some_world(seed) as world:
        store, load, block, at_gate = GatedStore(world.memory, clock=LoopClock()), *(asyncio.Event() for _ in range(3))
        backend, newest = world.members[0].backend, world.newest
        service = TaskManagerService(lambda _: backend, store, world.runtime, Secret(b"s" * 32))
        await service._resume(None, Resume("query", None, world.members[0].owned))  # type: ignore[arg-type]
        gate: asyncio.Event | None = load

        async def stop(name: str, *_: Any) -> None:
            if name.endswith(".base") and gate is not None:
                if gate is block:
                    at_gate.set()
                await gate.wait()

        store.gate = stop
        restore = Restore(world.members[0].owned, newest.model_dump_json().encode())
        await service._restore(None, restore)  # type: ignore[arg-type]
        operator, truth = OPERATORS[0], world.models[newest.checkpoint_id][OPERATORS[0]]
        table, loading = backend.table(operator), backend.loading
        assert loading is not None
        points = (at for at in sorted(truth) if at[1] == 0)
        group, _, key, _ = next(at for at in points if table.get_many(0, [at[0]], [at[2]]) == [None])
        reads = loading._restore._reads[operator]
        for known in reads._known.values():
            known.index.cancel()  # they wait beside the load
        await asyncio.sleep(0.1)
        gate = None
        await reads._index(reads._bases[group])
        gate = block
        look_up = LookUp(newest.checkpoint_id, operator, 0, group, key)
        looks = asyncio.ensure_future(service._look_up(None, look_up))  # type: ignore[arg-type]
        await at_gate.wait()
        if how == "ended":
            gate = None
            load.set()
            await loading.ended()
        gate = asyncio.Event()
        await service._restore(None, restore)  # type: ignore[arg-type]
        block.set()
        with contextlib.suppress(Unavailable):
            assert (await looks).values == (truth[group, 0, key, b""],)
        await backend.end_loading()


@pytest.mark.parametrize("stop_at", range(1, 8, 2))
@virtual
async def test_a_load_goes_on_from_wherever_another_operator_has_stopped_it(
    stop_at: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operator's store request fails at a moment of the other's load, and the load is called again."""
    monkeypatch.setattr(base_fetch, "FETCH_BYTES", 1 << 20)
    monkeypatch.setattr(base_fetch, "AHEAD_FETCHES", 1)
    failing, inner, taken = asyncio.Event(), HeapStateTable.warm, [0]

    def warm(table: HeapStateTable, group: int, base: Any) -> bool:
        taken[0] += 1
        if taken[0] == stop_at:
            failing.set()
        return inner(table, group, base)

    async def fail() -> None:
        await failing.wait()
        raise Unavailable("the store is away")

    async with some_world(seed) as world, Opened(world, world.memory) as opened:
        opened.restore._running.pop(OPERATORS[1]).cancel()
        with monkeypatch.context() as patched:
            patched.setattr(HeapStateTable, "warm", warm)
            patched.setattr(opened.restore._loads[OPERATORS[1]], "run", fail)
            with pytest.raises(Unavailable):
                await opened.restore.load()
        await opened.restore.load()
        opened.check_whole()
