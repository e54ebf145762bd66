"""One TaskManager's state over a store with faults, with manifests that are really written and really restored."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.checkpoint.assembly import assemble, inlined_handles
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import Unavailable
from dstl.options import BatchingOptions, HedgingOptions, MaterializationOptions, MemoryOptions, UploadOptions
from dstl.rpc.fleet_messages import Persisted
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.memory_limit import MemoryUse
from dstl.taskmanager.task_manager import Components, QueryState
from handles.checkpoint import CompletedCheckpoint, OperatorEntry
from handles.key_group import KeyGroupRange, range_of_partition
from materializer.tables import HeapStateTable, StateTable
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from tests.simulation.virtual_time import LoopClock, seeded_runtime
from worlds.manifest_samples import checkpoint
from worlds.memory_recorder import MemoryRecorder
from worlds.restored import restore_tables
from worlds.table_changes import Change, changes

MAX_PARALLELISM = 8
STATE = 1
PARALLELISM = {"a": 2, "b": 4}
Values = dict[bytes, bytes]
Model = dict[str, Values]
"""By operator and key; a key's first byte is its key group."""


def key_of(key_group: int, name: int) -> bytes:
    return bytes([key_group, name])


def rows(written: Sequence[tuple[bytes, bytes | None]]) -> pa.RecordBatch:
    found: list[Change] = [(k[0], STATE, 0 if v is not None else 1, k, b"", v or b"") for k, v in written]
    return changes(*sorted(found, key=lambda row: row[0]))


def content(table: StateTable) -> Values:
    return {e.key: e.value for group in table.key_groups() for e in table.scan(STATE, group, limit=1 << 20)}


@dataclass
class Task:
    """A task attempt, as the model knows it."""

    operator: str
    attempt: int
    partition: int
    written: list[tuple[bytes, bytes | None]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return (self.operator, self.attempt)


class BackendWorld:
    """A backend, its store, and a coordinator that commits what it persists. Made on the running loop."""

    def __init__(
        self,
        seed: int,
        *,
        memory: MemoryOptions = MemoryOptions(),
        memory_use: Callable[[], MemoryUse] = lambda: MemoryUse(0, None),
        **batching: object,
    ) -> None:
        self.runtime = seeded_runtime(seed)
        self.disk = MemoryStore(clock=LoopClock())
        self.store = FaultyStore(self.disk, clock=LoopClock(), seed=seed)
        self.recorder = MemoryRecorder()
        config = TaskManagerConfig(
            self.store.location,
            max_parallelism=MAX_PARALLELISM,
            batching=BatchingOptions(**batching),
            upload=UploadOptions(max_attempts=1, delete_grace_s=0),
            hedging=HedgingOptions(enabled=False),
            materialization=MaterializationOptions(enabled=False),
            memory=memory,
        )
        components = Components(store=self.store, runtime=self.runtime, recorder=self.recorder, memory_use=memory_use)
        self._state = QueryState(config, components, lambda _: HeapStateTable(), "query")
        self.storage, self.backend = self._state.changelog.storage, self._state.backend
        self.manifests = ManifestLog(self.disk, self.runtime)
        self.attempts = 0

    def down(self, down: bool = True) -> None:
        """Let the store take nothing, or everything again."""
        self.store.rules = [FaultRule(Fault.UNAVAILABLE, "put", chance=1.0)] if down else []

    def open(self, operator: str, partition: int, batch: int, parent: CompletedCheckpoint | None) -> Task:
        self.attempts += 1
        task = Task(operator, self.attempts, partition)
        parent_id = parent.checkpoint_id if parent else None
        self.backend.open_attempt(task.key, batch, parent_id, PARALLELISM[operator])
        return task

    def write(self, task: Task, written: Sequence[tuple[bytes, bytes | None]]) -> None:
        self.backend.write(task.key, task.partition, rows(written), b'{"states":[]}')
        task.written += written

    async def persist(self, winners: Sequence[Task]) -> Persisted:
        return await self.backend.persist(winners_of(winners))

    async def commit(
        self, winners: Sequence[Task], part: Persisted, batch: int, parent: CompletedCheckpoint | None
    ) -> CompletedCheckpoint:
        """Do the coordinator's part: one manifest, then notify."""
        if not self.manifests.epoch:
            await self.manifests.fence("query")
        sequence = self.manifests.next_sequence
        operators = tuple(OperatorEntry(uid=uid, parallelism=n, key_types="string") for uid, n in PARALLELISM.items())
        body = checkpoint(sequence, batch, query_id="query", max_parallelism=MAX_PARALLELISM, operators=operators)
        made, inlined = assemble(body, parent, [part])
        await self.manifests.commit(made, inlined)
        self.backend.complete(sequence, winners_of(winners), inlined_handles([part], sequence))
        return made

    async def checkpoint(
        self, winners: Sequence[Task], batch: int, parent: CompletedCheckpoint | None
    ) -> CompletedCheckpoint:
        return await self.commit(winners, await self.persist(winners), batch, parent)

    async def restored(self, checkpoint: CompletedCheckpoint | None) -> Model:
        owned = KeyGroupRange.all(MAX_PARALLELISM)
        found = await restore_tables(checkpoint, self.disk, owned, lambda _: HeapStateTable(), self.runtime)
        return {uid: values for uid, table in found.tables.items() if (values := content(table))}

    async def settle(self) -> None:
        """Let uploads that were sent come to their end."""
        with contextlib.suppress(Unavailable):
            for _ in range(30):
                await asyncio.sleep(0)
        await asyncio.sleep(1.0)

    async def close(self) -> None:
        self.down(False)
        await self._state.close()
        assert self.storage.budget.used == 0, "bytes were not given back"


def winners_of(tasks: Sequence[Task]) -> dict[str, list[int]]:
    winners: dict[str, list[int]] = {}
    for task in tasks:
        winners.setdefault(task.operator, []).append(task.attempt)
    return winners


def after(model: Model, winners: Sequence[Task]) -> Model:
    """Return the model with the winners' changes."""
    new = {uid: dict(values) for uid, values in model.items()}
    for task in winners:
        values = new.setdefault(task.operator, {})
        for key, value in task.written:
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
    return {uid: values for uid, values in new.items() if values}


def groups_of(operator: str, partition: int) -> list[int]:
    return list(range_of_partition(partition, MAX_PARALLELISM, PARALLELISM[operator]))
