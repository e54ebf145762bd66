"""The host's cache of bases: used only when it is right, bounded, shared, and never needed."""

import asyncio
import os
import time
from pathlib import Path

import google_crc32c
import pytest

from dstl.options import MaterializationOptions
from materializer.bases.base_cache import BaseCache
from materializer.bases.table_directory import FileBases
from worlds.materialization import EAGER, World
from worlds.memory_recorder import MemoryRecorder
from worlds.restored import restore_tables

DATA = os.urandom(5000)
CRC = google_crc32c.value(DATA)


def cache_in(directory: Path, *, max_bytes: int = 1 << 20, location: str = "s3://b", age: float = 1e6) -> BaseCache:
    return BaseCache(directory, location, max_bytes=max_bytes, max_age_s=age, recorder=MemoryRecorder())


def held(cache: BaseCache, name: str, data: bytes = DATA) -> bool:
    found = cache.open(name, len(data), google_crc32c.value(data))
    if found is None:
        return False
    assert found.read() == data
    assert found.read(10, 20) == data[10:20]
    found.close()
    return True


def test_what_was_put_is_found_by_another_process_of_the_same_location_only(tmp_path: Path) -> None:
    cache_in(tmp_path / "c").put("a/b", DATA)
    assert held(cache_in(tmp_path / "c"), "a/b")
    assert not held(cache_in(tmp_path / "c"), "a/c")
    assert not held(cache_in(tmp_path / "c", location="s3://other"), "a/b")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_a_damaged_file_is_not_returned_and_is_deleted(tmp_path: Path, damage: str) -> None:
    cache = cache_in(tmp_path / "c")
    cache.put("n", DATA)
    (file,) = (tmp_path / "c").iterdir()
    damaged = bytearray(DATA)
    damaged[1234] ^= 16
    file.write_bytes({"flip": bytes(damaged), "cut": DATA[:-1], "longer": DATA + b"x", "empty": b""}[damage])
    assert not held(cache, "n")
    assert list((tmp_path / "c").iterdir()) == []
    cache.put("n", DATA)
    assert held(cache, "n")


def test_the_least_recently_used_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "c", max_bytes=3 * len(DATA))
    for at, name in enumerate("abc"):
        cache.put(name, DATA)
        os.utime(cache._path(name), (time.time() - 100 + at,) * 2)
    assert held(cache, "a")  # used now
    cache.put("d", DATA)
    assert [name for name in "abcd" if held(cache, name)] == ["a", "c", "d"]
    cache.put("too large", bytes(4 * len(DATA)))
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) <= 3 * len(DATA)
    assert held(cache, "d")


def test_what_nobody_used_for_long_goes_and_so_does_what_a_crash_left(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "c", age=100.0)
    cache.put("old", DATA)
    left = cache.aside("half")
    left.write_bytes(b"half")
    for path in (tmp_path / "c").iterdir():
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    cache_in(tmp_path / "c", age=100.0).put("new", DATA)
    assert len(list((tmp_path / "c").iterdir())) == 1


@pytest.mark.parametrize("wrong", ["mode", "link", "file"])
def test_a_directory_that_others_could_have_made_is_not_used(tmp_path: Path, wrong: str) -> None:
    place = tmp_path / "c"
    if wrong == "mode":
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    elif wrong == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.write_text("in the way")
    cache = cache_in(place)
    cache.put("n", DATA)
    assert not held(cache, "n")
    assert cache.fill("n", len(DATA), CRC) is None


def test_pieces_in_any_order_are_kept_once_they_are_the_whole(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "c")
    fill = cache.fill("n", len(DATA), CRC)
    assert fill is not None
    fill.add(3000, DATA[3000:])
    assert not held(cache, "n")
    fill.add(0, DATA[:3000])
    fill.close()
    assert held(cache, "n")
    wrong = cache.fill("m", len(DATA), CRC)
    assert wrong is not None
    wrong.add(0, DATA[:-1] + bytes([DATA[-1] ^ 1]))
    unfinished = cache.fill("k", len(DATA), CRC)
    assert unfinished is not None
    unfinished.add(0, DATA[:10])
    unfinished.close()
    assert not held(cache, "m")
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_what_the_cache_has_not_written_stays(tmp_path: Path) -> None:
    """The directory may be anyone's choice: a home directory, with theses and keys in it."""
    options = MaterializationOptions(cache_directory=str(tmp_path), cache_bytes=2 * len(DATA), cache_max_age_s=60)
    (tmp_path / "dstl-bases").mkdir(0o700)
    others = [
        folder / name for folder in (tmp_path, tmp_path / "dstl-bases") for name in ("thesis.tex", "a" * 40 + ".x")
    ]
    for path in others:
        path.write_bytes(DATA * 3)
        os.utime(path, (1, 1))
    cache = BaseCache.of(options, "s3://b")
    assert cache is not None
    for name in "abc":
        cache.put(name, DATA)
    assert [held(cache, name) for name in "abc"] == [False, True, True]
    assert all(path.read_bytes() == DATA * 3 for path in others)


def test_a_file_may_go_while_it_is_read_or_linked(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "c")
    cache.put("n", DATA)
    found = cache.open("n", len(DATA), CRC)
    assert found is not None
    found.path.unlink()
    assert found.read() == DATA
    assert not found.link(tmp_path / "linked")
    found.path.write_bytes(b"another")
    assert not found.link(tmp_path / "linked")
    assert not (tmp_path / "linked").exists()
    found.close()


def test_only_state_behind_a_network_is_cached_unless_a_directory_is_named() -> None:
    default = MaterializationOptions()
    assert BaseCache.of(default, "s3://bucket/job") is not None
    assert BaseCache.of(default, "/a/directory") is None
    assert BaseCache.of(default.model_copy(update={"cache_directory": "/x"}), "/a/directory") is not None
    assert BaseCache.of(default.model_copy(update={"cache_bytes": 0}), "s3://bucket/job") is None


@pytest.mark.parametrize("table", ["heap", "rocksdb"])
@pytest.mark.parametrize("damaged", [False, True])
async def test_a_restart_on_the_host_reads_no_base_from_the_store(
    seed: int, tmp_path: Path, table: str, damaged: bool
) -> None:
    """And reads it from there again where the cache is damaged."""
    options = EAGER.model_copy(update={"cache_directory": str(tmp_path / "cache")})
    async with World(seed, options=options, table=table, directory=tmp_path / "tables", partitions=1) as world:
        await world.batches(4, 60)
        newest = world.newest
        names = {name for handle in newest.materialized for name in handle.objects()}
        files = list((tmp_path / "cache" / "dstl-bases").iterdir())
        assert len(files) >= len({name for handle in newest.materialized for name in handle.objects()}) / 2
        if damaged:
            for path in files:
                data = path.read_bytes()
                path.unlink()
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        fetched: list[str] = []
        get = world.memory.get

        async def counted(name: str, *rest: object) -> bytes:
            fetched.append(name)
            return await get(name, *rest)  # type: ignore[arg-type]

        world.memory.get = counted  # type: ignore[method-assign]
        cache = world.members[0].backend.tracker.cache
        assert cache is not None
        for attempt in range(2):
            fetched.clear()
            async with FileBases(world.memory, world.runtime, cache) as files:
                restored = await restore_tables(
                    newest, world.memory, world.members[0].owned, world.open_table, world.runtime, files=files
                )
            await asyncio.sleep(0)
            for each in restored.tables.values():
                each.close()
            indexes = {handle.name for handle in newest.materialized if handle.files}
            from_store = set(fetched) & names - indexes
            assert bool(from_store) == (damaged and attempt == 0)
        await world.check(newest)
