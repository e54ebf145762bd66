"""``StateBackend``: DSTL as the state backend of one PySpark streaming query."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, get_args

from pyspark.sql import DataFrame, SparkSession

from dstl.checkpoint.report import CheckpointReport, RestoreReport, SavepointReport
from dstl.checkpoint.savepoint.format import parse_savepoint_location
from dstl.checkpoint.savepoint.restore import RestoreMode
from dstl.checkpoint.service import CoordinatorService, CoordinatorSettings, DriverHooks
from dstl.errors import Closed, Invalid
from dstl.metrics import MetricSet
from dstl.option_sources import resolve
from dstl.options import (
    BatchingOptions,
    CheckpointOptions,
    ClusterOptions,
    HedgingOptions,
    MaterializationOptions,
    MemoryOptions,
    MetricsOptions,
    RocksDBOptions,
    S3Options,
    SealingOptions,
    UploadOptions,
    WorkerOptions,
    check_grace,
)
from dstl.process.launch_spec import LaunchSpec
from dstl.rpc.protocol import Secret
from dstl.runtime import IoLoop, call_before_exit, system_runtime
from dstl.spark.application.checkpoint_directory import CheckpointDirectory
from dstl.spark.application.environment import check_pyspark, check_table, check_worker_python
from dstl.spark.application.fleet_launcher import FleetLauncher
from dstl.spark.application.monitor import Monitor
from dstl.spark.application.savepoints import SavepointMaker, start_from_savepoint
from dstl.spark.application.session import (
    LOOPBACK,
    driver_host,
    executor_hosts,
    file_options_of,
    is_local,
    local_task_managers,
    session_of,
    settings_of,
)
from dstl.spark.application.shutdown import shut_down
from dstl.spark.listener import CheckpointMetrics, Listeners
from dstl.spark.operators.aggregation import check_input
from dstl.spark.operators.arguments import check_operator_name, choice, count_within, flag
from dstl.spark.operators.grouped_stream import OperatorHost
from dstl.spark.operators.stateful_operators import StatefulOperators
from dstl.spark.query.execution import ON_A_CLUSTER, DriverExecution
from dstl.spark.query.failure_log import log_failures
from dstl.spark.query.placement import repartition
from dstl.spark.query.plan import has_state_of_spark
from dstl.spark.query.watermarks import QueryWatermarks
from dstl.spark.saved_state.readable_states import ReadableStates, StateReading
from dstl.spark.saved_state.reader import latest_watermark
from dstl.spark.task import OperatorTask
from dstl.spark.task_definition import OperatorPlace, TaskDefinition
from dstl.store.base import ObjectStore
from dstl.store.location import open_store, shared_location
from dstl.store.probe import probe
from dstl.taskmanager.config import TaskManagerConfig
from handles.key_group import DEFAULT_MAX_PARALLELISM, MAX_MAX_PARALLELISM
from materializer.restore.progress import ProgressListener
from materializer.tables import TableKind

_log = logging.getLogger(__name__)
_MAXIMUM = "the maximum parallelism"


class StateBackend(StatefulOperators, ReadableStates):
    """Keeps the state of one streaming query in DSTL.

    ::

        backend = StateBackend("s3://bucket/jobs/flights")
        rows = backend.groupBy(df, "tail").transformWithState(Flights(), "tail string, ...", "append", "none")
        query = (
            rows.writeStream.format("parquet")
            .option("checkpointLocation", backend.checkpoint_location)
            ...
            .start()
        )

    One object serves one query, with any number of stateful operators, and survives restarts of that query in the same
    driver; a second query needs a backend and a location of its own. The query's own checkpoint directory lies in the
    location too: the record that holds ``commits/N`` is the checkpoint of batch N.

    Thread-safe as far as a driver program is: define operators from one thread. Not usable after a fork.

    Args:
        location: Where state is stored: ``s3://bucket/prefix``, a directory that driver and executors share, or
            several of them joined by commas (each absolute: ``/disk1/s,/disk2/s``; any other comma belongs to a
            directory's name, see :mod:`dstl.store.location`). It is written to and read once before this returns.
        parallelism: Partitions of each operator, unless it names its own; by default Spark's default parallelism. May
            differ at every restart. More: more tasks share the work and each needs less memory; fewer: less overhead.
        max_parallelism: Number of key groups: the most partitions of an operator. Another one takes a savepoint made by
            ``transform_savepoint``. More: more room to grow; fewer: smaller indexes.
        table: ``heap`` (fast, state must fit the TaskManagers' memory) or ``rocksdb`` (slower, state on local disk).
        task_managers: Processes that share the key groups. More: more cores serve state; fewer: fewer objects per
            checkpoint, less memory. By default one for every eight tasks that run at once, on a cluster on each host
            with executors when a run begins (set it where executors come and go: a change restores all state).
        batching: When the log is sealed into segments.
        upload: How objects get into the store.
        hedging: When a second request is sent for a late one.
        checkpoints: Deadlines and retention.
        materialization: When tables are written as base files, so that the log stays short. Options that are not
            given come from the environment or Spark's configuration: see :mod:`dstl.option_sources`.
        s3: How S3 is reached; credentials come from the SDK's provider chain, on each host from its own.
        metrics: Where the driver serves metrics for Prometheus and a page for people; by default nowhere.
        sealing: The key that objects are sealed with, so that write access to the store is not enough to forge state.
        rocksdb: Bounds of memory and disk of ``rocksdb`` tables.
        memory: What a TaskManager may take; state that would outgrow it ends the query (``StateTooLarge``).
        cluster: On a master other than ``local[...]``: where the coordinator listens, and what starts TaskManagers.
        workers: How Spark's Python workers run the query's tasks.
        restore_from: A savepoint, ``LOCATION/savepoints/NAME``, that a query without a checkpoint begins with; once it
            has checkpoints of its own they come first, so the argument may stay. Parallelism, table kind and number of
            TaskManagers may differ from those of the savepoint's query; ``max_parallelism`` may not. It holds no
            source offsets: start with the ``checkpointLocation`` of the savepoint's query, as it was then; with a new
            one the sources are read from their start (a warning says so), and ``initialState`` is refused for an
            operator that the savepoint has.
        restore_mode: ``no_claim`` copies the savepoint's files before the first batch: from the first checkpoint on the
            job is independent of it. ``claim`` copies nothing: the savepoint, which has to be in this very location,
            becomes the job's own, and its files are deleted as the job needs them no more.
        restore: ``latest``: a run goes on from the checkpoint of the batch before, or not at all. ``previous``: where
            that one cannot be read, from the newest older one that can, and what the batches in between did to the
            state is lost: it is logged, and in the :class:`RestoreReport`. Start with it by hand, once; where
            a manifest is damaged, until as many batches have run as checkpoints are retained.
        allow_non_restored_state: Accept a checkpoint with state of an operator that the query no longer has; the state
            is carried along. State in a savepoint of such an operator stays in the savepoint.
        spark: The session; by default the active one.

    Raises:
        AccessDenied: The credentials may not read, write, list or delete there.
        Invalid: The location or an argument is wrong.
        MissingState: There is no such savepoint.
        CorruptData: The savepoint's descriptor is damaged.
        Unavailable: The store does not answer.

    Every method but :meth:`close` raises ``Closed`` when the backend was closed.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        parallelism: int | None = None,
        max_parallelism: int = DEFAULT_MAX_PARALLELISM,
        table: TableKind = "heap",
        task_managers: int | None = None,
        batching: BatchingOptions | None = None,
        upload: UploadOptions | None = None,
        hedging: HedgingOptions | None = None,
        checkpoints: CheckpointOptions | None = None,
        materialization: MaterializationOptions | None = None,
        rocksdb: RocksDBOptions | None = None,
        s3: S3Options | None = None,
        sealing: SealingOptions | None = None,
        memory: MemoryOptions | None = None,
        cluster: ClusterOptions | None = None,
        workers: WorkerOptions | None = None,
        metrics: MetricsOptions | None = None,
        restore_from: str | os.PathLike[str] | None = None,
        restore_mode: RestoreMode = "no_claim",
        restore: Literal["latest", "previous"] = "latest",
        allow_non_restored_state: bool = False,
        spark: SparkSession | None = None,
    ) -> None:
        check_pyspark()
        absolute = shared_location(location)
        max_parallelism = count_within("max_parallelism", max_parallelism, MAX_MAX_PARALLELISM)
        if task_managers is not None:
            task_managers = count_within("task_managers", task_managers, max_parallelism, _MAXIMUM)
        choice("table", table, get_args(TableKind))
        if rocksdb is not None and table != "rocksdb":
            raise Invalid(f"rocksdb= has no effect with table={table!r}: give table='rocksdb' too, or leave it out")
        choice("restore", restore, ("latest", "previous"))
        choice("restore_mode", restore_mode, get_args(RestoreMode))
        flag("allow_non_restored_state", allow_non_restored_state)
        if restore_from is not None:
            parse_savepoint_location(restore_from)
        session = session_of(spark)
        self.location = os.fspath(location)
        self.max_parallelism = max_parallelism
        chosen = session.sparkContext.defaultParallelism if parallelism is None else parallelism
        self._parallelism = count_within("parallelism", chosen, max_parallelism, _MAXIMUM)
        self._operators: list[str] = []
        self._repeating: set[str] = set()
        self._unnamed = 0
        self._has_warned = False
        self._recorder = MetricSet()
        self._listeners = Listeners(CheckpointMetrics(self._recorder))
        self._loop = IoLoop("dstl-coordinator")
        self._closer: weakref.finalize[Any, StateBackend] | None = None
        runtime = system_runtime()
        self._watermarks = QueryWatermarks(session, runtime.new_id())
        conf = settings_of(session)
        log = {"batching": batching, "upload": upload, "hedging": hedging}
        state = {"materialization": materialization, "memory": memory, "rocksdb": rocksdb}
        sections = {**log, **state, "s3": s3, "sealing": sealing}
        config = TaskManagerConfig.resolve(absolute, table, max_parallelism, sections, os.environ, conf)
        checkpoints = resolve("checkpoints", CheckpointOptions, checkpoints, os.environ, conf)
        check_grace(checkpoints)
        files = file_options_of(conf)
        open_at = partial(open_store, options=config.s3, sealing=config.sealing)
        cluster = resolve("cluster", ClusterOptions, cluster, os.environ, conf)
        self._workers = resolve("workers", WorkerOptions, workers, os.environ, conf)
        metrics = resolve("metrics", MetricsOptions, metrics, os.environ, conf)
        self._monitor: Monitor | None = None
        local = is_local(session)
        if local:
            check_worker_python(session)
            check_table(table)
            task_managers = task_managers or local_task_managers(session, max_parallelism)
        if not local and not cluster.launch and task_managers is None:
            raise Invalid("task_managers is missing: with cluster.launch off they are started by hand; say how many")
        self._host = LOOPBACK if local else None
        self._local = local
        self._secret = Secret.from_file(cluster.secret_file) if cluster.secret_file else Secret.generate()
        self._store = open_at(absolute)
        stores: list[ObjectStore] = [self._store]
        execution = DriverExecution(session)
        try:
            self._loop.run(probe(self._store, runtime=runtime))
            self._launcher = FleetLauncher(task_managers or 1)
            self._service = CoordinatorService(
                self._store,
                runtime,
                self._secret,
                CoordinatorSettings(
                    options=checkpoints,
                    max_parallelism=max_parallelism,
                    task_managers=task_managers,
                    host=LOOPBACK if local else cluster.host or driver_host(session),
                    bind=None if local else conf.get("spark.driver.bindAddress"),
                    port=cluster.port,
                    task_manager_config=config.to_json(),
                    task_managers_elsewhere=not local,
                    allow_non_restored_state=allow_non_restored_state,
                    materialization=config.materialization,
                    fall_back=restore == "previous",
                ),
                DriverHooks(
                    executor_hosts=partial(asyncio.to_thread, executor_hosts, session)
                    if cluster.launch and not local
                    else None,
                    execution=execution,
                    spark_watermarks=self._watermarks,
                    on_event=self._listeners.on_report,
                    on_progress=self._listeners.on_progress,
                    on_task_manager_lost=self._launcher.lost,
                    recorder=self._recorder,
                ),
            )
            if metrics.port is not None:
                parts = (self._store, runtime, self._service, self._loop, self._recorder)
                self._monitor = Monitor(*parts, metrics, execution.batch_seconds)
                self._listeners.progress.insert(0, self._monitor.note_progress)
            self._listeners.reports.insert(0, lambda _: self._watermarks.follow(self._service.completed))
            self._loop.run(self._service.start())
            if local:
                self._launcher.spec = LaunchSpec("", self._service.address, self._secret, host=LOOPBACK)
                self._launcher.registered = self._service.fleet.all
        except BaseException:
            if self._monitor is not None:
                self._monitor.close()
            self._loop.run(self._store.close())
            self._loop.close()
            raise
        self._directory = CheckpointDirectory(session, config, open_at, self._service, runtime, self._loop, files)
        self._reader = StateReading(session, self._store, self._loop, self._service, self._directory, self._operators)
        end = (self._loop, self._service, self._launcher, stores, self._monitor, self._directory)
        self._closer = weakref.finalize(self, shut_down, *end)
        call_before_exit(self._closer)
        self._savepoints = SavepointMaker(self._service, self._loop, absolute, open_at)
        if restore_from is not None:
            begin = start_from_savepoint(self._service, self._store, absolute, restore_from, restore_mode, open_at)
            try:
                stores += self._loop.run(begin)
            except BaseException:
                self.close()
                raise

    def __repr__(self) -> str:
        return f"StateBackend({self.location!r}, operators={self._operators})"

    def __enter__(self) -> StateBackend:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def task_manager_pids(self) -> Sequence[int]:
        """Process ids of the TaskManagers that have registered."""
        return tuple(self._service.fleet.pids)

    @property
    def metrics_url(self) -> str | None:
        """Address of the page of this job; metrics are at its ``metrics``. None where ``metrics.port`` is not set."""
        return self._monitor.url if self._monitor is not None else None

    @property
    def worker_pids(self) -> Sequence[int]:
        """Process ids of the Python workers that have run a task of this backend, dead ones included."""
        return tuple(self._service.worker_pids)

    def savepoint(
        self,
        name: str,
        *,
        to: str | os.PathLike[str] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> SavepointReport:
        """Copy the last completed checkpoint to a savepoint, while batches go on.

        Returns when it is complete; it takes about as long as restoring the state. Nothing waits for it, but it uses
        the driver's processor and network, and its memory: some hundred megabytes.

        Args:
            name: The savepoint's name.
            to: Another location for it; by default this backend's, below ``savepoints/``.
            on_progress: Called with key groups done and in all, on a thread of its own.

        Returns:
            Its figures; their ``location`` is what ``restore_from`` takes.

        Raises:
            MissingState: No checkpoint has completed since this backend began.
            ObjectExists: The name is taken.
            Invalid: Not a name or a location.
        """
        self._check_open()
        self._loop.run(self._directory.settle())
        return self._savepoints.make(name, to, on_progress)

    def add_listener(self, listener: Callable[[CheckpointReport | RestoreReport], None]) -> None:
        """Call ``listener`` with the figures of every checkpoint and restore, on a thread of the backend's.

        It must not block: a checkpoint is not over until it returns.
        """
        self._check_open()
        self._listeners.reports.append(listener)

    def add_progress_listener(self, listener: ProgressListener) -> None:
        """Call ``listener`` about twice a second while state is restored, and at its end, on a thread of the backend's.

        It is given bytes done and to do, rate, seconds to go, and the same by operator, of all TaskManagers together;
        :class:`~materializer.restore.progress.ProgressBar` shows them on a terminal. It must not block.
        """
        self._check_open()
        self._listeners.progress.append(listener)

    @property
    def checkpoint_location(self) -> str:
        """The query's ``checkpointLocation``, which lies in the backend's own log; any other is refused.

        The record that holds ``commits/N`` is the checkpoint of batch N. A batch is two requests, Spark's own included;
        of each partition the task that Spark ran last counts, whatever made it run twice. Attempts are not compared: a
        processor whose result depends on the wall clock, say, may have emitted something else before, as with Spark's
        own stores. A checkpoint directory that the query had elsewhere is taken over from a copy at ``_spark`` here.

        Raises:
            Invalid: The driver's JVM has the jar of another version, or the jar is missing and cannot be compiled.
        """
        self._check_open()
        return self._directory.location()

    @property
    def operators(self) -> Sequence[str]:
        """Names of the operators that have been defined, in order."""
        return tuple(self._operators)

    def close(self) -> None:
        """End the TaskManagers and stop listening. Stop the query first. Idempotent.

        Every later call raises ``Closed``: this object never opens again.
        """
        if self._closer is not None:
            self._closer()

    def _operator_host(self) -> OperatorHost:
        self._check_open()
        return OperatorHost(self._next_place, self._run)

    def _next_place(self, name: str | None, by: Sequence[str], parallelism: int | None) -> OperatorPlace:
        self._check_open()
        uid = check_operator_name(f"operator-{len(self._operators) + 1}" if name is None else name)
        label = f"operator {uid!r}"
        partitions = self._parallelism
        if parallelism is not None:
            partitions = count_within(f"{label}: parallelism", parallelism, self.max_parallelism, _MAXIMUM)
        self._unnamed += name is None
        if self._unnamed and self._operators and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: operators without name= are found again by their order: where it changes, a restart is refused at "
                "best. Give each of them a name before the query has state that matters",
                self.location,
            )
        return OperatorPlace(uid=uid, by=tuple(by), parallelism=partitions, max_parallelism=self.max_parallelism)

    def _run(self, keyed: DataFrame, definition: TaskDefinition) -> DataFrame:
        if not self._local and has_state_of_spark(keyed):
            raise Invalid(f"operator {definition.uid!r}: {ON_A_CLUSTER}")
        check_input(keyed, definition, self._repeating)
        if definition.needs_watermark_batches:
            begin = partial(latest_watermark, self._store, system_runtime())
            keyed = self._watermarks.with_batches(keyed, lambda: self._loop.run(begin()))
        self._loop.run(definition.announce_to(self._service))
        self._operators.append(definition.uid)
        self._launcher.start()
        log_failures(keyed.sparkSession)
        task = OperatorTask(definition, self._service.address, self._secret, self._host, self._workers.freeze)
        return repartition(keyed, definition).mapInArrow(task, definition.operator.output_schema)

    def _reading(self) -> StateReading:
        self._check_open()
        return self._reader

    def _check_open(self) -> None:
        if self._closer is None or not self._closer.alive:
            raise Closed(f"this StateBackend of {self.location} was closed: make a new one")
