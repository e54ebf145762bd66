"""The definition of a grouped aggregation with an output mode, and what its runners share.

A group is a state of its own, under the key of its window's start and end and the other grouping columns; so its end
stands in the key, where the TaskManager's index by time finds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, DecimalType, StructField, StructType

from dstl.errors import Invalid, brief, named
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.schema_evolution import FORM, MEANING
from dstl.state.descriptor import StateDescriptor
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput
from dstl.state.vectorised.aggregate_functions import (
    Accumulator,
    Columns,
    Count,
    DecimalSum,
    Extreme,
    First,
    Last,
    Mean,
    Sum,
)
from dstl.state.vectorised.column_state import ColumnState, KeyGroups
from dstl.state.vectorised.compound_functions import Collected, CountDistinct, ExtremeBy, Variance
from dstl.state.vectorised.distinct_sketch import ApproxCountDistinct
from dstl.state.vectorised.key_codes import Groups, whole_table
from dstl.state.vectorised.time_windows import TimeWindows

FUNCTIONS = {
    "any": "max",
    "any_value": "first",
    "approx_count_distinct": "approx_count_distinct",
    "array_agg": "collect_list",
    "avg": "mean",
    "bool_and": "min",
    "bool_or": "max",
    "collect_list": "collect_list",
    "collect_set": "collect_set",
    "count": "count",
    "count_distinct": "count_distinct",
    "count_if": "count",
    "every": "min",
    "first": "first",
    "first_value": "first",
    "last": "last",
    "last_value": "last",
    "max": "max",
    "max_by": "max_by",
    "mean": "mean",
    "min": "min",
    "min_by": "min_by",
    "some": "max",
    "std": "stddev_samp",
    "stddev": "stddev_samp",
    "stddev_pop": "stddev_pop",
    "stddev_samp": "stddev_samp",
    "sum": "sum",
    "var_pop": "var_pop",
    "var_samp": "var_samp",
    "variance": "var_samp",
}
"""Spark's names of the functions that there are here, and ours."""
_MOMENTS = ("", "$mean", "$count")
_SUFFIXES = {
    "first": ("", "$seen"),
    "last": ("", "$seen"),
    "max_by": ("", "$order"),
    "mean": ("", "$count"),
    "min_by": ("", "$order"),
    "stddev_pop": _MOMENTS,
    "stddev_samp": _MOMENTS,
    "var_pop": _MOMENTS,
    "var_samp": _MOMENTS,
}
"""What follows the aggregate's name in those of its state's columns, where it has several."""
OF_MODE = " for output mode "
"""Between an aggregate and its output mode, where that is another than update, in what stored columns remember."""

