"""Checkpoints of a query take turns, and each is reported: in the history, the metrics, and to listeners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dstl.checkpoint.checkpoint_execution import CheckpointExecution, Stopwatch
from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.spark_commit import CheckpointInTheMaking, SparkWatermark
from dstl.errors import DstlError, clip
from dstl.metrics import Recorder
from dstl.runtime import Runtime


@dataclass(frozen=True, slots=True)
class CheckpointQueue:
    """Has checkpoints made, one at a time. One event loop.

    Attributes:
        execution: Makes one.
        log: Has the turns; its history is added to.
        sparks: Spark's watermark, for the report; told of each batch.
        runtime: Clock.
        recorder: Counts the failed ones.
        on_event: Called with every report; must not block.
    """

    execution: CheckpointExecution
    log: ManifestLog
    sparks: SparkWatermark
    runtime: Runtime
    recorder: Recorder
    on_event: Callable[[CheckpointReport | RestoreReport], None]

    async def ended(self) -> None:
        """Return when the one that is being made has ended, one way or the other."""
        async with self.log.turn:
            pass

    async def make(
        self,
        coordinator: CheckpointCoordinator,
        run_id: str,
        batch_id: int,
        query_id: str,
        files: CheckpointInTheMaking,
    ) -> None:
        """Make the checkpoint of a batch that Spark commits, once those under way have ended.

        Args:
            coordinator: Of the run that is open.
            run_id: Whose commit it is.
            batch_id: The micro-batch.
            query_id: Whose checkpoint it is.
            files: Spark's own commit of the batch, to be in the same record.

        Raises:
            DstlError: As :meth:`CheckpointCoordinator.commit` and :meth:`CheckpointExecution.run`.
        """
        async with self.log.turn:
            trigger = coordinator.commit(run_id, batch_id)
            # Before Spark may plan the next batch.
            await self.sparks.batch_done(query_id, trigger.batch_id)
            files.begun()
            watch, sequence = Stopwatch(self.runtime.clock), self.log.next_sequence
            try:
                report = await self.execution.run(coordinator, trigger, query_id, self.sparks.known_ms, files)
            except DstlError as error:
                self.recorder.increment("numberOfFailedCheckpoints")
                self.note(
                    "failed",
                    checkpoint_id=sequence,
                    batch_id=trigger.batch_id,
                    seconds=watch.lap(),
                    error=f"{type(error).__name__}: {clip(error)}",
                )
                raise
            self.on_event(report)

    def note(self, kind: Literal["failed", "restore"], **figures: Any) -> None:
        """Add to the history, which the next manifest tells."""
        self.log.history.add(HistoryEntry(kind=kind, at=self.runtime.clock.wall(), **figures))
