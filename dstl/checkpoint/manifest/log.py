"""The manifest log: the only commit point, fenced.

Records have dense numbers, and each is created with put-if-absent under a name made of its number. A driver first
wins a number with a *fence*; its epoch is that number. A driver that loses a number to another has been fenced.

Invariants:
    1. A record after fence F and before the next fence was written by F's driver: a driver writes its next number only.
    2. A number below the cleanup boundary is free again once its record was deleted: a checkpoint's when it is
       subsumed, any other's, fences and abort markers too, at the age of a day
       (:data:`~dstl.checkpoint.manifest.format.FORGOTTEN_S`). So a fence, a repeated request, and a record that is half
       a day younger than its driver's last count only if nothing is above them once they are visible. What a paused
       driver has put at a free number means nothing, as it is below the boundary.
    3. A commit whose request was sent ends in exactly one of: committed, fenced, or given up by winning an abort marker
       at the same name. Until then it is unknown, and nothing it refers to may be deleted.
    4. Every record carries the cleanup boundary. A checkpoint below it means nothing, so one that a late request brings
       back to life is not mistaken for a retained one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from dstl.checkpoint.manifest.format import FORGOTTEN_S, ManifestRecord, encode_record, manifest_name
from dstl.checkpoint.manifest.history import CheckpointHistory
from dstl.checkpoint.manifest.reader import ATTEMPTS, ManifestReader, ManifestScan
from dstl.crash_points import reach
from dstl.errors import CorruptData, DstlError, Fenced, ObjectNotFound, OutcomeUnknown, Unavailable
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.retry_policy import ConditionalPut, or_unknown
from handles.checkpoint import CompletedCheckpoint
from handles.file_record import FileRecord

_FENCE_ROUNDS = 8  # two drivers that start together need two or three


class ManifestLog(ManifestReader):
    """One driver's view of the manifest log of a location: it reads, takes the log over, and commits. One event loop.

    Reads are repeated, and so is what a commit may repeat safely, for some 30 to 60 s of an unavailable store.

    Args:
        store: The location's; stays the caller's.
        runtime: Clock, jitter, ids.
        attempts: How often a request is tried.
        skip_damaged: Whether damaged records are passed over when the log is taken over.
        history: How many checkpoints, failures and restores a record tells of.

    Attributes:
        epoch: Number of our fence; 0 before :meth:`fence`.
        next_sequence: The number that our next record must win.
        boundary: The cleanup boundary as far as this driver knows.
        history: What the next record tells of; the first :meth:`scan` begins it with what the log holds.
        turn: Held from the choice of a number until what became of its record is known, by the one who writes it.
        is_unknown: A commit of ours was neither committed nor given up: nothing it refers to may be deleted, and no
            further commit is taken, until :meth:`fence` has resolved it.
    """

    def __init__(
        self,
        store: ObjectStore,
        runtime: Runtime,
        *,
        attempts: int = ATTEMPTS,
        skip_damaged: bool = False,
        history: int = 0,
    ) -> None:
        super().__init__(store, runtime, attempts=attempts)
        self.skips_damaged = skip_damaged
        self._puts = ConditionalPut(store, self._retries)
        # Of our last record, by the store's clock and by ours; a fence looks by itself.
        self._stored_at = math.inf, math.inf
        self.epoch = 0
        self.next_sequence = 1
        self.boundary = 0
        self.turn = asyncio.Lock()
        self.is_unknown = False
        self.history = CheckpointHistory(history)

    async def scan(self) -> ManifestScan:
        """Return what :meth:`ManifestReader.scan` does, and begin the history with what it finds."""
        scan = await super().scan()
        self.history.learn(scan.history)
        return scan

    async def fence(self, query_id: str) -> int:
        """Take the log over: win a number above all others and return it as our epoch.

        From then on, every commit of an older driver fails with :class:`Fenced`.

        Raises:
            Fenced: Other drivers took it over again and again.
            CorruptData: The newest record is damaged.
            Unavailable: The store did not answer.
            OutcomeUnknown: As :class:`Unavailable`; what was written does no harm.
        """
        sequence = await self.tail() + 1
        for attempt in range(_FENCE_ROUNDS):
            if attempt:
                # Two drivers that start together would otherwise overtake each other for ever.
                await self._retries.pause(attempt)
            await self._learn_boundary(sequence - 1)
            record = self._record("fence", sequence, sequence, query_id)
            try:
                await self._commit(record, encode_record(record))
            except Fenced:
                sequence = max(sequence, await self.tail()) + 1
                continue
            reach("C10")
            highest = await self.tail()
            if highest == sequence:
                self.epoch, self.next_sequence, self.is_unknown = sequence, sequence + 1, False
                return sequence
            sequence = highest + 1
        raise Fenced(f"{self.store.location} is taken over by other drivers all the time: stop all but one")

    async def commit(
        self,
        checkpoint: CompletedCheckpoint,
        inlined: Sequence[bytes],
        *,
        oldest: int = 0,
        files: FileRecord | None = None,
    ) -> ManifestRecord:
        """Commit a checkpoint at :attr:`next_sequence`; when this returns, it is durable and visible.

        Args:
            checkpoint: The checkpoint; its number is :attr:`next_sequence`.
            inlined: Segments to be written inside the record.
            oldest: The oldest checkpoint that stays retained after this one: only what is below may be deleted once
                this returns. 0 leaves the boundary where it is.
            files: What Spark's own commit of the batch adds to its checkpoint directory, where that lies in this log.

        Raises:
            Fenced: A newer driver has taken over; stop. Its fence may have this number or one above the record, which
                then is there: delete nothing that it refers to.
            Unavailable: Certainly not committed; the next commit may use another number.
            OutcomeUnknown: Neither committed nor given up; the driver must stop and the next start resolves it.
        """
        if checkpoint.checkpoint_id != self.next_sequence or not self.epoch:
            raise ValueError(f"checkpoint {checkpoint.checkpoint_id} is not the next number {self.next_sequence}")
        query_id = checkpoint.query_id
        record = self._record("checkpoint", self.next_sequence, self.epoch, query_id, checkpoint, oldest, files)
        return await self._commit_or_give_up(record, inlined)

    async def commit_files(
        self, query_id: str, files: FileRecord, inlined: Sequence[bytes], *, oldest: int = 0
    ) -> ManifestRecord:
        """Commit a step of a checkpoint directory's index at :attr:`next_sequence`, as :meth:`commit` does.

        Args:
            query_id: Whose location this is.
            files: The step.
            inlined: As for :meth:`commit`.
            oldest: As for :meth:`commit`: a record with the whole index, or 0.

        Raises:
            DstlError: As :meth:`commit`.
        """
        if not self.epoch:
            raise ValueError("files are committed before the log was taken over")
        record = self._record("files", self.next_sequence, self.epoch, query_id, oldest=oldest, files=files)
        return await self._commit_or_give_up(record, inlined)

    async def _commit_or_give_up(self, record: ManifestRecord, inlined: Sequence[bytes]) -> ManifestRecord:
        if self.is_unknown:
            raise OutcomeUnknown(f"what became of record {self.next_sequence} is unknown: restart the query")
        data = encode_record(record, inlined)
        # Unknown until proven otherwise: also where the caller's deadline cancels us in the middle.
        self.is_unknown = True
        try:
            await self._commit(record, data)
        except OutcomeUnknown as error:
            if await self._abort(record):
                self._go_on(record)
                raise Unavailable(
                    f"record {record.sequence} could not be stored in {self.store.location} and was given up: {error}"
                ) from None
        except DstlError:
            self.is_unknown = False
            raise
        return self._accept(record)

    @property
    def trouble(self) -> DstlError | None:
        """The store's answer when it did not take our latest record at once; None where it has."""
        return self._puts.trouble

    async def check_leads(self) -> None:
        """Look whether the log is still this driver's.

        Raises:
            Fenced: A newer driver has taken it over.
            Unavailable: The store did not answer.
        """
        # A record of ours may be at the next number while what became of it is unknown.
        if (tail := await self.tail()) >= self.next_sequence + self.is_unknown:
            raise Fenced(f"{self.store.location} was taken over: record {tail} is a newer driver's; stop this one")

    def _go_on(self, record: ManifestRecord) -> None:
        if self.epoch != record.epoch:
            raise Fenced(f"record {record.sequence} is of epoch {record.epoch}; this driver has begun {self.epoch}")
        self.is_unknown = False
        self.next_sequence = record.sequence + 1

    def _accept(self, record: ManifestRecord) -> ManifestRecord:
        """Move the boundary with the checkpoint that it was made for, never without it."""
        self._go_on(record)
        self.boundary = max(self.boundary, record.oldest)
        reach("C13")
        return record

    def _record(
        self,
        kind: str,
        sequence: int,
        epoch: int,
        query_id: str,
        checkpoint: CompletedCheckpoint | None = None,
        oldest: int = 0,
        files: FileRecord | None = None,
    ) -> ManifestRecord:
        return ManifestRecord(
            kind=kind,  # type: ignore[arg-type]
            sequence=sequence,
            epoch=epoch,
            oldest=max(self.boundary, min(oldest, sequence)),
            put_id=self.runtime.new_id(),
            query_id=query_id,
            created_at=self.runtime.clock.wall(),
            history=tuple(self.history.entries) if checkpoint is not None else (),
            checkpoint=checkpoint,
            files=files,
        )

    async def _commit(self, record: ManifestRecord, data: bytes) -> None:
        """Create the record's object, or learn whose it is."""
        what, check_valid = f"record {record.sequence}", partial(self._check_not_overtaken, record)
        stored = await self._puts.put(
            manifest_name(record.sequence),
            data,
            what,
            check_ours=partial(self._check_ours, record),
            taken=Fenced,
            # A repeated request may have created a name anew that a newer driver had already cleaned away.
            check_valid=check_valid,
        )
        if stored is not None:
            # And so may one of a driver that was paused; a host that was stopped with its clock is told by the store's.
            at = stored.modified, self.runtime.clock.now()
            if max(at[0] - self._stored_at[0], at[1] - self._stored_at[1]) > FORGOTTEN_S / 2:
                await or_unknown(what, check_valid, Fenced)
            self._stored_at = at
        else:
            self._stored_at = -math.inf, -math.inf  # when that was is not known: the next one looks

    async def _check_ours(self, record: ManifestRecord) -> None:
        """Raise where the record's name is another driver's."""
        try:
            found = await self.read(record.sequence)
        except ObjectNotFound:
            whose = "gone again, cleaned by a newer driver"
        else:
            if found.put_id == record.put_id or _says_the_same(found, record):
                return
            if found.epoch == record.epoch and record.kind in ("checkpoint", "files"):
                raise OutcomeUnknown(
                    f"record {record.sequence} in {self.store.location} is of an earlier try of this driver, which "
                    "the store said it had not stored: restart the query, which goes on from it"
                )
            whose = f"a {found.kind} of epoch {found.epoch}"
        raise Fenced(
            f"{self.store.location} was taken over: record {record.sequence} is {whose}; this driver "
            f"(epoch {record.epoch}) must stop"
        )

    async def _check_not_overtaken(self, record: ManifestRecord) -> None:
        tail = await self.tail()
        if tail > record.sequence:
            raise Fenced(f"{self.store.location} was taken over: record {tail} is newer than our {record.sequence}")

    async def _abort(self, record: ManifestRecord) -> bool:
        """Win an abort marker at the record's name; False where the record's late request has landed after all."""
        marker = self._record("abort", record.sequence, record.epoch, record.query_id)
        try:
            await self._commit(marker, encode_record(marker))
        except Fenced:
            what = f"record {record.sequence}"
            await or_unknown(what, partial(self._check_ours, record), Fenced)
            await or_unknown(what, partial(self._check_not_overtaken, record), Fenced)
            return False
        except Unavailable as error:
            # The marker is certainly not there, and that says nothing about the record.
            raise OutcomeUnknown(f"what became of record {record.sequence} is unknown: {error}") from None
        return True

    async def _learn_boundary(self, tail: int) -> None:
        """Take over the boundary of the newest record."""
        if tail:
            try:
                self.boundary = max(self.boundary, (await self.read(tail)).oldest)
            except ObjectNotFound:
                # Cleaned away since it was seen, so another driver is far ahead: the fence will not be the highest.
                return
            except CorruptData:
                if not self.skips_damaged:
                    raise
                # The newest readable one's may be lower: then more is taken for retained than is, never less.
                self.boundary = max(self.boundary, (await self.scan()).boundary)


def _says_the_same(found: ManifestRecord, record: ManifestRecord) -> bool:
    """Return True where a record is one of an earlier try of the same driver to commit the same.

    An epoch is one driver's, but in a fence, whose name is the epoch.
    """

    def content(each: ManifestRecord) -> ManifestRecord:
        checkpoint = each.checkpoint and each.checkpoint.model_copy(update={"created_at": 0.0})
        told = {"put_id": "", "created_at": 0.0, "history": (), "checkpoint": checkpoint}
        return each.model_copy(update=told)

    return record.kind != "fence" and content(found) == content(record)
