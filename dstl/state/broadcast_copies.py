"""Broadcast states as a worker process has read them: once for each checkpoint, whatever the number of its tasks."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dstl.state.source import Entry

__all__ = ["BroadcastCopies", "ReadWhole"]

ReadWhole = Callable[[int, Callable[[], list[Entry] | None]], list[Entry] | None]
"""Returns all entries of a broadcast state by its number; calls the function where they are not at hand."""


class BroadcastCopies:
    """Holds the content of each broadcast state of one job at the last checkpoint that a task has read it of.

    A state takes no more than what a task reads whole (``BroadcastState.whole_bytes``). Not thread-safe.
    """

    def __init__(self) -> None:
        self._job: Hashable = None
        self._held: dict[tuple[str, int], tuple[int | None, list[Entry]]] = {}

    def whole(
        self,
        job: Hashable,
        operator: str,
        checkpoint: int | None,
        state: int,
        fetch: Callable[[], list[Entry] | None],
    ) -> list[Entry] | None:
        """Return all entries of a state, from here or by ``fetch``. The list is shared: nobody may change it.

        Args:
            job: Tells the job, and its coordinator, from others, whose checkpoints have the same numbers.
            operator: The operator.
            checkpoint: The checkpoint whose content is wanted; None for that of a new job.
            state: The state's number.
            fetch: Reads them; None from it, for a state that is too large, is returned and not kept.
        """
        if job != self._job:
            self._job = job
            self._held.clear()
        held = self._held.get((operator, state))
        if held is not None and held[0] == checkpoint:
            return held[1]
        found = fetch()
        if found is None:
            self._held.pop((operator, state), None)
        else:
            self._held[operator, state] = checkpoint, found
        return found
