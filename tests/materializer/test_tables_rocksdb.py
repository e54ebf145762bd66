"""The RocksDB table: the contract, and what only it promises."""

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from dstl.errors import Closed, CorruptData, Invalid, Unavailable
from dstl.option_sources import resolve
from dstl.options import RocksDBOptions
from materializer.tables import RocksDBStateTable, StateTable, columns, open_table
from materializer.tables.rocksdb_engine import write_buffer_for
from worlds.table_changes import changes, delete, put
from worlds.table_contract import TableContract

SMALL = RocksDBOptions(block_cache_bytes=8 << 20, write_buffer_bytes=1 << 20)


class TestRocksDBStateTable(TableContract):
    def open_table(self, directory: Path) -> StateTable:
        return open_table("rocksdb", directory, rocksdb=SMALL)


def test_without_the_extra_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(Invalid, match=r"pip install 'dstl-pyspark\[rocksdb\]'"):
        open_table("rocksdb", tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_table_needs_a_directory_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="needs a directory"):
        open_table("rocksdb")
    with pytest.raises(Invalid, match="no state table of kind 'lmdb'"):
        open_table("lmdb")  # type: ignore[arg-type]
    with closing(open_table("rocksdb", tmp_path / "t", rocksdb=SMALL)), pytest.raises(Invalid, match="of its own"):
        open_table("rocksdb", tmp_path / "t", rocksdb=SMALL)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unavailable, match=r"cannot make .*file"):
        open_table("rocksdb", tmp_path / "file", rocksdb=SMALL)


def test_nothing_is_left_on_disk_after_close(tmp_path: Path) -> None:
    table = open_table("rocksdb", tmp_path / "t", rocksdb=SMALL)
    table.apply(changes(put(1, 0, b"a", b"", b"1")))
    snapshot = table.snapshot()
    list(snapshot.entries(1))
    table.restore(1, snapshot.entries(1))
    table.close()
    snapshot.close()
    assert list((tmp_path / "t").iterdir()) == []


MANY_FILES = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from materializer.bases.file_reader import TableFileReader
from materializer.tables import HeapStateTable, RocksDBStateTable
from worlds.table_changes import changes, content, put

source = HeapStateTable()
source.apply(changes(*(put(key_group, 0, b"key", b"", b"value") for key_group in range(160))))
table = RocksDBStateTable(Path(sys.argv[1]))
for key_group in range(160):
    table.restore(key_group, source.snapshot().entries(key_group))
