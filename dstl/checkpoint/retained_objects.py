"""The stored objects that the running query still needs, and the deletion of those that it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dstl.checkpoint.manifest.format import manifest_name, manifest_sequence
from dstl.crash_points import reach
from dstl.metrics import NullRecorder, Recorder
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from handles.checkpoint import CompletedCheckpoint, referenced_objects


class SharedStateRegistry:
    """Counts references of checkpoints to objects; says what became free and does no I/O itself.

    Invariants:
        1. An object is free exactly when no registered checkpoint refers to it.
        2. Freed names come back once, newest first: the reverse of the order in which they became known, so that a
           crash between two deletions never leaves a reference to something deleted.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._objects_of: dict[int, frozenset[str]] = {}
        self._holders: dict[str, int] = {}
        self._known_since: dict[str, int] = {}
        self._clock = 0

    def __contains__(self, name: object) -> bool:
        return name in self._holders

    def register(self, checkpoint_id: int, objects: Iterable[str]) -> None:
        """Count a checkpoint's references; registering the same checkpoint again changes nothing.

        Raises:
            ValueError: The checkpoint is registered with other objects.
        """
        names = tuple(dict.fromkeys(objects))
        known = self._objects_of.get(checkpoint_id)
        if known is not None:
            if known != frozenset(names):
                raise ValueError(f"checkpoint {checkpoint_id} is registered with other objects")
            return
        self._objects_of[checkpoint_id] = frozenset(names)
        for name in names:
            if name not in self._holders:
                self._clock += 1
                self._known_since[name] = self._clock
            self._holders[name] = self._holders.get(name, 0) + 1

    def unregister(self, checkpoint_id: int) -> list[str]:
        """Drop a checkpoint's references and return the names that are not needed any more, newest first.

        An unknown checkpoint frees nothing: its objects may be another's.
        """
        freed = []
        for name in self._objects_of.pop(checkpoint_id, frozenset()):
            self._holders[name] -= 1
            if self._holders[name] == 0:
                del self._holders[name]
                freed.append(name)
        freed.sort(key=self._known_since.__getitem__, reverse=True)
        for name in freed:
            del self._known_since[name]
        return freed


_DELETE_TOGETHER = 16  # one request for some checkpoints' worth of names

Hold = int
"""A promise that a checkpoint's objects stay although it may be subsumed."""


class RetainedObjects:
    """Counts the retained checkpoints' references and deletes what becomes free, in the background.

    Manifests go before the objects that they name, many names at a time. What a driver that ends leaves is the
    cleaner's. One event loop.

    Args:
        store: The query's location.
        recorder: Counts what is deleted.

    Attributes:
        needed_elsewhere: Says whether something else than a checkpoint needs an object; that one deletes it then.
    """

    def __init__(self, store: ObjectStore, recorder: Recorder = NullRecorder()) -> None:
        self.needed_elsewhere: Callable[[str], bool] = lambda name: False
        self._deleter = BackgroundDeleter(
            store, recorder=recorder, deleted="subsumedDeleted", left="subsumedLeftToCleaner"
        )
        self._registry = SharedStateRegistry()
        self._freed: list[str] = []
        self._holds = 0
        self._held: dict[Hold, frozenset[str]] = {}

    def retain(self, checkpoints: Iterable[CompletedCheckpoint]) -> None:
        """Keep what these refer to, their own manifests included; again is the same."""
        for checkpoint in checkpoints:
            self._registry.register(checkpoint.checkpoint_id, _names_kept_by(checkpoint))
        self._freed = [name for name in self._freed if name not in self._registry]

    def subsume(self, checkpoints: Iterable[CompletedCheckpoint]) -> None:
        """Let go of these; unreferenced objects are deleted soon."""
        self._forget([checkpoint.checkpoint_id for checkpoint in checkpoints])

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects that another owner needs no more, except those that checkpoints need."""
        free = [name for name in names if name not in self._registry]
        if free:
            self._deleter.delete(free)

    def hold(self, checkpoint: CompletedCheckpoint) -> Hold:
        """Keep a retained checkpoint's objects until :meth:`release`, even if it is subsumed.

        Neither this object deletes them, nor the cleaner that asks :meth:`held`.
        """
        self._holds += 1
        # The registry's holders are numbers; a checkpoint's is above zero.
        self._registry.register(-self._holds, _names_kept_by(checkpoint))
        self._held[-self._holds] = frozenset(_names_kept_by(checkpoint))
        return -self._holds

    def held(self) -> set[str]:
        """Return the names that a hold keeps, for the cleaner: no manifest that is retained may name them any more."""
        return set().union(*self._held.values())

    def release(self, hold: Hold) -> None:
        """Let go of a hold."""
        self._held.pop(hold, None)
        self._forget([hold])

    async def settled(self) -> None:
        """Return when the deletions that have begun have ended: what is being deleted is not to be found meanwhile."""
        await self._deleter.settled()

    async def close(self) -> None:
        """Cancel the deletions that run. Idempotent."""
        await self._deleter.close(finish=False)

    def _forget(self, holders: Sequence[int]) -> None:
        self._freed += [name for holder in holders for name in self._registry.unregister(holder)]
        if len(self._freed) >= _DELETE_TOGETHER:
            freed = [name for name in self._freed if not self.needed_elsewhere(name)]
            self._freed = []
            reach("C7")
            manifests = [name for name in freed if manifest_sequence(name) is not None]
            others = [name for name in freed if manifest_sequence(name) is None]
            self._deleter.delete(manifests, others)


def _names_kept_by(checkpoint: CompletedCheckpoint) -> list[str]:
    """Return what a checkpoint keeps alive, its own manifest included; oldest first."""
    return [*referenced_objects(checkpoint), manifest_name(checkpoint.checkpoint_id)]
