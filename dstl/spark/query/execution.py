"""Spark's execution of a running query: what cannot be checkpointed is refused, and a batch is run again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from dstl.errors import CheckpointDeclined, Invalid, clip
from dstl.spark.application.session import active_query, is_local, query_of_run
from dstl.spark.cause import cause
from dstl.spark.query.watermark_propagation import physical_nodes

_log = logging.getLogger(__name__)

_ASYNC = "AsyncProgressTrackingMicroBatchExecution"
"""Of Spark's ways to execute a query this one alone takes our operators and does not commit its batches one by one."""
ON_A_CLUSTER = (
    "a stateful operator of Spark's own (an aggregation, a join of streams, dropDuplicates) in the same query would "
    "keep its state in this backend's log, where only the driver can write: take DSTL's operator instead, or put "
    "Spark's into a query of its own"
)
"""Why a query on another master than ``local[...]`` is refused."""
_STATEFUL = "org.apache.spark.sql.execution.streaming.operators.stateful.StateStoreWriter"
_WRITE = "org.apache.spark.sql.execution.datasources.v2.V2CommandExec"


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

    async def run_again(self, run_id: str, batch_id: int) -> None:
        """Run all tasks of a batch that is about to be committed once more, into nothing.

        Spark's sinks of version 2 run all of them whenever a batch runs, and would write it again: their batches are
        left as they are.

        Raises:
            CheckpointDeclined: A task failed; where it has failed with an error of ours, that.
        """
        await asyncio.to_thread(self._run_again, run_id, batch_id)

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
        if any(is_instance_of(gateway, node, _STATEFUL) for node in physical_nodes(execution.executedPlan())):
            raise Invalid(f"query {query_id}: {ON_A_CLUSTER}")

    def _run_again(self, run_id: str, batch_id: int) -> None:
        query = query_of_run(self._session, run_id)
        execution = query.lastExecution() if query is not None else None
        if execution is None or execution.currentBatchId() != batch_id:
            return
        if is_instance_of(self._session.sparkContext._gateway, execution.executedPlan(), _WRITE):
            return
        _log.info("batch %d: Spark has not run all of it; it runs now, for the checkpoint", batch_id)
        try:
            with self._as_the_query(query, execution, batch_id):
                # The batch's own rows, and not what a function may have cached of them: that would run no task of ours.
                execution.toRdd().count()
        except Py4JJavaError as error:
            ours = cause(error)
            if ours is not None:
                raise ours from error
            raise CheckpointDeclined(f"batch {batch_id} could not be run again: {clip(error)}") from error

    @contextmanager
    def _as_the_query(self, query: Any, execution: Any, batch_id: int) -> Iterator[None]:
        """Let this thread's jobs be the query's: their tasks are told which batch they belong to, and end with it."""
        jvm: Any = self._session._jvm
        sessions, context = jvm.org.apache.spark.sql.classic.SparkSession, self._session._jsc.sc()
        properties = {
            "sql.streaming.queryId": str(query.id().toString()),
            "streaming.sql.batchId": str(batch_id),
            "__is_continuous_processing": "false",
        }
        sessions.setActiveSession(execution.sparkSession())
        context.setJobGroup(str(query.runId().toString()), f"batch = {batch_id}", True)
        for name, value in properties.items():
            context.setLocalProperty(name, value)
        try:
            yield
        finally:
            try:
                for name in properties:
                    context.setLocalProperty(name, None)
                context.clearJobGroup()
                sessions.clearActiveSession()
            except Py4JError as error:
                _log.debug("the thread's properties stay: %s", error)
