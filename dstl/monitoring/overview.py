"""The overview of a job: everything that the page shows, from the store alone or from a running driver. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from dstl.checkpoint.assembly import RecoveryWork, recovery_work
from dstl.checkpoint.fleet.metrics_poll import MemberMetrics
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.checkpoint.manifest.reader import ManifestScan
from dstl.checkpoint.savepoint.deletion import SavepointListing
from dstl.monitoring.cost import Cost, cost_per_day
from dstl.monitoring.skew import OperatorSizes, operator_sizes
from handles.checkpoint import CompletedCheckpoint
from materializer.restore.progress import RestoreStatus


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a job at one moment.

    Attributes:
        location: Where its state is stored.
        source: ``driver`` where the running driver tells, ``store`` where only the store was read.
        at: When, Unix seconds.
        query_id: The query's id; empty where none has used the location.
        history: Checkpoints, failures and restores, oldest first.
        newest: The newest checkpoint that can be restored; None before the first.
        retained: Numbers of those that can be restored.
        damaged: Records that cannot be read, and why.
        savepoints: All of them, unfinished and damaged ones included.
        members: The TaskManagers; None where only the store was read.
        wanted: How many of them there shall be.
        restoring: The restore that is under way; None where none is.
        batch_s: Seconds that batches took in all, by Spark's clock, by their numbers; of those that Spark still knows.
    """

    location: str
    source: Literal["driver", "store"]
    at: float
    query_id: str
    history: Sequence[HistoryEntry] = ()
    newest: CompletedCheckpoint | None = None
    retained: Sequence[int] = ()
    damaged: Sequence[tuple[int, str]] = ()
    savepoints: Sequence[SavepointListing] = ()
    members: Sequence[MemberMetrics] | None = None
    wanted: int = 0
    restoring: RestoreStatus | None = None
    batch_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def completed(self) -> list[HistoryEntry]:
        """The checkpoints of the history."""
        return [entry for entry in self.history if entry.kind == "checkpoint"]

    @property
    def failed(self) -> list[HistoryEntry]:
        """The failed checkpoints of the history."""
        return [entry for entry in self.history if entry.kind == "failed"]

    @property
    def restores(self) -> list[HistoryEntry]:
        """The starts of the query in the history."""
        return [entry for entry in self.history if entry.kind == "restore"]

    @property
    def work(self) -> RecoveryWork | None:
        """The bytes that restoring the newest checkpoint would read; None before the first."""
        return recovery_work(self.newest) if self.newest is not None else None

    @property
    def operators(self) -> list[OperatorSizes]:
        """Sizes of each operator in the newest checkpoint."""
        return operator_sizes(self.newest) if self.newest is not None else []

    @property
    def cost(self) -> Cost | None:
        """A day's cost at the pace of the history; None where that is too short."""
        return cost_per_day(self.history, self.newest.full_bytes if self.newest is not None else 0)

    def seconds(self, share: float) -> float | None:
        """Return the time below which this share of the checkpoints took; None where there are none."""
        return quantile([entry.seconds for entry in self.completed if entry.seconds is not None], share)

    @property
    def batch_seconds(self) -> float | None:
        """Return the median of what Spark's batches took; None where it is not known."""
        return quantile(list(self.batch_s.values()), 0.5)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of them lies; None where there are none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def of_store(location: str, at: float, scan: ManifestScan, savepoints: Sequence[SavepointListing]) -> Overview:
    """Return the overview that the store alone gives.

    Args:
        location: The location.
        at: Now, Unix seconds.
        scan: Of its manifest log.
        savepoints: Its savepoints.
    """
    retained = scan.retained
    history = _completed_by_records(scan.history, retained)
    return Overview(
        location,
        "store",
        at,
        scan.query_id,
        history,
        retained[-1] if retained else None,
        [each.checkpoint_id for each in retained],
        [(sequence, str(error)) for sequence, error in sorted(scan.damaged.items())],
        savepoints,
    )


def of_driver(
    stored: Overview,
    query_id: str,
    history: Sequence[HistoryEntry],
    completed: Sequence[CompletedCheckpoint],
) -> Overview:
    """Return what a driver knows of its query, and of ``stored`` what only the store knows."""
    told = replace(stored, source="driver", query_id=query_id or stored.query_id)
    if not history and not completed:
        return told
    retained = [each.checkpoint_id for each in completed]
    return replace(told, history=history, newest=completed[-1] if completed else None, retained=retained)


def _completed_by_records(
    history: Sequence[HistoryEntry], retained: Sequence[CompletedCheckpoint]
) -> list[HistoryEntry]:
    """Return the history with the checkpoints that it does not tell of, as far as their own records do."""
    told = {entry.checkpoint_id for entry in history if entry.kind == "checkpoint"}
    more = []
    for before, each in pairwise([None, *retained]):
        if each is not None and each.checkpoint_id not in told:
            known = {s.segment for s in before.segments} if before is not None else set()
            fresh = {s.segment for s in each.segments} - known
            more.append(
                HistoryEntry(
                    kind="checkpoint",
                    at=each.created_at,
                    checkpoint_id=each.checkpoint_id,
                    batch_id=each.batch_id,
                    new_bytes=sum(segment[1] for segment in fresh),
                    full_bytes=each.full_bytes,
                )
            )
    return sorted([*history, *more], key=lambda entry: entry.at)
