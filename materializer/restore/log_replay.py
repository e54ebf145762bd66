"""The second half of a restore: the segments after the bases, in the order of their commits."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass

from dstl.changelog.segment.reader import Changes, SegmentReader
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.patience import Patience
from handles.checkpoint import CheckpointId, CompletedCheckpoint, SegmentEntry
from handles.key_group import KeyGroup, KeyGroupRange
from handles.sequence_number import SequenceNumberRange

__all__ = ["ReplayAfter", "ReplayStep", "replay_steps", "replayed"]

_AHEAD_BYTES = 32 << 20
_AHEAD_SEGMENTS = 16
_DECODED_AHEAD_BYTES = 64 << 20
"""What segments that are not due yet may hold decoded: a few kilobytes of zstd can be gigabytes of changes."""
_DECODERS = max(1, (os.cpu_count() or 2) // 2)
"""Blocks decoded at once. More would only take turns with whoever loads the bases meanwhile, and be slower for it."""

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


def replay_steps(checkpoint: CompletedCheckpoint, owned: KeyGroupRange, after: ReplayAfter) -> list[ReplayStep]:
    """Return the segments to replay over some bases, in order; what every base contains is not opened."""
    steps = []
    bases: list[list[tuple[CheckpointId, KeyGroup]]] = []
    for log in checkpoint.logs:
        common = log.key_groups.intersect(owned)
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


class _DecodedAhead:
    """Counts the decoded bytes of segments that wait for their turn. One event loop.

    Whose turn it is may go on whatever is held, so nobody waits for ever.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[int, int] = {}
        self._due = 0
        self._changed = asyncio.Condition()

    async def take(self, number: int, nbytes: int) -> None:
        """Count bytes of a segment, as soon as there is room for them or it is due."""
        async with self._changed:
            while number > self._due and sum(self._held.values()) + nbytes > self._limit:
                await self._changed.wait()
            self._held[number] = self._held.get(number, 0) + nbytes

    async def let_go(self, number: int, *, due: int) -> None:
        """Forget the bytes of a segment, and say which one is due now."""
        async with self._changed:
            self._held.pop(number, None)
            self._due = due
            self._changed.notify_all()


async def replayed(
    steps: Iterable[ReplayStep], store: ObjectStore, owned: KeyGroupRange, runtime: Runtime
) -> AsyncGenerator[tuple[ReplayStep, list[Changes]]]:
    """Yield the steps in order, each with its changes; a bounded number is fetched ahead of the caller.

    Bounded are the segments, their stored bytes, and the bytes that they are decoded to.

    Raises:
        CorruptData: A segment is damaged.
        MissingState: A segment, or a part of one, is not there.
        Unavailable: The store did not answer several times in a row.
    """
    waiting = deque(enumerate(steps))
    running: deque[tuple[int, ReplayStep, asyncio.Task[list[Changes]]]] = deque()
    held = 0
    decoded = _DecodedAhead(_DECODED_AHEAD_BYTES)
    turn = asyncio.Semaphore(_DECODERS)
    try:
        while waiting or running:
            while waiting and (
                not running
                or (len(running) < _AHEAD_SEGMENTS and held + waiting[0][1].entry.handle.size <= _AHEAD_BYTES)
            ):
                number, step = waiting.popleft()
                held += step.entry.handle.size
                loading = _load(number, step, store, owned, runtime, turn, decoded)
                running.append((number, step, asyncio.ensure_future(loading)))
            number, step, task = running[0]
            found = await task
            running.popleft()
            yield step, found
            del found
            held -= step.entry.handle.size
            await decoded.let_go(number, due=number + 1)
    finally:
        for _, _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in running), return_exceptions=True)


async def _load(
    number: int,
    step: ReplayStep,
    store: ObjectStore,
    owned: KeyGroupRange,
    runtime: Runtime,
    turn: asyncio.Semaphore,
    decoded: _DecodedAhead,
) -> list[Changes]:
    async def read() -> list[Changes]:
        found: list[Changes] = []
        reader = SegmentReader(store, step.entry.handle, turn=turn)
        async with contextlib.aclosing(reader.read(owned, step.wanted)) as changes:
            async for each in changes:
                await decoded.take(number, each[3].nbytes)
                found.append(each)
        return found

    return await Patience(runtime).read(read)
