"""Bases and log lengths of a TaskManager's operators, between its batches and its materializations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dstl.changelog.log_segment import LogSegment
from dstl.crash_points import reach
from dstl.runtime import Runtime
from handles.checkpoint import CheckpointId
from materializer.bases.base_cache import BaseCache
from materializer.bases.operator_bases import FinishedMaterialization, LoggedChanges, OperatorBases
from materializer.expiry import deleted_states, expired_at, is_deleted, times_to_live
from materializer.manager import PeriodicMaterializationManager
from materializer.tables import Expired


@dataclass(frozen=True, slots=True)
class PendingBases:
    """The change of bases and log that becomes true once a checkpoint is followed by another batch.

    Attributes:
        finished: Materializations that the checkpoint names.
        logged: Stored bytes and segments that it added, by operator.
    """

    finished: tuple[FinishedMaterialization, ...]
    logged: Mapping[str, tuple[int, int]]


class BaseTracker:
    """Keeps :class:`OperatorBases` true to the checkpoint that the tables hold.

    Attributes:
        bases: By operator.
        manager: Materializes them; set once, for it works on the tables that this is a part of.
        cache: Bases on this host, where it keeps any.
        base_time_ms: Processing time of the checkpoint that the tables hold; None where it is not known.

    Args:
        runtime: Its clock says how old the log is.
        cache: As the attribute.
        generations: Bases that are kept of a key group.
    """

    manager: PeriodicMaterializationManager

    def __init__(self, runtime: Runtime, cache: BaseCache | None, generations: int) -> None:
        self.bases: dict[str, OperatorBases] = {}
        self.cache = cache
        self.base_time_ms: int | None = None
        self._generations = generations
        self._runtime = runtime
        self._metadata: dict[str, bytes] = {}
        self._times_to_live: dict[str, dict[int, int]] = {}
        self._deleted: dict[str, frozenset[int]] = {}

    def expired(self, operator: str) -> Expired:
        """Return which values have outlived the checkpoint that the tables hold: expired ones, all of deleted states.

        By the times to live that this run has declared: an older program's may have been shorter.
        """
        expired = expired_at(self._times_to_live.get(operator, {}), self.base_time_ms)
        return {**expired, **dict.fromkeys(self._deleted.get(operator, ()), is_deleted)}

    def resumed(self) -> None:
        """Record that a run begins: its program may have given other times to live to its states."""
        self._metadata.clear()
        self._times_to_live.clear()

    def declared(self, operator: str, metadata: bytes) -> None:
        """Take an operator's states, as a task sends them with its changes."""
        if self._metadata.get(operator) == metadata:
            return
        self._metadata[operator] = metadata
        try:
            registry = json.loads(metadata)
            self._times_to_live[operator] = times_to_live(registry)
            self._deleted[operator] = deleted_states(registry)
        except (ValueError, TypeError, KeyError, AttributeError):
            # Not ours to judge: without a time to live everything is kept.
            self._times_to_live.pop(operator, None)
            self._deleted.pop(operator, None)

    def pending(self, persisted: Iterable[tuple[str, tuple[LogSegment, ...]]]) -> PendingBases:
        """Return what a checkpoint will change.

        Args:
            persisted: Operator and segments of each log that the checkpoint holds.
        """
        rows = [(operator, segment) for operator, segments in persisted for segment in segments]
        raw: dict[int, int] = {}
        for _, segment in rows:
            raw[id(segment.location)] = raw.get(id(segment.location), 0) + segment.nbytes
        stored: dict[str, float] = {}
        places: dict[str, set[int]] = {}
        for operator, segment in rows:
            share = segment.nbytes / max(1, raw[id(segment.location)])
            stored[operator] = stored.get(operator, 0.0) + segment.location.size * share
            places.setdefault(operator, set()).add(id(segment.location))
        logged = {operator: (max(1, round(size)), len(places[operator])) for operator, size in stored.items()}
        return PendingBases(tuple(self.manager.take_reports()), logged)

    def named(self, pending: PendingBases) -> None:
        """Record that a checkpoint is durable, which the tables hold once a batch follows it."""
        self.manager.named(pending.finished)

    def followed(self, checkpoint: CheckpointId, pending: PendingBases, time_ms: int | None) -> None:
        """Record that the tables hold a checkpoint now: what it names are bases, and its changes are log."""
        if pending.finished:
            reach("M6")
        for finished in pending.finished:
            bases = self.bases.get(finished.report.operator)
            if bases is not None:
                bases.accept(finished, self._generations)
                reach("M7")
        now = self._runtime.clock.now()
        for operator, (nbytes, segments) in pending.logged.items():
            self.bases.setdefault(operator, OperatorBases()).logged(LoggedChanges(checkpoint, nbytes, segments, now))
        self.base_time_ms = time_ms if time_ms is not None else self.base_time_ms
        self.manager.look()

    def replaced(self, bases: dict[str, OperatorBases], registries: Mapping[str, Mapping[str, object]]) -> None:
        """Record that the tables were replaced by restored ones.

        Args:
            bases: Of the restored checkpoint.
            registries: The states of each operator, as plain data.
        """
        self.bases = bases
        self.base_time_ms = None
        self._deleted = {operator: deleted_states(registry) for operator, registry in registries.items()}
        self.manager.reset()
        self.manager.look()

    def loaded(self, rate: float | None) -> None:
        """Record that the tables have all of their bases.

        Args:
            rate: Bytes per second of the restore; None where it was too little to tell.
        """
        self.manager.replay_bytes_per_s = rate or self.manager.replay_bytes_per_s
        self.manager.look()
