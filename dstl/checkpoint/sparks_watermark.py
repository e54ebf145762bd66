"""Spark's own watermark of the batch at work, for operators that stand behind one of Spark's stateful operators.

Spark writes it to its log of offsets before a batch runs, so it is the same whenever the batch runs again. It is asked
for once in a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dstl.errors import Fenced, Invalid
from dstl.rpc.messages import TaskAttempt

__all__ = ["ReadWatermarks", "SparksWatermark"]

ReadWatermarks = Callable[[str], Awaitable[tuple[int, int] | None]]
"""Returns, by query id, the watermarks of the running batch and of the one before it, Unix milliseconds, 0 before there
is one; None where the driver's Spark does not run the query."""


class SparksWatermark:
    """The watermarks of the batch at work. One event loop.

    Args:
        read: Asks the driver's Spark; None where there is none to ask.
    """

    def __init__(self, read: ReadWatermarks | None) -> None:
        self._read = read
        self._batch: tuple[str, int] | None = None
        self._known: tuple[int, int] | None = None
        self._asking = asyncio.Lock()

    @property
    def known_ms(self) -> int | None:
        """The watermark of the batch at work, Unix milliseconds; None where nothing goes by it."""
        return self._known[0] if self._known else None

    async def of_batch(self, task: TaskAttempt) -> tuple[int, int]:
        """Return the watermark of a task's batch, and the one up to which rows are late.

        Raises:
            Invalid: There is no Spark to ask.
            Fenced: Spark does not run the query any more.
        """
        async with self._asking:
            if self._batch != (task.run_id, task.batch_id) or self._known is None:
                if self._read is None:
                    raise Invalid(f"operator {task.operator!r} goes by Spark's watermark, and there is no Spark to ask")
                found = await self._read(task.query_id)
                if found is None:
                    raise Fenced(
                        f"query {task.query_id} is not running any more: attempt {task.attempt_id} is too late"
                    )
                self._batch, self._known = (task.run_id, task.batch_id), found
            return self._known
