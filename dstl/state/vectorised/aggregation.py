"""The definition of a grouped aggregation with an output mode, and what its runners share.

A group is a state of its own, under the key of its window's start and end and the other grouping columns; so its end
stands in the key, where the TaskManager's index by time finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.rpc.messages import ExpiryPlace
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.schema_evolution import MEANING
from dstl.state.codec.value_columns import ValueColumns
from dstl.state.descriptor import StateDescriptor, StateKind
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregate_functions import Accumulator, Columns
from dstl.state.vectorised.change_records import KeyGroups, deletions, puts, send_parts
from dstl.state.vectorised.key_codes import Groups, whole_table
from dstl.state.vectorised.keyed_functions import OF_MODE, Aggregate, state_fields
from dstl.state.vectorised.time_windows import TimeWindows

__all__ = [
    "WINDOW_END",
    "WINDOW_START",
    "AggregateStates",
    "Aggregation",
    "OutputMode",
    "gathered",
    "key_groups_at",
    "latest_ms",
]

OutputMode = Literal["append", "update", "complete"]

WINDOW_START = "window_start"
"""The key column with the start of a group's window."""
WINDOW_END = "window_end"
"""The key column with its end."""

_PAGE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """A grouped aggregation, checked when the query is defined.

    Attributes:
        mode: When a group is part of the output.
        aggregates: By the name of the output column, over columns of the rows.
        key_schema: The state's key: ``window_start`` and ``window_end`` where there is a window, then the others.
        others: Columns of the rows that are the key's other columns, in its order.
        window: Where the window stands among the grouping columns of the output; None without one.
        windows: How windows follow from :attr:`time`; None where the rows have their window, or none.
        session: The rows have their own window, from an event to the end of its gap, and sessions are made of those.
        time: The rows' column of moments; None without event time.
        starts: The rows' column of window starts, where they have their window.
        ends: The rows' column of window ends, likewise.
        expires: The key's column that the watermark is compared with; None where groups stay for ever.
        input_schema: Columns of the rows.
        output_schema: Grouping columns and aggregates.
    """

    mode: OutputMode
    aggregates: Mapping[str, Aggregate]
    key_schema: StructType
    others: tuple[str, ...]
    window: int | None = None
    windows: TimeWindows | None = None
    session: bool = False
    time: str | None = None
    starts: str | None = None
    ends: str | None = None
    expires: str | None = None
    input_schema: StructType
    output_schema: StructType

    def accumulators(self) -> dict[str, Accumulator]:
        """Return what does the work, by the name of the output column.

        Raises:
            Invalid: A type that cannot be aggregated so.
        """
        made = {}
        for name, each in self.aggregates.items():
            try:
                made[name] = each.accumulator(self.input_schema)
            except Invalid as error:
                raise Invalid(f"aggregate {name!r}: {error}") from error
        return made

    def state_schema(self) -> StructType:
        """Return the columns of a group's state."""
        return StructType(
            [
                field
                for name, accumulator in self.accumulators().items()
                for field in state_fields(name, self.aggregates[name], accumulator.state, self.mode)
            ]
        )

    def check_known(self, known: StateDescriptor | None, operator: str) -> None:
        """Refuse state that was kept for another output mode.

        Raises:
            Invalid: Says which.
        """
        if known is None:
            return
        meanings = [str(field.metadata.get(MEANING, "")) for field in known.value_schemas[-1].fields]
        held = next((m.rpartition(OF_MODE)[2] for m in meanings if OF_MODE in m), "update")
        if held != self.mode:
            raise Invalid(
                f"operator {operator!r} has the output mode {self.mode}, but its stored state was kept for the mode "
                f"{held}: what was emitted, and which groups are held, differs. Go on with outputMode={held!r}, or "
                "give the operator another name, under which it begins anew"
            )


