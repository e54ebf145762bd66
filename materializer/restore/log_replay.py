"""The second half of a restore: the segments after the bases, in the order of their commits, joined to pieces."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.changelog.segment.reader import Changes, ReadSizes, SegmentReader
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.prefetcher import BudgetLease, Prefetcher
from dstl.store.retry_policy import RetryPolicy
from handles.checkpoint import CheckpointId, CompletedCheckpoint, SegmentEntry
from handles.key_group import KeyGroup, KeyGroupRange
from handles.segment_handle import SequenceNumberRange
from materializer.bases.base_fetch import AHEAD_BYTES, AHEAD_FETCHES, DECODED_AHEAD_BYTES
from materializer.tables.rocksdb_snapshot import SortedFile

_TOGETHER_ROWS = 1 << 16  # a table's own cost of a batch is small beside so many rows
_SIZES = ReadSizes(unit=4 << 20)
"""All that is decoded waits for its turn to be applied, so small units would save no memory: each costs a turn of the
loop and of a thread, 0.5 ms of processor time."""

ReplayAfter = Mapping[str, Mapping[KeyGroup, CheckpointId]]
"""Per operator and key group, the checkpoint at which it was loaded from a base; without an entry, none was."""


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One segment to replay.

    Attributes:
        entry: The segment.
        wanted: Per log, the change sets to replay.
        operators: Per log, its operator and the key groups that have a base which contains the segment's changes.
    """

    entry: SegmentEntry
    wanted: Mapping[str, SequenceNumberRange]
    operators: Mapping[str, tuple[str, frozenset[KeyGroup]]]


def replay_steps(
    checkpoint: CompletedCheckpoint, owned: KeyGroupRange, after: ReplayAfter, operator: str | None = None
) -> list[ReplayStep]:
    """Return the segments to replay over some bases, in order; what every base contains is not opened.

    With ``operator`` of this one alone.
    """
    steps = []
    bases: list[list[tuple[CheckpointId, KeyGroup]]] = []
    for log in checkpoint.logs:
        common = log.key_groups.intersect(owned) if operator in (None, log.operator) else None
        loaded = after.get(log.operator, {})
        bases.append(sorted((loaded.get(group, 0), group) for group in common) if common else [])
    for entry in checkpoint.segments:
        if not entry.key_groups.intersect(owned):
            continue
        wanted: dict[str, SequenceNumberRange] = {}
        operators: dict[str, tuple[str, frozenset[KeyGroup]]] = {}
        for at, from_sqn, to_sqn in entry.ranges:
            if not bases[at] or (bases[at][0][0] and entry.checkpoint <= bases[at][0][0]):
                continue
            log = checkpoint.logs[at]
            before = wanted.get(log.log_id)
            # Adjacent ranges of one log in one segment are one range; the checkpoint's own check refuses gaps.
            wanted[log.log_id] = SequenceNumberRange(min(from_sqn, before.from_sqn) if before else from_sqn, to_sqn)
            if log.log_id not in operators:
                held = frozenset(group for base, group in bases[at] if base and entry.checkpoint <= base)
                operators[log.log_id] = (log.operator, held)
        if wanted:
            steps.append(ReplayStep(entry, wanted, operators))
    return steps


def decoding_turn() -> asyncio.Semaphore:
    """Return what is held while a part of the log is decoded, or a base is put into a table: half as often as there are
    cores.

    Both are Python for the greater part. At once they would take turns at the interpreter, and be slower for it.
    """
    return asyncio.Semaphore(max(1, (os.cpu_count() or 2) // 2))


def replay(
    steps: Iterable[ReplayStep],
    store: ObjectStore,
    owned: KeyGroupRange,
    runtime: Runtime,
    turn: asyncio.Semaphore,
) -> Prefetcher[ReplayStep, tuple[ReplayStep, list[Changes]]]:
    """Return an iterator over the steps in order, each with its changes that no base contains; the caller closes it.

    Bounded ahead are the segments, their stored bytes, and the bytes that they are decoded to.

    Args:
        steps: The segments.
        store: Where they are.
        owned: Key groups to replay.
        runtime: Clock and jitter for repeated reads.
        turn: See :func:`decoding_turn`.

    Raises:
        CorruptData: A segment is damaged.
        MissingState: A segment, or a part of one, is not there.
        Unavailable: The store did not answer several times in a row.
    """
    retries = RetryPolicy(runtime)

    async def load(step: ReplayStep, lease: BudgetLease) -> tuple[ReplayStep, list[Changes]]:
        async def read() -> list[Changes]:
            lease.give_back()  # what an attempt before this one has read
            found: list[Changes] = []
            reader = SegmentReader(store, step.entry.handle, turn=turn, sizes=_SIZES)
            without = {log_id: held for log_id, (_, held) in step.operators.items() if held}
            async with aclosing(reader.read(owned, step.wanted, without)) as changes:
                async for each in changes:
                    await lease.take(each.nbytes)
                    found.append(each)
            return found

        return step, await retries.read(read)

    return Prefetcher(
        steps,
        load,
        cost=lambda step: step.entry.handle.size,
        max_bytes=AHEAD_BYTES,
        max_count=AHEAD_FETCHES,
        max_taken=DECODED_AHEAD_BYTES,
    )


@dataclass(slots=True)
class LogPiece:
    """Neighbouring segments whose changes are applied together.

    Attributes:
        steps: The segments, each with its change records by operator.
        changes: By operator, batches of change records in the order of the log; what the bases contain is left out.
        staged: By operator, changes that its table has written to a file already; they are not in ``changes`` then.
        nbytes: Of ``changes``, in memory.
    """

    steps: list[tuple[ReplayStep, Mapping[str, int]]] = field(default_factory=list)
    changes: dict[str, list[pa.RecordBatch]] = field(default_factory=dict)
    staged: dict[str, SortedFile] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, step: ReplayStep, found: list[Changes]) -> None:
        """Take the changes of one more segment."""
        rows = dict.fromkeys((operator for operator, _ in step.operators.values()), 0)
        for log_id, batch, nbytes in found:
            operator, _ = step.operators[log_id]
            self.changes.setdefault(operator, []).append(batch)
            rows[operator] += batch.num_rows
            self.nbytes += nbytes
        self.steps.append((step, rows))

    def stage(self, operator: str, staged: SortedFile) -> None:
        """Replace an operator's changes by what its table has made of them."""
        self.nbytes -= sum(batch.nbytes for batch in self.changes.pop(operator))
        self.staged[operator] = staged

    def discard(self) -> None:
        """Delete what was staged."""
        for staged in self.staged.values():
            staged.delete()


async def join_segments(
    segments: Prefetcher[ReplayStep, tuple[ReplayStep, list[Changes]]], piece_bytes: int
) -> AsyncGenerator[LogPiece]:
    """Yield segments together until they hold so many bytes, in their order; closes ``segments``."""
    async with aclosing(segments):
        piece = LogPiece()
        async for step, found in segments:
            piece.add(step, found)
            if piece.nbytes >= piece_bytes:
                yield piece
                piece = LogPiece()
        if piece.steps:
            yield piece


def join_batches(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield many small batches, which the blocks of segments are cut into, as few larger ones."""
    few: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        few.append(batch)
        rows += batch.num_rows
        if rows >= _TOGETHER_ROWS:
            yield pa.concat_batches(few)
            few, rows = [], 0
    if few:
        yield pa.concat_batches(few)
