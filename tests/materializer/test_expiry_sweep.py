"""Expired entries leave live tables a share at a time: what goes, what stays, what a batch notices, what is read."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from handles.checkpoint import CompletedCheckpoint
from materializer.expiry import ExpirySweep, is_written_by
from materializer.tables import HeapStateTable, RocksDBStateTable, StateTable
from tests.simulation.virtual_time import LoopClock
from worlds.ddl import parse_ddl, schemas_of_tests
from worlds.demand import demand
from worlds.materialization import EAGER, GROUPS, Model, World
from worlds.memory_source import MemorySource
from worlds.table_changes import Change, changes, put

TTL = json.dumps({"states": [{"id": 0, "ttl_ms": 1000}, {"id": 1, "ttl_ms": 0}]}).encode()
KINDS = ["heap", "rocksdb"]


def timed(written_ms: int, rest: bytes = b"payload") -> bytes:
    return b"\x81" + struct.pack("<q", written_ms) + rest


def row(group: int, key: bytes, value: bytes, state: int = 0) -> Change:
    return group, state, 0, key, b"", value


@asynccontextmanager
async def world_of(seed: int, kind: str, directory: Path, **options: object) -> AsyncIterator[World]:
    async with World(
        seed, options=EAGER.model_copy(update=options), table=kind, directory=directory, partitions=1
    ) as world:
        yield world


async def write(world: World, *rows: Change, metadata: bytes = TTL) -> None:
    """A batch of operator ``left``, and the materialization that may follow it."""
    checkpoint = await world.checkpoint(world.run_attempts({"left": list(rows)}, metadata))
    assert checkpoint is not None
    world.take(checkpoint, {"left": list(rows)})
    await world.subsume()
    await world.materialized()


def slowly(world: World, share: int = 8) -> None:
    """Let each materialization look at its share of the key groups and at no more."""
    manager = world.members[0].manager
    manager._sweep = ExpirySweep(world.runtime.clock, world.members[0].recorder, share=share, pieces=1)


def bases(world: World, operator: str = "left") -> list[int]:
    assert world.newest is not None
    return [h.materialization_id for h in world.newest.materialized if h.operator == operator]


async def stored(world: World) -> Model:
    assert world.newest is not None
    return await world.content_of(world.newest)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_expired_leaves_all_bases_within_a_bounded_number_of_materializations(
    seed: int, tmp_path: Path, kind: str
) -> None:
    """Also in key groups that nothing is ever written to again, and whatever table the base is of."""
    async with world_of(seed, kind, tmp_path, min_live_share=0.0) as world:
        slowly(world)
        born = world.time_ms
        mortal = [row(g, b"mortal", timed(born)) for g in range(GROUPS)]
        immortal = [row(g, b"immortal", timed(born), 1) for g in range(GROUPS)]
        await write(world, *mortal, *immortal)
        for _ in range(4):
            await write(world, row(0, b"young", timed(born)))
        world.time_ms = born + 5000
        left = []
        last = max(bases(world)) + 8 + 1  # One was finished before the time had passed.
        while last not in bases(world):
            await write(world, row(0, b"young", timed(world.time_ms)))
            found = (await stored(world))["left"]
            left.append(sum(key == b"mortal" for _, _, key, _ in found))
            assert sum(key == b"immortal" for _, _, key, _ in found) == GROUPS
            assert (0, 0, b"young", b"") in found
        assert left[-1] == 0, left
        assert left[0] > 0, "all went at once: this test shows nothing of shares"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_deleted_state_held_leaves_bases_of_either_kind(seed: int, tmp_path: Path, kind: str) -> None:
    async with world_of(seed, kind, tmp_path) as world:
        rows = [row(g, b"k", b"value", state) for g in range(GROUPS) for state in (0, 1)]
        await write(world, *rows, metadata=json.dumps({"states": [{"id": 0}, {"id": 1}]}).encode())
        for n in range(4):
            await write(world, row(0, b"%d" % n, b""), metadata=json.dumps({"states": [], "removed": [1]}).encode())
        assert bases(world)
        found = (await stored(world))["left"]
        assert {state for _, state, _, _ in found} == {0}
        assert len(found) == GROUPS + 4
        assert world.members[0].recorder.counters["expiredEntriesDropped"] == GROUPS


async def test_the_bytes_of_what_has_expired_leave_the_store(seed: int, tmp_path: Path) -> None:
    """Prevents that files keep for ever what their table has deleted: RocksDB merges runs that are mostly deletions."""
    async with world_of(seed, "rocksdb", tmp_path) as world:
        secret = world.rng.randbytes(40)
        born = world.time_ms
        dead = [row(g, b"%d" % n, timed(born, world.rng.randbytes(60))) for g in range(GROUPS) for n in range(40)]
        await write(world, *dead, row(3, b"secret", timed(born, secret)))
        for _ in range(4):
            await write(world, row(1, b"x", timed(born)))
        assert await _holds(world, secret), "bytes cannot be found in objects: this test shows nothing"
        world.time_ms = born + 5000
        for n in range(16):
            await write(world, *[row(g, b"live%d" % n, timed(world.time_ms)) for g in range(GROUPS)])
        assert not await _holds(world, secret)


async def _holds(world: World, what: bytes) -> bool:
    what = what[8:-8]  # The compressor may take an end together with what lies beside it.
    names = [name for h in world.newest.materialized for name in h.objects()]
    return any([what in await world.memory.get(name) for name in names])


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_written_again_while_the_sweep_is_under_way_survives(
    seed: int, tmp_path: Path, kind: str
) -> None:
    async with world_of(seed, kind, tmp_path, interval_s=1e6, log_to_state_ratio=None, replay_s=None) as world:
        born = world.time_ms
        keys = [b"%04d" % n for n in range(3000)]
        await write(world, *[row(n % GROUPS, key, timed(born)) for n, key in enumerate(keys)])
        world.time_ms = born + 5000
        await write(world, row(0, b"z", timed(world.time_ms)))
        await write(world, row(0, b"z", timed(world.time_ms)))
        member = world.members[0]
        counters = member.recorder.counters
        demand(member.manager)
        for _ in range(100_000):
            if counters["expiredEntriesDropped"]:
                break
            await asyncio.sleep(0)
        assert counters["expiredEntriesDropped"] < len(keys), "one piece was all: this test shows nothing"
        again = keys[::7]
        rows = [row(n % GROUPS, key, timed(world.time_ms)) for n, key in enumerate(keys) if key in set(again)]
        checkpoint = await world.checkpoint(world.run_attempts({"left": rows}, TTL))
        world.take(checkpoint, {"left": rows})
        await write(world, row(0, b"z", timed(world.time_ms)))
        await world.materialized()
        assert counters["materializationsDropped"] == counters["failedMaterialization"] == 0
        await write(world, row(0, b"z", timed(world.time_ms)))
        found = {key for _, _, key, _ in (await stored(world))["left"]}
        assert found == {*again, b"z"}
        assert counters["expiredEntriesDropped"] <= len(keys)


@pytest.mark.parametrize("kind", KINDS)
async def test_dropping_makes_no_idle_operator_materialize(seed: int, tmp_path: Path, kind: str) -> None:
    async with world_of(seed, kind, tmp_path) as world:
        born = world.time_ms
        await write(world, *[row(g, b"k", timed(born)) for g in range(GROUPS)])
        world.time_ms = born + 5000
        await write(world, row(0, b"young", timed(world.time_ms)))
        await world.batches(3, 0)
        counters = world.members[0].recorder.counters
        assert counters["expiredEntriesDropped"] == GROUPS
        started = counters["startedMaterialization"]
        for _ in range(8):
            world.time_ms += 5000
            await world.batch_of(0)
            await world.materialized()
        assert counters["startedMaterialization"] == started


@pytest.mark.parametrize("kind", KINDS)
async def test_any_schedule_loses_nothing_that_lives_and_changes_nothing_that_is_seen(
    seed: int, tmp_path: Path, kind: str
) -> None:
    """Random batches, times, restarts from any retained checkpoint: a batch would see what a dictionary says."""
    async with world_of(seed, kind, tmp_path, share_files=seed % 4 > 0, interval_s=1e-6) as world:
        rng = world.rng
        times: dict[int, int] = {}
        dropped = 0.0

        def seen(content: dict[tuple[int, int, bytes, bytes], bytes], now: int) -> dict[Any, bytes]:
            return {
                at: value
                for at, value in content.items()
                if at[1] == 1 or struct.unpack_from("<q", value, 1)[0] + 1000 > now
            }

        async def check(checkpoint: CompletedCheckpoint) -> None:
            now = times[checkpoint.checkpoint_id]
            found = (await world.content_of(checkpoint))["left"]
            model = world.models[checkpoint.checkpoint_id]["left"]
            assert seen(found, now) == seen(model, now)
            assert set(found) <= set(model), "something came back that was deleted"

        for _ in range(20 if kind == "heap" else 12):
            slowly(world, rng.choice((1, 3, 8)))
            for _ in range(rng.randrange(1, 5)):
                world.time_ms += rng.choice((0, 100, 600, 2500))
                rows = [
                    (group, rng.randrange(2), rng.choice((0, 0, 0, 1)), b"%d" % group, b"", timed(world.time_ms))
                    for group in rng.sample(range(GROUPS), rng.randrange(8))
                ]
                checkpoint = await world.checkpoint(world.run_attempts({"left": rows}, TTL))
                assert checkpoint is not None
                world.take(checkpoint, {"left": rows})
                await world.subsume()
                times[checkpoint.checkpoint_id] = world.time_ms
                await asyncio.sleep(rng.choice((0, 0.001, 0.02)))
                if rng.random() < 0.3:
                    await world.materialized()
            for checkpoint in world.completed:
                await check(checkpoint)
            if rng.random() < 0.3:
                dropped += world.members[0].recorder.counters["expiredEntriesDropped"]
                await world.start(1, rng.choice(world.completed))
        assert dropped + world.members[0].recorder.counters["expiredEntriesDropped"] > 0, "this test shows nothing"


class _Endless(ExpirySweep):
    """Never gets through a table from which a base has left something out."""

    async def drop(self, *_: Any) -> None:
        await asyncio.sleep(3600)


async def test_a_sweep_that_takes_too_long_is_given_up_and_the_next_materialization_starts(seed: int) -> None:
    async with World(seed, options=EAGER.model_copy(update={"timeout_s": 0.3}), partitions=1) as world:
        member = world.members[0]
        member.manager._sweep = _Endless(world.runtime.clock, share=1 << 20, pieces=0)
        rows = [row(g, b"k", timed(world.time_ms)) for g in range(GROUPS)]
        world.time_ms += 5000
        checkpoint = await world.checkpoint(world.run_attempts({"left": rows}, TTL))
        world.take(checkpoint, {"left": rows})
        counters = member.recorder.counters
        for _ in range(100):
            await world.batch_of(1)
            await asyncio.sleep(0.02)
            if counters["completedMaterialization"] >= 4:
                break
        assert counters["completedMaterialization"] >= 4
        assert counters["failedMaterialization"] == 0


class _Clock(LoopClock):
    """Says that each look at it takes a millisecond, and what it was asked to wait."""

    def __init__(self, table: StateTable) -> None:
        self.table = table
        self.time = 0.0
        self.rests: list[float] = []
        self.sizes = [_entries(table)]

    def now(self) -> float:
        self.time += 0.001
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.sizes.append(_entries(self.table))


def _entries(table: StateTable) -> int:
    return sum(len(table.scan(0, group, limit=1 << 20)) for group in table.key_groups())


def _table(kind: str, directory: Path) -> StateTable:
    return RocksDBStateTable(directory / "t") if kind == "rocksdb" else HeapStateTable()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_piece_is_small_and_the_loop_is_left_to_others_for_most_of_the_time(kind: str, tmp_path: Path) -> None:
    table = _table(kind, tmp_path)
    table.apply(changes(*[put(g, 0, b"%d" % n, b"", timed(1)) for g in range(4) for n in range(2500)]))
    clock = _Clock(table)
    lost: list[int] = []
    await ExpirySweep(clock).run("op", table, {0: partial(is_written_by, 5)}, lost.append)
    assert _entries(table) == 0
    assert set(lost) == {0, 1, 2, 3}
    assert max(a - b for a, b in zip(clock.sizes, clock.sizes[1:], strict=False)) <= 1024
    assert all(rest == pytest.approx(0.009) for rest in clock.rests)
    table.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_shares_take_turns_and_a_run_that_is_cancelled_keeps_what_it_has_done(kind: str, tmp_path: Path) -> None:
    table = _table(kind, tmp_path)
    table.apply(changes(*[put(g, 0, b"%d" % n, b"", timed(1)) for g in range(9) for n in range(5)]))
    clock = _Clock(table)
    sweep = ExpirySweep(clock, share=4, pieces=1)
    expired = {0: partial(is_written_by, 5)}
    seen: list[list[int]] = []
    for _ in range(3):
        seen.append([])
        await sweep.run("op", table, expired, seen[-1].append)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    table.apply(changes(*[put(g, 0, b"k", b"", timed(1)) for g in range(9)]))

    async def interrupt(seconds: float) -> None:
        raise asyncio.CancelledError

    clock.sleep = interrupt  # type: ignore[method-assign]
    lost: list[int] = []
    with pytest.raises(asyncio.CancelledError):
        await sweep.run("op", table, expired, lost.append)
    assert lost == [0], "its newest base has an entry that the table has lost, and nobody knows"
    table.close()


class _Reader(StatefulProcessor):
    """Says what it sees."""

    def init(self, handle: Any) -> None:
        self.value = handle.getValueState("v", "n long", ttlDurationMs=1000)
        self.map = handle.getMapState("m", "u long", "n long", ttlDurationMs=1000)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for each in rows:
            if each.n:
                self.value.update((each.n,))
                self.map.updateValue((each.n,), (each.n,))
            yield Row(k=key[0], what=f"{self.value.get()} {list(self.map.iterator())}")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
async def test_a_processor_never_sees_an_expired_entry_that_a_restored_base_or_its_log_still_has(
    seed: int, tmp_path: Path, kind: str
) -> None:
    import pyarrow as pa

    registry = StateRegistry(parse_ddl("k string")).to_wire()

    def run(source: MemorySource, n: int, now: int) -> tuple[list[Any], list[Change]]:
        nonlocal registry
        declared = StateRegistry.from_wire(registry)
        runner = ProcessorRunner(
            _Reader(),
            ProcessorOperator(
                name="left",
                key_schema=parse_ddl("k string"),
                input_schema=parse_ddl("k string, n long"),
                output_schema=parse_ddl("k string, what string"),
                time_mode="processingTime",
            ),
            declared,
            schemas_of_tests(),
        )
        batch = pa.record_batch(
            [["a", "b"], [n, n], pa.array([1, 2], pa.int32())], ["k", "n", "__dstl_key_group"]
        )  # fmt: skip
        parts: list[Any] = []
        task = TaskInput(source, parts.append, 1, range(GROUPS), now, 0)
        out = [one["what"] for batch in runner.run(iter([batch]), task) for one in batch.to_pylist()]
        registry = declared.to_wire()
        rows = [tuple(each) for part in parts for each in zip(*(c.to_pylist() for c in part.columns), strict=True)]
        return out, rows  # type: ignore[return-value]

    async with world_of(seed, kind, tmp_path) as world:
        _, rows = run(MemorySource(), 7, world.time_ms)
        metadata = json.dumps(registry).encode()
        await write(world, *rows, metadata=metadata)
        await write(world, row(9, b"other", b"\x01", 99), metadata=metadata)
        await write(world, row(9, b"other", b"\x01", 99), metadata=metadata)
        assert bases(world), "no base: this test shows nothing"
        for log_too in (False, True):
            if log_too:
                # Written again, and in the log only: replay puts it back over whatever the base has.
                await write(world, *rows, metadata=metadata)
            await world.start(1)
            source = MemorySource()
            found = (await stored(world))["left"]
            source.apply(changes(*[put(g, s, key, user, value) for (g, s, key, user), value in found.items()]))
            assert len([1 for g, _, _, _ in found if g in (1, 2)]) == 4
            assert run(source, 0, world.time_ms + 999)[0] == ["(7,) [((7,), (7,))]"] * 2
            assert run(source, 0, world.time_ms + 1000)[0] == ["None []"] * 2


async def test_a_run_whose_program_has_raised_a_time_to_live_loses_nothing_to_the_old_one(seed: int) -> None:
    """The checkpoint's registry, and a TaskManager that lives on, still say the shorter one."""
    world = World(seed, partitions=1)
    longer = json.dumps({"states": [{"id": 0, "ttl_ms": 60_000}]}).encode()
    async with world:
        born = world.time_ms
        await write(world, row(3, b"k", timed(born)))
        member = world.members[0]
        await world.batch_of(0)
        world.time_ms += 5000
        await world.batch_of(0)
        await world.batch_of(0)
        assert member.backend.tracker.expired("left")
        member.backend.resume(world.newest.checkpoint_id)
        await write(world, row(4, b"other", timed(world.time_ms)), metadata=longer)
        await world.batches(4, 0)
        assert (3, 0, b"k", b"") in (await stored(world))["left"]
        member.backend.replace_tables(
            {}, world.newest.checkpoint_id, member.owned, registries={"left": json.loads(TTL)}
        )
        member.backend.tracker.base_time_ms = world.time_ms
        assert not member.backend.tracker.expired("left")
