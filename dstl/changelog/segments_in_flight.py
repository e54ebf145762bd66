"""Segments in flight: sealed change sets are encoded, stored or handed out, and settled with their ledgers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from dstl.changelog.change_set import ENCODED_AHEAD_BYTES, ChangeSet
from dstl.changelog.ledger import LogLedger
from dstl.changelog.log_segment import InlineSegment
from dstl.changelog.object_names import SegmentNames
from dstl.changelog.segment.encoder import EncodedBlocks, encode_blocks, encode_segment, segment_checksum
from dstl.changelog.upload.uploader import StoredObject, Upload, Uploader
from dstl.changelog.writer import StateChangelogWriter, WriterHost
from dstl.crash_points import reach
from dstl.metrics import Recorder
from dstl.options import BatchingOptions
from dstl.runtime import Backoff, Runtime
from handles.segment_handle import SegmentHandle, SequenceNumber

# Up to this, handing over to a thread costs more than the encoding (0.3 ms a change set, 1 ms a megabyte).
_BYTES_ON_LOOP = 128 << 10
_SETS_ON_LOOP = 8  # at 0.3 ms each, what the loop may be busy for

# Between pre-emptive uploads to a store that refuses them. The first is as short as a passing fault, for appends may
# wait for it; the longest asks often enough to notice within seconds that the store is back.
_BACKOFF = Backoff(first_s=0.1, longest_s=5.0)

Picked: TypeAlias = tuple[StateChangelogWriter, SequenceNumber, int]
"""A change set to be sealed: its log's writer, its number, its bytes."""


@dataclass(slots=True, eq=False)
class Seal:
    """Change sets that are stored, or handed out, as one segment.

    Attributes:
        critical: A checkpoint waits for it.
        may_inline: It may be handed out instead of stored.
        error: Why it was not stored, where something in it was still needed.
    """

    id: int
    sets: list[tuple[str, SequenceNumber, ChangeSet]]
    writers: list[StateChangelogWriter]
    nbytes: int
    critical: bool
    may_inline: bool
    ahead: dict[tuple[str, SequenceNumber], asyncio.Future[EncodedBlocks]]
    upload: Upload | None = None
    task: asyncio.Task[None] = field(init=False)
    error: Exception | None = None

    @property
    def is_needed(self) -> bool:
        """True while a log waits for it."""
        return any(writer.ledger.needs(self.id) for writer in self.writers)


