"""Random batches, materializations, failed and repeated checkpoints, crashes and rescaling: every retained checkpoint
restores to what a dictionary says, into any number of TaskManagers."""

import asyncio
import random
import threading

import pytest

from dstl.errors import CorruptData
from dstl.options import MaterializationOptions
from materializer.tables import HeapStateTable
from worlds.materialization import EAGER, GROUPS, World, held
from worlds.restored import fallbacks


def _options(rng: random.Random) -> MaterializationOptions:
    return EAGER.model_copy(
        update={
            "interval_s": rng.choice((1e-6, 0.003, 0.02)),
            "min_pause_s": rng.choice((0.0, 0.005)),
            "file_bytes": rng.choice((1 << 16, 200)),
            "min_live_share": rng.choice((0.0, 0.5, 0.9)),
            "share_files": rng.choice((True, True, False)),
        }
    )


async def _schedule(world: World, steps: int) -> None:
    rng = world.rng
    await world.start(rng.randrange(1, 4))
    for _ in range(steps):
        action = rng.choices(("batch", "loser", "abort", "replace", "wait", "crash", "rewind"), (10, 3, 2, 2, 6, 2, 1))[
            0
        ]
        if action == "batch":
            await world.batch_of(rng.choice((0, 3, 40)))
        elif action == "loser":
            world.run_attempts(world.random_changes(10))
            await world.batch_of(10)
        elif action == "abort":
            applied = world.random_changes(12)
            winners = world.run_attempts(applied)
            await world.checkpoint(winners, commit=False)
            checkpoint = await world.checkpoint(winners)
            world.take(checkpoint, applied)
            await world.subsume()
        elif action == "replace":
            # Spark runs the same batch again after its checkpoint: the first one is subsumed at once.
            first = await world.checkpoint(world.run_attempts(world.random_changes(8)))
            world.registry.register(first.checkpoint_id, held(first))
            applied = world.random_changes(8)
            second = await world.checkpoint(world.run_attempts(applied))
            world.take(second, applied)
            await world.delete(world.registry.unregister(first.checkpoint_id))
            await world.subsume()
        elif action == "wait":
            await world.materialized()
        elif action == "crash" and world.completed:
            await world.start(rng.randrange(1, 4))
        elif action == "rewind" and len(world.completed) > 1:
            # Spark has not committed the last batch: it runs again from the checkpoint before.
            gone = world.completed[-1]
            await world.start(rng.randrange(1, 4), world.completed[-2])
            await world.batch_of(10)
            await world.delete(world.registry.unregister(gone.checkpoint_id))
        for checkpoint in world.completed[-1:]:
            await world.check(checkpoint, rng.randrange(1, 4))
    for checkpoint in world.completed:
        for size in (1, 3):
            await world.check(checkpoint, size)


@pytest.mark.parametrize("run", range(4))
async def test_every_checkpoint_restores_to_the_model(seed: int, run: int) -> None:
    async with World(seed * 1000 + run, options=_options(random.Random(seed * 1000 + run))) as world:
        await _schedule(world, 30)
        materialized = [c for c in world.completed if c.materialized]
        assert world.completed
        assert materialized or run
        for checkpoint in world.completed:
            names = {h.name for h in checkpoint.materialized} | {s.segment[0] for s in checkpoint.segments}
            assert not names & world.deleted


@pytest.mark.parametrize("run", range(1))
async def test_every_checkpoint_restores_to_the_model_in_rocksdb(seed: int, run: int, tmp_path) -> None:
    options = _options(random.Random(seed)).model_copy(update={"share_files": True})
    async with World(seed * 1000 + run, options=options, table="rocksdb", directory=tmp_path) as world:
        await _schedule(world, 8)
        for checkpoint in world.completed:
            assert not {n for h in checkpoint.materialized for n in h.objects()} & world.deleted


