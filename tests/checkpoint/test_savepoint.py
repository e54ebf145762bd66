"""Savepoints offline: made whole or not at all, read back whole, deleted by their owner alone."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from dstl.checkpoint.manifest.format import manifest_name
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.savepoint import creation
from dstl.checkpoint.savepoint.creation import SavepointFileWriter, create_savepoint, save_checkpoint, save_newest
from dstl.checkpoint.savepoint.deletion import delete_savepoint, list_savepoints
from dstl.checkpoint.savepoint.format import Savepoint, SavepointObjects, descriptor_name, marker_name
from dstl.checkpoint.savepoint.restore import savepoint_as_checkpoint
from dstl.checkpoint.upkeep.verification import verify_savepoint
from dstl.errors import AccessDenied, CorruptData, Invalid, MissingState, ObjectExists, OutcomeUnknown, Unavailable
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.local import LocalStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.manifest_samples import checkpoint as a_checkpoint
from worlds.savepoints import a_job, a_runtime, contents, replace
from worlds.service import STATE, Model, retained, state_of, without_empty
from worlds.wrapped_store import WrappedStore


def as_checkpoint(savepoint: Savepoint, **more: object) -> CompletedCheckpoint:
    """The first checkpoint of another query that begins with a savepoint."""
    fields = {"checkpoint_id": 1, "batch_id": -1, "query_id": "other", "run_id": "run"}
    return savepoint_as_checkpoint(savepoint, **fields | more)


async def state_in(savepoint: Savepoint, store: ObjectStore) -> Model:
    """What a savepoint alone restores to."""
    return await state_of(as_checkpoint(savepoint), store)


async def test_a_savepoint_is_self_contained_and_equal_to_its_checkpoint(seed: int) -> None:
    job, elsewhere = MemoryStore(), MemoryStore()
    states = await a_job(job, seed)
    progress: list[tuple[int, int]] = []
    made = await create_savepoint(job, elsewhere, a_runtime(), "mine", on_progress=lambda *each: progress.append(each))
    assert without_empty(await state_in(made, elsewhere)) == without_empty(states[-1])
    assert (made.batch_id, made.query_id, made.max_parallelism) == (3, "query-1", 128)
    assert made.entries == sum(map(len, states[-1].values()))
    assert progress[-1] == (128, 128)
    assert await SavepointObjects(elsewhere, a_runtime()).descriptor("mine") == made
    found = await contents(elsewhere)
    assert set(found) == {descriptor_name("mine"), *made.objects()}
    assert made.bytes == sum(len(found[name]) for name in made.objects())


async def test_any_retained_checkpoint_can_be_saved_and_no_other(seed: int) -> None:
    store = MemoryStore()
    states = await a_job(store, seed, 5)
    kept = await retained(store)
    assert len(kept) == 5, "Spark's files hold the cleanup boundary back"
    for checkpoint in kept:
        made = await create_savepoint(
            store, store, a_runtime(), f"of-{checkpoint.batch_id}", checkpoint_id=checkpoint.checkpoint_id
        )
        assert without_empty(await state_in(made, store)) == without_empty(states[checkpoint.batch_id])
    with pytest.raises(MissingState, match=f"checkpoint 99.*retains: {kept[0].checkpoint_id}, "):
        await create_savepoint(store, store, a_runtime(), "none", checkpoint_id=99)
    with pytest.raises(MissingState, match="retains: none"):
        await create_savepoint(MemoryStore(), store, a_runtime(), "none")


async def test_watermarks_of_query_and_operators_are_carried_over(seed: int) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    checkpoint = (await retained(store))[-1]
    operators = tuple(
        each.model_copy(update={"watermark_ms": at}) for at, each in enumerate(checkpoint.operators, start=900)
    )
    marked = checkpoint.model_copy(
        update={"watermark_ms": 900, "late_watermark_ms": 800, "sequence_base": 70, "operators": operators}
    )
    made = await save_checkpoint(store, store, a_runtime(), "mine", marked)
    restored = as_checkpoint(made)
    assert (restored.watermark_ms, restored.late_watermark_ms, restored.operators) == (900, 800, operators)
    assert restored.sequence_base == 70 + checkpoint.checkpoint_id


async def test_what_a_query_has_deleted_is_not_in_its_savepoints(seed: int) -> None:
    store = MemoryStore()
    states = await a_job(store, seed)
    checkpoint = (await retained(store))[-1]
    counts, sums = sorted(checkpoint.operators, key=lambda entry: entry.uid)
    without = counts.model_copy(update={"registry": {"states": [], "removed": [STATE]}})
    made = await save_checkpoint(
        store, store, a_runtime(), "mine", checkpoint.model_copy(update={"operators": (without, sums)})
    )
    assert states[-1]["counts"]
    assert without_empty(await state_in(made, store)) == without_empty({"sums": states[-1]["sums"]})
    # Its number is still taken: a state that is added later gets another.
    assert made.operators[0].registry["removed"] == [STATE]


async def test_equal_state_is_equal_bytes_however_it_was_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    checkpoint = (await retained(store))[-1]
    whole = await save_checkpoint(store, store, a_runtime(1), "whole", checkpoint)
    monkeypatch.setattr(creation, "key_group_chunks", partial(creation.key_group_chunks, chunk_bytes=500))
    cut = await save_checkpoint(store, store, a_runtime(2), "cut", checkpoint, file_bytes=2000)
    assert len(cut.files) > len(whole.files) == 2

    async def by_operator(made: Savepoint) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for file in made.files:
            found[file.operator] = found.get(file.operator, b"") + await store.get(made.object_name(file))
        return found

    assert await by_operator(whole) == await by_operator(cut)


async def test_a_name_that_is_taken_is_refused_and_nothing_is_left(seed: int) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    await create_savepoint(store, store, a_runtime(1), "taken")
    before = await contents(store)
    with pytest.raises(ObjectExists, match="'taken'"):
        await create_savepoint(store, store, a_runtime(2), "taken")
    assert await contents(store) == before


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", ".", "a.", "%2e", "x" * 200, "é"])
async def test_a_name_that_cannot_be_is_refused_before_anything_is_read(name: str) -> None:
    with pytest.raises(Invalid, match="not a savepoint name"):
        await delete_savepoint(MemoryStore(), a_runtime(), name, commit=True)


async def test_two_writers_of_one_name_make_one_savepoint(seed: int) -> None:
    store = MemoryStore()
    states = await a_job(store, seed)
    results = await asyncio.gather(
        *(create_savepoint(store, store, a_runtime(n), "both") for n in range(3)), return_exceptions=True
    )
    (made,) = [result for result in results if isinstance(result, Savepoint)]
    assert all(isinstance(result, ObjectExists) for result in results if result is not made)
    assert set(await contents(store, "savepoints/")) == {descriptor_name("both"), *made.objects()}
    assert without_empty(await state_in(made, store)) == without_empty(states[-1])


@pytest.mark.parametrize(
    "fault", [Fault.UNAVAILABLE, Fault.SLOW_DOWN, Fault.RESET, Fault.LOST_RESPONSE, Fault.LATE_PUT]
)
async def test_faults_in_passing_are_ridden_out(fault: Fault, seed: int) -> None:
    job, inner = MemoryStore(), MemoryStore()
    states = await a_job(job, seed)
    rules = [FaultRule(fault, "put", nth=(1, 2, 4), delay_s=0.01), FaultRule(Fault.UNAVAILABLE, "list", nth=(1, 2))]
    faulty = FaultyStore(inner, rules, seed=seed)
    made = await create_savepoint(job, faulty, a_runtime(), "mine")
    assert len(faulty.fired) == 5
    await faulty.drain()
    assert without_empty(await state_in(made, inner)) == without_empty(states[-1])
    assert (await verify_savepoint(inner, a_runtime(), "mine")).problems == ()


async def test_a_store_that_refuses_leaves_no_half_savepoint(seed: int) -> None:
    job, inner = MemoryStore(), MemoryStore()
    await a_job(job, seed)
    faulty = FaultyStore(inner, [FaultRule(Fault.UNAVAILABLE, "put", chance=1.0, only="savepoint.dstl")])
    with pytest.raises(Unavailable, match="try again"):
        await create_savepoint(job, faulty, a_runtime(), "mine")
    assert await contents(inner) == {}


async def test_a_descriptor_whose_fate_is_unknown_keeps_its_files(seed: int) -> None:
    # It may land later: deleting what it names would leave a savepoint that cannot be restored.
    job, inner = MemoryStore(), MemoryStore()
    states = await a_job(job, seed)
    rule = FaultRule(Fault.RESET, "put", chance=1.0, only="savepoint.dstl")
    late = FaultRule(Fault.LATE_PUT, "put", nth=(8,), only="savepoint.dstl", delay_s=0.05)
    faulty = FaultyStore(inner, [late, rule])
    with pytest.raises(OutcomeUnknown, match="look with list"):
        await create_savepoint(job, faulty, a_runtime(), "mine")
    await faulty.drain()
    made = await SavepointObjects(inner, a_runtime()).descriptor("mine")
    assert without_empty(await state_in(made, inner)) == without_empty(states[-1])


async def test_files_of_a_descriptor_that_is_stored_and_cannot_be_read_back_are_kept(seed: int) -> None:
    """Its answer was lost, the repeated put finds the name taken, and the reads fail: nobody knows whose it is."""
    job, inner = MemoryStore(), MemoryStore()
    states = await a_job(job, seed)
    lost = FaultRule(Fault.LOST_RESPONSE, "put", nth=(1,), only="savepoint.dstl")
    away = FaultRule(Fault.UNAVAILABLE, "get", chance=1.0, only="savepoint.dstl")
    with pytest.raises(OutcomeUnknown, match=r"unavailable \(injected\); look with list"):
        await create_savepoint(job, FaultyStore(inner, [lost, away]), a_runtime(), "mine")
    made = await SavepointObjects(inner, a_runtime()).descriptor("mine")
    assert set(made.objects()) <= set(await contents(inner))
    assert without_empty(await state_in(made, inner)) == without_empty(states[-1])


async def test_a_refusal_that_no_repetition_cures_leaves_no_files(seed: int) -> None:
    denied = FaultRule(Fault.DENIED, "put", chance=1.0, only=descriptor_name("mine"))
    job, target = MemoryStore(), FaultyStore(MemoryStore(), [denied])
    await a_job(job, seed)
    with pytest.raises(AccessDenied):
        await create_savepoint(job, target, a_runtime(), "mine")
    assert await contents(target) == {}


async def test_of_files_that_are_refused_together_asyncio_reports_none_as_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FaultyStore(MemoryStore(), [FaultRule(Fault.DENIED, "put", chance=1.0)])
    writer = SavepointFileWriter(SavepointObjects(store, a_runtime()), "savepoints/mine/0", 1)
    for key_group in range(3):
        await writer.add("sums", key_group, b"entries", 1)
    with pytest.raises(AccessDenied):
        await writer.finish(["sums"])
    await writer.withdraw()
    gc.collect()
    assert caplog.messages == []


async def test_what_a_crash_leaves_is_invisible_and_is_deleted_once_it_is_old(seed: int) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    made = await create_savepoint(store, store, a_runtime(), "whole")
    (file, *_) = made.files
    await store.put(f"savepoints/half/{'0' * 32}/000000.base", await store.get(made.object_name(file)))
    assert {each.name: each.state for each in await list_savepoints(store, a_runtime())} == {
        "half": "incomplete",
        "whole": "complete",
    }
    with pytest.raises(MissingState, match="no savepoint 'half'"):
        await SavepointObjects(store, a_runtime()).descriptor("half")
    for commit in (False, True):
        with pytest.raises(Invalid, match="may be being made"):
            await delete_savepoint(store, a_runtime(), "half", commit=commit)
    assert list(await contents(store, "savepoints/half/")) == [f"savepoints/half/{'0' * 32}/000000.base"]
    done = await delete_savepoint(store, a_runtime(), "half", commit=True, grace_s=0.0)
    assert done.state == "incomplete"
    assert await contents(store, "savepoints/half/") == {}
    assert (await verify_savepoint(store, a_runtime(), "whole")).problems == ()


async def test_files_that_are_not_a_savepoints_are_never_deleted(seed: int, tmp_path: Path) -> None:
    """Flink calls its directories so too, and photographers: an old file without a descriptor is not a leftover."""
    store = LocalStore(str(tmp_path))
    photos = [f"savepoints/photos/{n}.jpg" for n in range(5)]
    flinks = ["savepoints/savepoint-a1b2/_metadata", f"savepoints/savepoint-a1b2/{'0' * 32}"]
    for name in (*photos, *flinks):
        await store.put(name, b"precious")
    before = await contents(store)
    for name, held in (("photos", photos), ("savepoint-a1b2", flinks)):
        for commit in (False, True):
            with pytest.raises(Invalid, match=rf"not a savepoint's: .*{held[0]}.*nothing is deleted"):
                await delete_savepoint(store, a_runtime(), name, commit=commit, grace_s=0.0)
    assert {each.name: each.state for each in await list_savepoints(store, a_runtime())} == {
        "photos": "foreign",
        "savepoint-a1b2": "foreign",
    }
    assert await contents(store) == before
    # Nor does a savepoint's own deletion take a file that somebody has put beside it.
    await a_job(store, seed)
    await create_savepoint(store, store, a_runtime(), "mine")
    await store.put("savepoints/mine/notes.txt", b"precious")
    before = await contents(store)
    with pytest.raises(Invalid, match=r"savepoints/mine/notes\.txt"):
        await delete_savepoint(store, a_runtime(), "mine", commit=True)
    assert [each.state for each in await list_savepoints(store, a_runtime()) if each.name == "mine"] == ["complete"]
    assert await contents(store) == before


async def test_a_deletion_is_dry_unless_it_is_committed_and_can_be_finished(seed: int, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    await a_job(store, seed)
    made = await create_savepoint(store, store, a_runtime(), "mine")
    job = {name for name in await contents(store) if not name.startswith("savepoints/")}
    before = await contents(store)
    dry = await delete_savepoint(store, a_runtime(), "mine", commit=False)
    assert not dry.committed
    assert set(dry.objects) == {descriptor_name("mine"), *made.objects()}
    assert await contents(store) == before
    # A deletion that dies after its first request has hidden the savepoint, and is finished by the next.
    faulty = FaultyStore(store, [FaultRule(Fault.UNAVAILABLE, "delete", chance=1.0, only=".base")])
    with pytest.raises(Unavailable):
        await delete_savepoint(faulty, a_runtime(), "mine", commit=True)
    assert [each.state for each in await list_savepoints(store, a_runtime())] == ["deleting"]
    with pytest.raises(ObjectExists, match="is being deleted"):
        await create_savepoint(store, store, a_runtime(), "mine")
    done = await delete_savepoint(store, a_runtime(), "mine", commit=True)
    assert done.committed
    assert set(await contents(store)) == job
    with pytest.raises(MissingState):
        await delete_savepoint(store, a_runtime(), "mine", commit=True)
    assert await create_savepoint(store, store, a_runtime(), "mine")


@pytest.mark.parametrize("object_name", [descriptor_name, marker_name])
async def test_a_savepoint_whose_descriptor_or_marker_is_damaged_is_listed_so_and_can_be_deleted(
    seed: int, object_name: Callable[[str], str]
) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    before = await contents(store)
    await create_savepoint(store, store, a_runtime(), "mine")
    await replace(store, object_name("mine"), b"rubbish")
    (listed,) = await list_savepoints(store, a_runtime())
    assert listed.state == "damaged"
    assert object_name("mine") in listed.detail
    assert (await delete_savepoint(store, a_runtime(), "mine", commit=True)).state == "damaged"
    assert await contents(store) == before


async def test_each_damaged_or_missing_object_is_reported_with_its_name_and_the_next_step(seed: int) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    checkpoint = (await retained(store))[-1]
    made = await save_checkpoint(store, store, a_runtime(), "mine", checkpoint, file_bytes=3000)
    rng = random.Random(seed)
    for file in made.files:
        name = made.object_name(file)
        data = await store.get(name)
        at = rng.randrange(len(data))
        others = {
            "damaged": data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
            f"its handle says {len(data)}": data[: rng.randrange(1, len(data))],
        }
        swapped = next(other for other in made.files if other.name != file.name)
        others["is damaged"] = await store.get(made.object_name(swapped))
        for what, bad in others.items():
            await replace(store, name, bad)
            (problem,) = (await verify_savepoint(store, a_runtime(), "mine")).problems
            assert what in problem
            assert name in problem
            assert "'mine'" in problem
            assert "use another savepoint" in problem
        await store.delete([name])
        (problem,) = (await verify_savepoint(store, a_runtime(), "mine")).problems
        assert f"{name} is not there" in problem
        await store.put(name, data)
    assert (await verify_savepoint(store, a_runtime(), "mine")).problems == ()


class GoingOn(WrappedStore):
    """A job's location, read while the job goes on: something happens before one of the reads."""

    def __init__(self, inner: ObjectStore, at_read: int, happens: Callable[[], Awaitable[None]]) -> None:
        super().__init__(inner)
        self._left = at_read
        self._happens = happens

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        self._left -= 1
        if self._left == 0:
            await self._happens()
        return await self.inner.get(name, byte_range)


