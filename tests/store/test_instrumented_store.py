import asyncio
from collections.abc import AsyncIterator

import pytest

from dstl.errors import ObjectExists, Unavailable
from dstl.store import InstrumentedStore, MemoryStore, ObjectStore
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.manual_clock import ManualClock
from worlds.memory_recorder import MemoryRecorder
from worlds.store_contract import StoreContract


class TestInstrumentedStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = InstrumentedStore(MemoryStore())
        yield store
        await store.close()


async def test_the_difference_of_two_totals_is_what_happened_in_between() -> None:
    store = InstrumentedStore(MemoryStore())
    await store.put("before", b"x" * 100)
    before = store.totals
    await store.put("a", b"12345")
    with pytest.raises(ObjectExists):
        await store.put("a", b"12345", if_absent=True)
    await store.get("a")
    await store.head("a")
    async for _ in store.list():
        break
    await store.delete(["a", "b"])
    done = store.totals - before
    assert (done.put.calls, done.put.errors, done.put.bytes) == (2, 1, 5)
    assert (done.get.calls, done.get.bytes) == (1, 5)
    assert (done.head.calls, done.list.calls, done.list.errors, done.delete.bytes) == (1, 1, 0, 2)
    assert done.calls == 6
    assert before.put.bytes == 100


async def test_seconds_and_failures_are_recorded() -> None:
    clock, recorder = ManualClock(), MemoryRecorder()
    rules = [FaultRule(Fault.UNAVAILABLE, "put", nth=(2,))]
    slow = FaultyStore(MemoryStore(), rules, clock=clock, latency=lambda *_: 0.25)
    store = InstrumentedStore(slow, recorder=recorder, clock=clock)
    first = asyncio.create_task(store.put("a", b"123"))
    await clock.advance(1)
    await first
    second = asyncio.create_task(store.put("b", b"123"))
    await clock.advance(1)
    with pytest.raises(Unavailable):
        await second
    assert store.totals.put.seconds == pytest.approx(0.5)
    assert recorder.counters == {"storeRequests.put": 2, "storeRequestFailures.put": 1}
    assert list(recorder.samples["storeRequestNanos.put"]) == pytest.approx([0.25e9, 0.25e9])
    assert list(recorder.samples["storeRequestBytes.put"]) == [3]
