"""The task function: what runs in a PySpark worker for one partition of one micro-batch.

A worker is stateless. It is forked, reused, killed and run twice as Spark likes; so connections are made per process
and kept only as a cache, and everything is told to the coordinator with the attempt's identity.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark import TaskContext

from dstl.errors import Invalid
from dstl.rpc.client import Address, Connection
from dstl.rpc.codec import Call, R
from dstl.rpc.messages import Acknowledgement, Begin, Begun, TaskAttempt
from dstl.rpc.protocol import Secret
from dstl.spark.executor_host import executor_host
from dstl.spark.operators.grouping import initial_first, take_marks
from dstl.spark.task_definition import TaskDefinition
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.processor_runner import TaskInput
from dstl.state.registry import StateRegistry
from dstl.taskmanager.launcher import Invitation, launch_detached
from dstl.taskmanager.state_client import StateClient
from handles.key_group import partition_of, range_of_partition

__all__ = ["OperatorTask"]

_CALL_SECONDS = 3600.0
"""Longest call: beginning waits for a whole restore, the last acknowledgement for its checkpoint. A dead peer is
noticed long before, by its connection."""

_connections: dict[Address, Connection] = {}
"""This process's connections; a forked child ignores its parent's."""


@dataclass(frozen=True)
class OperatorTask:
    """Called by Spark with the rows of one partition; yields the processor's output.

    Attributes:
        definition: The operator.
        coordinator: Where to begin and acknowledge.
        secret: The application's.
        host: The host that tasks run on, where it is known; None on a cluster, where the executor says it.
    """

    definition: TaskDefinition
    coordinator: Address
    secret: Secret
    host: str | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run one attempt: begin, process, send the change set, acknowledge.

        Raises:
            Fenced: The run, batch or attempt is over.
            CheckpointDeclined: This was the acknowledgement that completed the set, and the checkpoint failed.
            UserCodeError: The processor raised.
            Unavailable: The coordinator or a TaskManager is gone.
        """
        definition = self.definition
        task = _task_attempt(definition.uid)
        partition: int | None = None
        received: Iterable[pa.RecordBatch] = batches
        if definition.needs_marks:
            partition, received = take_marks(received)
        if definition.has_initial_state:
            received = initial_first(received)
        rows = definition.arrange(received)
        first = next(rows, None)
        if partition is None:
            partition = self._partition_of(first)
        host = self.host or executor_host()
        begun = self._begin(task, host)
        registry = _registry(definition, begun.registry)
        state = self._open_state(task, begun, host)

        def send(changes: pa.RecordBatch) -> None:
            state.write(
                partition_of(
                    changes.column("key_group")[0].as_py(), definition.max_parallelism, definition.parallelism
                ),
                changes,
                json.dumps(registry.to_wire()).encode(),
            )

        runner = definition.task_runner(registry)
        yield from runner.run(
            rows if first is None else chain((first,), rows),
            TaskInput(
                source=state,
                send=send,
                sequence=begun.sequence,
                key_groups=self._key_groups(partition),
                processing_time_ms=begun.processing_time_ms,
                watermark_ms=begun.watermark_ms or 0,
                late_watermark_ms=begun.late_watermark_ms or 0,
            ),
        )
        declared = json.dumps(registry.to_wire()).encode()
        self._ask(Acknowledgement(task, partition, state.digest, runner.max_event_time_ms, runner.late_rows, declared))

    def _partition_of(self, rows: pa.RecordBatch | None) -> int | None:
        """Return the partition that rows belong to; an empty one cannot know its number, which a union shifts."""
        if rows is None:
            return None
        key_group = rows.column(KEY_GROUP_COLUMN)[0].as_py()
        return partition_of(key_group, self.definition.max_parallelism, self.definition.parallelism)

    def _key_groups(self, partition: int | None) -> list[int]:
        if partition is None:
            return []
        return list(range_of_partition(partition, self.definition.max_parallelism, self.definition.parallelism))

    def _begin(self, task: TaskAttempt, host: str) -> Begun:
        """Begin the attempt; where the coordinator wants a TaskManager on this host first, launch it."""
        launched = 0
        while True:
            begun = self._ask(Begin(task, os.getpid(), host, launched))
            if begun.launch is None:
                return begun
            launch_detached(
                Invitation(begun.launch, self.coordinator, self.secret, host=host, listen_tcp=True, detached=True)
            )
            launched += 1

    def _ask(self, message: Call[R]) -> R:
        return _connection(self.coordinator, self.secret).call(message)

    def _open_state(self, task: TaskAttempt, begun: Begun, host: str) -> StateClient:
        owners = [(a.key_groups, _connection(a.address.seen_from(host), self.secret)) for a in begun.assignments]
        state = StateClient(owners, task.operator, task.attempt_id)
        state.open(task.batch_id, begun.parent, self.definition.parallelism)
        return state


def _registry(definition: TaskDefinition, known: bytes) -> StateRegistry:
    return StateRegistry.from_wire(json.loads(known), settled=True) if known else StateRegistry(definition.key_schema)


def _task_attempt(operator: str) -> TaskAttempt:
    """Return this attempt, from the task's local properties.

    Raises:
        Invalid: Not a task of a streaming query, or one that Spark does not tell so.
    """
    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if context is None or batch is None:
        raise Invalid(
            f"operator {operator!r} runs outside a micro-batch of a streaming query. With Spark Connect, an action "
            "inside foreachBatch does: write the DataFrame itself to a sink. An action in a thread of your own does, "
            "too: wrap what the thread runs in pyspark.inheritable_thread_target"
        )
    return TaskAttempt(
        query_id=context.getLocalProperty("sql.streaming.queryId") or "",
        # Unless the user has set a group of their own: then the coordinator asks the driver's Spark.
        run_id=context.getLocalProperty("spark.jobGroup.id") or "",
        operator=operator,
        batch_id=int(batch),
        slot=context.partitionId(),
        stage_id=context.stageId(),
        attempt_id=context.taskAttemptId(),
        invocation=secrets.token_hex(8),
    )


def _connection(address: Address, secret: Secret) -> Connection:
    """Return this process's connection to a service, a new one where the old one is broken or was the parent's."""
    held = _connections.get(address)
    if held is None or held.is_broken or held.pid != os.getpid():
        held = _connections[address] = Connection(address, secret, timeout=_CALL_SECONDS)
    return held
