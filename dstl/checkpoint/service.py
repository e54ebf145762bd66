"""The coordinator's shell: serves tasks and TaskManagers, commits manifests, cleans up after subsumed checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dstl.checkpoint.assembly import assemble, inlined_handles
from dstl.checkpoint.coordinator import Acknowledgement, CheckpointCoordinator, Decision, TaskAttempt, Trigger
from dstl.checkpoint.fleet import Fleet, FleetChanged, Persisted
from dstl.checkpoint.launch_plan import LaunchPlan
from dstl.checkpoint.manifest_log import ManifestLog
from dstl.checkpoint.periodic_cleaner import PeriodicCleaner
from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.resource_manager import ExecutorHosts, ResourceManager
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.run_opening import RunOpening
from dstl.checkpoint.savepoint_format import Savepoint
from dstl.checkpoint.savepoint_restore import SavepointRestore
from dstl.checkpoint.state_catalogue import Registry, StateCatalogue, global_watermark
from dstl.checkpoint.truncation import recovery_work
from dstl.errors import (
    CheckpointDeclined,
    Closed,
    DstlError,
    Fenced,
    Invalid,
    MissingState,
    OutcomeUnknown,
    TaskManagerLost,
)
from dstl.options import CheckpointOptions, MaterializationOptions
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.taskmanager.client import Address
from dstl.taskmanager.protocol import Secret
from dstl.taskmanager.server import Peer, Reply, RpcServer
from handles.checkpoint import CompletedCheckpoint
from handles.segment_handle import SegmentHandle
from materializer.progress import ProgressListener

__all__ = ["CheckpointReport", "CoordinatorService", "RestoreReport"]

_log = logging.getLogger(__name__)
_MOST_WORKERS = 1024
_MOST_LOSSES = 3
_LEAST_COMMIT_S = 1.0
_MEASURABLE_BYTES = 4 << 20


class CoordinatorService:
    """One query's coordinator. One event loop, in the driver.

    Args:
        store: Where manifests go.
        runtime: Clock, randomness, ids.
        secret: The application's.
        options: Retention and deadlines.
        materialization: How many generations of bases are kept.
        max_parallelism: Number of key groups.
        task_managers: How many TaskManagers share them; None for one on each of the executors' hosts.
        host: This host's address, as others reach it.
        bind: Address to listen on, where it is another than ``host``.
        port: Port to listen on; 0 for any.
        task_manager_config: What a TaskManager is told when it enlists.
        executor_hosts: Counts the hosts of executors, whose tasks launch TaskManagers; None where others start them.
        merge_registries: See :class:`StateCatalogue`.
        allow_non_restored_state: See :class:`StateCatalogue`.
        on_event: Called with every report, on the coordinator's loop; must not block.
        on_task_manager_lost: Called when a TaskManager is gone, so that a launcher can start another.
        fall_back: See :class:`RunOpening`.
        on_progress: Told how far a restore has come, on the coordinator's loop; must not block. None: nobody asks.
    """

    def __init__(
        self,
        store: ObjectStore,
        runtime: Runtime,
        secret: Secret,
        *,
        options: CheckpointOptions,
        max_parallelism: int,
        task_managers: int | None,
        host: str,
        merge_registries: Callable[[Registry, Registry], Registry],
        allow_non_restored_state: bool,
        on_event: Callable[[CheckpointReport | RestoreReport], None],
        on_task_manager_lost: Callable[[str], None],
        materialization: MaterializationOptions = MaterializationOptions(),
        fall_back: bool = False,
        bind: str | None = None,
        port: int = 0,
        task_manager_config: bytes = b"",
        executor_hosts: Callable[[], Awaitable[ExecutorHosts]] | None = None,
        on_progress: ProgressListener | None = None,
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._options = options
        self._materialization = materialization
        self._restore_rate: float | None = None
        self._max_parallelism = max_parallelism
        self._host, self._bind, self._port = host, bind or host, port
        self._on_event = on_event
        self._on_task_manager_lost = on_task_manager_lost
        # The cleaner's requests are not the checkpoints'.
        self._counted = InstrumentedStore(store)
        self._log = ManifestLog(self._counted, runtime, skip_damaged=fall_back)
        self._catalogue = StateCatalogue(merge_registries, allow_non_restored_state=allow_non_restored_state)
        self._coordinator: CheckpointCoordinator | None = None
        self._operators: dict[str, int] = {}
        self._query_id = ""
        self._objects = RetainedObjects(store)
        self._fleet = Fleet(secret, task_managers or 1, max_parallelism, self._lost, host, on_progress)
        self._resources = ResourceManager(
            self._fleet,
            runtime,
            timeout_s=options.task_manager_timeout_s,
            plan=LaunchPlan() if executor_hosts is not None else None,
            hosts=executor_hosts,
            one_per_host=task_managers is None,
            config=task_manager_config,
        )
        self._runs = RunOpening(
            store.location,
            self._log,
            self._catalogue,
            self._fleet,
            runtime,
            max_parallelism=max_parallelism,
            fall_back=fall_back,
        )
        self._cleaner = PeriodicCleaner(store, runtime, self._log, self._fleet.writer_ids, options)
        self._retired: set[str] = set()
        self._opening = asyncio.Lock()
        self._checkpointing = asyncio.Lock()
        self.server = RpcServer(
            secret,
            {
                "enlist": self._resources.enlist,
                "register": self._resources.register,
                "begin": self._begin,
                "acknowledge": self._acknowledge,
            },
            watched=frozenset({"begin"}),
        )
        self._address: Address | None = None
        self._closing = False
        self._worker_pids: dict[int, None] = {}

    async def start(self) -> Address:
        """Listen, and return where."""
        self._address = Address(self._host, await self.server.listen_tcp(self._bind, self._port))
        return self._address

    async def close(self) -> None:
        """Stop listening; the TaskManagers notice and end. Idempotent."""
        self._closing = True
        self._fleet.close()
        await self.server.close()
        await self._cleaner.close()
        await self._objects.close()

    def expect(
        self,
        operator: str,
        parallelism: int,
        key_types: str,
        watermark_delay_ms: int | None = None,
        resolve: Callable[[Registry | None], Registry] | None = None,
    ) -> None:
        """Add a stateful operator to the set whose acknowledgements complete a checkpoint.

        The arguments are those of :meth:`StateCatalogue.expect`.

        Raises:
            Invalid: The name is taken, or the query runs already.
        """
        if operator in self._operators:
            raise Invalid(f"two operators are called {operator!r}: give each a name of its own")
        if self._coordinator is not None or self._retired:
            raise Invalid("an operator was added while the query runs: define all of them before start()")
        self._operators[operator] = parallelism
        self._catalogue.expect(operator, parallelism, key_types, watermark_delay_ms, resolve)

    async def start_from(self, restore: SavepointRestore) -> Savepoint | None:
        """Let the query begin with a savepoint's state: see :meth:`RunOpening.start_from`."""
        return await self._runs.start_from(restore)

    def hold(self) -> tuple[CompletedCheckpoint, int]:
        """Return the last completed checkpoint, and a hold: its objects stay until :meth:`release`.

        Raises:
            MissingState: No checkpoint has completed yet.
        """
        if not self.completed:
            raise MissingState(f"{self._store.location} has no completed checkpoint yet: wait for the first batch")
        return self.completed[-1], self._objects.hold(self.completed[-1])

    def release(self, hold: int) -> None:
        """Let go of what :meth:`hold` returned."""
        self._objects.release(hold)

    @property
    def address(self) -> Address:
        """Where it listens.

        Raises:
            Closed: It has not been started.
        """
        if self._address is None:
            raise Closed("the coordinator has not been started")
        return self._address

    @property
    def fleet(self) -> Fleet:
        """The TaskManagers."""
        return self._fleet

    @property
    def worker_pids(self) -> Sequence[int]:
        """Process ids of the workers that have begun tasks, dead ones included; the latest last."""
        return tuple(self._worker_pids)

    @property
    def completed(self) -> Sequence[CompletedCheckpoint]:
        """Retained checkpoints, oldest first; empty before the query has begun."""
        return self._coordinator.completed if self._coordinator else ()

    async def _begin(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        task = _task(call)
        self._note_worker(int(call["pid"]))
        coordinator, parent, losses = None, None, 0
        while coordinator is None:
            self._check_run(task)
            launch = await self._resources.staffed(task.run_id, peer, call)
            if launch is not None:
                return {"launch": launch}, b""
            async with self._opening:
                if peer.is_gone:
                    raise Closed(f"attempt {task.attempt_id} of {task.operator} has gone while it waited for its turn")
                try:
                    coordinator, parent = await self._begun(task)
                except FleetChanged as error:
                    # This task goes on as soon as another one is there; unless the state is what kills them.
                    losses += 1
                    if losses == _MOST_LOSSES:
                        raise TaskManagerLost(*error.args) from error
        return {
            "parent": parent.checkpoint_id if parent else None,
            "watermark": parent.watermark_ms if parent else None,
            "late_watermark": parent.late_watermark_ms if parent else None,
            "sequence": self._log.next_sequence + (parent.sequence_base if parent else 0),
            "processing_time_ms": coordinator.batch_time_ms,
            "registry": self._catalogue.known(task.operator),
            "assignments": [
                [a.key_groups.start, a.key_groups.end, a.address.to_wire()] for a in self._fleet.assignments
            ],
        }, b""

    async def _begun(self, task: TaskAttempt) -> tuple[CheckpointCoordinator, CompletedCheckpoint | None]:
        coordinator = await self._opened(task)
        parent = coordinator.begin(task, self._now_ms())
        if not self._fleet.holds(parent.checkpoint_id if parent else None):
            await self._fleet.prepare(task.query_id, parent)
        return coordinator, parent

    async def _acknowledge(self, peer: Peer, call: dict[str, Any], payload: memoryview) -> Reply:
        task = _task(call)
        coordinator = self._running(task)
        self._catalogue.report(task.operator, call["registry"])
        ack = Acknowledgement(task, call["partition"], bytes(call["digest"]), call["event_time_ms"])
        decision = coordinator.acknowledge(ack)
        if decision is Decision.WAIT:
            async with self._checkpointing:
                # Meanwhile the run may have ended, or the batch have failed with another's checkpoint.
                decision = self._running(task).acknowledge(ack)
                trigger = coordinator.trigger()
                if decision is Decision.WAIT and trigger is not None:
                    await self._checkpoint(coordinator, trigger)
        return {"decision": decision.name}, b""

    def _running(self, task: TaskAttempt) -> CheckpointCoordinator:
        coordinator = self._coordinator
        if coordinator is None or task.run_id != coordinator.run_id:
            raise Fenced(f"run {task.run_id} of query {task.query_id} is over, or this driver has restarted since")
        return coordinator

    def _check_run(self, task: TaskAttempt) -> None:
        if task.run_id in self._retired:
            raise Fenced(f"run {task.run_id} of query {task.query_id} is over: a newer one has replaced it")
        if self._query_id and task.query_id != self._query_id:
            raise Invalid(
                f"query {task.query_id} uses a StateBackend that serves query {self._query_id}: "
                "make one StateBackend per streaming query"
            )

    async def _opened(self, task: TaskAttempt) -> CheckpointCoordinator:
        """Return the coordinator of the task's run; a new run takes the location over first."""
        self._check_run(task)
        if self._coordinator is not None and task.run_id == self._coordinator.run_id:
            return self._coordinator
        started = self._runtime.clock.now()
        async with self._checkpointing:
            # A checkpoint of the run before ends first, one way or the other; then that run can commit nothing more.
            if self._coordinator is not None:
                self._retired.add(self._coordinator.run_id or "")
                self._coordinator = None
        # A record that is being deleted is not to be found and then missed.
        await self._objects.settled()
        opened = await self._runs.open(task, self._operators)
        self._objects.retain(opened.found)
        self._coordinator, self._query_id = opened.coordinator, task.query_id
        seconds = self._runtime.clock.now() - started
        parent_id = opened.parent.checkpoint_id if opened.parent else None
        _log.info("run %s goes on from checkpoint %s after %.3f s", task.run_id, parent_id, seconds)
        read = opened.restored
        if read["bytes"] >= _MEASURABLE_BYTES and read["seconds"] > 0:
            self._restore_rate = read["bytes"] / read["seconds"]
        self._on_event(
            RestoreReport(
                task.run_id,
                parent_id,
                seconds,
                read["bytes"],
                read["changes"],
                opened.lost_batches,
                opened.skipped,
            )
        )
        self._cleaner.start()
        return opened.coordinator

    def _note_worker(self, pid: int) -> None:
        self._worker_pids.pop(pid, None)
        self._worker_pids[pid] = None
        while len(self._worker_pids) > _MOST_WORKERS:
            del self._worker_pids[next(iter(self._worker_pids))]

    async def _checkpoint(self, coordinator: CheckpointCoordinator, trigger: Trigger) -> None:
        started = self._runtime.clock.now()
        requests = self._requests()
        try:
            persisted = await self._fleet.persist(trigger.winners, self._options.timeout_s)
            checkpoint, inlined = self._assembled(coordinator, trigger, persisted)
            left = self._options.timeout_s - (self._runtime.clock.now() - started)
            await self._commit(checkpoint, inlined, coordinator.oldest_after(trigger, self._options.retained), left)
        except (Fenced, OutcomeUnknown) as error:
            # It may be there, or come: its objects must stay, and the run cannot go on before that is known. That holds
            # for a fenced driver too: its record may have been committed before the newer one began, which retains it.
            coordinator.fail_batch(error)
            raise
        except (DstlError, ValueError) as error:
            await self._fleet.abort()
            if isinstance(error, TaskManagerLost):
                raise
            raise CheckpointDeclined(f"the checkpoint of batch {trigger.batch_id} failed: {error}") from error
        located = _located(checkpoint, persisted)
        await self._fleet.complete(checkpoint, trigger.winners, located, coordinator.batch_time_ms)
        subsumed = coordinator.complete(trigger, checkpoint, self._options.retained)
        self._objects.retain([checkpoint])
        self._objects.subsume(subsumed)
        self._on_event(
            CheckpointReport(
                checkpoint.checkpoint_id,
                trigger.batch_id,
                self._runtime.clock.now() - started,
                persisted.requests + self._requests() - requests,
                sum(s.handle.size for part in persisted.parts for s in part.segments),
                checkpoint.full_bytes,
                len(located),
                sum(len(part.materializations) for part in persisted.parts),
                self._estimated_recovery_s(checkpoint),
            )
        )

    def _assembled(
        self, coordinator: CheckpointCoordinator, trigger: Trigger, persisted: Persisted
    ) -> tuple[CompletedCheckpoint, list[bytes]]:
        parent = next((c for c in coordinator.completed if c.checkpoint_id == trigger.parent), None)
        operators = self._catalogue.entries(coordinator.event_times())
        return assemble(
            parent,
            persisted.parts,
            sequence=self._log.next_sequence,
            batch_id=trigger.batch_id,
            query_id=self._query_id,
            run_id=coordinator.run_id or "",
            max_parallelism=self._max_parallelism,
            created_at=self._runtime.clock.wall(),
            watermark_ms=global_watermark(operators),
            operators=operators,
            generations=self._materialization.generations,
        )

    async def _commit(
        self, checkpoint: CompletedCheckpoint, inlined: Sequence[bytes], oldest: int, seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(max(seconds, _LEAST_COMMIT_S)):
                await self._log.commit(checkpoint, inlined, oldest=oldest)
        except TimeoutError:
            # The request that was cancelled may still be carried out.
            raise OutcomeUnknown(
                f"whether checkpoint {checkpoint.checkpoint_id} of batch {checkpoint.batch_id} is in "
                f"{self._store.location} is unknown, for the store does not answer: restart the query, which finds out"
            ) from None

    def _estimated_recovery_s(self, checkpoint: CompletedCheckpoint) -> float:
        work = recovery_work(checkpoint)
        rate = self._restore_rate or self._materialization.replay_bytes_per_s * self._fleet.wanted
        return work.bytes / rate + work.segments * self._materialization.replay_segment_s

    def _now_ms(self) -> int:
        return int(self._runtime.clock.wall() * 1000)

    def _requests(self) -> int:
        return self._counted.totals.calls - self._counted.totals.delete.calls

    def _lost(self, member_id: str) -> None:
        if self._closing:
            return
        _log.warning("TaskManager %s is gone", member_id)
        if self._coordinator is not None:
            self._coordinator.fail_batch(
                TaskManagerLost(f"TaskManager {member_id} died with changes of the running batch: restart the query")
            )
        self._on_task_manager_lost(member_id)


def _located(checkpoint: CompletedCheckpoint, persisted: Persisted) -> dict[str, SegmentHandle]:
    """Return, by seal id, where the manifest holds each inlined segment."""
    seals = [seal for seals in persisted.seals for seal in seals]
    return dict(zip(seals, inlined_handles(persisted.parts, checkpoint.checkpoint_id), strict=True))


def _task(call: Mapping[str, Any]) -> TaskAttempt:
    return TaskAttempt(
        query_id=str(call["query"]),
        run_id=str(call["run"]),
        operator=str(call["operator"]),
        batch_id=int(call["batch"]),
        slot=int(call["slot"]),
        stage_id=int(call["stage"]),
        attempt_id=int(call["attempt"]),
        invocation=str(call.get("invocation", "")),
    )
