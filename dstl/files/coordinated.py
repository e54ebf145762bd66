"""A checkpoint directory at its coordinator: the index, the fence and the records."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import CorruptData, DstlError, Fenced, ObjectNotFound, OutcomeUnknown, TaskManagerLost
from dstl.files.adoption import plain_entries
from dstl.files.directory import Directory, Listed, overlaid
from dstl.files.file_log import ALL_LANES, FileLog, Lane
from dstl.files.file_run import FileRun
from dstl.files.index import file_steps
from dstl.files.namespace import barrier_batch
from dstl.files.reader import FileReader
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import PersistedFiles
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from handles.file_record import FileEntry, FileRecord
from handles.segment_handle import SegmentHandle

__all__ = ["OWNER", "CoordinatedDirectory", "FileHost"]

_log = logging.getLogger(__name__)

OWNER = "files"
"""Stands for the query in the records of such a location: no ``StateBackend`` takes it for its own."""
_FRESH_S = 1.0
_FOLLOWED = 16


class FileHost(Protocol):
    """A host that takes files of a directory."""

    async def persist(self, root: str, run: str, version: int) -> PersistedFiles:
        """Make what it has durable, or hand it over."""
        ...

    async def complete(self, root: str, located: Mapping[str, SegmentHandle]) -> None:
        """The record is durable."""
        ...

    async def reset(self, root: str) -> None:
        """The record was certainly not written."""
        ...


class CoordinatedDirectory(Directory):
    """A checkpoint directory of which this process decides, and may hold files as well. One event loop.

    Reading takes nothing over: another driver's directory is read as its latest record leaves it. The first write wins
    the fence.

    Args:
        root: Its URI.
        store: Its location.
        plain: The directory of plain files, which are adopted where there is no log yet.
        log: What this process itself takes.
        hosts: The other hosts' services by name; the caller keeps it up to date.
        runtime: Clock, jitter and ids.
    """

    def __init__(
        self,
        root: str,
        store: ObjectStore,
        plain: ObjectStore,
        log: FileLog,
        hosts: Mapping[str, FileHost],
        runtime: Runtime,
    ) -> None:
        super().__init__(root, log)
        self.run = FileRun()
        self._store = store
        self._plain = plain
        self._hosts = hosts
        self._runtime = runtime
        self._manifests = ManifestLog(store, runtime)
        self._reader = FileReader(store, plain, runtime)
        self._deleter = BackgroundDeleter(store, deleted="filesDeleted", left="filesLeftToCleaner")
        self._turn = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._leads = False
        self._read_at: float | None = None
        self._tail = 0

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; see :meth:`Directory.put`."""
        self.run.admit(run)
        await self._lead()
        if barrier_batch(path) is None:
            await self._log.put(path, run, attempt, content)
            return
        async with self._turn:
            await self._commit(path, run, attempt, content)

    async def delete(self, path: str, run: str) -> None:
        """Take a deletion; see :meth:`Directory.delete`."""
        self.run.admit(run)
        await self._lead()
        gone = {each.path for each in self.run.index if each.path == path or each.path.startswith(f"{path}/")}
        seen = (rider.path for rider in self._log.riders.seen_by(run))
        gone.update(each for each in seen if each == path or each.startswith(f"{path}/"))
        for each in sorted(gone):
            self._log.delete(each, run)

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        await self._opened()
        return self._seen(path, run)

    def _seen(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory as a run sees it: the records, and what it has put and deleted since."""
        index, riders = self.run.index, list(self._log.riders.seen_by(run))
        front = f"{path}/" if path else ""
        gone = [r.path[len(front) :] for r in riders if r.is_deletion and r.path.startswith(front) and r.path in index]
        left = Counter(each.partition("/")[0] for each in gone)
        found = []
        for name in index.tree.names(path):
            if left[name] == index.tree.count(path, name):
                continue
            entry = index.find(f"{path}/{name}" if path else name)
            found.append((name, entry.size, entry.modified_ms) if entry else (name, -1, 0))
        return overlaid(path, found, iter(riders))

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        await self._opened()
        rider = self._log.riders.find(path, run)
        if rider is not None and not rider.is_deletion:
            return path, rider.size, rider.modified_ms
        entry = self.run.index.find(path) if rider is None else None
        if entry is not None:
            return path, entry.size, entry.modified_ms
        return (path, -1, 0) if self._seen(path, run) else None

    async def read(self, path: str, run: str) -> bytes:
        """Return a file's bytes."""
        await self._opened()
        rider = self._log.riders.find(path, run)
        if rider is not None and not rider.is_deletion:
            return self._log.read(rider)
        entry = self.run.index.find(path) if rider is None else None
        if entry is None:
            raise self._missing(path)
        return await self._reader.read(entry)

    async def entry(self, path: str) -> FileEntry | None:
        """Return where a committed file lies."""
        await self._opened()
        return self.run.index.find(path)

    async def serve(self, member: str, run: str) -> None:
        """Another host is about to take the first file since the last commit.

        Raises:
            Fenced: The run is over, or another driver has the directory.
        """
        self.run.admit(run)
        await self._lead()
        async with self._turn:
            self.run.serve(member, run)

    async def flush(self) -> None:
        """Store what was put or deleted outside of any run, which no barrier will follow."""
        async with self._turn:
            if self._leads and self._log.riders.of(""):
                self._log.end_other_runs("")
                await self._write("", b"", [await self._log.persist("")])

    async def close(self) -> None:
        """Flush, and end. Idempotent."""
        try:
            await self.flush()
        except DstlError as error:
            _log.error("%s: what was written outside of a query is lost: %s", self.root, error)
        await self._deleter.close()
        await super().close()
        await self._store.close()
        await self._plain.close()

    async def _commit(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Write the record of a barrier."""
        await self.check_free(path, run)
        self.run.begin(run)
        self._log.end_other_runs(run)
        rider = await self._log.put(path, run, attempt, content)
        assert rider is not None
        whole = b"".join(content)
        try:
            if barrier_batch(path, "commits") is None:
                await self._write(path, whole, [await self._log.persist(run, {Lane.DRIVER})])
            else:
                await self._commit_batch(path, run, whole)
        except BaseException as error:
            self._log.discard(rider)
            if isinstance(error, (Fenced, OutcomeUnknown, TaskManagerLost)):
                # The next run looks what became of the record, and fences anew.
                self.run.end(run)
                self._leads = self._leads and isinstance(error, TaskManagerLost)
            raise

    async def _commit_batch(self, path: str, run: str, content: bytes) -> None:
        try:
            self.run.check_hosts(path)
            served = {each: self._hosts.get(each) for each in self.run.serving}
            gone = sorted(each for each, host in served.items() if host is None)
            if gone:
                raise TaskManagerLost(f"the file service {gone[0]} is gone with files of {path}: restart the query")
            hosts = [host for host in served.values() if host is not None]
            batch = barrier_batch(path, "commits")
            assert batch is not None
            asked = [self._log.persist(run, ALL_LANES), *(h.persist(self.root, run, batch + 1) for h in hosts)]
            parts = await asyncio.gather(*asked, return_exceptions=True)
            failed = [each for each in parts if isinstance(each, BaseException)]
            if failed:
                await self._reset(hosts)
                raise failed[0]
            await self._write(path, content, [each for each in parts if isinstance(each, PersistedFiles)], hosts)
        finally:
            self.run.forget_hosts()

    async def _write(
        self, barrier: str, content: bytes, parts: Sequence[PersistedFiles], hosts: Sequence[FileHost] = ()
    ) -> None:
        """Write a record, and tell those that have a part in it."""
        manifests = self._manifests
        sequence = manifests.next_sequence
        try:
            step = self.run.step(barrier, content, parts, sequence, manifests.boundary)
            oldest = sequence if step.record.is_whole else 0
            await manifests.commit_files(OWNER, step.record, step.inlined, oldest=oldest)
        except BaseException:
            if not manifests.is_unknown:
                await self._reset(hosts)
            raise
        self.run.index.apply(step.record, sequence)
        self._tail = sequence
        self._reader.keep(self._log.complete(step.located))
        for host in hosts:
            try:
                await host.complete(self.root, step.located)
            except DstlError as error:
                # It is gone, and the record is there: what it held is in the store.
                _log.warning("%s: a host has gone after %s: %s", self.root, barrier, error)
        if step.record.is_whole:
            self._deleter.delete(self.run.index.take_free(manifests.boundary))

    async def _reset(self, hosts: Sequence[FileHost]) -> None:
        self._log.reset()
        await asyncio.gather(*(host.reset(self.root) for host in hosts), return_exceptions=True)

    async def _lead(self) -> None:
        """Win the fence, once, and read what the log says then."""
        if self._leads:
            return
        async with self._opening:
            if self._leads:
                return
            if self._read_at is None:
                await self._read_log()
            await self._manifests.fence(OWNER)
            await self._read_log()
            self._leads = True

    async def _opened(self) -> None:
        """Read the log: once where this process leads it, else whenever it was read a while ago."""
        if self._leads:
            return
        now = self._runtime.clock.now()
        if self._read_at is not None and now - self._read_at < _FRESH_S:
            return
        async with self._opening:
            if not self._leads and (self._read_at is None or now >= self._read_at):
                await self._read_log()

    async def _read_log(self) -> None:
        """Take over what the records say.

        Raises:
            CorruptData: One of them is damaged.
            Invalid: The location is another query's.
        """
        self._read_at = self._runtime.clock.now()
        if self._tail and await self._follow():
            return
        scan = await self._manifests.scan()
        run = self.run
        steps = file_steps(scan, self._store.location, OWNER)
        for sequence, files in steps:
            run.index.apply(files, sequence)
        if not steps:
            # The first record will be a whole one, and have them.
            run.index.apply(FileRecord.of("", "", await plain_entries(self._plain), is_whole=True), 0)
        run.index.take_free(0)
        self._tail = scan.tail

    async def _follow(self) -> bool:
        """Read the records behind those that are known; False where too much has happened since."""
        tail = await self._manifests.tail()
        if tail - self._tail > _FOLLOWED:
            return False
        for sequence in range(self._tail + 1, tail + 1):
            try:
                record = await self._manifests.read(sequence)
            except (ObjectNotFound, CorruptData):
                return False
            if record.files is not None:
                self.run.index.apply(record.files, sequence)
            self._tail = sequence
        return True
