"""Spark's execution of a running query: what cannot be checkpointed is refused."""

from __future__ import annotations

import asyncio

from pyspark.sql import SparkSession

from dstl.errors import Invalid
from dstl.spark.application.session import active_query, is_local, query_of_run
from dstl.spark.query.offsets import fitted_offsets
from dstl.spark.query.plan import is_stateful, nodes_of, sources_of

_ASYNC = "AsyncProgressTrackingMicroBatchExecution"
"""Of Spark's ways to execute a query this one alone takes our operators and does not commit its batches one by one."""
ON_A_CLUSTER = (
    "a stateful operator of Spark's own (an aggregation, a join of streams, dropDuplicates) in the same query would "
    "keep its state in this backend's log, where only the driver can write: take DSTL's operator instead, or put "
    "Spark's into a query of its own"
)
"""Why a query on another master than ``local[...]`` is refused."""


class DriverExecution:
    """Spark's execution of the queries of this driver, asked in threads of their own.

    Args:
        session: A session of the driver; queries may run in others.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    async def check(self, query_id: str) -> None:
        """Refuse a query whose batches are not committed one after the other, each once it is done.

        Raises:
            Invalid: Says which setting it is, and what to do.
        """
        await asyncio.to_thread(self._check, query_id)

    async def is_running(self, run_id: str) -> bool:
        """Return whether Spark is running a query by this run."""
        return await asyncio.to_thread(query_of_run, self._session, run_id) is not None

    async def fitted_offsets(self, run_id: str, content: bytes) -> bytes:
        """Return a record of offsets with those sources of ours that a run has; as it is where the run is over.

        Raises:
            Invalid: As :func:`fitted_offsets`.
        """
        return await asyncio.to_thread(self._fitted, run_id, content)

    def batch_seconds(self, query_id: str) -> dict[int, float]:
        """Return what the last batches of a query took in all, by their numbers; of a query that runs here.

        Args:
            query_id: Its id; empty before it has begun.
        """
        query = active_query(self._session, query_id) if query_id else None
        recent = () if query is None else query.recentProgress()
        return {int(each.batchId()): each.batchDuration() / 1000 for each in recent}

    def _fitted(self, run_id: str, content: bytes) -> bytes:
        query = query_of_run(self._session, run_id)
        return content if query is None else fitted_offsets(content, sources_of(query.analyzedPlan()))

    def _check(self, query_id: str) -> None:
        query = active_query(self._session, query_id)
        if query is None:
            return
        if query.getClass().getSimpleName() == _ASYNC:
            raise Invalid(
                f"query {query_id} runs an operator of DSTL, and asyncProgressTrackingEnabled lets Spark forget which "
                "batches are done, so that a restart would repeat what the state has already seen: leave the option out"
            )
        execution = query.lastExecution()
        if execution is None or is_local(self._session):
            return
        gateway = self._session.sparkContext._gateway
        if any(is_stateful(node, gateway) for node in nodes_of(execution.executedPlan())):
            raise Invalid(f"query {query_id}: {ON_A_CLUSTER}")
