"""Restoring tables from checkpoints: order, bounds, faults of the store, and what is said of a damaged checkpoint."""

import asyncio
import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from dstl.changelog.change_set import ChangeSet
from dstl.changelog.segment.encoder import encode_segment, segment_checksum
from dstl.errors import Closed, CorruptData, DstlError, MissingState, ObjectNotFound, Unavailable
from dstl.store.base import ByteRange, ObjectStore
from dstl.store.memory import MemoryStore
from handles.checkpoint import CompletedCheckpoint, LogEntry, OperatorEntry, SegmentEntry
from handles.key_group import KeyGroupRange
from materializer.bases.table_directory import FileBases, UnusableObject
from materializer.restore.restore import RestoredTables, heap_tables
from materializer.tables import HeapStateTable, StateTable
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, seeded_runtime, virtual
from worlds.manifest_samples import checkpoint
from worlds.restored import restore_tables
from worlds.table_changes import Change, changes, clear, delete, put

GROUPS = 16
ALL = KeyGroupRange.all(GROUPS)
State = dict[tuple[str, int, bytes, bytes], bytes]
"""Values by operator, key group, key and user key."""


class Log:
    """Writes segments and keeps the checkpoint that names them."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.logs: list[LogEntry] = []
        self.segments: list[SegmentEntry] = []
        self.sqns: dict[str, int] = {}

    def add_log(self, log_id: str, operator: str) -> None:
        self.logs.append(LogEntry(log_id=log_id, operator=operator, first_key_group=0, last_key_group=GROUPS - 1))
        self.sqns[log_id] = 0

    async def add(self, written: dict[str, list[Change]], name: str = "", padding: int = 0) -> str:
        """Store a segment with one change set per log."""
        name = name or f"segments/{len(self.segments):04d}"
        sets, ranges = [], []
        for log_id, rows in sorted(written.items()):
            each = ChangeSet()
            each.append_metadata(b"metadata" + b"\0" * padding)
            each.append_batch(changes(*rows))
            sqn = self.sqns[log_id]
            sets.append((log_id, sqn, each))
            ranges.append(([log.log_id for log in self.logs].index(log_id), sqn, sqn + 1))
            self.sqns[log_id] += 1
        data = encode_segment(sets, writer_id="writer", metadata={}, compression_level=1)
        groups = [row[0] for rows in written.values() for row in rows]
        await self.store.put(name, data)
        fields = {"checkpoint": len(self.segments) + 1} if "checkpoint" in SegmentEntry.model_fields else {}
        self.segments.append(
            SegmentEntry(
                segment=(name, len(data), segment_checksum(data), 0),
                first_key_group=min(groups),
                last_key_group=max(groups),
                ranges=tuple(ranges),
                **fields,
            )
        )
        return name

    def checkpoint(self) -> CompletedCheckpoint:
        return checkpoint(
            max(1, len(self.segments)),
            4,
            max_parallelism=GROUPS,
            operators=tuple(
                OperatorEntry(uid=uid, parallelism=1, key_types="string")
                for uid in dict.fromkeys(log.operator for log in self.logs)
            ),
            logs=tuple(self.logs),
            segments=tuple(self.segments),
        )


def applied(state: State, operator: str, rows: list[Change]) -> None:
    for group, _, op, key, user_key, value in rows:
        if op == 0:
            state[operator, group, key, user_key] = value
        elif op == 1:
            state.pop((operator, group, key, user_key), None)
        else:
            for each in [k for k in state if k[:3] == (operator, group, key)]:
                del state[each]


def content(restored: RestoredTables) -> State:
    return {
        (operator, group, entry.key, entry.user_key): entry.value
        for operator, table in restored.tables.items()
        for group in table.key_groups()
        for entry in table.scan(0, group, limit=1 << 20)
    }


def restore(
    checkpoint: CompletedCheckpoint | None,
    store: ObjectStore,
    owned: KeyGroupRange = ALL,
    open_table: Callable[[str], StateTable] = lambda _: HeapStateTable(),
) -> "asyncio.Future[RestoredTables]":
    runtime = seeded_runtime(1)
    return asyncio.ensure_future(restore_tables(checkpoint, store, owned, open_table, runtime))


async def some_history(log: Log, rng: random.Random, segments: int = 30) -> State:
    """Write a random history of two operators; return what it amounts to."""
    state: State = {}
    operators = {"log-a": "a", "log-b": "b"}
    for log_id, operator in operators.items():
        log.add_log(log_id, operator)
    for n in range(segments):
        written: dict[str, list[Change]] = {}
        for log_id in rng.sample(sorted(operators), rng.randint(1, 2)):
            rows: list[Change] = []
            for at in range(rng.randint(1, 8)):
                group, key, user_key = rng.randrange(GROUPS), b"%d" % rng.randrange(3), b"%d" % rng.randrange(2)
                value = b"%d/%d" % (n, at)
                rows.append(
                    rng.choice(
                        [put(group, 0, key, user_key, value)] * 4
                        + [delete(group, 0, key, user_key), clear(group, 0, key)]
                    )
                )
            # A change set keeps the order of its appends within a key group.
            rows.sort(key=lambda row: row[0])
            written[log_id] = rows
            applied(state, operators[log_id], rows)
        await log.add(written)
    return state


async def test_nothing_is_restored_from_no_checkpoint() -> None:
    restored = await restore(None, MemoryStore())
    assert (restored.tables, restored.bytes, restored.changes) == ({}, 0, 0)


@virtual
async def test_the_order_holds_when_later_segments_arrive_first(seed: int) -> None:
    rng = random.Random(seed)
    inner = MemoryStore(clock=LoopClock())
    log = Log(inner)
    expected = await some_history(log, rng)
    store = FaultyStore(inner, seed=seed, clock=LoopClock(), latency=lambda *_: rng.uniform(0, 5))
    restored = await restore(log.checkpoint(), store)
    assert content(restored) == expected
    assert restored.bytes == sum(segment.segment[1] for segment in log.segments)


async def test_segments_without_an_owned_key_group_are_not_opened() -> None:
    store = FaultyStore(MemoryStore())
    log = Log(store)
    log.add_log("log-a", "a")
    for group in range(GROUPS):
        await log.add({"log-a": [put(group, 0, b"k", b"", b"%d" % group)]})
    restored = await restore(log.checkpoint(), store, KeyGroupRange(5, 7))
    assert store.calls["get"] == 3
    assert sorted(content(restored).values()) == [b"5", b"6", b"7"]


async def test_of_one_operator_nothing_else_is_restored_or_read() -> None:
    log = Log(MemoryStore())
    for operator in ("left", "right"):
        log.add_log(f"log-{operator}", operator)
        await log.add({f"log-{operator}": [put(1, 0, operator.encode(), b"", b"v")]})
    await log.store.delete([log.segments[1].handle.name])
    async with (
        FileBases(log.store, seeded_runtime(1)) as files,
        heap_tables(log.checkpoint(), files, ALL, "left") as tables,
    ):
        assert {name: [e.key for e in table.scan(0, 1)] for name, table in tables.items()} == {"left": [b"left"]}


async def test_metadata_is_no_change_of_a_table() -> None:
    log = Log(MemoryStore())
    log.add_log("log-a", "a")
    await log.add({"log-a": [put(1, 0, b"k", b"", b"v")]})
    restored = await restore(log.checkpoint(), log.store)
    assert (restored.changes, list(restored.tables["a"].key_groups())) == (1, [1])


async def test_what_a_segment_holds_of_losers_is_not_applied() -> None:
    """A segment may hold a losing attempt's change sets: the checkpoint does not name them."""
    log = Log(MemoryStore())
    log.add_log("log-winner", "a")
    log.add_log("log-loser", "a")
    await log.add({"log-winner": [put(1, 0, b"k", b"", b"right")], "log-loser": [put(1, 0, b"k", b"", b"wrong")]})
    entry = log.segments[0]
    log.segments = [entry.model_copy(update={"ranges": entry.ranges[1:]})]
    log.logs = [each for each in log.logs if each.log_id == "log-winner"]
    log.segments = [entry.model_copy(update={"ranges": ((0, 0, 1),)})]
    restored = await restore(log.checkpoint(), log.store)
    assert list(content(restored).values()) == [b"right"]