_TEXT = re.compile(r"(?P<function>\w+)\((?P<column>.*?)(?P<ignore_nulls>, ignore_nulls=True)?\)")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate as the query names it.

    Attributes:
        function: Its name here, one of the values of :data:`FUNCTIONS`.
        column: What it aggregates; None for ``count()`` of rows. Several columns are one struct.
        ignore_nulls: Of ``first`` and ``last``.
        rsd: Of ``approx_count_distinct``.
        ansi: Of ``sum`` and ``mean``: see :class:`Sum` and :class:`DecimalSum`.
        shown: The column as messages and stored state name it; empty for its own name.
    """

    function: str
    column: str | None = None
    ignore_nulls: bool = False
    rsd: float = 0.05
    ansi: bool = True
    shown: str = ""

    def __str__(self) -> str:
        """Return it as a query has it, without what may change at a restart: ``sum(v)``."""
        return f"{self.function}({self.shown or self.column or ''}{', ignore_nulls=True' if self.ignore_nulls else ''})"

    @staticmethod
    def of(text: str) -> Aggregate:
        """Return the aggregate of such a text, which may have Spark's name of the function; the inverse of ``str``.

        Raises:
            Invalid: It is not such a text.
        """
        found = _TEXT.fullmatch(text.strip()) if isinstance(text, str) else None
        function = FUNCTIONS.get(found["function"]) if found else None
        if found is None or function is None:
            raise Invalid(
                f"{brief(text)} is not an aggregate such as count() or sum(v); there are {', '.join(FUNCTIONS)}"
            )
        return Aggregate(function, found["column"] or None, ignore_nulls=bool(found["ignore_nulls"]))

    def accumulator(self, schema: StructType) -> Accumulator:
        """Return what does the work over an input of this schema.

        Raises:
            Invalid: There is no such column, or its type cannot be aggregated so.
        """
        if self.column is None:
            if self.function != "count":
                raise Invalid(f"{self.function}() names no column; there are {', '.join(schema.names)}")
            return Count()
        if self.column not in schema.names:
            raise Invalid(f"{self.function}() names column {self.column!r}; there are {', '.join(schema.names)}")
        of = schema[self.column].dataType
        if self.function == "count":
            return Count()
        if self.function == "sum":
            return (DecimalSum if isinstance(of, DecimalType) else Sum)(of, ansi=self.ansi)
        if self.function == "mean":
            return Mean(of, ansi=self.ansi)
        if self.function in ("min", "max"):
            return Extreme(of, largest=self.function == "max")
        if self.function == "approx_count_distinct":
            return ApproxCountDistinct(of, self.rsd)
        if self.function == "count_distinct":
            return CountDistinct(of)
        if self.function in ("collect_list", "collect_set"):
            return Collected(of, once=self.function == "collect_set")
        if self.function in ("min_by", "max_by"):
            assert isinstance(of, StructType)
            return ExtremeBy(of, largest=self.function == "max_by")
        if self.function.startswith(("stddev", "var")):
            return Variance(sample=self.function.endswith("samp"), root=self.function.startswith("stddev"))
        return (First if self.function == "first" else Last)(of, ignore_nulls=self.ignore_nulls)


def state_fields(
    name: str, aggregate: Aggregate, kinds: Sequence[DataType], output_mode: str = "update", form: str = ""
) -> list[StructField]:
    """Return the columns in which state holds an aggregate.

    Args:
        name: The output column.
        aggregate: What it is, which the columns remember.
        kinds: Their types, as :attr:`Accumulator.state` has them.
        output_mode: The mode that the state is kept for, which they remember too.
        form: :attr:`Accumulator.form`, likewise.
    """
    meaning = str(aggregate) if output_mode == "update" else f"{aggregate}{OF_MODE}{output_mode}"
    suffixes = _SUFFIXES.get(aggregate.function, ("",))
    if aggregate.function in ("mean", "sum") and isinstance(kinds[0], DecimalType):
        suffixes = ("", "$lost", *suffixes[1:])
    return [
        StructField(name + suffix, kind, metadata={MEANING: meaning} | ({FORM: form} if form else {}))
        for suffix, kind in zip(suffixes, kinds, strict=True)
    ]


OutputMode = Literal["append", "update", "complete"]

WINDOW_START = "window_start"
"""The key column with the start of a group's window."""
WINDOW_END = "window_end"
"""The key column with its end."""
LATE = "__dstl_late"
"""The rows' column with a whole row of the input, where late rows are part of the output."""


