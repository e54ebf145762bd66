"""Files that were put, or deleted, since the last record: what a host holds of one checkpoint directory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dstl.files.index import FileTree


@dataclass(frozen=True, slots=True)
class Rider:
    """A file that becomes durable with a barrier, or a deletion that does.

    Attributes:
        path: Relative to the directory.
        run: The query's run; empty where none is known.
        attempt: The task's; negative where no task wrote it.
        size: In bytes; negative for a deletion.
        modified_ms: When it came.
        log_id: The log that holds its bytes; empty for a deletion.
        sqn: Its change set.
    """

    path: str
    run: str
    attempt: int
    size: int
    modified_ms: int
    log_id: str = ""
    sqn: int = 0

    @property
    def is_deletion(self) -> bool:
        """True where the path is gone."""
        return self.size < 0


def wins(attempt: int, over: int) -> bool:
    """Return True where a later file of an attempt takes the place of an earlier one: the highest attempt's is kept."""
    return attempt < 0 or attempt >= over


class Riders:
    """Those of one directory by run and path. Not thread-safe.

    Invariants:
        1. Of a path and run there is one: of the highest attempt, the latest of equals.
        2. A reader sees those of its own run, and those of no run.
    """

    def __init__(self) -> None:
        self._by_run: dict[str, dict[str, Rider]] = {}
        self._trees: dict[str, FileTree] = {}

    def __iter__(self) -> Iterator[Rider]:
        for riders in self._by_run.values():
            yield from riders.values()

    def add(self, rider: Rider) -> bool:
        """Take one; False where a higher attempt's is here already."""
        mine = self._by_run.setdefault(rider.run, {})
        known = mine.get(rider.path)
        if known is not None and not known.is_deletion and not rider.is_deletion:
            if not wins(rider.attempt, known.attempt):
                return False
            # The order of a run's riders is that of their coming.
            del mine[rider.path]
        elif known is not None:
            del mine[rider.path]
        else:
            self._trees.setdefault(rider.run, FileTree()).add(rider.path)
        mine[rider.path] = rider
        return True

    def find(self, path: str, run: str) -> Rider | None:
        """Return what a reader of a run sees of a path; None where nothing was done to it."""
        for each in (run, ""):
            found = self._by_run.get(each, {}).get(path)
            if found is not None:
                return found
        return None

    def seen_by(self, run: str, directory: str = "") -> Iterator[Rider]:
        """Yield all that a reader of a run sees below a directory, those of no run first."""
        for each in dict.fromkeys(("", run)):
            mine = self._by_run.get(each, {})
            if not directory:
                yield from list(mine.values())
            elif mine:
                yield from [mine[path] for path in self._trees[each].below(directory)]

    def of(self, run: str, wanted: Callable[[str], bool] = lambda path: True) -> list[Rider]:
        """Return those of a run and of no run whose path is wanted, in the order of their coming."""
        return [rider for rider in self.seen_by(run) if wanted(rider.path)]

    def runs(self) -> list[str]:
        """Return the runs that have any; no run is the first of them."""
        return sorted(run for run, riders in self._by_run.items() if riders)

    def remove(self, riders: list[Rider]) -> None:
        """Forget riders, but not what came in their place since."""
        for rider in riders:
            mine = self._by_run.get(rider.run, {})
            if mine.get(rider.path) == rider:
                del mine[rider.path]
                self._trees[rider.run].remove(rider.path)

    def keep_only(self, run: str) -> None:
        """Forget all runs but one, and those of no run."""
        gone = [each for each in self._by_run if each not in (run, "")]
        for each in gone:
            del self._by_run[each]
            self._trees.pop(each, None)
