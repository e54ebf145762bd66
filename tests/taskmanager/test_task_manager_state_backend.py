"""The state of one TaskManager: what is pending, what counts, what is dropped; and a machine with a model of it."""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dstl.changelog import segments_in_flight
from dstl.changelog.segment import encoder
from dstl.errors import DstlError, Fenced, Invalid, Unavailable
from dstl.taskmanager import reads
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange
from tests.simulation.virtual_time import VirtualTimeLoop, virtual
from worlds.backend import (
    PARALLELISM,
    STATE,
    BackendWorld,
    Model,
    Task,
    after,
    content,
    groups_of,
    key_of,
    rows,
    winners_of,
)
from worlds.restored import restore_tables
from worlds.table_changes import changes, clear, delete, put


@asynccontextmanager
async def world(**batching: object) -> AsyncIterator[BackendWorld]:
    each = BackendWorld(1, **batching)
    try:
        yield each
    finally:
        await each.close()


@pytest.mark.parametrize("counts", ["first to end", "last to end", "one that goes on"])
@virtual
async def test_the_first_attempt_that_ends_is_encoded_before_its_checkpoint_whichever_counts(
    counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_in_flight, "ENCODED_AHEAD_BYTES", 0)
    runs: list[int] = []
    encode_run = encoder._encode_run
    monkeypatch.setattr(encoder, "_encode_run", lambda run, level: runs.append(len(run)) or encode_run(run, level))
    async with world() as w:
        parent: CompletedCheckpoint | None = None
        for batch in range(3):
            first, last = w.open("a", 0, batch, parent), w.open("a", 0, batch, parent)
            for task in (first, last):
                w.write(task, [(key_of(1, 1), b"%d/%d" % (task.attempt, batch))])
            for task in (first, last):
                w.backend.end_changes(task.key)
            assert len(runs) == 1, "Spark keeps one of two copies: the other's work is for nothing"
            winner = last if counts == "last to end" else first
            if counts == "one that goes on":
                w.write(first, [(key_of(1, 2), b"more")])
            parent = await w.checkpoint([winner], batch, parent)
            assert await w.restored(parent) == after({}, [winner])
            assert len(runs) == (1 if counts == "first to end" else 2), "what was encoded is not encoded again"
            runs.clear()


@virtual
async def test_nothing_at_work_is_ended_by_the_checkpoint_of_its_batch() -> None:
    """A second action, or a stage retry: each acknowledgement that made the checkpoint again ended all others."""
    async with world() as w:
        first = [w.open("b", p, 0, None) for p in range(4)]
        again = [w.open("b", p, 0, None) for p in range(4)]
        for task in (*first, *again):
            w.write(task, [(key_of(groups_of("b", task.partition)[0], 1), b"equal")])
        await w.checkpoint(first, 0, None)
        for task in again:
            w.backend.check_attempt(task.key)
        # What was acknowledged is there for another checkpoint of the batch, in any mixture.
        mixed = await w.checkpoint([first[0], again[1], first[2], again[3]], 0, None)
        assert await w.restored(mixed) == after({}, first)
        w.open("b", 0, 1, mixed)
        for task in (*first, *again):
            with pytest.raises(Fenced, match="is over"):
                w.backend.check_attempt(task.key)


@virtual
async def test_a_lookup_sees_each_change_of_a_committed_batch_and_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key, other = key_of(1, 1), key_of(1, 2)
    async with world() as w:

        def found(checkpoint: CompletedCheckpoint | None) -> dict[bytes, bytes]:
            number = checkpoint.checkpoint_id if checkpoint else None
            return w.backend.look_up(number, "a", STATE, 1, key)

        tasks = [w.open("a", 0, 0, None), w.open("b", 0, 0, None)]
        for task, value in zip(tasks, (b"0", b"of another operator"), strict=True):
            batch = changes(*(put(1, STATE, key, user_key, value) for user_key in (b"u", b"v", b"w")))
            w.backend.write(task.key, 0, batch, b"{}")
        assert found(None) == {}
        first = await w.checkpoint(tasks, 0, None)
        assert (found(first), found(None)) == ({b"u": b"0", b"v": b"0", b"w": b"0"}, {})
        task, copy = w.open("a", 0, 1, first), w.open("a", 0, 1, first)
        w.backend.write(
            task.key,
            0,
            changes(delete(1, STATE, key, b"u"), put(1, STATE, key, b"v", b"1"), put(1, STATE, other, b"v", b"2")),
            b"{}",
        )
        w.backend.write(copy.key, 0, changes(clear(1, STATE, key)), b"{}")
        assert found(first) == {b"u": b"0", b"v": b"0", b"w": b"0"}
        second = await w.checkpoint([task], 1, first)
        assert (found(second), len(found(first))) == ({b"v": b"1", b"w": b"0"}, 3)
        last = w.open("a", 0, 2, second)
        w.backend.write(last.key, 0, changes(clear(1, STATE, key), put(1, STATE, key, b"x", b"3")), b"{}")
        third = await w.checkpoint([last], 2, second)
        assert (found(third), len(found(second))) == ({b"x": b"3"}, 2)
        with pytest.raises(Unavailable, match=f"of checkpoint {third.checkpoint_id}, not key group 1 of"):
            found(first)
        monkeypatch.setattr(reads, "REPLY_BYTES", 2)
        with pytest.raises(Invalid, match="the most that a lookup returns"):
            found(second)