@virtual
async def test_a_store_that_fails_now_and_then_is_asked_again(seed: int) -> None:
    inner = MemoryStore(clock=LoopClock())
    log = Log(inner)
    expected = await some_history(log, random.Random(seed))
    rules = [
        # No read by chance: one that fails six times, or is damaged twice, is rightly given up.
        FaultRule(Fault.CORRUPT_GET, "get", nth=(1,), only="segments/0003"),
        FaultRule(Fault.SHORT_GET, "get", nth=(1,), only="segments/0007"),
        FaultRule(Fault.UNAVAILABLE, "get", nth=tuple(range(2, 99, 4))),
        FaultRule(Fault.SLOW_DOWN, "get", nth=tuple(range(5, 99, 7))),
    ]
    store = FaultyStore(inner, rules, seed=seed, clock=LoopClock())
    assert content(await restore(log.checkpoint(), store)) == expected
    assert {Fault.UNAVAILABLE, Fault.SLOW_DOWN, Fault.CORRUPT_GET, Fault.SHORT_GET} <= {
        each.fault for each in store.fired
    }


@virtual
async def test_a_store_that_stays_away_is_unavailable_and_nothing_is_left_running(seed: int) -> None:
    inner = MemoryStore(clock=LoopClock())
    log = Log(inner)
    await some_history(log, random.Random(seed))
    store = FaultyStore(inner, [FaultRule(Fault.UNAVAILABLE, "get", chance=1.0)], clock=LoopClock())
    with pytest.raises(Unavailable, match=r"checkpoint 30 \(batch 4\) cannot be restored: .*injected"):
        await restore(log.checkpoint(), store)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "swapped"])
