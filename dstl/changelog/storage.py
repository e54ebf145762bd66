"""The changelog storage of one TaskManager: all writers, one asker, one uploader (FLIP-158).

The ledgers say who owns what, the budget says who waits. Here it is decided what is sealed: what a checkpoint asks for,
at once; before any asks, a log that has grown large, and all of them when memory is short. What becomes of a seal is in
``segments_in_flight.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from dstl.changelog.change_set import ChangeSet
from dstl.changelog.log_segment import PersistResult, SegmentReferences
from dstl.changelog.object_names import SegmentNames
from dstl.changelog.segments_in_flight import Picked, Seal, SegmentsInFlight
from dstl.changelog.throttle import ByteBudget
from dstl.changelog.upload.uploader import Uploader
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed, Invalid
from dstl.metrics import NullRecorder, Recorder
from dstl.options import BatchingOptions
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from handles.segment_handle import SegmentHandle, SequenceNumber, SequenceNumberRange


class StateChangelogStorage:
    """All logs of one process.

    Invariants:
        1. Every change in a ledger or the budget is followed by :meth:`_look` within the same turn of the loop, and a
           pause by another when it ends: the state decides and not an event, so no wake-up is ever lost.
        2. A segment that no log needs and no checkpoint may reference is deleted, best effort, in the background; what
           is confirmed is never deleted here.
        3. A persist is never held back. Uploads that no checkpoint waits for pause after a failure, longer each time,
           so that a broken store is not hammered.
        4. After :meth:`close` every persist has ended and the budget is zero.

    Made and used on one event loop. The uploader and the store are the caller's to close, after this.

    Args:
        uploader: Gets segments into the store.
        store: The same location, for deletions.
        names: Names of segments.
        options: Thresholds.
        runtime: Clock and ids.
        recorder: Flink's ``uploadBatchSizes`` (change sets of one segment); ours ``seals.checkpoint``,
            ``seals.preemptive``, ``seals.memory``, ``segmentsInlined``, ``segmentsDeleted``,
            ``segmentsLeftToCleaner``, ``changelogBytesHeld``, ``segmentsInFlight``, ``backpressureSeconds``,
            ``backpressuredAppends``.
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
        self.references = SegmentReferences()
        self.names = names
        self._options = options
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self.budget = ByteBudget(options.byte_budget, runtime.clock, recorder, self.look_soon)
        self._writers: dict[str, StateChangelogWriter] = {}
        self._large: dict[StateChangelogWriter, None] = {}
        self.seals = SegmentsInFlight(
            uploader=uploader,
            names=names,
            options=options,
            runtime=runtime,
            recorder=recorder,
            host=self,
        )
        self._deleter = BackgroundDeleter(
            store, recorder=recorder, deleted="segmentsDeleted", left="segmentsLeftToCleaner"
        )
        self._look_is_due = False
        self._closed = False

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

    async def persist_all(
        self, requests: Sequence[tuple[StateChangelogWriter, SequenceNumber]], *, allow_inline: bool = True
    ) -> PersistResult:
        """Make everything from a number of each log to now durable, for one checkpoint. The FLIP's ``persistDurably``.

        What is durable already is reused, what is on its way is waited for, and the rest is sealed at once. The ranges
        count as referenced by a checkpoint until :meth:`confirm` or :meth:`reset` is called for the result.

        Args:
            requests: Writer, and first sequence number wanted of it: usually where the last materialization ended;
                each writer once.
            allow_inline: A seal of at most ``inline_threshold`` bytes is returned instead of stored, and the caller
                makes it durable itself.

        Raises:
            Closed: A writer was closed before or meanwhile.
            Invalid: A range was truncated or is not there yet, or a writer occurs twice.
            DstlError: The first error of an upload of its own. Everything is as if the checkpoint was reset; the
                changes are kept, and it can be asked again at once.
        """
        if len({writer.log_id for writer, _ in requests}) != len(requests):
            raise Invalid("persist_all: a writer occurs twice")
        claimed: dict[StateChangelogWriter, SequenceNumberRange] = {}
        try:
            for writer, from_sqn in requests:
                writer.next_sequence_number()
                claimed[writer] = writer.ledger.claim(from_sqn)
            await self._complete(claimed, allow_inline=allow_inline)
        except BaseException:
            for writer, wanted in claimed.items():
                writer.ledger.withdraw(wanted)
                self.touched(writer)
            raise
        return PersistResult(
            {writer.log_id: wanted for writer, wanted in claimed.items()},
            {writer.log_id: writer.ledger.segments(wanted) for writer, wanted in claimed.items()},
        )

    async def _complete(
        self, claimed: Mapping[StateChangelogWriter, SequenceNumberRange], *, allow_inline: bool
    ) -> None:
        """Seal and wait until nothing of the ranges is buffered or in flight.

        What others have sealed is waited for; where that fails it is sealed here, so that the checkpoint fails with an
        upload of its own alone.
        """
        while True:
            picked: list[Picked] = []
            for writer, wanted in claimed.items():
                if not allow_inline:
                    writer.ledger.take_back(wanted)
                picked += ((writer, *each) for each in writer.ledger.buffered(wanted))
            own = self._begin("checkpoint", picked, critical=True, may_inline=allow_inline)
            on_their_way = {seal for writer, wanted in claimed.items() for seal in writer.ledger.in_flight(wanted)}
            if not on_their_way:
                return
            await self.seals.wait_for(on_their_way)
            for writer in claimed:
                writer.check_open()
            for seal in own:
                if seal.error is not None:
                    raise seal.error

    def confirm(self, result: PersistResult, located: Mapping[str, SegmentHandle] | None = None) -> None:
        """The checkpoint with this result is complete: its objects are the coordinator's from now on.

        Logs that were closed meanwhile are skipped: what a checkpoint may reference was left to the coordinator then.

        Args:
            result: Of the persist.
            located: Where the manifest holds each inlined seal, by ``InlineSegment.id``.

        Raises:
            Invalid: An inlined seal has no place in ``located``.
        """
        for writer, wanted in self._open_logs(result):
            writer.ledger.confirm(wanted, located or {})
            self.touched(writer)

    def reset(self, result: PersistResult) -> None:
        """The checkpoint with this result was certainly aborted: the changes are only ours again.

        Durable ones are reused by the next persist, inlined ones wait in the buffer. Not to be called while the outcome
        is unknown.
        """
        for writer, wanted in self._open_logs(result):
            writer.ledger.reset(wanted)
            self.touched(writer)

    async def close(self) -> None:
        """Close every writer, give up uploads, end every persist, and delete unreferenced objects. Idempotent."""
        self._closed = True
        for writer in list(self._writers.values()):
            writer.close()
        self.budget.close()
        self._look()
        await self.seals.close()
        self._look()
        await self._deleter.close()

    # What the writers and the seals call.

    def look_soon(self) -> None:
        """Something has changed: see within this turn of the loop what follows from it."""
        if not self._look_is_due:
            self._look_is_due = True
            self._loop.call_soon(self._look)

    def touched(self, writer: StateChangelogWriter) -> None:
        """The writer holds more or less than before."""
        if writer.held_bytes >= self._options.preemptive_persist_threshold:
            self._large[writer] = None
        self.look_soon()

    def encode_ahead(self, log_id: str, sqn: SequenceNumber, changes: ChangeSet) -> None:
        """Encode a closed change set before a persist asks for it, unless it is small."""
        self.seals.encode_ahead(log_id, sqn, changes)

    def closed(self, writer: StateChangelogWriter) -> None:
        """The writer was closed; what is in flight of it comes back through its seals."""
        self._writers.pop(writer.log_id, None)
        self._large.pop(writer, None)
        self.seals.forget(writer.log_id)
        self.look_soon()

    def _look(self) -> None:
        self._look_is_due = False
        self.budget.wake()
        self.seals.give_up_unneeded()
        self._seal_early()
        self._deleter.delete(self.references.take_deletable())
        self._recorder.gauge("changelogBytesHeld", self.budget.used)

    def _seal_early(self) -> None:
        """Seal what no checkpoint has asked for: large logs, or all when appends wait and no upload frees memory."""
        is_short = self.budget.starving and not self.seals
        if self.seals.is_paused or not (self._large or is_short):
            return
        large, self._large = self._large, {}
        threshold = self._options.preemptive_persist_threshold
        picked: list[Picked] = []
        for writer in self._writers.values() if is_short else large:
            if is_short or writer.held_bytes >= threshold:
                writer.next_sequence_number()
                picked += ((writer, *each) for each in writer.ledger.buffered())
        self._begin("memory" if is_short else "preemptive", picked, critical=False)

    def _begin(
        self, reason: str, picked: Sequence[Picked], *, critical: bool, may_inline: bool = False
    ) -> Sequence[Seal]:
        if not picked:
            return ()
        self._recorder.increment(f"seals.{reason}")
        return self.seals.begin(picked, critical=critical, may_inline=may_inline)

    def _open_logs(self, result: PersistResult) -> Iterator[tuple[StateChangelogWriter, SequenceNumberRange]]:
        for log_id, wanted in result.ranges.items():
            if (writer := self._writers.get(log_id)) is not None:
                yield writer, wanted