class SegmentsInFlight:
    """The seals of one storage that are on their way. One event loop.

    Invariant: a seal ends exactly once, as stored, handed out or failed, and by then each ledger in it knows.

    Args:
        uploader: Gets segments into the store.
        names: Names of segments.
        options: Thresholds.
        runtime: Clock and ids.
        recorder: ``uploadBatchSizes``, ``segmentsInFlight`` and ``segmentsInlined``.
        host: The storage.

    Attributes:
        upload_attempts: PUTs of the uploads that have ended, retries and hedges too; an object in parts counts once.
        hedges: How many of those were hedges.
    """

    def __init__(
        self,
        *,
        uploader: Uploader,
        names: SegmentNames,
        options: BatchingOptions,
        runtime: Runtime,
        recorder: Recorder,
        host: WriterHost,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._uploader = uploader
        self._names = names
        self._options = options
        self._runtime = runtime
        self._recorder = recorder
        self._host = host
        self._seals: dict[int, Seal] = {}
        self._ahead: dict[tuple[str, SequenceNumber], asyncio.Future[EncodedBlocks]] = {}
        self._last_seal = 0
        self._failures = 0
        self._pause: asyncio.TimerHandle | None = None
        self.upload_attempts = 0
        self.hedges = 0

    def __len__(self) -> int:
        return len(self._seals)

    @property
    def is_paused(self) -> bool:
        """True for a while after a failed upload: uploads that no checkpoint waits for should not begin."""
        return self._pause is not None

    def begin(self, picked: Sequence[Picked], *, critical: bool, may_inline: bool = False) -> list[Seal]:
        """Seal these change sets, in segments of at most about ``segment_size``, and send them on their way.

        Args:
            picked: What to seal; all of it is buffered.
            critical: A checkpoint waits for them.
            may_inline: A single small one may be handed out.
        """
        reach("T2")
        parts = list(_cut(picked, self._options.segment_size))
        return [self._start(part, critical, may_inline and len(parts) == 1) for part in parts]

    async def wait_for(self, seal_ids: Collection[int]) -> None:
        """Wait until these have ended, however they do; a checkpoint needs them, so they are hurried."""
        seals = [self._seals[seal_id] for seal_id in seal_ids]
        for seal in seals:
            seal.critical = True
            if seal.upload is not None:
                seal.upload.make_critical()
        await asyncio.wait([seal.task for seal in seals])

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode the blocks of a large change set in a thread, for the seal that will hold it."""
        if changes.nbytes >= ENCODED_AHEAD_BYTES:
            work = partial(encode_blocks, sqn, changes, self._options.compression_level)
            self._ahead[log_id, sqn] = self._loop.run_in_executor(None, work)

    def forget(self, log_id: str) -> None:
        """This log's change sets will not be sealed any more."""
        self._ahead = {key: blocks for key, blocks in self._ahead.items() if key[0] != log_id}

    def give_up_unneeded(self) -> None:
        """Give up what no log waits for any more; an upload that was quicker has its object deleted."""
        for seal in self._seals.values():
            if not seal.is_needed:
                if seal.upload is not None:
                    seal.upload.cancel()
                else:
                    seal.task.cancel()

    async def close(self) -> None:
        """Wait until every seal has ended; no log needs any."""
        self._resume()
        if self._seals:
            await asyncio.wait([seal.task for seal in self._seals.values()])
        self._resume()

    def _start(self, part: Sequence[Picked], critical: bool, may_inline: bool) -> Seal:
        self._last_seal += 1
        by_writer: dict[StateChangelogWriter, list[SequenceNumber]] = {}
        for writer, sqn, _ in part:
            by_writer.setdefault(writer, []).append(sqn)
        sets = [
            (writer.log_id, sqn, changes)
            for writer, sqns in by_writer.items()
            for sqn, changes in writer.ledger.seal(self._last_seal, sqns)
        ]
        ahead = {key: self._ahead.pop(key) for log_id, sqn, _ in sets if (key := (log_id, sqn)) in self._ahead}
        nbytes = sum(nbytes for *_, nbytes in part)
        seal = Seal(self._last_seal, sets, list(by_writer), nbytes, critical, may_inline, ahead)
        self._recorder.observe("uploadBatchSizes", len(sets))
        self._seals[seal.id] = seal
        self._recorder.gauge("segmentsInFlight", len(self._seals))
        seal.task = self._loop.create_task(self._store_seal(seal))
        seal.task.add_done_callback(partial(self._seal_ended, seal))
        return seal

    async def _store_seal(self, seal: Seal) -> None:
        try:
            data = await self._encode(seal)
            if seal.may_inline and len(data) <= self._options.inline_threshold:
                self._hand_out(seal, data)
                return
            seal.upload = self._uploader.submit(
                self._names.new_object(),
                data,
                critical=seal.critical,
                checksum=segment_checksum(data),
            )
            try:
                stored = await seal.upload
            finally:
                self.upload_attempts += seal.upload.sent
                self.hedges += seal.upload.hedges
        except Exception as error:
            if seal.is_needed:
                seal.error = error
                self._failures += 1
                self._resume()
                self._pause = self._loop.call_later(_BACKOFF.ceiling(self._failures), self._resume)
            self._failed(seal)
        else:
            self._stored(seal, stored)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
            self._host.look_soon()

    def _seal_ended(self, seal: Seal, task: asyncio.Task[None]) -> None:
        if seal.id in self._seals:  # cancelled, perhaps before its first step
            if seal.upload is not None:
                seal.upload.cancel()
            self._failed(seal)

    async def _encode(self, seal: Seal) -> bytes:
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

    def _hand_out(self, seal: Seal, data: bytes) -> None:
        inline = InlineSegment(self._runtime.new_id(), data, segment_checksum(data))
        self._recorder.increment("segmentsInlined")
        self._end(seal, lambda ledger: ledger.handed_out(seal.id, inline))

    def _stored(self, seal: Seal, stored: StoredObject) -> None:
        handle = SegmentHandle(stored.name, stored.size, stored.checksum)
        self._failures = 0
        self._resume()
        self._host.references.track(handle.name, len(seal.sets))
        self._end(seal, lambda ledger: ledger.stored(seal.id, handle))

    def _failed(self, seal: Seal) -> None:
        self._end(seal, lambda ledger: ledger.failed(seal.id))

    def _end(self, seal: Seal, report: Callable[[LogLedger[ChangeSet]], None]) -> None:
        del self._seals[seal.id]
        self._recorder.gauge("segmentsInFlight", len(self._seals))
        for writer in seal.writers:
            report(writer.ledger)
            self._host.touched(writer)


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
