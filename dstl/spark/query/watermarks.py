"""The watermarks of a query: Spark's as it reaches the operators of ours, and the batch that is due when one has risen.

Spark has one watermark for a query, and lowers it on its way up the plan: a join that waits for rows which match within
an interval may still hand on rows as old as the interval is long. Each stateful operator of Spark's says what it hands
on (``produceOutputWatermark``, since Spark 3.5); here they are asked as Spark's own propagator asks them.

Spark makes batches without data for its own stateful operators only. So there is a source beside the input whose offset
is the watermark that the next batch will go by, ours and Spark's: when one has risen, there is something new, and never
a row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame, SparkSession

from dstl.spark.application.session import active_query
from dstl.spark.query.plan import children_of, counted_operator, is_stateful, nodes_of
from dstl.spark.query.ticks import WATERMARKS, jvm_source, quiet_source, with_batches_of
from handles.checkpoint import CompletedCheckpoint

_log = logging.getLogger(__name__)

_NO_DATA_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"
_SPARKS = "sparks"
"""The mark of Spark's watermark in the source's offset; ours has the source's name."""

_Marks = tuple[int, int]
"""The watermarks of a batch and of the one before it, Unix milliseconds."""


class QueryWatermarks:
    """The watermarks of the query that this driver runs. One event loop; Spark is asked in a thread.

    Args:
        session: The driver's.
        teller: Tells the source's offsets: a name that no other has in this JVM.
    """

    def __init__(self, session: SparkSession, teller: str) -> None:
        self._session = session
        self._teller = teller
        self._source: Any = None
        self._run = ""
        self._tracker: Any = None

    def with_batches(self, df: DataFrame, begin_ms: Callable[[], int | None]) -> DataFrame:
        """Return the same rows from a stream that has a batch whenever the watermark has moved.

        Where the session has Spark make no batches without data, nor does this.

        Args:
            df: The rows.
            begin_ms: Returns the watermark to begin with, Unix milliseconds, None for none: what is due by it fires
                when the query starts. Called once.
        """
        session = df.sparkSession
        if str(session.conf.get(_NO_DATA_BATCHES, "true")).lower() != "true":
            return df
        if self._source is None:
            begin = begin_ms()
            self._source = jvm_source(session)
            self._tell(WATERMARKS, begin)
        return with_batches_of(df, quiet_source(session, WATERMARKS, teller=self._teller))

    def follow(self, completed: Sequence[CompletedCheckpoint]) -> None:
        """Let the next batch go by the watermark of the last of these checkpoints.

        Raises:
            Py4JError: The driver's JVM has ended.
        """
        if completed:
            self._tell(WATERMARKS, completed[-1].watermark_ms)

    async def of_batch(self, query_id: str) -> dict[str, tuple[int, int]] | None:
        """Return the watermarks of the running batch and of the one before it, by operator of ours.

        None where this driver does not run the query, or it has not planned a batch yet.
        """
        return await asyncio.to_thread(self._read, query_id)

    async def batch_done(self, query_id: str, batch_id: int) -> None:
        """Take note that a batch's rows have all gone through."""
        try:
            await asyncio.to_thread(self._look_ahead, query_id, batch_id)
        except Py4JError as error:
            # The batch is durable: all that is lost is one without rows behind it.
            _log.warning("Spark did not tell the watermark after batch %d: %s", batch_id, error)

    def _read(self, query_id: str) -> dict[str, _Marks] | None:
        query = active_query(self._session, query_id)
        execution = query.lastExecution() if query is not None else None
        if execution is None:
            return None
        before = execution.prevOffsetSeqMetadata()
        late_ms = before.get().batchWatermarkMs() if before.isDefined() else 0
        origin = int(execution.offsetSeqMetadata().batchWatermarkMs()), int(late_ms)
        gateway = self._session.sparkContext._gateway
        found: dict[str, _Marks] = {}
        for node in nodes_of(execution.executedPlan()):
            if (uid := counted_operator(node)) is not None:
                # An operator that the plan has twice goes by what reaches both.
                found[uid] = _lowest([_reaching(gateway, node, origin) or origin, found.get(uid, origin)])
        return found

    def _look_ahead(self, query_id: str, batch_id: int) -> None:
        """Let there be a batch for Spark's watermark after this one, unless Spark is at work on another by now.

        Spark works it out once it has committed the batch, which is too late for a source to say that another is due.
        All event times have been seen before: they lie below the shuffle to our operators.
        """
        query = active_query(self._session, query_id)
        execution = query.lastExecution() if query is not None else None
        if execution is None or execution.currentBatchId() != batch_id:
            return
        run = str(query.runId().toString())
        if run != self._run:
            jvm: Any = self._session._jvm
            tracker = jvm.org.apache.spark.sql.execution.streaming.runtime.WatermarkTracker
            self._tracker = tracker.apply(query.sparkSession().conf(), query.logicalPlan())
            self._tracker.setWatermark(execution.offsetSeqMetadata().batchWatermarkMs())
            self._run = run
        self._tracker.updateWatermark(execution.executedPlan())
        self._tell(_SPARKS, int(self._tracker.currentWatermark()))

    def _tell(self, mark: str, watermark_ms: int | None) -> None:
        if self._source is not None and watermark_ms is not None:
            self._source.tell(self._teller, mark, watermark_ms)


def _reaching(gateway: Any, node: Any, origin: _Marks) -> _Marks | None:
    """Return the watermarks of a node's output; None where no event time is below it."""
    if node.nodeName() == "EventTimeWatermark":
        return origin
    below = [each for each in (_reaching(gateway, child, origin) for child in children_of(node)) if each is not None]
    if not below:
        return None
    reached = _lowest(below)
    if not is_stateful(node, gateway):
        return reached
    passed = [node.produceOutputWatermark(mark) for mark in reached]
    return (int(passed[0].get()), int(passed[1].get())) if all(each.isDefined() for each in passed) else None


def _lowest(each: list[_Marks]) -> _Marks:
    return min(mark for mark, _ in each), min(late for _, late in each)
