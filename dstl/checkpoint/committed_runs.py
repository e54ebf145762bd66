"""The runs of a query, by Spark's checkpoint directory in the log of its checkpoints, and what their commits make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from dstl.checkpoint.checkpoint_queue import CheckpointQueue
from dstl.checkpoint.coordinator import CheckpointCoordinator
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.retained_objects import RetainedObjects
from dstl.checkpoint.spark_commit import CheckpointInTheMaking, SparkDirectory, SparkExecution
from dstl.errors import Fenced, Invalid
from dstl.rpc.messages import TaskAttempt


class CommittedRuns:
    """Joins Spark's checkpoint directory to a query's checkpoints. One event loop.

    Args:
        log: The query's manifest log.
        objects: Deletes what neither half needs.
        queue: Makes checkpoints.
        operators: Parallelism by operator; the caller adds to it.
        running: Returns the coordinator of the run that is open; None where none is.
        execution: Spark's; None where it cannot be asked.
    """

    def __init__(
        self,
        log: ManifestLog,
        objects: RetainedObjects,
        queue: CheckpointQueue,
        operators: Mapping[str, int],
        running: Callable[[], CheckpointCoordinator | None],
        execution: SparkExecution | None,
    ) -> None:
        self._log = log
        self._objects = objects
        self._queue = queue
        self._operators = operators
        self._running = running
        self._execution = execution
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
            directory: Spark's.
            needs: Says of an object whether the directory needs it.
        """
        self._directory, self._objects.needed_elsewhere = directory, needs
        return self._log

    @property
    def _latest(self) -> str:
        """The latest run that keeps its checkpoint directory here; empty where none does."""
        return next(reversed(self._directory.runs), "") if self._directory is not None else ""

    def place(self, task: TaskAttempt) -> TaskAttempt:
        """Return a task with the run that it belongs to.

        A task knows its run by Spark's job group. Where the user has set a group of their own it is the latest run, for
        Spark has one of a query at a time. A late task of an earlier run that names such a group does no harm: its
        batch is an earlier one, or it has done the same work on the same parent. A task of another query has no run
        here: it may be left of one that was refused, and must not take the directory for its own.
        """
        directory = self._directory
        if directory is None or task.run_id in directory.runs or directory.query_id != task.query_id:
            return task
        return replace(task, run_id=self._latest or task.run_id)

    async def is_running(self, run_id: str) -> bool:
        """Return whether Spark is running a run; where that cannot be told, it is taken to be."""
        return self._execution is None or await self._execution.is_running(run_id)

    async def fitted_offsets(self, run_id: str, content: bytes) -> bytes:
        """Return a record of offsets as a run reads it; as it is where Spark cannot be asked.

        Raises:
            Invalid: As :meth:`SparkExecution.fitted_offsets`.
        """
        return content if self._execution is None else await self._execution.fitted_offsets(run_id, content)

    def directory_of(self, task: TaskAttempt) -> SparkDirectory:
        """Return Spark's checkpoint directory of a task's run.

        Raises:
            Fenced: The run is over.
            Invalid: Its checkpoint directory is elsewhere.
        """
        directory = self._directory
        if directory is None or task.run_id not in directory.runs:
            raise Invalid(
                f"query {task.query_id} keeps its checkpoint directory elsewhere, and a batch's state and its commit "
                "have to be one record. Start it with\n"
                '    .option("checkpointLocation", backend.checkpoint_location)\n'
                "A query that has such a directory goes on from there, once it is copied to _spark in the backend's "
                "location. All operators of a query are of one StateBackend"
            )
        if task.run_id != self._latest:
            raise Fenced(f"run {task.run_id} of query {task.query_id} is over: run {self._latest} has replaced it")
        return directory

    def opened(self, epoch: int) -> None:
        """A run is open, which has read the log's checkpoints at this epoch."""
        self._known = epoch

    def lacks_tasks(self, run_id: str, batch_id: int) -> bool:
        """Return whether Spark has not run all tasks of a batch that it commits, and has to before the state has all.

        A sink that has committed the batch skips it when it is replayed (Spark's file sink does), and a function given
        to ``foreachBatch`` may read a part of it, or nothing.
        """
        coordinator = self._running()
        if not self._operators or run_id != self._latest:
            return False
        return coordinator is None or coordinator.run_id != run_id or coordinator.lacks_tasks(batch_id)

    async def commit_batch(self, query_id: str, run_id: str, batch_id: int, files: CheckpointInTheMaking) -> None:
        """Make the checkpoint of a batch and Spark's commit of it, in one record; returns when that is durable.

        Raises:
            DstlError: As :meth:`CheckpointQueue.make`.
        """
        coordinator = self._running()
        if coordinator is None or coordinator.run_id != run_id:
            # No task of this run has come.
            coordinator = CheckpointCoordinator(self._operators)
            coordinator.open_run(run_id, [])
        await self._queue.make(coordinator, run_id, batch_id, query_id, files)

    def delete(self, names: Iterable[str]) -> None:
        """Delete what Spark's checkpoint directory needs no more, except what checkpoints need."""
        self._free += names
        if self._running() is not None and self._known == self._log.epoch:
            # Else the checkpoints have not been read since the log was taken over, so it is unknown what they
            # need: one may be another driver's, or that of a commit which has landed unseen.
            free, self._free = self._free, []
            self._objects.delete(free)
