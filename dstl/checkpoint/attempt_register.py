"""The register of attempts at work in the current batch: the run that each belongs to, and whether it can still run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from dataclasses import replace

from dstl.errors import Fenced
from dstl.rpc.messages import TaskAttempt
from dstl.rpc.server import Peer

__all__ = ["ActiveRun", "AttemptRegister"]

ActiveRun = Callable[[str], Awaitable[str | None]]
"""Returns the run of a query, by its id, that the driver's Spark has active; None where it has none."""


class AttemptRegister:
    """The attempts of the current batch. One event loop.

    A task knows its run by Spark's job group, which is the run's id as long as the user sets no group of their own.
    Where they do, the driver's Spark says which run of the query is active: there is one at most. A late task of an
    earlier run that names such a group counts as an attempt of the active one, and does no harm: its batch is an
    earlier one, or it has done the same work on the same parent.

    Args:
        active_run: Asks the driver's Spark; None: the group is the run.
    """

    def __init__(self, active_run: ActiveRun | None = None) -> None:
        self._active_run = active_run
        self._batch: tuple[str, int] | None = None
        self._attempts: dict[int, Peer] = {}

    async def place(self, task: TaskAttempt, run_id: str | None, over: Container[str]) -> TaskAttempt:
        """Return the task with the run that it belongs to.

        Args:
            task: As it has told it.
            run_id: The run that is open.
            over: Runs that were replaced.

        Raises:
            Fenced: Its query is not running any more.
        """
        if self._active_run is None or task.run_id == run_id or task.run_id in over:
            return task
        if run_id is not None and task.attempt_id in self._attempts:
            return replace(task, run_id=self._batch[0] if self._batch else run_id)
        active = await self._active_run(task.query_id)
        if active is None:
            raise Fenced(f"query {task.query_id} is not running any more: attempt {task.attempt_id} comes too late")
        return replace(task, run_id=active)

    def begun(self, task: TaskAttempt, peer: Peer) -> None:
        """Take notice that an attempt has begun over this connection."""
        if self._batch != (task.run_id, task.batch_id):
            self._batch = (task.run_id, task.batch_id)
            self._attempts.clear()
        self._attempts[task.attempt_id] = peer

    def speaks(self, task: TaskAttempt, peer: Peer) -> None:
        """Take notice that an attempt speaks over this connection; of one that has not begun none is taken."""
        if task.attempt_id in self._attempts:
            self._attempts[task.attempt_id] = peer

    def is_alive(self, attempt_id: int) -> bool:
        """False where the connection over which an attempt spoke last has ended: its worker is gone."""
        peer = self._attempts.get(attempt_id)
        return peer is None or not peer.is_gone
