"""A Python worker in the simulated world: it runs the product's own task code, over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Generic

from dstl.changelog.change_set import CHANGE_SCHEMA, digest_changes
from dstl.errors import DstlError
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address, Connection, Reply
from dstl.rpc.codec import Call, R
from dstl.rpc.messages import Acknowledgement, Begun, Write, read_batch
from dstl.rpc.protocol import Secret
from dstl.spark.task_attempt import WorkerProcess, run_attempt
from dstl.spark.task_definition import PreparedOperator
from dstl.state.broadcast_state import BroadcastCopies
from tests.simulation.attempt import Seat, SimulatedAttempt
from tests.simulation.blocking import Wait
from tests.simulation.blocking_socket import BlockingSocket
from tests.simulation.face_runner import SeatedOperator
from tests.simulation.faults import FaultKind
from tests.simulation.operator import mark_changes, simulated_operator
from tests.simulation.process import Process
from tests.simulation.spark import APPENDING, TaskSpec
from tests.simulation.world import World

_NEVER_BEGAN = 1 << 40


class Worker:
    """One worker process; connections are cached, as in a worker that Spark reuses.

    Args:
        world: The world.
        process: Its own.
        coordinator: Its driver's.
        secret: The application's.
        place: Its host, and what starts a TaskManager of some name there.
    """

    def __init__(
        self,
        world: World,
        process: Process,
        coordinator: Address,
        secret: Secret,
        place: tuple[str, Callable[[str], None]],
    ) -> None:
        self.process = process
        self._world = world
        self._coordinator = coordinator
        self._host, self._launch = place
        self._secret = secret
        self._rng = world.rng(process.name)
        self._clock = world.runtime(process.name).clock
        self._connections: dict[Address, Connection] = {}
        self._prepared: dict[str, PreparedOperator] = {}
        self._copies = BroadcastCopies()
        self._seat: Seat | None = None

    async def execute(self, spec: TaskSpec, done: Callable[[BaseException | None], None]) -> None:
        """Run an attempt and tell the driver how it ended."""
        try:
            await self._world.stacks.run(partial(self._run, spec))
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
            version = self._world.version_of(spec.run)
            definition = simulated_operator(spec.operator, spec.parallelism, groups, self._seat, version)
            is_face = spec.operator not in APPENDING
            operator = SeatedOperator(definition, self._seat) if is_face else PreparedOperator(definition)
            self._prepared[spec.operator] = operator
        assert self._seat is not None
        self._seat.attempt = attempt
        process = WorkerProcess(
            pid=1,
            host=self._host,
            coordinator=self._coordinator,
            connect=lambda address: _Line(self, attempt, self.connect(address)),
            launch=self._launch,
            copies=self._copies,
        )
        for _ in run_attempt(operator, spec.task, attempt.rows(operator.definition), process):
            pass

    def connect(self, where: Address) -> Connection:
        """Return the cached connection, or a new one where it cannot be used any more; blocking, as in a real worker.

        A task that failed has left requests behind: nobody waits for what becomes of them.
        """
        held = self._connections.get(where)
        if held is None or not held.is_idle:
            if held is not None:
                held.close()
            held = self._connections[where] = Connection(where, self._secret, clock=self._clock, dial=self._dial)
        return held

    def _dial(self, address: Address, timeout: float) -> Any:
        return BlockingSocket(self._world.network, address.port, self._wait)

    def _wait(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """Wait as the attempt does that runs now: connections outlive it."""
        assert self._seat is not None
        return self._seat.attempt.wait(asked)

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
        task = acknowledgement.task
        mistaken = (replace(task, attempt_id=_NEVER_BEGAN), replace(task, operator="another query's"))
        try:
            for each in (task, *mistaken):
                try:
                    await connection.call(replace(acknowledgement, task=each))
                except DstlError as error:
                    self._world.trace("late-acknowledgement", type(error).__name__)
                else:
                    if each is not task:
                        self._world.check.fail("I21", f"{each} is acknowledged, and has never begun")
        finally:
            connection.close()


class _Line:
    """A worker's connection to one service, with an attempt's faults: a ``Transport``."""

    def __init__(self, worker: Worker, attempt: SimulatedAttempt, connection: Connection) -> None:
        self._worker = worker
        self._attempt = attempt
        self._connection = connection

    def send(self, message: Call[R]) -> _Pending[R]:
        """Send a request behind those before it, and return its reply to come."""
        sent: Call[Any] = message
        if isinstance(message, Write) and self._attempt.spec.operator in APPENDING:
            self._attempt.changes.append(read_batch(memoryview(message.changes), CHANGE_SCHEMA))
            sent = replace(message, changes=mark_changes(message.changes, self._attempt.spec.writer))
        elif isinstance(message, Acknowledgement):
            self._before_acknowledging(message)
        return _Pending(self._connection.send(sent), self._attempt)

    def _before_acknowledging(self, acknowledgement: Acknowledgement) -> None:
        attempt = self._attempt
        attempt.fail_at(5)
        attempt.world.check.acknowledging(attempt.spec, digest_changes(attempt.changes))
        for kind in (FaultKind.STALE_ACKNOWLEDGEMENT, FaultKind.DUPLICATE_ACKNOWLEDGEMENT):
            if attempt.has_fault(kind, count=False):
                self._worker.acknowledge_later(acknowledgement, kind)


class _Pending(Generic[R]):
    """The reply to a request that was sent, with the attempt's faults."""

    def __init__(self, reply: Reply[R], attempt: SimulatedAttempt) -> None:
        self._reply = reply
        self._attempt = attempt

    @property
    def is_done(self) -> bool:
        """True once the reply was read, or will never be."""
        return self._reply.is_done

    def result(self) -> R:
        """Return the reply, or raise its error; waits for it."""
        answer = self._reply.result()
        attempt = self._attempt
        if isinstance(answer, Begun):
            attempt.parent = answer.parent
            attempt.fail_at(2)
        return answer
