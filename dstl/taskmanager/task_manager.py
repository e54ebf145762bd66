"""The composition root of a TaskManager: a configuration and components become its log, its state and its calls.

The process, the simulation, the benchmarks and the tests build theirs here, so that all of them run the same wiring.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dstl.changelog.object_names import SegmentNames
from dstl.changelog.storage import StateChangelogStorage
from dstl.changelog.upload.uploader import Uploader
from dstl.crash_points import reach
from dstl.errors import CorruptData, brief
from dstl.metrics import NullRecorder, Recorder
from dstl.options import RocksDBOptions
from dstl.rpc.protocol import Secret
from dstl.runtime import Clock, Runtime
from dstl.store import shard_names
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from dstl.taskmanager.base_tracker import BaseTracker
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.memory_limit import MemoryLimit, MemoryUse
from dstl.taskmanager.service import TaskManagerService
from dstl.taskmanager.state_backend import TaskManagerStateBackend
from handles.operator_uid import is_operator_uid
from materializer.bases.base_cache import BaseCache
from materializer.manager import PeriodicMaterializationManager
from materializer.materialization import BaseWriter
from materializer.tables import StateTable, TableKind, open_table

_LOOK_S = 0.02  # a base file takes far longer to store
_PATIENCE_S = 60.0  # a log that is full for longer needs the base, which is what truncates it


class BackgroundBudget:
    """The part of the log's byte budget that base files may hold: half of it, and what no append waits for.

    Reservations are granted in the order of asking, so a large file that waited among them would hold up the appends
    behind it, and two of them could hold all of the budget for as long as the store takes. Where there is no room for a
    minute it waits among them all the same, for a log that is never materialized is worse.

    Args:
        storage: Whose budget it is.
        clock: Waits.
    """

    def __init__(self, storage: StateChangelogStorage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._held = 0

    @asynccontextmanager
    async def reserve(self, nbytes: int) -> AsyncIterator[None]:
        """Hold so many bytes, or half of the budget where that is less, for the body; waits until they are free.

        Raises:
            Closed: The storage was closed.
        """
        budget = self._storage.budget
        share = budget.limit // 2
        nbytes = min(nbytes, share)
        patient_until = self._clock.now() + _PATIENCE_S
        while self._held + nbytes > share or (
            (budget.starving or budget.used + nbytes > budget.limit) and self._clock.now() < patient_until
        ):
            await self._clock.sleep(_LOOK_S)
        self._held += nbytes
        try:
            async with self._storage.budget.reserve(nbytes):
                yield
        finally:
            self._held -= nbytes


OpenTable = Callable[[str], StateTable]


@dataclass(frozen=True, kw_only=True)
class Components:
    """The parts that a TaskManager works with; they stay their maker's to close.

    Attributes:
        store: The configuration's location.
        hedge_store: The same location over other connections, for second requests; ``store`` when None.
        runtime: Clock, jitter and ids.
        recorder: Takes the metrics of all parts.
        memory_use: Reads the memory in use; where it is not given, nothing is ever in use.
    """

    store: ObjectStore
    runtime: Runtime
    hedge_store: ObjectStore | None = None
    recorder: Recorder = field(default_factory=NullRecorder)
    memory_use: Callable[[], MemoryUse] = lambda: MemoryUse(0, None)


class Changelog:
    """The log of one query on one TaskManager. Made and used on one event loop.

    Args:
        config: Says when the log is sealed and how it is uploaded.
        components: Store, runtime and recorder.
        query_id: The query; a part of every object's name.

    Attributes:
        uploader: Gets objects into the store.
        names: Names of objects.
        storage: The writers' logs.
    """

    def __init__(self, config: TaskManagerConfig, components: Components, query_id: str) -> None:
        store, runtime, recorder = components.store, components.runtime, components.recorder
        self.uploader = Uploader(
            store,
            runtime=runtime,
            options=config.upload,
            hedging=config.hedging,
            recorder=recorder,
            hedge_store=components.hedge_store,
        )
        self.names = SegmentNames(query_id, runtime.new_id(), runtime, shard_names(store))
        self.storage = StateChangelogStorage(
            uploader=self.uploader,
            store=store,
            names=self.names,
            options=config.batching,
            runtime=runtime,
            recorder=recorder,
        )

    async def close(self) -> None:
        """Close the logs and end what is being uploaded. Idempotent."""
        await self.storage.close()
        await self.uploader.close()


class QueryState:
    """The state of one query on one TaskManager: its log, its tables, and what materializes them. One event loop.

    Args:
        config: The options of all parts.
        components: Store, runtime and recorder.
        open_table: Opens an empty table for an operator.
        query_id: The query.

    Attributes:
        changelog: The log.
        backend: The tables, and the attempts that change them.
        manager: Materializes the tables.
    """

    def __init__(self, config: TaskManagerConfig, components: Components, open_table: OpenTable, query_id: str) -> None:
        store, runtime, recorder = components.store, components.runtime, components.recorder
        options = config.materialization
        self.changelog = Changelog(config, components, query_id)
        cache = BaseCache.of(options, store.location, recorder)
        self.backend = TaskManagerStateBackend(
            self.changelog.storage,
            open_table,
            runtime,
            tracker=BaseTracker(runtime, cache, options.generations),
            max_parallelism=config.max_parallelism,
            memory=MemoryLimit(config.memory, components.memory_use),
        )
        self._discarded = BackgroundDeleter(
            store, recorder=recorder, deleted="basesDiscarded", left="basesLeftToCleaner"
        )
        writer = BaseWriter(
            uploader=self.changelog.uploader,
            names=self.changelog.names,
            reserve=BackgroundBudget(self.changelog.storage, runtime.clock).reserve,
            discard=self._discarded.delete,
            options=options,
            cache=cache,
        )
        self.manager = PeriodicMaterializationManager(
            self.backend, writer, options=options, runtime=runtime, recorder=recorder
        )
        self.backend.tracker.manager = self.manager

    async def close(self) -> None:
        """Drop what no checkpoint has, and close tables and logs. Idempotent."""
        await self.manager.close()
        await self._discarded.close()
        await self.backend.end_loading()
        self.backend.close()
        await self.changelog.close()


class TaskManager:
    """One TaskManager: it serves the state of the query that its coordinator names. One event loop.

    Args:
        config: The options of all parts.
        components: Store, runtime and recorder.
        open_table: Opens an empty table for an operator.
        secret: The application's.

    Attributes:
        service: Its calls; the maker lets ``service.server`` listen.
        state: The query's state; None until the coordinator has named the query.
    """

    def __init__(
        self, config: TaskManagerConfig, components: Components, *, open_table: OpenTable, secret: Secret
    ) -> None:
        self._config = config
        self._components = components
        self._open_table = open_table
        self.state: QueryState | None = None
        self.service = TaskManagerService(
            self._open_state,
            components.store,
            components.runtime,
            secret,
            recorder=components.recorder,
        )

    def _open_state(self, query_id: str) -> TaskManagerStateBackend:
        self.state = QueryState(self._config, self._components, self._open_table, query_id)
        return self.state.backend

    async def close(self) -> None:
        """Stop serving and drop what no checkpoint has. Idempotent."""
        reach("T10")
        await self.service.server.close()
        if self.state is not None:
            await self.state.close()


def table_directory(parent: Path, operator: str, number: int) -> Path:
    """Return where a table of an operator lies: a directory of its own in ``parent``.

    Raises:
        CorruptData: No operator can be called so.
    """
    path = parent / f"{operator}-{number}"
    if not is_operator_uid(operator) or path.parent != parent:
        raise CorruptData(f"{brief(operator)} is not an operator's name: the checkpoint was not written by DSTL")
    return path


def table_opener(kind: TableKind, parent: Path, rocksdb: RocksDBOptions | None = None) -> OpenTable:
    """Return a function that opens an operator's table, each time in another directory of ``parent``.

    A restored table is opened while its predecessor is still there.
    """
    numbers = itertools.count()
    return lambda operator: open_table(kind, table_directory(parent, operator, next(numbers)), rocksdb=rocksdb)
