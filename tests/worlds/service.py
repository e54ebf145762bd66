"""A coordinator and TaskManagers in one event loop over one store, with what Spark's driver and tasks do there."""

import asyncio
import contextlib
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dstl.changelog.change_set import OP_DELETE, OP_PUT
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.manifest.reader import ATTEMPTS
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.service import CoordinatorService, CoordinatorSettings, DriverHooks
from dstl.checkpoint.spark_commit import SparkExecution
from dstl.checkpoint.state_catalogue import ExpectedOperator
from dstl.errors import DstlError
from dstl.files.file_log import FileLog
from dstl.files.options import FileOptions
from dstl.files.query_directory import QueryDirectory
from dstl.files.reader import FileReader
from dstl.metrics import MetricSet
from dstl.options import BatchingOptions, CheckpointOptions, HedgingOptions, MaterializationOptions, UploadOptions
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Register
from dstl.rpc.handshake import Role
from dstl.rpc.messages import Acknowledgement, Begin, Begun, FetchMany, OpenAttempt, TaskAttempt, Write, write_batch
from dstl.rpc.protocol import Secret
from dstl.runtime import Runtime, SystemClock
from dstl.store.base import ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager import task_manager
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Components
from handles.checkpoint import CompletedCheckpoint
from handles.key_group import KeyGroupRange, partition_of, range_of_partition
from materializer.restore.progress import ProgressListener
from materializer.tables import HeapStateTable, StateTable
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.virtual_time import seeded_runtime
from worlds.restored import restore_tables
from worlds.table_changes import changes

ROOT = "dstl:///jobs/flights/_spark"
MAX_PARALLELISM = 128
STATE = 1
Model = dict[str, dict[bytes, bytes]]
"""Values by operator and key: what the state should be."""
TWO = {"counts": 4, "sums": 3}
"""Two operators and their parallelism."""


