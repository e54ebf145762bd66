"""The functions of vectorised operators: several aggregates side by side, and a function of the user's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import BooleanType, DataType, LongType, StructField, StructType

from dstl.errors import Invalid, brief
from dstl.state.codec.schema_evolution import MEANING
from dstl.state.frames.row_writer import arrow_schema
from dstl.state.user_code import user_code_error
from dstl.state.vectorised.aggregate_functions import Accumulator, Count, Extreme, First, Last, Mean, Sum
from dstl.state.vectorised.distinct_sketch import ApproxCountDistinct
from dstl.state.vectorised.key_codes import Groups
from dstl.state.vectorised.runner import Update

__all__ = [
    "EXISTS_COLUMN",
    "GROUP_COLUMN",
    "OF_MODE",
    "Aggregate",
    "AggregateKeys",
    "MapStates",
    "StatesFunction",
    "state_fields",
]

GROUP_COLUMN = "__group"
"""Column of ``rows``: which row of ``keys`` a row belongs to."""
EXISTS_COLUMN = "__exists"
"""Column of ``states``: False where a key has no state; in new states: False removes the state."""
OF_MODE = " for output mode "
"""Between an aggregate and its output mode, where that is another than update, in what stored columns remember."""

_FUNCTIONS = ("count", "sum", "mean", "min", "max", "first", "last", "approx_count_distinct")
_TEXT = re.compile(r"(?P<function>\w+)\((?P<column>.*?)(?P<ignore_nulls>, ignore_nulls=True)?\)")

StatesFunction = Callable[[pa.Table, pa.Table, pa.Table], tuple[Any, Any]]
"""``function(rows, keys, states) -> (new states, output)``."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One aggregate as the query names it; made by ``dstl.spark.count`` and its siblings.

    Attributes:
        function: Its name.
        column: What it aggregates; None for ``count()`` of rows.
        ignore_nulls: Of ``first`` and ``last``.
        rsd: Of ``approx_count_distinct``.
        shown: The column as messages and stored state name it; empty for its own name.
    """

    function: str
    column: str | None = None
    ignore_nulls: bool = False
    rsd: float = 0.05
    shown: str = ""

    def __str__(self) -> str:
        """Return it as a query has it, without what may change at a restart: ``sum(v)``."""
        return f"{self.function}({self.shown or self.column or ''}{', ignore_nulls=True' if self.ignore_nulls else ''})"

    @staticmethod
    def of(text: str) -> Aggregate:
        """Return the aggregate of such a text; the inverse of ``str``.

        Raises:
            Invalid: It is none.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None or found["function"] not in _FUNCTIONS:
            raise Invalid(f"{brief(text)} is no aggregate such as count() or sum(v); there are {', '.join(_FUNCTIONS)}")
        return Aggregate(found["function"], found["column"] or None, ignore_nulls=bool(found["ignore_nulls"]))

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
            return Sum(of)
        if self.function == "mean":
            return Mean(of)
        if self.function in ("min", "max"):
            return Extreme(of, largest=self.function == "max")
        if self.function == "approx_count_distinct":
            return ApproxCountDistinct(of, self.rsd)
        return (First if self.function == "first" else Last)(of, ignore_nulls=self.ignore_nulls)


def state_fields(
    name: str, aggregate: Aggregate, kinds: Sequence[DataType], output_mode: str = "update"
) -> list[StructField]:
    """Return the columns in which state holds an aggregate.

    Args:
        name: The output column.
        aggregate: What it is, which the columns remember.
        kinds: Their types, as :attr:`Accumulator.state` has them.
        output_mode: The mode that the state is kept for, which they remember too.
    """
    meaning = str(aggregate) if output_mode == "update" else f"{aggregate}{OF_MODE}{output_mode}"
    suffixes = [
        "" if not at else {LongType: "$count", BooleanType: "$seen"}[type(kind)] for at, kind in enumerate(kinds)
    ]
    return [
        StructField(name + suffix, kind, metadata={MEANING: meaning})
        for suffix, kind in zip(suffixes, kinds, strict=True)
    ]


