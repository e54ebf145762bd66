"""The testing tools themselves: a fault that does not happen would make every test that asks for it worthless."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dstl.errors import AccessDenied, DstlError, Invalid, ObjectNotFound, OutcomeUnknown, SlowDown, Unavailable
from dstl.store import ByteRange, MemoryStore, ObjectStore
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore, FiredFault
from tests.simulation.manual_clock import ManualClock
from worlds.store_contract import StoreContract


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[ObjectStore]:
        store = FaultyStore(MemoryStore())
        yield store
        await store.close()


@pytest.mark.parametrize(
    ("fault", "raised", "stored"),
    [
        (Fault.UNAVAILABLE, Unavailable, False),
        (Fault.SLOW_DOWN, SlowDown, False),
        (Fault.DENIED, AccessDenied, False),
        (Fault.RESET, OutcomeUnknown, False),
        (Fault.LOST_RESPONSE, OutcomeUnknown, True),
        (Fault.STORED_SLOW_DOWN, SlowDown, True),
        (Fault.LATE_PUT, OutcomeUnknown, False),
    ],
)
async def test_a_failed_put_is_stored_or_not_as_its_fault_says(
    fault: Fault, raised: type[DstlError], stored: bool
) -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [FaultRule(fault, "put", nth=(2,))], clock=ManualClock())
    await store.put("first", b"x")
    with pytest.raises(raised) as caught:
        await store.put("second", b"x")
    assert type(caught.value) is raised
    await store.put("third", b"x")
    names = [info.name async for info in inner.list()]
    assert names == ["first", *(["second"] if stored else []), "third"]
    assert store.fired == [FiredFault(fault, "put", 2, "second")]


async def test_a_late_put_arrives_after_its_caller_was_told_of_failure() -> None:
    clock, inner = ManualClock(), MemoryStore()
    store = FaultyStore(inner, [FaultRule(Fault.LATE_PUT, "put", nth=(1,), delay_s=60)], clock=clock)
    body = bytearray(b"as it was sent")
    with pytest.raises(OutcomeUnknown):
        await store.put("a", memoryview(body), if_absent=True)
    body[:] = bytes(len(body))
    await clock.advance(59)
    with pytest.raises(ObjectNotFound):
        await inner.get("a")
    assert store.late == 1
    await clock.advance(1)
    assert await inner.get("a") == b"as it was sent"
    assert store.late == 0


async def test_a_late_conditional_put_does_not_overwrite_what_took_its_name() -> None:
    clock, inner = ManualClock(), MemoryStore()
    store = FaultyStore(inner, [FaultRule(Fault.LATE_PUT, "put", nth=(1,), delay_s=5)], clock=clock)
    with pytest.raises(OutcomeUnknown):
        await store.put("a", b"late", if_absent=True)
    await store.put("a", b"abort marker", if_absent=True)
    await clock.advance(10)
    assert (store.late, await inner.get("a")) == (0, b"abort marker")


async def test_a_stuck_put_arrives_after_it_was_cancelled() -> None:
    clock, inner = ManualClock(), MemoryStore()
    store = FaultyStore(inner, [FaultRule(Fault.STUCK, "put", nth=(1,), delay_s=3)], clock=clock)
    putting = asyncio.create_task(store.put("a", b"x"))
    await clock.advance(1000)
    assert not putting.done()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert not [info async for info in inner.list()]
    await clock.advance(3)
    assert await inner.get("a") == b"x"


async def test_a_stale_list_shows_the_past() -> None:
    clock = ManualClock()
    store = FaultyStore(MemoryStore(), [FaultRule(Fault.STALE_LIST, "list", nth=(1,), delay_s=10)], clock=clock)
    for name in ("old/1", "old/2"):
        await store.put(name, b"x")
    await clock.advance(20)
    await store.put("old/3", b"x")
    await store.delete(["old/1"])
    assert [info.name async for info in store.list("old/")] == ["old/1", "old/2"]
    assert [info.name async for info in store.list("old/")] == ["old/2", "old/3"]


async def test_reads_come_back_short_or_with_one_bit_flipped() -> None:
    rules = [FaultRule(Fault.SHORT_GET, "get", nth=(1,)), FaultRule(Fault.CORRUPT_GET, "get", nth=(1,))]
    store = FaultyStore(MemoryStore(), rules, seed=7)
    data = bytes(range(200))
    await store.put("a", data)
    short = await store.get("a")
    assert len(short) < 200
    assert data.startswith(short)
    flipped = await store.get("a", ByteRange(100, 200))
    assert len(flipped) == 100
    assert sum((one ^ other).bit_count() for one, other in zip(flipped, data[100:], strict=True)) == 1
    assert await store.get("a") == data


@pytest.mark.parametrize("verb", ["get", "head", "list", "delete"])
async def test_faults_of_the_other_verbs(verb: str) -> None:
    kinds = [Fault.UNAVAILABLE, Fault.SLOW_DOWN, Fault.RESET]
    inner = MemoryStore()
    store = FaultyStore(inner, [FaultRule(kind, verb, nth=(1,)) for kind in kinds])
    await store.put("a", b"x")

    async def call() -> object:
        match verb:
            case "get":
                return await store.get("a")
            case "head":
                return await store.head("a")
            case "list":
                return [info async for info in store.list()]
            case _:
                return await store.delete(["a"])

    for kind in (Unavailable, SlowDown, Unavailable):
        with pytest.raises(Unavailable) as caught:
            await call()
        assert type(caught.value) is kind
    assert await inner.get("a") == b"x"
    await call()
    assert [one.fault for one in store.fired] == kinds


def test_a_rule_that_could_never_fire_is_refused() -> None:
    for fault, verb in ((Fault.CORRUPT_GET, "put"), (Fault.LATE_PUT, "get"), (Fault.UNAVAILABLE, "post")):
        with pytest.raises(Invalid):
            FaultRule(fault, verb)
