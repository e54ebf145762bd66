"""Bases of RocksDB tables as their files: what is uploaded once, shared, kept apart, damaged, rescaled."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import google_crc32c
import pytest
from fuzz import rocksdb_files
from fuzz.targets import CORPUS

from dstl.changelog.upload.uploader import StoredObject
from dstl.checkpoint.upkeep.verification import verify_location
from dstl.errors import CorruptData, Invalid, Unavailable
from dstl.options import RocksDBOptions
from dstl.store.memory import MemoryStore
from dstl.store.sealed import SealedStore
from handles.key_group import KeyGroupRange
from handles.materialized_handle import KeyGroupBase, MaterializedStateHandle, TableFile, generations_of
from materializer.bases import table_directory
from materializer.bases.file_reader import TableFileReader
from materializer.bases.loading import BaseLoad
from materializer.bases.operator_bases import OperatorBases
from materializer.bases.table_directory import FileBases, TableIndex, decode_index, encode_index, write_table_files
from materializer.local_disk import ScratchDirectory
from materializer.tables import HeapStateTable, RocksDBStateTable, TableKind, open_table, rocksdb_engine
from tests.simulation.virtual_time import seeded_runtime
from worlds.materialization import EAGER, OPERATORS, World
from worlds.restored import fallbacks
from worlds.table_changes import changes, clear, put

crc = google_crc32c.value


@asynccontextmanager
async def rocksdb_world(seed: int, directory: Path, **options: object) -> AsyncIterator[World]:
    async with World(
        seed, options=EAGER.model_copy(update=options), table="rocksdb", directory=directory, partitions=1
    ) as world:
        yield world


def _files(world: World) -> dict[str, list[set[str]]]:
    """Per operator, the objects of each base, the newest first."""
    found: dict[str, list[set[str]]] = {}
    for handle in sorted(world.newest.materialized, key=lambda h: -h.materialization_id):
        found.setdefault(handle.operator, []).append(set(handle.objects()))
    return found


async def test_a_file_is_stored_once_per_generation_and_named_by_many_bases(seed: int, tmp_path: Path) -> None:
    """Prevents that each materialization uploads the state again."""
    async with rocksdb_world(seed, tmp_path) as world:
        await world.batch_of(3000)
        await world.materialized()
        large = world.newest
        await world.batches(3, 5)
        uploaded = [sum(member.recorder.counters["materializedBytes"] for member in world.members)]
        await world.batches(4, 5)
        uploaded.append(sum(member.recorder.counters["materializedBytes"] for member in world.members))
        state = sum(handle.total_size for handle in world.newest.materialized) / 2
        assert uploaded[1] - uploaded[0] < 4 * state, "each base holds all files anew"
        counts: dict[str, int] = {}
        for checkpoint in world.completed:
            for name in {n for h in checkpoint.materialized for n in h.objects()}:
                counts[name] = counts.get(name, 0) + 1
        assert max(counts.values()) > 1
        assert large is not None
        await world.check(world.newest)
        await world.check(world.newest, 3)


async def test_the_two_generations_have_no_object_in_common(seed: int, tmp_path: Path) -> None:
    """Prevents that one damaged file takes both bases, and with them the job: the log before them is gone."""
    async with rocksdb_world(seed, tmp_path) as world:
        shared = 0
        seen: set[str] = set()
        for _ in range(7):
            await world.batches(1, 60)
            for bases in _files(world).values():
                assert len(bases) <= 2
                assert len(bases) < 2 or not bases[0] & bases[1]
                shared += len(bases[0] & seen)
                seen |= bases[0]
        assert shared, "no base named a file of an earlier one: this test shows nothing"


async def test_a_restart_goes_on_with_the_stored_files(seed: int, tmp_path: Path) -> None:
    """Prevents that the first materializations after a restart upload everything."""
    async with rocksdb_world(seed, tmp_path) as world:
        await world.batch_of(8000)
        await world.batches(4, 4)
        before = {name for bases in _files(world).values() for names in bases for name in names}
        await world.start(1)
        await world.check(world.newest)
        await world.batches(3, 4)
        after = _files(world)
        assert all(before & names for bases in after.values() for names in bases)
        for bases in after.values():
            assert len(bases) < 2 or not bases[0] & bases[1]
        await world.check(world.newest, 2)


@pytest.mark.parametrize("kind", ["missing", "damaged", "index"])
async def test_a_damaged_file_costs_the_newest_base_and_is_not_named_again(
    seed: int, tmp_path: Path, kind: str
) -> None:
    async with rocksdb_world(seed, tmp_path) as world:
        await world.batches(5, 80)
        newest = max((h for h in world.newest.materialized if h.operator == "left"), key=lambda h: h.checkpoint)
        victim = newest.name if kind == "index" else newest.files[0].name
        data = bytearray(await world.memory.get(victim))
        await world.memory.delete([victim])
        if kind != "missing":
            data[len(data) // 2] ^= 4
            await world.memory.put(victim, bytes(data))
        await world.check(world.newest)
        reports = await world.start(1)
        assert fallbacks(reports[0]) == (victim,)
        await world.batches(3, 5)
        assert victim not in {n for h in world.newest.materialized for n in h.objects()}
        await world.check(world.newest, 3)


async def _base_of(files: dict[str, bytes], checkpoint: int, store: MemoryStore) -> dict[int, KeyGroupBase]:
    """Store files as a base with right checksums, as whoever can write to the store may, and return it by key group."""
    large = []
    for name, data in files.items():
        if name.endswith(".sst"):
            large.append(TableFile(f"{checkpoint:016}-{name}", f"q/w/{checkpoint}.base", len(data), crc(data)))
            await store.put(large[-1].name, data)
    small = {name: data for name, data in files.items() if not name.endswith(".sst")}
    index = encode_index(TableIndex(small, tuple((f.id, f.size, f.checksum) for f in large), 50))
    await store.put(f"q/w/{checkpoint}.index", index)
    handle = MaterializedStateHandle(
        operator="op",
        materialization_id=checkpoint,
        checkpoint=checkpoint,
        name=f"q/w/{checkpoint}.index",
        size=len(index),
        checksum=crc(index),
        parts=tuple((group, group, 1) for group in rocksdb_files.GROUPS),
        files=tuple(large),
    )
    return {base.key_group: base for base in handle.bases()}


@pytest.mark.parametrize("kind", ["heap", "rocksdb"])
@pytest.mark.parametrize("hostile_bytes", [path.read_bytes() for path in sorted((CORPUS / "rocksdb").iterdir())])
async def test_files_that_kill_who_reads_them_cost_their_base_and_no_process(
    hostile_bytes: bytes, kind: TableKind, seed: int, tmp_path: Path
) -> None:
    """Native code reads them, whatever their checksums: a TaskManager would die of them at each of its restarts."""
    store = MemoryStore()
    good = await _base_of(rocksdb_files.sample(), 1, store)
    hostile = await _base_of(rocksdb_files.unpack(hostile_bytes), 2, store)
    runtime, told = seeded_runtime(seed), []
    with closing(open_table(kind, tmp_path / "table")) as table:
        async with FileBases(store, runtime) as files:
            load = BaseLoad(
                {group: (hostile[group], good[group]) for group in good},
                KeyGroupRange(0, 3),
                table,
                files,
                told.append,
                asyncio.Semaphore(1),
            )
            await load.run()
        assert {group: base.checkpoint for group, base in load.loaded.items()} == dict.fromkeys(good, 1)
        assert load.damaged == {"q/w/2.index"}
        assert table.get_many(1, [3], [b"key7"]) == [b"value" * 4]
    assert sum(told) >= 4


async def test_a_heap_table_opens_no_file_of_a_base_itself_and_a_sealed_one_is_opened_unread(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a holder of the key has stored is read once, for there is nothing to be feared of it."""
    asked: list[str] = []
    monkeypatch.setattr(TableFileReader, "check", lambda self: iter(asked.append("check") or ()))
    opened = rocksdb_engine.open_database

    def open_noted(path: Path, native: object, *, read_only: bool = False) -> object:
        asked.append(f"open {path.parent.name}")
        return opened(path, native, read_only=read_only)

    for module in ("rocksdb", "rocksdb_snapshot"):
        monkeypatch.setattr(f"materializer.tables.{module}.open_database", open_noted)
    files = rocksdb_files.sample()
    for sealed in (False, True):
        store = MemoryStore() if not sealed else SealedStore(MemoryStore(), b"k" * 32)
        base = await _base_of(files, 1, store)
        for kind in ("heap", "rocksdb"):
            asked.clear()
            runtime = seeded_runtime(seed)
            with closing(open_table(kind, tmp_path / f"{kind}{sealed}")) as table:
                async with FileBases(store, runtime) as fetching:
                    generations = {group: (each,) for group, each in base.items()}
                    owned, turn = KeyGroupRange(0, 3), asyncio.Semaphore(1)
                    await BaseLoad(generations, owned, table, fetching, lambda _: None, turn).run()
                assert len(table.key_groups()) == 4
            own = f"open {kind}{sealed}"
            assert [each for each in asked if each == own] == [own] * (0 if kind == "heap" else 2)
            assert asked.count("check") == (not sealed)


