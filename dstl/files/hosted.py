"""A checkpoint directory on an executor's host: it takes files, and asks the coordinator for all others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from dstl.errors import Invalid
from dstl.files.directory import Directory, Listed, overlaid
from dstl.files.file_log import FileLog
from dstl.files.namespace import barrier_batch
from dstl.files.reader import FileReader
from dstl.rpc.codec import Call, Payload, R
from dstl.rpc.file_messages import FindFile, ListFiles, ServeRoot, StatFile
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from handles.file_record import FileEntry
from handles.segment_handle import SegmentHandle

__all__ = ["CoordinatorLink", "HostedDirectory"]


class CoordinatorLink(Protocol):
    """Calls the coordinator."""

    async def call(self, message: Call[R]) -> R:
        """Send a request and return its reply."""
        ...


class HostedDirectory(Directory):
    """A checkpoint directory of which another process decides. One event loop.

    Args:
        root: Its URI.
        member: This host's service, as the coordinator knows it.
        store: Its location.
        plain: The directory of plain files.
        log: What this process takes.
        coordinator: Who decides.
        runtime: Jitter.
    """

    def __init__(
        self,
        root: str,
        member: str,
        store: ObjectStore,
        plain: ObjectStore,
        log: FileLog,
        coordinator: CoordinatorLink,
        runtime: Runtime,
    ) -> None:
        super().__init__(root, log)
        self.log = log
        self._member = member
        self._stores = (store, plain)
        self._coordinator = coordinator
        self._reader = FileReader(store, plain, runtime)
        self._serves = ""
        self._serving = asyncio.Lock()

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file of a task."""
        if barrier_batch(path) is not None:
            raise Invalid(f"{self.root}/{path} is written by the driver alone")
        await self._serve(run)
        await self._log.put(path, run, attempt, content)
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
        return overlaid(path, told.entries, self._log.riders.seen_by(run))

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        rider = self._log.riders.find(path, run)
        if rider is not None and not rider.is_deletion:
            return path, rider.size, rider.modified_ms
        if rider is None:
            told = await self._coordinator.call(StatFile(f"{self.root}/{path}", run))
            if told.size >= 0:
                return path, told.size, told.modified_ms
            if told.is_directory:
                return path, -1, 0
        return (path, -1, 0) if overlaid(path, (), self._log.riders.seen_by(run)) else None

    async def read(self, path: str, run: str) -> bytes:
        """Return a file's bytes."""
        rider = self._log.riders.find(path, run)
        if rider is not None:
            if rider.is_deletion:
                raise self._missing(path)
            return self._log.read(rider)
        found = await self._coordinator.call(FindFile(f"{self.root}/{path}", run))
        if not found.segment:
            raise self._missing(path)
        handle = SegmentHandle.from_wire(list(found.segment))
        entry = FileEntry(path, found.size, found.modified_ms, handle, found.log_id, found.sqn)
        return await self._reader.read(entry)

    def complete(self, located: Mapping[str, SegmentHandle]) -> None:
        """The record of the latest persist is durable; see :meth:`FileLog.complete`."""
        self._reader.keep(self.log.complete(located))

    def committing(self) -> None:
        """A commit has begun: the next file belongs to another one."""
        self._serves = ""

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await super().close()
        for store in self._stores:
            await store.close()

    async def _serve(self, run: str) -> None:
        """Tell the coordinator, before the first file of a run since the last commit, that this host takes part."""
        key = run or "-"
        if self._serves == key:
            return
        async with self._serving:
            if self._serves != key:
                await self._coordinator.call(ServeRoot(self._member, self.root, run))
                self._serves = key
