"""Bases that no batch comes to name: while the query is idle, and at the end of a run.

A materialization ends some time after the batch in which it began. The next batch's checkpoint names it, but a query
that is started by a scheduler may have one batch a run, and one with a trigger of hours waits for hours. So the current
batch's checkpoint is made *again*: from the same parent, of the same attempts, whose change sets are stored already,
with the bases that were finished since. To readers, fences, retention and the cleaner it is a checkpoint of that batch
that replaces the one before, as one is that a second action has caused. Spark's files, where they lie in this log, are
not touched: the record holds none.

============================================  ========================================================================
a crash                                       leaves
============================================  ========================================================================
before the record is sent                     the checkpoint as it was; files that no record names, the cleaner's
between sending and the answer                one of the two, which the next fence finds out; both hold the batch
behind it, before the TaskManagers know       the new one, from which the next run goes on; tables are restored
before the replaced record is deleted         a record that the later one voids, the cleaner's
============================================  ========================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable

from dstl.checkpoint.checkpoint_execution import CheckpointExecution
from dstl.checkpoint.coordinator import CheckpointCoordinator, Trigger
from dstl.checkpoint.fleet.fleet import Fleet
from dstl.errors import DstlError
from dstl.metrics import Recorder
from dstl.rpc.fleet_messages import UnnamedBases
from dstl.runtime import Clock, end_tasks

_log = logging.getLogger(__name__)
_LOOKS = 4
"""A base waits a quarter longer than it may at most; each look is a small message to every TaskManager."""
_NONE = UnnamedBases(0, 0, 0.0)
_ENDING_S = 30.0
"""What a record may take beyond the wait: a process that is to end ends."""


class BasePublication:
    """Lets checkpoints name finished bases where no batch comes. One event loop.

    Args:
        execution: Makes checkpoints.
        fleet: The TaskManagers.
        locks: Held in this order, so that no batch begins on a checkpoint that is being replaced, and no other record
            is written.
        running: Returns the coordinator of the open run and its query's id; None where there is no run.
        clock: Time.
        within_s: How long a base may wait for a batch, and :meth:`finish` for materializations.
        recorder: ``basesUnpublished``.
    """

    def __init__(
        self,
        execution: CheckpointExecution,
        fleet: Fleet,
        locks: tuple[asyncio.Lock, asyncio.Lock],
        running: Callable[[], tuple[CheckpointCoordinator, str] | None],
        clock: Clock,
        within_s: float,
        recorder: Recorder,
    ) -> None:
        self._execution = execution
        self._fleet = fleet
        self._opening, self._turn = locks
        self._running = running
        self._clock = clock
        self._within_s = within_s
        self._recorder = recorder
        self._failed: Trigger | None = None
        self._found = _NONE
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from time to time; called again, nothing happens."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def finish(self) -> None:
        """Wait for the materializations that run, and let the last checkpoint name what is finished: the run ends.

        Returns at once where nothing runs or waits, and where the last batch has no checkpoint. What does not end in
        time is lost, and is uploaded again by another run.
        """
        self._found, self._failed = _NONE, None
        # A commit, or a TaskManager, may hang meanwhile.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._within_s + _ENDING_S):
                await self._settle(self._clock.now() + self._within_s)
        if lost := self._found.running + self._found.waiting:
            self._recorder.increment("basesUnpublished", lost)
            _log.warning(
                "the run ends with %d materializations that no checkpoint names: their uploads are lost, and the log "
                "gets longer. Where this is repeated, stop the query between batches, or raise "
                "materialization.publish_within_s (%g s)",
                lost,
                self._within_s,
            )

    async def _settle(self, deadline: float) -> None:
        await self._look(math.inf)
        while self._open_run() is not None and self._found.running and (left := deadline - self._clock.now()) > 0:
            await self._clock.sleep(min(left, max(0.01, self._within_s / 1000)))
            await self._look(math.inf)
        if self._open_run() is not None and self._found.waiting:
            await self._look(0.0)

    async def close(self) -> None:
        """Look no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._within_s / _LOOKS)
            if self._open_run() is not None:
                await self._look(self._within_s)

    async def _look(self, patience_s: float) -> None:
        """Find out what no checkpoint names, and make one again where a base has waited for so many seconds."""
        # No run begins, restores or persists meanwhile.
        async with self._opening, self._turn:
            if self._running() is None:
                return
            open_run = self._open_run()
            try:
                self._found = await self._fleet.unnamed_bases()
                if open_run is not None and self._found.waiting and self._found.waited_s >= patience_s:
                    coordinator, query_id, trigger = open_run
                    await self._execution.run(coordinator, trigger, query_id)
                    self._found = await self._fleet.unnamed_bases()
            except DstlError as error:
                # Once: the next batch's checkpoint names them, and knows how to fail.
                self._failed = open_run[2] if open_run is not None else None
                _log.warning("finished bases wait for another batch: %s", error)

    def _open_run(self) -> tuple[CheckpointCoordinator, str, Trigger] | None:
        """Return the run, its query and the checkpoint that can be made again; None where none can."""
        found = self._running()
        trigger = found[0].again() if found is not None else None
        if found is None or trigger is None or trigger is self._failed:
            return None
        return *found, trigger
