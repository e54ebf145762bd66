"""Checkpoints of a query take turns, and each is reported: in the history, the metrics, and to listeners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from dstl.checkpoint.checkpoint_execution import CheckpointExecution, Stopwatch
from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.spark_commit import CommitFiles, SparkWatermark
from dstl.errors import DstlError, clip
from dstl.metrics import Recorder
from dstl.runtime import Runtime


class CheckpointQueue:
    """Has checkpoints made, one at a time. One event loop.

    Args:
        execution: Makes one.
        log: Has the turns; its history is added to.
        sparks: Spark's watermark, for the report; told of each batch.
        runtime: Clock.
        recorder: Counts the failed ones.
        on_event: Called with every report; must not block.
    """

    def __init__(
        self,
        execution: CheckpointExecution,
        log: ManifestLog,
        sparks: SparkWatermark,
        runtime: Runtime,
        recorder: Recorder,
        on_event: Callable[[CheckpointReport | RestoreReport], None],
    ) -> None:
        self._execution = execution
        self._log = log
        self._sparks = sparks
        self._runtime = runtime
        self._recorder = recorder
        self._on_event = on_event

    async def ended(self) -> None:
        """Return when the one that is being made has ended, one way or the other."""
        async with self._log.turn:
            pass

    async def make(
        self,
        coordinator: CheckpointCoordinator,
        run_id: str,
        batch_id: int,
        query_id: str,
        files: CommitFiles,
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
        async with self._log.turn:
            trigger = coordinator.commit(run_id, batch_id)
            # Before Spark may plan the next batch.
            await self._sparks.batch_done(query_id, trigger.batch_id)
            files.begun()
            watch, sequence = Stopwatch(self._runtime.clock), self._log.next_sequence
            try:
                report = await self._execution.run(coordinator, trigger, query_id, self._sparks.known_ms, files)
            except DstlError as error:
                self._recorder.increment("numberOfFailedCheckpoints")
                self.note(
                    "failed",
                    checkpoint_id=sequence,
                    batch_id=trigger.batch_id,
                    seconds=watch.lap(),
                    error=f"{type(error).__name__}: {clip(error)}",
                )
                raise
            self._on_event(report)

    def note(self, kind: Literal["failed", "restore"], **figures: Any) -> None:
        """Add to the history, which the next manifest tells."""
        self._log.history.add(HistoryEntry(kind=kind, at=self._runtime.clock.wall(), **figures))
