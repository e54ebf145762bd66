"""Materialization under the real coordinator, over real sockets: batches, lost TaskManagers, rescaling, deletions."""

import asyncio
import itertools
import logging
import random

import pytest

import worlds.service
from dstl.options import MaterializationOptions
from dstl.runtime import SystemClock
from dstl.store.memory import MemoryStore
from handles.checkpoint import referenced_objects
from materializer.restore.progress import (
    LogLine,
    ProgressBar,
    RestoreProgress,
    RestoreStatus,
    combine,
    describe,
    record_progress,
)
from worlds.materialization import EAGER, World
from worlds.memory_recorder import MemoryRecorder
from worlds.service import TWO, Driver, Model, retained, some_events, state_of, without_empty
from worlds.waiting import until

AT_ONCE = MaterializationOptions(interval_s=1e-6, min_pause_s=0, file_bytes=1 << 16)


@pytest.fixture(autouse=True)
def _materializing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds.service.TaskManager, "materialization", AT_ONCE)


async def _check(store: MemoryStore, model: Model) -> None:
    found = await retained(store)
    assert without_empty(await state_of(found[-1], store)) == without_empty(model)
    names = {info.name async for info in store.list()}
    for checkpoint in found:
        assert set(referenced_objects(checkpoint)) <= names, "something that a retained checkpoint needs was deleted"


class SlowStore(MemoryStore):
    """Answers reads of bases and segments after a while, once it is told to; of bases perhaps never."""

    delay_s = 0.0
    bases = asyncio.Event()
    bases_read = 0

    async def get(self, name: str, *rest: object) -> bytes:
        if not name.startswith("manifests"):
            await asyncio.sleep(self.delay_s)
        if name.endswith(".base") and self.delay_s:
            self.bases_read += 1
            await self.bases.wait()
        return await super().get(name, *rest)  # type: ignore[arg-type]


async def test_a_task_manager_that_is_lost_half_loaded_is_replaced_and_nothing_is_missing(seed: int) -> None:
    """Batches whose keys are in the log go on without a base; another loss, and the run's end, find all as it was."""
    store, model, rng = SlowStore(clock=SystemClock()), {}, random.Random(seed)
    store.bases = asyncio.Event()
    async with Driver(store, seed=seed, operators=TWO, task_managers=2) as driver:
        for batch in range(12):
            await driver.run_batch("run", batch, some_events(rng, batch), model)
            await asyncio.sleep(0.01)
    bases = {handle.name for handle in (await retained(store))[-1].materialized}
    assert bases
    store.delay_s = 0.001
    logged = some_events(rng, 13, keys=5)
    async with Driver(store, seed=seed + 1, operators=TWO, task_managers=2) as driver:
        first = asyncio.ensure_future(driver.run_batch("run-2", 12, some_events(rng, 12), model))
        done, _ = await asyncio.wait([first], timeout=1.0)
        assert not done, "it did not wait for the bases that it reads"
        store.bases.set()
        await first
        store.bases.clear()
        for batch in range(13, 16):
            victim = sorted(set(driver.members) - set(driver.lost))[0]
            await driver.members[victim].kill()
            running = asyncio.ensure_future(driver.run_batch("run-2", batch, logged, model))
            # Half loaded, whether it waits for that or has found all of its keys in the log.
            await asyncio.wait([running], timeout=0.3)
            store.bases.set()
            await running
            store.bases.clear()
        assert store.bases_read
    store.delay_s = 0.0
    await _check(store, model)


