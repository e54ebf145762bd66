"""The coordinator's shell: serves tasks and TaskManagers, opens runs, and lets checkpoints be made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from dstl.checkpoint.base_publication import BasePublication
from dstl.checkpoint.checkpoint_execution import CheckpointExecution
from dstl.checkpoint.checkpoint_queue import CheckpointQueue
from dstl.checkpoint.committed_runs import CommittedRuns
from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.fleet.fleet import Fleet, FleetChanged
from dstl.checkpoint.fleet.lookups import Lookups
from dstl.checkpoint.fleet.metrics_poll import MemberMetrics, MetricsPoll
from dstl.checkpoint.fleet.own_connections import OwnConnections
from dstl.checkpoint.fleet.resource_manager import ExecutorHosts, ResourceManager
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.manifest.reader import ATTEMPTS
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.run_opening import RunOpening
from dstl.checkpoint.spark_commit import SparkExecution, SparkWatermark, WatermarkReader
from dstl.checkpoint.state_catalogue import ExpectedOperator, StateCatalogue
from dstl.checkpoint.upkeep.cleaner import LiveDriver, PeriodicCleaner
from dstl.errors import Closed, Fenced, Invalid, MissingState, TaskManagerLost
from dstl.metrics import NullRecorder, Recorder
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.rpc.client import Address
from dstl.rpc.fleet_messages import Enlist, Register
from dstl.rpc.messages import Acknowledgement, Assignment, Begin, Begun, Done, TaskAttempt
from dstl.rpc.protocol import Secret
from dstl.rpc.server import Peer, RpcServer
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.instrumented import CallMetrics, InstrumentedStore
from handles.checkpoint import CompletedCheckpoint
from materializer.restore.progress import ProgressListener

_log = logging.getLogger(__name__)
_MOST_WORKERS = 1024  # the oldest of so many workers are long gone
_MOST_LOSSES = 3  # chance takes one or two in a row, a state that kills them takes each
_DRIVER_CALLS = CallMetrics(
    "driverStoreRequests", "driverStoreRequestNanos", "driverStoreRequestBytes", "driverStoreRequestFailures"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """The settings of one query's coordinator.

    Attributes:
        options: Retention and deadlines.
        materialization: How many generations of bases are kept, and when they are published without a batch.
        max_parallelism: Number of key groups.
        task_managers: How many TaskManagers share them; None for as many as the executors' hosts and slots ask for.
        host: This host's address, as others reach it.
        bind: Address to listen on, where it is another than ``host``.
        port: Port to listen on; 0 for any.
        task_manager_config: What a TaskManager is told when it enlists.
        task_managers_elsewhere: TaskManagers run on other hosts: before it serves, each has to show that it sees this
            very store.
        allow_non_restored_state: See :class:`StateCatalogue`.
        fall_back: See :class:`RunOpening`.
        commit_attempts: How often a request to the manifest log is tried.
    """

    options: CheckpointOptions
    materialization: MaterializationOptions = field(default_factory=MaterializationOptions)
    max_parallelism: int
    task_managers: int | None
    host: str
    bind: str | None = None
    port: int = 0
    task_manager_config: bytes = b""
    task_managers_elsewhere: bool = False
    allow_non_restored_state: bool
    fall_back: bool = False
    commit_attempts: int = ATTEMPTS


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverHooks:
    """The driver as its coordinator calls it, on the coordinator's loop; none of them may block.

    Attributes:
        on_event: Called with every report.
        on_task_manager_lost: Called when a TaskManager is gone, so that a launcher can start another.
        on_progress: Told how far a restore has come, if given.
        executor_hosts: Counts the hosts of executors, whose tasks launch TaskManagers; None where others start them.
        execution: Spark's, of the query; None: nothing is refused, and nothing run again.
        spark_watermarks: See :class:`SparkWatermark`; asked where an operator goes by Spark's watermark.
        recorder: The driver's metrics.
    """

    on_event: Callable[[CheckpointReport | RestoreReport], None]
    on_task_manager_lost: Callable[[str], None]
    on_progress: ProgressListener | None = None
    executor_hosts: Callable[[], Awaitable[ExecutorHosts]] | None = None
    execution: SparkExecution | None = None
    spark_watermarks: WatermarkReader | None = None
    recorder: Recorder = field(default_factory=NullRecorder)


class CoordinatorService:
    """One query's coordinator. One event loop, in the driver.

    Attributes:
        fleet: The TaskManagers.
        query_id: Spark's id of the query that it serves; empty before the first task.

    Args:
        store: Where manifests go.
        runtime: Clock, randomness, ids.
        secret: The application's.
        settings: Retention, size and addresses.
        hooks: What it calls.
    """

    def __init__(
        self, store: ObjectStore, runtime: Runtime, secret: Secret, settings: CoordinatorSettings, hooks: DriverHooks
    ) -> None:
        options, recorder = settings.options, hooks.recorder
        self._store = store
        self._runtime = runtime
        self._host, self._bind, self._port = settings.host, settings.bind or settings.host, settings.port
        self._on_event = hooks.on_event
        self._on_task_manager_lost = hooks.on_task_manager_lost
        # The cleaner's requests are not the checkpoints'.
        counted = InstrumentedStore(store, recorder=recorder, names=_DRIVER_CALLS)
        self._log = ManifestLog(
            counted,
            runtime,
            attempts=settings.commit_attempts,
            skip_damaged=settings.fall_back,
            history=options.history,
        )
        self._catalogue = StateCatalogue(allow_non_restored_state=settings.allow_non_restored_state)
        self._coordinator: CheckpointCoordinator | None = None
        self._operators: dict[str, int] = {}
        self.query_id = ""
        self._objects = RetainedObjects(store, recorder)
        self.fleet = Fleet(
            secret,
            settings.task_managers or 1,
            settings.max_parallelism,
            self._lost,
            settings.host,
            hooks.on_progress,
            options.task_manager_timeout_s,
        )
        self._resources = ResourceManager(
            self.fleet,
            runtime,
            timeout_s=options.task_manager_timeout_s,
            hosts=hooks.executor_hosts,
            follows_hosts=settings.task_managers is None,
            config=settings.task_manager_config,
            shared=store if settings.task_managers_elsewhere else None,
        )
        self.runs = RunOpening(
            self._log,
            self._catalogue,
            self.fleet,
            runtime,
            max_parallelism=settings.max_parallelism,
            fall_back=settings.fall_back,
            clock_hold_s=options.clock_hold_s,
        )
        self._execution = CheckpointExecution(
            counted,
            self._log,
            self.fleet,
            self._catalogue,
            self._objects,
            options=options,
            materialization=settings.materialization,
        )
        self._cleaner = PeriodicCleaner(
            store, runtime, LiveDriver(lambda: self._log.epoch, self.fleet.writer_ids, self._objects.held), options
        )
        self._execution_of_spark = hooks.execution
        self._poll = MetricsPoll(secret, self.fleet, settings.host)
        self.lookups = Lookups(
            OwnConnections(secret, settings.host),
            self.fleet,
            self._catalogue,
            lambda: self._coordinator,
            hooks.execution,
            runtime.clock,
        )
        self._sparks = SparkWatermark(hooks.spark_watermarks)
        self._opening = asyncio.Lock()
        self.bases = BasePublication(
            self._execution,
            self.fleet,
            (self._opening, self._log.turn),
            lambda: (self._coordinator, self.query_id) if self._coordinator is not None else None,
            runtime.clock,
            settings.materialization.publish_within_s,
            recorder,
        )
        self._queue = CheckpointQueue(self._execution, self._log, self._sparks, runtime, recorder, hooks.on_event)
        self.commits = CommittedRuns(
            self._log, self._objects, self._queue, self._operators, lambda: self._coordinator, hooks.execution
        )
        self.server = RpcServer(
            secret,
            {
                Enlist: self._resources.enlist,
                Register: self._resources.register,
                Begin: self._begin,
                Acknowledgement: self._acknowledge,
            },
        )
        self._address: Address | None = None
        self._closing = False
        self._worker_pids: dict[int, None] = {}

    async def start(self) -> Address:
        """Listen, and return where.

        Raises:
            Invalid: As :meth:`RpcServer.listen_tcp`.
        """
        self._address = Address(self._host, await self.server.listen_tcp(self._bind, self._port, self._host))
        return self._address

    async def close(self) -> None:
        """Stop listening; the TaskManagers notice and end. Idempotent."""
        self._closing = True
        self._poll.close()
        self.lookups.close()
        self.fleet.close()
        await self.server.close()
        await self.bases.close()
        await self._cleaner.close()
        await self._objects.close()

    def expect(self, operator: ExpectedOperator) -> None:
        """Add a stateful operator.

        Raises:
            Invalid: The name is taken, the query runs already, or it follows an operator that has not been added.
        """
        if operator.uid in self._operators:
            raise Invalid(
                f"two operators are called {operator.uid!r}: give each a name of its own; to define the same one "
                "again, as a cell of a notebook does that runs twice, close the StateBackend and make a new one"
            )
        if self.query_id:
            raise Invalid("an operator was added while the query runs: define all of them before start()")
        self._operators[operator.uid] = operator.parallelism
        self._catalogue.expect(operator)

    def hold(self) -> tuple[CompletedCheckpoint, int]:
        """Return the last completed checkpoint, and a hold: its objects stay until :meth:`release`.

        Raises:
            MissingState: No checkpoint has completed yet.
        """
        if not self.completed:
            raise MissingState(
                f"{self._store.location} has no completed checkpoint in this run yet: wait for "
                "its first batch, or copy a stopped query's last one with dstl savepoint create"
            )
        return self.completed[-1], self._objects.hold(self.completed[-1])

    def release(self, hold: int) -> None:
        """Let go of what :meth:`hold` returned."""
        self._objects.release(hold)

    @property
    def address(self) -> Address:
        """The address that it listens at.

        Raises:
            Closed: It has not been started.
        """
        if self._address is None:
            raise Closed("the coordinator has not been started")
        return self._address

    @property
    def worker_pids(self) -> Sequence[int]:
        """Process ids of the workers that have begun tasks, dead ones included; the latest last."""
        return tuple(self._worker_pids)

    @property
    def completed(self) -> Sequence[CompletedCheckpoint]:
        """Retained checkpoints, oldest first; empty before the query has begun."""
        return self._coordinator.completed if self._coordinator else ()

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """The last checkpoints, failures and restores, oldest first."""
        return self._log.history.entries

    async def task_manager_metrics(self) -> Sequence[MemberMetrics]:
        """Return the metrics of every TaskManager, asked for now."""
        return await self._poll.read()

    async def _begin(self, peer: Peer, call: Begin) -> Begun:
        task = self.commits.place(call.task)
        self._note_worker(call.pid)
        coordinator, parent, losses = None, None, 0
        assignments: tuple[Assignment, ...] = ()
        while coordinator is None:
            self._check_query(task)
            self.commits.directory_of(task)
            launch = await self._resources.wait_for_fleet(peer, call, task.run_id)
            if launch is not None:
                return Begun(launch)
            async with self._opening:
                if peer.is_gone:
                    raise Closed(f"attempt {task.attempt_id} of {task.operator} has gone while it waited for its turn")
                try:
                    coordinator, parent = await self._begun(task)
                    # Now: what is awaited from here on may bring other owners, to whom the task would be unknown.
                    assignments = tuple(self.fleet.assignments)
                except FleetChanged as error:
                    # This task goes on as soon as another one is there; unless the state is what kills them.
                    losses += 1
                    if losses == _MOST_LOSSES:
                        raise TaskManagerLost(*error.args) from error
            if coordinator is not None:
                number = coordinator.number_of(task)
                task = task if task.attempt_id == number else replace(task, attempt_id=number)
        watermark_ms, late_ms = (parent.watermark_ms, parent.late_watermark_ms) if parent else (None, None)
        if self._catalogue.goes_by_spark(task.operator):
            watermark_ms, late_ms = await self._sparks.of_batch(task)
        return Begun(
            attempt=task.attempt_id,
            parent=parent.checkpoint_id if parent else None,
            watermark_ms=watermark_ms,
            late_watermark_ms=late_ms,
            sequence=parent.sequence_base + parent.checkpoint_id + 1 if parent else 1,
            processing_time_ms=coordinator.batch_time.ms,
            registry=self._catalogue.registry_of(task.operator),
            assignments=assignments,
        )

    async def _begun(self, task: TaskAttempt) -> tuple[CheckpointCoordinator, CompletedCheckpoint | None]:
        coordinator = await self._open_run(task)
        planned_ms = await self.commits.directory_of(task).batch_time_ms(task.batch_id, task.run_id)
        now_ms = int(self._runtime.clock.wall() * 1000) if planned_ms is None else planned_ms
        parent = coordinator.begin(task, now_ms)
        if (warning := coordinator.take_clock_warning()) is not None:
            _log.warning("query %s: %s", task.query_id, warning)
        if not self.fleet.holds(parent.checkpoint_id if parent else None):
            await self.runs.prepare(task.query_id, parent)
        return coordinator, parent

    async def _acknowledge(self, peer: Peer, call: Acknowledgement) -> Done:
        task = self.commits.place(call.task)
        coordinator = self._coordinator
        if coordinator is None or task.run_id != coordinator.run_id:
            raise Fenced(f"run {task.run_id} of query {task.query_id} is over, or this driver has restarted since")
        coordinator.end(call if task is call.task else replace(call, task=task))
        return Done()

    def _check_query(self, task: TaskAttempt) -> None:
        if self.query_id and task.query_id != self.query_id:
            raise Invalid(
                f"query {task.query_id} uses a StateBackend that serves query {self.query_id}: "
                "make one StateBackend per streaming query"
            )

    async def _open_run(self, task: TaskAttempt) -> CheckpointCoordinator:
        """Return the coordinator of the task's run; a new run takes the location over first."""
        directory = self.commits.directory_of(task)
        if self._coordinator is not None and task.run_id == self._coordinator.run_id:
            return self._coordinator
        if self._execution_of_spark is not None:
            await self._execution_of_spark.check(task.query_id)
        started = self._runtime.clock.now()
        # A checkpoint of the run before ends first, one way or the other; then that run can commit nothing more.
        await self._queue.ended()
        self._coordinator = None
        # A record that is being deleted is not to be found and then missed.
        await self._objects.settled()
        opened = await self.runs.open(task, self._operators, directory)
        self._objects.retain(opened.found)
        self.commits.opened(opened.epoch)
        self._coordinator, self.query_id = opened.coordinator, task.query_id
        seconds = self._runtime.clock.now() - started
        parent_id = opened.parent.checkpoint_id if opened.parent else None
        begins = f"goes on from checkpoint {parent_id}" if opened.parent else "begins with empty state"
        _log.info("run %s %s, after %.3f s", task.run_id, begins, seconds)
        read = opened.restored
        self._execution.note_restore(read.bytes, read.seconds)
        self._queue.note(
            "restore", checkpoint_id=parent_id or 0, batch_id=task.batch_id, seconds=seconds, new_bytes=read.bytes
        )
        self._on_event(
            RestoreReport(
                task.run_id,
                parent_id,
                seconds,
                read.bytes,
                read.changes,
                opened.lost_batches,
                opened.skipped,
                task.batch_id,
                opened.savepoint_batch,
            )
        )
        self._cleaner.start()
        self.bases.start()
        return opened.coordinator

    def _note_worker(self, pid: int) -> None:
        self._worker_pids.pop(pid, None)
        self._worker_pids[pid] = None
        while len(self._worker_pids) > _MOST_WORKERS:
            del self._worker_pids[next(iter(self._worker_pids))]

    def _lost(self, member_id: str) -> None:
        if self._closing:
            return
        _log.warning("TaskManager %s is gone", member_id)
        if self._coordinator is not None and not self.fleet.has_all_owners:
            self._coordinator.fail_batch(
                TaskManagerLost(f"TaskManager {member_id} died with changes of the running batch: restart the query")
            )
        self._on_task_manager_lost(member_id)
