"""Segments in flight: sealed change sets are encoded, stored or handed out, and settled with their ledgers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dstl.changelog.batcher import Batcher
from dstl.changelog.change_set import ENCODED_AHEAD_BYTES, ChangeSet
from dstl.changelog.log_segment import InlineSegment, SegmentReferences
from dstl.changelog.object_names import SegmentNames
from dstl.changelog.segment.encoder import EncodedBlocks, encode_blocks, encode_segment, segment_checksum
from dstl.changelog.upload.uploader import StoredObject, Upload, Uploader
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed
from dstl.metrics import Recorder
from dstl.options import BatchingOptions
from dstl.runtime import Runtime
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumber

__all__ = ["Picked", "SegmentsInFlight"]

# Up to this, handing over to a thread costs more than the encoding (0.3 ms a change set, 1 ms a megabyte).
_BYTES_ON_LOOP = 128 << 10
_SETS_ON_LOOP = 8

Picked = tuple[StateChangelogWriter, SequenceNumber, int]
"""A change set to be sealed: its log's writer, its number, its bytes."""


@dataclass(slots=True, eq=False)
class _Seal:
    id: int
    sets: list[tuple[str, SequenceNumber, ChangeSet]]
    writers: list[StateChangelogWriter]
    nbytes: int
    alone: bool
    ahead: dict[tuple[str, SequenceNumber], asyncio.Future[EncodedBlocks]]
    upload: Upload | None = None
    task: asyncio.Task[None] | None = None

    @property
    def needed(self) -> bool:
        return any(writer.ledger.needs(self.id) for writer in self.writers)

    @property
    def critical(self) -> bool:
        return any(writer.ledger.critical(self.id) for writer in self.writers)


