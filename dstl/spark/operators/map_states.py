"""Operators that run a function of the user's over whole columns, checked when the query is defined."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from dstl.errors import Invalid
from dstl.spark.operators.arguments import check_ships, parse_ddl, time_to_live
from dstl.spark.operators.input_checks import check_input, check_names
from dstl.spark.task_definition import OperatorPlace, TaskDefinition
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.registry import StateRegistry
from dstl.state.vectorised.map_states import EXISTS_COLUMN, GROUP_COLUMN, MapStates, MapStatesRunner, StatesFunction


@dataclass(frozen=True, kw_only=True)
class MapStatesDefinition(TaskDefinition):
    """An operator that runs a function over whole columns.

    Attributes:
        operator: What it computes.
    """

    operator: MapStates

    def task_runner(self, registry: StateRegistry) -> MapStatesRunner:
        """Return the runner of one task."""
        return MapStatesRunner(self.operator, registry=registry)


def define_map_states(
    df: DataFrame,
    place: OperatorPlace,
    function: StatesFunction,
    output: StructType | str,
    state: StructType | str,
    ttl_ms: int | None,
) -> MapStatesDefinition:
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
        raise Invalid(f"{what}: the column name {min(reserved)} is reserved by DSTL; rename it")
    if not callable(function):
        raise Invalid(f"{what}: function is {type(function).__name__}: it is called as function(rows, keys, states)")
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError as error:
        raise Invalid(f"{what}: function is called as function(rows, keys, states): {error}") from None
    check_ships(function, f"{what}: the function", "make inside it what belongs to one process")
    arrow_schema_of(df.schema, f"{what}: the input")
    operator = MapStates(
        name=place.uid,
        function=function,
        key_schema=StructType([df.schema[name] for name in place.by]),
        input_schema=df.schema,
        state_schema=schemas[0],
        output_schema=schemas[1],
        ttl_ms=time_to_live(what, ttl_ms),
    )
    definition = MapStatesDefinition(**vars(place), operator=operator)
    definition.resolve(None)  # What a task would refuse is refused here.
    return definition
