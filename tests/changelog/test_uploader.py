"""The uploader: three outcomes, one winner, nothing of a loser left, in virtual time over scripted stores."""

import asyncio
import random
from collections.abc import Callable, Sequence

import google_crc32c
import pytest

from dstl.changelog.upload.hedged_put import StoredObject
from dstl.changelog.upload.uploader import Uploader
from dstl.errors import AccessDenied, Closed, DstlError, Invalid, OutcomeUnknown, SlowDown, Unavailable
from dstl.options import HedgingOptions, UploadOptions
from dstl.store.base import ObjectInfo
from dstl.store.memory import MemoryStore
from tests.simulation.virtual_time import LoopClock, VirtualTimeLoop, run_in_virtual_time, seeded_runtime, virtual
from worlds.memory_recorder import MemoryRecorder

BODY = b"change sets"


class ScriptedStore(MemoryStore):
    """PUT number i takes ``script[i]`` seconds, or raises it after 10 ms; the last entry repeats."""

    def __init__(self, script: Sequence[float | DstlError]) -> None:
        super().__init__(clock=LoopClock())
        self.script = script
        self.asked: list[tuple[float, str]] = []
        self.deleted: list[str] = []

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        step = self.script[min(len(self.asked), len(self.script) - 1)]
        self.asked.append((asyncio.get_running_loop().time(), name))
        if isinstance(step, DstlError):
            await asyncio.sleep(0.01)
            raise step
        try:
            await asyncio.sleep(step)
        except asyncio.CancelledError:  # the body had left: the object is created all the same
            asyncio.get_running_loop().call_later(1.0, self._create, name, bytes(data))
            raise
        return await super().put(name, data, if_absent=if_absent)

    async def delete(self, names: Sequence[str]) -> None:
        self.deleted += names
        await super().delete(names)

    def _create(self, name: str, data: bytes) -> None:
        asyncio.get_running_loop().create_task(super().put(name, data))

    async def names(self) -> list[str]:
        return [info.name async for info in self.list()]


def name_of(attempt: int) -> str:
    return f"{attempt:02x}/object-{attempt}"


def uploader(store: ScriptedStore, recorder: MemoryRecorder | None = None, **changes: object) -> Uploader:
    hedging = {key: changes.pop(key) for key in list(changes) if key in HedgingOptions.model_fields}
    return Uploader(
        store,
        runtime=seeded_runtime(1),
        options=UploadOptions(**changes),
        hedging=HedgingOptions(**hedging),
        recorder=recorder or MemoryRecorder(),
    )


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_plain_upload_on_an_ordinary_loop():
    store = ScriptedStore([0.0])
    up = uploader(store)
    stored = await up.submit(name_of, BODY)
    assert stored == StoredObject("00/object-0", len(BODY), google_crc32c.value(BODY))
    assert await store.get(stored.name) == BODY
    await up.close()


@virtual
async def test_cold_hedge_wins_and_the_loser_leaves_nothing_flink_26485():
    store, recorder = ScriptedStore([30.0, 0.1]), MemoryRecorder()
    up = uploader(store, recorder)
    upload = up.submit(name_of, BODY)
    assert ((await upload).name, upload.sent, upload.hedges) == ("01/object-1", 2, 1)
    assert now() == pytest.approx(1.1)  # the delay while nothing is known, and the hedge
    await asyncio.sleep(5)
    assert await store.names() == ["00/object-0", "01/object-1"]  # the late loser
    await asyncio.sleep(60)
    assert await store.names() == ["01/object-1"]
    assert store.deleted == ["00/object-0"]
    assert recorder.counters["hedgesSent"] == recorder.counters["hedgesWon"] == 1
    assert recorder.counters["losersDeleted"] == 1
    await up.close()


@virtual
async def test_primary_wins_against_its_hedge():
    store = ScriptedStore([1.2, 30.0])
    up = uploader(store)
    upload = up.submit(name_of, BODY)
    assert ((await upload).name, upload.sent, upload.hedges) == ("00/object-0", 2, 1)
    await up.close()
    await asyncio.sleep(60)
    assert "00/object-0" in await store.names()
    assert store.deleted == ["01/object-1"]


@virtual
async def test_failure_comes_only_when_the_last_active_attempt_has_ended_flink_26396():
    class FirstFails(ScriptedStore):
        async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
            if name == "00/object-0":
                await asyncio.sleep(1.5)
                raise Unavailable("reset")
            return await super().put(name, data, if_absent=if_absent)

    store = FirstFails([3.0])
    up = uploader(store, max_attempts=1)
    stored = await up.submit(name_of, BODY)
    assert (stored.name, now()) == ("01/object-1", pytest.approx(4.0))
    await up.close()


