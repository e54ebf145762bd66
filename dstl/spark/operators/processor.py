"""Operators that run PySpark's ``StatefulProcessor``, checked when the query is defined."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, GroupedData, SparkSession
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from dstl.errors import Invalid, brief, named
from dstl.spark.operators.arguments import OutputModeName, check_ships, parse_ddl
from dstl.spark.operators.broadcast import check_broadcast
from dstl.spark.operators.event_time import check_event_time_column, event_time_of
from dstl.spark.operators.grouping import group_rows
from dstl.spark.operators.input_checks import check_input, check_names
from dstl.spark.task_definition import EventTime, OperatorPlace, TaskDefinition
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.frames.row_writer import arrow_schema_of
from dstl.state.handle import TimeMode, TimeModeName
from dstl.state.keyed_batch import UNLIMITED, FrameLimits, Style
from dstl.state.processor_runner import ProcessorOperator, ProcessorRunner, discover_states
from dstl.state.registry import StateRegistry

_OUTPUT_MODES = ("append", "update")
_BATCH_OUTPUT_MODES = (*_OUTPUT_MODES, "complete")
"""A batch query has all its output at once: there Spark takes every mode, and they mean the same."""


@dataclass(frozen=True, kw_only=True)
class ProcessorDefinition(TaskDefinition):
    """An operator that runs a ``StatefulProcessor``.

    Attributes:
        processor: The user's processor; each task works on its own copy.
        operator: What the processor is run on.
        schemas: What the DDL texts of ``init`` stand for.
    """

    processor: StatefulProcessor
    operator: ProcessorOperator
    schemas: DeclaredSchemas

    @property
    def needs_marks(self) -> bool:
        """True where a task must know its partition even without rows: timers are found by it."""
        return self.has_initial_state or self.has_timers

    @property
    def has_timers(self) -> bool:
        """True in the time modes that have timers."""
        return TimeMode.parse(self.operator.time_mode) is not TimeMode.NONE

    @property
    def needs_watermark_batches(self) -> bool:
        """True where timers fire by the operator's own watermark, here or in what follows."""
        by_event_time = TimeMode.parse(self.operator.time_mode) is TimeMode.EVENT_TIME
        return super().needs_watermark_batches and (by_event_time or self.operator.emitted_time is not None)

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the states that the processor's ``init`` declares and deletes, on a copy of it.

        Raises:
            UserCodeError: A state cannot follow the stored one; names both schemas.
        """
        # Here, for it brings tables and their options, which workers have no use for.
        from dstl.taskmanager.reads import nothing_held

        return discover_states(copy.deepcopy(self.processor), self.operator, registry, self.schemas, nothing_held())

    def arrange(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows, those of one key together."""
        return group_rows(batches, self.by)

    def task_runner(self, registry: StateRegistry) -> ProcessorRunner:
        """Return the runner of one task, with a processor object of its own."""
        return replace(self, processor=copy.deepcopy(self.processor)).runner(registry)

    def runner(self, registry: StateRegistry) -> ProcessorRunner:
        """Return the runner of one task, with the definition's own processor object.

        Raises:
            Invalid: A type that is not supported.
        """
        return ProcessorRunner(self.processor, self.operator, registry, self.schemas)


class TransformCall(NamedTuple):
    """The arguments of PySpark's ``transformWithState``, under its names: see :class:`GroupedStream`."""

    statefulProcessor: StatefulProcessor
    outputStructType: StructType | str
    outputMode: OutputModeName
    timeMode: TimeModeName
    initialState: GroupedData | DataFrame | None = None
    eventTimeColumnName: str = ""


def define_processor(
    df: DataFrame,
    place: OperatorPlace,
    style: Style,
    call: TransformCall,
    broadcast: Mapping[str, DataFrame] | None = None,
) -> ProcessorDefinition:
    """Check everything that can be checked before a task runs, and return the definition.

    Args:
        df: The input.
        place: Name, grouping columns and partitions.
        style: What the processor takes: rows or pandas frames.
        call: The user's call.
        broadcast: Broadcast streams by name.

    Raises:
        Invalid: Names the operator and what is wrong.
        UserCodeError: The processor's ``init`` raised.
    """
    what = place.label
    processor, output_mode, emitted_time = call.statefulProcessor, call.outputMode, call.eventTimeColumnName
    if not isinstance(processor, StatefulProcessor):
        if isinstance(processor, type):
            name = processor.__name__
            raise Invalid(f"{what}: the processor is the class {name}; pass an object of it: {name}()")
        raise Invalid(f"{what}: the processor is {type(processor).__name__}, not a StatefulProcessor object")
    check_input(df, place, or_batch=True)
    modes = _OUTPUT_MODES if df.isStreaming else _BATCH_OUTPUT_MODES
    if not isinstance(output_mode, str) or output_mode.lower() not in modes:
        raise Invalid(f"{what}: output mode {brief(output_mode)} is not one of {', '.join(modes)}")
    with named(what):
        mode = TimeMode.parse(call.timeMode)
    check_names(df, df.columns, place)
    arrow_schema_of(df.schema, f"{what}: the input")
    schemas = DeclaredSchemas(parse_ddl)
    schema = schemas.schema(call.outputStructType, f"{what}: the output schema")
    arrow_schema_of(schema, f"{what}: the output")
    if emitted_time:
        check_event_time_column(emitted_time, schema, what)
    event_time = _event_time(df, mode, emitted_time, what)
    operator = ProcessorOperator(
        name=place.uid,
        key_schema=StructType([df.schema[name] for name in place.by]),
        input_schema=df.schema,
        output_schema=schema,
        style=style,
        time_mode=call.timeMode,
        event_time=event_time.column if event_time else None,
        emitted_time=emitted_time if emitted_time and df.isStreaming else None,
        timezone=df.sparkSession.conf.get("spark.sql.session.timeZone") or "UTC",
        frames=_frame_limits(df.sparkSession),
        streams=check_broadcast(broadcast, df, processor, what),
    )
    definition = ProcessorDefinition(
        **vars(place),
        processor=processor,
        operator=operator,
        schemas=schemas,
        event_time=event_time,
        has_initial_state=call.initialState is not None,
    )
    check_ships(processor, f"{what}: the processor", "make in init() what belongs to one process")
    # Spark, too, runs init once on the driver: what it refuses is refused here and not in a task.
    with named(what):
        definition.runner(StateRegistry.from_wire(definition.resolve(None)))
    return definition


def _frame_limits(session: SparkSession) -> FrameLimits:
    """Return the session's limits as numbers: Spark's own reading of ``64MB``, and of no limit."""
    conf = session._jsparkSession.sessionState().conf()
    rows = conf.arrowMaxRecordsPerBatch()
    return FrameLimits(rows if rows > 0 else UNLIMITED, conf.arrowMaxBytesPerBatch())


def _event_time(df: DataFrame, mode: TimeMode, emitted: str, what: str) -> EventTime | None:
    """Return the event time of the input; None where there is none and none is needed."""
    if not df.isStreaming or (mode is TimeMode.NONE and not emitted):
        return None
    found = event_time_of(df)
    if isinstance(found, EventTime):
        return found
    if emitted:
        raise Invalid(f"{what}: eventTimeColumnName={emitted!r} passes the input's watermark on, which needs {found}")
    if mode is TimeMode.PROCESSING_TIME:
        return None  # there, a watermark is only shown
    raise Invalid(f"{what}: time mode eventTime needs {found}")
