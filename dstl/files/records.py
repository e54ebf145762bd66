"""The records of a checkpoint directory: the index that they make, the fence, and the writing of the next one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from dstl.checkpoint.manifest.log import ManifestLog
from dstl.checkpoint.spark_commit import FilesStep
from dstl.errors import CorruptData, Fenced, Invalid, ObjectNotFound, TaskManagerLost
from dstl.files.file_run import FileRun, Step
from dstl.files.index import file_steps
from dstl.files.namespace import METADATA, OBJECTS, is_of_a_query
from dstl.files.participants import Participants
from dstl.files.rules import is_ahead, next_version
from dstl.rpc.fleet_messages import Persisted
from dstl.runtime import Runtime
from dstl.store.background_deleter import BackgroundDeleter
from dstl.store.base import ObjectStore
from dstl.store.retry_policy import RetryPolicy
from handles.file_record import FILES_OWNER, PLAIN, FileEntry, FileRecord
from handles.segment_handle import SegmentHandle

FRESH_S = 1.0
"""A look at what another process may write is good for so long: Spark asks the same several times at a start."""
_FOLLOWED = 16
"""Records that are read one by one, a request each; more than that, a scan of the log is quicker."""

Barrier = tuple[str, bytes]
"""Path and bytes of a file whose record makes durable what was put before it; the path is empty where there is none."""


class NextRecord:
    """Barriers, ready to become a record, or a part of one.

    Args:
        run: Decides what is in it.
        barriers: In their order.
        parts: What each participant has persisted for it.
        whole: Number of the newest record with the whole index.

    Attributes:
        made: The record; None until its number is known.
        sequence: Its number.
        barrier: Path of the last barrier.
    """

    def __init__(self, run: FileRun, barriers: Sequence[Barrier], parts: Sequence[Persisted], whole: int) -> None:
        self._run, self._barriers, self._parts, self._whole = run, barriers, parts, whole
        self.made: Step | None = None
        self.sequence = 0
        self.barrier = barriers[-1][0]

    def step(self, sequence: int, in_front: Sequence[int] = ()) -> FilesStep:
        """Return the record of this number; see :meth:`~dstl.checkpoint.spark_commit.CheckpointInTheMaking.step`."""
        *also, (barrier, content) = self._barriers
        made = self._run.step(barrier, content, self._parts, sequence, self._whole, also, in_front)
        self.made, self.sequence = made, sequence
        return FilesStep(made.record, made.inlined, sequence if made.record.is_whole else self._whole)


class Records(ABC):
    """The records of one directory as this process reads and writes them. One event loop.

    Reading takes nothing over: another driver's directory is read as its latest record leaves it.

    Args:
        manifests: The log.
        participants: Those who have a part in the next record.
        runtime: Clock.

    Attributes:
        run: Has the index.
        participants: The same.
        reader: Reads what records name; closed with this, and so is where it finds the plain files that are adopted
            where there is no log yet.
        leads: True while this process has won the fence, for all that it knows.
    """

    def __init__(self, manifests: ManifestLog, participants: Participants, runtime: Runtime) -> None:
        self.run, self.participants, self.reader = participants.run, participants, participants.log.reader
        self.leads = False
        self._manifests = manifests
        self._clock = runtime.clock
        self._retries = RetryPolicy(runtime)
        self._opening = asyncio.Lock()
        self._read_at: float | None = None
        self._tail = 0

    async def lead(self, query_id: str = "") -> None:
        """Win the fence, unless this process has it, and read what the log says then.

        Args:
            query_id: The query that is to have the directory, where the caller knows it.

        Raises:
            Fenced: Somebody newer has taken over.
            Invalid: The location is another query's.
            DstlError: As :meth:`ManifestLog.fence` and :meth:`ManifestLog.scan`.
        """
        if self.leads:
            self._check_owner(query_id)
            return
        async with self._opening:
            if self.leads:
                return
            if self._read_at is None:
                await self._look()
            known = self.run.newest_barriers()
            await self._fence(query_id)
            await self._look()
            self._check_owner(query_id)
            self.leads = True
            if self.run.newest_barriers() != known:
                self.run.end_all(TaskManagerLost("another driver has written offsets or commits since it looked"))

    async def open(self) -> None:
        """Read the log: once where this process leads it, else whenever it was read a while ago."""
        if self.leads:
            return
        now = self._clock.now()
        if self._read_at is not None and now - self._read_at < FRESH_S:
            return
        async with self._opening:
            if not self.leads and (self._read_at is None or now >= self._read_at):
                await self._look()

    async def check_leads(self) -> None:
        """Look whether the log is still this process's, where it leads; else let the next look be a fresh one.

        Raises:
            Fenced: A newer driver has taken it over.
            Unavailable: The store did not answer.
        """
        if self.leads:
            await self._manifests.check_leads()
        else:
            self._read_at = None

    def step_down(self) -> None:
        """Another driver has the directory, or nobody knows: the next write reads what has become, and fences anew."""
        self.leads, self._read_at = False, None

    @property
    def is_unknown(self) -> bool:
        """True where nobody knows what became of the latest record."""
        return self._manifests.is_unknown

    async def write(self, barriers: Sequence[Barrier], parts: Sequence[Persisted]) -> None:
        """Write the record of barriers, and tell those that have a part in it.

        Raises:
            DstlError: As :meth:`ManifestLog.commit`; they were told that too.
        """
        record = NextRecord(self.run, barriers, parts, self._boundary())
        await self._end(record, self._send(record))

    async def commit(self, batch: int, run: str, barrier: Barrier) -> None:
        """Have all participants make what they have durable, and write the record of a batch's commit.

        Raises:
            TaskManagerLost: A host is gone, and what it held is lost.
            DstlError: As :meth:`write`.
        """
        parts = await self.begin(batch, run, barrier)
        try:
            await self.write([barrier], await parts)
        finally:
            self.drop()

    async def begin(self, batch: int, run: str, barrier: Barrier) -> Coroutine[Any, Any, list[Persisted]]:
        """Begin a batch's commit; returns what has all participants make what they have durable, for :meth:`write`.

        Raises:
            TaskManagerLost: A host is gone, and what it held is lost.
        """
        self.participants.begin(barrier[0], run)
        return self.participants.persist(batch + 1)

    @property
    def is_stateful(self) -> bool:
        """True where others than this process have a part in the commit that was begun, as they will in the next."""
        return self.participants.has_hosts

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await self.reader.close()
        await self.reader.plain.close()

    async def _end(self, record: NextRecord, sending: Awaitable[None]) -> None:
        """Wait for a record, and take it over or give it up."""
        try:
            await sending
        except BaseException as error:
            await self._give_up(record, error)
            raise
        made = record.made
        assert made is not None
        self.run.index.apply(made.change, record.sequence)
        self._tail = record.sequence
        await self.participants.complete(made.located, record.barrier)
        if made.record.is_whole:
            self._let_go(record.sequence)

    async def _give_up(self, record: NextRecord, error: BaseException) -> None:
        """A record was not written, or nobody knows."""
        # Whoever was fenced may have written the record before it, without hearing of it.
        if self.is_unknown or isinstance(error, Fenced):
            self.participants.abandon()
        else:
            await self.participants.reset()

    async def _take_over(self, steps: Sequence[tuple[int, FileRecord]], tail: int, began: float) -> None:
        """Have the index say what the records of a scan that began then do; without any, what the plain files do."""
        for sequence, files in steps:
            self.run.index.apply(files, sequence)
        if not steps:
            await self._adopt()
        self.run.index.take_free(0)
        self._tail, self._read_at = tail, began

    async def _adopt(self) -> None:
        """Take over the plain files that are there; the first record will be a whole one, and have them."""
        plain = self.reader.plain
        entries = await self._retries.repeat(lambda: plain_entries(plain), f"looking for files in {plain.location}")
        version = next_version(entry.path for entry in entries)
        needed = [entry for entry in entries if not is_ahead(entry.path, version)]
        self.run.index.apply(FileRecord.of("", "", needed, is_whole=True), 0)

    @abstractmethod
    def drop(self) -> None:
        """Give up a commit that was begun and has come into no record. Idempotent."""

    @abstractmethod
    def _boundary(self) -> int:
        """Return the number of the newest record with the whole index; 0 for none."""

    @abstractmethod
    def _check_owner(self, query_id: str) -> None:
        """Refuse a query that the location does not belong to."""

    @abstractmethod
    async def _fence(self, query_id: str) -> None:
        """Win the fence."""

    @abstractmethod
    async def _look(self) -> None:
        """Take over what the records say."""

    @abstractmethod
    async def _send(self, record: NextRecord) -> None:
        """Write a record of files."""

    @abstractmethod
    def _let_go(self, whole: int) -> None:
        """Delete what no reader needs any more: there is a new record with the whole index."""


class OwnRecords(Records):
    """Those of a directory that has a log of its own, in a store that is closed with this.

    Args:
        participants: Those who have a part in the next record.
        runtime: Clock, jitter and ids.
    """

    def __init__(self, participants: Participants, runtime: Runtime) -> None:
        store = participants.log.reader.store
        super().__init__(ManifestLog(store, runtime), participants, runtime)
        self._deleter = BackgroundDeleter(store, deleted="filesDeleted", left="filesLeftToCleaner")

    async def close(self) -> None:
        """End what is under way. Idempotent."""
        await self._deleter.close()
        await super().close()
        await self.reader.store.close()

    def drop(self) -> None:
        """Nothing but the participants takes part, and they were told."""

    def _boundary(self) -> int:
        return self._manifests.boundary

    def _check_owner(self, query_id: str) -> None:
        pass  # the first reading has refused a location of checkpoints

    async def _fence(self, query_id: str) -> None:
        await self._manifests.fence(FILES_OWNER)

    async def _send(self, record: NextRecord) -> None:
        sequence = self._manifests.next_sequence
        step = record.step(sequence)
        await self._manifests.commit_files(
            FILES_OWNER, step.record, step.inlined, oldest=sequence if step.record.is_whole else 0
        )

    def _let_go(self, whole: int) -> None:
        self._deleter.delete(self.run.index.take_free(self._manifests.boundary))

    async def _look(self) -> None:
        """Take over what the records say, and the query's id before one that was written here: it has it for good."""
        await self._read()
        log = self.participants.log
        own = log.riders.find(METADATA, "")
        if own is not None and METADATA in self.run.index:
            log.discard(own)
            self.run.end_all(TaskManagerLost("another driver has given the query its id since it looked"))

    async def _read(self) -> None:
        """Take over what the records say.

        Raises:
            CorruptData: One of them is damaged.
            Invalid: The location is another query's.
        """
        began = self._clock.now()
        if self._tail and await self._follow():
            self._read_at = began
            return
        scan = await self._manifests.scan()
        await self._take_over(file_steps(scan, self.reader.store.location, FILES_OWNER), scan.tail, began)

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


