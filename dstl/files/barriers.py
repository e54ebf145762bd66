"""The barriers of a checkpoint directory: in which order their records are written, and what waits for which.

With ``spark.dstl.commit=with-next`` a commit is *deferred*: it rides in the record of the next offsets. With
``spark.dstl.sources=keep`` those are *beginning* while the tasks of their batch run already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dstl.crash_points import reach
from dstl.errors import Fenced, ObjectExists, OutcomeUnknown, TaskManagerLost
from dstl.files.file_log import FileLog, Lane
from dstl.files.namespace import is_of_the_driver
from dstl.files.options import FileOptions
from dstl.files.records import Barrier, Records
from dstl.files.riders import Rider
from dstl.files.rules import batch_of, is_late
from dstl.rpc.codec import Payload
from dstl.rpc.fleet_messages import Persisted
from dstl.runtime import Clock
from handles.file_record import barrier_batch

_log = logging.getLogger(__name__)


LINGER_S = 0.05
"""So long a commit waits for the offsets of the next batch before it has a record of its own."""


@dataclass(slots=True, eq=False)
class DeferredCommit:
    """A commit on its way into a record.

    Attributes:
        path: The commit file.
        run: The run that has made it.
        batch: Its batch.
        content: Its bytes.
        rider: The commit file in the log.
        parts: What all who have a part in it have of it; uploaded while the query goes on.
        late: Gives it a record of its own where no other one comes.
    """

    path: str
    run: str
    batch: int
    content: bytes
    rider: Rider
    parts: asyncio.Task[list[Persisted]]
    late: asyncio.Task[None] | None = None

    def end(self) -> None:
        """It is in a record, or lost."""
        self.parts.cancel()
        if self.late is not None and self.late is not asyncio.current_task():
            self.late.cancel()


class Barriers:
    """Those of one directory, one after the other. One event loop.

    Args:
        root: The directory's URI, for messages.
        log: What this process itself takes.
        records: Those that the barriers make.
        clock: Time.
        options: When files become durable.

    Attributes:
        turn: Whoever changes what the next record holds has it.
    """

    def __init__(self, root: str, log: FileLog, records: Records, clock: Clock, options: FileOptions) -> None:
        self.turn = asyncio.Lock()
        self._root = root
        self._log = log
        self._records = records
        self._run = records.run
        self._clock = clock
        self._options = options
        self._beginning: asyncio.Task[None] | None = None
        self._stateful = ""
        self._deferred: DeferredCommit | None = None

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a barrier; its record is written when this returns, unless the options say that it rides in the next.

        Raises:
            Fenced: The run is over.
            ObjectExists: There is such a barrier.
            DstlError: As :meth:`Records.commit` and :meth:`Records.write`.
        """
        async with self.turn:
            await self._put(path, run, attempt, content)

    async def begun(self, run: str) -> None:
        """Wait until the offsets of the batch that runs are durable.

        Raises:
            DstlError: They never will be.
        """
        if self._beginning is not None:
            await self.wait()
            self._run.admit(run)

    async def wait(self) -> None:
        """Wait until the offsets of the batch that runs are durable, or never will be."""
        if self._beginning is not None:
            await asyncio.wait([self._beginning])

    async def chosen(self, path: str) -> None:
        """Wait until a record says which attempt's file counts, where the commit of its batch is on its way."""
        if self._deferred is not None and is_late(path, self._deferred.batch):
            await self.wait()
            async with self.turn:
                await self._end_deferred()

    async def settle(self, run: str) -> None:
        """Let nobody but the run itself see a barrier that no record holds yet."""
        if run != self._stateful:
            await self.wait()
        if self._deferred is not None and self._deferred.run != run:
            async with self.turn:
                await self._end_deferred()
        if self._run.is_new(run):
            await self._meet(run)

    async def flush(self) -> None:
        """Store what was put or deleted outside of any run, which no barrier will follow, and a commit that waits.

        So are the run's deletions behind its last barrier: Spark purges its logs then, and a query that a scheduler
        starts for a batch at a time would keep all of them for ever.
        """
        await self.wait()
        async with self.turn:
            await self._end_deferred()
            for each in self._log.riders.of(self._run.current) if self._records.leads else ():
                if each.is_deletion and is_of_the_driver(each.path):
                    self._log.delete(each.path, "")
            if self._records.leads and self._log.riders.of(""):
                self._log.end_other_runs("")
                await self._records.write([("", b"")], [await self._log.persist("")])

    async def add(self, part: Persisted) -> None:
        """Write a record of files that are stored already."""
        await self._records.lead()
        async with self.turn:
            await self._records.write([("", b"")], [part])

    def is_too_late(self, path: str, run: str) -> bool:
        """Return True for a file of a task whose batch is committed, or as good as that."""
        if self._deferred is not None:
            return self._run.is_final(path) or is_late(path, self._deferred.batch)
        return self._run.is_final(path, lambda barrier: self._log.riders.find(barrier, run) is not None)

    async def _put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        batch = barrier_batch(path, "commits")
        may_wait, run = bool(run), self._run.owner(run)
        if self._deferred is not None and (batch is not None or self._deferred.run != run):
            await self._end_deferred()
            self._run.admit(run)
            await self._records.lead()
        if self._is_there(path, run):
            raise ObjectExists(f"{self._root}/{path} is there already")
        self._run.begin(run)
        self._log.end_other_runs(run)
        rider = await self._log.put(path, run, attempt, content)
        assert rider is not None
        barrier = (path, b"".join(content))
        deferred = self._deferred
        if batch is None and may_wait and run == self._stateful and self._options.sources == "keep":
            # The tasks of the batch wait for it.
            self._beginning = asyncio.get_running_loop().create_task(self._begin_batch(rider, barrier))
            reach("C15")
            return
        try:
            if batch is None:
                await self._write_offsets(run, barrier)
            elif self._options.commit == "with-next" and may_wait:
                await self._defer(rider, batch, barrier)
            else:
                await self._records.commit(batch, run, barrier)
        except BaseException as error:
            self._log.discard(rider)
            self._end_run(run, error, deferred)
            raise
        finally:
            self._end(deferred)

    def _is_there(self, path: str, run: str) -> bool:
        rider = self._log.riders.find(path, run)
        return path in self._run.index if rider is None else not rider.is_deletion

    async def _write_offsets(self, run: str, barrier: Barrier) -> None:
        """Write the record of a batch's offsets, and of the commit before where that waits for it."""
        deferred = self._deferred
        parts = await deferred.parts if deferred is not None else []
        before = [(deferred.path, deferred.content)] if deferred is not None else []
        try:
            own = await self._log.persist(run, {Lane.DRIVER})
        except BaseException:
            await self._records.participants.reset()
            raise
        await self._records.write([*before, barrier], [*parts, own])

    async def _begin_batch(self, rider: Rider, barrier: Barrier) -> None:
        """Write the record of a batch's offsets while the batch runs; where that fails its run is over."""
        async with self.turn:
            deferred = self._deferred
            try:
                self._run.admit(rider.run)
                await self._write_offsets(rider.run, barrier)
            except Exception as error:  # any: nobody awaits this task, and its run must not go on
                _log.error("%s: %s is lost, and the run with it: %s", self._root, rider.path, error)
                self._log.discard(rider)
                self._end_run(rider.run, error, deferred)
                self._run.end(rider.run, error)
            finally:
                self._end(deferred)

    async def _defer(self, rider: Rider, batch: int, barrier: Barrier) -> None:
        """Begin to upload what a commit takes, and go on."""
        loop = asyncio.get_running_loop()
        parts = loop.create_task(await self._records.begin(batch, rider.run, barrier))
        # Tasks that have put state in this batch put some in the next one.
        changes = (batch_of(each.path) == batch for each in self._log.riders.of(rider.run))
        self._stateful = rider.run if self._records.is_stateful or any(changes) else ""
        self._deferred = DeferredCommit(rider.path, rider.run, batch, barrier[1], rider, parts)
        self._deferred.late = loop.create_task(self._commit_late(self._deferred))
        reach("C14")

    async def _commit_late(self, deferred: DeferredCommit) -> None:
        """Give a commit a record of its own when no other one has come."""
        await self._clock.sleep(LINGER_S)
        await asyncio.wait([deferred.parts])
        async with self.turn:
            if self._deferred is deferred:
                await self._end_deferred()

    async def _meet(self, run: str) -> None:
        """Let no run begin with what this process knows where another driver has the directory since."""
        async with self.turn:
            try:
                await self._records.check_leads()
            except Fenced as error:
                self._end_run(self._run.current, error, None)
            self._run.meet(run)

    async def _end_deferred(self) -> None:
        """Write the record of a commit that waits. Where that fails its run is over, which is told of it."""
        deferred = self._deferred
        if deferred is None:
            return
        try:
            await self._records.write([(deferred.path, deferred.content)], await deferred.parts)
        except Exception as error:  # any, as for offsets
            _log.error("%s: %s is lost, and runs again: %s", self._root, deferred.path, error)
            self._end_run(deferred.run, error, deferred)
        finally:
            self._end(deferred)

    def _end(self, deferred: DeferredCommit | None) -> None:
        """A commit that has waited is in a record, or lost."""
        if deferred is not None:
            self._deferred = None
            self._records.drop()
            deferred.end()

    def _end_run(self, run: str, error: BaseException, deferred: DeferredCommit | None) -> None:
        """A record has failed: say whether its run is over."""
        if deferred is not None:
            self._log.discard(deferred.rider)
        is_another = isinstance(error, (Fenced, OutcomeUnknown)) or self._records.is_unknown
        if is_another or deferred is not None or isinstance(error, TaskManagerLost):
            # The next run looks what became of the record, and fences anew.
            self._run.end(run, error)
            if is_another:
                self._records.step_down()