@pytest.mark.parametrize("missing", ["damaged", "missing"])
async def test_a_damaged_current_base_falls_back_to_the_previous_one_and_more_log(seed: int, missing: str) -> None:
    async with World(seed) as world:
        await world.start(2)
        await world.batches(5, 40)
        newest = world.newest
        current: dict[tuple[str, int], tuple[int, str]] = {}
        for handle in newest.materialized:
            for group, _, _ in handle.parts:
                key = (handle.operator, group)
                current[key] = max(current.get(key, (-1, "")), (handle.checkpoint, handle.name))
        # One file: it may be the current base of one key group and the older one of another.
        damaged = [world.rng.choice(sorted({name for _, name in current.values()}))]
        data = bytearray(await world.memory.get(damaged[0]))
        await world.memory.delete(damaged)
        if missing == "damaged":
            part = next(p for h in newest.materialized if h.name == damaged[0] for p in h.parts if p[2])
            data[part[1] + world.rng.randrange(part[2])] ^= 1 << world.rng.randrange(8)
            await world.memory.put(damaged[0], bytes(data))
        await world.check(newest, 1)
        await world.check(newest, 3)
        reports = await world.start(1)
        assert set(fallbacks(reports[0])) <= set(damaged)
        # The next materialization replaces what was damaged, and then it is gone from the manifests.
        await world.batches(3, 5)
        if fallbacks(reports[0]):
            assert damaged[0] not in {h.name for h in world.newest.materialized}
        await world.check(world.newest, 2)


async def test_when_every_base_of_a_key_group_is_damaged_the_error_names_checkpoint_and_files(seed: int) -> None:
    async with World(seed) as world:
        await world.batches(5, 40)
        names = {handle.name for handle in world.newest.materialized}
        await world.memory.delete(sorted(names))
        with pytest.raises(CorruptData, match=f"checkpoint {world.newest.checkpoint_id} .*every base of key group"):
            await world.content_of(world.newest)


async def test_before_the_log_was_truncated_the_log_alone_is_enough(seed: int) -> None:
    async with World(seed) as world:
        await world.batch_of(40)
        await world.batch_of(40)
        await world.materialized()
        checkpoint = await world.batch_of(5)
        assert checkpoint.materialized
        assert not checkpoint.truncated
        await world.memory.delete(sorted({handle.name for handle in checkpoint.materialized}))
        await world.check(checkpoint)


async def test_a_log_of_several_task_managers_is_cut_only_when_all_have_bases(seed: int) -> None:
    """Prevents that one TaskManager's base lets go of another's log."""
    async with World(seed, partitions=1) as world:
        for _ in range(3):
            await world.batch_of(60)
        await world.start(2)
        slow = world.members[1].manager
        slow._closed = True  # this one never materializes
        await world.batches(4, 20)
        old = [log for log in world.newest.logs if log.first_key_group == 0 and log.last_key_group == GROUPS - 1]
        assert old
        assert all(log.from_sqn == 0 for log in old)
        await world.check(world.newest, 2)
        slow._closed = False
        await world.batches(4, 20)
        left = {log.log_id for log in world.newest.logs}
        assert not left & {log.log_id for log in old}
        await world.check(world.newest, 2)


async def test_a_table_is_not_closed_while_a_thread_still_loads_a_base_into_it(seed: int) -> None:
    """RocksDB would crash the process when a restore is cancelled."""
    world = World(seed)
    loading, go_on, order = threading.Event(), threading.Event(), []

    class Table:
        """None in memory, as far as a restore can tell: threads write to it."""

        def __init__(self) -> None:
            self._held = HeapStateTable()

        def __getattr__(self, name: str) -> object:
            return getattr(self._held, name)

        def restore(self, key_group: int, pages: object) -> None:
            loading.set()
            go_on.wait(5)
            order.append("loaded")

        def close(self) -> None:
            order.append("closed")

    async with world:
        await world.batches(4, 40)
        assert world.newest.materialized
        world.open_table = lambda _: Table()  # type: ignore[method-assign]
        running = asyncio.ensure_future(world.content_of(world.newest))
        await asyncio.get_running_loop().run_in_executor(None, loading.wait, 5)
        running.cancel()
        await asyncio.sleep(0.05)
        assert order == []
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert order[0] == "loaded"
        assert order[-1] == "closed"
        assert "loaded" not in order[order.index("closed") :]
