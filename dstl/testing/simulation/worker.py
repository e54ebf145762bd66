"""A Python worker in the simulated world: runs task attempts, as ``dstl.spark.task`` does, over real connections."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack
import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.errors import DstlError, Unavailable
from dstl.rpc.client import Address, AsyncConnection
from dstl.rpc.codec import Call, R
from dstl.rpc.messages import Acknowledgement, Begin, FetchMany, OpenAttempt, TaskAttempt, Write
from dstl.rpc.protocol import Secret
from dstl.testing.simulation.faults import FaultKind
from dstl.testing.simulation.process import Process
from dstl.testing.simulation.spark import OPERATIONS, WRITERS, encode_value, key_group_of

if TYPE_CHECKING:
    from dstl.testing.simulation.world import World

__all__ = ["TaskSpec", "Worker"]

_CALL_TIMEOUT_S = 600.0  # as dstl.rpc.client.Connection
_REGISTRY = {
    "format": 1,
    "states": [
        {"name": "operations", "kind": "value", "id": OPERATIONS, "ttl_ms": 0},
        {"name": "writers", "kind": "value", "id": WRITERS, "ttl_ms": 0},
    ],
}
_METADATA = json.dumps(_REGISTRY).encode()


@dataclass(frozen=True)
class TaskSpec:
    """One attempt, as Spark describes it to a worker."""

    query: str
    run: str
    operator: str
    batch: int
    slot: int
    stage: int
    attempt: int
    parallelism: int
    operations: Mapping[bytes, Sequence[int]]

    def __str__(self) -> str:
        return f"{self.run} {self.operator} batch {self.batch} slot {self.slot} stage {self.stage} try {self.attempt}"

    @property
    def writer(self) -> bytes:
        """What the attempt leaves in the state of writers."""
        return f"{self.batch} {self.run} {self.operator} {self.attempt}".encode()

    @property
    def task(self) -> TaskAttempt:
        """The attempt, as the calls carry it."""
        return TaskAttempt(self.query, self.run, self.operator, self.batch, self.slot, self.stage, self.attempt)


class Worker:
    """One worker process; connections are cached, as in a worker that Spark reuses."""

    def __init__(self, world: World, process: Process, coordinator: Address, secret: Secret) -> None:
        self.process = process
        self._world = world
        self._coordinator = coordinator
        self._secret = secret
        self._rng = world.rng(process.name)
        self._connections: dict[Address, AsyncConnection] = {}

    async def execute(self, spec: TaskSpec, done: Callable[[BaseException | None], None]) -> None:
        """Run an attempt and tell the driver how it ended."""
        try:
            await self._attempt(spec)
        except DstlError as error:
            self._world.check.task_error(spec, error)
            done(error)
        except Exception as error:
            self._world.check.task_error(spec, error)
            done(error)
        else:
            done(None)

    async def _attempt(self, spec: TaskSpec) -> None:
        world, plan, rng = self._world, self._world.plan, self._rng
        failing = rng.randrange(1, 6) if plan.task_fault(rng, FaultKind.TASK_FAILURE) else 0
        self._fail_at(1, failing)
        partition = spec.slot if spec.operations else None
        begun = await self._call(self._coordinator, Begin(spec.task, pid=1))
        self._fail_at(2, failing)
        owners = [(each.key_groups, each.address) for each in begun.assignments]
        who = spec.operator, spec.attempt
        for _, owner in owners:
            await self._call(owner, OpenAttempt(*who, spec.batch, begun.parent, spec.parallelism))
        changed: list[bytes] = []
        if plan.task_fault(rng, FaultKind.CHANGING_OUTPUT):
            # A processor that is not a function of its rows: what it writes of the writer counts as a difference.
            world.count(FaultKind.CHANGING_OUTPUT)
            changed.append(spec.writer)
        for owned, owner in owners:
            groups = {key: key_group_of(key, world.logs.max_parallelism) for key in spec.operations}
            keys = [key for key, group in groups.items() if group in owned]
            if not keys:
                continue
            if plan.task_fault(rng, FaultKind.REORDERED_ROWS):
                world.count(FaultKind.REORDERED_ROWS)
                rng.shuffle(keys)
            keys.sort(key=groups.__getitem__)
            payload = msgpack.packb(([groups[key] for key in keys], keys))
            self._fail_at(3, failing)
            (values,) = msgpack.unpackb((await self._call(owner, FetchMany(*who, (OPERATIONS,), payload))).data)
            for key, value in zip(keys, values, strict=True):
                world.check.read(spec, key, value or b"")
            written = [(value or b"") + encode_value(spec.operations[k]) for k, value in zip(keys, values, strict=True)]
            await self._write(owner, spec, groups, keys, written, changed, failing)
        await asyncio.sleep(rng.uniform(0.0, 0.01))
        # Not of the writer's name: attempts with equal operations have equal changes, as far as Spark can tell.
        digest = _digest(changed) if partition is not None else b""
        acknowledgement = Acknowledgement(spec.task, partition, digest, registry=_METADATA)
        self._fail_at(5, failing)
        world.check.acknowledging(spec, digest)
        if plan.task_fault(rng, FaultKind.STALE_ACKNOWLEDGEMENT):
            self.process.spawn(self._acknowledge_later(acknowledgement, FaultKind.STALE_ACKNOWLEDGEMENT), "stale")
        if plan.task_fault(rng, FaultKind.DUPLICATE_ACKNOWLEDGEMENT):
            self.process.spawn(self._acknowledge_later(acknowledgement, FaultKind.DUPLICATE_ACKNOWLEDGEMENT), "double")
        answer = await self._call(self._coordinator, acknowledgement)
        world.trace("acknowledged", f"{spec} {answer.decision}")

    async def _write(
        self,
        owner: Address,
        spec: TaskSpec,
        groups: Mapping[bytes, int],
        keys: Sequence[bytes],
        values: Sequence[bytes],
        changed: list[bytes],
        failing: int,
    ) -> None:
        """Send the change set in one part or two."""
        cut = self._rng.randrange(1, len(keys)) if len(keys) > 1 and self._rng.random() < 0.3 else len(keys)
        for part in (slice(0, cut), slice(cut, None)):
            if keys[part]:
                data = _changes([groups[key] for key in keys[part]], keys[part], values[part], spec.writer)
                changed += [key + value for key, value in zip(keys[part], values[part], strict=True)]
                await self._call(owner, Write(spec.operator, spec.attempt, spec.slot, _METADATA, data))
                self._fail_at(4, failing)

    async def _acknowledge_later(self, acknowledgement: Acknowledgement, kind: FaultKind) -> None:
        """Send an acknowledgement once more over a connection of its own: at once, or when it is long over."""
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

    async def _call(self, where: Address, message: Call[R]) -> R:
        connection = self._connections.get(where)
        if connection is None or connection.is_broken:
            connection = self._connections[where] = await AsyncConnection.open(where, self._secret)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await connection.call(message)
        except TimeoutError:
            raise Unavailable(f"{message.name} at {where} took more than {_CALL_TIMEOUT_S} s") from None

    def _fail_at(self, step: int, failing: int) -> None:
        if step == failing:
            self._world.count(FaultKind.TASK_FAILURE)
            raise Unavailable(f"the task failed at step {step} (simulated)")


def _digest(changed: Sequence[bytes]) -> bytes:
    """Return the digest of a change set, whatever the order in which it was written."""
    return hashlib.blake2b(repr(sorted(changed)).encode(), digest_size=16).digest()


def _changes(groups: Sequence[int], keys: Sequence[bytes], values: Sequence[bytes], writer: bytes) -> bytes:
    rows = 2 * len(keys)
    columns = [
        pa.array([group for group in groups for _ in range(2)], pa.uint16()),
        pa.array([OPERATIONS, WRITERS] * len(keys), pa.uint16()),
        pa.array([OP_PUT] * rows, pa.uint8()),
        pa.array([key for key in keys for _ in range(2)], pa.binary()),
        pa.array([b""] * rows, pa.binary()),
        pa.array([each for value in values for each in (value, writer)], pa.binary()),
    ]
    batch = pa.RecordBatch.from_arrays(columns, schema=CHANGE_SCHEMA)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, CHANGE_SCHEMA) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]
