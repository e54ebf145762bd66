"""The stamp of a batch, by which a sink knows one that it has written."""

from __future__ import annotations

from pyspark.sql import DataFrame

from dstl.errors import Invalid
from dstl.spark.application.session import active_query


def batch_stamp(batch: DataFrame) -> int:
    """Return what tells a query's batch from every other one, for a sink that must not write it twice.

    Spark's batch ids do not: they begin at 0 again with a new checkpoint directory, and are used again after a
    rollback, for other rows. The stamp is the millisecond at which Spark has planned the batch, which lies with its
    offsets: the same whenever the batch is run again, also by another driver or from a copy of the directory; another
    one for every other batch of the query. Keep it in the sink in one transaction with the rows.

    Args:
        batch: What a ``foreachBatch`` function is given, in the thread in which it is called.

    Raises:
        Invalid: It is not the batch of a running query.
    """
    session = batch.sparkSession
    query_id = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    query = active_query(session, query_id) if query_id else None
    execution = query.lastExecution() if query is not None else None
    if execution is None:
        raise Invalid("batch_stamp() is for the function that foreachBatch calls, in the thread that Spark calls it in")
    return int(execution.offsetSeqMetadata().batchTimestampMs())
