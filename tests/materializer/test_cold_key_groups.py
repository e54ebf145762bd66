"""Tables that serve while their bases are still to come: what they show is right from the first read on."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from math import inf
from pathlib import Path

import pyarrow as pa
import pytest

from dstl.errors import CorruptData, Invalid, StateTooLarge, Unavailable
from dstl.store.retry_policy import STALL_S
from handles.materialized_handle import generations_of
from materializer.bases import base_fetch, cold_reads, key_group_block, key_group_file
from materializer.bases.base_cache import BaseCache
from materializer.bases.table_directory import FileBases
from materializer.restore.progress import RestoreStatus
from materializer.restore.restore import TableRestore
from materializer.tables import ENTRY_SCHEMA, HeapStateTable
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, virtual
from worlds.materialization import EAGER, GROUPS, OPERATORS, World, apply
from worlds.restored import fallbacks
from worlds.table_changes import Change, changes, clear, content, delete, put

KEYS = [bytes([n]) for n in range(256)]


def some_changes(rng: random.Random, count: int, groups: int = GROUPS) -> list[Change]:
    """Changes of few keys, so that most meet what is there; state 0 has values, state 1 elements."""
    found = []
    for _ in range(count):
        key, state = rng.choice(KEYS), rng.randrange(2)
        group, user_key = key[0] % groups, rng.choice([b"x", b"y", b"z"]) if state else b""
        value = b"v%d" % rng.randrange(1000) if rng.random() < 0.9 else b"another length"
        found.append(
            rng.choices(
                [
                    put(group, state, key, user_key, value),
                    delete(group, state, key, user_key),
                    clear(group, state, key),
                ],
                (6, 2, 1),
            )[0]
        )
    return found


@pytest.mark.parametrize("rows", [0, 30, 400])
def test_bases_may_come_at_any_time_and_in_any_part(rows: int, rng: random.Random) -> None:
    """A model-based machine: a table that has everything from the beginning is the truth."""
    for _ in range(25):
        groups = range(2)
        truth, table = HeapStateTable(), HeapStateTable()
        truth.apply(changes(*some_changes(rng, rows, len(groups))))
        with closing(truth.snapshot()) as snapshot:
            pages = {group: list(snapshot.entries(group)) for group in groups}
        table.chill(groups)
        shown: set[tuple[int, int, bytes]] = set()
        for action in rng.choices(("change", "part", "whole", "again"), (4, 5, 1, 2), k=rng.randrange(25)):
            group, state = rng.choice(groups), rng.randrange(2)
            keys = [key for key in rng.sample(KEYS, 40) if key[0] % len(groups) == group]
            if action == "change":
                batch = changes(*some_changes(rng, rng.randrange(1, 9), len(groups)))
                truth.apply(batch)
                table.apply(batch)
            elif action == "whole" and table.is_cold(group):
                base = HeapStateTable()
                base.restore(group, pages[group])
                table.warm(group, base)
            elif table.is_cold(group):
                for page in pages[group]:
                    mine = [row for row in page.to_pylist() if row["state"] == state and row["key"] in keys]
                    table.put_below(group, pa.RecordBatch.from_pylist(mine, ENTRY_SCHEMA))
                shown |= {(group, state, key) for key in keys}
            for of_group, of_state, key in shown:
                assert table.get_entries(of_state, [of_group], [key]) == truth.get_entries(of_state, [of_group], [key])
        for group in groups:
            if table.is_cold(group):
                with pytest.raises(Unavailable, match="not loaded yet"):
                    table.snapshot()
                assert group in table.key_groups()
                base = HeapStateTable()
                base.restore(group, pages[group])
                table.warm(group, base)
        with closing(table.snapshot()) as one, closing(truth.snapshot()) as other:
            assert content(one, groups) == content(other, groups)
        assert table.size() == truth.size()


def test_a_key_group_with_entries_cannot_be_cold_and_one_that_is_not_takes_no_rows() -> None:
    table = HeapStateTable()
    table.apply(changes(put(1, 0, b"k", b"", b"v")))
    with pytest.raises(Invalid, match="key group 1 has entries"):
        table.chill([1])
    table.put_below(
        1, pa.RecordBatch.from_pylist([{"state": 0, "key": b"k", "user_key": b"", "value": b"w"}], ENTRY_SCHEMA)
    )
    assert table.get_many(0, [1], [b"k"]) == [b"v"]
    table.chill([2])
    table.drop_key_group(2)
    assert not table.is_cold(2)


def small(monkeypatch: pytest.MonkeyPatch, raw: float = inf, block_bytes: int = 1, gap: int = 0) -> None:
    """Let a base of some rows have many blocks, and its key groups come one by one."""
    monkeypatch.setattr(key_group_file, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(base_fetch, "FETCH_BYTES", 300)
    monkeypatch.setattr(base_fetch, "AHEAD_FETCHES", 1)
    monkeypatch.setattr(cold_reads, "READ_COSTS", cold_reads.ReadCosts(gap, 1, 0, 0, raw, 1, inf, run=400, requests=2))
    monkeypatch.setattr(key_group_block, "FRAME_BYTES", 3)


@pytest.fixture(autouse=True)
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@asynccontextmanager
async def some_world(seed: int, batches: int = 6, **options: object) -> AsyncIterator[World]:
    """A world whose newest checkpoint is bases and log behind them."""
    async with World(seed, partitions=1, options=EAGER.model_copy(update=options)) as world:
        await world.batches(batches, 60)
        for member in world.members:
            member.manager._options = EAGER.model_copy(update={"enabled": False})
        for _ in range(3):
            await world.batch_of(60)
        assert world.newest is not None
        assert world.newest.materialized
        yield world


def open_files(directory: Path) -> list[str]:
    """The files below a directory that this process has open."""
    held = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return [path for path in held if path.startswith(f"{directory}/")]


class Opened:
    """A restore of a world's newest checkpoint, and the truth to compare with."""

    def __init__(self, world: World, store: object, cache: BaseCache | None = None) -> None:
        self.world = world
        self.files = FileBases(store, world.runtime, cache)  # type: ignore[arg-type]
        self.told: list[RestoreStatus] = []
        assert world.newest is not None
        self.restore = TableRestore(
            world.newest, self.files, world.members[0].owned, lambda _: HeapStateTable(), self.told.append
        )
        self.truth = {op: dict(entries) for op, entries in world.models[world.newest.checkpoint_id].items()}

    async def __aenter__(self) -> Opened:
        await self.restore.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.restore.close()
        await self.files.close()

    def change(self, rng: random.Random) -> None:
        """Make changes to a table and the truth, as a checkpoint does that is followed."""
        operator, rows = rng.choice(OPERATORS), some_changes(rng, 5)
        if operator in self.restore.restored.tables:
            self.restore.restored.tables[operator].apply(changes(*rows))
            apply(self.truth[operator], rows)

    async def look(self, rng: random.Random, most: int = 6) -> None:
        """Read some keys of an operator, or a state of a key group, after they were brought."""
        operator, state = rng.choice(OPERATORS), rng.randrange(2)
        table = self.restore.restored.tables.get(operator)
        if table is None:
            return
        asked: dict[int, list[cold_reads.Asked]] = {}
        if rng.random() < 0.2:
            group = rng.randrange(GROUPS)
            await self.restore.bring(operator, {group: [(state, None)]})
            found = {(group, state, e.key, e.user_key): e.value for e in table.scan(state, group, limit=1 << 20)}
            assert found == {a: v for a, v in self.truth[operator].items() if a[:2] == (group, state)}
            return
        keys = rng.sample(KEYS, rng.randrange(1, most))
        for key in keys:
            asked.setdefault(key[0] % GROUPS, []).append((state, key))
        await self.restore.bring(operator, asked)
        for key in keys:
            (entries,) = table.get_entries(state, [key[0] % GROUPS], [key])
            mine = {a[3]: v for a, v in self.truth[operator].items() if a[:3] == (key[0] % GROUPS, state, key)}
            assert dict(entries) == mine, (operator, state, key)

    def check_whole(self) -> None:
        """All tables are the truth."""
        for operator, table in self.restore.restored.tables.items():
            with closing(table.snapshot()) as snapshot:
                assert content(snapshot, range(GROUPS)) == self.truth[operator]


