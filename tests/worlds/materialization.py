"""TaskManager state backends that materialize, the coordinator's pure parts, and a dictionary that says what is right.

Everything is real but the sockets and the batches: storage, uploader, tables, manager, wire forms, manifests, registry.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstl.changelog.change_set import OP_CLEAR, OP_DELETE, OP_PUT
from dstl.checkpoint.assembly import assemble, inlined_handles
from dstl.checkpoint.manifest.format import decode_record, encode_record, manifest_name
from dstl.checkpoint.retained_objects import SharedStateRegistry
from dstl.options import BatchingOptions, HedgingOptions, MaterializationOptions, UploadOptions
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components, QueryState
from handles.checkpoint import CompletedCheckpoint, OperatorEntry, referenced_objects
from handles.key_group import KeyGroupRange, partition_of, range_of_partition
from materializer.bases.table_directory import FileBases
from materializer.restore.restore import RestoredTables
from materializer.tables import StateTable, open_table
from tests.simulation.virtual_time import LoopClock, seeded_runtime
from worlds import manifest_samples
from worlds.echo import through_a_frame
from worlds.memory_recorder import MemoryRecorder
from worlds.restored import restore_tables
from worlds.table_changes import Change, changes, content

GROUPS = 16
OPERATORS = ("left", "right")
Model = dict[str, dict[tuple[int, int, bytes, bytes], bytes]]
"""Per operator: (key group, state, key, user key) -> value."""

EAGER = MaterializationOptions(interval_s=1e-6, min_pause_s=0, file_bytes=1 << 16)
"""Materialize whenever there is any log."""


class SlowBases:
    """A store whose puts of base files take so many seconds."""

    def __init__(self, inner: ObjectStore, seconds: float) -> None:
        self.inner, self.location = inner, inner.location
        self.seconds = seconds
        self.uploaded: set[str] = set()

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> Any:
        if name.endswith(".base"):
            self.uploaded.add(name)
            await asyncio.sleep(self.seconds)
        return await self.inner.put(name, data, if_absent=if_absent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Member:
    """One TaskManager."""

    def __init__(self, world: "World", owned: KeyGroupRange) -> None:
        self.recorder = MemoryRecorder()
        config = TaskManagerConfig(
            world.store.location,
            max_parallelism=GROUPS,
            batching=world.batching,
            upload=UploadOptions(max_attempts=2, backoff_base_s=0.001, delete_grace_s=0),
            hedging=HedgingOptions(enabled=False),
            materialization=world.options,
        )
        components = Components(store=world.store, runtime=world.runtime, recorder=self.recorder)
        self._state = QueryState(config, components, world.open_table, "query")
        self.uploader, self.storage = self._state.changelog.uploader, self._state.changelog.storage
        self.backend, self.manager = self._state.backend, self._state.manager
        self.owned = owned

    async def close(self) -> None:
        await self._state.close()


class World:
    """A job: batches, checkpoints, crashes."""

    def __init__(
        self,
        seed: int,
        *,
        store: ObjectStore | None = None,
        options: MaterializationOptions = EAGER,
        table: str = "heap",
        directory: Path | None = None,
        partitions: int = 4,
        inline_threshold: int = 600,
        retained: int = 3,
    ) -> None:
        self.rng = random.Random(seed)
        self.runtime = seeded_runtime(seed)
        self.memory = MemoryStore(clock=LoopClock())
        self.store = store or self.memory
        self.options = options
        self.batching = BatchingOptions(inline_threshold=inline_threshold)
        self.partitions = partitions
        self.members: list[Member] = []
        self.model: Model = {op: {} for op in OPERATORS}
        self.models: dict[int, Model] = {}
        self.completed: list[CompletedCheckpoint] = []
        self.registry = SharedStateRegistry()
        self.retained = retained
        self.sequence = 0
        self.attempt = 0
        self.batch = 0
        self.time_ms = 1_000_000
        self.deleted: set[str] = set()
        self.epoch = 1
        self._table = table
        self._directory = directory
        self._tables = 0

    async def __aenter__(self) -> "World":
        """Start one TaskManager."""
        await self.start(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open_table(self, operator: str) -> StateTable:
        self._tables += 1
        directory = self._directory / f"table-{self._tables}" if self._directory else None
        return open_table(self._table, directory)  # type: ignore[arg-type]

    @property
    def newest(self) -> CompletedCheckpoint | None:
        return self.completed[-1] if self.completed else None

    async def start(self, size: int, checkpoint: CompletedCheckpoint | None = None) -> list[RestoredTables]:
        """Start TaskManagers, or replace all of them, from the newest or a given checkpoint."""
        for member in self.members:
            await member.close()
        checkpoint = checkpoint or self.newest
        self.members = [Member(self, range_of_partition(i, GROUPS, size)) for i in range(size)]
        reports = []
        for member in self.members:
            async with FileBases(self.store, self.runtime, member.backend.tracker.cache) as files:
                restored = await restore_tables(
                    checkpoint,
                    self.store,
                    member.owned,
                    self.open_table,
                    self.runtime,
                    on_progress=lambda _: None,
                    files=files,
                )
            member.backend.replace_tables(
                restored.tables,
                checkpoint.checkpoint_id if checkpoint else None,
                member.owned,
                bases=restored.bases,
                registries={o.uid: o.registry for o in checkpoint.operators} if checkpoint else None,
            )
            reports.append(restored)
        if checkpoint is not None:
            self.completed = [c for c in self.completed if c.checkpoint_id <= checkpoint.checkpoint_id]
            self.model = copy.deepcopy(self.models[checkpoint.checkpoint_id])
            self.batch = checkpoint.batch_id + 1
        return reports

    def random_changes(self, count: int) -> dict[str, list[Change]]:
        found: dict[str, list[Change]] = {}
        for _ in range(count):
            op = self.rng.choices((OP_PUT, OP_DELETE, OP_CLEAR), (8, 2, 1))[0]
            state = self.rng.randrange(2)
            key = self.rng.randbytes(1)
            user_key = self.rng.randbytes(self.rng.randrange(2)) if state else b""
            value = self.rng.randbytes(self.rng.randrange(40)) if op == OP_PUT else b""
            group = key[0] % GROUPS
            found.setdefault(self.rng.choice(OPERATORS), []).append(
                (group, state, op, key, b"" if op == OP_CLEAR else user_key, value)
            )
        return found

    def run_attempts(self, by_operator: dict[str, list[Change]], metadata: bytes = b"{}") -> dict[str, list[int]]:
        """Run one attempt per partition of each operator and return their ids."""
        parent = self.newest.checkpoint_id if self.newest else None
        winners: dict[str, list[int]] = {}
        for operator in OPERATORS:
            for partition in range(self.partitions):
                self.attempt += 1
                winners.setdefault(operator, []).append(self.attempt)
                for member in self.members:
                    member.backend.open_attempt((operator, self.attempt), self.batch, parent, self.partitions)
                    mine = [
                        row
                        for row in by_operator.get(operator, ())
                        if partition_of(row[0], GROUPS, self.partitions) == partition and row[0] in member.owned
                    ]
                    if mine:
                        member.backend.write((operator, self.attempt), partition, changes(*mine), metadata)
        return winners

    async def checkpoint(self, winners: dict[str, list[int]], *, commit: bool = True) -> CompletedCheckpoint | None:
        """Make a checkpoint of some attempts; without ``commit`` it is aborted in the last moment."""
        parts = [through_a_frame(await member.backend.persist(winners)) for member in self.members]
        self.sequence += 1
        checkpoint, inlined = assemble(
            manifest_samples.checkpoint(
                self.sequence,
                self.batch,
                query_id="query",
                max_parallelism=GROUPS,
                created_at=self.runtime.clock.wall(),
                operators=tuple(
                    OperatorEntry(uid=op, parallelism=self.partitions, key_types="string") for op in OPERATORS
                ),
            ),
            self.newest,
            parts,
            self.options.generations,
        )
        data = encode_record(manifest_samples.record_of(checkpoint, epoch=self.epoch), inlined)
        assert decode_record(data, "m").checkpoint == checkpoint
        if not commit:
            for member in self.members:
                member.backend.abort()
            return None
        await self.memory.put(manifest_name(self.sequence), data)
        located = inlined_handles(parts, self.sequence)
        for member in self.members:
            member.backend.complete(checkpoint.checkpoint_id, winners, located, self.time_ms)
        return checkpoint

    def take(self, checkpoint: CompletedCheckpoint, applied: dict[str, list[Change]]) -> None:
        """Make a checkpoint the newest one."""
        for operator, rows in applied.items():
            apply(self.model[operator], rows)
        self.models[checkpoint.checkpoint_id] = copy.deepcopy(self.model)
        self.completed.append(checkpoint)
        self.registry.register(checkpoint.checkpoint_id, held(checkpoint))
        self.batch += 1

    async def publish(self, winners: dict[str, list[int]]) -> CompletedCheckpoint:
        """Make the newest checkpoint again, so that it names what has been materialized since; it has these winners."""
        replaced = self.completed.pop()
        self.batch -= 1
        checkpoint = await self.checkpoint(winners)
        assert checkpoint is not None
        self.take(checkpoint, {})
        await self.delete(self.registry.unregister(replaced.checkpoint_id))
        return checkpoint

    async def subsume(self) -> None:
        """Forget the oldest checkpoints, and delete what nobody needs any more."""
        while len(self.completed) > self.retained:
            await self.delete(self.registry.unregister(self.completed.pop(0).checkpoint_id))

    async def delete(self, names: Sequence[str]) -> None:
        self.deleted.update(names)
        await self.memory.delete(names)

    async def batch_of(self, count: int, metadata: bytes = b"{}") -> CompletedCheckpoint:
        """Run a batch that ends well."""
        applied = self.random_changes(count)
        checkpoint = await self.checkpoint(self.run_attempts(applied, metadata))
        assert checkpoint is not None
        self.take(checkpoint, applied)
        await self.subsume()
        return checkpoint

    async def batches(self, count: int, size: int = 30) -> None:
        """Run batches of so many changes, each with what it makes due."""
        for _ in range(count):
            await self.batch_of(size)
            await self.materialized()

    async def materialized(self) -> None:
        """Wait until no materialization runs, nor is about to start by a timer."""
        quiet = 0
        for _ in range(4000):
            quiet = quiet + 1 if all(member.manager.running is None for member in self.members) else 0
            if quiet > 3:
                return
            await asyncio.sleep(0.0015)
        raise AssertionError("a materialization does not end")

    async def content_of(
        self, checkpoint: CompletedCheckpoint, size: int = 1, on_progress: Callable[[Any], None] | None = None
    ) -> Model:
        """Return what a restore of a checkpoint into so many TaskManagers gives."""
        found: Model = {op: {} for op in OPERATORS}
        for index in range(size):
            owned = range_of_partition(index, GROUPS, size)
            told = on_progress or (lambda _: None)
            restored = await restore_tables(
                checkpoint, self.store, owned, self.open_table, self.runtime, on_progress=told
            )
            for operator, table in restored.tables.items():
                assert set(table.key_groups()) <= set(owned)
                snapshot = table.snapshot()
                found[operator].update(content(snapshot, list(owned)))
                snapshot.close()
                table.close()
        return found

    async def check(self, checkpoint: CompletedCheckpoint, size: int = 1) -> None:
        assert await self.content_of(checkpoint, size) == self.models[checkpoint.checkpoint_id], checkpoint

    async def close(self) -> None:
        for member in self.members:
            await member.close()
            assert member.storage.budget.used == 0, "bytes of the budget were not given back"


def held(checkpoint: CompletedCheckpoint) -> list[str]:
    return [*dict.fromkeys(referenced_objects(checkpoint)), manifest_name(checkpoint.checkpoint_id)]


def apply(model: dict[tuple[int, int, bytes, bytes], bytes], rows: Sequence[Change]) -> None:
    for group, state, op, key, user_key, value in rows:
        if op == OP_PUT:
            model[group, state, key, user_key] = value
        elif op == OP_DELETE:
            model.pop((group, state, key, user_key), None)
        else:
            for address in [a for a in model if a[:3] == (group, state, key)]:
                del model[address]
