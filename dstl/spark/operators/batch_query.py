"""A stateful processor over a batch DataFrame: its state ends with the query, as in Spark.

Nothing is stored, and no coordinator and no TaskManager is asked. Rows are placed as those of a stream are, by key
group; Spark sorts them by key, so that a task takes them one Arrow batch at a time; and the state lives in the task's
memory, empty at first. An attempt that is run again begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dstl.spark.operators.broadcast import with_broadcast
from dstl.spark.operators.grouping import take_marks
from dstl.spark.operators.initial_state import with_initial_state
from dstl.spark.operators.processor import ProcessorDefinition
from dstl.spark.query.placement import repartition, with_key_groups
from dstl.state.broadcast_state import BroadcastRows, rows_of_streams
from dstl.state.keyed_batch import INITIAL_STATE_COLUMN, KEY_GROUP_COLUMN
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.taskmanager.reads import nothing_held

_TIME_COLUMN = "__dstl_processing_time"
"""When the query began, in every row: Spark gives all tasks and attempts of one execution the same time."""

_NO_WATERMARK_MS = -1
"""What Spark shows where there is no stream: event-time timers wait for ever, and no row is late."""


def batch_query(
    df: DataFrame,
    definition: ProcessorDefinition,
    initial: DataFrame | None,
    broadcast: Mapping[str, DataFrame] = MappingProxyType({}),
) -> DataFrame:
    """Run an operator over a batch DataFrame and return its output.

    Args:
        df: The input.
        definition: The operator.
        initial: Its initial state.
        broadcast: Its broadcast frames, by name.
    """
    keyed = with_key_groups(df, definition)
    order = [F.col(KEY_GROUP_COLUMN), *(F.col(f"`{name}`") for name in definition.by)]
    if initial is not None:
        keyed = with_initial_state(keyed, initial, definition)
        order.append(F.col(INITIAL_STATE_COLUMN).isNull())
    if definition.operator.streams:
        keyed = with_broadcast(keyed, broadcast, definition)
    if definition.has_timers:
        keyed = keyed.withColumn(_TIME_COLUMN, F.unix_millis(F.current_timestamp()))
    placed = repartition(keyed, definition).sortWithinPartitions(*order)
    return placed.mapInArrow(BatchTask(definition, definition.resolve(None)), definition.operator.output_schema)


@dataclass(frozen=True)
class BatchTask:
    """Runs the processor on the sorted rows of one partition; Spark calls it.

    Attributes:
        definition: The operator.
        states: Its states, as the driver has resolved them.
    """

    definition: ProcessorDefinition
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
        broadcast, keyed = self._broadcast_first(chain((first,), rows))
        yield from runner.run(
            keyed,
            # The source stays empty: what may still be read of a task's writes is not sent before it was.
            TaskInput(
                source=nothing_held(),
                send=_drop,
                sequence=0,
                processing_time_ms=now,
                watermark_ms=_NO_WATERMARK_MS,
                broadcast=broadcast,
            ),
        )

    def _broadcast_first(
        self, batches: Iterator[pa.RecordBatch]
    ) -> tuple[list[BroadcastRows], Iterator[pa.RecordBatch]]:
        """Take the broadcast rows, which come first: they have the lowest key groups, and rows are sorted by those."""
        streams = self.definition.operator.streams
        marks: list[pa.RecordBatch] = []
        for batch in batches if streams else ():
            found = take_marks([batch])
            marks += found.marks
            if found.rows:
                batches = chain(found.rows, batches)
                break
        return rows_of_streams(marks, streams), batches


def _drop(changes: pa.RecordBatch) -> None:
    """Drop a part of the change set: a batch query stores nothing."""