def test_a_child_has_no_credentials_and_ends_within_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    for name, data in rocksdb_files.sample().items():
        (tmp_path / name).write_bytes(data)
    with closing(TableFileReader(tmp_path, "base")) as reader:
        next(reader.entries(0))
        assert reader._process is not None
        about = Path(f"/proc/{reader._process.pid}")
        assert b"canary" not in (about / "environ").read_bytes()
        limits = {line[:25].strip(): line[26:].split()[1] for line in (about / "limits").read_text().splitlines()}
        assert limits["Max address space"] == str(2 << 30)
        assert limits["Max cpu time"] == "60"
        os.kill(reader._process.pid, signal.SIGKILL)
        with pytest.raises(CorruptData, match="SIGKILL"):
            list(reader.entries(1))
        with pytest.raises(CorruptData, match="SIGKILL"):
            list(reader.check())
    assert reader._process.returncode == -9


async def test_the_base_of_a_table_without_any_key_is_restored(seed: int, tmp_path: Path) -> None:
    """Prevents that an empty table's base, which has no files, is read as what it is not."""
    async with rocksdb_world(seed, tmp_path) as world:
        # Clearing a key that is not there changes nothing in the engine, and there is a log all the same.
        cleared = {operator: [clear(1, 1, b"k")] for operator in OPERATORS}
        for _ in range(3):
            checkpoint = await world.checkpoint(world.run_attempts(cleared))
            assert checkpoint is not None
            world.take(checkpoint, cleared)
            await world.materialized()
        assert world.newest.materialized, "nothing was materialized: this test shows nothing"
        assert not any(handle.files for handle in world.newest.materialized)
        await world.check(world.newest)
        reports = await world.start(1)
        assert fallbacks(reports[0]) == ()
        await world.batches(4)
        assert any(handle.files for handle in world.newest.materialized)
        await world.check(world.newest, 2)