@virtual
@pytest.mark.parametrize(("raw", "block_bytes", "gap"), [(inf, 1, 0), (2.0, 100, 0), (inf, 60, 500), (-inf, 1, 0)])
async def test_a_table_is_right_while_it_is_loaded_behind_its_batches(
    raw: float, block_bytes: int, gap: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of keys and of whole states, and changes, from the first moment on; the store answers when it likes."""
    small(monkeypatch, raw, block_bytes, gap)
    rng = random.Random(seed)
    async with some_world(seed) as world:
        rules = [FaultRule(Fault.UNAVAILABLE, "get", nth=tuple(range(9, 999, 9)))]
        store = FaultyStore(world.memory, rules, clock=LoopClock(), latency=lambda *_: rng.uniform(0.001, 0.5))
        async with Opened(world, store) as opened:
            assert not opened.restore.is_loaded
            assert all(bases.is_loading for bases in opened.restore.restored.bases.values())

            async def work() -> None:
                for _ in range(15):
                    if rng.random() < 0.5:
                        await opened.look(rng)
                    else:
                        opened.change(rng)
                    await asyncio.sleep(rng.uniform(0, 0.3))

            # Reads beside each other and beside the load: the changes between them are each seen at once.
            loaded = asyncio.ensure_future(opened.restore.load())
            await work()
            await asyncio.gather(loaded, *(opened.look(rng) for _ in range(4)))
            assert opened.restore.is_loaded
            opened.check_whole()
            assert opened.told[-1].finished
            assert opened.told[-2].done == opened.told[-2].total == opened.told[-1].done
            assert not fallbacks(opened.restore.restored)


@virtual
async def test_a_large_key_group_is_loaded_though_each_ninth_of_its_requests_fails(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_fetch, "FETCH_BYTES", 10)  # a hundred requests for each
    monkeypatch.setattr(base_fetch, "AHEAD_FETCHES", 1)
    async with some_world(seed) as world:
        rules = [FaultRule(Fault.UNAVAILABLE, "get", nth=tuple(range(9, 99_999, 9)))]
        async with Opened(world, FaultyStore(world.memory, rules, clock=LoopClock())) as opened:
            await opened.restore.load()
            opened.check_whole()


@virtual
async def test_few_keys_read_few_blocks_and_what_is_waited_for_comes_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with some_world(seed) as world:
        asked: list[str] = []
        store = FaultyStore(world.memory, clock=LoopClock(), latency=lambda *_: 1.0)
        inner = store.get

        async def get(name: str, *rest: object) -> bytes:
            asked.append(name)
            return await inner(name, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "get", get)
        async with Opened(world, store) as opened:
            operator = OPERATORS[0]
            table = opened.restore.restored.tables[operator]
            assert isinstance(table, HeapStateTable)
            cold = [group for group in range(GROUPS) if table.is_cold(group)]
            before = len(asked)
            await opened.restore.bring(operator, {cold[-1]: [(0, bytes([cold[-1]]))]})
            # One for the index and one or two for blocks; the loads, of which none has ended, are on their way.
            assert len(asked) - before <= 1 + 2 + len(OPERATORS) * 2
            before = len(asked)
            await opened.restore.bring(operator, {cold[-1]: [(0, bytes([cold[-1]]))]})
            assert len(asked) == before, "what has been read was read again"
            await opened.restore._loads[operator].wait([cold[-1]])
            assert not table.is_cold(cold[-1])
            # Those that were on their way have come before it, and few others.
            assert sum(table.is_cold(group) for group in cold) >= len(cold) - 8
            await opened.restore.load()
            opened.check_whole()


@virtual
async def test_a_damaged_base_costs_more_log_and_nothing_else(seed: int) -> None:
    """Found by a read in place, or by the load behind it: the older base comes, and the log between the two."""
    rng = random.Random(seed)
    async with some_world(seed, batches=8) as world:
        kept = [bases for groups in generations_of(world.newest.materialized).values() for bases in groups.values()]
        # One materialization may displace another before a checkpoint names both, and one object has many key groups.
        older = {old.file.name for bases in kept for old in bases[1:]}
        newest = {bases[0].file.name for bases in kept if len(bases) > 1} - older
        for name in sorted(newest):
            body = bytearray(await world.memory.get(name))
            body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            await world.memory.delete([name])
            await world.memory.put(name, bytes(body))
        store = FaultyStore(world.memory, clock=LoopClock(), latency=lambda *_: rng.uniform(0.001, 0.2))
        async with Opened(world, store) as opened:
            loaded = asyncio.ensure_future(opened.restore.load())
            for _ in range(8):
                await opened.look(rng)
                opened.change(rng)
            await loaded
            opened.check_whole()
            assert newest.issuperset(fallbacks(opened.restore.restored))
            assert fallbacks(opened.restore.restored)
            assert opened.told[-1].done == opened.told[-1].total


@virtual
async def test_a_store_that_never_answers_is_asked_again(seed: int) -> None:
    """By the load and by reads in place; a local directory on a network has no timeout of its own."""
    rng = random.Random(seed)
    async with some_world(seed) as world:
        rules = [FaultRule(Fault.STUCK, "get", nth=tuple(range(3, 999, 40)))]
        store = FaultyStore(world.memory, rules, clock=LoopClock(), latency=lambda *_: rng.uniform(0.001, 0.5))
        async with Opened(world, store) as opened:
            loaded = asyncio.ensure_future(opened.restore.load())
            for _ in range(4):
                await opened.look(rng)
                opened.change(rng)
            await loaded
            opened.check_whole()
            assert not fallbacks(opened.restore.restored)
            assert asyncio.get_running_loop().time() > STALL_S


@virtual
async def test_a_read_that_outlives_its_load_leaves_no_file_of_the_cache_open(seed: int, tmp_path: Path) -> None:
    """All is loaded, and the cache closed, while some of its requests still wait for their turn."""
    async with some_world(seed) as world:
        cache = BaseCache(tmp_path / "cache", "s3://b", max_bytes=1 << 20, max_age_s=1e6)
        async with Opened(world, world.memory, cache) as opened:
            await opened.restore.load()
        async with Opened(world, world.memory, cache) as opened:
            operator = OPERATORS[0]
            reads, table = opened.restore._reads[operator], opened.restore.restored.tables[operator]
            asked = {group: [(0, bytes([group]))] for group in range(GROUPS) if table.is_cold(group)}
            for group in asked:
                await reads._index(reads._bases[group])
            for _ in range(cold_reads.READ_COSTS.requests):
                await reads._requests.acquire()
            read = asyncio.ensure_future(opened.restore.bring(operator, asked))
            await opened.restore.load()
            await opened.restore.close()
            for _ in range(cold_reads.READ_COSTS.requests):
                reads._requests.release()
            await read
            opened.check_whole()
            assert not open_files(tmp_path)


@virtual
async def test_operators_that_are_read_at_once_share_the_requests(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds the memory and the connections of reads in place is a bound for all of a TaskManager."""
    async with some_world(seed) as world:
        store = FaultyStore(world.memory, clock=LoopClock(), latency=lambda *_: 1.0)
        under_way = most = 0
        inner = store.get

        async def get(name: str, *rest: object) -> bytes:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await inner(name, *rest)  # type: ignore[arg-type]
            finally:
                under_way -= 1

        async with Opened(world, store) as opened:
            for task in opened.restore._running.values():
                task.cancel()
            monkeypatch.setattr(store, "get", get)
            asked = {group: [(0, bytes([group]))] for group in range(GROUPS)}
            reads = [asyncio.ensure_future(opened.restore.bring(operator, asked)) for operator in OPERATORS]
            await asyncio.sleep(100)
            assert all(read.done() for read in reads)
            assert most == cold_reads.READ_COSTS.requests
            await opened.restore.load()
            opened.check_whole()


@virtual
async def test_without_a_usable_base_the_load_fails_for_good_and_says_why(seed: int) -> None:
    async with some_world(seed, batches=8) as world:
        assert world.newest.truncated
        for name in sorted({h.name for h in world.newest.materialized}):
            await world.memory.delete([name])
        async with Opened(world, world.memory) as opened:
            waits = [asyncio.ensure_future(opened.restore.wait(operator)) for operator in OPERATORS]
            with pytest.raises(
                CorruptData, match=r"every base of key group .* is damaged or missing.*older checkpoint"
            ):
                await opened.restore.load()
            for failed in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(failed, CorruptData)
            with pytest.raises(CorruptData):
                await opened.restore.bring(OPERATORS[0], {group: [(0, b"k")] for group in range(GROUPS)})


@virtual
async def test_a_store_that_is_away_fails_those_that_wait_and_the_load_goes_on_later(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, raw=-inf)
    async with some_world(seed) as world:
        store = FaultyStore(world.memory, clock=LoopClock(), latency=lambda *_: 0.01)
        async with Opened(world, store) as opened:
            away = FaultRule(Fault.UNAVAILABLE, "get", chance=1.0)
            store.rules = [away]  # type: ignore[attr-defined]
            waits = asyncio.ensure_future(opened.restore.wait(OPERATORS[0]))
            with pytest.raises(Unavailable):
                await opened.restore.load()
            with pytest.raises(Unavailable):
                await waits
            store.rules = []  # type: ignore[attr-defined]
            await opened.restore.load()
            opened.check_whole()


@virtual
async def test_a_load_that_does_not_fit_is_given_up(seed: int) -> None:
    async with some_world(seed) as world, Opened(world, world.memory) as opened:

        def full(_: RestoreStatus) -> None:
            raise StateTooLarge("what is being restored would outgrow the memory")

        opened.restore._on_progress = full
        with pytest.raises(StateTooLarge, match="cannot be restored"):
            await opened.restore.load()
        with pytest.raises(StateTooLarge):
            await opened.restore.wait(OPERATORS[0])
