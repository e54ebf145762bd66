"""What only a file system does: syncs, links, permissions, processes that die in the middle."""

import asyncio
import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dstl.errors import AccessDenied, DstlError, Invalid, ObjectExists, ObjectNotFound, OutcomeUnknown, Unavailable
from dstl.store import LocalStore, ObjectStore, local
from worlds.power_cut import Machine
from worlds.store_contract import StoreContract


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(root)


def _temporaries(root: Path) -> list[str]:
    return os.listdir(root / ".dstl-tmp")


async def test_a_power_cut_after_put_takes_nothing_back(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RocksDB #10573: the file was synced and its directory entry was not.
    events: list[tuple[str, int]] = []
    sync, link = os.fsync, os.link

    def recorded_sync(descriptor: int) -> None:
        sync(descriptor)
        events.append(("sync", os.fstat(descriptor).st_ino))

    def recorded_link(*args: Any, **settings: Any) -> None:
        link(*args, **settings)
        events.append(("link", 0))

    monkeypatch.setattr(os, "fsync", recorded_sync)
    monkeypatch.setattr(os, "link", recorded_link)
    await store.put("a/b/c", b"x", if_absent=True)
    inode = {path: os.stat(path).st_ino for path in (root.parent.parent, root.parent, root, root / "a", root / "a/b")}
    file_synced = events.index(("sync", os.stat(root / "a/b/c").st_ino))
    linked = events.index(("link", 0))
    entry_synced = events.index(("sync", inode[root / "a/b"]))
    assert file_synced < linked < entry_synced
    for made_in in (root.parent.parent, root.parent, root, root / "a"):
        assert ("sync", inode[made_in]) in events[:linked]
    events.clear()
    await store.put("a/b/d", b"x", if_absent=True)
    assert [kind for kind, _ in events] == ["sync", "link", "sync"]


async def test_files_and_directories_are_private(store: LocalStore, root: Path) -> None:
    old = os.umask(0)
    try:
        await store.put("a/b", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(root / "a/b").st_mode) == 0o600
    for directory in (root, root / "a", root / ".dstl-tmp"):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700


async def test_what_dead_writers_left_is_swept_and_the_living_are_not(store: LocalStore, root: Path) -> None:
    await store.put("a", b"x")
    for name, age_s in (("put-dead", 25 * 3600), ("put-alive", 3600)):
        path = root / ".dstl-tmp" / name
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age_s,) * 2)
    await store.put("b", b"x")
    assert sorted(_temporaries(root)) == ["put-alive", "put-dead"]  # once per store, at its first put
    await LocalStore(root).put("c", b"x")
    assert _temporaries(root) == ["put-alive"]


def _failing(error: int, times: int = 1) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize(
    ("call", "error", "expected", "says"),
    [
        ("write", errno.ENOSPC, Unavailable, "free some space"),
        ("write", errno.EDQUOT, Unavailable, "free some space"),
        ("fsync", errno.EIO, Unavailable, "Input/output error"),
        ("link", errno.EPERM, Invalid, "no hard links"),
        ("link", errno.EXDEV, Invalid, "another directory"),
        ("fsync", errno.EOPNOTSUPP, Invalid, "another directory"),
        ("link", errno.EROFS, AccessDenied, "read and write"),
        ("mkdir", errno.EACCES, AccessDenied, "read and write"),
        ("open", errno.EMFILE, Unavailable, "Too many open files"),
    ],
)
async def test_faults_before_the_name_are_certain_and_leave_nothing(
    store: LocalStore,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    error: int,
    expected: type[Exception],
    says: str,
) -> None:
    await store.put("before", b"x")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, _failing(error))
        with pytest.raises(expected, match=says) as caught:
            await store.put("d/after", b"x", if_absent=True)
    assert str(root) in str(caught.value)
    assert [info.name async for info in store.list()] == ["before"]
    assert _temporaries(root) == []
    await store.put("d/after", b"x", if_absent=True)


