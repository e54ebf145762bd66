"""The materialization manager: when it starts, what it leaves alone, and what it does when the store fails."""

import asyncio
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from dstl.state.codec.value_codec import write_time_ms
from dstl.store.memory import MemoryStore
from handles.key_group import range_of_partition
from handles.materialized_handle import generations_of
from materializer.expiry import is_written_by
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock
from worlds.materialization import EAGER, GROUPS, World
from worlds.restored import restore_tables
from worlds.waiting import until

NEVER = EAGER.model_copy(update={"interval_s": 1e6, "log_to_state_ratio": None, "replay_s": None})


TABLES = ["heap", pytest.param("rocksdb", marks=pytest.mark.skipif(not find_spec("rocksdict"), reason="rocksdict"))]


async def _bases(store: MemoryStore) -> set[str]:
    return {info.name async for info in store.list() if info.name.endswith(".base")}


def _counters(world: World) -> dict[str, float]:
    return world.members[0].recorder.counters


async def test_a_restored_log_is_materialized_without_any_batch_and_named_by_the_next(seed: int) -> None:
    async with World(seed, options=NEVER) as world:
        await world.batch_of(30)
        await world.batch_of(30)
        world.options = EAGER.model_copy(update={"interval_s": 0.05})
        await world.start(1)
        await until(lambda: _counters(world)["completedMaterialization"] >= 2, "two bases")
        assert not world.newest.materialized
        await asyncio.sleep(0.15)
        assert _counters(world)["startedMaterialization"] == 2, "an operator whose last one waits was started again"
        checkpoint = await world.batch_of(1)
        assert {handle.operator for handle in checkpoint.materialized} == {"left", "right"}
        assert world.members[0].recorder.gauges["lastDurationOfMaterialization"] > 0
        await world.check(checkpoint)


async def test_one_runs_at_a_time(seed: int) -> None:
    slow = FaultyStore(MemoryStore(clock=LoopClock()), latency=lambda verb, size, rng: 0.02 if verb == "put" else 0.0)
    world = World(seed, store=slow)
    world.memory = slow.inner
    async with world:
        most = 0.0
        for _ in range(6):
            await world.batch_of(30)
            for _ in range(5):
                counted = _counters(world)
                ended = counted["completedMaterialization"] + counted["failedMaterialization"]
                most = max(most, counted["startedMaterialization"] - ended)
                await asyncio.sleep(0.003)
        assert most == 1


async def test_a_batch_waits_for_no_upload(seed: int) -> None:
    slow = FaultyStore(MemoryStore(clock=LoopClock()), latency=lambda verb, size, rng: 0.0)
    world = World(seed, store=slow, inline_threshold=1 << 20)
    world.memory = slow.inner
    async with world:
        await world.batch_of(30)
        await world.batch_of(30)
        await world.materialized()
        slow._latency = lambda verb, size, rng: 3600.0 if verb == "put" else 0.0
        await world.batch_of(30)
        await world.batch_of(30)
        await until(lambda: world.members[0].manager.running is not None, "a materialization")
        running, started = world.members[0].manager.running, _counters(world)["startedMaterialization"]
        for _ in range(3):
            await world.batch_of(30)
        assert world.members[0].manager.running == running
        assert _counters(world)["startedMaterialization"] == started


@pytest.mark.parametrize("table", TABLES)
async def test_failures_delay_and_leave_nothing_behind(seed: int, tmp_path: Path, table: str) -> None:
    memory = MemoryStore(clock=LoopClock())
    store = FaultyStore(memory, rules=[FaultRule(Fault.UNAVAILABLE, "put", chance=0.7, only=".base")], seed=seed)
    options = EAGER.model_copy(update={"file_bytes": 1 << 16, "backoff_base_s": 0.002, "tolerated_failures": 1})
    world = World(seed, store=store, options=options, inline_threshold=1 << 20, table=table, directory=tmp_path)
    world.memory = memory
    async with world:
        await world.batch_of(200)
        for _ in range(200):
            await world.batch_of(1)
            await asyncio.sleep(0.005)
            if _counters(world)["failedMaterialization"] >= 2:
                break
        assert _counters(world)["failedMaterialization"] >= 2
        store.rules.clear()
        before = _counters(world)["completedMaterialization"]
        for _ in range(400):
            await world.batch_of(1)
            await asyncio.sleep(0.005)
            if _counters(world)["completedMaterialization"] >= before + 2:
                break
        await world.batch_of(1)
        await world.batch_of(1)
        await world.materialized()
        await world.check(world.newest)
        named = {n for checkpoint in world.completed for handle in checkpoint.materialized for n in handle.objects()}
        waiting = {
            name
            for bases in world.members[0].backend.bases.values()
            if bases.finished
            for name in bases.finished.report.objects()
        }

        async def are_deleted() -> bool:
            return await _bases(memory) <= named | waiting

        await until(are_deleted, "the end of failed materializations' files")


