"""What a reader sees of the manifest log at one moment, and which checkpoints that means. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dstl.checkpoint.manifest.format import ManifestRecord
from dstl.errors import DstlError
from dstl.store.base import ObjectInfo
from handles.checkpoint import CompletedCheckpoint

__all__ = ["ManifestScan", "retained_of"]


@dataclass(frozen=True, slots=True)
class ManifestScan:
    """The records of a log that mean anything: those not below the cleanup boundary.

    Attributes:
        listed: Every record's object by number, those below the boundary included.
        records: The readable records from the boundary on, by number.
        damaged: Why the others from the boundary on cannot be read.
        boundary: No checkpoint below it is retained.
        query_id: The query that the location belongs to; empty where no query has used it.
    """

    listed: Mapping[int, ObjectInfo]
    records: Mapping[int, ManifestRecord]
    damaged: Mapping[int, DstlError]
    boundary: int
    query_id: str

    @property
    def tail(self) -> int:
        """The highest number in use, 0 for an empty log."""
        return max(self.listed, default=0)

    @property
    def epoch(self) -> int:
        """The number of the newest fence that is visible: whose driver may commit; 0 without one."""
        return max((record.epoch for record in self.records.values()), default=0)

    @property
    def retained(self) -> list[CompletedCheckpoint]:
        """The checkpoints that can be restored, oldest first."""
        checkpoints = (record.checkpoint for _, record in sorted(self.records.items()))
        return retained_of(c for c in checkpoints if c is not None and c.checkpoint_id >= self.boundary)


def retained_of(checkpoints: Iterable[CompletedCheckpoint]) -> list[CompletedCheckpoint]:
    """Return those that no later one replaces: a batch that was run again voids what came of it and after it.

    Args:
        checkpoints: By ascending number.
    """
    kept: list[CompletedCheckpoint] = []
    for checkpoint in checkpoints:
        while kept and kept[-1].batch_id >= checkpoint.batch_id:
            kept.pop()
        kept.append(checkpoint)
    return kept
