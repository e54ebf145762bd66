"""Writer and storage against a model: random histories of appends, failures, confirmations and closes."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dstl.changelog import segments_in_flight
from dstl.changelog.ledger import InlineSegment, LogSegment, Ownership
from dstl.changelog.log_segment import PersistResult
from dstl.changelog.segment.reader import decode_segment
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed, OutcomeUnknown, Unavailable
from tests.simulation.virtual_time import VirtualTimeLoop
from worlds.changelog import World, inlined_of, put, turn


@dataclass(eq=False)
class Log:
    writer: StateChangelogWriter
    sets: dict[int, list[bytes]] = field(default_factory=dict)
    open: list[bytes] = field(default_factory=list)
    lowest: int = 0
    closed: bool = False

    @property
    def next(self) -> int:
        return len(self.sets)

    def follow(self) -> None:
        """The storage closes change sets by itself (pre-emptive uploads): what was open went into the first."""
        while self.next < self.writer.ledger.next_sqn:
            assert self.open, "an empty change set was closed"
            self.sets[self.next] = self.open
            self.open = []


@dataclass(eq=False)
class Persisted:
    """The ranges that a persist was asked for, and then what it returned."""

    spans: list[tuple[Log, int, int]]
    task: asyncio.Task[PersistResult]
    after_failures: int

    @property
    def segments(self) -> list[tuple[Log, LogSegment]]:
        return [(log, each) for log, _, _ in self.spans for each in self.task.result().segments[log.writer.log_id]]


class ChangelogMachine(RuleBasedStateMachine):
    @initialize(
        preempt=st.sampled_from([120, 400, 1 << 20]),
        size=st.sampled_from([150, 1 << 20]),
        inline=st.sampled_from([0, 300, 1 << 16]),
        budget=st.sampled_from([200, 1 << 20]),
        ahead=st.sampled_from([0, 150]),
    )
    def begin(self, preempt: int, size: int, inline: int, budget: int, ahead: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(segments_in_flight, "ENCODED_AHEAD_BYTES", ahead)
        self.loop = VirtualTimeLoop()
        asyncio.set_event_loop(self.loop)

        async def make() -> World:
            return World(
                preemptive_persist_threshold=preempt,
                segment_size=size,
                inline_threshold=inline,
                byte_budget=budget,
            )

        self.world = self.run(make())
        self.world.store.holding = True
        self.count = 0
        self.failures = 0
        self.logs: list[Log] = []
        self.asked: list[Persisted] = []
        self.results: list[Persisted] = []
        self.kept: set[str] = set()
        self.left: set[str] = set()
        self.reserving: list[asyncio.Task[None]] = []
        for _ in range(2):
            self.new_log()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def new_log(self) -> None:
        self.count += 1
        self.logs.append(Log(self.world.storage.create_writer(f"log-{self.count}")))

    def log(self, pick: int) -> Log:
        return self.logs[pick % len(self.logs)]

    def value(self, size: int) -> bytes:
        self.count += 1
        return f"{self.count}".encode().ljust(size, b".")

    def settle(self) -> None:
        """Let the loop run and take up what it settled."""
        before = None
        while before != (before := (self.world.storage.budget.used, sum(task.done() for task in self.reserving))):
            self.run(turn())
        for log in self.logs:
            log.follow()
        for each in [each for each in self.asked if each.task.done()]:
            self.asked.remove(each)
            if each.task.cancelled():
                continue
            error = each.task.exception()
            if error is None:
                self.check_result(each)
                self.results.append(each)
            elif isinstance(error, Closed):
                assert any(log.closed for log, _, _ in each.spans)
            else:
                assert isinstance(error, Unavailable)
                assert self.failures > each.after_failures, "failed with an upload that ended before it asked"

    def leave(self, log: Log) -> None:
        """A log is closed while results of it are pending: note what may stay.

        A number of which one pending result has an inlined copy, and that was stored for another checkpoint since, is
        kept: which of the two a reset meant cannot be told from its range.
        """
        for each in self.results:
            for of, start, end in each.spans:
                entries = [log.writer.ledger._entries.get(sqn) for sqn in range(start, end)] if of is log else []
                self.left |= {entry.location.name for entry in entries if entry is not None and entry.location}
            self.kept |= {s.location.name for of, s in each.segments if of is log and is_object(s)}

    def check_result(self, each: Persisted) -> None:
        for log, start, end in each.spans:
            segments = each.task.result().segments[log.writer.log_id]
            assert [s.range.from_sqn for s in segments] + [end] == [start] + [s.range.to_sqn for s in segments]
            expected = [value for sqn in range(start, end) for value in log.sets[sqn]]
            assert self.run(self.world.read(log.writer.log_id, segments)) == expected

    # Rules: what an owner does.

    @rule(pick=st.integers(0, 3), size=st.sampled_from([1, 40, 130]), count=st.integers(1, 3))
    def append(self, pick: int, size: int, count: int) -> None:
        log = self.log(pick)
        for _ in range(count):
            value = self.value(size)
            before = log.writer.ledger.next_sqn
            put(log.writer, value)
            assert log.writer.ledger.next_sqn == before
            log.open.append(value)
        self.settle()

    @rule(pick=st.integers(0, 3), size=st.sampled_from([40, 300]))
    def append_with_reservation(self, pick: int, size: int) -> None:
        log = self.log(pick)

        async def reserve() -> None:
            try:
                async with self.world.storage.budget.reserve(size):
                    if not log.closed:
                        value = self.value(size)
                        log.follow()
                        put(log.writer, value)
                        log.open.append(value)
            except Closed:
                pass

        self.reserving.append(self.loop.create_task(reserve()))
        self.settle()

    @rule(pick=st.integers(0, 3))
    def next_sequence_number(self, pick: int) -> None:
        log = self.log(pick)
        expected = log.next + bool(log.open)
        assert log.writer.next_sequence_number() == expected
        self.settle()

    @rule(pick=st.integers(0, 3))
    def encode_ahead(self, pick: int) -> None:
        log = self.log(pick)
        log.writer.encode_ahead()
        log.follow()
        self.settle()

    @rule(picks=st.sampled_from([(0,), (1,), (0, 1)]), back=st.integers(0, 4), inline=st.booleans())
    def persist(self, picks: tuple[int, ...], back: int, inline: bool) -> None:
        starts = [(log, max(log.lowest, log.next - back)) for log in (self.log(pick) for pick in picks)]
        task = self.loop.create_task(
            self.world.storage.persist_all([(log.writer, start) for log, start in starts], allow_inline=inline)
        )
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.run(asyncio.sleep(0))
        for log, _ in starts:
            log.follow()
        spans = [(log, start, log.next) for log, start in starts]
        self.asked.append(Persisted(spans, task, after_failures=self.failures))
        self.settle()

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 9))
    def caller_gives_up(self, pick: int) -> None:
        self.asked[pick % len(self.asked)].task.cancel()
        self.settle()

    @precondition(lambda self: self.results)
    @rule(pick=st.integers(0, 9))
    def confirm(self, pick: int) -> None:
        each = self.results.pop(pick % len(self.results))
        self.check_result(each)
        located = {}
        for inline in inlined_of(each.task.result()):
            self.count += 1
            name = f"manifests/{self.count}"
            located[inline.id] = self.run(self.world.manifest(inline, name))
            self.kept.add(name)
        self.kept |= {s.location.name for _, s in each.segments if is_object(s)}
        for log, segment in each.segments:
            entries = log.writer.ledger._entries
            for sqn in range(segment.range.from_sqn, segment.range.to_sqn):
                if (
                    not is_object(segment)
                    and sqn in entries
                    and entries[sqn].state is not Ownership.DURABLE
                    and entries[sqn].inline is not segment.location
                ):
                    return  # reset meanwhile and handed out again: a coordinator never confirms what it reset
        self.world.storage.confirm(each.task.result(), located)
        self.settle()

    @precondition(lambda self: self.results)
    @rule(pick=st.integers(0, 9))
    def reset(self, pick: int) -> None:
        self.world.storage.reset(self.results.pop(pick % len(self.results)).task.result())
        self.settle()

    @rule(pick=st.integers(0, 3), keep=st.integers(0, 3))
    def truncate(self, pick: int, keep: int) -> None:
        log = self.log(pick)
        to = max(log.lowest, log.next - keep)
        log.writer.truncate(to)
        log.lowest = to
        self.settle()

    @rule(pick=st.integers(0, 3), back=st.integers(0, 4))
    def close_log(self, pick: int, back: int) -> None:
        log = self.log(pick)
        start = max(0, log.next - back)
        log.closed = True
        self.logs.remove(log)
        self.leave(log)
        log.writer.truncate_and_close(start)
        try:
            put(log.writer, b"late")
            raise AssertionError("a closed writer took a change")
        except Closed:
            pass
        self.new_log()
        self.settle()

    # Rules: what the world does.

    @precondition(lambda self: self.world.store.held)
    @rule(pick=st.integers(0, 9))
    def store(self, pick: int) -> None:
        held = self.world.store.held
        held[pick % len(held)].succeed()
        self.settle()

    @precondition(lambda self: self.world.store.held)
    @rule(pick=st.integers(0, 9), unknown=st.booleans())
    def fail(self, pick: int, unknown: bool) -> None:
        held = self.world.store.held
        self.failures += 1
        held[pick % len(held)].fail(OutcomeUnknown("no answer") if unknown else Unavailable("503"))
        self.settle()

    @rule(seconds=st.sampled_from([0.005, 0.02, 6.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))
        self.settle()

    # Invariants.

    @invariant()
    def every_number_is_in_exactly_one_state_and_keeps_its_bytes(self) -> None:
        for log in getattr(self, "logs", ()):
            ledger = log.writer.ledger
            held = {sqn: entry.changes for sqn, entry in ledger._entries.items() if entry.changes is not None}
            for sqn in range(log.lowest, log.next):
                state = ledger.ownership(sqn)
                assert state is not None
                assert (sqn in held) == (state is not Ownership.DURABLE)
                if sqn in held:
                    values = [v for batch in held[sqn].batches() for v in batch.column("value").to_pylist()]
                    assert values == log.sets[sqn]

    @invariant()
    def no_change_is_stored_twice(self) -> None:
        if not hasattr(self, "world"):
            return
        stored = Counter(
            (log_id, sqn)
            for data in self.world.store.acknowledged.values()
            for log_id, sqn in {(log_id, sqn) for log_id, sqn, _, _ in decode_segment(data, "test")}
        )
        assert all(count == 1 for count in stored.values())

    @invariant()
    def the_budget_counts_what_is_held(self) -> None:
        if not hasattr(self, "world") or self.world.store.held:
            return  # what was dropped in flight is counted until its upload ends
        expected = 0
        for log in self.logs:
            expected += log.writer._open.nbytes
            for entry in log.writer.ledger._entries.values():
                if entry.changes is not None and entry.state is not Ownership.HANDED_OUT:
                    expected += entry.changes.nbytes
        assert self.world.storage.budget.used == expected

    @invariant()
    def what_a_checkpoint_may_reference_is_there(self) -> None:
        for each in getattr(self, "results", ()):
            self.check_result(each)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.close_everything()
        finally:
            self.patch.undo()
            self.loop.close()
            asyncio.set_event_loop(None)

    def close_everything(self) -> None:
        for log in self.logs:
            log.closed = True
            self.leave(log)
        self.run(self.world.close())
        self.run(turn(10.0))
        assert all(each.task.done() for each in self.asked), "a persist waits for ever"
        assert all(task.done() for task in self.reserving), "an append waits for ever"
        assert self.world.storage.budget.used == 0
        assert len(self.world.storage.references) == 0
        names = self.run(self.world.store.names())
        assert self.kept <= names, "a segment was deleted that is referenced"
        assert names <= self.kept | self.left, "an orphan"


def is_object(segment: LogSegment) -> bool:
    return not isinstance(segment.location, InlineSegment)


TestChangelogMachine = ChangelogMachine.TestCase
TestChangelogMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