async def test_a_directory_that_cannot_be_synced_makes_the_outcome_unknown(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("d/before", b"x")
    folder = os.stat(root / "d").st_ino
    sync = os.fsync

    def fail_for_folder(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == folder:
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_for_folder)
    with pytest.raises(OutcomeUnknown, match="d/after"):
        await store.put("d/after", b"x", if_absent=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_access_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(AccessDenied, match="read and write"):
            asyncio.run(LocalStore(tmp_path).put("a", b"x"))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="Linux")
async def test_a_place_where_even_root_may_not_write_is_access_denied() -> None:
    with pytest.raises(AccessDenied, match="/sys/kernel/dstl"):
        await LocalStore("/sys/kernel/dstl").put("a", b"x")


async def test_a_location_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(Invalid):
            await LocalStore(place).put("a", b"x")
    assert (tmp_path / "file").read_bytes() == b"mine"


async def test_links_never_lead_out_of_the_location(store: LocalStore, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"not yours")
    await store.put("here", b"x")
    (root / "shard").symlink_to(outside, target_is_directory=True)
    (root / "leaf").symlink_to(outside / "secret")
    for name in ("shard/secret", "leaf"):
        with pytest.raises(ObjectNotFound):
            await store.get(name)
        with pytest.raises(ObjectNotFound):
            await store.head(name)
    with pytest.raises(Invalid):
        await store.put("shard/new", b"x")
    with pytest.raises(ObjectExists):
        await store.put("leaf", b"x", if_absent=True)
    await store.put("leaf", b"replaces the link itself")
    await store.delete(["shard/secret", "leaf"])
    assert [info.name async for info in store.list()] == ["here"]
    assert (outside / "secret").read_bytes() == b"not yours"
    assert os.listdir(outside) == ["secret"]


async def test_a_pipe_in_place_of_an_object_does_not_hang(store: LocalStore, root: Path) -> None:
    await store.put("a", b"x")
    os.mkfifo(root / "pipe")
    with pytest.raises(ObjectNotFound):
        await asyncio.wait_for(store.get("pipe"), 5)
    assert [info.name async for info in store.list()] == ["a"]


async def test_files_of_others_are_not_listed(store: LocalStore, root: Path) -> None:
    await store.put("a", b"x")
    for name in (".hidden", "with space", "back~", "ä", "trailing."):
        (root / name).write_bytes(b"")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_bytes(b"")
    assert [info.name async for info in store.list()] == ["a"]


async def test_a_name_and_a_directory_of_that_name_exclude_each_other(store: LocalStore) -> None:
    await store.put("a/b", b"x")
    for if_absent in (True, False):
        with pytest.raises(Invalid):
            await store.put("a", b"x", if_absent=if_absent)
        with pytest.raises(Invalid):
            await store.put("a/b/c", b"x", if_absent=if_absent)
    await store.delete(["a/b/c"])
    assert await store.get("a/b") == b"x"


async def test_a_store_whose_directory_was_removed_recovers(store: LocalStore, root: Path) -> None:
    await store.put("a/b", b"x")
    shutil.rmtree(root)
    assert not [info async for info in store.list()]
    with pytest.raises(Unavailable):
        await store.put("a/b", b"x", if_absent=True)
    await store.put("a/b", b"x", if_absent=True)


async def test_reading_makes_no_directory(store: LocalStore, root: Path) -> None:
    assert not [info async for info in store.list()]
    await store.delete(["a"])
    with pytest.raises(ObjectNotFound):
        await store.get("a")
    assert not os.listdir(root.parent.parent)


_RACER = """
import asyncio, sys
from dstl.store import LocalStore
from dstl.errors import ObjectExists

async def race(root, me, names):
    store, won = LocalStore(root), 0
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(names):
        try:
            await store.put(f"race/{number}", f"{me}".encode() * 1000, if_absent=True)
            won += 1
        except ObjectExists:
            pass
    print(won, flush=True)

asyncio.run(race(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def test_processes_that_race_share_the_names_among_them(root: Path) -> None:
    names = 100
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(root), str(me), str(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(won) == names
    held = [(root / "race" / str(number)).read_bytes() for number in range(names)]
    assert all(body == body[:1] * 1000 for body in held)
    assert won == [sum(body[:1] == str(me).encode() for body in held) for me in range(3)]


class TestLocalStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[ObjectStore]:
        store = LocalStore(tmp_path / "not" / "yet" / "there")
        yield store
        await store.close()


NAMES = [f"{folder}/{number}" for folder in ("manifests", "ab/query/writer", "savepoints/x") for number in range(4)]


def body(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([1, 100, 70_000]))


async def work(store: LocalStore, rng: random.Random) -> dict[str, set[bytes | None]]:
    """Put and delete until the power goes; return what each object may be afterwards."""
    may_be: dict[str, set[bytes | None]] = defaultdict(lambda: {None})
    for _ in range(40):
        name, data, kind = rng.choice(NAMES), body(rng), rng.random()
        before = may_be[name]
        try:
            if kind < 0.6:
                # Until it is said to be stored, it may be there or not.
                may_be[name] = before | {data}
                await store.put(name, data, if_absent=True)
                may_be[name] = {data}
            elif kind < 0.8:
                may_be[name] = before | {data}
                await store.put(name, data)
                may_be[name] = {data}
            else:
                may_be[name] = before | {None}
                await store.delete([name])
                may_be[name] = {None}
        except ObjectExists:
            may_be[name] = before
        except DstlError:
            break
    return may_be


async def found(directory: Path, name: str) -> bytes | None:
    try:
        return await LocalStore(directory).get(name)
    except ObjectNotFound:
        return None


def lose_power(directory: Path, nth: int, seed: int, monkeypatch: pytest.MonkeyPatch, *, lying: bool = False) -> bool:
    """Return whether everything is as it may be."""
    machine = Machine(nth, seed, lying=lying)
    with monkeypatch.context() as patched:
        patched.setattr(local, "os", machine)
        may_be = asyncio.run(work(LocalStore(directory), random.Random(seed)))
    machine.restart()
    return all(asyncio.run(found(directory, name)) in allowed for name, allowed in may_be.items())


def test_a_power_cut_loses_nothing_that_was_said_to_be_stored(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        nth, world = rng.randrange(1, 400), rng.randrange(1 << 32)
        assert lose_power(tmp_path / str(number), nth, world, monkeypatch), f"call {nth} of world {world}"


def test_a_disk_that_lies_about_its_directories_is_found_out(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    sound = [lose_power(tmp_path / str(n), 300, seed + n, monkeypatch, lying=True) for n in range(10)]
    assert not all(sound)