@virtual
async def test_a_persisted_attempt_takes_nothing_more() -> None:
    """What came after would be in the tables and in no checkpoint, and leave a gap in the log."""
    async with world() as w:
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"in time")])
        first = await w.checkpoint([task], 0, None)
        with pytest.raises(Fenced, match="its changes are in a checkpoint"):
            w.write(task, [(key_of(1, 1), b"late")])
        w.open("a", 0, 1, first)
        assert content(w.backend.table("a")) == {key_of(1, 1): b"in time"}


@virtual
async def test_lost_changes_are_never_passed_over_in_silence() -> None:
    async with world() as w:
        task = w.open("a", 0, 0, None)
        with pytest.raises(Unavailable, match=r"attempt 99 of a are lost: restart the query"):
            await w.backend.persist({"a": [task.attempt, 99]})


@virtual
async def test_a_checkpoint_that_was_not_persisted_here_is_not_completed_here() -> None:
    async with world() as w:
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"x")])
        with pytest.raises(Unavailable, match="restore it"):
            w.backend.complete(7, winners_of([task]), {})
        await w.persist([task])
        with pytest.raises(Unavailable, match="restore it"):
            w.backend.complete(7, {"a": [task.attempt, 5]}, {})
        w.backend.resume(None)
        with pytest.raises(Unavailable, match="restore it"):
            w.backend.complete(7, winners_of([task]), {})


@virtual
async def test_a_state_of_another_checkpoint_is_refused() -> None:
    async with world() as w:
        first = await w.checkpoint([w.open("a", 0, 0, None)], 0, None)
        assert w.backend.can_resume(None)
        assert w.backend.can_resume(first.checkpoint_id)
        assert not w.backend.can_resume(first.checkpoint_id + 1)
        w.open("a", 0, 1, first)
        with pytest.raises(Unavailable, match=r"holds the state of checkpoint 2, not of None: restore it"):
            w.open("a", 0, 0, None)
        with pytest.raises(Unavailable, match="not of 9"):
            w.backend.resume(9)
        assert not w.backend.can_resume(None)


@pytest.mark.parametrize("groups", [[4], [0, 4], [8]])
@virtual
async def test_changes_outside_the_partition_are_refused_for_no_restore_would_find_them(groups: list[int]) -> None:
    async with world() as w:
        task = w.open("a", 0, 0, None)  # key groups 0-3
        with pytest.raises(Invalid, match="writes key groups"):
            w.write(task, [(key_of(group, 1), b"x") for group in groups])


@virtual
async def test_changes_outside_the_task_managers_key_groups_are_refused() -> None:
    async with world() as w:
        w.backend.replace_tables({}, None, KeyGroupRange(0, 1))
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"mine")])
        with pytest.raises(Invalid, match="this TaskManager 0-1"):
            w.write(task, [(key_of(2, 1), b"another's")])


@virtual
async def test_an_attempt_whose_first_part_was_refused_gets_no_log_without_its_states() -> None:
    """The parts behind it come without them; an attempt that has said them may go on without."""
    async with world() as w:
        task, changed = w.open("a", 0, 0, None), rows([(key_of(1, 1), b"x")])
        with pytest.raises(Invalid, match="key groups"):
            w.backend.write(task.key, 0, rows([(key_of(7, 1), b"x")]), b'{"states":[]}')
        for _ in range(2):
            with pytest.raises(Invalid, match="without its states"):
                w.backend.write(task.key, 0, changed, b"")
        assert await w.persist([task]) == await w.persist([])
        other = w.open("a", 0, 0, None)
        w.write(other, [(key_of(1, 1), b"x")])
        w.backend.write(other.key, 0, changed, b"")
        assert w.backend._attempts[other.key].writer is not None


@virtual
async def test_an_attempt_has_one_partition() -> None:
    async with world() as w:
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"x")])
        with pytest.raises(Invalid, match="partitions 0 and 1"):
            w.backend.write(task.key, 1, rows([(key_of(5, 1), b"x")]), b"{}")


