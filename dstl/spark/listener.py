"""Listeners that pass the figures of checkpoints and restores to a job's log, metrics and alarms.

::

    backend.add_listener(CheckpointLog(slow_after_s=5.0))

Spark's own progress has the rows of each operator as the observed metric ``dstl_<operator>``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.errors import Invalid
from dstl.metrics import Recorder
from materializer.restore.progress import ProgressListener, RestoreStatus

_log = logging.getLogger("dstl.checkpoints")

Report = CheckpointReport | RestoreReport
"""What a listener is called with."""


class Listeners:
    """Passes what a coordinator reports to every listener, on the coordinator's loop.

    Args:
        first: Listeners of reports.
    """

    def __init__(self, *first: Callable[[Report], None]) -> None:
        self.reports = list(first)
        self.progress: list[ProgressListener] = []

    def on_report(self, report: Report) -> None:
        """Tell of a checkpoint or a restore; one that raises keeps none of the others from it."""
        for listener in self.reports:
            try:
                listener(report)
            except Exception:
                logging.getLogger("dstl.spark.backend").exception("a listener raised")

    def on_progress(self, status: RestoreStatus, /) -> None:
        """Tell how far a restore has come."""
        for listener in self.progress:
            listener(status)


class CheckpointLog:
    """Writes one line for every checkpoint and restore to the logger ``dstl.checkpoints``; a slow one is a warning.

    Another warning says how many rows an operator has dropped, because they came behind the watermark.

    Args:
        slow_after_s: A checkpoint that took longer is a warning. Lower: trouble is seen earlier; higher: fewer alarms.
        on_slow: Called with the report of such a checkpoint; must not block.
    """

    def __init__(self, slow_after_s: float = 10.0, on_slow: Callable[[CheckpointReport], None] | None = None) -> None:
        if slow_after_s <= 0:
            raise Invalid(f"slow_after_s={slow_after_s} must be above 0")
        self._slow_after_s = slow_after_s
        self._on_slow = on_slow

    def __call__(self, report: Report) -> None:
        """Take one report."""
        if isinstance(report, RestoreReport):
            _log.info(
                "restored %s in %.3f s (%d bytes, %d changes) for run %s",
                "an empty state" if report.checkpoint_id is None else f"checkpoint {report.checkpoint_id}",
                report.seconds,
                report.bytes,
                report.changes,
                report.run_id,
            )
            if report.savepoint_batch is not None and report.savepoint_batch != report.first_batch - 1:
                _log.warning(
                    "run %s begins with batch %d and the state of a savepoint after batch %d: rows that its sources "
                    "read again count twice",
                    report.run_id,
                    report.first_batch,
                    report.savepoint_batch,
                )
            return
        slow = report.seconds > self._slow_after_s
        _log.log(
            logging.WARNING if slow else logging.INFO,
            "checkpoint %d of batch %d took %.3f s: %d requests, %d new bytes, %d in all; about %.1f s to recover%s",
            report.checkpoint_id,
            report.batch_id,
            report.seconds,
            report.requests,
            report.new_bytes,
            report.full_bytes,
            report.estimated_recovery_seconds,
            f"; watermark {min(report.watermarks.values())} ms since 1970" if report.watermarks else "",
        )
        for operator, count in report.late_rows.items():
            _log.warning(
                "operator %r dropped %d rows of batch %d, which came behind the watermark: a longer delay in "
                "withWatermark() takes later ones",
                operator,
                count,
                report.batch_id,
            )
        if slow and self._on_slow is not None:
            self._on_slow(report)


class CheckpointMetrics:
    """Passes the figures on to a metrics recorder, under Flink's names where Flink has them.

    Args:
        recorder: Where they go.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __call__(self, report: Report) -> None:
        """Take one report."""
        if isinstance(report, RestoreReport):
            self._recorder.increment("numRestores")
            self._recorder.observe("restoreSeconds", report.seconds)
            self._recorder.gauge("lastRestoredBytes", report.bytes)
            return
        self._recorder.increment("numberOfCompletedCheckpoints")
        for operator, count in report.late_rows.items():
            self._recorder.increment(f"numLateRecordsDropped.{operator}", count)
        for part in ("persist", "assemble", "commit", "notify"):
            self._recorder.observe(f"checkpointPartSeconds.{part}", getattr(report, f"{part}_s"))
        self._recorder.observe("checkpointSeconds", report.seconds)
        self._recorder.observe("checkpointRequests", report.requests)
        if report.watermarks:
            self._recorder.gauge("currentInputWatermark", min(report.watermarks.values()))
        self._recorder.gauge("lastCompletedCheckpointId", report.checkpoint_id)
        self._recorder.gauge("lastIncSizeOfNonMaterialization", report.new_bytes)
        self._recorder.gauge("lastCheckpointFullSize", report.full_bytes)
        self._recorder.gauge("estimatedRecoverySeconds", report.estimated_recovery_seconds)
        self._recorder.gauge("lastCheckpointAt", time.time())