@pytest.mark.parametrize("named", [False, True])
async def test_a_checkpoint_that_is_subsumed_meanwhile_is_taken_anew_unless_it_was_named(
    seed: int, named: bool
) -> None:
    store = MemoryStore()
    states = await a_job(store, seed, 5)
    before = await retained(store)
    base = await create_savepoint(store, store, a_runtime(), "base")

    async def materialize_and_subsume() -> None:
        log = ManifestLog(store, a_runtime(9))
        await log.fence("query-1")
        newer = as_checkpoint(base, checkpoint_id=log.next_sequence, batch_id=5, query_id="query-1", run_id="run-2")
        await log.commit(newer, [], oldest=newer.checkpoint_id)
        await store.delete([manifest_name(n) for n in range(1, log.epoch)])

    # The scan reads every record; the next read is the first of a segment.
    source = GoingOn(store, len(await contents(store, "manifests/")) + 1, materialize_and_subsume)
    wanted = before[-1].checkpoint_id if named else None
    if named:
        with pytest.raises(MissingState, match=r"was subsumed by its job while it was copied.*StateBackend.savepoint"):
            await create_savepoint(source, store, a_runtime(), "s", checkpoint_id=wanted)  # type: ignore[arg-type]
        assert await contents(store, "savepoints/s/") == {}
    else:
        made = await create_savepoint(source, store, a_runtime(), "s", checkpoint_id=wanted)  # type: ignore[arg-type]
        assert made.batch_id == 5
        assert without_empty(await state_in(made, store)) == without_empty(states[-1])


