"""A run of the query takes its location over, and goes on from one of its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.fleet.fleet import Fleet
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.savepoint.format import Savepoint
from dstl.checkpoint.savepoint.restore import SavepointRestore
from dstl.checkpoint.spark_commit import SparkDirectory
from dstl.checkpoint.state_catalogue import StateCatalogue
from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Fenced, Invalid, MissingState
from dstl.rpc.fleet_messages import Restored
from dstl.rpc.messages import TaskAttempt
from dstl.runtime import Runtime
from handles.checkpoint import CompletedCheckpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that may work.

    Attributes:
        coordinator: Its state machine; its first batch has begun.
        parent: The checkpoint that it goes on from; None for an empty state.
        epoch: The manifest log's when it was read.
        found: All retained checkpoints, then.
        restored: The figures of the restore.
        lost_batches: Batches whose effects the parent lacks; above 0 only where an older checkpoint was chosen.
        skipped: Why newer checkpoints were passed over.
        savepoint_batch: The last micro-batch in the savepoint that the run has begun with; None without one.
    """

    coordinator: CheckpointCoordinator
    parent: CompletedCheckpoint | None
    epoch: int
    found: Sequence[CompletedCheckpoint]
    restored: Restored
    lost_batches: int
    skipped: tuple[str, ...]
    savepoint_batch: int | None = None


