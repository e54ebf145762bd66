"""What ends, fails or is taken away while a table is half loaded: no read is answered without its rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dstl.errors import CorruptData, DstlError, Unavailable
from materializer.tables import HeapStateTable
from tests.materializer.test_cold_key_groups import Opened, small, some_world
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.materialization import OPERATORS


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
    small(monkeypatch)
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
async def test_reads_that_wait_are_told_when_the_load_is_given_up_in_its_pause(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is away lets the load pause: a waiter of then, or of after, must not wait for ever."""
    small(monkeypatch, share=0.0)
    async with some_world(seed) as world:
        store = FaultyStore(world.memory, clock=LoopClock())
        async with Opened(world, store) as opened:
            store.rules = [FaultRule(Fault.UNAVAILABLE, "get", chance=1.0)]
            with pytest.raises(Unavailable):
                await opened.restore.load()
            operator = OPERATORS[0]
            waits = asyncio.ensure_future(opened.restore.wait(operator))
            await asyncio.sleep(0.1)
            await opened.restore.close()
            with pytest.raises(DstlError):
                async with asyncio.timeout(100):
                    await waits
            with pytest.raises(DstlError):
                async with asyncio.timeout(100):
                    await opened.restore.wait(operator)