class SegmentsInFlight:
    """The seals of one storage that are on their way. One event loop.

    Invariant: a seal ends exactly once, as stored, handed out or failed, and each ledger in it is told.

    Args:
        uploader: Gets segments into the store.
        names: Names of segments.
        options: Thresholds.
        runtime: Clock and ids.
        recorder: ``uploadBatchSizes`` and ``segmentsInlined``.
        batcher: Told how uploads end.
        references: Told which objects there are.
        touched: Called with each writer that a seal's end has changed.

    Attributes:
        upload_attempts: PUTs of segments so far, retries and hedges included; an object in parts counts once.
        hedges: How many of those of the uploads that have ended were hedges.
    """

    def __init__(
        self,
        *,
        uploader: Uploader,
        names: SegmentNames,
        options: BatchingOptions,
        runtime: Runtime,
        recorder: Recorder,
        batcher: Batcher,
        references: SegmentReferences,
        touched: Callable[[StateChangelogWriter], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._uploader = uploader
        self._names = names
        self._options = options
        self._runtime = runtime
        self._recorder = recorder
        self._batcher = batcher
        self._references = references
        self._touched = touched
        self._seals: dict[int, _Seal] = {}
        self._ahead: dict[str, dict[SequenceNumber, asyncio.Future[EncodedBlocks]]] = {}
        self._last_seal = 0
        self.upload_attempts = 0
        self.hedges = 0

    def __len__(self) -> int:
        return len(self._seals)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those that carry the seals; each ends with its seal."""
        return [seal.task for seal in self._seals.values() if seal.task is not None]

    def begin(self, picked: Sequence[Picked]) -> None:
        """Seal these change sets, in segments of at most about ``segment_size``, and send them on their way."""
        parts = list(_cut(picked, self._options.segment_size))
        for part in parts:
            self._start(part, alone=len(parts) == 1)

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode the blocks of a change set in a thread, for the seal that will hold it; not if it is small."""
        if changes.nbytes >= ENCODED_AHEAD_BYTES:
            work = partial(encode_blocks, sqn, changes, self._options.compression_level)
            self._ahead.setdefault(log_id, {})[sqn] = self._loop.run_in_executor(None, work)

    def forget(self, log_id: str) -> None:
        """Nobody will seal this log's change sets any more."""
        self._ahead.pop(log_id, None)

    def review(self, seal_ids: Iterable[int]) -> None:
        """Look at what the logs need now: give up what nobody needs, hurry what a checkpoint has begun to wait for."""
        for seal in (self._seals[seal_id] for seal_id in seal_ids):
            if not seal.needed:
                self._give_up(seal)
            elif seal.upload is not None and not seal.upload.critical and seal.critical:
                seal.upload.make_critical()

    def _start(self, part: Sequence[Picked], *, alone: bool) -> None:
        self._last_seal += 1
        by_writer: dict[StateChangelogWriter, list[SequenceNumber]] = {}
        for writer, sqn, _ in part:
            by_writer.setdefault(writer, []).append(sqn)
        sets = [
            (writer.log_id, sqn, changes)
            for writer, sqns in by_writer.items()
            for sqn, changes in writer.ledger.seal(self._last_seal, sqns)
        ]
        ahead = {(log_id, sqn): found for log_id, sqn, _ in sets if (found := self._take_ahead(log_id, sqn))}
        seal = _Seal(self._last_seal, sets, list(by_writer), sum(nbytes for *_, nbytes in part), alone, ahead)
        self._recorder.observe("uploadBatchSizes", len(sets))
        self._seals[seal.id] = seal
        seal.task = self._loop.create_task(self._store_seal(seal))
        seal.task.add_done_callback(partial(self._seal_ended, seal))

    async def _store_seal(self, seal: _Seal) -> None:
        try:
            data = await self._encode(seal)
            if len(data) <= self._options.inline_threshold and self._may_inline(seal):
                self._hand_out(seal, data)
                return
            seal.upload = self._uploader.submit(
                self._names.new_object(),
                data,
                critical=seal.critical,
                checksum=segment_checksum(data),
                on_attempt=self._count_attempt,
            )
            try:
                stored = await seal.upload
            finally:
                self.hedges += seal.upload.hedges
        except Exception as error:
            if seal.needed:
                self._batcher.failed(self._runtime.clock.now())
            self._failed(seal, error)
        else:
            self._stored(seal, stored)

    def _count_attempt(self, number: int, name: str) -> None:
        self.upload_attempts += 1

    def _give_up(self, seal: _Seal) -> None:
        """Nobody needs it any more: an upload cleans up behind itself, or was quicker and its object is deleted."""
        if seal.upload is not None:
            seal.upload.cancel()
        elif seal.task is not None:
            seal.task.cancel()

    def _seal_ended(self, seal: _Seal, task: asyncio.Task[None]) -> None:
        if seal.id in self._seals:  # cancelled, perhaps before its first step
            if seal.upload is not None:
                seal.upload.cancel()
            self._failed(seal, Closed("the upload was cancelled; its changes are kept while their log is open"))

    def _take_ahead(self, log_id: str, sqn: SequenceNumber) -> asyncio.Future[EncodedBlocks] | None:
        of_log = self._ahead.get(log_id, {})
        found = of_log.pop(sqn, None)
        if not of_log:
            self._ahead.pop(log_id, None)
        return found

    async def _encode(self, seal: _Seal) -> bytes:
        encoded = {key: await ahead for key, ahead in seal.ahead.items()}
        seal.ahead.clear()
        work = partial(
            encode_segment,
            seal.sets,
            writer_id=self._names.writer_id,
            metadata={"query": self._names.query_id},
            compression_level=self._options.compression_level,
            encoded=encoded,
        )
        if seal.nbytes <= _BYTES_ON_LOOP and len(seal.sets) <= _SETS_ON_LOOP:
            return work()
        return await self._loop.run_in_executor(None, work)

    def _may_inline(self, seal: _Seal) -> bool:
        waiting = [writer.ledger for writer in seal.writers if writer.ledger.needs(seal.id)]
        return seal.alone and bool(waiting) and all(ledger.may_inline(seal.id) for ledger in waiting)

    def _hand_out(self, seal: _Seal, data: bytes) -> None:
        inline = InlineSegment(self._runtime.new_id(), data, segment_checksum(data))
        self._recorder.increment("segmentsInlined")
        del self._seals[seal.id]
        for writer in seal.writers:
            writer.settle(writer.ledger.handed_out(seal.id, inline))
            self._touched(writer)

    def _stored(self, seal: _Seal, stored: StoredObject) -> None:
        handle = SegmentHandle(stored.name, stored.size, stored.checksum)
        self._batcher.succeeded()
        self._references.track(handle.name, len(seal.sets))
        del self._seals[seal.id]
        for writer in seal.writers:
            writer.settle(writer.ledger.stored(seal.id, handle))
            self._touched(writer)

    def _failed(self, seal: _Seal, error: BaseException) -> None:
        del self._seals[seal.id]
        for writer in seal.writers:
            writer.settle(writer.ledger.failed(seal.id, error))
            self._touched(writer)


def _cut(picked: Sequence[Picked], segment_size: int) -> Iterator[list[Picked]]:
    """Cut a seal into segments of about equal size, so that a large one is encoded and stored side by side."""
    total = sum(nbytes for *_, nbytes in picked)
    share = total / max(1, math.ceil(total / segment_size))
    part: list[Picked] = []
    filled = 0
    for each in picked:
        part.append(each)
        filled += each[2]
        if filled >= share:
            yield part
            part, filled = [], 0
    if part:
        yield part