def resolve_states(known: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the checkpoint's states of an operator; the operators here declare none."""
    return known or {"states": []}


def key_group(key: bytes) -> int:
    return zlib.crc32(key) % MAX_PARALLELISM


class TaskManager:
    """One TaskManager, as ``python -m dstl.process`` builds it, but in this loop."""

    materialization = MaterializationOptions(enabled=False)
    open_table: Callable[[str], StateTable] = staticmethod(lambda _: HeapStateTable())

    def __init__(
        self,
        member_id: str,
        store: ObjectStore,
        secret: Secret,
        seed: int,
        upload: UploadOptions | None = None,
        materialization: MaterializationOptions | None = None,
        **batching: object,
    ) -> None:
        self.member_id = member_id
        config = TaskManagerConfig(
            store.location,
            max_parallelism=MAX_PARALLELISM,
            batching=BatchingOptions(**batching),
            upload=upload or UploadOptions(max_attempts=1, delete_grace_s=0.0),
            hedging=HedgingOptions(enabled=False),
            materialization=materialization or self.materialization,
        )
        self.recorder = MetricSet()
        self.store = InstrumentedStore(store, recorder=self.recorder)
        components = Components(store=self.store, runtime=seeded_runtime(seed, SystemClock()), recorder=self.recorder)
        self._task_manager = task_manager.TaskManager(config, components, open_table=self.open_table, secret=secret)
        self.service = self._task_manager.service
        self._secret = secret
        self._lifeline: AsyncConnection | None = None

    @property
    def backend(self) -> Any:
        """The query's state, once the coordinator has named the query."""
        return self._task_manager.state.backend if self._task_manager.state is not None else None

    async def start(self, coordinator: Address) -> None:
        self.address = address = Address("127.0.0.1", await self.service.server.listen_tcp("127.0.0.1"))
        self._lifeline = await AsyncConnection.open(coordinator, self._secret, role=Role.TASK_MANAGER)
        await self._lifeline.call(Register(self.member_id, 1, address))

    async def kill(self) -> None:
        """End as a crash does: connections break, and nothing is told or tidied."""
        await self.service.server.close()
        if self._lifeline is not None:
            self._lifeline.close()
        await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.kill()
        await self._task_manager.close()


@dataclass(frozen=True)
class Who:
    """The identity of a task, as Spark tells it."""

    run: str
    operator: str
    batch: int
    slot: int
    attempt: int
    stage: int = 1
    query: str = "query-1"

    @property
    def task(self) -> TaskAttempt:
        return TaskAttempt(self.query, self.run, self.operator, self.batch, self.slot, self.stage, self.attempt)


def query_directory(
    service: CoordinatorService,
    store: ObjectStore,
    seed: int,
    plain: ObjectStore | None = None,
    files: FileOptions = FileOptions(),
) -> QueryDirectory:
    """Return Spark's checkpoint directory in the log of a coordinator's checkpoints."""
    runtime, config = seeded_runtime(seed + 7, SystemClock()), TaskManagerConfig("")
    earlier = plain if plain is not None else MemoryStore()
    log = FileLog(config, runtime, FileReader(store, earlier, runtime))
    return QueryDirectory(ROOT, log, service.commits, runtime, files)


def coordinator(
    store: ObjectStore, runtime: Runtime, secret: Secret, hooks: Mapping[str, Any] | None = None, **settings: object
) -> CoordinatorService:
    """A driver's coordinator, with one TaskManager to come and nobody who listens unless it is said otherwise."""
    given: dict[str, Any] = {
        "options": CheckpointOptions(),
        "max_parallelism": MAX_PARALLELISM,
        "task_managers": 1,
        "host": "127.0.0.1",
        "allow_non_restored_state": False,
    }
    listening: dict[str, Any] = {"on_event": lambda _: None, "on_task_manager_lost": lambda _: None}
    return CoordinatorService(
        store,
        runtime,
        secret,
        CoordinatorSettings(**(given | settings)),
        DriverHooks(**(listening | dict(hooks or {}))),
    )


class Job:
    """A query over all of its drivers: they share its store, what its batches write, and the state that it must have.

    Args:
        seed: Of what is written, and of the drivers' ids.
        store: What outlives the drivers; None for one in memory whose ``rules`` are its faults.
        repeat: How long values are.
    """

    def __init__(self, seed: int, store: ObjectStore | None = None, repeat: int = 1) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.store: Any = FaultyStore(MemoryStore()) if store is None else store
        self.model: Model = {}
        self.drivers = 0
        self._repeat = repeat

    @property
    def run(self) -> str:
        """The first run of the newest driver."""
        return f"run-{self.drivers}"

    def events(self, batch: int, operators: Iterable[str] = TWO) -> "Events":
        return some_events(self.rng, batch, operators, repeat=self._repeat)

    def wrote(self, events: "Events") -> None:
        """Bring the model up to date with a batch that did not go through ``run_batch``."""
        for uid, written in events.items():
            apply(self.model.setdefault(uid, {}), written)

    @contextlib.asynccontextmanager
    async def driver(
        self, store: ObjectStore | None = None, kind: "type[Driver] | None" = None, **settings: Any
    ) -> AsyncIterator["Driver"]:
        """Start the next driver process, over the job's store or another one."""
        self.drivers += 1
        given = {"seed": self.seed + self.drivers - 1, "operators": TWO, "job": self, **settings}
        driver = (kind or Driver)(self.store if store is None else store, **given)
        try:
            yield await driver.start()
        finally:
            await driver.close()

    async def names(self, prefix: str = "", suffix: str = "") -> set[str]:
        return {info.name async for info in self.store.list(prefix) if info.name.endswith(suffix)}

    async def retained(self) -> list[CompletedCheckpoint]:
        return await retained(self.store)

    async def check(self, batch: int | None = None) -> None:
        """The last checkpoint, restored by somebody else, is the model; and the batch's, where that is told."""
        await check_durable(self.store, self.model, batch)


class Driver:
    """One driver process: a coordinator, its TaskManagers, and the tasks that Spark would start."""

    materialization: MaterializationOptions | None = None
    """Its TaskManagers'; None for what they have themselves."""
    query = "query-1"
    job_group = ""
    """What tasks are told instead of their run, as where the user has set a group of their own."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        seed: int,
        operators: Mapping[str, int],
        task_managers: int = 1,
        max_parallelism: int = MAX_PARALLELISM,
        checkpoints: CheckpointOptions | None = None,
        replace: bool = True,
        allow_non_restored_state: bool = False,
        on_progress: ProgressListener | None = None,
        fall_back: bool = False,
        commit_attempts: int = ATTEMPTS,
        plain: ObjectStore | None = None,
        execution: SparkExecution | None = None,
        files: FileOptions = FileOptions(),
        job: Job | None = None,
        **batching: object,
    ) -> None:
        self.store = store
        self.job = job or Job(seed, store)
        self.recorder = MetricSet()
        self.secret = Secret.generate()
        self.operators = dict(operators)
        self.reports: list[CheckpointReport | RestoreReport] = []
        self.lost: list[str] = []
        self.members: dict[str, TaskManager] = {}
        self._size = task_managers
        self._replace = replace
        self._batching = batching
        self._seed = seed
        self._attempts = 0
        self._started = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.service = coordinator(
            self.store,
            seeded_runtime(seed, SystemClock()),
            self.secret,
            {
                "on_event": self.reports.append,
                "on_task_manager_lost": self._lost,
                "on_progress": on_progress,
                "recorder": self.recorder,
                "execution": execution,
            },
            options=checkpoints or CheckpointOptions(task_manager_timeout_s=5.0),
            max_parallelism=max_parallelism,
            task_managers=task_managers,
            allow_non_restored_state=allow_non_restored_state,
            fall_back=fall_back,
            commit_attempts=commit_attempts,
            materialization=self.materialization or MaterializationOptions(),
        )
        self.directory = query_directory(self.service, store, seed, plain, files)

    async def __aenter__(self) -> "Driver":
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> "Driver":
        for uid, parallelism in self.operators.items():
            self.service.expect(ExpectedOperator(uid, parallelism, "string", resolve_states))
        await self.service.start()
        for _ in range(self._size):
            await self._launch()
        return self

    async def close(self) -> None:
        await self.directory.settle()
        await self.service.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.directory.close()
        for member in self.members.values():
            await member.close()

    async def _launch(self) -> None:
        self._started += 1
        member = TaskManager(
            f"tm-{self._started}",
            self.store,
            self.secret,
            self._seed * 1000 + self._started,
            materialization=self.materialization,
            **self._batching,
        )
        self.members[member.member_id] = member
        await member.start(self.service.address)

    def _lost(self, member_id: str) -> None:
        self.lost.append(member_id)
        if self._replace:
            task = asyncio.get_running_loop().create_task(self._launch())
            self._tasks.add(task)

    @property
    def checkpoints(self) -> list[CheckpointReport]:
        return [report for report in self.reports if isinstance(report, CheckpointReport)]

    @property
    def restores(self) -> list[RestoreReport]:
        return [report for report in self.reports if isinstance(report, RestoreReport)]

    def who(self, run: str, operator: str, batch: int, slot: int, **more: object) -> Who:
        self._attempts += 1
        return Who(self.job_group or run, operator, batch, slot, self._attempts, **{"query": self.query, **more})  # type: ignore[arg-type]

    async def begin_run(self, run: str) -> str:
        """Look at the checkpoint directory as a run does before its first batch, unless it has; returns the run."""
        if run not in self.directory.runs:
            if await self.directory.find("metadata", "") is None:
                await self.directory.put("metadata", "", -1, [json.dumps({"id": self.query}).encode()])
            await self.directory.listing("commits", run)
        return run

    async def plan(self, run: str, batch: int, time_ms: int | None = None) -> None:
        """Write a batch's offsets, unless they are there from an earlier run."""
        run = await self.begin_run(run)
        if await self.directory.find(f"offsets/{batch}", run) is None:
            now_ms = int(SystemClock().wall() * 1000) if time_ms is None else time_ms
            header = json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": now_ms, "conf": {}})
            content = b"v1\n%s\n" % header.encode() + b'{"logOffset":%d}' % batch
            await self.directory.put(f"offsets/{batch}", run, -1, [content])

    async def commit(self, run: str, batch: int) -> None:
        """Commit a batch, as Spark does once its tasks have ended: its checkpoint is durable when this returns."""
        await self.directory.put(f"commits/{batch}", await self.begin_run(run), -1, [b"v1\n{}"])

    async def next_batch(self, run: str) -> int:
        """Begin a run; return the batch that it goes on with."""
        await self.begin_run(run)
        commits = [int(name) for name, *_ in await self.directory.listing("commits", run)]
        return max(commits, default=-1) + 1

    async def run_batch(self, run: str, batch: int, events: "Events | None" = None, model: Model | None = None) -> None:
        """Plan a batch, run its tasks, commit it, and then bring the model up to date, the job's unless it is told."""
        model = self.job.model if model is None else model
        after = await self.run_uncommitted(run, batch, events, model)
        await self.commit(run, batch)
        model.update(after)

    async def run_batches(self, run: str, batches: Iterable[int]) -> None:
        for batch in batches:
            await self.run_batch(run, batch)

    async def run_uncommitted(
        self, run: str, batch: int, events: "Events | None" = None, model: Model | None = None
    ) -> Model:
        """Plan a batch and run its tasks; return the state that there will be once it is committed."""
        await self.plan(run, batch)
        after = copy_of(self.job.model if model is None else model)
        await self.run_tasks(run, batch, self.job.events(batch, self.operators) if events is None else events, after)
        return after

    async def run_tasks(self, run: str, batch: int, events: "Events", model: Model) -> None:
        """Run the tasks of a batch side by side, as Spark does, and bring the model up to date.

        Every task checks what it reads against the model before the batch. The first error of a task is raised, once
        all have ended.
        """
        before = copy_of(model)
        tasks = [
            self.task(self.who(run, uid, batch, slot), events.get(uid, {}), before.get(uid, {}))
            for uid, parallelism in self.operators.items()
            for slot in range(parallelism)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for result in failed:
            if not isinstance(result, DstlError):
                raise result
        if failed:
            raise failed[0]
        for uid, written in events.items():
            apply(model.setdefault(uid, {}), written)

    async def task(
        self, who: Who, written: "Written | None" = None, before: Mapping[bytes, bytes] | None = None
    ) -> None:
        """Run one task to its end."""
        async with self.attempt(who, written, before) as attempt:
            await attempt.acknowledge()

    @contextlib.asynccontextmanager
    async def attempt(
        self, who: Who, written: "Written | None" = None, before: Mapping[bytes, bytes] | None = None
    ) -> AsyncIterator["Attempt"]:
        """Begin, read what was there before (or the model) and write; the body acknowledges, or does not."""
        before = self.job.model.get(who.operator, {}) if before is None else before
        if who.query == self.query and not self.job_group:
            await self.begin_run(who.run)
        parallelism = self.operators[who.operator]
        mine = {
            k: v
            for k, v in (written or {}).items()
            if partition_of(key_group(k), MAX_PARALLELISM, parallelism) == who.slot
        }
        async with contextlib.AsyncExitStack() as stack:
            coordinator = await self._connect(stack, self.service.address)
            begun = await coordinator.call(Begin(who.task, pid=who.attempt))
            attempt = Attempt(who, coordinator, begun, bool(mine))
            for assigned in begun.assignments:
                connection = await self._connect(stack, assigned.address)
                await connection.call(OpenAttempt(who.operator, who.attempt, who.batch, begun.parent, parallelism))
                attempt.owners.append((assigned.key_groups, connection))
            keys = sorted({*mine, *(k for k in before if _in(k, who.slot, parallelism))}, key=key_group)
            assert await attempt.read(keys) == {k: before[k] for k in keys if k in before}, f"{who} read another state"
            await attempt.write(mine)
            yield attempt

    async def _connect(self, stack: contextlib.AsyncExitStack, address: Address) -> AsyncConnection:
        connection = await AsyncConnection.open(address, self.secret)
        stack.callback(connection.close)
        return connection


@dataclass
class Attempt:
    """A task in the middle of its work."""

    who: Who
    coordinator: AsyncConnection
    begun: Begun
    has_rows: bool
    owners: list[tuple[KeyGroupRange, AsyncConnection]] = field(default_factory=list)

    async def read(self, keys: list[bytes]) -> dict[bytes, bytes]:
        values_of: dict[bytes, bytes] = {}
        for owned, connection in self.owners:
            part = [key for key in keys if key_group(key) in owned]
            if part:
                groups = tuple(map(key_group, part))
                asked = FetchMany(self.who.operator, self.who.attempt, (STATE,), groups, tuple(part))
                (values,) = (await connection.call(asked)).columns
                values_of.update({k: v for k, v in zip(part, values, strict=True) if v is not None})
        return values_of

    async def write(self, written: "Written") -> None:
        rows = [
            (key_group(k), STATE, OP_DELETE if v is None else OP_PUT, k, b"", v or b"")
            for k, v in sorted(written.items(), key=lambda item: key_group(item[0]))
        ]
        for owned, connection in self.owners:
            part = [row for row in rows if row[0] in owned]
            if part:
                who = self.who
                await connection.call(
                    Write(who.operator, who.attempt, who.slot, self.begun.registry, False, write_batch(changes(*part)))
                )

    async def acknowledge(self, **other: Any) -> None:
        told = Acknowledgement(self.who.task, self.who.slot if self.has_rows else None)
        await self.coordinator.call(replace(told, **other))


Written = Mapping[bytes, bytes | None]
Events = Mapping[str, Written]
"""By operator, what a batch writes: a value, or None for a deletion."""


def some_events(
    rng: random.Random, batch: int, operators: Iterable[str] = TWO, *, keys: int = 60, repeat: int = 1
) -> Events:
    """Return what a batch writes to random keys, a deletion now and then; values name the batch, so many times."""

    def value(n: int) -> bytes | None:
        return None if rng.random() < 0.15 else f"{batch}/{n}".encode() * repeat

    return {uid: {f"key-{rng.randrange(keys)}".encode(): value(n) for n in range(25)} for uid in operators}


async def check_durable(store: ObjectStore, model: Model, batch: int | None = None) -> None:
    """The last checkpoint, restored by somebody else, is the model; and the batch's, where that is told."""
    newest = (await retained(store))[-1]
    assert batch is None or newest.batch_id == batch
    assert without_empty(await state_of(newest, store)) == without_empty(model)


def copy_of(model: Model) -> Model:
    return {uid: dict(values) for uid, values in model.items()}


def apply(values: dict[bytes, bytes], written: Written) -> None:
    for key, value in written.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value


async def retained(store: ObjectStore) -> list[CompletedCheckpoint]:
    return await ManifestLog(store, seeded_runtime(1, SystemClock())).checkpoints()


async def state_of(checkpoint: CompletedCheckpoint | None, store: ObjectStore) -> Model:
    """Return what a restore of a checkpoint gives: everything of every operator."""
    owned = KeyGroupRange.all(MAX_PARALLELISM)
    restored = await restore_tables(
        checkpoint, store, owned, lambda _: HeapStateTable(), seeded_runtime(1, SystemClock())
    )
    return {uid: dict(_entries(table)) for uid, table in restored.tables.items()}


def _entries(table: HeapStateTable) -> Iterator[tuple[bytes, bytes]]:
    for group in table.key_groups():
        for entry in table.scan(STATE, group, limit=1 << 20):
            yield entry.key, entry.value


def _in(key: bytes, slot: int, parallelism: int) -> bool:
    return key_group(key) in range_of_partition(slot, MAX_PARALLELISM, parallelism)


def without_empty(model: Model) -> Model:
    return {uid: values for uid, values in model.items() if values}