snapshot = table.snapshot()
reader = TableFileReader(snapshot.path, "base")
list(reader.check())
read = [key for key_group in range(160) for page in reader.entries(key_group) for key in page["key"]]
print(len(snapshot.files()), len(content(snapshot, range(160))), len(read))
"""


def test_a_table_with_more_files_than_the_process_may_open_serves_and_is_read(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MANY_FILES, str(tmp_path / "t")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    files, entries, read = map(int, ended.stdout.split())
    assert files > 160
    assert (entries, read) == (160, 160)


def test_a_table_that_finds_no_file_free_says_what_to_raise(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(RocksDBStateTable(tmp_path / "t", SMALL)) as table:
        table.apply(changes(put(1, 0, b"a", b"", b"1")))
        free = os.dup(0)  # the lowest number that is free, and so the next one
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
        try:
            with pytest.raises(Unavailable, match=r"Too many open files; allow more open files \(ulimit -n\)"):
                table.snapshot()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_forked_child_is_told_and_does_not_hang(tmp_path: Path) -> None:
    """rocksdict hangs in a child process; ours says so, whatever the child calls, and lets it end."""
    table = RocksDBStateTable(tmp_path / "t", SMALL)
    table.apply(changes(put(1, 0, b"a", b"", b"1")))
    told = os.pipe()
    child = os.fork()
    if child == 0:
        said = b""
        for call in (lambda: table.get_many(0, [1], [b"a"]), table.snapshot, lambda: table.apply(changes())):
            try:
                call()
            except Invalid as error:
                said += b"." if "fork" in str(error) else b"?"
        table.close()
        os.write(told[1], said)
        os._exit(0)
    os.close(told[1])
    with os.fdopen(told[0], "rb") as pipe:
        assert pipe.read() == b"..."
    assert os.waitpid(child, 0)[1] == 0
    assert table.get_many(0, [1], [b"a"]) == [b"1"]
    table.close()


def adopted(directory: Path, files: Path, key_groups: Iterable[int], options: RocksDBOptions) -> RocksDBStateTable:
    table = RocksDBStateTable(directory, options)
    try:
        table.adopt(files, list(key_groups))
    except BaseException:
        table.close()
        raise
    return table


def _large(table: RocksDBStateTable, first: int, count: int, tag: bytes) -> None:
    table.apply(changes(*[put(i % 8, 0, b"%08d" % i, b"", tag * 50) for i in range(first, first + count)]))


def test_only_new_files_need_to_be_uploaded(tmp_path: Path) -> None:
    """A small change to a large state names one small new file; known files keep size and checksum."""
    # All fits into one write buffer: files of several might be merged between the two snapshots.
    options = RocksDBOptions(block_cache_bytes=8 << 20, write_buffer_bytes=32 << 20)
    with closing(RocksDBStateTable(tmp_path / "t", options)) as table:
        _large(table, 0, 20_000, b"base")
        with closing(table.snapshot()) as first:
            base = {file.name: file for file in first.files() if file.id}
        _large(table, 0, 100, b"new!")
        with closing(table.snapshot()) as second:
            files = second.files()
            now = {file.name: file for file in files if file.id}
            new = [now[name] for name in now.keys() - base.keys()]
            assert len(new) == 1
            assert new[0].size * 10 < sum(file.size for file in base.values())
            assert all(now[name] == base[name] for name in base.keys() & now.keys())
            assert {file.name for file in files if not file.id} >= {"CURRENT"}
            assert all((second.path / file.name).stat().st_size == file.size for file in files)
            with pytest.raises(Closed):
                first.files()


def test_a_restored_table_goes_by_its_own_options_and_not_by_those_of_its_base(tmp_path: Path) -> None:
    """Before, whatever was set in ``RocksDBOptions`` for a restart was without effect on a table that was restored."""
    rows = [put(1, 0, b"%d" % n, b"", b"a" * 100) for n in range(5000)]
    with closing(RocksDBStateTable(tmp_path / "first", SMALL.model_copy(update={"compression": "none"}))) as first:
        first.apply(changes(*rows))
        with closing(first.snapshot()) as snapshot:
            plain = sum(file.size for file in snapshot.files())
            table = adopted(tmp_path / "second", snapshot.path, [1], SMALL.model_copy(update={"compression": "zstd"}))
    with closing(table):
        table.apply(changes(*(put(1, 1, b"%d" % n, b"", b"a" * 100) for n in range(5000))))
        with closing(table.snapshot()) as snapshot:
            assert sum(file.size for file in snapshot.files()) < 1.5 * plain


@pytest.mark.parametrize("damage", ["CURRENT", "MANIFEST", ".sst", "flip"])
def test_damaged_files_are_detected(tmp_path: Path, damage: str) -> None:
    downloaded = tmp_path / "downloaded"
    with closing(RocksDBStateTable(tmp_path / "t", SMALL)) as table:
        _large(table, 0, 5_000, b"base")
        with closing(table.snapshot()) as snapshot:
            shutil.copytree(snapshot.path, downloaded)
    if damage == "flip":
        victim = next(downloaded.glob("*.sst"))
        data = bytearray(victim.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 0x55
        victim.write_bytes(data)
    else:
        for victim in [path for path in downloaded.iterdir() if damage in path.name]:
            victim.unlink()
    with pytest.raises(CorruptData, match="restore"):  # noqa: SIM117
        with closing(adopted(tmp_path / "new", downloaded, range(8), SMALL)) as table:
            table.get_many(0, [i % 8 for i in range(5_000)], [b"%08d" % i for i in range(5_000)])


def test_staged_changes_wait_for_a_snapshots_files(tmp_path: Path) -> None:
    """A table adopts the files of another one's snapshot, and takes what was staged before as it does other changes."""
    with (
        closing(RocksDBStateTable(tmp_path / "t", SMALL)) as table,
        closing(RocksDBStateTable(tmp_path / "o")) as other,
    ):
        table.apply(changes(put(1, 0, b"a", b"", b"old"), put(2, 0, b"b", b"", b"2"), put(1, 0, b"c", b"", b"3")))
        with closing(table.snapshot()) as snapshot:
            assert all((snapshot.path / file.name).stat().st_size == file.size for file in snapshot.files())
            staged = other.stage([changes(put(1, 0, b"a", b"", b"new"), delete(1, 0, b"c"))])
            unused = other.stage([changes(put(1, 0, b"z", b"", b"never"))])
            assert staged is not None
            assert unused is not None
            other.adopt(snapshot.path, [1], snapshot.files(), snapshot.row_bytes)
            version = other.version(1)
            other.take(staged)
            unused.delete()
            unused.delete()
            other.resume_compaction()
            assert other.version(1) > version
            assert other.get_many(0, [1, 1, 2, 1], [b"a", b"c", b"b", b"z"]) == [b"new", None, None, None]
            with pytest.raises(Invalid):
                other.adopt(snapshot.path, [1])


def test_pages_out_of_order_are_refused_and_leave_the_key_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PAGE_ROWS", 1)
    with closing(RocksDBStateTable(tmp_path / "t", SMALL)) as table:
        table.apply(changes(put(1, 0, b"a", b"", b"1"), put(1, 0, b"b", b"", b"2")))
        with closing(table.snapshot()) as snapshot:
            pages = list(snapshot.entries(1))
            with pytest.raises(Invalid, match="out of order"):
                table.restore(1, reversed(pages))
            with pytest.raises(Invalid, match="out of order"):
                table.restore(1, [*pages, pages[-1]])
        assert table.get_many(0, [1, 1], [b"a", b"b"]) == [b"1", b"2"]


