"""The audit of Spark's checkpoint directory where it is in the log: the files that its index says are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from handles.file_record import FileRecord, barrier_batch
from tests.simulation.stage import Stage
from tests.simulation.store import Stored

_CLOCK_MARGIN_S = 60.0  # as dstl.checkpoint.upkeep.cleaning_plan


class DirectoryAudit:
    """Follows the index of the directory from record to record.

    Args:
        world: The world.
        objects: All objects, by name.
        fail: Takes an invariant's number and what was observed.

    Attributes:
        barriers: Paths of the barriers that have ever been durable.
    """

    def __init__(self, world: Stage, objects: Mapping[str, Stored], fail: Callable[[str, str], None]) -> None:
        self._world = world
        self._objects = objects
        self._fail = fail
        self.barriers: set[str] = set()
        self._files: dict[str, str] = {}
        self._named: dict[int, frozenset[str]] = {}
        self._fenced_at = 0.0

    def landed(self, sequence: int, files: FileRecord) -> None:
        """Take over what a record says of the index from now on (I3)."""
        if files.is_whole:
            self._files.clear()
        for path in files.removed:
            self._files.pop(path, None)
        added = {each.path: each.segment.name for each in files.entries()}
        self._files |= added
        self.barriers |= {path for path in added if barrier_batch(path) is not None}
        self._named[sequence] = frozenset(added.values())
        for path, name in self._files.items():
            if name not in self._objects:
                self._fail("I3", f"record {sequence} leaves {path} in {name}, which is not there")

    def fenced(self) -> None:
        """A driver has won the log: what others have on its way is void from now on."""
        self._fenced_at = self._world.loop.time()

    def deleting(self, name: str) -> None:
        """An object is about to be deleted (I5)."""
        if name in self._files.values():
            self._fail("I5", f"{name} was deleted, and files of Spark's checkpoint directory are in it")

    def record_deleted(self, sequence: int) -> None:
        """A record is gone, and what it named alone is free."""
        self._named.pop(sequence, None)

    def may_need(self, name: str) -> bool:
        """Return whether a record names an object, or may come to: a cleaner must leave it."""
        if any(name in names for names in self._named.values()):
            return True
        # The last driver may still commit it, for all that a cleaner knows: the next fence decides.
        return "/files/" in name and self._objects[name].modified + _CLOCK_MARGIN_S >= self._fenced_at
