"""A checkpoint directory at its coordinator: the index, the fence and the records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import CorruptData, DstlError, Fenced, ObjectExists, ObjectNotFound, OutcomeUnknown, TaskManagerLost
from dstl.files.adoption import plain_entries
from dstl.files.deferred_commit import LINGER_S, DeferredCommit
from dstl.files.directory import Directory, Listed, listed
from dstl.files.file_log import FileLog, Lane
from dstl.files.file_run import WHOLE_EVERY, FileRun
from dstl.files.index import file_steps
from dstl.files.namespace import barrier_batch
from dstl.files.options import FileOptions
from dstl.files.participants import FileHost, Participants
from dstl.files.reader import FileReader, OpenElsewhere
from dstl.files.riders import Rider
from dstl.files.rules import batch_of, is_late
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import PersistedFiles
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from handles.file_record import FILES_OWNER, FileEntry, FileRecord

__all__ = ["OWNER", "CoordinatedDirectory"]

_log = logging.getLogger(__name__)

OWNER = FILES_OWNER
_FRESH_S = 1.0
_FOLLOWED = 16


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
        options: When files become durable.
        open_elsewhere: Opens the locations of other directories, for forks of them.
    """

    def __init__(
        self,
        root: str,
        store: ObjectStore,
        plain: ObjectStore,
        log: FileLog,
        hosts: Mapping[str, FileHost],
        runtime: Runtime,
        options: FileOptions = FileOptions(),
        open_elsewhere: OpenElsewhere | None = None,
        whole_every: int = WHOLE_EVERY,
    ) -> None:
        super().__init__(root, log)
        self.run = FileRun(whole_every, outlives_hosts=options.durability == "task")
        self._store = store
        self._plain = plain
        self._participants = Participants(root, log, hosts, self.run)
        self._runtime = runtime
        self._options = options
        self._beginning: asyncio.Task[None] | None = None
        self._stateful = ""
        self._deferred: DeferredCommit | None = None
        self._manifests = ManifestLog(store, runtime)
        self._reader = FileReader(store, plain, runtime, open_elsewhere=open_elsewhere)
        self._deleter = BackgroundDeleter(store, deleted="filesDeleted", left="filesLeftToCleaner")
        self._turn = asyncio.Lock()
        self._opening = asyncio.Lock()
        self._leads = False
        self._read_at: float | None = None
        self._tail = 0

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Take a file; see :meth:`Directory.put`."""
        self.run.admit(run)
        await self._settle(run)
        if not path.startswith("offsets/"):
            await self._begun(run)
        await self._lead()
        if barrier_batch(path) is None:
            if not self._is_too_late(path, run):
                await self._log.put(path, run, attempt, content)
            return
        async with self._turn:
            await self._commit(path, run, attempt, content)

    async def delete(self, path: str, run: str) -> None:
        """Take a deletion; see :meth:`Directory.delete`."""
        self.run.admit(run)
        await self._settle(run)
        await self._lead()
        gone = {each.path for each in self.run.index if each.path == path or each.path.startswith(f"{path}/")}
        seen = (rider.path for rider in self._log.riders.seen_by(run))
        gone.update(each for each in seen if each == path or each.startswith(f"{path}/"))
        for each in sorted(gone):
            self._log.delete(each, run)

    async def listing(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory."""
        await self._settle(run)
        await self._opened()
        return self._seen(path, run)

    def _seen(self, path: str, run: str) -> list[Listed]:
        """Return what lies in a directory as a run sees it: the records, and what it has put and deleted since."""
        return listed(path, self.run.index, list(self._log.riders.seen_by(run)))

    async def find(self, path: str, run: str) -> Listed | None:
        """Return a file or a directory."""
        await self._settle(run)
        await self._opened()
        return self._found(path, run)

    def _found(self, path: str, run: str) -> Listed | None:
        rider = self._log.riders.find(path, run)
        if rider is not None and not rider.is_deletion:
            return path, rider.size, rider.modified_ms
        entry = self.run.index.find(path) if rider is None else None
        if entry is not None:
            return path, entry.size, entry.modified_ms
        return (path, -1, 0) if self._seen(path, run) else None

    async def read(self, path: str, run: str) -> bytes:
        """Return a file's bytes."""
        await self._settle(run)
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
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
        await self._opened()
        return self.run.index.find(path)

    async def serve(self, member: str, run: str) -> int:
        """Another host is about to take the first file since the last commit; returns the last batch that is committed.

        Raises:
            Fenced: The run is over, or another driver has the directory.
        """
        self.run.admit(run)
        await self._begun(run)
        await self._lead()
        async with self._turn:
            self.run.serve(member, run)
            commits = (barrier_batch(f"commits/{name}") for name, _, _ in self._seen("commits", run))
            return max((batch for batch in commits if batch is not None), default=-1)

    async def store(self, member: str, run: str, part: PersistedFiles) -> None:
        """Another host has stored files of tasks that have not ended yet.

        Raises:
            Fenced: The run is over.
        """
        self.run.store(member, run, part)

    async def claim(self) -> bool:
        """Take the directory over, as the first write does; returns whether there are files in it."""
        await self._opened()
        # Nothing is written into a location that may be meant for something else.
        if len(self.run.index):
            await self._lead()
        return bool(len(self.run.index))

    async def add(self, part: PersistedFiles) -> None:
        """Write a record of files that are stored already."""
        await self._lead()
        async with self._turn:
            await self._write([("", b"")], [part])

    async def flush(self) -> None:
        """Store what was put or deleted outside of any run, which no barrier will follow, and a commit that waits."""
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
        async with self._turn:
            await self._end_deferred()
            if self._leads and self._log.riders.of(""):
                self._log.end_other_runs("")
                await self._write([("", b"")], [await self._log.persist("")])

    async def close(self) -> None:
        """Flush, and end. Idempotent."""
        try:
            await self.flush()
        except DstlError as error:
            _log.error("%s: what was written outside of a query is lost: %s", self.root, error)
        await self._deleter.close()
        await super().close()
        await self._reader.close()
        await self._store.close()
        await self._plain.close()

    async def _commit(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> None:
        """Write the record of a barrier, or let it ride in the next one's."""
        batch = barrier_batch(path, "commits")
        if self._deferred is not None and (batch is not None or self._deferred.run != run):
            await self._end_deferred()
            self.run.admit(run)
            await self._lead()
        if self._found(path, run) is not None:
            raise ObjectExists(f"{self.root}/{path} is there already")
        self.run.begin(run)
        self._log.end_other_runs(run)
        rider = await self._log.put(path, run, attempt, content)
        assert rider is not None
        barrier = (path, b"".join(content))
        deferred = self._deferred
        if batch is None and run and run == self._stateful and self._options.sources == "keep":
            # The tasks of the batch wait for it.
            self._beginning = asyncio.get_running_loop().create_task(self._begin_batch(rider, barrier))
            return
        try:
            if batch is None:
                await self._write_offsets(run, barrier)
            else:
                if self._options.commit == "with-next" and run:
                    self._participants.begin(path, run)
                    self._defer(rider, batch, barrier[1])
                else:
                    await self._commit_batch(path, run, barrier[1])
        except BaseException as error:
            self._log.discard(rider)
            self._end_run(run, error, deferred)
            raise
        finally:
            if deferred is not None:
                self._deferred = None
                deferred.end()

    async def _commit_batch(self, path: str, run: str, content: bytes) -> None:
        """Write the record of a commit."""
        batch = barrier_batch(path, "commits")
        assert batch is not None
        self._participants.begin(path, run)
        await self._write([(path, content)], await self._participants.persist(batch + 1))

    async def _write_offsets(self, run: str, barrier: tuple[str, bytes]) -> None:
        """Write the record of a batch's offsets, and of the commit before where that waits for it."""
        deferred = self._deferred
        parts = await deferred.parts if deferred is not None else []
        before = [(deferred.path, deferred.content)] if deferred is not None else []
        try:
            own = await self._log.persist(run, {Lane.DRIVER})
        except BaseException:
            await self._participants.reset()
            raise
        await self._write([*before, barrier], [*parts, own])

    async def _begin_batch(self, rider: Rider, barrier: tuple[str, bytes]) -> None:
        """Write the record of a batch's offsets while the batch runs; where that fails its run is over."""
        async with self._turn:
            deferred = self._deferred
            try:
                self.run.admit(rider.run)
                await self._write_offsets(rider.run, barrier)
            except DstlError as error:
                _log.error("%s: %s is lost, and the run with it: %s", self.root, rider.path, error)
                self._log.discard(rider)
                self._end_run(rider.run, error, deferred)
                self.run.end(rider.run, error)
            finally:
                self._deferred = None
                if deferred is not None:
                    deferred.end()

    async def _begun(self, run: str) -> None:
        """Wait until the offsets of the batch that runs are durable.

        Raises:
            DstlError: They never will be.
        """
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
            self.run.admit(run)

    def _defer(self, rider: Rider, batch: int, content: bytes) -> None:
        """Begin to upload what a commit takes, and go on."""
        loop = asyncio.get_running_loop()
        parts = loop.create_task(self._participants.persist(batch + 1))
        # Tasks that have put state in this batch put some in the next one.
        changes = (batch_of(each.path) == batch for each in self._log.riders.of(rider.run))
        self._stateful = rider.run if self._participants.has_hosts or any(changes) else ""
        self._deferred = DeferredCommit(rider.path, rider.run, batch, content, rider, parts)
        self._deferred.late = loop.create_task(self._commit_late(self._deferred))

    async def _commit_late(self, deferred: DeferredCommit) -> None:
        """Give a commit a record of its own when no other one has come."""
        await self._runtime.clock.sleep(LINGER_S)
        await asyncio.wait([deferred.parts])
        async with self._turn:
            if self._deferred is deferred:
                await self._end_deferred()

    async def _settle(self, run: str) -> None:
        """Let nobody but the run itself see a barrier that no record holds yet."""
        if self._beginning is not None and run != self._stateful:
            await asyncio.wait([self._beginning])
        if self._deferred is not None and self._deferred.run != run:
            async with self._turn:
                await self._end_deferred()
        if self.run.is_new(run):
            await self._check_leads(run)

    async def _check_leads(self, run: str) -> None:
        """Let no run begin with what this process knows where another driver has the directory since."""
        async with self._turn:
            if self._leads:
                try:
                    await self._manifests.check_leads()
                except Fenced as error:
                    self._end_run(self.run.current, error, None)
            self.run.meet(run)

    async def _end_deferred(self) -> None:
        """Write the record of a commit that waits. Where that fails its run is over, which is told of it."""
        deferred = self._deferred
        if deferred is None:
            return
        try:
            await self._write([(deferred.path, deferred.content)], await deferred.parts)
        except DstlError as error:
            _log.error("%s: %s is lost, and runs again: %s", self.root, deferred.path, error)
            self._end_run(deferred.run, error, deferred)
        finally:
            self._deferred = None
            deferred.end()

    def _end_run(self, run: str, error: BaseException, deferred: DeferredCommit | None) -> None:
        """A record has failed: say whether its run is over."""
        if deferred is not None:
            self._log.discard(deferred.rider)
        is_another = isinstance(error, (Fenced, OutcomeUnknown)) or self._manifests.is_unknown
        if is_another or deferred is not None or isinstance(error, TaskManagerLost):
            # The next run looks what became of the record, and fences anew.
            self.run.end(run, error)
            if is_another:
                self._leads, self._read_at = False, None

    def _is_too_late(self, path: str, run: str) -> bool:
        """Return True for a file of a task whose batch is committed, or as good as that."""
        if self._deferred is not None:
            return self.run.is_final(path) or is_late(path, self._deferred.batch)
        return self.run.is_final(path, lambda barrier: self._log.riders.find(barrier, run) is not None)

    async def _write(self, barriers: Sequence[tuple[str, bytes]], parts: Sequence[PersistedFiles]) -> None:
        """Write the record of barriers, and tell those that have a part in it."""
        manifests = self._manifests
        sequence = manifests.next_sequence
        *also, (barrier, content) = barriers
        try:
            step = self.run.step(barrier, content, parts, sequence, manifests.boundary, also)
            oldest = sequence if step.record.is_whole else 0
            await manifests.commit_files(OWNER, step.record, step.inlined, oldest=oldest)
        except BaseException as error:
            # Whoever was fenced may have written the record before it, without hearing of it.
            if manifests.is_unknown or isinstance(error, Fenced):
                self._participants.abandon()
            else:
                await self._participants.reset()
            raise
        self.run.index.apply(step.record, sequence)
        self._tail = sequence
        self._reader.keep(await self._participants.complete(step.located, barrier))
        if step.record.is_whole:
            self._deleter.delete(self.run.index.take_free(manifests.boundary))

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
        began = self._runtime.clock.now()
        if self._tail and await self._follow():
            self._read_at = began
            return
        scan = await self._manifests.scan()
        run = self.run
        steps = file_steps(scan, self._store.location, OWNER)
        for sequence, files in steps:
            run.index.apply(files, sequence)
        if not steps:
            await self._adopt()
        run.index.take_free(0)
        self._tail, self._read_at = scan.tail, began

    async def _adopt(self) -> None:
        """Take over the plain files that are there; the first record will be a whole one, and have them."""
        self.run.index.apply(FileRecord.of("", "", await plain_entries(self._plain), is_whole=True), 0)

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
