"""The checkpoint directories that a process has open: each until its query has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dstl.errors import DstlError
from dstl.files.directory import Directory

_log = logging.getLogger(__name__)

_MOST_ENDED = 10_000
"""Runs of which it is remembered that they have ended: what tasks that nobody waits for still bring of one comes within
minutes."""

D = TypeVar("D", bound=Directory)


class OpenDirectories(Generic[D]):
    """Opens directories as they are asked for, and closes those of queries that have ended. One event loop.

    Args:
        open_directory: Opens one by its root.

    Attributes:
        ended: The runs that have ended.
    """

    def __init__(self, open_directory: Callable[[str], D]) -> None:
        self._open_directory = open_directory
        self._open: dict[str, D] = {}
        self._closing: dict[str, asyncio.Task[None]] = {}
        self.ended: dict[str, None] = {}

    def __iter__(self) -> Iterator[D]:
        return iter(list(self._open.values()))

    async def of(self, root: str) -> D:
        """Return the directory of a root, opened where it is not open; one that is being closed is waited for."""
        while (closing := self._closing.get(root)) is not None:
            await asyncio.wait([closing])
        found = self._open.get(root)
        if found is None:
            self._close_those_over()
            found = self._open[root] = self._open_directory(root)
        return found

    def end_run(self, run: str) -> None:
        """A run of a query has ended: its directory is closed, once no call is at work there."""
        self.ended[run] = None
        if len(self.ended) > _MOST_ENDED:
            del self.ended[next(iter(self.ended))]
        self._close_those_over()

    async def close(self) -> None:
        """Close them all. Idempotent."""
        if self._closing:
            await asyncio.wait(self._closing.values())
        for directory in self:
            await directory.close()

    def _close_those_over(self) -> None:
        for root, directory in list(self._open.items()):
            if directory.is_over(self.ended):
                del self._open[root]
                self._closing[root] = asyncio.get_running_loop().create_task(self._close(root, directory))

    async def _close(self, root: str, directory: D) -> None:
        try:
            await directory.close()
        except DstlError as error:
            _log.warning("%s was not closed well: %s", root, error)
        finally:
            del self._closing[root]