async def plain_entries(plain: ObjectStore) -> list[FileEntry]:
    """Return what stock Spark has written into a checkpoint directory: one listing.

    Nothing of it is ever changed or deleted: a query that has moved in can move out again, to where it was.

    Args:
        plain: The directory. Hidden files, as those of half-written ones, are passed over by every store.

    Raises:
        Invalid: There are files that nobody knows, so it is perhaps another directory than was meant; or objects are
            sealed here, which files of Spark's own cannot be.
    """
    entries = []
    async for info in plain.list(""):
        if info.name.startswith(f"{OBJECTS}/"):
            continue
        if not is_of_a_query(info.name):
            raise Invalid(
                f"{plain.location} holds {info.name}, which is not a file of a streaming query's checkpoint: give the "
                "query a directory of its own"
            )
        handle = SegmentHandle(PLAIN + info.name, info.size, 0)
        entries.append(FileEntry(info.name, info.size, int(info.modified * 1000), handle, "", 0))
    if entries:
        smallest = min(entries, key=lambda entry: entry.size)
        try:
            await plain.get(smallest.path)
        except CorruptData:
            raise Invalid(
                f"{plain.location} holds plain files of Spark's, which carry no seal, and sealing.key_file is set: "
                "a forged one would go unnoticed. Give the query another directory, or go on without a key"
            ) from None
    return entries