@dataclass(frozen=True, kw_only=True)
class Aggregation(StatefulOperator):
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
        expires: The key's column that the watermark is compared with; None where no watermark ends groups.
        ttl_ms: Milliseconds of processing time after a group's last row at which it is gone; 0 for never. Of output
            mode update alone, and without a watermark.
        input_schema: Columns of the rows.
        output_schema: Grouping columns and aggregates; then, where there are :data:`LATE` rows, the column of those.
    """

    mode: OutputMode
    aggregates: Mapping[str, Aggregate]
    others: tuple[str, ...]
    window: int | None = None
    windows: TimeWindows | None = None
    session: bool = False
    time: str | None = None
    starts: str | None = None
    ends: str | None = None
    expires: str | None = None
    ttl_ms: int = 0

    @property
    def has_late(self) -> bool:
        """True where late rows are part of the output."""
        return LATE in self.input_schema.names

    def accumulators(self) -> dict[str, Accumulator]:
        """Return what does the work, by the name of the output column.

        Raises:
            Invalid: A type that cannot be aggregated so.
        """
        made = {}
        for name, each in self.aggregates.items():
            with named(f"aggregate {name!r}"):
                made[name] = each.accumulator(self.input_schema)
        return made

    def state_schema(self) -> StructType:
        """Return the columns of a group's state."""
        return StructType(
            [
                field
                for name, accumulator in self.accumulators().items()
                for field in state_fields(name, self.aggregates[name], accumulator.state, self.mode, accumulator.form)
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

    Attributes:
        accumulators: What does the work, by the name of the output column.
        keys: The groups' keys.
        stored: Their values.
    """

    name = "aggregates"

    def __init__(self, aggregation: Aggregation, registry: StateRegistry) -> None:
        self._aggregation = aggregation
        self.accumulators = aggregation.accumulators()
        self.keys = KeyCodec(aggregation.key_schema)
        expires = aggregation.expires
        self.stored = ColumnState(
            registry,
            self.name,
            aggregation.state_schema(),
            ttl_ms=aggregation.ttl_ms,
            place=None if expires is None else self.keys.place_of(expires),
        )
        self._output = arrow_schema(aggregation.output_schema)
        self._widths = [len(each.state) for each in self.accumulators.values()]

    @property
    def moment(self) -> pa.DataType:
        """The Arrow type of a window's start and end."""
        found: pa.DataType = arrow_schema(self.keys.schema).field(WINDOW_START).type
        return found

    def nothing(self, count: int) -> list[pa.Array]:
        """Return the accumulators of groups without rows."""
        return [pa.nulls(count, field.type) for field in self.stored.schema]

    def fold(self, prior: Columns, rows: pa.Table, groups: Groups) -> list[pa.Array]:
        """Return accumulators with rows added."""
        folded: list[pa.Array] = []
        for (name, accumulator), part in zip(self.accumulators.items(), self._parts(prior), strict=True):
            source = self._aggregation.aggregates[name].column
            column = None if source is None else rows.column(source).combine_chunks()
            with named(f"aggregate {name!r}"):
                folded += accumulator.fold(part, column, groups)
        return folded

    def merge(self, partial: Columns, groups: Groups) -> list[pa.Array]:
        """Return accumulators put together of partial ones."""
        merged: list[pa.Array] = []
        for (name, accumulator), part in zip(self.accumulators.items(), self._parts(partial), strict=True):
            with named(f"aggregate {name!r}"):
                merged += accumulator.merge(part, groups)
        return merged

    def decode(self, values: pa.Array) -> list[pa.Array]:
        """Return stored values as accumulators."""
        return list(self.stored.decode(values).columns)

    def put(
        self, task: TaskInput, key_groups: KeyGroups, keys: pa.Array, before: pa.Array, accumulated: Columns
    ) -> None:
        """Send the states of groups, as far as they have changed."""
        columns = pa.RecordBatch.from_arrays(list(accumulated), schema=self.stored.schema)
        self.stored.put(task, key_groups, keys, before, columns)

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
        if self._aggregation.has_late:
            columns.append(pa.nulls(len(columns[0]), self._output.field(-1).type))
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, self._output, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self._output)

    def late_output(self, late: pa.ChunkedArray) -> list[pa.RecordBatch]:
        """Return late rows as rows of the output, which have nothing else."""
        nulls = [pa.nulls(len(late), field.type) for field in list(self._output)[:-1]]
        return list(pa.table([*nulls, late], schema=self._output).to_batches())

    def _parts(self, columns: Columns) -> Iterator[Columns]:
        at = 0
        for width in self._widths:
            yield columns[at : at + width]
            at += width


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