class AggregateKeys:
    """Aggregates of the rows of each key, kept over micro-batches; see ``StateBackend.aggregate``.

    Args:
        key_schema: The grouping columns.
        input_schema: The columns that are there.
        aggregates: By the name of the output column.

    Raises:
        Invalid: A column or type that cannot be.
    """

    state_name = "aggregates"

    def __init__(self, key_schema: StructType, input_schema: StructType, aggregates: Mapping[str, Aggregate]) -> None:
        self._key_names = list(key_schema.names)
        self._aggregates = dict(aggregates)
        self._accumulators = {name: each.accumulator(input_schema) for name, each in aggregates.items()}
        used = {each.column for each in aggregates.values()}
        self._used = StructType([each for each in input_schema.fields if each.name in used])
        self.state_schema = StructType(
            [
                field
                for name, accumulator in self._accumulators.items()
                for field in state_fields(name, aggregates[name], accumulator.state)
            ]
        )
        results = [StructField(name, each.result) for name, each in self._accumulators.items()]
        self.output_schema = StructType([*key_schema.fields, *results])

    def update(
        self,
        rows: pa.Table,
        groups: Groups,
        keys: pa.RecordBatch,
        states: pa.RecordBatch,
        exists: npt.NDArray[np.bool_],
    ) -> Update:
        """Fold the rows into the accumulators and return those and the results."""
        types = {field.name: field.type for field in arrow_schema(self._used)}
        accumulated: list[pa.Array] = []
        results: list[pa.Array] = []
        at = 0
        for name, accumulator in self._accumulators.items():
            source = self._aggregates[name].column
            # Moments come in the session's time zone, and are kept without it.
            column = None if source is None else rows.column(source).combine_chunks().cast(types[source])
            prior = states.columns[at : at + len(accumulator.state)]
            at += len(accumulator.state)
            try:
                folded = accumulator.fold(prior, column, groups)
                results.append(accumulator.finish(folded))
            except Invalid as error:
                raise Invalid(f"aggregate {name!r}: {error}") from error
            accumulated += folded
        output = pa.RecordBatch.from_arrays([*keys.columns, *results], names=[*self._key_names, *self._accumulators])
        return Update(pa.RecordBatch.from_arrays(accumulated, names=self.state_schema.names), None, output)


class MapStates:
    """A function of the user's over rows, keys and states; see ``StateBackend.map_states``.

    Args:
        function: The user's.
        state_schema: Columns of the state.
        output_schema: Columns of the output.
        operator: For messages.
    """

    state_name = "state"

    def __init__(
        self, function: StatesFunction, state_schema: StructType, output_schema: StructType, operator: str
    ) -> None:
        self._function = function
        self.state_schema = state_schema
        self.output_schema = output_schema
        self._operator = operator

    def update(
        self,
        rows: pa.Table,
        groups: Groups,
        keys: pa.RecordBatch,
        states: pa.RecordBatch,
        exists: npt.NDArray[np.bool_],
    ) -> Update:
        """Call the function."""
        given = pa.Table.from_batches([states]).append_column(EXISTS_COLUMN, pa.array(exists))
        try:
            found = self._function(
                rows.append_column(GROUP_COLUMN, pa.array(groups.codes)), pa.Table.from_batches([keys]), given
            )
        except Exception as error:
            raise user_code_error(error, self._function, self._operator, None) from error
        if not isinstance(found, tuple) or len(found) != 2:
            raise Invalid(f"the function returns (new states, output), not {found!r:.200}")
        new, output = (self._batch(each, what) for each, what in zip(found, ("new states", "output"), strict=True))
        if new is None:
            return Update(None, None, output)
        position = new.schema.get_field_index(EXISTS_COLUMN)
        if position < 0:
            return Update(new, None, output)
        kept = new.column(position)
        if not pa.types.is_boolean(kept.type):
            raise Invalid(f"column {EXISTS_COLUMN} of the new states is {kept.type}")
        return Update(new, kept.fill_null(True).to_numpy(zero_copy_only=False), output)

    def _batch(self, found: Any, what: str) -> pa.RecordBatch | None:
        if found is None or isinstance(found, pa.RecordBatch):
            return found
        if not isinstance(found, pa.Table):
            raise Invalid(f"the {what} are a {type(found).__name__}, not a pyarrow Table or RecordBatch")
        columns: Sequence[Any] = [column.combine_chunks() for column in found.columns]
        return pa.RecordBatch.from_arrays(columns, schema=found.schema)
