"""The manifest log at one moment, as a reader sees it, and the checkpoints in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dstl.checkpoint.manifest.format import ManifestRecord
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.errors import DstlError, MissingState
from dstl.store.base import ObjectInfo
from handles.checkpoint import CheckpointId, CompletedCheckpoint

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

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """The figures of the last checkpoints, failures and restores, oldest first, as the newest record has them."""
        return next((record.history for _, record in sorted(self.records.items(), reverse=True) if record.history), ())

    def choose(self, checkpoint_id: CheckpointId | None, location: str) -> CompletedCheckpoint:
        """Return a retained checkpoint, the latest where none is named.

        Raises:
            MissingState: There is none, or none of that number.
            CorruptData: Its record, or a newer one, is damaged.
            Invalid: A newer version wrote the record.
        """
        found = {each.checkpoint_id: each for each in self.retained}
        newest = max(found, default=0)
        if checkpoint_id is None:
            for sequence, error in sorted(self.damaged.items(), reverse=True):
                if sequence > newest:
                    raise error
        elif checkpoint_id in self.damaged:
            raise self.damaged[checkpoint_id]
        chosen = found.get(newest if checkpoint_id is None else checkpoint_id)
        if chosen is None:
            held = ", ".join(map(str, sorted(found))) or "none"
            wanted = "checkpoint" if checkpoint_id is None else f"checkpoint {checkpoint_id}"
            raise MissingState(f"{location} has no {wanted}; it retains: {held}. See dstl checkpoints list")
        return chosen


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
