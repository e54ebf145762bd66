"""Spark's own watermark of the batch at work, for operators that stand behind one of Spark's stateful operators.

Spark writes it to its log of offsets before a batch runs, so it is the same whenever the batch runs again. It is asked
for once in a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from dstl.errors import Fenced, Invalid
from dstl.rpc.messages import TaskAttempt

__all__ = ["SparksWatermark", "WatermarkReader"]


class WatermarkReader(Protocol):
    """Asks the driver's Spark about a query's watermarks."""

    async def of_batch(self, query_id: str) -> Mapping[str, tuple[int, int]] | None:
        """Return, by operator, the watermarks of the running batch and of the one before it.

        They are those that reach the operator, behind Spark's own that hold rows back: Unix milliseconds, 0 before
        there is one. None where this driver's Spark does not run the query.
        """

    async def batch_done(self, query_id: str, batch_id: int) -> None:
        """Take note that a batch's rows have all gone through: the next one may have another watermark."""


class SparksWatermark:
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
        """Take note that a batch's rows have all gone through."""
        if self._reader is not None and self._known:
            await self._reader.batch_done(query_id, batch_id)
