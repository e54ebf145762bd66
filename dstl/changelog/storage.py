"""The changelog storage of one TaskManager: all writers, one batcher, one uploader (FLIP-158).

The thin shell around the pure parts: the ledgers say who owns what, the batcher says when to seal, the budget says who
waits. Here their decisions are executed; what becomes of a seal is in ``segments_in_flight.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from dstl.changelog.batcher import Batcher, SealDecision
from dstl.changelog.change_set import ChangeSet
from dstl.changelog.log_segment import InlineSegment, LogSegment, SegmentReferences
from dstl.changelog.object_names import SegmentNames
from dstl.changelog.segments_in_flight import Picked, SegmentsInFlight
from dstl.changelog.throttle import ByteBudget, Throttle
from dstl.changelog.upload.uploader import Uploader
from dstl.changelog.writer import StateChangelogWriter
from dstl.crash_points import reach
from dstl.errors import Closed, Invalid
from dstl.metrics import NullRecorder, Recorder
from dstl.options import BatchingOptions
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from handles.segment_handle import SegmentHandle
from handles.sequence_number import SequenceNumber, SequenceNumberRange

__all__ = ["PersistResult", "StateChangelogStorage"]


@dataclass(frozen=True, slots=True)
class PersistResult:
    """The answer of :meth:`StateChangelogStorage.persist_all`: durable segments, and segments to be made durable.

    Attributes:
        ranges: What was asked of each log, by log id; may be empty ranges.
        segments: Where it lies, by log id: in order, without a gap.
    """

    ranges: Mapping[str, SequenceNumberRange]
    segments: Mapping[str, tuple[LogSegment, ...]]

    @property
    def inlined(self) -> tuple[InlineSegment, ...]:
        """The seals that travel with this answer and must be written inside the manifest; each once."""
        found = (s.location for log in self.segments.values() for s in log)
        return tuple({s.id: s for s in found if isinstance(s, InlineSegment)}.values())


class StateChangelogStorage:
    """All logs of one process.

    Invariants:
        1. Every change in a ledger, a queue or the budget is followed by one look at everything (:meth:`_look`) within
           the same turn of the loop, so nothing is left waiting that could go.
        2. A segment that no log needs and no checkpoint may reference is deleted, best effort, in the background; what
           is confirmed is never deleted here.
        3. After :meth:`close` every future is settled and the budget is zero.

    Made and used on one event loop. The uploader and the store are the caller's to close, after this.

    Args:
        uploader: Gets segments into the store.
        store: The same location, for deletions.
        names: Names of segments.
        options: Thresholds.
        runtime: Clock and ids.
        recorder: Flink's ``uploadBatchSizes`` (change sets of one segment) and ``uploadQueueSize`` (logs waiting for a
            seal); ours ``seals.<reason>``, ``segmentsInlined``, ``segmentsDeleted``, ``segmentsLeftToCleaner``,
            ``changelogBytesHeld``, ``segmentsInFlight``, ``backpressureSeconds``, ``backpressuredAppends``.
    """

    def __init__(
        self,
        *,
        uploader: Uploader,
        store: ObjectStore,
        names: SegmentNames,
        options: BatchingOptions,
        runtime: Runtime,
        recorder: Recorder = NullRecorder(),
    ) -> None:
        self.budget = ByteBudget(options.byte_budget)
        self.references = SegmentReferences()
        self._names = names
        self._runtime = runtime
        self._recorder = recorder
        self.loop = asyncio.get_running_loop()
        self._batcher = Batcher(options)
        self._throttle = Throttle(self.budget, runtime.clock, recorder, self._changed)
        self._writers: dict[str, StateChangelogWriter] = {}
        self._touched: dict[StateChangelogWriter, None] = {}
        self._seals = SegmentsInFlight(
            uploader=uploader,
            names=names,
            options=options,
            runtime=runtime,
            recorder=recorder,
            batcher=self._batcher,
            references=self.references,
            touched=self.touched,
        )
        self._deleter = BackgroundDeleter(
            store, recorder=recorder, deleted="segmentsDeleted", left="segmentsLeftToCleaner"
        )
        self._look_is_due = False
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self._closed = False

    @property
    def writer_id(self) -> str:
        """The id in the names of all segments of this process, by which the cleaner knows them as alive."""
        return self._names.writer_id

    @property
    def upload_attempts(self) -> int:
        """PUTs of segments so far, retries and hedges included; an object in parts counts once."""
        return self._seals.upload_attempts

    @property
    def hedges(self) -> int:
        """Hedges of segments whose uploads have ended."""
        return self._seals.hedges

    def create_writer(self, log_id: str) -> StateChangelogWriter:
        """Begin a new log.

        Args:
            log_id: Unique per incarnation; never used before.

        Raises:
            Closed: The storage was closed.
            Invalid: A writer of this log is open.
        """
        if self._closed:
            raise Closed("the changelog storage is closed: the TaskManager is shutting down")
        if log_id in self._writers:
            raise Invalid(f"log {log_id} has a writer already: log ids are unique per incarnation")
        writer = self._writers[log_id] = StateChangelogWriter(log_id, self)
        return writer

    def reserve(self, nbytes: int) -> AbstractAsyncContextManager[None]:
        """Wait until so many more bytes fit, and hold them for the body, which appends them.

        ``async with storage.reserve(n): writer.append_batch(batch)``. Granted in order; what is larger than the whole
        budget goes through alone. It waits as long as the store takes, and never fails because of it.

        Raises:
            Closed: The storage was closed, also while waiting.
        """
        return self._throttle.reserve(nbytes)

    async def persist_all(
        self, requests: Sequence[tuple[StateChangelogWriter, SequenceNumber]], *, allow_inline: bool = True
    ) -> PersistResult:
        """Persist many logs for one checkpoint: one seal at once, for nobody else will ask.

        Args:
            requests: Writer, and first sequence number wanted of it; each writer once.
            allow_inline: A seal of at most ``inline_threshold`` bytes is returned instead of stored. The caller then
                answers with :meth:`confirm` or :meth:`reset`.

        Raises:
            Closed: A writer was closed before or meanwhile.
            Invalid: A range was truncated or is not there yet, or a writer occurs twice.
            DstlError: The first upload error. Everything is as if the checkpoint was reset; ask again at any time.
        """
        if len({writer.log_id for writer, _ in requests}) != len(requests):
            raise Invalid("persist_all: a writer occurs twice")
        ranges: dict[str, SequenceNumberRange] = {}
        futures: dict[str, asyncio.Future[tuple[LogSegment, ...]]] = {}
        try:
            for writer, from_sqn in requests:
                futures[writer.log_id] = writer.persist(from_sqn, allow_inline=allow_inline)
                ranges[writer.log_id] = SequenceNumberRange(from_sqn, writer.ledger.next_sqn)
            self._look(all_asked=True)
            if futures:
                await asyncio.wait(futures.values())
            return PersistResult(ranges, {log_id: future.result() for log_id, future in futures.items()})
        except BaseException:
            for writer, _ in requests:
                future = futures.get(writer.log_id)
                if future is not None and not future.cancel() and future.exception() is None:
                    span = ranges[writer.log_id]
                    writer.reset(span.from_sqn, span.to_sqn)
            raise

    def confirm(self, result: PersistResult, located: Mapping[str, SegmentHandle] | None = None) -> None:
        """The checkpoint with this result is complete; see :meth:`StateChangelogWriter.confirm`.

        Logs that were closed meanwhile are skipped: what a checkpoint may reference was left to the coordinator then.

        Args:
            result: Of the persist.
            located: Where the manifest holds each of ``result.inlined``, by ``InlineSegment.id``.

        Raises:
            Invalid: An inlined seal has no place in ``located``.
        """
        for log_id, span in result.ranges.items():
            if (writer := self._writers.get(log_id)) is not None:
                writer.confirm(span.from_sqn, span.to_sqn, located)

    def reset(self, result: PersistResult) -> None:
        """The checkpoint with this result was certainly aborted; see :meth:`StateChangelogWriter.reset`."""
        for log_id, span in result.ranges.items():
            if (writer := self._writers.get(log_id)) is not None:
                writer.reset(span.from_sqn, span.to_sqn)

    async def close(self) -> None:
        """Close every writer, settle every future, give up uploads, delete what nobody may reference. Idempotent."""
        self._closed = True
        for writer in list(self._writers.values()):
            writer.close()
        self._throttle.close()
        self._look()
        running = [task for task in (self._timer, *self._seals.tasks) if task is not None]
        if running:
            await asyncio.wait(running)
        self._look()
        await self._deleter.close()

    # What the writers call.

    def touched(self, writer: StateChangelogWriter) -> None:
        """The writer holds more or less than before."""
        self._touched[writer] = None
        self._look_soon()

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode a closed change set before a persist asks for it, unless it is small."""
        self._seals.encode_ahead(log_id, sqn, changes)

    def closed(self, writer: StateChangelogWriter) -> None:
        """The writer was closed; what is in flight of it comes back through its seals."""
        self._writers.pop(writer.log_id, None)
        self._seals.forget(writer.log_id)
        self._touched[writer] = None
        self._look_soon()

    # The look at everything.

    def _changed(self) -> None:
        for writer in self._touched:
            writer.account()
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._look_is_due:
            self._look_is_due = True
            self.loop.call_soon(self._look)

    def _look(self, *, all_asked: bool = False) -> None:
        self._look_is_due = False
        now = self._runtime.clock.now()
        self._update(now)
        self._throttle.wake()
        while (
            decision := self._batcher.decide(
                now, starving=self.budget.starving, draining=bool(self._seals), all_asked=all_asked
            )
        ) is not None:
            self._execute(decision)
            self._update(now)
        self._deleter.delete(self.references.take_deletable())
        self._arm(now)
        self._recorder.gauge("uploadQueueSize", self._batcher.queued)
        self._recorder.gauge("segmentsInFlight", len(self._seals))
        self._recorder.gauge("changelogBytesHeld", self.budget.used)

    def _update(self, now: float) -> None:
        touched, self._touched = self._touched, {}
        for writer in touched:
            writer.account()
            ledger = writer.ledger
            asked = sum(nbytes for _, nbytes in ledger.unsealed()) if ledger.waiting else 0
            self._batcher.update(writer.log_id, held=writer.held_bytes, asked=asked, now=now)
            self._seals.review(ledger.in_flight)

    def _arm(self, now: float) -> None:
        deadline = self._batcher.deadline(now, starving=self.budget.starving)
        if self._timer is not None and (deadline is None or deadline < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if deadline is not None and self._timer is None:
            self._timer_at = deadline
            self._timer = self.loop.create_task(self._tick(max(0.0, deadline - now)))

    async def _tick(self, wait: float) -> None:
        await self._runtime.clock.sleep(wait)
        self._timer = None
        self._look()

    def _execute(self, decision: SealDecision) -> None:
        self._recorder.increment(f"seals.{decision.reason.value}")
        picked: list[Picked] = []
        for log_ids, whole in ((decision.whole, True), (decision.asked, False)):
            for log_id in log_ids:
                writer = self._writers[log_id]
                if whole:
                    writer.roll_open()
                picked += ((writer, *each) for each in writer.ledger.unsealed(everything=whole))
                self._touched[writer] = None
        reach("T2")
        self._seals.begin(picked)
