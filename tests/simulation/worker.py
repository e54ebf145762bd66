"""A Python worker in the simulated world: it runs the product's own task code, over the simulated network."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic

import pyarrow as pa

from dstl.changelog.change_set import digest_changes
from dstl.errors import DstlError, Unavailable
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call, R
from dstl.rpc.messages import Acknowledgement, Begun, Write
from dstl.rpc.protocol import Secret
from dstl.spark.task_attempt import WorkerProcess, run_attempt
from dstl.spark.task_definition import PreparedOperator
from tests.simulation.attempt import Seat, SimulatedAttempt
from tests.simulation.blocking import Wait
from tests.simulation.face_runner import SeatedOperator
from tests.simulation.faults import FaultKind
from tests.simulation.operator import mark_changes, simulated_operator
from tests.simulation.process import Process
from tests.simulation.spark import APPENDING, TaskSpec
from tests.simulation.world import World

_CALL_TIMEOUT_S = 600.0  # as dstl.rpc.client.Connection


class Worker:
    """One worker process; connections are cached, as in a worker that Spark reuses."""

    def __init__(self, world: World, process: Process, coordinator: Address, secret: Secret) -> None:
        self.process = process
        self._world = world
        self._coordinator = coordinator
        self._secret = secret
        self._rng = world.rng(process.name)
        self._connections: dict[Address, AsyncConnection] = {}
        self._in_flight: Counter[AsyncConnection] = Counter()
        self._prepared: dict[str, PreparedOperator] = {}
        self._seat: Seat | None = None

    async def execute(self, spec: TaskSpec, done: Callable[[BaseException | None], None]) -> None:
        """Run an attempt and tell the driver how it ended."""
        try:
            await self._world.threads.run(partial(self._run, spec))
        except Exception as error:
            self._world.check.task_error(spec, error)
            done(error)
        else:
            done(None)

    def _run(self, spec: TaskSpec, wait: Wait) -> None:
        attempt = SimulatedAttempt(self._world, spec, self._rng, wait)
        operator = self._prepared.get(spec.operator)
        if operator is None:
            groups, self._seat = self._world.logs.max_parallelism, self._seat or Seat(attempt)
            definition = simulated_operator(spec.operator, spec.parallelism, groups, self._seat)
            is_face = spec.operator not in APPENDING
            operator = SeatedOperator(definition, self._seat) if is_face else PreparedOperator(definition)
            self._prepared[spec.operator] = operator
        assert self._seat is not None
        self._seat.attempt = attempt
        process = WorkerProcess(
            pid=1,
            host="simulated",
            coordinator=self._coordinator,
            connect=lambda address: _Line(self, attempt, wait(self.connect(address)), wait),
            launch=_refuse_to_launch,
        )
        for _ in run_attempt(operator, spec.task, attempt.rows(), process):
            pass

    async def connect(self, where: Address) -> AsyncConnection:
        """Return the cached connection, or a new one where there is none that works."""
        connection = self._connections.get(where)
        if connection is not None and self._in_flight[connection]:
            # A task that failed has left requests behind: nobody waits for what becomes of them.
            connection.close()
        if connection is None or connection.is_broken:
            connection = self._connections[where] = await AsyncConnection.open(where, self._secret)
        return connection

    async def call(self, connection: AsyncConnection, message: Call[R]) -> R | DstlError:
        """Make a call behind those before it, and return its reply or its error."""
        self._in_flight[connection] += 1
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await connection.call(message)
        except DstlError as error:
            return error
        except TimeoutError:
            return Unavailable(f"{message.name} at {connection.address} took more than {_CALL_TIMEOUT_S} s")
        finally:
            self._in_flight[connection] -= 1

    def acknowledge_later(self, acknowledgement: Acknowledgement, kind: FaultKind) -> None:
        """Send an acknowledgement once more over a connection of its own: at once, or when it is long over."""
        self.process.spawn(self._acknowledge_later(acknowledgement, kind), kind)

    async def _acknowledge_later(self, acknowledgement: Acknowledgement, kind: FaultKind) -> None:
        stale = kind is FaultKind.STALE_ACKNOWLEDGEMENT
        await asyncio.sleep(self._rng.uniform(0.5, 20.0) if stale else self._rng.uniform(0.0, 0.05))
        try:
            connection = await AsyncConnection.open(self._coordinator, self._secret)
        except DstlError:
            return
        self._world.count(kind)
        try:
            await connection.call(acknowledgement)
        except DstlError as error:
            self._world.trace("late-acknowledgement", type(error).__name__)
        finally:
            connection.close()


class _Line:
    """A blocking connection of one attempt to one service: a ``Transport`` that the loop serves."""

    def __init__(self, worker: Worker, attempt: SimulatedAttempt, connection: AsyncConnection, wait: Wait) -> None:
        self._worker = worker
        self._attempt = attempt
        self._connection = connection
        self._wait = wait

    def send(self, message: Call[R]) -> _Pending[R]:
        """Send a request behind those before it, and return its reply to come."""
        sent: Call[Any] = message
        if isinstance(message, Write) and self._attempt.spec.operator in APPENDING:
            with pa.ipc.open_stream(pa.py_buffer(message.changes)) as reader:
                for batch in reader:
                    self._attempt.changes.append(batch)
            sent = replace(message, changes=mark_changes(message.changes, self._attempt.spec.writer))
        elif isinstance(message, Acknowledgement):
            self._before_acknowledging(message)
        task = self._worker.process.spawn(self._worker.call(self._connection, sent), message.name)
        return _Pending(task, self._wait, self._attempt)

    def call(self, message: Call[R]) -> R:
        """Send a request and return its reply."""
        return self.send(message).result()

    def _before_acknowledging(self, acknowledgement: Acknowledgement) -> None:
        attempt = self._attempt
        attempt.fail_at(5)
        attempt.world.check.acknowledging(attempt.spec, digest_changes(attempt.changes))
        for kind in (FaultKind.STALE_ACKNOWLEDGEMENT, FaultKind.DUPLICATE_ACKNOWLEDGEMENT):
            if attempt.has_fault(kind, count=False):
                self._worker.acknowledge_later(acknowledgement, kind)


class _Pending(Generic[R]):
    """The reply to a request that was sent, with the attempt's faults."""

    def __init__(self, task: asyncio.Task[R | DstlError], wait: Wait, attempt: SimulatedAttempt) -> None:
        self._task = task
        self._wait = wait
        self._attempt = attempt

    @property
    def is_done(self) -> bool:
        """True once the reply is there, or will never be."""
        return self._task.done()

    def result(self) -> R:
        """Return the reply, or raise its error; waits for it."""
        if not self._task.done():
            self._wait(_ended(self._task))
        answer = self._task.result()
        if isinstance(answer, DstlError):
            raise answer
        attempt = self._attempt
        if isinstance(answer, Begun):
            attempt.parent = answer.parent
            attempt.fail_at(2)
        return answer


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])


def _refuse_to_launch(member_id: str) -> None:
    raise AssertionError(f"a coordinator whose driver starts its TaskManagers has asked a worker to start {member_id}")
