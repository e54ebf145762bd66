"""The frame of a grouped aggregation's task: rows first, then the groups that had none and are part of the output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dstl.column_buffers import array_of, numpy_of, to_int64, valid_of
from dstl.errors import Invalid, clip, named
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregation import LATE, AggregateStates, Aggregation, gathered, latest_ms
from dstl.state.vectorised.column_state import KeyGroups
from dstl.state.vectorised.key_codes import Codes, Groups


class GroupRunner(ABC):
    """Runs one task of a grouped aggregation; what a group is, and how rows come to it, is a subclass's.

    Args:
        aggregation: The definition.
        operator: Name of the operator, for messages.
        registry: The operator's states; takes the aggregation's.

    Attributes:
        max_event_time_ms: Latest event time of the input, late rows included; None without one.
        late_rows: What late rows were left out of, as Spark counts it in ``numRowsDroppedByWatermark``.

    Raises:
        Invalid: A type that cannot be a key or aggregated, or a state schema that cannot follow the stored one.
    """

    def __init__(self, aggregation: Aggregation, *, operator: str, registry: StateRegistry) -> None:
        self._aggregation = aggregation
        self._operator = operator
        with named(f"operator {operator!r}"):
            self._states = self._declared(registry)
        self.max_event_time_ms: int | None = None
        self.late_rows = 0
        self._late: list[pa.ChunkedArray] = []

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput) -> Iterator[pa.RecordBatch]:
        """Process one partition of one micro-batch; its rows are gathered first and must fit the worker's memory.

        Yields:
            Batches of the output schema.

        Raises:
            Invalid: An aggregate does not fit its type.
            DstlError: Prior state cannot be read, or changes not sent.
        """
        handled: list[pa.Array] = []
        rows = gathered(batches, self._aggregation.input_schema)
        if rows is not None:
            self.max_event_time_ms = latest_ms(rows, self._aggregation.time)
            try:
                self._late = []
                yield from self._with_rows(rows, task, handled)
                for late in self._late:
                    yield from self._states.late_output(late)
            except Invalid as error:
                raise Invalid(f"operator {self._operator!r}: {clip(error)}") from error
        if self._aggregation.mode == "complete":
            yield from self._untouched(task, handled)
        elif self._states.stored.place is not None:
            yield from self._evicted(task, handled)

    def _declared(self, registry: StateRegistry) -> AggregateStates:
        """Declare the operator's states, and return the groups'."""
        return AggregateStates(self._aggregation, registry)

    @abstractmethod
    def _with_rows(self, rows: pa.Table, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        """Bring rows to their groups, and yield those that are part of the output now.

        Args:
            rows: All rows of the task.
            task: What else it is given.
            handled: Takes the keys of groups that are neither to be emitted nor to be ended again.
        """

    def _ended(
        self, task: TaskInput, key_groups: KeyGroups, columns: list[pa.Array], values: pa.Array
    ) -> pa.RecordBatch:
        """Return groups that have ended as rows of the output.

        Args:
            task: The task's input.
            key_groups: Their key groups.
            columns: Their keys' columns.
            values: Their stored values.
        """
        return self._states.output(columns, self._states.decode(values))

    def _set_aside(self, rows: pa.Table, late: npt.NDArray[np.bool_]) -> None:
        """Keep late rows for the output, where they are part of it."""
        if self._aggregation.has_late:
            self._late.append(rows.column(LATE).filter(array_of(late)))

    def _without(self, rows: pa.Table, groups: Groups, kept: npt.NDArray[np.bool_]) -> tuple[pa.Table, Groups, Codes]:
        """Return the rows of the groups that are kept, those groups, and their first rows."""
        among = kept[groups.codes]
        left = Groups((np.cumsum(kept) - 1)[groups.codes[among]])
        self._set_aside(rows, ~among)
        return rows.filter(array_of(among)).combine_chunks(), left, left.first_rows()

    def _evicted(self, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        """End the groups that the watermark has passed and that had no row; in append mode, yield them."""
        states = self._states
        assert states.stored.place is not None
        append = self._aggregation.mode == "append"
        until = task.watermark_ms * 1000
        for due in task.source.fetch_due(
            states.stored.state_id, task.key_groups, states.stored.place, until, with_values=append
        ):
            due = without_handled(due, handled)
            if not due.num_rows:
                continue
            keys, key_groups = due.column("key"), numpy_of(due.column("key_group"))
            states.stored.delete(task, key_groups, keys)
            if append:
                yield self._ended(task, key_groups, states.keys.decode_array(keys), due.column("value"))

    def _untouched(self, task: TaskInput, handled: list[pa.Array]) -> Iterator[pa.RecordBatch]:
        """Yield the groups that had no row."""
        for held in task.source.scan_values(self._states.stored.state_id, task.key_groups):
            held = without_handled(held, handled)
            if held.num_rows:
                keys = self._states.keys.decode_array(held.column("key"))
                yield self._states.output(keys, self._states.decode(held.column("value")))


def late_after(task: TaskInput) -> int:
    """Return the microseconds at or before which a window's end makes its rows late."""
    return task.late_until_ms * 1000


def is_over(moments: pa.Array, watermark_us: int) -> npt.NDArray[np.bool_]:
    """Return which moments the watermark has reached; a null never."""
    over: npt.NDArray[np.bool_] = to_int64(moments) <= watermark_us
    if moments.null_count:
        over &= valid_of(moments)
    return over


def without_handled(found: pa.RecordBatch, handled: list[pa.Array]) -> pa.RecordBatch:
    """Return the entries whose key is not one of those that were handled already."""
    if not handled or not found.num_rows:
        return found
    known = pa.concat_arrays(handled) if len(handled) > 1 else handled[0]
    return found.filter(pc.invert(pc.is_in(found.column("key"), value_set=known))) if len(known) else found
