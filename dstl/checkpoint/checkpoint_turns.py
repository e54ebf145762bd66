"""Checkpoints of a query take turns, and each is told of: in the history, the metrics, and to whoever listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

from dstl.checkpoint.checkpoint_execution import CheckpointExecution, Stopwatch
from dstl.checkpoint.coordinator import CheckpointCoordinator, Trigger
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.spark_commit import CommitFiles
from dstl.checkpoint.sparks_watermark import SparksWatermark
from dstl.errors import DstlError, clip
from dstl.metrics import Recorder
from dstl.runtime import Runtime

__all__ = ["CheckpointTurns"]


class CheckpointTurns:
    """Has checkpoints made, one at a time. One event loop.

    Args:
        execution: Makes one.
        log: Its history is added to.
        sparks: Spark's watermark, for the report; told of each batch.
        runtime: Clock.
        recorder: Counts the failed ones.
        on_event: Called with every report; must not block.
    """

    def __init__(
        self,
        execution: CheckpointExecution,
        log: ManifestLog,
        sparks: SparksWatermark,
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
        self._turn = asyncio.Lock()

    async def ended(self) -> None:
        """Return when the one that is being made has ended, one way or the other."""
        async with self._turn:
            pass

    async def make(
        self,
        coordinator: CheckpointCoordinator,
        due: Callable[[], Trigger | None],
        query_id: str,
        files: CommitFiles | None = None,
    ) -> bool:
        """Make the checkpoint that is due once those under way have ended; returns False where none is.

        Args:
            coordinator: Of the run.
            due: Returns what to make; asked when it is this one's turn.
            query_id: Whose checkpoint it is.
            files: Spark's own commit of the batch, to be in the same record.

        Raises:
            DstlError: As :meth:`CheckpointExecution.run`.
        """
        async with self._turn:
            trigger = due()
            if trigger is None:
                return False
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
            await self._sparks.batch_done(query_id, trigger.batch_id)
            self._on_event(report)
            return True

    def note(self, kind: Literal["failed", "restore"], **figures: Any) -> None:
        """Add to the history, which the next manifest tells."""
        self._log.history.add(HistoryEntry(kind=kind, at=self._runtime.clock.wall(), **figures))
