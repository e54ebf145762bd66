"""What the local store has said is stored survives a power cut, and nothing has its name by halves."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest

from dstl.errors import DstlError, ObjectExists, ObjectNotFound
from dstl.store import local
from dstl.store.local import LocalStore
from worlds.power_cut import Machine

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
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    for number in range(20):
        nth, world = rng.randrange(1, 400), rng.randrange(1 << 32)
        assert lose_power(tmp_path / str(number), nth, world, monkeypatch), f"call {nth} of world {world}"


def test_a_disk_that_lies_about_its_directories_is_found_out(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    sound = [lose_power(tmp_path / str(n), 300, seed + n, monkeypatch, lying=True) for n in range(10)]
    assert not all(sound)