async def test_the_driver_is_told_how_far_a_restore_has_come(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents that a long recovery looks like a hang."""
    monkeypatch.setattr("dstl.checkpoint.fleet.restore_watch._INTERVAL_S", 0.01)
    store, model, rng = SlowStore(clock=SystemClock()), {}, random.Random(seed)
    async with Driver(store, seed=seed, operators=TWO, task_managers=2) as driver:
        for batch in range(12):
            await driver.run_batch("run", batch, some_events(rng, batch), model)
            await asyncio.sleep(0.01)
    store.delay_s = 0.05
    told: list[RestoreStatus] = []

    def listen(status: RestoreStatus, /) -> None:
        told.append(status)
        raise RuntimeError("a listener's own fault")  # it must not harm the restore

    store.bases = asyncio.Event()
    # A run's end would wait for a materialization that is due, and that for the load.
    monkeypatch.setattr(worlds.service.TaskManager, "materialization", MaterializationOptions(enabled=False))
    async with Driver(store, seed=seed + 1, operators=TWO, task_managers=2, on_progress=listen) as driver:
        # A run that is stopped while its batch waits; the load goes on behind the next one.
        events = some_events(rng, 12)
        stopped = asyncio.ensure_future(driver.run_batch("run-2", 12, events, dict(model)))
        await until(lambda: told, "a restore")
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        running = asyncio.ensure_future(driver.run_batch("run-3", 12, events, model))
        await asyncio.wait([running], timeout=0.3)
        store.bases.set()
        await running
        await _check(store, model)
        await until(lambda: told[-1].finished, "its end")
        assert told[-1].done == told[-1].total > 0
        assert set(told[-1].operators) == set(TWO)
        assert any(not status.finished for status in told), "nobody was told before the end"
        assert [status.done for status in told] == sorted(status.done for status in told)
        report = driver.restores[0]
        assert report.bytes < told[-1].done, "the tables served before their bases had come"


def test_rate_and_time_to_go_follow_the_last_seconds() -> None:
    progress = RestoreProgress({"a": 1000, "b": 1000}, 100.0)
    assert progress.status(100.0) == RestoreStatus(0, 2000, 0.0, 0.0, None, {"a": (0, 1000), "b": (0, 1000)})
    progress.add("a", 100, 101.0)
    status = progress.status(101.0)
    assert (status.rate, status.eta_s) == (100.0, 19.0)
    for second in range(102, 130):
        progress.add("a" if second < 110 else "b", 30, float(second))
    status = progress.status(129.0)
    assert 29.0 <= status.rate <= 31.0
    assert status.operators["a"][0] == 340
    progress.more("b", 500)
    assert progress.status(129.0).total == 2500
    assert progress.status(130.0, finished=True).finished


def test_nothing_to_do_is_done() -> None:
    status = RestoreProgress({}, 0.0).status(1.0)
    assert status.eta_s == 0.0
    assert "100 %" in describe(status)


def test_a_line_comes_every_few_seconds_and_at_the_end_of_a_long_restore(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    line = LogLine()
    progress = RestoreProgress({"a": 100}, 0.0)
    for second in range(1, 13):
        progress.add("a", 8, float(second))
        line(progress.status(float(second)))
    line(progress.status(12.5, finished=True))
    lines = caplog.messages
    assert len(lines) == 3
    assert lines[0].startswith("restoring: ")
    assert "to go" in lines[0]
    assert lines[-1].startswith("restored: ")
    LogLine()(progress.status(1.0, finished=True))
    assert len(caplog.messages) == 3


def test_a_bar_shows_every_operator() -> None:
    progress = RestoreProgress({"a": 100, "b": 50}, 0.0)
    with ProgressBar() as bar:
        progress.add("a", 40, 1.0)
        bar(progress.status(1.0))
        bar(progress.status(2.0))
        assert [(task.description, task.completed, task.total) for task in bar._progress.tasks] == [
            ("a", 40, 100),
            ("b", 0, 50),
        ]


async def test_a_restore_reports_every_byte_it_expects(seed: int) -> None:
    async with World(seed, options=EAGER) as world:
        await world.batches(5, 40)
        seen: list[RestoreStatus] = []
        await world.content_of(world.newest, 1, seen.append)
        assert len(seen) > 2
        assert seen[-1].finished
        assert seen[-2].done == seen[-2].total == seen[-1].total > 0
        assert all(a.done <= b.done for a, b in itertools.pairwise(seen))
        assert set(seen[-1].operators) == {"left", "right"}


def test_several_restores_together_end_with_the_last() -> None:
    first = RestoreStatus(50, 100, 2.0, 25.0, 2.0, {"a": (50, 100)}, False)
    second = RestoreStatus(30, 60, 3.0, 10.0, 3.0, {"a": (10, 20), "b": (20, 40)}, False)
    both = combine([first, second])
    assert both == RestoreStatus(80, 160, 3.0, 35.0, 3.0, {"a": (60, 120), "b": (20, 40)}, False)
    unknown = RestoreStatus(0, 60, 0.1, 0.0, None, {"b": (0, 60)}, False)
    assert combine([first, unknown]).eta_s is None
    done = RestoreStatus(60, 60, 4.0, 15.0, 0.0, {"b": (60, 60)}, True)
    assert combine([first, done]).eta_s == 2.0
    assert combine([done, done]).finished


def test_progress_is_kept_as_gauges() -> None:
    recorder = MemoryRecorder()
    record_progress(recorder, RestoreStatus(50, 100, 2.0, 25.0, None, {}, False))
    assert recorder.gauges["restoredBytes"] == 50
    assert recorder.gauges["bytesToRestore"] == 100
    assert recorder.gauges["restoreEtaSeconds"] == -1
