"""The times of a batch: a watermark never falls, and a batch that runs again has the times that it had."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.state_catalogue import ExpectedOperator, StateCatalogue
from dstl.files import barriers
from dstl.files.options import FileOptions
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.messages import Begin, Begun, TaskAttempt
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint, OperatorEntry
from worlds.manifest_samples import checkpoint
from worlds.service import Driver, Events, Who, resolve_states, retained

DELAY_MS = 10
KEYS = [b"k%d" % i for i in range(8)]


def catalogue(*operators: str) -> StateCatalogue:
    made = StateCatalogue()
    for uid in operators:
        made.expect(ExpectedOperator(uid, 2, "string", resolve_states, DELAY_MS))
    made.open(None)
    return made


def child(parent: CompletedCheckpoint | None, entries: list[OperatorEntry], mark: int | None) -> CompletedCheckpoint:
    number = parent.checkpoint_id + 1 if parent else 1
    return checkpoint(number, number - 1).model_copy(update={"operators": tuple(entries), "watermark_ms": mark})


def test_a_new_operator_and_one_that_is_only_carried_along_leave_the_watermark_where_it_is() -> None:
    gone = OperatorEntry(uid="gone", parallelism=2, key_types="string", watermark_ms=5)
    known = OperatorEntry(uid="a", parallelism=2, key_types="string", watermark_ms=990)
    parent = child(None, [gone, known], 900)
    of = StateCatalogue(allow_non_restored_state=True)
    of.expect(ExpectedOperator("a", 2, "string", resolve_states, DELAY_MS))
    of.open(parent)
    assert of.entries({"a": 2000}, parent)[1] == 1990
    of.expect(ExpectedOperator("new", 2, "string", resolve_states, DELAY_MS))
    of.open(parent)
    assert of.entries({"a": 2000}, parent)[1] == 900


class Timed(Driver):
    """A driver whose operators have event time."""

    async def start(self) -> "Timed":
        for uid, parallelism in self.operators.items():
            self.service.expect(ExpectedOperator(uid, parallelism, "string", resolve_states, DELAY_MS))
        await self.service.start()
        await self._launch()
        return self

    async def batch(
        self, run: str, batch: int, written: Events, times: Mapping[str, int], *, commits: bool = True
    ) -> None:
        """Run a batch whose operators see these latest event times; the others have no row."""
        await self.plan(run, batch)
        for uid, parallelism in self.operators.items():
            for slot in range(parallelism):
                who = self.who(run, uid, batch, slot)
                async with self.attempt(who, written.get(uid, {}), {}) as attempt:
                    await attempt.acknowledge(partition=slot, event_time_ms=times.get(uid) if slot == 0 else None)
        if commits:
            await self.commit(run, batch)

    async def begun(self, who: Who) -> Begun:
        """Return what a task is told."""
        await self.plan(who.run, who.batch)
        connection = await AsyncConnection.open(self.service.address, self.secret)
        try:
            return await connection.call(Begin(who.task, pid=1))
        finally:
            connection.close()


async def test_watermarks_never_fall_over_batches_and_restarts(rng: random.Random) -> None:
    store = MemoryStore()
    operators = {"a": 2, "b": 1}
    latest, of_all, before = {"a": 0, "b": 0}, 0, 0
    driver: Timed | None = None
    for batch in range(12):
        if driver is None or rng.random() < 0.3:
            if driver is not None:
                await driver.close()
            driver = await Timed(store, seed=batch + 1, operators=operators).start()
            run = f"run-{batch}"
        begun = await driver.begun(driver.who(run, "a", batch, 0))
        if batch:
            assert (begun.watermark_ms, begun.late_watermark_ms or 0) == (of_all, before)
        times = {uid: rng.randrange(1, 2000) for uid in operators if rng.random() < 0.6}
        await driver.batch(run, batch, {}, times)
        latest |= {uid: max(latest[uid], at - DELAY_MS) for uid, at in times.items()}
        of_all, before = max(of_all, *[min(latest.values())]), of_all
        (*_, newest) = await retained(store)
        assert newest.watermark_ms == of_all
        assert {e.uid: e.watermark_ms for e in newest.operators} == latest
    assert driver is not None
    await driver.close()


async def test_a_batch_runs_again_with_the_times_and_the_sequence_that_it_had() -> None:
    store = MemoryStore()
    driver = await Timed(store, seed=1, operators={"a": 2}).start()
    await driver.batch("run-1", 0, {"a": {KEYS[0]: b"0"}}, {"a": 500})
    first = await driver.begun(driver.who("run-1", "a", 1, 0))
    await driver.batch("run-1", 1, {"a": {KEYS[1]: b"1"}}, {"a": 700}, commits=False)
    same = ("parent", "watermark_ms", "late_watermark_ms", "sequence", "processing_time_ms")
    # A second action of the batch.
    await asyncio.sleep(0.005)
    again = await driver.begun(driver.who("run-1", "a", 1, 0, stage=2))
    assert [getattr(again, name) for name in same] == [getattr(first, name) for name in same]
    await driver.close()
    # The sink has the batch, and Spark runs it again in another process, twice.
    for number in (2, 3):
        driver = await Timed(store, seed=number, operators={"a": 2}).start()
        replayed = await driver.begun(driver.who(f"run-{number}", "a", 1, 0))
        assert [getattr(replayed, name) for name in same] == [getattr(first, name) for name in same]
        await driver.batch(f"run-{number}", 1, {"a": {KEYS[1]: b"1"}}, {"a": 700}, commits=number == 3)
        if number == 3:
            following = await driver.begun(driver.who(f"run-{number}", "a", 2, 0))
            assert following.sequence > first.sequence
            assert following.processing_time_ms > first.processing_time_ms
        await driver.close()


async def test_late_rows_are_in_the_report_of_their_batch_by_operator() -> None:
    driver = await Timed(MemoryStore(), seed=1, operators={"a": 2, "b": 1}).start()
    for uid, slot, late in (("a", 0, 3), ("a", 1, 4), ("a", 0, 3), ("b", 0, 0)):
        async with driver.attempt(driver.who("run-1", uid, 0, slot), {}, {}) as attempt:
            await attempt.acknowledge(partition=slot, late_rows=late)
    await driver.commit("run-1", 0)
    assert [report.late_rows for report in driver.checkpoints] == [{"a": 7}]
    await driver.batch("run-1", 1, {}, {})
    assert driver.checkpoints[-1].late_rows == {}
    await driver.close()


async def test_an_attempt_that_ends_behind_spark_s_commit_has_no_part_in_the_watermark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents that changes of one attempt go with the times of another while their record waits for offsets."""
    monkeypatch.setattr(barriers, "LINGER_S", 60.0)
    store, files = MemoryStore(), FileOptions(commit="with-next")
    driver = await Timed(store, seed=1, operators={"a": 2}, files=files).start()
    await driver.plan("run-1", 0)
    copy = replace(driver.who("run-1", "a", 0, 0), attempt=1_000)
    async with driver.attempt(copy, {}, {}) as attempt:
        await driver.batch("run-1", 0, {}, {"a": 500})
        assert await retained(store) == []
        await attempt.acknowledge(partition=0, event_time_ms=9_000, late_rows=5)
    await driver.directory.settle()
    (completed,) = await retained(store)
    assert [each.watermark_ms for each in completed.operators] == [500 - DELAY_MS]
    assert [report.late_rows for report in driver.checkpoints] == [{}]
    await driver.close()


