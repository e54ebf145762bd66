"""The other half of a checkpoint: Spark's own commit, from its checkpoint directory, which lies in the same log.

``commits/N`` is what triggers the checkpoint of batch N, and the record that holds both is the only truth.

Spark writes its own watermark to its log of offsets before a batch runs, so it is the same whenever the batch runs
again. It is asked for once in a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dstl.errors import CheckpointDeclined, Fenced, Invalid
from dstl.rpc.messages import TaskAttempt
from handles.file_record import FileRecord


@dataclass(frozen=True, slots=True)
class FilesStep:
    """Spark's part of a record.

    Attributes:
        record: The step of its directory's index.
        inlined: Segments to be written inside the record, behind the checkpoint's.
        whole: Number of the newest record with the whole index, this one perhaps: readers begin there at the latest.
    """

    record: FileRecord
    inlined: Sequence[bytes]
    whole: int


class CheckpointInTheMaking:
    """A checkpoint that TaskManagers persist while Spark's part of its record is gathered. One event loop.

    Spark's part is the commit of the batch, and all of its files since the last one.

    Args:
        make: Makes it, and calls :meth:`begun`, :meth:`ready` and :meth:`step`.
    """

    def __init__(self, make: Callable[[CheckpointInTheMaking], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._persisted: asyncio.Future[None] = loop.create_future()
        self._record: asyncio.Future[Callable[[int, Sequence[int]], FilesStep]] = loop.create_future()
        self._making = loop.create_task(make(self))

    async def begin(self) -> None:
        """Wait until it is known that the batch is whole.

        Raises:
            DstlError: It is not.
        """
        try:
            await asyncio.wait([self._begun, self._making], return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self.drop()
            raise
        if self._making.done():
            await self._making

    def begun(self) -> None:
        """The batch is whole, and its checkpoint is being made."""
        self._begun.set_result(None)

    async def ready(self) -> None:
        """Return when the record is to be written, which may wait for the offsets of the next batch.

        Raises:
            DstlError: There will be none.
        """
        self._persisted.set_result(None)
        await self._record

    async def persisted(self) -> None:
        """Return when it waits for its record, or has failed."""
        await asyncio.wait([self._persisted, self._making], return_when=asyncio.FIRST_COMPLETED)

    def step(self, sequence: int, in_front: Sequence[int]) -> FilesStep:
        """Return Spark's part of the record of this number.

        Args:
            sequence: The number.
            in_front: Sizes of the segments of the checkpoint's own that the record holds.

        Raises:
            DstlError: Something that the commit needs is missing.
        """
        return self._record.result()(sequence, in_front)

    async def write(self, step: Callable[[int, Sequence[int]], FilesStep]) -> None:
        """Write it with Spark's part of its record, which is made once the record's number is known.

        Raises:
            DstlError: As what makes it.
        """
        self._record.set_result(step)
        await self._making

    def drop(self) -> None:
        """There will be no record: what the TaskManagers have persisted is theirs again."""
        self._record.set_exception(CheckpointDeclined("the record of Spark's commit was given up"))
        # Where persisting has failed nobody waits for it, and asyncio would tell of it in the driver's log.
        self._record.exception()
        # The one who waits for it is told otherwise why.
        self._making.add_done_callback(lambda making: making.cancelled() or making.exception())


class SparkExecution(Protocol):
    """Spark's execution of the queries of this driver."""

    async def check(self, query_id: str) -> None:
        """Refuse a query whose batches are not committed one after the other, each once it is done.

        Raises:
            Invalid: Says which setting it is, and what to do.
        """

    async def is_running(self, run_id: str) -> bool:
        """Return whether Spark is running a query by this run."""

    async def fitted_offsets(self, run_id: str, content: bytes) -> bytes:
        """Return a record of offsets with those sources of ours that a run has, which may be others than were written.

        Raises:
            Invalid: It is of other sources of the user's.
        """


class SparkDirectory(Protocol):
    """Spark's checkpoint directory in the manifest log of a query's checkpoints. One event loop."""

    @property
    def runs(self) -> dict[str, None]:
        """Runs of the query that have looked at it, the latest last: Spark has one at a time."""

    @property
    def query_id(self) -> str:
        """The query's id, by Spark's ``metadata``; empty until that was written or read."""

    async def lead(self, query_id: str) -> None:
        """Take the log over for a query, unless it is this driver's already, and read what it says.

        Raises:
            Invalid: The location is another query's.
            Fenced: A newer driver has taken over.
            DstlError: As :meth:`ManifestLog.fence` and :meth:`ManifestLog.scan`.
        """

    def newest_commit(self) -> int:
        """Return the newest batch that Spark has committed, -1 where there is none."""

    async def batch_time_ms(self, batch_id: int, run_id: str) -> int | None:
        """Return a batch's processing time by Spark's record of its offsets; None where that does not tell.

        When this returns, the record is durable, and so is the commit before it.

        Raises:
            DstlError: It never will be.
        """


class WatermarkReader(Protocol):
    """Asks the driver's Spark about a query's watermarks."""

    async def of_batch(self, query_id: str) -> Mapping[str, tuple[int, int]] | None:
        """Return, by operator, the watermarks of the running batch and of the one before it.

        They are those that reach the operator, behind Spark's own that hold rows back: Unix milliseconds, 0 before
        there is one. None where this driver's Spark does not run the query.
        """

    async def batch_done(self, query_id: str, batch_id: int) -> None:
        """Record that a batch's rows have all gone through: the next one may have another watermark."""


class SparkWatermark:
    """The watermarks of the batch at work. One event loop.

    Args:
        reader: Asks the driver's Spark; None where there is none to ask.
    """

    def __init__(self, reader: WatermarkReader | None) -> None:
        self._reader = reader
        self._batch: tuple[str, int] | None = None
        self._known: Mapping[str, tuple[int, int]] = {}
        self._asking = asyncio.Lock()

    @property
    def known_ms(self) -> Mapping[str, int]:
        """The watermark of the batch at work by operator, Unix milliseconds; empty where nothing goes by it."""
        return {uid: mark for uid, (mark, _) in self._known.items()}

    async def of_batch(self, task: TaskAttempt) -> tuple[int, int]:
        """Return the watermark of a task's batch, and the one up to which rows are late.

        Raises:
            Invalid: There is no Spark to ask.
            Fenced: Spark does not run the query any more.
        """
        async with self._asking:
            if self._batch != (task.run_id, task.batch_id):
                if self._reader is None:
                    raise Invalid(f"operator {task.operator!r} goes by Spark's watermark, and there is no Spark to ask")
                found = await self._reader.of_batch(task.query_id)
                if found is None:
                    raise Fenced(
                        f"query {task.query_id} is not running any more: attempt {task.attempt_id} is too late"
                    )
                self._batch, self._known = (task.run_id, task.batch_id), found
            if task.operator not in self._known:
                raise Invalid(f"Spark's plan of batch {task.batch_id} has no operator {task.operator!r}: report this")
            return self._known[task.operator]

    async def batch_done(self, query_id: str, batch_id: int) -> None:
        """Record that a batch's rows have all gone through."""
        if self._reader is not None and self._known:
            await self._reader.batch_done(query_id, batch_id)
