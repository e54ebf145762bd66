"""Reference counts of objects over all retained checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SharedStateRegistry"]


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

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The registered checkpoints, oldest first."""
        return tuple(sorted(self._objects_of))

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
        """Drop a checkpoint's references and return the names that nobody needs any more, newest first.

        An unknown checkpoint frees nothing: its objects may be somebody else's.
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
