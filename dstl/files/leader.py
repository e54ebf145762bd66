"""A checkpoint directory at its coordinator: what its runs see of it, and put there."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from dstl.checkpoint.fleet.members import Member
from dstl.errors import DstlError, ObjectExists
from dstl.files.barriers import Barriers
from dstl.files.config import FileConfig
from dstl.files.directory import Directory, Listed, listed
from dstl.files.file_log import FileLog
from dstl.files.file_run import FileRun
from dstl.files.namespace import METADATA
from dstl.files.options import FileOptions
from dstl.files.participants import Participants
from dstl.files.records import OwnRecords, Records
from dstl.files.riders import Rider
from dstl.files.rules import batch_of, newest_batch
from dstl.rpc.codec import Payload
from dstl.runtime import Clock, Runtime
from handles.file_record import FileEntry, barrier_batch

_log = logging.getLogger(__name__)


class LeaderDirectory(Directory):
    """A checkpoint directory of which this process decides, and may hold files as well. One event loop.

    Reading takes nothing over; the first write wins the fence.

    Args:
        root: Its URI.
        log: What this process itself takes.
        records: Its records; closed with this.
        clock: Time.
        options: When files become durable.

    Attributes:
        run: The runs, and the index.
        barriers: The files that make durable what was put before them.
    """

    def __init__(
        self, root: str, log: FileLog, records: Records, clock: Clock, options: FileOptions = FileOptions()
    ) -> None:
        super().__init__(root, log)
        self.run = records.run
        self._records = records
        self.barriers = Barriers(root, log, records, clock, options)

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; see :meth:`Directory.put`."""
        self.run.admit(run)
        await self.barriers.settle(run)
        if not path.startswith("offsets/"):
            await self.barriers.begun(run)
        await self._records.lead()
        held = self._log.riders.find(path, run)
        if path == METADATA and path in self.run.index and not (held is not None and held.is_deletion):
            # Since it was looked for another driver has led.
            raise ObjectExists(f"{self.root}/{path} is there already: another driver has begun the query")
        self.run.admit(run)
        if barrier_batch(path) is not None:
            await self.barriers.put(path, run, attempt, content)
        elif not self.barriers.is_too_late(path, run):
            await self._log.put(path, run, attempt, content)

    async def delete(self, path: str, run: str) -> None:
        """Take a deletion; see :meth:`Directory.delete`."""
        self.run.admit(run)
        await self.barriers.settle(run)
        await self._records.lead()
        gone = {path}
        if path not in self.run.index and self._log.riders.find(path, run) is None:
            gone = {*self.run.index.tree.below(path), *(each.path for each in self._log.riders.seen_by(run, path))}
        for each in sorted(gone):
            found = self._log.riders.find(each, run) or self.run.index.find(each)
            if found is not None:
                self._log.reader.forget(found.log_id, found.sqn)
            self._log.delete(each, run)

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        await self.barriers.settle(run)
        await self._records.open()
        return self._seen(path, run)

    def _seen(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory as a run sees it: the records, and what it has put and deleted since."""
        return listed(path, self.run.index, list(self._log.riders.seen_by(run, path)))

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        found = await self.locate(path, run)
        if found is not None:
            return path, found.size, found.modified_ms
        return (path, -1, 0) if self._seen(path, run) else None

    async def locate(self, path: str, run: str) -> Rider | FileEntry | None:
        """Return where a file lies: what this process has of it counts above the records.

        Raises:
            Fenced: It is a task's, and the run is over.
        """
        await self.barriers.settle(run)
        await self._records.open()
        if self._records.participants.has_hosts:
            # Another one's attempt may be the one that counts.
            await self.barriers.chosen(path)
        if batch_of(path) >= 0:
            # Its commit may be lost, and another run's be here instead.
            self.run.check(run)
        rider = self._log.riders.find(path, run)
        if rider is None:
            return self.run.index.find(path)
        return None if rider.is_deletion else rider

    async def entry(self, path: str, run: str) -> FileEntry | None:
        """Return where a committed file lies.

        Raises:
            Fenced: The run is over.
        """
        await self.barriers.wait()
        await self.barriers.chosen(path)
        self.run.check(run)
        await self._records.open()
        return self.run.index.find(path)

    async def serve(self, member: str, run: str) -> int:
        """Another host is about to take the first file since the last commit; returns the last batch that is committed.

        Raises:
            Fenced: The run is over, or another driver has the directory.
        """
        self.run.admit(run)
        await self.barriers.begun(run)
        await self._records.lead()
        async with self.barriers.turn:
            self.run.serve(member, run)
            return newest_batch("commits", (name for name, _, _ in self._seen("commits", run)))

    async def claim(self) -> bool:
        """Take the directory over, as the first write does; returns whether there are files in it."""
        await self._records.open()
        # Nothing is written into a location that may be meant for something else.
        if len(self.run.index):
            await self._records.lead()
        return bool(len(self.run.index))

    def is_over(self, ended: Collection[str]) -> bool:
        """Return True where nobody writes here any more, and no other host has files of no run for a later record."""
        return super().is_over(ended) and self.run.is_served_only_by(ended)

    async def close(self) -> None:
        """Flush, and end. Idempotent."""
        try:
            await self.barriers.flush()
        except DstlError as error:
            _log.error("%s: what was written outside of a query is lost: %s", self.root, error)
        await super().close()
        await self._records.close()


def own_directory(
    root: str,
    log: FileLog,
    hosts: Mapping[str, Member],
    runtime: Runtime,
    config: FileConfig = FileConfig(""),
) -> LeaderDirectory:
    """Return a checkpoint directory that has a log of its own.

    Args:
        root: Its URI.
        log: What this process itself takes; its reader's stores are closed with it.
        hosts: The other hosts' services by name; the caller keeps it up to date.
        runtime: Clock, jitter and ids.
        config: When files become durable, and how long that may take.
    """
    run = FileRun(outlives_hosts=config.files.durability == "task")
    participants = Participants(root, log, run, hosts, config.checkpoints.timeout_s)
    return LeaderDirectory(root, log, OwnRecords(participants, runtime), runtime.clock, config.files)
