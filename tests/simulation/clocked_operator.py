"""The operator of a simulated query that has timers and states that expire: the product's own processor runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType, TimestampType

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.spark.operators.processor import ProcessorDefinition
from dstl.spark.task_definition import EventTime, TaskRunner
from dstl.state.descriptor import DeclaredSchemas
from dstl.state.processor_runner import ProcessorRunner
from dstl.state.registry import StateRegistry
from dstl.state.task_input import TaskInput
from dstl.taskmanager.reads import TableSource, client_of
from materializer.tables import HeapStateTable, StateTable
from tests.simulation.clocked_model import DELAY_MS, LOOK, Batch, Recorder
from tests.simulation.clocked_rows import clocked_rows
from tests.simulation.spark import CLOCKED

_KEY = StructType([StructField("key", BinaryType())])
_ROW = StructType([*_KEY.fields, StructField("operation", IntegerType()), StructField("at", TimestampType())])
_OUTPUT = StructType([*_KEY.fields, StructField("what", StringType())])


@dataclass(frozen=True, kw_only=True)
class ClockedOperator(ProcessorDefinition):
    """The definition of an operator.

    Attributes:
        wrap: Puts a task's faults around its runner.
    """

    wrap: Callable[[ProcessorRunner], TaskRunner] | None = None

    def task_runner(self, registry: StateRegistry) -> TaskRunner:  # type: ignore[override]
        """Return the runner of one task."""
        assert self.wrap is not None
        return self.wrap(self.runner(registry))


def clocked_operator(
    uid: str,
    parallelism: int,
    max_parallelism: int,
    wrap: Callable[[ProcessorRunner], TaskRunner] | None = None,
) -> ClockedOperator:
    """Return the definition of one of the ``CLOCKED`` operators."""
    of_event_time = CLOCKED[uid]
    return ClockedOperator(
        uid=uid,
        by=("key",),
        input_schema=_ROW,
        key_schema=_KEY,
        output=_OUTPUT,
        parallelism=parallelism,
        max_parallelism=max_parallelism,
        event_time=EventTime("at", DELAY_MS) if of_event_time else None,
        processor=Recorder(of_event_time),
        style="row",
        time_mode="eventTime" if of_event_time else "processingTime",
        timezone="UTC",
        schemas=DeclaredSchemas(),
        wrap=wrap,
    )


def show_states(
    operator: ClockedOperator,
    registry: Mapping[str, object],
    tables: Sequence[StateTable],
    keys: Sequence[bytes],
    batch: Batch,
) -> dict[bytes, list[str]]:
    """Return what an operator's processor yields for keys without new rows, on restored tables, at a later time."""
    held, known = TableSource(HeapStateTable()), StateRegistry.from_wire(dict(registry), settled=True)
    for table in tables:
        for group in table.key_groups():
            for descriptor in known.descriptors:
                state = descriptor.state_id
                rows = [(group, state, OP_PUT, *entry) for entry in table.scan(state, group)]
                columns = zip(*rows, strict=True) if rows else [()] * len(CHANGE_SCHEMA)
                arrays = [pa.array(c, each.type) for c, each in zip(columns, CHANGE_SCHEMA, strict=True)]
                held.apply(pa.RecordBatch.from_arrays(arrays, schema=CHANGE_SCHEMA))
    task = TaskInput(
        source=client_of(held),
        send=lambda part: None,
        sequence=1 << 40,
        key_groups=range(operator.max_parallelism),
        processing_time_ms=batch.time_ms,
        watermark_ms=batch.watermark_ms,
        late_watermark_ms=batch.late_watermark_ms,
    )
    looks = operator.arrange([clocked_rows({key: [LOOK] for key in keys}, operator.max_parallelism)])
    output: dict[bytes, list[str]] = {}
    for shown in operator.runner(known).run(iter(looks), task):
        collect_output(shown, output)
    return output


def collect_output(batch: pa.RecordBatch, output: dict[bytes, list[str]]) -> None:
    """Add an operator's output to what it has yielded for each key."""
    for key, what in zip(batch.column("key").to_pylist(), batch.column("what").to_pylist(), strict=True):
        output.setdefault(key, []).append(what)