@virtual
async def test_timeout_of_the_last_attempt_fails_the_upload_flink_26396():
    store = ScriptedStore([1e6])
    up = uploader(store, max_attempts=2, attempt_timeout_s=3.0, enabled=False)
    with pytest.raises(Unavailable, match="2 attempts failed"):
        await up.submit(name_of, BODY)
    assert 6.0 <= now() < 7.0
    await up.close()
    assert store.deleted == ["00/object-0", "01/object-1"]


@virtual
@pytest.mark.parametrize("fault", [Unavailable("reset"), OutcomeUnknown("no answer"), SlowDown("503")])
async def test_fault_is_retried_under_a_new_name(fault):
    store, recorder = ScriptedStore([fault, fault, 0.02]), MemoryRecorder()
    up = uploader(store, recorder)
    upload = up.submit(name_of, BODY)
    assert ((await upload).name, upload.sent, upload.hedges) == ("02/object-2", 3, 0)
    assert recorder.samples["attemptsPerUpload"][0] == recorder.samples["totalAttemptsPerUpload"][0] == 3
    assert recorder.counters["slowDowns"] == (2 if isinstance(fault, SlowDown) else 0)
    await up.close()
    left = [] if isinstance(fault, SlowDown) else ["00/object-0", "01/object-1"]
    assert store.deleted == left


@virtual
async def test_attempts_exhausted_is_unavailable_and_counted():
    store, recorder = ScriptedStore([Unavailable("reset")]), MemoryRecorder()
    up = uploader(store, recorder, max_attempts=4)
    with pytest.raises(Unavailable, match="reset") as caught:
        await up.submit(name_of, BODY)
    assert isinstance(caught.value.__cause__, Unavailable)
    assert len(store.asked) == 4
    assert recorder.counters["numberOfUploadRequests"] == recorder.counters["numberOfUploadFailures"] == 1
    await up.close()


@virtual
async def test_deadline_ends_it_whatever_is_active():
    store = ScriptedStore([1e6])
    up = uploader(store, deadline_s=25.0, max_attempts=100)
    with pytest.raises(Unavailable, match="within 25 s"):
        await up.submit(name_of, BODY)
    assert now() == pytest.approx(25.0)
    await up.close()
    assert sorted(store.deleted) == sorted(name for _, name in store.asked)


@virtual
@pytest.mark.parametrize("fault", [AccessDenied("no"), Invalid("no such bucket")])
async def test_what_cannot_get_better_fails_at_once(fault):
    store = ScriptedStore([fault])
    up = uploader(store)
    with pytest.raises(type(fault)):
        await up.submit(name_of, BODY)
    assert len(store.asked) == 1
    await up.close()


@virtual
async def test_slow_down_is_answered_by_back_off_and_never_by_a_hedge():
    class Slow503(ScriptedStore):
        async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
            if len(self.asked) >= 1:
                return await super().put(name, data, if_absent=if_absent)
            self.asked.append((now(), name))
            await asyncio.sleep(0.9)
            raise SlowDown("503")

    store, recorder = Slow503([0.0, 1.6, 0.1]), MemoryRecorder()
    up = uploader(store, recorder)
    throttled = up.submit(name_of, BODY)
    late = up.submit(lambda a: f"x{a}/late", BODY)  # would be hedged at 1 s
    await asyncio.gather(throttled, late)
    assert throttled.hedges == late.hedges == 0
    assert recorder.counters["hedgesSent"] == 0
    assert recorder.counters["hedgesDenied.throttled"] >= 1
    await up.close()


@virtual
async def test_success_needs_the_confirmed_length():
    class Truncating(ScriptedStore):
        async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
            whole = name.startswith("01")
            return await super().put(name, data if whole else data[:3], if_absent=if_absent)

    store = Truncating([0.01])
    up = uploader(store)
    stored = await up.submit(name_of, BODY)
    assert stored.name == "01/object-1"
    await up.close()
    assert await store.names() == ["01/object-1"]


