"""The log of a restore in pieces that are worth a call each, made ready while the bases are still loaded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.changelog.change_set import META_KEY_GROUP
from dstl.changelog.segment.reader import Changes
from materializer.restore.log_replay import ReplayStep
from materializer.tables import StagedChanges

__all__ = ["LogPiece", "PiecesAhead", "gathered"]

_PIECE_BYTES = 32 << 20
"""Of changes, before compression: a write buffer of RocksDB, so that a staged piece is as good a file as a flush."""

_AHEAD_BYTES = 64 << 20


@dataclass(slots=True)
class LogPiece:
    """Neighbouring segments whose changes are applied together.

    Attributes:
        steps: The segments, each with its change records by operator.
        changes: By operator, batches of change records in the order of the log; what the bases contain is left out.
        staged: By operator, changes that its table has written to a file already; they are not in ``changes`` then.
        nbytes: Of ``changes``, in memory.
    """

    steps: list[tuple[ReplayStep, Mapping[str, int]]] = field(default_factory=list)
    changes: dict[str, list[pa.RecordBatch]] = field(default_factory=dict)
    staged: dict[str, StagedChanges] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, step: ReplayStep, found: list[Changes]) -> None:
        """Take the changes of one more segment."""
        rows = dict.fromkeys((operator for operator, _ in step.operators.values()), 0)
        for log_id, _, key_group, batch in found:
            operator, held = step.operators[log_id]
            if key_group != META_KEY_GROUP and key_group not in held:
                self.changes.setdefault(operator, []).append(batch)
                rows[operator] += batch.num_rows
                self.nbytes += batch.nbytes
        self.steps.append((step, rows))

    def stage(self, operator: str, staged: StagedChanges) -> None:
        """Replace an operator's changes by what its table has made of them."""
        self.nbytes -= sum(batch.nbytes for batch in self.changes.pop(operator))
        self.staged[operator] = staged

    def discard(self) -> None:
        """Delete what was staged."""
        for staged in self.staged.values():
            staged.file.delete()


async def gathered(
    segments: AsyncGenerator[tuple[ReplayStep, list[Changes]]],
) -> AsyncGenerator[LogPiece]:
    """Yield segments together until they are a piece, in their order; closes ``segments``."""
    async with aclosing(segments):
        piece = LogPiece()
        async for step, found in segments:
            piece.add(step, found)
            if piece.nbytes >= _PIECE_BYTES:
                yield piece
                piece = LogPiece()
        if piece.steps:
            yield piece


class PiecesAhead:
    """Makes pieces ready before anybody asks for them, as many as fit in memory; staged ones take none.

    Args:
        pieces: Closed at the end.
        prepare: Called with each piece, one at a time; may stage its changes.
    """

    def __init__(self, pieces: AsyncGenerator[LogPiece], prepare: Callable[[LogPiece], Awaitable[None]]) -> None:
        self._pieces = pieces
        self._prepare = prepare
        self._ready: deque[LogPiece] = deque()
        self._held = 0
        self._more, self._room = asyncio.Event(), asyncio.Event()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self._more.set())

    async def next(self) -> LogPiece | None:
        """Return the next piece, None after the last.

        Raises:
            DstlError: What reading the log has raised, after the pieces before it.
        """
        while not self._ready:
            if self._task.done():
                await self._task
                return None
            self._more.clear()
            await self._more.wait()
        piece = self._ready.popleft()
        self._held -= piece.nbytes
        self._room.set()
        return piece

    async def close(self) -> None:
        """Give up what was not asked for. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        while self._ready:
            self._ready.popleft().discard()

    async def _run(self) -> None:
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                await self._prepare(piece)
                self._ready.append(piece)
                self._held += piece.nbytes
                self._more.set()
                while self._held > _AHEAD_BYTES:
                    self._room.clear()
                    await self._room.wait()