@virtual
async def test_a_resumed_run_forgets_a_checkpoint_whose_fate_is_unknown_and_leaves_its_objects() -> None:
    """The driver stopped between persist and commit; its manifest may come late, so its segments must stay."""
    async with world(inline_threshold=0) as w:
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"x" * 200)])
        await w.persist([task])
        held = {info.name async for info in w.disk.list()}
        w.backend.resume(None)
        await w.settle()
        assert {info.name async for info in w.disk.list()} == held


@virtual
async def test_the_objects_of_an_aborted_checkpoint_go_with_its_attempts() -> None:
    async with world(inline_threshold=0) as w:
        task = w.open("a", 0, 0, None)
        w.write(task, [(key_of(1, 1), b"x" * 200)])
        await w.persist([task])
        w.backend.abort()
        w.backend.resume(None)
        await w.settle()
        assert [info.name async for info in w.disk.list()] == []


@virtual
async def test_the_memory_of_the_logs_does_not_grow_with_the_batches() -> None:
    def held() -> int:
        gc.collect()
        of_logs = ("dstl.changelog.ledger", "dstl.changelog.log_segment", "dstl.changelog.storage")
        return sum(str(type(each).__module__).startswith(of_logs) for each in gc.get_objects())

    async with world(inline_threshold=0) as w:
        parent: CompletedCheckpoint | None = None
        after_batch: list[int] = []
        for batch in range(24):
            tasks = [w.open("a", partition, batch, parent) for partition in range(PARALLELISM["a"])]
            for partition, task in enumerate(tasks):
                w.write(task, [(key_of(groups_of("a", partition)[0], 1), b"%d" % batch)])
            parent = await w.checkpoint(tasks, batch, parent)
            # To look through all objects of the process takes longer than a batch.
            if batch in (5, 23):
                after_batch.append(held())
        early, late = after_batch
        assert late <= early