@virtual
async def test_close_settles_everything():
    store = ScriptedStore([1e6])
    up = uploader(store)
    handles = [up.submit(lambda a, i=i: f"{i}-{a}/z", BODY, critical=i % 2 == 0) for i in range(10)]
    await asyncio.sleep(0.5)
    await up.close()
    for handle in handles:
        with pytest.raises(Closed):
            await handle
    with pytest.raises(Closed):
        up.submit(name_of, BODY)
    assert len(store.deleted) == 10
    await up.close()


@virtual
async def test_a_cancelled_await_of_an_upload_does_not_give_it_up_and_its_cancel_does():
    store = ScriptedStore([0.5])
    up = uploader(store)
    given_up = up.submit(name_of, BODY)
    handle = up.submit(lambda a: f"h{a}/z", BODY)
    other = asyncio.ensure_future(_await(handle))
    await asyncio.sleep(0.1)
    given_up.cancel()
    other.cancel()
    await asyncio.wait([other])
    assert (await handle).name == "h0/z"
    await up.close()
    assert store.deleted == ["00/object-0"]


async def _await(handle: object) -> object:
    return await handle


def test_make_critical_brings_the_hedge_forward():
    async def work() -> tuple[float, float]:
        store = ScriptedStore([0.1] * 400 + [50.0, 0.1, 50.0, 0.1])
        up = uploader(store, target=0.04)
        for i in range(400):
            await up.submit(lambda a, i=i: f"warm{i}-{a}/z", BODY)
        handle = up.submit(lambda a: f"left-{a}/z", BODY, critical=False)
        began = now()
        await asyncio.sleep(0.125)
        handle.make_critical()
        assert handle.critical
        await handle
        promoted = now() - began
        began = now()
        await up.submit(lambda a: f"crit-{a}/z", BODY)
        await up.close()
        return promoted, now() - began

    promoted, critical = run_in_virtual_time(work())
    assert promoted == pytest.approx(critical, rel=0.1)
    assert promoted < 0.3


@virtual
async def test_busy_loop_is_not_blamed_on_the_store():
    store, recorder = ScriptedStore([0.9]), MemoryRecorder()
    up = uploader(store, recorder)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    handle = up.submit(name_of, BODY)
    loop.call_later(0.5, loop.advance, 3.0)  # the loop is blocked past answer and timer
    await handle
    assert (handle.sent, handle.hedges) == (1, 0)
    assert recorder.counters["hedgesSent"] == 0
    await up.close()


@virtual
async def test_hedge_uses_the_other_pool():
    first, second = ScriptedStore([30.0]), ScriptedStore([30.0])
    up = Uploader(
        first,
        runtime=seeded_runtime(1),
        options=UploadOptions(),
        hedging=HedgingOptions(),
        hedge_store=second,
    )
    handle = up.submit(name_of, BODY)
    await asyncio.sleep(1.5)
    assert (len(first.asked), len(second.asked)) == (1, 1)
    await up.close()
    with pytest.raises(Closed):
        await handle


def test_known_checksum_is_taken_as_given():
    async def work() -> StoredObject:
        up = uploader(ScriptedStore([0.01]))
        stored = await up.submit(name_of, BODY, checksum=7)
        await up.close()
        return stored

    assert run_in_virtual_time(work()).checksum == 7


def test_any_mix_of_faults_settles_every_upload_and_leaves_only_winners(seed):
    rng = random.Random(seed)
    faults: list[Callable[[], float | DstlError]] = [
        lambda: rng.expovariate(5),
        lambda: rng.choice([0.05, 5.0, 40.0]),
        lambda: Unavailable("reset"),
        lambda: OutcomeUnknown("no answer"),
        lambda: SlowDown("503"),
    ]

    async def work() -> None:
        store = ScriptedStore([rng.choice(faults)() for _ in range(2000)])
        up = uploader(store, MemoryRecorder(), deadline_s=20.0)
        handles = []
        for i in range(200):
            handles.append(up.submit(lambda a, i=i: f"{i}-{a}/z", BODY, critical=rng.random() < 0.5))
            await asyncio.sleep(rng.expovariate(20))
            if rng.random() < 0.3:
                rng.choice(handles).make_critical()
        results = await asyncio.gather(*(_await(handle) for handle in handles), return_exceptions=True)
        winners = {result.name for result in results if isinstance(result, StoredObject)}
        assert all(isinstance(r, StoredObject | Unavailable) for r in results)
        assert len(winners) > 100
        assert not winners & set(store.deleted)
        await asyncio.sleep(100)
        assert set(await store.names()) == winners
        await up.close()

    run_in_virtual_time(work(), shuffle=random.Random(seed))