async def test_a_bad_segment_is_named_with_its_checkpoint_and_the_next_step(damage: str, seed: int) -> None:
    store = MemoryStore(clock=LoopClock())
    log = Log(store)
    await some_history(log, random.Random(seed))
    name = log.segments[17].segment[0]
    body = await store.get(name)
    await store.delete([name])
    if damage == "truncated":
        await store.put(name, body[:-1])
    elif damage == "flipped":
        await store.put(name, body[:40] + bytes([body[40] ^ 1]) + body[41:])
    elif damage == "swapped":
        await store.put(name, await store.get(log.segments[3].segment[0]))
    kind: type[DstlError] = ObjectNotFound if damage == "missing" else CorruptData
    opened: list[HeapStateTable] = []

    def open_table(_: str) -> StateTable:
        opened.append(HeapStateTable())
        return opened[-1]

    with pytest.raises((CorruptData, MissingState)) as raised:
        await restore(log.checkpoint(), store, ALL, open_table)
    assert isinstance(raised.value, kind)
    for word in (name, "checkpoint 30 (batch 4)", 'older checkpoint with StateBackend(..., restore="previous")'):
        assert word in str(raised.value)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for table in opened:
        with pytest.raises(Closed):
            table.get_many(0, [0], [b"k"])


async def test_a_checkpoint_that_names_change_sets_the_segment_does_not_have_is_refused() -> None:
    log = Log(MemoryStore())
    log.add_log("log-a", "a")
    await log.add({"log-a": [put(1, 0, b"k", b"", b"v")]})
    log.segments[0] = log.segments[0].model_copy(update={"ranges": ((0, 0, 2),)})
    with pytest.raises(MissingState, match="holds 1 of the 2 change sets"):
        await restore(log.checkpoint(), log.store)