def test_a_table_is_closed_while_another_thread_prepares_a_snapshot(tmp_path: Path) -> None:
    """Prevents ``RuntimeError: Already borrowed`` when tables are replaced during a materialization."""
    ended: list[BaseException] = []

    def prepare(table: RocksDBStateTable, begun: threading.Event) -> None:
        begun.set()
        try:
            table.prepare_snapshot()
        except BaseException as error:
            ended.append(error)

    for run in range(8):
        table, begun = RocksDBStateTable(tmp_path / f"t{run}", SMALL), threading.Event()
        _large(table, 0, 3_000, b"x")
        thread = threading.Thread(target=prepare, args=(table, begun))
        thread.start()
        begun.wait(5)
        time.sleep(0.0005 * run)
        table.close()
        thread.join(10)
        assert all(isinstance(error, Closed) for error in ended)
        assert not (tmp_path / f"t{run}" / "db").exists()


def test_large_entries_are_looked_at_a_few_at_a_time(tmp_path: Path) -> None:
    """Five hundred of a megabyte each, read in one piece, would stall every batch for half a second."""
    with closing(open_table("rocksdb", tmp_path / "t", rocksdb=SMALL)) as table:
        table.apply(changes(*(put(1, 0, b"%d" % n, b"", b"dead" * 25_000) for n in range(20))))
        pieces = list(table.drop_expired(1, {0: lambda value: value.startswith(b"dead")}))
        assert sum(pieces) == 20
        assert max(pieces) <= 3
        assert table.scan(0, 1) == []


def test_memory_stays_within_the_options(tmp_path: Path) -> None:
    """Writes of many times the write buffer do not pile up in memory."""
    with closing(RocksDBStateTable(tmp_path / "t", SMALL)) as table:
        for turn in range(10):
            _large(table, turn * 2_000, 2_000, os.urandom(20))
        held = table._db.property_int_value("rocksdb.size-all-mem-tables")
        assert held <= SMALL.max_write_buffers * SMALL.write_buffer_bytes * 1.5


def test_tables_of_one_process_share_a_block_cache(tmp_path: Path) -> None:
    """One for each operator took 256 MiB of every one of them, and nobody could set less."""
    options = RocksDBOptions(block_cache_bytes=3 << 20, write_buffer_bytes=64 << 10, compression="none")
    with ExitStack() as stack:
        tables = [stack.enter_context(closing(RocksDBStateTable(tmp_path / f"{n}", options))) for n in range(3)]
        for table in tables:
            _large(table, 0, 5_000, os.urandom(40))
            table.snapshot().close()
            table.get_many(0, [1] * 625, [b"%08d" % n for n in range(1, 5_000, 8)])
        for _ in range(100):  # a compaction may change it between two looks
            held = {table._db.property_int_value("rocksdb.block-cache-usage") for table in tables}
            if len(held) == 1:
                break
        assert len(held) == 1, "each has its own"
        assert 1 << 20 < held.pop() <= options.block_cache_bytes * 1.1


def test_a_small_state_has_a_small_write_buffer() -> None:
    """Files in front of the merged ones are space: six of 32 MB made a state of 30 MB five times as large."""
    options = RocksDBOptions()
    sizes = [0, 1 << 20, 64 << 20, 128 << 20, 1 << 30, 1 << 40]
    assert [write_buffer_for(options, size) >> 20 for size in sizes] == [4, 4, 8, 16, 32, 32]
    assert write_buffer_for(RocksDBOptions(write_buffer_bytes=1 << 20), 1 << 40) == 1 << 20


@pytest.mark.parametrize(
    "name", [name for name, field in RocksDBOptions.model_fields.items() if field.annotation is int]
)
def test_an_option_that_rocksdb_does_not_take_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """It ended each TaskManager in turn, or the disk was to be looked at."""
    least, most = (each.ge if hasattr(each, "ge") else each.le for each in RocksDBOptions.model_fields[name].metadata)
    for way, value in ("least", least), ("most", most):
        options = RocksDBOptions.model_validate(SMALL.model_dump() | {name: value})
        with closing(open_table("rocksdb", tmp_path / way, rocksdb=options)) as table:
            table.apply(changes(put(1, 0, b"a", b"", b"1")))
            table.prepare_snapshot()
        for source in (
            ({f"DSTL_ROCKSDB_{name.upper()}": str(1 << 64)}, {}),
            ({}, {f"spark.dstl.rocksdb.{name}": 1 << 64}),
        ):
            with pytest.raises(Invalid, match=f"(?i){name}: input should be less than or equal to {most}"):
                resolve("rocksdb", RocksDBOptions, None, *source)
