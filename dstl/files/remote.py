"""A checkpoint directory on an executor's host: it takes files, and asks the coordinator for all others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from dstl.errors import Fenced, Invalid, TaskManagerLost
from dstl.files.directory import Directory, Listed, overlaid
from dstl.files.file_log import ALL_LANES, FileLog
from dstl.files.options import FileOptions
from dstl.files.riders import Rider
from dstl.files.rules import batch_of, is_late
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import FindFile, ListFiles, ServeRoot, StatFile, StoredFiles
from dstl.runtime import Runtime
from handles.file_record import FileEntry, barrier_batch

_log = logging.getLogger(__name__)

_TOGETHER_S = 0.005
"""Tasks that end within so long share a request."""


class RemoteDirectory(Directory):
    """A checkpoint directory of which another process decides. One event loop.

    Args:
        root: Its URI.
        member: This host's service, as the coordinator knows it.
        log: What this process takes; its reader's stores are closed with this.
        coordinator: Who decides.
        runtime: Clock, jitter.
        options: When files become durable.
    """

    def __init__(
        self,
        root: str,
        member: str,
        log: FileLog,
        coordinator: AsyncConnection,
        runtime: Runtime,
        options: FileOptions,
    ) -> None:
        super().__init__(root, log)
        self.log = log
        self._member = member
        self._coordinator = coordinator
        self._serves = ""
        self._commits = 0  # that have begun; one that is tried again has the same batch
        self._committed = -1
        self._serving = asyncio.Lock()
        self._runtime = runtime
        # A file is stored, and the coordinator knows where, before its put returns.
        self._stores_at_once = options.durability == "task"
        # A file waits until the offsets of its batch are durable; else they were before a task began.
        self._asks_always = options.sources == "keep"
        log.stores_in_background = not self._stores_at_once
        self._storing = asyncio.Lock()
        self._putting = 0
        self._is_ending = False

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file of a task."""
        if barrier_batch(path) is not None:
            raise Invalid(f"{self.root}/{path} is written by the driver alone")
        if self._is_ending:
            # Until the connection ends: the task's next attempt finds the host's next service.
            await asyncio.Event().wait()
        self._putting += 1
        try:
            await self._put(path, run, attempt, content)
        finally:
            self._putting -= 1

    async def _put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        await self._serve(run)
        if is_late(path, self._committed):
            return
        rider = await self._log.put(path, run, attempt, content)
        if rider is not None and self._stores_at_once:
            await self._store(run)
        # A commit may have begun meanwhile: then this file is the next one's.
        await self._serve(run)

    async def delete(self, path: str, run: str) -> None:
        """Take a deletion."""
        await self._serve(run)
        found = await self.find(path, run)
        if found is not None and found[1] < 0:
            for name, _, _ in await self.listing(path, run):
                await self.delete(f"{path}/{name}", run)
        elif found is not None:
            self._log.delete(path, run)

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        told = await self._coordinator.call(ListFiles(f"{self.root}/{path}", run))
        return overlaid(path, told.entries, self._log.riders.seen_by(run, path))

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        found = await self._counted(path, run)
        if found is not None:
            return path, found.size, found.modified_ms
        if self._log.riders.find(path, run) is None:
            told = await self._coordinator.call(StatFile(f"{self.root}/{path}", run))
            if told.size >= 0:
                return path, told.size, told.modified_ms
            if told.is_directory:
                return path, -1, 0
        return (path, -1, 0) if overlaid(path, (), self._log.riders.seen_by(run, path)) else None

    async def locate(self, path: str, run: str) -> Rider | FileEntry | None:
        """Return where a file lies: on this host, or where the coordinator says."""
        found = await self._counted(path, run)
        if found is None and self._log.riders.find(path, run) is None:
            found = await self._ask(path, run)
        return found

    async def _counted(self, path: str, run: str) -> Rider | FileEntry | None:
        """Return what counts of a file that this host has put; None where it has put none, or none that counts.

        Of changes that are read the batch is over, and another host's attempt may be the one that Spark has kept: also
        where its commit has begun and this host has not heard of it.
        """
        rider = self._log.riders.find(path, run)
        if rider is None or rider.is_deletion:
            return None
        if batch_of(path) < 0:
            return rider
        return await self._ask(path, run) or (None if is_late(path, self._committed) else rider)

    async def _ask(self, path: str, run: str) -> FileEntry | None:
        """Ask the coordinator where a committed file lies."""
        return (await self._coordinator.call(FindFile(f"{self.root}/{path}", run))).entry

    def committing(self, batch: int) -> None:
        """The commit of a batch has begun: the next file belongs to another one."""
        self._serves, self._committed = "", batch
        self._commits += 1

    async def hand_over(self) -> None:
        """Store what no record holds and tell the coordinator: this process is about to end, and takes no more files.

        Raises:
            DstlError: The store did not take it, or the coordinator does not answer.
        """
        self._is_ending = True
        while self._putting:
            await self._runtime.clock.sleep(_TOGETHER_S)
        for run, part in await self._log.hand_over():
            try:
                await self._coordinator.call(StoredFiles(self._member, self.root, run, part.files, part.segments))
            except (Fenced, TaskManagerLost) as error:
                _log.info("%s: %s", self.root, error)

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await super().close()
        await self._log.reader.close()
        await self._log.reader.store.close()
        await self._log.reader.plain.close()

    async def _store(self, run: str) -> None:
        """Store what was put, and tell the coordinator; whoever waits here meanwhile shares the next request."""
        await self._runtime.clock.sleep(_TOGETHER_S)
        async with self._storing:
            part = await self.log.store(run, ALL_LANES)
            if part is not None:
                await self._coordinator.call(StoredFiles(self._member, self.root, run, part.files, part.segments))

    async def _serve(self, run: str) -> None:
        """Tell the coordinator, before the first file of a run since the last commit, that this host takes part."""
        key = run or "-"
        if self._serves == key and not self._asks_always:
            return
        async with self._serving:
            while self._serves != key or self._asks_always:
                commits = self._commits
                served = await self._coordinator.call(ServeRoot(self._member, self.root, run))
                # Where a commit has begun meanwhile, the coordinator's note of this host may have ended with it.
                if commits == self._commits:
                    self._serves, self._committed = key, served.batch
                    return