def task(batch: int, run: str = "run") -> TaskAttempt:
    return TaskAttempt("query", run, "op", batch, 0, 1, batch)


HOLD_MS = 300_000


def opened(*completed: CompletedCheckpoint, hold_ms: int = HOLD_MS) -> CheckpointCoordinator:
    made = CheckpointCoordinator({"op": 1}, clock_hold_ms=hold_ms)
    made.open_run("run", completed)
    return made


def ran_at(now_ms: int, parent: CompletedCheckpoint, hold_ms: int = HOLD_MS) -> tuple[CompletedCheckpoint, str | None]:
    """Return the next batch's checkpoint, by a driver whose clock says this, and what it warned of."""
    coordinator = opened(parent, hold_ms=hold_ms)
    coordinator.begin(task(parent.batch_id + 1), now_ms)
    time, number = coordinator.batch_time, parent.checkpoint_id + 1
    times = {"batch_time_ms": time.ms, "held_since_ms": time.held_since_ms}
    return checkpoint(number, parent.batch_id + 1).model_copy(update=times), coordinator.take_clock_warning()


def test_a_clock_that_was_a_year_ahead_once_does_not_stop_time() -> None:
    year, minute = 365 * 86_400_000, 60_000
    at, warnings = checkpoint(1, 0).model_copy(update={"batch_time_ms": 10_000 + year}), []
    times = []
    for now in range(10_000 + minute, 10_000 + 9 * minute, minute):
        at, warning = ran_at(now, at)
        times.append(at.batch_time_ms)
        warnings += [warning] if warning else []
    held = [10_000 + year] * 5
    assert times == [*held, *range(10_000 + 6 * minute, 10_000 + 9 * minute, minute)]
    (warning,) = warnings
    for each in ("1970-01-01 00:01:10", "1971-01-01 00:00:10", "1970-01-01 00:06:10", "clock_hold_s=0"):
        assert each in warning


def test_a_clock_that_is_behind_for_a_moment_takes_no_time_back() -> None:
    parent = checkpoint(1, 0).model_copy(update={"batch_time_ms": 5000})
    held, _ = ran_at(4000, parent)
    assert (held.batch_time_ms, held.held_since_ms) == (5000, 4000)
    after, warning = ran_at(6000, held)
    assert (after.batch_time_ms, after.held_since_ms, warning) == (6000, None, None)


def test_without_a_hold_the_clock_is_followed_at_once() -> None:
    parent = checkpoint(1, 0).model_copy(update={"batch_time_ms": 5000})
    after, warning = ran_at(4000, parent, hold_ms=0)
    assert (after.batch_time_ms, after.held_since_ms) == (4000, None)
    assert warning is not None
    assert "goes back with the clock" in warning


def test_a_checkpoint_of_unknown_time_leaves_the_clock() -> None:
    coordinator = opened(checkpoint(1, 0))
    coordinator.begin(task(1), now_ms=4000)
    assert coordinator.batch_time.ms == 4000


async def test_sequences_grow_over_what_was_numbered_by_the_log() -> None:
    """Until now a batch was numbered by the log's next record, which lies at or below its own checkpoint's number."""
    store = MemoryStore()
    driver = await Timed(store, seed=1, operators={"a": 1}).start()
    seen = [(await driver.begun(driver.who("run-1", "a", 0, 0))).sequence]
    for batch in range(4):
        await driver.batch("run-1", batch, {"a": {KEYS[batch]: b""}}, {})
        newest = (await retained(store))[-1]
        seen.append((await driver.begun(driver.who("run-1", "a", batch + 1, 0))).sequence)
        assert seen[-1] > newest.checkpoint_id >= seen[-2]
        if batch == 1:
            await driver.close()
            driver = await Timed(store, seed=2, operators={"a": 1}).start()
            seen.append((await driver.begun(driver.who("run-1", "a", batch + 1, 0))).sequence)
    await driver.close()
