"""The bases of one operator in one TaskManager, and the log behind them: pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from handles.checkpoint import CheckpointId
from handles.key_group import KeyGroup, KeyGroupRange
from handles.materialized_handle import (
    Generations,
    MaterializationReport,
    MaterializedStateHandle,
    TableFile,
    advance,
    live_bytes,
    reusable_files,
)
from materializer.trigger import UnmaterializedLog


@dataclass(frozen=True, slots=True)
class LoggedChanges:
    """The changes that one checkpoint added to an operator's log here.

    Attributes:
        checkpoint: The checkpoint.
        bytes: Stored bytes; a share of segments that hold several operators.
        segments: Segments, or shares of them.
        at: When, on the clock that decides; before its beginning, where an earlier run has logged them.
    """

    checkpoint: CheckpointId
    bytes: int
    segments: int
    at: float


@dataclass(frozen=True, slots=True)
class MaterializationPlan:
    """The plan of a materialization of one operator.

    Attributes:
        checkpoint: The checkpoint that the tables hold.
        materialization_id: Its number.
        key_groups: All that it covers.
        written: Key groups to write: changed since their newest base, without a second copy, or in a file that is
            mostly waste. Ascending.
        unchanged: Key groups whose newest base still holds. Ascending; may be written all the same.
        files: By id, stored table files that the base may name again, where the table is to be stored as its files;
            None where it is to be stored by key groups.
    """

    checkpoint: CheckpointId
    materialization_id: int
    key_groups: KeyGroupRange
    written: tuple[KeyGroup, ...]
    unchanged: tuple[KeyGroup, ...]
    files: Mapping[str, TableFile] | None = None


@dataclass(frozen=True, slots=True)
class FinishedMaterialization:
    """A materialization whose files are stored and that no manifest, or none that was followed, names yet.

    Attributes:
        report: For the coordinator.
        versions: Versions of the key groups at that moment.
        at: When it finished, on the clock that decides.
        raw_bytes: Bytes that were written, before compression.
    """

    report: MaterializationReport
    versions: Mapping[KeyGroup, int]
    at: float
    raw_bytes: int


class OperatorBases:
    """Bases and log of one operator in one TaskManager.

    Invariants:
        1. ``generations`` are those of the manifest of the checkpoint that the tables hold: a finished materialization
           counts only once a checkpoint that names it was followed by another batch.
        2. A key group is unchanged exactly while its table version is that of its newest base and it has not lost
           expired entries since.

    Args:
        generations: Bases in the checkpoint that was restored.
        log: Log after the bases.
        is_loading: The table has not all of them yet.

    Attributes:
        is_loading: The same: until :meth:`loaded` nothing of the table can be materialized.
    """

    def __init__(
        self,
        generations: Generations | None = None,
        log: Iterable[LoggedChanges] = (),
        *,
        is_loading: bool = False,
    ) -> None:
        self.generations: Generations = dict(generations or {})
        self.finished: FinishedMaterialization | None = None
        self.is_loading = is_loading
        self._versions: dict[KeyGroup, int] = {}
        self._damaged: tuple[str, ...] = ()
        self._log = deque(log)
        known = (base.file for bases in self.generations.values() for base in bases)
        self._last_id = max((file.materialization_id for file in known), default=0)
        self._compression = 1.0

    def loaded(self, versions: Mapping[KeyGroup, int], damaged: Iterable[str]) -> None:
        """Record that the table has all of its bases.

        Args:
            versions: Table versions of the key groups that were what their newest base holds when it was loaded.
            damaged: Objects that were damaged or missing.
        """
        self.is_loading = False
        self._versions = dict(versions)
        self._damaged = tuple(damaged)

    def logged(self, changes: LoggedChanges) -> None:
        """Record that the tables now contain what a checkpoint added to the log."""
        self._log.append(changes)

    def log(self, state_bytes: int, replay_bytes_per_s: float | None = None) -> UnmaterializedLog:
        """Return the log behind the newest base.

        Args:
            state_bytes: Raw bytes of the table: they are compared as they would be stored.
            replay_bytes_per_s: Measured by the last restore, if there was one.
        """
        return UnmaterializedLog(
            bytes=sum(each.bytes for each in self._log),
            segments=sum(each.segments for each in self._log),
            oldest_at=self._log[0].at if self._log else 0.0,
            state_bytes=int(state_bytes * self._compression),
            replay_bytes_per_s=replay_bytes_per_s,
        )

    def plan(
        self,
        checkpoint: CheckpointId,
        owned: KeyGroupRange,
        versions: Mapping[KeyGroup, int],
        *,
        generations: int,
        min_live_share: float,
        in_files: bool = False,
    ) -> MaterializationPlan:
        """Say what a materialization of this moment has to write, and give it a number.

        ``in_files`` stores the whole table as its files, of which those that are stored already need not be again.
        """
        self._last_id += 1
        if in_files:
            files = reusable_files(
                {group: bases for group, bases in self.generations.items() if group in owned},
                self._damaged,
                generations,
            )
            return MaterializationPlan(checkpoint, self._last_id, owned, tuple(owned), (), files)
        live = live_bytes(self.generations.values())
        written, unchanged = [], []
        for group in owned:
            bases = self.generations.get(group, ())
            same = bool(bases) and self._versions.get(group) == versions.get(group, 0)
            if same:
                unchanged.append(group)
            copies = sum(base.checkpoint == bases[0].checkpoint for base in bases)
            wasteful = any(live[base.file.name] < min_live_share * base.file.total_size for base in bases)
            if not same or copies < generations or wasteful:
                written.append(group)
        return MaterializationPlan(checkpoint, self._last_id, owned, tuple(written), tuple(unchanged))

    def report(
        self, operator: str, plan: MaterializationPlan, handles: tuple[MaterializedStateHandle, ...]
    ) -> MaterializationReport:
        """Return the report of a plan whose files are stored."""
        known = {file.name for file in (plan.files or {}).values()}
        return MaterializationReport(
            operator=operator,
            checkpoint=plan.checkpoint,
            first_key_group=plan.key_groups.start,
            last_key_group=plan.key_groups.end,
            handles=handles,
            unchanged=tuple((group, self.generations[group][0].file.materialization_id) for group in plan.unchanged),
            damaged=self._damaged,
            reused=tuple(sorted(known.intersection(name for handle in handles for name in handle.objects()))),
        )

    def outdated(self, group: KeyGroup) -> None:
        """Record that the table has dropped expired entries of a key group: its newest base may have them."""
        self._versions.pop(group, None)

    def accept(self, finished: FinishedMaterialization, keep: int) -> None:
        """Record that a followed checkpoint names a finished materialization: it is a base from now on."""
        report = finished.report
        self.generations = advance(self.generations, report, keep)
        self._versions.update({group: finished.versions.get(group, 0) for group in report.key_groups})
        self._damaged = ()
        self._log = deque(each for each in self._log if each.checkpoint > report.checkpoint)
        if finished.raw_bytes:
            self._compression = max(0.02, min(1.0, report.bytes / finished.raw_bytes))
        if self.finished is finished:
            self.finished = None
