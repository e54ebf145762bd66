"""Completes the batches of ``foreachBatch`` functions that do not read all of them.

Spark commits a batch as soon as the function returns, whatever it has read of it: after ``take(1)`` some tasks have
never run, after a function that ignores its DataFrame none has, and there is no checkpoint that the next batch could go
on from. The driver can do something about it in one place only, between the function's return and Spark's commit. So
the function is followed by a look whether the batch has its checkpoint; where it has none, the batch is run once more,
whole and into nothing. What the function has read or written stays as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pyspark.sql import DataFrame

from dstl.errors import CheckpointDeclined

__all__ = ["Checkpointed", "with_checkpoint"]

_log = logging.getLogger(__name__)
_QUERY_ID = "sql.streaming.queryId"


class Checkpointed(Protocol):
    """The part of a backend that knows its operators and whether a batch has its checkpoint."""

    location: str

    @property
    def operators(self) -> Sequence[str]:
        """Names of the operators that have been defined, in order."""
        ...

    def has_checkpoint(self, query_id: str | None, batch_id: int) -> bool:
        """Return True where the running batch of this query is this one and has its checkpoint."""
        ...


def with_checkpoint(
    function: Callable[[DataFrame, int], Any], backends: Callable[[], Sequence[Checkpointed]]
) -> Callable[[DataFrame, int], Any]:
    """Return the function with a checkpoint of its batch after it, whatever it has read of the batch.

    Args:
        function: What the user gives to ``foreachBatch``.
        backends: Returns the backends whose operators the batch runs.
    """

    @functools.wraps(function)
    def checkpointed(df: DataFrame, batch_id: int) -> None:
        function(df, batch_id)
        # In the thread of the query, so what Spark says of it is said here too.
        query_id = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
        for backend in backends():
            if not backend.has_checkpoint(query_id, batch_id):
                _complete(backend, df, query_id, batch_id)

    return checkpointed


def _complete(backend: Checkpointed, df: DataFrame, query_id: str | None, batch_id: int) -> None:
    _log.info("batch %d: foreachBatch has not read all of it; its other tasks run now, for the checkpoint", batch_id)
    _run_whole(df)
    if not backend.has_checkpoint(query_id, batch_id):
        raise CheckpointDeclined(
            f"batch {batch_id} has no checkpoint in {backend.location}, though all of it was run after the function "
            "given to foreachBatch: start the query again, and Spark replays the batch"
        )


def _run_whole(df: DataFrame) -> None:
    plan = df._jdf.queryExecution().logical()
    if plan.getClass().getSimpleName() == "LogicalRDD":
        # The batch's own rows and not what the function may have cached of them: cached partitions run no task of ours.
        plan.rdd().count()
    else:
        df.write.format("noop").mode("overwrite").save()