class GatedStore:
    """Counts how many bytes of segments are being held ahead of the consumer."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.fetched: list[str] = []

    @property
    def location(self) -> str:
        return self.inner.location

    async def get(self, name: str, byte_range: ByteRange | None = None) -> bytes:
        self.fetched.append(name)
        return await self.inner.get(name, byte_range)


class SlowTable(HeapStateTable):
    """Notes how far ahead the store was read when each batch of changes is applied."""

    def __init__(self, ahead: list[int], store: GatedStore) -> None:
        super().__init__()
        self._ahead, self._store, self._applied = ahead, store, 0

    def apply(self, changes: pa.RecordBatch) -> None:
        self._applied += 1
        self._ahead.append(len(set(self._store.fetched)) - self._applied)
        super().apply(changes)


async def test_only_a_bounded_number_of_segments_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the log's size: here every segment is a piece of its own, and two are all that fits in memory."""
    store = GatedStore(MemoryStore())
    log = Log(store.inner)
    log.add_log("log-a", "a")
    for n in range(60):
        await log.add({"log-a": [put(1, 0, b"k", b"", b"%d" % n)]})
    size = changes(put(1, 0, b"k", b"", b"59")).nbytes
    monkeypatch.setattr("materializer.restore.restore.PIECE_BYTES", 1)
    monkeypatch.setattr("materializer.restore.restore.PREPARED_BYTES", 2 * size)
    ahead: list[int] = []
    await restore(log.checkpoint(), store, ALL, lambda _: SlowTable(ahead, store))  # type: ignore[arg-type]
    assert len(ahead) == 60
    # Sixteen that are fetched, one that waits for room, and the two.
    assert 1 <= max(ahead) <= 16 + 1 + 2


async def test_many_small_segments_are_applied_together() -> None:
    """A job of small batches has hundreds of them, and each call costs a change of threads."""
    store = GatedStore(MemoryStore())
    log = Log(store.inner)
    log.add_log("log-a", "a")
    for n in range(60):
        await log.add({"log-a": [put(1, 0, b"k%d" % (n % 7), b"", b"%d" % n)]})
    calls: list[int] = []
    restored = await restore(log.checkpoint(), store, ALL, lambda _: SlowTable(calls, store))  # type: ignore[arg-type]
    assert len(calls) == 1
    assert restored.changes == 60
    assert restored.tables["a"].get_many(0, [1] * 7, [b"k%d" % n for n in range(7)]) == [
        b"%d" % max(m for m in range(60) if m % 7 == n) for n in range(7)
    ]


async def test_a_restore_that_is_cancelled_leaves_nothing_behind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(MemoryStore())
    await some_history(log, random.Random(seed))
    store = FaultyStore(log.store, [FaultRule(Fault.STUCK, "get", nth=(5,))])
    opened: list[HeapStateTable] = []

    def open_table(_: str) -> StateTable:
        opened.append(HeapStateTable())
        return opened[-1]

    monkeypatch.setattr("materializer.restore.restore.PIECE_BYTES", 1)
    running = restore(log.checkpoint(), store, ALL, open_table)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert opened
    for table in opened:
        with pytest.raises(Closed):
            table.get_many(0, [0], [b"k"])


async def test_an_error_of_more_than_a_message_keeps_its_kind_and_names_the_checkpoint() -> None:
    log = Log(MemoryStore())
    log.add_log("log-a", "a")
    await log.add({"log-a": [put(1, 0, b"k", b"", b"v")]})

    class Table(HeapStateTable):
        def apply(self, changes: pa.RecordBatch) -> None:
            raise UnusableObject("00/q/w/base", "it is damaged")

    with pytest.raises(CorruptData, match=r"checkpoint 1 .*it is damaged\. Bring the object back") as raised:
        await restore(log.checkpoint(), log.store, ALL, lambda _: Table())
    assert isinstance(raised.value.__cause__, UnusableObject)
