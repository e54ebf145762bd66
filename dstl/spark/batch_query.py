"""A stateful processor over a batch DataFrame: its state ends with the query, as in Spark.

Nothing is stored, and no coordinator and no TaskManager is asked. Rows are placed as those of a stream are, by key
group; Spark sorts them by key, so that a task takes them one Arrow batch at a time; and the state lives in the task's
memory, empty at first. An attempt that is run again begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dstl.spark.initial_state import with_initial_state
from dstl.spark.key_groups import KEY_GROUP_COLUMN, key_group_column, partition_column
from dstl.spark.operator import OperatorDefinition
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN
from dstl.state.memory_source import MemoryStateSource
from dstl.state.processor_runner import TaskInput
from dstl.state.registry import StateRegistry

__all__ = ["BatchTask", "batch_query"]

_TIME_COLUMN = "__dstl_processing_time"
"""When the query began, in every row: Spark gives all tasks and attempts of one execution the same time."""

_NO_WATERMARK_MS = -1
"""What Spark shows where there is no stream: event-time timers wait for ever, and no row is late."""


def batch_query(df: DataFrame, definition: OperatorDefinition, initial: DataFrame | None) -> DataFrame:
    """Return what an operator makes of a batch DataFrame.

    Args:
        df: The input.
        definition: The operator.
        initial: Its initial state.
    """
    key_group = key_group_column(definition.by, definition.max_parallelism)
    keyed = df.withColumn(KEY_GROUP_COLUMN, key_group)
    order = [F.col(KEY_GROUP_COLUMN), *(F.col(f"`{name}`") for name in definition.by)]
    if initial is not None:
        keyed = with_initial_state(keyed, initial, definition.by, key_group, KEY_GROUP_COLUMN)
        order.append(F.col(INITIAL_STATE_COLUMN).isNull())
    if definition.has_timers:
        keyed = keyed.withColumn(_TIME_COLUMN, F.unix_millis(F.current_timestamp()))
    partition = partition_column(definition.max_parallelism, definition.parallelism)
    placed = keyed.repartitionById(definition.parallelism, partition).sortWithinPartitions(*order)
    return placed.mapInArrow(BatchTask(definition, definition.resolve(None)), definition.output)


@dataclass(frozen=True)
class BatchTask:
    """Called by Spark with the sorted rows of one partition; yields the processor's output.

    Attributes:
        definition: The operator.
        states: Its states, as the driver has resolved them.
    """

    definition: OperatorDefinition
    states: Mapping[str, Any]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the processor.

        Raises:
            UserCodeError: The processor raised.
        """
        rows = (batch for batch in batches if batch.num_rows)
        first = next(rows, None)
        if first is None:
            return
        now = first.column(_TIME_COLUMN)[0].as_py() if self.definition.has_timers else -1
        runner = self.definition.task_runner(StateRegistry.from_wire(dict(self.states), settled=True))
        yield from runner.run(
            chain((first,), rows),
            # The source stays empty: what may still be read of a task's writes is not sent before it was.
            TaskInput(
                source=MemoryStateSource(),
                send=_forget,
                sequence=0,
                processing_time_ms=now,
                watermark_ms=_NO_WATERMARK_MS,
            ),
        )


def _forget(changes: pa.RecordBatch) -> None:
    """Take a part of the change set, which nobody is to have."""
