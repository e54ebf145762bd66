"""The n-th call of the file system fails, for each n until there is no n-th: full disks and broken ones.

Or the power goes at that call, and what was not synced may be gone when the next driver starts. The scenario is three
checkpoints and more until a materialization is in one, a savepoint, a new driver that restores, and a batch. Requests
to a store and messages on sockets have the same loop in the simulation (``--enumerate``).
"""

import asyncio
import contextlib
import errno
import os
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dstl.checkpoint.savepoint.creation import create_savepoint
from dstl.checkpoint.upkeep.verification import verify_location, verify_savepoint
from dstl.errors import DstlError
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.runtime import system_runtime
from dstl.store import local
from dstl.store.local import LocalStore
from worlds.power_cut import Machine
from worlds.service import Driver, Model, apply, retained, state_of, without_empty

OPERATORS = {"counts": 2}
KEYS = [b"key-%d" % number for number in range(12)]
TRIES = 6
_CALLS = ("open", "write", "fsync", "link", "replace", "mkdir", "unlink", "pread", "stat", "fstat", "scandir", "utime")
WAYS = {"full": errno.ENOSPC, "broken": errno.EIO}


class FailingCalls:
    """The module ``os`` with one call that fails."""

    def __init__(self, nth: int, number: int) -> None:
        self.calls = 0
        self.failed = ""
        self._nth = nth
        self._errno = number
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CALLS:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
                fails = self.calls == self._nth
            if fails:
                self.failed = name
                raise OSError(self._errno, os.strerror(self._errno), "the test's")
            return real(*arguments, **named)

        return call


class EagerDriver(Driver):
    materialization = MaterializationOptions(
        interval_s=0.001,
        min_pause_s=0.0,
        min_log_bytes=0,
        backoff_base_s=0.01,
        tolerated_failures=99,
    )


class Life:
    """The scenario; whatever fails is tried again, as Spark and its user would."""

    def __init__(self, location: Path, seed: int) -> None:
        self.store = LocalStore(location)
        self.model: Model = {}
        self._seed = seed
        self._rng = random.Random(seed)
        self._runs = self._batch = 0
        self._at_work: dict[bytes, bytes] = {}

    def follow(self, other: "Life") -> None:
        """Go on behind what another has lived through; a batch that had not ended is run again, with the same rows."""
        self.model, self._batch, self._runs = other.model, other._batch, other._runs + 100
        self._at_work = other._at_work

    async def live(self) -> None:
        async with asyncio.timeout(60):
            await self._with_driver(self._first)
            await self._with_driver(self._second)
            await self.store.close()

    async def check(self, location: Path) -> None:
        store = LocalStore(location)
        newest = (await retained(store))[-1]
        assert without_empty(await state_of(newest, store)) == without_empty(self.model)
        found = await verify_location(store, system_runtime())
        assert found.problems == (), found.problems
        assert not (await verify_savepoint(store, system_runtime(), self.savepoint)).problems
        await store.close()

    async def _first(self, driver: Driver) -> None:
        for _ in range(3):
            await self._run_batch(driver)
        for _ in range(20):
            newest = (await self._again(lambda: retained(self.store)))[-1]
            if newest.materialized:
                break
            await self._run_batch(driver)
        assert newest.materialized

        async def save() -> None:
            self._runs += 1
            self.savepoint = f"saved-{self._runs}"
            await create_savepoint(self.store, self.store, system_runtime(), self.savepoint)

        await self._again(save)

    async def _second(self, driver: Driver) -> None:
        await self._run_batch(driver)

    async def _with_driver(self, work: Callable[[Driver], Awaitable[None]]) -> None:
        driver = EagerDriver(
            self.store,
            seed=self._seed + self._runs,
            operators=OPERATORS,
            checkpoints=CheckpointOptions(timeout_s=10.0, task_manager_timeout_s=10.0, clean_interval_s=0.0),
            inline_threshold=0,
        )
        try:
            await driver.start()
            await work(driver)
        finally:
            await driver.close()

    async def _run_batch(self, driver: Driver) -> None:
        written = self._at_work or {key: self._rng.randbytes(8) for key in self._rng.sample(KEYS, 6)}
        self._at_work = written

        async def run() -> None:
            self._runs += 1
            before = {uid: dict(values) for uid, values in self.model.items()}
            # Its commit may be there without anybody having heard of it.
            if await driver.next_batch(f"run-{self._runs}") == self._batch:
                await driver.run_batch(f"run-{self._runs}", self._batch, {"counts": written}, before)

        await self._again(run)
        apply(self.model.setdefault("counts", {}), written)
        self._batch += 1
        self._at_work = {}

    async def _again(self, work: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(TRIES - 1):
            try:
                return await work()
            except DstlError:
                continue
        return await work()


def live_through(directory: Path, nth: int, way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> FailingCalls:
    """Run the scenario with one call that fails, and look at what is left with a sound disk."""
    calls = FailingCalls(nth, WAYS[way])
    life = Life(directory, seed)
    with monkeypatch.context() as patched:
        patched.setattr(local, "os", calls)
        asyncio.run(life.live())
    asyncio.run(life.check(directory))
    return calls


def test_drawn_calls_fail(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    count = live_through(tmp_path / "sound", 1 << 30, "full", seed, monkeypatch).calls
    assert count > 200
    for number in range(4):
        nth, way = rng.randrange(1, count), rng.choice(list(WAYS))
        print(f"call {nth} of about {count}: {way}")
        live_through(tmp_path / str(number), nth, way, seed, monkeypatch)


def lose_power(directory: Path, nth: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Live until the power goes, and again from what is left: every batch that had ended is in the state."""
    machine, first = Machine(nth, seed), Life(directory, seed)

    async def until_the_cut() -> None:
        living = asyncio.ensure_future(first.live())
        while not living.done() and not machine.is_off:  # noqa: ASYNC110 - calls are made in threads
            await asyncio.sleep(0.001)
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError, DstlError):
            await living

    with monkeypatch.context() as patched:
        patched.setattr(local, "os", machine)
        asyncio.run(until_the_cut())
    machine.restart()
    again = Life(directory, seed + 1)
    again.follow(first)
    asyncio.run(again.live())
    asyncio.run(again.check(directory))
    return machine


def test_the_power_goes_at_a_drawn_call(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        nth, world = rng.randrange(1, 350), rng.randrange(1 << 20)
        print(f"the power goes at call {nth} of world {world}")
        assert lose_power(tmp_path / str(number), nth, world, monkeypatch).is_off


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_power_goes_at_every_call(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 0
    for nth in range(1, 20_000):
        machine = lose_power(tmp_path / str(nth), nth, seed + nth, monkeypatch)
        lost += machine.lost
        if not machine.is_off:
            break
    assert lost > nth


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", WAYS)
def test_every_call_fails(tmp_path: Path, seed: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: set[str] = set()
    for nth in range(1, 20_000):
        calls = live_through(tmp_path / str(nth), nth, way, seed, monkeypatch)
        if not calls.failed:
            break
        failed.add(calls.failed)
    assert nth > 200
    assert failed >= set(_CALLS) - {"replace"}, "the scenario does not make every call"
