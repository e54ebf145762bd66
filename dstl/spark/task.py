"""The task function: a PySpark worker calls it for one partition of one micro-batch.

A worker is stateless. It is forked, reused, killed and run twice as Spark likes; so connections are made per process
and kept only as a cache, and every message to the coordinator has the attempt's identity.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from pyspark import TaskContext, cloudpickle

from dstl.crash_points import reach
from dstl.errors import Invalid
from dstl.process.launch_spec import LaunchSpec, launch_detached
from dstl.rpc.client import Address, Connection
from dstl.rpc.messages import TaskAttempt
from dstl.rpc.protocol import Secret
from dstl.spark.task_attempt import WorkerProcess, run_attempt
from dstl.spark.task_definition import PreparedOperator, TaskDefinition
from dstl.spark.worker_process import count_task, executor_host
from dstl.state.broadcast_state import BroadcastCopies
from dstl.system_limits import keep_freed_memory

_MOST_TASKS = 64
"""Operators that a process keeps: those of its running queries, with room for some that have ended."""

_connections: dict[tuple[Address, bytes], Connection] = {}
"""This process's connections, by address and secret: another application's service may have the port of one that has
gone."""
_copies = BroadcastCopies()
"""What this process's tasks have read of broadcast states."""


@dataclass(frozen=True)
class OperatorTask:
    """Called by Spark with the rows of one partition; yields the processor's output.

    Spark sends it with every task. A process unpickles it once: the same bytes are the same object from then on.

    Attributes:
        definition: The operator.
        coordinator: Where to begin and acknowledge.
        secret: The application's.
        host: The host that tasks run on, where it is known; None on a cluster, where the executor says it.
        freezes: Whether the worker freezes what lives after its first tasks.
    """

    definition: TaskDefinition
    coordinator: Address
    secret: Secret
    host: str | None = None
    freezes: bool = True
    _operator: PreparedOperator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_operator", PreparedOperator(self.definition))

    def __reduce__(self) -> tuple[Callable[[bytes], OperatorTask], tuple[bytes]]:
        arguments = [getattr(self, each.name) for each in fields(self) if each.init]
        return _unpickled, (cloudpickle.dumps(arguments),)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run one attempt: begin, process, send the change set, acknowledge.

        Raises:
            Fenced: The run, batch or attempt is over.
            UserCodeError: The processor raised.
            Unavailable: The coordinator or a TaskManager is gone.
        """
        keep_freed_memory()
        host = self.host or executor_host()
        worker = WorkerProcess(
            pid=os.getpid(),
            host=host,
            coordinator=self.coordinator,
            connect=partial(_connection, secret=self.secret),
            launch=partial(self._launch, host),
            copies=_copies,
        )
        yield from run_attempt(self._operator, _task_attempt(self.definition.uid), batches, worker)
        reach("W6")
        if self.freezes:
            count_task()

    def _launch(self, host: str, member_id: str) -> None:
        launch_detached(LaunchSpec(member_id, self.coordinator, self.secret, host=host, bind=host, detached=True))


@lru_cache(maxsize=_MOST_TASKS)
def _unpickled(data: bytes) -> OperatorTask:
    arguments: list[Any] = pickle.loads(data)  # noqa: S301  (a part of the pickle that Spark reads)
    return OperatorTask(*arguments)


def _task_attempt(operator: str) -> TaskAttempt:
    """Return this attempt, from the task's local properties.

    Raises:
        Invalid: Not a task of a streaming query, or one that Spark does not tell so.
    """
    context = TaskContext.get()
    batch = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
    if context is None or batch is None:
        raise Invalid(
            f"operator {operator!r} runs outside a micro-batch of a streaming query, as an action in a thread of your "
            "own does: wrap what the thread runs in pyspark.inheritable_thread_target; with PYSPARK_PIN_THREAD=false "
            "all of foreachBatch runs so: unset it"
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
    """Return this process's connection to a service; a new one where the held one cannot be used any more.

    A process outlives queries and their services. So whenever it opens a connection, it closes those that have ended:
    else it would keep a descriptor of each service that it has ever called. A task that failed has left requests
    behind, whose replies nothing waits for.
    """
    key = address, secret.reveal()
    held = _connections.get(key)
    if held is None or not held.is_idle:
        for ended in [each for each, connection in _connections.items() if not connection.is_idle]:
            _connections.pop(ended).close()
        held = _connections[key] = Connection(address, secret)
    return held
