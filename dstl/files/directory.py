"""A checkpoint directory as a JVM's calls see it, and what the coordinator's and a host's have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from dstl.errors import ObjectExists, ObjectNotFound
from dstl.files.file_log import FileLog
from dstl.files.index import FileIndex
from dstl.files.riders import Rider
from dstl.rpc.codec import Payload
from handles.file_record import FileEntry

Listed = tuple[str, int, int]
"""``(name, size, modified_ms)``; the size of a directory is -1."""


class Directory(ABC):
    """A checkpoint directory. One event loop.

    Args:
        root: Its URI.
        log: What this process takes of it.

    Attributes:
        calls: How many are at work here.
        writers: The runs of which something was put or deleted; "" is no run.
    """

    def __init__(self, root: str, log: FileLog) -> None:
        self.root = root
        self.calls = 0
        self.writers: set[str] = set()
        self._log = log

    @abstractmethod
    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; a barrier is durable when this returns.

        Raises:
            Fenced: The run is over, or another driver has the directory.
        """

    @abstractmethod
    async def delete(self, path: str, run: str) -> None:
        """Take a deletion of a file, or of all files of a directory."""

    @abstractmethod
    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies directly in a directory; nothing where there is none."""

    @abstractmethod
    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory; None where there is neither."""

    @abstractmethod
    async def locate(self, path: str, run: str) -> Rider | FileEntry | None:
        """Return where the file lies that a run sees under a path; None where there is none."""

    async def read(self, path: str, run: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return a file's bytes, or a part of them, which is short at its end.

        Args:
            path: The file.
            run: Who asks.
            offset: Where to begin.
            length: How many bytes; None: all that follow.

        Raises:
            ObjectNotFound: There is none.
        """
        found = await self.locate(path, run)
        if found is None:
            raise ObjectNotFound(f"{self.root}/{path} is not there")
        if isinstance(found, Rider):
            return await self._log.read(found, offset, length)
        return await self._log.reader.read(found, offset, length)

    def is_over(self, ended: Collection[str]) -> bool:
        """Return True where nothing is lost when this is closed, for nobody writes here any more.

        Args:
            ended: The runs that have ended.
        """
        return not self.calls and all(run in ended for run in (*self.writers, *self._log.riders.runs()))

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await self._log.close()

    async def check_free(self, path: str, run: str) -> None:
        """Check that a name is free.

        Raises:
            ObjectExists: It is not.
        """
        if await self.find(path, run) is not None:
            raise ObjectExists(f"{self.root}/{path} is there already")


def listed(path: str, index: FileIndex, riders: Sequence[Rider]) -> list[Listed]:
    """Return what lies in a directory as a run sees it: the records, and what it has put and deleted since.

    Args:
        path: The directory.
        index: What the records say.
        riders: What the run sees above them.
    """
    front = f"{path}/" if path else ""
    gone = [r.path[len(front) :] for r in riders if r.is_deletion and r.path.startswith(front) and r.path in index]
    left = Counter(each.partition("/")[0] for each in gone)
    found = []
    for name in index.tree.names(path):
        if left[name] == index.tree.count(path, name):
            continue
        entry = index.find(f"{front}{name}")
        found.append((name, entry.size, entry.modified_ms) if entry else (name, -1, 0))
    return overlaid(path, found, iter(riders))


def overlaid(directory: str, listed: Sequence[Listed], riders: Iterator[Rider]) -> list[Listed]:
    """Return a listing as the riders above it change it."""
    front = f"{directory}/" if directory else ""
    found = {each[0]: each for each in listed}
    for rider in riders:
        if not rider.path.startswith(front):
            continue
        name, _, below = rider.path[len(front) :].partition("/")
        if below:
            if not rider.is_deletion:
                found.setdefault(name, (name, -1, 0))
        elif rider.is_deletion:
            found.pop(name, None)
        else:
            found[name] = (name, rider.size, rider.modified_ms)
    return [found[name] for name in sorted(found)]
