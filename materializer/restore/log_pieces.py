"""Pieces of a restore's log: neighbouring segments that are worth one call of a table."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import pyarrow as pa

from dstl.changelog.segment.reader import JoinedChanges
from dstl.store.look_ahead import LookAhead
from materializer.restore.log_replay import ReplayStep
from materializer.tables import StagedChanges

__all__ = ["LogPiece", "join_segments"]


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

    def add(self, step: ReplayStep, found: list[JoinedChanges]) -> None:
        """Take the changes of one more segment."""
        rows = dict.fromkeys((operator for operator, _ in step.operators.values()), 0)
        for log_id, batch, nbytes in found:
            operator, _ = step.operators[log_id]
            self.changes.setdefault(operator, []).append(batch)
            rows[operator] += batch.num_rows
            self.nbytes += nbytes
        self.steps.append((step, rows))

    def stage(self, operator: str, staged: StagedChanges) -> None:
        """Replace an operator's changes by what its table has made of them."""
        self.nbytes -= sum(batch.nbytes for batch in self.changes.pop(operator))
        self.staged[operator] = staged

    def discard(self) -> None:
        """Delete what was staged."""
        for staged in self.staged.values():
            staged.discard()


async def join_segments(
    segments: LookAhead[ReplayStep, tuple[ReplayStep, list[JoinedChanges]]], piece_bytes: int
) -> AsyncGenerator[LogPiece]:
    """Yield segments together until they hold so many bytes, in their order; closes ``segments``."""
    async with aclosing(segments):
        piece = LogPiece()
        async for step, found in segments:
            piece.add(step, found)
            if piece.nbytes >= piece_bytes:
                yield piece
                piece = LogPiece()
        if piece.steps:
            yield piece
