"""Operators that run a function over whole columns, checked when the query is defined."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief
from dstl.spark.operators.arguments import check_ships
from dstl.spark.operators.ddl import parse_ddl
from dstl.spark.operators.input_checks import check_input, check_names
from dstl.spark.task_definition import OperatorPlace, TaskDefinition
from dstl.state.declared_schemas import DeclaredSchemas
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.state.vectorised.keyed_functions import (
    EXISTS_COLUMN,
    GROUP_COLUMN,
    Aggregate,
    AggregateKeys,
    MapStates,
    StatesFunction,
)
from dstl.state.vectorised.runner import KeyedFunction, VectorisedRunner

__all__ = ["FunctionDefinition", "define_aggregate", "define_map_states"]


@dataclass(frozen=True, kw_only=True)
class FunctionDefinition(TaskDefinition):
    """An operator that runs a function over whole columns.

    Attributes:
        function: What it does.
        ttl_ms: Milliseconds that a state lives without being written; 0 for ever.
    """

    function: KeyedFunction
    ttl_ms: int = 0

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the function's state."""
        return self.task_runner(registry).registry

    def arrange(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows as they came."""
        return (batch for batch in batches if batch.num_rows)

    def task_runner(self, registry: StateRegistry) -> VectorisedRunner:
        """Return the runner of one task."""
        return VectorisedRunner(
            self.function,
            operator=self.uid,
            key_schema=self.key_schema,
            input_schema=self.input_schema,
            registry=registry,
            ttl_ms=self.ttl_ms,
        )


def define_aggregate(
    df: DataFrame, place: OperatorPlace, aggregates: Mapping[str, Aggregate], ttl_ms: int | None
) -> FunctionDefinition:
    """Check an operator of aggregates and return its definition.

    Raises:
        Invalid: Names the operator and what is wrong.
    """
    what = place.label
    check_input(df, place)
    if not aggregates:
        raise Invalid(f"{what}: there is nothing to aggregate; pass n=count(), say")
    for name, aggregate in aggregates.items():
        if not isinstance(aggregate, Aggregate):
            raise Invalid(f"{what}: {name}= is {aggregate!r}, not an aggregate of dstl.spark such as count()")
        if name in place.by or name.startswith("$"):
            raise Invalid(f"{what}: the output cannot have a column {name!r} beside the grouping columns")
    schema: StructType = df.schema
    keys = StructType([schema[name] for name in place.by])
    try:
        function = AggregateKeys(keys, schema, aggregates)
    except Invalid as error:
        raise Invalid(f"{what}: {error}") from error
    used = [*place.by, *(each.column for each in aggregates.values() if each.column is not None)]
    check_names(df, used, place)
    needed = StructType([schema[name] for name in dict.fromkeys(used)])
    return _define(place, function, needed, ttl_ms)


def define_map_states(
    df: DataFrame,
    place: OperatorPlace,
    state: StructType | str,
    output: StructType | str,
    function: StatesFunction,
    ttl_ms: int | None,
) -> FunctionDefinition:
    """Check an operator of a function over states and return its definition.

    Raises:
        Invalid: Names the operator and what is wrong.
    """
    what = place.label
    check_input(df, place)
    check_names(df, df.columns, place)
    schemas = []
    for name, given in (("state", state), ("output", output)):
        schemas.append(DeclaredSchemas(parse_ddl).schema(given, f"{what}: the {name} schema"))
        if not schemas[-1].fields:
            raise Invalid(f"{what}: the {name} schema has no column")
    reserved = {GROUP_COLUMN, EXISTS_COLUMN} & {*df.columns, *schemas[0].names}
    if reserved:
        raise Invalid(f"{what}: the column name {min(reserved)} is taken by DSTL; rename it")
    if not callable(function):
        raise Invalid(f"{what}: function is {type(function).__name__}: it is called as function(rows, keys, states)")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise Invalid(f"{what}: function is called as function(rows, keys, states): {error}") from None
    check_ships(function, f"{what}: the function", "make inside it what belongs to one process")
    return _define(place, MapStates(function, schemas[0], schemas[1], place.uid), df.schema, ttl_ms)


def _define(
    place: OperatorPlace, function: KeyedFunction, input_schema: StructType, ttl_ms: int | None
) -> FunctionDefinition:
    if ttl_ms is not None and (isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int) or ttl_ms <= 0):
        raise Invalid(f"{place.label}: ttl_ms={brief(ttl_ms)} is no number of milliseconds above 0")
    arrow_schema_of(input_schema, f"{place.label}: the input")
    definition = FunctionDefinition(
        **place._asdict(),
        function=function,
        input_schema=input_schema,
        key_schema=StructType([input_schema[name] for name in place.by]),
        output=function.output_schema,
        ttl_ms=ttl_ms or 0,
    )
    definition.resolve(None)  # What a task would refuse is refused here.
    return definition
