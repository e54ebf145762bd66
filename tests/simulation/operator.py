"""The operator of a simulated query: it appends each operation to its key's state, so that the right state is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.rpc.messages import read_batch, write_batch
from dstl.spark.operators.grouping import group_rows
from dstl.spark.task_definition import TaskDefinition
from dstl.state.broadcast_state import BroadcastScope, BroadcastState
from dstl.state.codec.key_codec import KeyCodec
from dstl.state.codec.value_codec import TimeToLive, ValueCodec
from dstl.state.descriptor import DeclaredState, StateDescriptor, StateKind
from dstl.state.keyed_batch import KEY_GROUP_COLUMN, FrameLimits
from dstl.state.registry import StateRegistry
from dstl.state.stateful_operator import StatefulOperator
from dstl.state.task_input import TaskInput
from tests.simulation.attempt import Seat
from tests.simulation.face_input import RULE_STREAM
from tests.simulation.faces import EVOLVING, FACES, face_operator
from tests.simulation.spark import (
    DIFFERENCES,
    OPERATIONS,
    RULE_GOES,
    RULES,
    RULES_GO,
    STATES,
    WRITERS,
    encode_value,
    rule_of,
)

_KEY = StructType([StructField("key", BinaryType())])
_ROW = StructType([*_KEY.fields, StructField("operation", IntegerType())])
_VALUE = StructType([StructField("value", BinaryType())])
_RULE = StructType([StructField("rule", IntegerType())])
_APPENDING = StatefulOperator(input_schema=_ROW, key_schema=_KEY, output_schema=_ROW, streams=(RULE_STREAM,))


def simulated_operator(
    uid: str,
    parallelism: int,
    max_parallelism: int,
    seat: Seat | None = None,
    version: int = 0,
) -> TaskDefinition:
    """Return the definition of an operator; an appending one in a worker, with the attempt that it works for."""
    if uid in FACES:
        version = version if uid == EVOLVING else 0
        if seat is None:
            return face_operator(uid, parallelism, max_parallelism, version)
        # A worker has what was shipped to it.
        shipped: TaskDefinition = cloudpickle.loads(_pickled(uid, parallelism, max_parallelism, version))
        return shipped
    return AppendingOperator(uid=uid, parallelism=parallelism, max_parallelism=max_parallelism, seat=seat)


@cache
def _pickled(uid: str, parallelism: int, max_parallelism: int, version: int) -> bytes:
    pickled: bytes = cloudpickle.dumps(face_operator(uid, parallelism, max_parallelism, version))
    return pickled


@dataclass(frozen=True, kw_only=True)
class AppendingOperator(TaskDefinition):
    """The definition of an operator, and in a worker the attempt that it works for."""

    by: tuple[str, ...] = ("key",)
    operator: StatefulOperator = _APPENDING
    seat: Seat | None = None

    def declare(self, registry: StateRegistry) -> StateRegistry:
        """Return the registry with the operator's states."""
        for name in STATES:
            registry.declare(name, StateKind.VALUE, _VALUE)
        registry.declare(RULES, StateKind.BROADCAST, _VALUE, _RULE)
        return registry

    def arrange(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield a task's rows, those of one key together."""
        return group_rows(batches, self.by)

    def task_runner(self, registry: StateRegistry) -> _Runner:
        """Return the runner of one task."""
        assert self.seat is not None
        *_, rules = self.declare(registry).declared
        return _Runner(self.seat, rules)


class _Runner:
    """Appends the operations of one task; a ``TaskRunner``."""

    max_event_time_ms: int | None = None
    late_rows = 0

    def __init__(self, seat: Seat, rules: StateDescriptor) -> None:
        self._seat = seat
        self._rules = rules

    def run(self, batches: Iterator[pa.RecordBatch], task: TaskInput, /) -> Iterator[pa.RecordBatch]:
        """Read each key's operations, send them with the new ones, and yield the rows."""
        attempt, scope = self._seat.attempt, BroadcastScope()
        declared = DeclaredState(self._rules, ValueCodec(RULES, self._rules.value_schemas), TimeToLive(0, 0))
        rules = BroadcastState(declared, task.source, scope, KeyCodec(_RULE), task.read_broadcast)
        scope.open()
        for each in task.broadcast:
            scope.stream = each.stream.name
            for row in each.take("row", FrameLimits()):
                rule = (rule_of(row.operation),)
                before = rules.getValue(rule)
                rules.updateValue(rule, ((before.value if before else b"") + encode_value([row.operation]),))
                if row.operation in RULE_GOES:
                    rules.removeKey(rule)
                if row.operation in RULES_GO:
                    rules.clear()
        scope.stream = None
        for batch in batches:
            attempt.world.check.rules_read(attempt.spec, {rule: value for (rule,), (value,) in rules.iterator()})
            operations: dict[tuple[int, bytes], list[int]] = {}
            groups, keys, new = (batch.column(name).to_pylist() for name in (KEY_GROUP_COLUMN, "key", "operation"))
            for group, key, operation in zip(groups, keys, new, strict=True):
                operations.setdefault((group, key), []).append(operation)
            attempt.fail_at(3)
            where = list(operations)
            (found,) = task.source.fetch_many([OPERATIONS], [g for g, _ in where], [k for _, k in where])
            rows = []
            for (group, key), value in zip(where, found, strict=True):
                attempt.world.check.read(attempt.spec, key, value or b"")
                rows.append((group, OPERATIONS, key, (value or b"") + encode_value(operations[group, key])))
            for part in attempt.parts(len(rows)):
                written = list(rows[part])
                if attempt.differs:
                    written += [(group, DIFFERENCES, key, attempt.spec.writer) for group, _, key, _ in rows[part]]
                task.send(_changes(sorted(written)))
                attempt.fail_at(4)
            yield batch
        for part in scope.close():
            assert task.send_broadcast is not None
            task.send_broadcast(part)
        attempt.wait(asyncio.sleep(attempt.rng.uniform(0.0, 0.01)))


def mark_changes(changes: bytes | memoryview, writer: bytes) -> memoryview:
    """Return an Arrow batch of changes with the writer's name for each changed key, in a state of its own.

    This is done on the wire, so that the audit's digest of an attempt's changes knows nothing of its name.
    """
    batch = read_batch(memoryview(changes), CHANGE_SCHEMA)
    columns = [batch.column(name).to_pylist() for name in ("key_group", "state", "key")]
    written = [(group, WRITERS, key, writer) for group, state, key in zip(*columns, strict=True) if state == OPERATIONS]
    kept = [batch, _changes(sorted(written))] if written else [batch]
    (whole,) = pa.Table.from_batches(kept).sort_by("key_group").combine_chunks().to_batches()
    return write_batch(whole)


def _changes(rows: Sequence[tuple[int, int, bytes, bytes]]) -> pa.RecordBatch:
    """Return values to be put, given as key group, state, key and value, as a batch of ``CHANGE_SCHEMA``."""
    groups, states, keys, values = zip(*rows, strict=True)
    columns = [groups, states, [OP_PUT] * len(rows), keys, [b""] * len(rows), values]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, CHANGE_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_SCHEMA)