async def test_a_savepoint_of_a_damaged_checkpoint_is_refused_and_leaves_nothing(seed: int) -> None:
    store = MemoryStore()
    await a_job(store, seed)
    newest = (await retained(store))[-1]
    name = newest.segments[0].segment[0]
    await store.delete([name])
    with pytest.raises(MissingState, match=f"checkpoint {newest.checkpoint_id}.*cannot be restored"):
        await create_savepoint(store, store, a_runtime(), "mine")
    assert await contents(store, "savepoints/") == {}
    manifest = manifest_name(newest.checkpoint_id)
    await replace(store, manifest, (await store.get(manifest))[:-1])
    with pytest.raises(CorruptData, match=manifest):
        await create_savepoint(store, store, a_runtime(), "mine")


async def test_a_subsumed_checkpoint_whose_base_is_gone_is_not_called_damaged() -> None:
    """Found by seed 500031: the savepoint failed instead of taking the newer checkpoint."""
    taken = iter([a_checkpoint(1, 0), a_checkpoint(2, 1)])
    saved = object()

    @contextlib.asynccontextmanager
    async def take() -> AsyncIterator[CompletedCheckpoint]:
        yield next(taken)

    async def save(of: CompletedCheckpoint) -> Savepoint:
        if of.checkpoint_id == 1:
            raise CorruptData("every base of key group 6 is damaged or missing")
        return saved  # type: ignore[return-value]

    async def subsumed(of: CompletedCheckpoint) -> bool:
        return False

    async def retained(of: CompletedCheckpoint) -> bool:
        return True

    assert await save_newest(take, save, subsumed) is saved
    taken = iter([a_checkpoint(1, 0)])
    with pytest.raises(CorruptData):
        await save_newest(take, save, retained)