async def test_a_restore_that_is_cancelled_leaves_no_file_behind(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    async with rocksdb_world(seed, tmp_path / "tables") as world:
        await world.batches(4, 60)
        assert list(scratch.iterdir()) == []
        for ticks in (1, 5, 20, 60):
            running = asyncio.ensure_future(world.content_of(world.newest))
            for _ in range(ticks):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert list(scratch.iterdir()) == []
        await world.check(world.newest)


async def test_operators_that_are_loaded_side_by_side_leave_no_file_behind(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one's files are put into a directory of all, which both need at the same moment."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    together = threading.Barrier(len(OPERATORS))

    class LateDirectory(ScratchDirectory):
        def __init__(self, prefix: str = "dstl-") -> None:
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            super().__init__(prefix)

    async with rocksdb_world(seed, tmp_path / "tables") as world:
        await world.batches(4, 60)
        assert {handle.operator for handle in world.newest.materialized if handle.files} == set(OPERATORS)
        monkeypatch.setattr(table_directory, "ScratchDirectory", LateDirectory)
        world.open_table = lambda _: HeapStateTable()  # type: ignore[method-assign]
        await world.check(world.newest)
        assert list(scratch.iterdir()) == []


async def test_when_one_file_is_not_taken_the_upload_of_the_others_has_ended_too(tmp_path: Path) -> None:
    """Else a file that is stored after the failed ones were discarded is left behind, and its table's disk pinned."""
    table = RocksDBStateTable(tmp_path / "t", RocksDBOptions(max_runs=50))
    for n in range(4):
        table.apply(changes(put(1, 0, b"%d" % n, b"", b"v")))
        table.prepare_snapshot()
    under_way: set[int] = set()
    at_most = 0

    async def store(data: bytes | memoryview, checksum: int) -> StoredObject:
        nonlocal at_most
        under_way.add(checksum)
        at_most = max(at_most, len(under_way))
        try:
            await asyncio.sleep(0.01 if len(under_way) == 1 else 3600)
            raise Unavailable("not today")
        finally:
            under_way.remove(checksum)

    with closing(table.snapshot()) as snapshot:
        plan = OperatorBases().plan(
            1, KeyGroupRange.all(16), snapshot.versions, generations=2, min_live_share=0.5, in_files=True
        )
        with pytest.raises(Unavailable, match="not today"):
            await write_table_files("o", plan, snapshot, {}, store)
        assert at_most == 2
        assert not under_way
    table.close()


async def test_verification_reads_index_and_files_once_each(seed: int, tmp_path: Path) -> None:
    """Prevents that ``dstl verify`` calls a checkpoint sound whose table files are not."""
    async with rocksdb_world(seed, tmp_path) as world:
        await world.batches(5, 60)
        handle = world.newest.materialized[0]
        assert not set(await _problems(world)) & set(handle.objects())
        for victim in (handle.name, handle.files[0].name):
            data = await world.memory.get(victim)
            await world.memory.delete([victim])
            await world.memory.put(victim, data[:-1] + bytes([data[-1] ^ 1]))
            assert victim in await _problems(world)
            await world.memory.delete([victim])
            assert victim in await _problems(world)


async def _problems(world: World) -> list[str]:
    found = [problem.object for problem in (await verify_location(world.memory, world.runtime)).problems]
    assert len(found) == len(set(found))
    return found


async def test_key_groups_share_a_base_for_estimates_only(seed: int, tmp_path: Path) -> None:
    async with rocksdb_world(seed, tmp_path) as world:
        await world.batches(3)
        for handle in world.newest.materialized:
            assert sum(length for _, _, length in handle.parts) == handle.total_size
        for groups in generations_of(world.newest.materialized).values():
            assert len(groups) == 16


FILES = (TableFile("0123456789abcdef-000008.sst", "a/b", 70, 7), TableFile("0123456789abcdef-000009.sst", "a/c", 9, 1))
INDEX = TableIndex(
    {"CURRENT": b"MANIFEST-000005\n", "MANIFEST-000005": bytes(range(64)), "OPTIONS-000007": b""},
    tuple((file.id, file.size, file.checksum) for file in FILES),
    33,
)


def test_the_golden_index_of_version_1_stays_readable() -> None:
    """Never rewritten: a new version adds a file."""
    data = (Path(__file__).parents[1] / "golden" / "table_index_v1.base").read_bytes()
    assert decode_index(data, FILES, "golden") == INDEX


def test_an_index_is_read_as_it_was_written_and_every_flipped_bit_and_cut_is_found() -> None:
    data = encode_index(INDEX)
    assert decode_index(data, FILES, "i") == INDEX
    for at in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptData, match="table index i is damaged"):
                decode_index(bytes(damaged), FILES, "i")
    for length in range(len(data)):
        with pytest.raises(CorruptData, match="damaged"):
            decode_index(data[:length], FILES, "i")


def test_an_index_of_other_files_or_with_a_name_that_leaves_the_directory_is_refused() -> None:
    data = encode_index(INDEX)
    with pytest.raises(CorruptData, match="other files"):
        decode_index(data, FILES[:1], "i")
    with pytest.raises(Invalid, match="cannot store"):
        encode_index(TableIndex({"../CURRENT": b""}, ()))
    for bad in ("../../x-1.sst", "0123456789abcdef-../1.sst", "0123456789abcdef-1.sst/.."):
        with pytest.raises(ValueError, match="pattern"):
            handle_with(TableFile(bad, "n", 1, 1))


def handle_with(file: TableFile) -> MaterializedStateHandle:
    return MaterializedStateHandle.model_validate(
        {
            "operator": "o",
            "materialization_id": 1,
            "checkpoint": 1,
            "name": "i",
            "size": 1,
            "checksum": 1,
            "parts": [[0, 0, 1]],
            "files": [list(file)],
        }
    )


def test_a_table_that_cannot_take_the_files_is_empty_and_works(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "CURRENT").write_bytes(b"MANIFEST-000001\n")
    table = RocksDBStateTable(tmp_path / "t")
    with pytest.raises(CorruptData):
        table.adopt(tmp_path / "files", [0, 1])
    assert list(table.key_groups()) == []
    table.apply(changes(put(1, 0, b"k", b"", b"v")))
    with pytest.raises(Invalid, match="empty table"):
        table.adopt(tmp_path / "files", [0, 1])
    assert table.get_many(0, [1], [b"k"]) == [b"v"]
    table.close()