async def test_the_watchdog_barks_once_when_the_log_gets_old(seed: int, caplog) -> None:
    async with World(seed, options=NEVER.model_copy(update={"overdue_s": 0.03})) as world:
        await world.batch_of(30)
        await world.batch_of(3)
        await asyncio.sleep(0.05)
        with caplog.at_level(logging.WARNING):
            await world.batch_of(3)
            await world.batch_of(3)
        barks = sorted(record.getMessage().split(" is ")[0] for record in caplog.records)
        assert barks == ["the log of left", "the log of right"]
        assert world.members[0].recorder.gauges["oldestUnmaterializedSeconds"] > 0.03


async def test_segments_of_many_batches_become_one_base_before_a_restore_has_many_to_read(seed: int) -> None:
    """Compaction is a materialization: log and manifest stay short whatever the number of batches."""
    options = NEVER.model_copy(update={"max_segments": 4})
    world = World(seed, options=options, inline_threshold=0)
    read: list[str] = []
    get = world.memory.get

    async def counted(name: str, *rest) -> bytes:
        read.append(name)
        return await get(name, *rest)

    world.memory.get = counted
    async with world:
        for _ in range(30):
            # Each key is added and removed again, as a sliding window does.
            await world.batch_of(20)
            await world.materialized()
        started = _counters(world)["startedMaterialization"]
        assert started > 4
        # The log goes back to the older of two bases, and one more is on its way.
        assert len(world.newest.segments) <= 3 * (4 + 2)
        read.clear()
        await world.check(world.newest)
        assert len({name for name in read if name.endswith(".seg")}) <= 2 * (4 + 2)


async def test_a_restore_reads_the_parts_of_base_files_that_its_key_groups_are_and_no_other_byte(seed: int) -> None:
    """From two TaskManagers to four: each of the four has asked for its quarter of the base files, by ranges."""
    world = World(seed)
    read: dict[str, int] = {}
    get = world.memory.get

    async def counted(name: str, *rest) -> bytes:
        data = await get(name, *rest)
        read[name] = read.get(name, 0) + len(data)
        return data

    world.memory.get = counted
    async with world:
        await world.start(2)
        newest = await world.batch_of(100)
        for _ in range(100):
            if len({(handle.operator, handle.parts[0][0]) for handle in newest.materialized}) >= 4:
                break
            await world.materialized()
            newest = await world.batch_of(100)
        files = {handle.name: handle.size for handle in newest.materialized}
        for size in (4, 2, 1):
            for index in range(size):
                owned = range_of_partition(index, GROUPS, size)
                wanted: dict[str, int] = {}
                for groups in generations_of(newest.materialized).values():
                    for base in (bases[0] for group, bases in groups.items() if group in owned):
                        wanted[base.file.name] = wanted.get(base.file.name, 0) + base.length
                read.clear()
                restored = await restore_tables(newest, world.store, owned, world.open_table, world.runtime)
                for table in restored.tables.values():
                    table.close()
                assert {name: count for name, count in read.items() if name in files} == wanted
                assert 0 < sum(wanted.values()) <= sum(files.values())
                assert size == 1 or sum(wanted.values()) < sum(files.values())


async def test_base_files_take_their_bytes_from_the_budget_and_go_up_as_background(seed: int) -> None:
    async with World(seed) as world:
        member = world.members[0]
        seen: list[tuple[bool, int]] = []
        submit = member.uploader.submit

        def watched(name_of, data, *, critical=True, **more):
            if name_of(0).endswith(".base"):
                seen.append((critical, member.storage.budget.used - len(data)))
            return submit(name_of, data, critical=critical, **more)

        member.uploader.submit = watched
        await world.batch_of(30)
        await world.batch_of(3)
        await world.materialized()
        assert seen
        assert all(not critical and rest >= 0 for critical, rest in seen)


async def test_turned_off_nothing_is_materialized(seed: int) -> None:
    async with World(seed, options=EAGER.model_copy(update={"enabled": False})) as world:
        for _ in range(4):
            await world.batch_of(30)
        assert not world.newest.materialized
        assert not _counters(world)["startedMaterialization"]


def test_the_materializer_reads_write_times_as_the_state_layer_writes_them() -> None:
    from dstl.state.codec.value_codec import HAS_WRITE_TIME, WRITE_TIME

    value = bytes([HAS_WRITE_TIME | 1]) + WRITE_TIME.pack(1234) + b"x"
    assert write_time_ms(value) == 1234
    assert is_written_by(1234, value)
    assert not is_written_by(1233, value)
    assert not is_written_by(1 << 60, b"\x01" + WRITE_TIME.pack(1) + b"x")
    assert not is_written_by(1 << 60, b"")
