"""An execution makes one checkpoint: the TaskManagers persist, a manifest is assembled and committed, all are told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dstl.checkpoint.assembly import assemble, inlined_handles, recovery_work
from dstl.checkpoint.coordinator import CheckpointCoordinator, Trigger
from dstl.checkpoint.fleet.fleet import Fleet
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.report import CheckpointReport
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.spark_commit import CheckpointInTheMaking, FilesStep
from dstl.checkpoint.state_catalogue import StateCatalogue
from dstl.crash_points import reach
from dstl.errors import CheckpointDeclined, DstlError, Fenced, OutcomeUnknown, TaskManagerLost
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.rpc.fleet_messages import Persisted
from dstl.runtime import Clock
from dstl.store.instrumented import InstrumentedStore
from handles.checkpoint import CompletedCheckpoint
from materializer.restore.restore import MEASURABLE_BYTES

_LEAST_COMMIT_S = 1.0  # a slow persist must not leave the commit no time at all: it is one PUT


class Stopwatch:
    """Tells the seconds since the last lap, and since it was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._last = clock.now()

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin the next."""
        before, self._last = self._last, self._clock.now()
        return self._last - before

    def total(self) -> float:
        """Return the seconds from the beginning to the end of the last lap."""
        return self._last - self._began


class CheckpointExecution:
    """Makes the checkpoints of one query, one at a time. One event loop.

    Args:
        store: What ``log`` writes through: its requests are the checkpoints'.
        log: The location's manifest log, this driver's view.
        fleet: The TaskManagers.
        catalogue: The query's operators.
        objects: Keeps what retained checkpoints refer to, and deletes the rest.
        options: Retention and deadlines.
        materialization: How many generations of bases are kept, and the rates that recovery is estimated by.
    """

    def __init__(
        self,
        store: InstrumentedStore,
        log: ManifestLog,
        fleet: Fleet,
        catalogue: StateCatalogue,
        objects: RetainedObjects,
        *,
        options: CheckpointOptions,
        materialization: MaterializationOptions,
    ) -> None:
        self._store = store
        self._runtime = log.runtime
        self._log = log
        self._fleet = fleet
        self._catalogue = catalogue
        self._objects = objects
        self._options = options
        self._materialization = materialization
        self._restore_rate: float | None = None
        self._in_sight: dict[int, CompletedCheckpoint] = {}

    def note_restore(self, nbytes: int, seconds: float) -> None:
        """Estimate recovery by this restore from now on, where it was large enough to measure."""
        if nbytes >= MEASURABLE_BYTES and seconds > 0:
            self._restore_rate = nbytes / seconds

    async def run(
        self,
        coordinator: CheckpointCoordinator,
        trigger: Trigger,
        query_id: str,
        sparks_ms: Mapping[str, int] = {},
        files: CheckpointInTheMaking | None = None,
    ) -> CheckpointReport:
        """Make a checkpoint; when this returns, it is durable and the TaskManagers know.

        Args:
            coordinator: Of the run; it takes the checkpoint in, or fails the batch.
            trigger: What it has said.
            query_id: Whose checkpoint it is.
            sparks_ms: Spark's watermark of the batch by operator, for the report.
            files: Spark's own commit of the batch, to be in the same record; None where that has been written before.

        Raises:
            Fenced: A newer driver has taken over.
            OutcomeUnknown: It may be there: the run cannot go on before that is known.
            TaskManagerLost: One is gone, and the checkpoint was aborted.
            CheckpointDeclined: It was aborted for another reason; what was persisted is kept for the next one.
            DstlError: It was aborted for a reason that no restart cures; otherwise the same.
        """
        watch = Stopwatch(self._runtime.clock)
        requests = self._requests()
        reach("C1")
        try:
            parts = await self._fleet.persist(trigger.winners, self._options.timeout_s)
            if files is not None:
                await files.ready()
            persist_s = watch.lap()
            parent = next((c for c in coordinator.completed if c.checkpoint_id == trigger.parent), None)
            checkpoint, inlined = self._assemble(coordinator, trigger, parts, query_id, parent)
            assemble_s = watch.lap()
            figures = _figures(checkpoint, parts, trigger.late_rows)
            times: dict[str, Any] = {"persist_s": persist_s, "assemble_s": assemble_s}
            self._log.history.add(_in_history(figures, at=checkpoint.created_at, **times))
            left = self._options.timeout_s - watch.total()
            reach("C3")
            # How far Spark's half of the log reaches back is told by its commits alone: else the boundary stays.
            oldest = coordinator.oldest_after(trigger, self._options.retained) if files is not None else 0
            step = files.step(checkpoint.checkpoint_id, [len(each) for each in inlined]) if files is not None else None
            await self._commit(checkpoint, inlined, oldest, left, step)
            commit_s = watch.lap()
            reach("C5")
        except (Fenced, OutcomeUnknown) as error:
            # It may be there, or come: its objects must stay, and the run cannot go on before that is known. That holds
            # for a fenced driver too: its record may have been committed before the newer one began, which retains it.
            coordinator.fail_batch(error)
            raise
        except (DstlError, ValueError) as error:
            await self._fleet.abort()
            if isinstance(error, TaskManagerLost):
                raise
            is_lasting = isinstance(error, DstlError) and not error.restartable
            kind: type[Exception] = type(error) if is_lasting else CheckpointDeclined
            raise kind(f"the checkpoint of batch {trigger.batch_id} failed: {error}") from error
        located = inlined_handles(parts, checkpoint.checkpoint_id)
        await self._fleet.complete(checkpoint, trigger.winners, located, coordinator.batch_time.ms)
        subsumed = coordinator.complete(trigger, checkpoint, self._options.retained)
        self._objects.retain([checkpoint])
        self._objects.subsume(self._out_of_sight(subsumed, trigger.batch_id))
        times |= {"commit_s": commit_s, "notify_s": watch.lap(), "seconds": watch.total()}
        figures["requests"] += self._requests() - requests
        self._log.history.add(_in_history(figures, at=self._runtime.clock.wall(), **times))
        return CheckpointReport(
            **figures,
            **times,
            estimated_recovery_seconds=self._estimated_recovery_s(checkpoint),
            watermarks=self._catalogue.watermarks(parent.watermark_ms if parent else None, sparks_ms),
        )

    def _assemble(
        self,
        coordinator: CheckpointCoordinator,
        trigger: Trigger,
        parts: Sequence[Persisted],
        query_id: str,
        parent: CompletedCheckpoint | None,
    ) -> tuple[CompletedCheckpoint, list[bytes]]:
        operators, watermark_ms = self._catalogue.entries(trigger.event_times, parent)
        begun = CompletedCheckpoint(
            checkpoint_id=self._log.next_sequence,
            batch_id=trigger.batch_id,
            query_id=query_id,
            run_id=coordinator.run_id or "",
            max_parallelism=self._fleet.max_parallelism,
            created_at=self._runtime.clock.wall(),
            watermark_ms=watermark_ms,
            batch_time_ms=coordinator.batch_time.ms,
            held_since_ms=coordinator.batch_time.held_since_ms,
            operators=tuple(operators),
        )
        return assemble(begun, parent, parts, self._materialization.generations)

    async def _commit(
        self,
        checkpoint: CompletedCheckpoint,
        inlined: Sequence[bytes],
        oldest: int,
        seconds: float,
        step: FilesStep | None,
    ) -> None:
        # What either half of the log needs is kept.
        record = None
        if step is not None:
            inlined, oldest, record = [*inlined, *step.inlined], min(oldest, step.whole), step.record
        try:
            async with asyncio.timeout(max(seconds, _LEAST_COMMIT_S)):
                await self._log.commit(checkpoint, inlined, oldest=oldest, files=record)
        except TimeoutError:
            # The request that was cancelled may still be carried out.
            why = (
                f"the store does not take it ({self._log.trouble})"
                if self._log.trouble
                else "the store does not answer"
            )
            raise OutcomeUnknown(
                f"whether checkpoint {checkpoint.checkpoint_id} of batch {checkpoint.batch_id} is in "
                f"{self._store.location} is unknown, for {why}: restart the query, which finds out"
            ) from None

    def _out_of_sight(self, subsumed: Sequence[CompletedCheckpoint], batch_id: int) -> list[CompletedCheckpoint]:
        """Return those subsumed, now or before, that no reader of the log finds any more, newest first.

        Spark's files may hold the cleanup boundary back. A checkpoint behind it is listed, verified and restored by
        name, whatever this driver thinks of it, so its objects stay.
        """
        self._in_sight |= {each.checkpoint_id: each for each in subsumed}
        gone = [
            number
            for number, each in self._in_sight.items()
            if number < self._log.boundary or each.batch_id >= batch_id
        ]
        return [self._in_sight.pop(number) for number in sorted(gone, reverse=True)]

    def _estimated_recovery_s(self, checkpoint: CompletedCheckpoint) -> float:
        work = recovery_work(checkpoint)
        rate = self._restore_rate or self._materialization.replay_bytes_per_s * self._fleet.wanted
        return work.bytes / rate + work.segments * self._materialization.replay_segment_s

    def _requests(self) -> int:
        return self._store.calls.total() - self._store.calls["delete"]


def _figures(checkpoint: CompletedCheckpoint, parts: Sequence[Persisted], late: Mapping[str, int]) -> dict[str, Any]:
    """Return what is known of a checkpoint before it is committed: fields of a :class:`CheckpointReport`."""
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "batch_id": checkpoint.batch_id,
        "requests": sum(part.requests for part in parts),
        "hedges": sum(part.hedges for part in parts),
        "new_bytes": sum(s.handle.size for part in parts for s in part.segments),
        "full_bytes": checkpoint.full_bytes,
        "inlined": sum(bool(s.seal) for part in parts for s in part.segments),
        "materializations": sum(len(part.materializations) for part in parts),
        "late_rows": late,
        "state_rows": _by_operator(parts, 0),
        "state_bytes": _by_operator(parts, 1),
    }


def _in_history(figures: Mapping[str, Any], **more: Any) -> HistoryEntry:
    """Return a checkpoint's figures as its history tells them: of all operators together."""
    summed: dict[str, Any] = {
        name: sum(each.values()) if isinstance(each, Mapping) else each for name, each in figures.items()
    }
    return HistoryEntry(kind="checkpoint", **summed, **more)


def _by_operator(parts: Sequence[Persisted], which: int) -> dict[str, int]:
    """Return the tables' entries (0) or bytes (1) by operator, of all TaskManagers together."""
    total: Counter[str] = Counter()
    for part in parts:
        for uid, size in part.state.items():
            total[uid] += size[which]
    return dict(total)