class StateBackendMachine(RuleBasedStateMachine):
    """Random histories of batches; every checkpoint, restored, is the model, and the tables are the parent's state."""

    @initialize(
        preempt=st.sampled_from([100, 400, 1 << 20]),
        inline=st.sampled_from([0, 700, 1 << 16]),
        seed=st.integers(0, 1 << 16),
    )
    def begin(self, preempt: int, inline: int, seed: int) -> None:
        self.loop = VirtualTimeLoop()
        asyncio.set_event_loop(self.loop)

        async def make() -> BackendWorld:
            return BackendWorld(
                seed, preemptive_persist_threshold=preempt, inline_threshold=inline, byte_budget=1 << 30
            )

        self.world = self.run(make())
        self.batch = 0
        self.parent: CompletedCheckpoint | None = None
        self.committed: Model = {}  # at the parent
        self.live: list[Task] = []
        self.over: list[Task] = []
        self.completed: tuple[CompletedCheckpoint, list[Task]] | None = None
        self.retained: list[tuple[CompletedCheckpoint, Model]] = []
        self.values = 0
        self.sealed: set[int] = set()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def act(self, call: Callable[..., Any], *args: object) -> Any:
        """Call the backend on its loop."""

        async def on_loop() -> Any:
            return call(*args)

        return self.run(on_loop())

    @rule(
        operator=st.sampled_from(sorted(PARALLELISM)),
        partition=st.integers(0, 3),
        written=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=6),
    )
    def run_task(self, operator: str, partition: int, written: list[tuple[int, int, bool]]) -> None:
        task = self.act(self.world.open, operator, partition % PARALLELISM[operator], self.batch, self.parent)
        self.live.append(task)
        self._write(task, written)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        written=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    )
    def write_more(self, data: st.DataObject, written: list[tuple[int, int, bool]]) -> None:
        open_tasks = [task for task in self.live if task.attempt not in self.sealed]
        if open_tasks:
            self._write(data.draw(st.sampled_from(open_tasks)), written)

    def _write(self, task: Task, written: list[tuple[int, int, bool]]) -> None:
        groups = groups_of(task.operator, task.partition)
        changes: list[tuple[bytes, bytes | None]] = []
        for group, name, is_put in written:
            self.values += 1
            value = b"%d" % self.values + b"." * 60 if is_put else None
            changes.append((key_of(groups[group % len(groups)], name), value))
        # One part never names a key twice: the worker's overlay has squashed it.
        if squashed := list(dict(changes).items()):
            self.act(self.world.write, task, squashed)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def a_zombie_writes(self, data: st.DataObject) -> None:
        task = data.draw(st.sampled_from(self.over))
        key = key_of(groups_of(task.operator, task.partition)[0], 0)
        with pytest.raises(Fenced):
            self.act(self.world.backend.write, task.key, task.partition, rows([(key, b"zombie")]), b"{}")

    @rule(down=st.booleans())
    def the_store(self, down: bool) -> None:
        self.world.down(down)

    @rule(seconds=st.sampled_from([0.0, 0.02, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def _choose(self, data: st.DataObject) -> list[Task]:
        by_place: dict[tuple[str, int], list[Task]] = {}
        for task in self.live:
            by_place.setdefault((task.operator, task.partition), []).append(task)
        return [data.draw(st.sampled_from(tasks)) for _, tasks in sorted(by_place.items())]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), commits=st.booleans())
    def make_a_checkpoint(self, data: st.DataObject, commits: bool) -> None:
        winners = self._choose(data)
        self.sealed.update(task.attempt for task in winners)
        try:
            contribution = self.run(self.world.persist(winners))
        except DstlError:
            assert self.world.store.rules, "a persist failed while the store was up"
            self.act(self.world.backend.abort)
            return
        if not commits:
            self.act(self.world.backend.abort)
            return
        checkpoint = self.run(self.world.commit(winners, contribution, self.batch, self.parent))
        if self.retained and self.retained[-1][0].batch_id == self.batch:
            self.retained.pop()
        model = after(self.committed, winners)
        assert self.run(self.world.restored(checkpoint)) == model
        self.retained.append((checkpoint, model))
        self.completed = (checkpoint, winners)

    @precondition(lambda self: self.completed is not None)
    @rule()
    def go_on(self) -> None:
        assert self.completed is not None
        self.parent, winners = self.completed
        self.committed = after(self.committed, winners)
        self._new_batch(self.batch + 1)

    @rule()
    def restart(self) -> None:
        """A new run, from the parent: also where the batch had completed and Spark runs it again."""
        self.act(self.world.backend.resume, self.parent.checkpoint_id if self.parent else None)
        self._new_batch(self.batch)

    @precondition(lambda self: self.completed is not None)
    @rule()
    def restart_behind_the_batch(self) -> None:
        assert self.completed is not None
        self.parent, winners = self.completed
        self.committed = after(self.committed, winners)
        self.act(self.world.backend.resume, self.parent.checkpoint_id)
        self._new_batch(self.batch + 1)

    @precondition(lambda self: self.retained)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """The TaskManager is given to a run that goes on from some retained checkpoint."""
        checkpoint, model = data.draw(st.sampled_from(self.retained[-2:]))
        self.run(self._restore(checkpoint))
        self.retained = self.retained[: self.retained.index((checkpoint, model)) + 1]
        self.parent, self.committed = checkpoint, model
        self._new_batch(checkpoint.batch_id + 1)

    @rule(group=st.integers(0, 7), name=st.integers(0, 2))
    def look_up(self, group: int, name: int) -> None:
        """Whatever has been written: a key is as a checkpoint has it, the parent or the one behind it."""
        known: dict[int | None, Model] = {self.parent.checkpoint_id if self.parent else None: self.committed}
        if self.completed is not None:
            known[self.completed[0].checkpoint_id] = after(self.committed, self.completed[1])
        key = key_of(group, name)
        for checkpoint, model in known.items():
            for operator in PARALLELISM:
                found = self.act(self.world.backend.look_up, checkpoint, operator, STATE, group, key)
                expected = model.get(operator, {}).get(key)
                assert found == ({} if expected is None else {b"": expected})

    async def _restore(self, checkpoint: CompletedCheckpoint) -> None:
        owned = self.world.backend.key_groups
        found = await restore_tables(
            checkpoint, self.world.disk, owned, self.world.backend.committed.open_table, self.world.runtime
        )
        self.world.backend.replace_tables(found.tables, checkpoint.checkpoint_id, owned, bases=found.bases)

    def _new_batch(self, batch: int) -> None:
        self.over, self.live, self.completed = self.over + self.live, [], None
        self.over = self.over[-6:]
        self.batch = batch
        # The first task of the batch is what lets the tables go on.
        self.run_task("a", 0, [])

    @invariant()
    def the_tables_hold_the_parents_state(self) -> None:
        if hasattr(self, "world"):
            for uid in PARALLELISM:
                assert content(self.world.backend.table(uid)) == self.committed.get(uid, {})

    @invariant()
    def what_is_retained_can_be_restored(self) -> None:
        if hasattr(self, "world") and self.values % 7 == 0:
            for checkpoint, model in self.retained[-2:]:
                assert self.run(self.world.restored(checkpoint)) == model

    def teardown(self) -> None:
        if hasattr(self, "world"):
            for checkpoint, model in self.retained[-2:]:
                assert self.run(self.world.restored(checkpoint)) == model
            self.run(self.world.close())
            self.loop.close()
            asyncio.set_event_loop(None)


TestStateBackendMachine = StateBackendMachine.TestCase
TestStateBackendMachine.settings = settings(
    max_examples=60,
    stateful_step_count=35,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