class AggregateStates:
    """Groups of one aggregation as state: their accumulators by their keys.

    Args:
        aggregation: The definition.
        registry: The operator's states; takes this one.
        part_bytes: Changes are sent in parts of about this size.
    """

    name = "aggregates"

    def __init__(self, aggregation: Aggregation, registry: StateRegistry, part_bytes: int = _PAGE_BYTES) -> None:
        self._aggregation = aggregation
        self.accumulators = aggregation.accumulators()
        self.keys = KeyCodec(aggregation.key_schema)
        self.descriptor = registry.declare(self.name, StateKind.VALUE, aggregation.state_schema())
        self._values = ValueColumns(self.name, self.descriptor.value_schemas)
        self._part_bytes = part_bytes
        self._output = arrow_schema(aggregation.output_schema)
        self._widths = [len(each.state) for each in self.accumulators.values()]
        expires = aggregation.expires
        self.place: ExpiryPlace | None = None if expires is None else self.keys.place_of(expires)

    @property
    def moment(self) -> pa.DataType:
        """The Arrow type of a window's start and end."""
        found: pa.DataType = arrow_schema(self.keys.schema).field(WINDOW_START).type
        return found

    def nothing(self, count: int) -> list[pa.Array]:
        """Return the accumulators of groups without rows."""
        return [pa.nulls(count, field.type) for field in self._values.schema]

    def fold(self, prior: Columns, rows: pa.Table, groups: Groups) -> list[pa.Array]:
        """Return accumulators with rows added."""
        folded: list[pa.Array] = []
        for (name, accumulator), part in zip(self.accumulators.items(), self._parts(prior), strict=True):
            source = self._aggregation.aggregates[name].column
            column = None if source is None else rows.column(source).combine_chunks()
            with _named(name):
                folded += accumulator.fold(part, column, groups)
        return folded

    def merge(self, partial: Columns, groups: Groups) -> list[pa.Array]:
        """Return accumulators put together of partial ones."""
        merged: list[pa.Array] = []
        for (name, accumulator), part in zip(self.accumulators.items(), self._parts(partial), strict=True):
            with _named(name):
                merged += accumulator.merge(part, groups)
        return merged

    def fetch(self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array) -> pa.Array:
        """Return the stored values of groups, null where there is none."""
        return task.source.fetch_values(self.descriptor.state_id, key_groups, keys)

    def decode(self, values: pa.Array) -> list[pa.Array]:
        """Return stored values as accumulators."""
        return list(self._values.decode(values).columns)

    def put(
        self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array, before: pa.Array, accumulated: Columns
    ) -> None:
        """Send the states of groups, as far as they have changed; those that are new to the index by time apart."""
        batch = pa.RecordBatch.from_arrays(list(accumulated), schema=self._values.schema)
        after = self._values.encode(batch)
        changes = puts(self.descriptor.state_id, key_groups, keys, after)
        if self.place is None:
            changed = pc.invert(pc.fill_null(pc.equal(before, after), False))
            send_parts(changes.filter(changed), self._part_bytes, task.send)
            return
        is_new = before.is_null()
        send_parts(changes.filter(is_new), self._part_bytes, task.send_expiring or task.send)
        changed = pc.fill_null(pc.not_equal(before, after), False)
        send_parts(changes.filter(changed), self._part_bytes, task.send)

    def delete(self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array) -> None:
        """Send the end of groups."""
        send_parts(deletions(self.descriptor.state_id, key_groups, keys), self._part_bytes, task.send)

    def output(self, key_columns: Sequence[pa.Array], accumulated: Columns) -> pa.RecordBatch:
        """Return groups as rows of the output."""
        columns = list(key_columns)
        at = self._aggregation.window
        if at is not None:
            start, end, *columns = columns
            kind = self._output.field(at).type
            columns.insert(at, pa.StructArray.from_arrays([start, end], fields=list(kind)))
        for accumulator, part in zip(self.accumulators.values(), self._parts(accumulated), strict=True):
            columns.append(accumulator.finish(part))
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, self._output, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self._output)

    def _parts(self, columns: Columns) -> Iterator[Columns]:
        at = 0
        for width in self._widths:
            yield columns[at : at + width]
            at += width


class _named:
    """Names the aggregate in what is raised within."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Invalid):
            raise Invalid(f"aggregate {self._name!r}: {error}") from error


def gathered(batches: Iterable[pa.RecordBatch], schema: StructType) -> pa.Table | None:
    """Return the rows of a task, each column in one chunk; None where there are none.

    Columns of the schema get the types in which state and output have them: Spark brings moments in the session's time
    zone, which changes nothing but their type.
    """
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return None
    rows = whole_table(held)
    for field in arrow_schema(schema):
        at = rows.schema.get_field_index(field.name)
        if at >= 0 and rows.schema.field(at).type != field.type:
            rows = rows.set_column(at, field.name, rows.column(at).cast(field.type))
    return rows


def latest_ms(rows: pa.Table, column: str | None) -> int | None:
    """Return the latest moment of a column in milliseconds, as Spark takes it for its watermark."""
    if column is None:
        return None
    latest = pc.max(rows.column(column).cast(pa.int64())).as_py()
    return None if latest is None else int(latest) // 1000


def key_groups_at(rows: pa.Table, column: str, positions: npt.NDArray[np.int64]) -> KeyGroups:
    """Return the key groups of some rows."""
    found: KeyGroups = np.asarray(rows.column(column).combine_chunks())[positions].astype(np.uint16)
    return found
