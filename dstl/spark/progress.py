"""Spark's progress of a query with our state in it, in the form in which Spark reports its own state stores.

::

    spark.streams.addListener(StateProgress(backend, lambda progress: print(progress["stateOperators"])))
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from dstl.checkpoint.report import CheckpointReport, RestoreReport

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from dstl.spark.backend import StateBackend

_log = logging.getLogger(__name__)
_KEPT = 64
"""Reports that wait for Spark's progress of their batch, which comes within a batch or two."""


class StateProgress(StreamingQueryListener):  # type: ignore[misc]
    """Passes on the progress of a backend's query, with ``stateOperators`` as dashboards of Spark's stores read them.

    Spark makes that list of its own stores, and its listeners cannot add to it: ``query.lastProgress`` itself has the
    rows of each operator alone, as the observed metric ``dstl_<operator>``. Thread-safe.

    Args:
        backend: Whose query.
        take: Called with each progress, as :func:`with_state` returns it, on Spark's listener thread; must not block.
    """

    def __init__(self, backend: StateBackend, take: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._backend = backend
        self._take = take
        self._lock = threading.Lock()
        self._reports: OrderedDict[int, CheckpointReport] = OrderedDict()
        backend.add_listener(self._note)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Pass a progress on, if it is of the backend's query."""
        progress = json.loads(event.progress.json)
        observed = progress.get("observedMetrics", {})
        operators = self._backend.operators
        if not operators or not all(f"dstl_{uid}" in observed for uid in operators):
            return
        with self._lock:
            report = self._reports.get(progress["batchId"])
        try:
            self._take(with_state(progress, report, operators))
        except Exception:
            _log.exception("a listener raised")

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing."""

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Do nothing."""

    def _note(self, report: CheckpointReport | RestoreReport) -> None:
        if isinstance(report, CheckpointReport):
            with self._lock:
                self._reports[report.batch_id] = report
                while len(self._reports) > _KEPT:
                    self._reports.popitem(last=False)


def with_state(
    progress: Mapping[str, Any], report: CheckpointReport | None, operators: Sequence[str]
) -> dict[str, Any]:
    """Return a progress with an entry of ``stateOperators`` for each of our operators.

    ``numRowsTotal`` and ``memoryUsedBytes`` are of the tables before the batch; ``commitTimeMs`` is what the batch
    waited for its checkpoint, which all operators share, and ``customMetrics`` has that checkpoint's figures.

    Args:
        progress: Spark's, as its JSON has it.
        report: Of the batch's checkpoint; None where it is not known, which leaves the progress as it is.
        operators: Names of the operators.
    """
    if report is None:
        return dict(progress)
    custom = {
        "dstlCheckpointId": report.checkpoint_id,
        "dstlRequests": report.requests,
        "dstlHedges": report.hedges,
        "dstlNewBytes": report.new_bytes,
        "dstlFullBytes": report.full_bytes,
        "dstlPersistMs": round(report.persist_s * 1000),
        "dstlCommitMs": round(report.commit_s * 1000),
    }
    ours = [
        {
            "operatorName": uid,
            "numRowsTotal": report.state_rows.get(uid, 0),
            "memoryUsedBytes": report.state_bytes.get(uid, 0),
            "numRowsDroppedByWatermark": report.late_rows.get(uid, 0),
            "commitTimeMs": round(report.seconds * 1000),
            "customMetrics": custom,
        }
        for uid in operators
    ]
    return {**progress, "stateOperators": [*progress.get("stateOperators", ()), *ours]}
