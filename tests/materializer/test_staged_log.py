"""The log that RocksDB tables write down in files while their base is fetched, and take over it afterwards."""

import random
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dstl.errors import Invalid
from dstl.options import RocksDBOptions
from materializer.tables import RocksDBStateTable
from materializer.tables.rocksdb_snapshot import SortedFile
from worlds.demand import demand
from worlds.materialization import EAGER, World
from worlds.table_changes import AWKWARD, Change, changes, clear, content, delete, put
from worlds.waiting import wait_until

SMALL = RocksDBOptions(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)


def table_in(directory: Path) -> RocksDBStateTable:
    return RocksDBStateTable(directory, SMALL)


def random_rows(rng: random.Random, count: int) -> list[Change]:
    rows: list[Change] = []
    for n in range(count):
        group, state, key, user_key = rng.randrange(5), rng.randrange(3), rng.choice(AWKWARD), rng.choice(AWKWARD)
        row = put(group, state, key, user_key, b"%d" % n)
        rows.append(row if rng.random() < 0.7 else delete(group, state, key, user_key))
    return rows


def test_staged_changes_are_the_same_as_applied_ones(tmp_path: Path, rng: random.Random) -> None:
    """Puts and deletes over a table that has entries and unflushed writes, in several batches and several pieces."""
    with closing(table_in(tmp_path / "a")) as applied, closing(table_in(tmp_path / "s")) as staged:
        for n in range(8):
            batches = [changes(*random_rows(rng, rng.randrange(1, 80))) for _ in range(rng.randrange(1, 4))]
            before = {group: staged.version(group) for group in range(5)}
            touched = {group for batch in batches for group in batch.column("key_group").to_pylist()}
            if n % 3:
                made = staged.stage(batches)
                assert made is not None
                staged.take(made)
            else:
                for batch in batches:
                    staged.apply(batch)
            for batch in batches:
                applied.apply(batch)
            assert {g for g in range(5) if staged.version(g) != before[g]} == touched
            with closing(applied.snapshot()) as one, closing(staged.snapshot()) as other:
                assert content(one, range(5)) == content(other, range(5))
        assert not list((tmp_path / "s").glob("*.sst"))


def test_a_clear_cannot_be_staged(tmp_path: Path) -> None:
    """What it removes is in the table, which is not there yet."""
    with closing(table_in(tmp_path / "t")) as table:
        assert table.stage([changes(put(1, 0, b"a", b"", b"1")), changes(clear(1, 0, b"a"))]) is None
        assert list(tmp_path.glob("t/*.sst")) == []


def test_only_deletes_can_be_staged(tmp_path: Path) -> None:
    with closing(table_in(tmp_path / "t")) as table:
        table.apply(changes(put(1, 0, b"a", b"", b"1"), put(1, 0, b"b", b"", b"2")))
        staged = table.stage([changes(delete(1, 0, b"a"))])
        assert staged is not None
        table.take(staged)
        assert table.get_many(0, [1, 1], [b"a", b"b"]) == [None, b"2"]


def test_bad_changes_are_refused_when_they_are_staged(tmp_path: Path) -> None:
    with closing(table_in(tmp_path / "t")) as table, pytest.raises(Invalid, match="no operation 9"):
        table.stage([changes((1, 0, 9, b"a", b"", b"1"))])


def test_what_was_never_taken_goes_with_the_table(tmp_path: Path) -> None:
    table = table_in(tmp_path / "t")
    assert table.stage([changes(put(1, 0, b"a", b"", b"1"))]) is not None
    assert list(tmp_path.glob("t/*.sst"))
    table.close()
    assert list((tmp_path / "t").iterdir()) == []


class Counted:
    """Counts what tables stage and take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.staged = self.refused = self.taken = 0
        stage, take = RocksDBStateTable.stage, RocksDBStateTable.take

        def counting_stage(table: RocksDBStateTable, batches: Sequence[pa.RecordBatch]) -> SortedFile | None:
            made = stage(table, batches)
            self.staged += made is not None
            self.refused += made is None
            return made

        def counting_take(table: RocksDBStateTable, *staged: Any) -> None:
            self.taken += 1
            take(table, *staged)

        monkeypatch.setattr("materializer.restore.restore.PIECE_BYTES", 300)
        monkeypatch.setattr("materializer.restore.restore.STAGED_BYTES", 0)
        monkeypatch.setattr(RocksDBStateTable, "stage", counting_stage)
        monkeypatch.setattr(RocksDBStateTable, "take", counting_take)


async def a_world(seed: int, directory: Path) -> World:
    """A base, and log after it whose segments have puts, deletes and clears."""
    options = EAGER.model_copy(update={"interval_s": 1e9, "max_segments": None, "log_to_state_ratio": None})
    world = World(seed, options=options, table="rocksdb", directory=directory, partitions=1)
    await world.start(1)
    await world.batch_of(300)
    for _ in range(3):
        for member in world.members:
            demand(member.backend.tracker.manager)
        await world.materialized()
        await world.batch_of(20)
    for size in (9, 1, 1, 30, 1, 2, 9):
        await world.batch_of(size)
    return world


async def test_the_log_is_staged_while_the_base_is_fetched(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await a_world(seed, tmp_path)
    try:
        counted = Counted(monkeypatch)
        await world.check(world.newest)
        await world.check(world.newest, 3)
        assert counted.taken == counted.staged > 0
    finally:
        await world.close()


async def test_a_damaged_base_lets_go_of_what_was_staged_for_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older base needs more log: what was staged over the newer one must not be put over the older."""
    world = await a_world(seed, tmp_path)
    try:
        counted = Counted(monkeypatch)
        for handle in world.newest.materialized:
            if handle.checkpoint == max(h.checkpoint for h in world.newest.materialized):
                await world.store.put(handle.name, b"damaged")
        await world.check(world.newest)
        assert counted.staged > counted.taken
    finally:
        await world.close()


def test_files_are_not_merged_while_a_table_is_restored(tmp_path: Path) -> None:
    """A base with many runs would be rewritten at once, and take the processor from the restore."""
    options = SMALL.model_copy(update={"max_runs": 2})
    with closing(RocksDBStateTable(tmp_path / "first", SMALL.model_copy(update={"max_runs": 64}))) as first:
        for n in range(6):
            first.apply(changes(*(put(1, 0, b"%d" % key, b"", b"%d" % n) for key in range(100))))
            first.prepare_snapshot()
        with closing(first.snapshot()) as snapshot, closing(RocksDBStateTable(tmp_path / "second", options)) as second:
            runs = sum(bool(file.id) for file in snapshot.files())
            assert runs > options.max_runs
            second.adopt(snapshot.path, [1])
            second.apply(changes(put(1, 0, b"0", b"", b"new")))
            second.prepare_snapshot()
            time.sleep(0.2)
            assert files_of(second) == runs + 1
            second.resume_compaction()
            second.resume_compaction()
            wait_until(lambda: files_of(second) <= options.max_runs, "the compaction")
            assert second.get_many(0, [1, 1], [b"0", b"7"]) == [b"new", b"5"]


def files_of(table: RocksDBStateTable) -> int:
    with closing(table.snapshot()) as snapshot:
        return sum(bool(file.id) for file in snapshot.files())
