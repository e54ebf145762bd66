"""One attempt at a task: it begins, opens its state, processes its rows, sends its changes and acknowledges.

It knows neither Spark's task context nor the cluster: its identity and the process that it runs in are arguments, so
that a simulated worker runs it as a real one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import pyarrow as pa

from dstl.changelog.change_set import digest_changes
from dstl.crash_points import reach
from dstl.rpc.client import Address, Reply, Transport
from dstl.rpc.messages import Acknowledgement, Begin, Begun, TaskAttempt
from dstl.rpc.state_client import StateClient
from dstl.spark.operators.grouping import initial_first, take_marks
from dstl.spark.task_definition import PreparedOperator, TaskDefinition
from dstl.state.broadcast_state import BROADCAST_KEY_GROUP, BroadcastCopies, BroadcastRows, rows_of_streams
from dstl.state.keyed_batch import KEY_GROUP_COLUMN
from dstl.state.task_input import TaskInput
from handles.key_group import partition_of, range_of_partition


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """The process that an attempt runs in.

    Attributes:
        pid: Its number.
        host: The host it runs on.
        coordinator: Where to begin and acknowledge.
        connect: Returns a connection to a service; one that is open already, where there is.
        launch: Starts a TaskManager of this name on the host.
        copies: Broadcast states that its tasks have read.
    """

    pid: int
    host: str
    coordinator: Address
    connect: Callable[[Address], Transport]
    launch: Callable[[str], object]
    copies: BroadcastCopies = field(default_factory=BroadcastCopies)


def run_attempt(
    operator: PreparedOperator, task: TaskAttempt, batches: Iterable[pa.RecordBatch], worker: WorkerProcess
) -> Iterator[pa.RecordBatch]:
    """Yield the output of one attempt; when it ends, the attempt has been acknowledged.

    Nothing is waited for that can be done beside something else: the coordinator is asked before the first row is read,
    and the TaskManagers open the attempt while the rows are read and grouped.

    Args:
        operator: The operator.
        task: The attempt.
        batches: The rows of one partition.
        worker: The process that it runs in.

    Raises:
        Fenced: The run, batch or attempt is over.
        UserCodeError: The processor raised.
        Unavailable: The coordinator or a TaskManager is gone.
    """
    definition = operator.definition
    asked = _ask(task, worker)
    partition: int | None = None
    broadcast: list[BroadcastRows] = []
    if definition.needs_marks or definition.operator.streams:
        partition, marks, batches = take_marks(batches, [stream.column for stream in definition.operator.streams])
        broadcast = rows_of_streams(marks, definition.operator.streams)
    if definition.has_initial_state:
        batches = initial_first(batches)
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is not None and partition is None:
        partition = _partition_of(definition, first.column(KEY_GROUP_COLUMN))
    begun = _begun(asked, task, worker)
    task = replace(task, attempt_id=begun.attempt)
    state = _open_state(definition, task, begun, worker)
    reach("W1")
    rows = definition.arrange(filled if first is None else chain((first,), filled))
    common: list[pa.RecordBatch] = []

    def send(changes: pa.RecordBatch, *, expiring: bool = False) -> None:
        partition = _partition_of(definition, changes.column("key_group"))
        reach("W3")
        state.write(partition, changes, begun.registry, expiring=expiring)
        reach("W2")

    def send_broadcast(changes: pa.RecordBatch) -> None:
        # All partitions have made the same changes: the one that owns their key group brings them to the log.
        common.append(changes)
        if BROADCAST_KEY_GROUP in _key_groups(definition, partition):
            send(changes)

    runner = operator.runner(begun.registry)
    yield from runner.run(
        rows,
        TaskInput(
            source=state,
            send=send,
            sequence=begun.sequence,
            key_groups=_key_groups(definition, partition),
            processing_time_ms=begun.processing_time_ms,
            watermark_ms=begun.watermark_ms or 0,
            late_watermark_ms=begun.late_watermark_ms or 0,
            broadcast=broadcast,
            send_broadcast=send_broadcast,
            read_broadcast=partial(
                worker.copies.whole, (worker.coordinator, task.query_id), task.operator, begun.parent
            ),
            send_expiring=partial(send, expiring=True),
        ),
    )
    state.flush()
    agreed = digest_changes(common) if common else b""
    ack = Acknowledgement(task, partition, runner.max_event_time_ms, runner.late_rows, agreed)
    reach("W4")
    worker.connect(worker.coordinator).send(ack).result()
    reach("W5")


def _ask(task: TaskAttempt, worker: WorkerProcess, launched: int = 0) -> Reply[Begun]:
    """Send the request to begin the attempt."""
    return worker.connect(worker.coordinator).send(Begin(task, worker.pid, worker.host, launched))


def _begun(asked: Reply[Begun], task: TaskAttempt, worker: WorkerProcess) -> Begun:
    """Take the answer; where the coordinator wants a TaskManager on this host first, launch it and ask again."""
    launched = 0
    while True:
        begun = asked.result()
        if begun.launch is None:
            return begun
        worker.launch(begun.launch)
        launched += 1
        asked = _ask(task, worker, launched)


def _open_state(definition: TaskDefinition, task: TaskAttempt, begun: Begun, worker: WorkerProcess) -> StateClient:
    owners = [(each.key_groups, worker.connect(each.address.seen_from(worker.host))) for each in begun.assignments]
    state = StateClient(owners, task.operator, task.attempt_id)
    state.open(task.batch_id, begun.parent, definition.parallelism)
    return state


def _partition_of(definition: TaskDefinition, key_groups: pa.Array) -> int:
    """Return the partition that key groups belong to; a task without rows cannot know its own, which a union shifts."""
    return partition_of(key_groups[0].as_py(), definition.max_parallelism, definition.parallelism)


def _key_groups(definition: TaskDefinition, partition: int | None) -> list[int]:
    if partition is None:
        return []
    return list(range_of_partition(partition, definition.max_parallelism, definition.parallelism))