class RunOpening:
    """Opens the runs of one query, one at a time.

    Args:
        log: The location's manifest log, this driver's view.
        catalogue: The query's operators.
        fleet: The TaskManagers.
        runtime: Clock.
        max_parallelism: Number of key groups.
        fall_back: Where the checkpoint of the batch before a run's first cannot be read or restored, go on from the
            newest older one that can: what the batches in between did is lost, is logged, and is in the report.
        clock_hold_s: See :class:`~dstl.options.CheckpointOptions`.
    """

    def __init__(
        self,
        log: ManifestLog,
        catalogue: StateCatalogue,
        fleet: Fleet,
        runtime: Runtime,
        *,
        max_parallelism: int,
        fall_back: bool = False,
        clock_hold_s: float = 0.0,
    ) -> None:
        self._location = log.store.location
        self._log = log
        self._catalogue = catalogue
        self._fleet = fleet
        self._runtime = runtime
        self._max_parallelism = max_parallelism
        self._fall_back = fall_back
        self._clock_hold_ms = int(clock_hold_s * 1000)
        self._savepoint: tuple[SavepointRestore, Savepoint | None] | None = None
        self._refused: tuple[str, DstlError] | None = None

    async def start_from(self, restore: SavepointRestore) -> Savepoint | None:
        """Let the query begin with a savepoint's state; None where it has checkpoints of its own, which come first.

        Raises:
            DstlError: As :meth:`SavepointRestore.load`.
        """
        scan = await self._log.scan()
        is_new = not scan.retained and not scan.damaged
        if not is_new:
            _log.info("%s has checkpoints of its own: %s is not restored", self._location, restore)
        self._savepoint = restore, await restore.load(self._max_parallelism) if is_new else None
        return self._savepoint[1]

    async def open(self, task: TaskAttempt, operators: Mapping[str, int], directory: SparkDirectory) -> OpenedRun:
        """Fence every older driver off, choose the checkpoint, and bring the TaskManagers to it.

        A run fences once, however many of its tasks try to open it, and what it was refused for stays refused.

        Args:
            task: The first of its run.
            operators: Parallelism of each operator.
            directory: Spark's checkpoint directory: its commits say which checkpoints there are.

        Raises:
            Invalid: The location is another query's, or its state does not fit this one.
            Fenced: A newer driver has taken over.
            MissingState: The batch before the task's has no checkpoint, or a part of it is not there.
            CorruptData: A manifest, or a part of the checkpoint, is damaged.
            TaskManagerLost: A TaskManager is missing.
            Unavailable: The store did not answer.
        """
        if self._refused is not None and self._refused[0] == task.run_id:
            error = self._refused[1]
            raise type(error)(*error.args)
        try:
            return await self._open(task, operators, directory)
        except (Fenced, Invalid, MissingState) as error:
            self._refused = task.run_id, error
            raise

    async def prepare(self, query_id: str, parent: CompletedCheckpoint | None) -> Restored:
        """Bring every TaskManager to a checkpoint, as :meth:`Fleet.prepare` does.

        Raises:
            Fenced: It cannot be, because another driver has taken the location over and needs its objects no more.
            DstlError: As :meth:`Fleet.prepare`.
        """
        try:
            return await self._fleet.prepare(query_id, parent)
        except (CorruptData, MissingState) as error:
            await self._check_leads(error)
            raise

    async def _check_leads(self, error: DstlError) -> None:
        """Look whether something is missing only because another driver has taken the location over.

        Raises:
            Fenced: It has.
        """
        try:
            await self._log.check_leads()
        except Fenced as fenced:
            raise fenced from error
        except DstlError as unknown:
            _log.warning("whether another driver has taken %s over is unknown: %s", self._location, unknown)

    async def _open(self, task: TaskAttempt, operators: Mapping[str, int], directory: SparkDirectory) -> OpenedRun:
        await directory.lead(task.query_id)
        skipped: list[str] = []
        epoch = self._log.epoch
        reach("C11")
        found = await self._find_checkpoints(task, operators, skipped)
        # A commit that was taken back, by a user who rolls back, takes its checkpoint with it.
        found = [each for each in found if each.batch_id <= directory.newest_commit()]
        reach("R1")
        try:
            coordinator, parent, restored = await self._prepare(task, operators, found, skipped, directory)
        except MissingState as error:
            # Spark's directory leads once a process: this one may have been paused since, and looked with an old index.
            await self._check_leads(error)
            raise
        reach("R6")
        lost = task.batch_id - 1 - parent.batch_id if parent else 0
        if parent is not None and lost:
            _log.warning(
                "query %s goes on with batch %d from checkpoint %d of batch %d: what %d batches did to the state is "
                "lost, as restore='previous' allows. Skipped: %s",
                task.query_id,
                task.batch_id,
                parent.checkpoint_id,
                parent.batch_id,
                lost,
                "; ".join(skipped) or "nothing, for nothing was there",
            )
        begun_with = self._savepoint[1] if self._savepoint is not None and len(found) == 1 else None
        saved = begun_with.batch_id if begun_with is not None and parent is not None else None
        return OpenedRun(coordinator, parent, epoch, found, restored, lost, tuple(skipped) if lost else (), saved)

    async def _find_checkpoints(
        self, task: TaskAttempt, operators: Mapping[str, int], skipped: list[str]
    ) -> list[CompletedCheckpoint]:
        """Return the retained checkpoints; with the first made of the savepoint, where there are none."""
        if self._fall_back:
            scan = await self._log.scan()
            found = scan.retained
            skipped += [str(error) for _, error in sorted(scan.damaged.items())]
            for error in scan.damaged.values() if not found else ():
                # Nothing older can be read: an empty state would not be an older one, but another one.
                raise error
        else:
            found = await self._log.checkpoints()
        self._check_max_parallelism(found)
        if self._savepoint is None or skipped:
            return found
        restore, savepoint = self._savepoint
        if not found and savepoint is not None:
            if task.batch_id == 0:
                _log.warning(
                    "%s holds the state after batch %d, and the query's checkpointLocation is new, at batch 0: its "
                    "sources are read from their start, or from where their options say, and what the state has seen "
                    "already counts twice. To go on just behind the savepoint, stop the query now and start it with "
                    "the checkpointLocation of the query that the savepoint was made of, and a new location",
                    restore,
                    savepoint.batch_id,
                )
            first = await restore.first_checkpoint(
                savepoint,
                checkpoint_id=self._log.next_sequence,
                batch_id=task.batch_id - 1,
                query_id=task.query_id,
                run_id=task.run_id,
                operators=operators,
                check=self._catalogue.open,
            )
            await self._log.commit(first, [])
            found = [first]
        await restore.settle(task.query_id, found)
        return found

    async def _prepare(
        self,
        task: TaskAttempt,
        operators: Mapping[str, int],
        found: Sequence[CompletedCheckpoint],
        skipped: list[str],
        directory: SparkDirectory,
    ) -> tuple[CheckpointCoordinator, CompletedCheckpoint | None, Restored]:
        """Bring the TaskManagers to the checkpoint of the batch before; where that may be, to an older one instead."""
        planned_ms = await directory.batch_time_ms(task.batch_id, task.run_id)
        now_ms = int(self._runtime.clock.wall() * 1000) if planned_ms is None else planned_ms
        while True:
            coordinator = CheckpointCoordinator(operators, clock_hold_ms=self._clock_hold_ms)
            older = [c for c in found if c.batch_id < task.batch_id] if self._fall_back else []
            coordinator.open_run(task.run_id, found, older[-1] if older else None)
            parent = coordinator.begin(task, now_ms)
            self._catalogue.open(parent)
            self._fleet.begin_run()
            try:
                return coordinator, parent, await self.prepare(task.query_id, parent)
            except (CorruptData, MissingState) as error:
                older = [c for c in found if parent is not None and c.checkpoint_id < parent.checkpoint_id]
                if not self._fall_back or not older:
                    raise
                skipped.append(str(error))
                found = older

    def _check_max_parallelism(self, found: Sequence[CompletedCheckpoint]) -> None:
        for checkpoint in found[-1:]:
            if checkpoint.max_parallelism != self._max_parallelism:
                raise Invalid(
                    f"{self._location} was made with max_parallelism={checkpoint.max_parallelism}; this backend "
                    f"has {self._max_parallelism}: pass the first one, or begin a new location with a savepoint that "
                    "dstl.spark.transform_savepoint has made for the other"
                )
