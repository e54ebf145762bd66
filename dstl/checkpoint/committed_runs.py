"""Runs of a query that Spark commits in the log of its checkpoints, and the checkpoints that their commits make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from dstl.checkpoint.checkpoint_turns import CheckpointTurns
from dstl.checkpoint.coordinator import CheckpointCoordinator, Trigger, nobody_consumed
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.spark_commit import CommitFiles, SparkDirectory
from dstl.rpc.messages import TaskAttempt

__all__ = ["CommittedRuns"]


class CommittedRuns:
    """Joins Spark's checkpoint directory to a query's checkpoints. One event loop.

    Args:
        log: The query's manifest log.
        objects: Deletes what neither half needs.
        turns: Makes checkpoints.
        operators: Parallelism by operator; the caller adds to it.
        running: Returns the coordinator of the run that is open; None where none is.
    """

    def __init__(
        self,
        log: ManifestLog,
        objects: RetainedObjects,
        turns: CheckpointTurns,
        operators: Mapping[str, int],
        running: Callable[[], CheckpointCoordinator | None],
    ) -> None:
        self._log = log
        self._objects = objects
        self._turns = turns
        self._operators = operators
        self._running = running
        self._directory: SparkDirectory | None = None
        self._free: list[str] = []
        self._known = 0

    @property
    def operators(self) -> Sequence[str]:
        """Names of the operators that every batch has to run."""
        return tuple(self._operators)

    def attach(self, directory: SparkDirectory, needs: Callable[[str], bool]) -> ManifestLog:
        """Let Spark's checkpoint directory lie in the log; returns the log.

        Args:
            directory: Runs that it serves are committed by Spark.
            needs: Says of an object whether the directory needs it.
        """
        self._directory, self._objects.needed_elsewhere = directory, needs
        return self._log

    def directory_of(self, run_id: str) -> SparkDirectory | None:
        """Return Spark's checkpoint directory of a run, where it lies in the log."""
        directory = self._directory
        return directory if directory is not None and directory.serves(run_id) else None

    async def batch_time_ms(self, task: TaskAttempt) -> int | None:
        """Return the processing time of a task's batch by Spark's own offsets; None where they are elsewhere."""
        directory = self.directory_of(task.run_id)
        return await directory.batch_time_ms(task.batch_id) if directory is not None else None

    def opened(self, epoch: int) -> None:
        """A run is open, which has read the log's checkpoints at this epoch."""
        self._known = epoch

    async def commit_batch(self, query_id: str, run_id: str, batch_id: int, files: CommitFiles) -> None:
        """Make the checkpoint of a batch and Spark's commit of it, in one record; returns when that is durable.

        Raises:
            Invalid: An operator was not run in the batch.
            CheckpointDeclined: It was run in part, or the checkpoint failed.
            DstlError: As :meth:`CheckpointExecution.run`.
        """
        coordinator = self._running()
        if coordinator is None or coordinator.run_id != run_id:
            raise nobody_consumed(batch_id, self._operators)

        def due() -> Trigger | None:
            coordinator.check_complete(batch_id)
            return coordinator.trigger()

        made = await self._turns.make(coordinator, due, query_id, files)
        assert made, "a batch is committed once"

    def delete(self, names: Iterable[str]) -> None:
        """Delete what Spark's checkpoint directory needs no more, except what checkpoints need."""
        self._free += names
        if self._running() is not None and self._known == self._log.epoch:
            # Else nobody has read which checkpoints there are since the log was taken over, so nobody knows what they
            # need: one may be another driver's, or that of a commit which has landed unseen.
            free, self._free = self._free, []
            self._objects.delete(free)
