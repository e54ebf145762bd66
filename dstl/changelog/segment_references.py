"""How many change sets of each unconfirmed segment are still needed, over all logs of a storage.

One object holds change sets of many writers, so none of them may delete it alone (Flink 2.6-c does, and FLINK-28440
counted wrongly). Pure: the storage deletes what :meth:`SegmentReferences.take_deletable` returns.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SegmentReferences"]


@dataclass(slots=True)
class _Count:
    left: int
    kept: bool = False


class SegmentReferences:
    """Counts by object name; objects that it never tracked (manifests) are none of its business.

    Invariants:
        1. Each change set of a tracked object ends exactly once: released, or given up to the coordinator.
        2. An object becomes deletable when its last change set ended and none was given up.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}
        self._deletable: list[str] = []

    def __len__(self) -> int:
        return len(self._counts)

    def track(self, name: str, change_sets: int) -> None:
        """An object was stored that holds this many change sets (at least one)."""
        self._counts[name] = _Count(change_sets)

    def release(self, name: str) -> None:
        """Nobody needs one of its change sets, and no checkpoint can reference it."""
        self._end(name, kept=False)

    def give_up(self, name: str) -> None:
        """One of its change sets belongs, or may belong, to a checkpoint: the object is no longer ours to delete."""
        self._end(name, kept=True)

    def take_deletable(self) -> list[str]:
        """Return the objects that became deletable since the last call."""
        taken, self._deletable = self._deletable, []
        return taken

    def _end(self, name: str, *, kept: bool) -> None:
        count = self._counts.get(name)
        if count is None:
            return
        count.left -= 1
        count.kept |= kept
        if count.left == 0:
            del self._counts[name]
            if not count.kept:
                self._deletable.append(name)
