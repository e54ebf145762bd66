"""The manifest log: the only commit point, fenced.

Records have dense numbers, and each is created with put-if-absent under a name made of its number. A driver first
wins a number with a *fence*; its epoch is that number. Whoever loses a number to somebody else has been fenced.

Invariants:
    1. A record after fence F and before the next fence was written by F's driver: a driver writes its next number only.
    2. Fences and abort markers are never deleted, so that put-if-absent never forgets that a number was used by a newer
       driver, or given up. A fence counts only if nothing is above it once it is visible: a number below may be free
       again because its checkpoint was cleaned away.
    3. A commit whose request was sent ends in exactly one of: committed, fenced, or given up by winning an abort marker
       at the same name. Until then it is unknown, and nothing it refers to may be deleted.
    4. Every record carries the cleanup boundary. A checkpoint below it means nothing, so one that a late request brings
       back to life is not mistaken for a retained one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from dstl.checkpoint.manifest_format import ManifestRecord, decode_record, encode_record
from dstl.checkpoint.manifest_scan import ManifestScan
from dstl.errors import (
    CorruptData,
    DstlError,
    Fenced,
    Invalid,
    ObjectExists,
    ObjectNotFound,
    OutcomeUnknown,
    Unavailable,
)
from dstl.runtime import Runtime
from dstl.store.base import ObjectInfo, ObjectStore
from handles.checkpoint import CompletedCheckpoint

__all__ = ["ManifestLog", "manifest_name", "manifest_sequence"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_PREFIX = "manifests/"
_ATTEMPTS = 20
"""With the pauses below: at least 30 s of a store that answers nothing but 503 are waited out."""
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 4.0
_TOGETHER = 16
_FENCE_ROUNDS = 8
_SCAN_ROUNDS = 16


def manifest_name(sequence: int) -> str:
    """Return the object name of a record."""
    return f"{_PREFIX}{sequence:020d}.dstl"


def manifest_sequence(name: str) -> int | None:
    """Return the number in a record's name, or None where the name is not a record's."""
    stem = name.removeprefix(_PREFIX).removesuffix(".dstl")
    sequence = int(stem) if stem.isascii() and stem.isdigit() else 0
    return sequence if sequence and name == manifest_name(sequence) else None


class ManifestLog:
    """One driver's view of the manifest log of a location. One event loop.

    Reads are repeated, and so is what a commit may repeat safely, for some 30 to 60 s of an unavailable store.

    Attributes:
        epoch: Number of our fence; 0 before :meth:`fence`.
        next_sequence: The number that our next record must win.
        boundary: The cleanup boundary as far as this driver knows.
        is_unknown: A commit of ours was neither committed nor given up: nothing it refers to may be deleted, and no
            further commit is taken, until :meth:`fence` has resolved it.
    """

    def __init__(
        self, store: ObjectStore, runtime: Runtime, *, attempts: int = _ATTEMPTS, skip_damaged: bool = False
    ) -> None:
        self._store = store
        self._runtime = runtime
        self._attempts = attempts
        self._skip_damaged = skip_damaged
        self.epoch = 0
        self.next_sequence = 1
        self.boundary = 0
        self.is_unknown = False

    async def read(self, sequence: int) -> ManifestRecord:
        """Return one record.

        Raises:
            ObjectNotFound: There is none of that number.
            CorruptData: It is damaged.
            Invalid: A newer version wrote it.
            Unavailable: The store did not answer.
        """
        name = manifest_name(sequence)
        record = decode_record(await self._patiently(partial(self._store.get, name)), name)
        if record.sequence != sequence:
            raise CorruptData(
                f"manifest {name} holds record {record.sequence}: two objects were swapped; restore both from a replica"
            )
        return record

    async def tail(self) -> int:
        """Return the highest number in use, 0 for an empty log."""
        return max(await self._listed(), default=0)

    async def scan(self) -> ManifestScan:
        """Return what the log holds from its cleanup boundary on, damaged records included; only reads.

        It is of one moment: a record that is deleted while it reads was subsumed by one that it has not listed, so it
        begins anew, for without either nothing would seem to be retained.

        Raises:
            Unavailable: The store did not answer, or the log moved on faster than it could be read.
        """
        for _ in range(_SCAN_ROUNDS):
            scan = await self._scan_once()
            if scan is not None:
                return scan
        raise Unavailable(f"the manifest log of {self._store.location} moves on faster than it can be read: try again")

    async def _scan_once(self) -> ManifestScan | None:
        """Return a scan, or None where a record of it was deleted meanwhile."""
        listed = await self._listed()
        gone = 0
        records: dict[int, ManifestRecord] = {}
        damaged: dict[int, DstlError] = {}
        boundary = 0
        waiting = sorted(listed)
        # The newest first, alone: it says where to stop, however many fences lie below.
        together = 1
        while waiting and waiting[-1] >= boundary:
            numbers, waiting = waiting[-together:], waiting[:-together]
            for sequence, found in zip(numbers, await asyncio.gather(*map(self._found, numbers)), strict=True):
                if isinstance(found, DstlError):
                    damaged[sequence] = found
                elif found is not None:
                    records[sequence] = found
                    boundary = max(boundary, found.oldest)
                else:
                    gone = max(gone, sequence)
            together = _TOGETHER
        if gone and gone >= boundary:
            return None
        query_id = next((records[s].query_id for s in sorted(records, reverse=True) if records[s].query_id), "")
        for sequence, record in list(records.items()):
            if record.query_id not in ("", query_id):
                del records[sequence]
                damaged[sequence] = CorruptData(
                    f"manifest {manifest_name(sequence)} is of query {record.query_id}, and {self._store.location} "
                    f"belongs to query {query_id}: an object of another location was put here; restore the right one"
                )
        return ManifestScan(
            listed,
            {s: r for s, r in records.items() if s >= boundary},
            {s: e for s, e in damaged.items() if s >= boundary},
            boundary,
            query_id,
        )

    async def checkpoints(self) -> list[CompletedCheckpoint]:
        """Return the retained checkpoints, oldest first, without taking the log over.

        Raises:
            CorruptData: A record is damaged, so that it is unknown which checkpoints there are.
            Invalid: A newer version wrote one.
        """
        scan = await self.scan()
        for _, error in sorted(scan.damaged.items(), reverse=True):
            raise error
        return scan.retained

    async def owner(self) -> str:
        """Return the query that the location belongs to; empty where no query has used it."""
        for sequence in sorted(await self._listed(), reverse=True):
            try:
                record = await self.read(sequence)
            except ObjectNotFound:
                continue
            except CorruptData:
                if not self._skip_damaged:
                    raise
                continue
            if record.query_id:
                return record.query_id
        return ""

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
                await self._back_off(attempt)
            await self._learn_boundary(sequence - 1)
            record = self._record("fence", sequence, sequence, query_id)
            try:
                await self._commit(record, encode_record(record))
            except Fenced:
                sequence = max(sequence, await self.tail()) + 1
                continue
            highest = await self.tail()
            if highest == sequence:
                self.epoch, self.next_sequence, self.is_unknown = sequence, sequence + 1, False
                return sequence
            sequence = highest + 1
        raise Fenced(f"{self._store.location} is taken over by other drivers all the time: stop all but one")

    async def commit(
        self, checkpoint: CompletedCheckpoint, inlined: Sequence[bytes], *, oldest: int = 0
    ) -> ManifestRecord:
        """Commit a checkpoint at :attr:`next_sequence`; when this returns, it is durable and visible.

        Args:
            checkpoint: The checkpoint; its number is :attr:`next_sequence`.
            inlined: Segments to be written inside the record.
            oldest: The oldest checkpoint that stays retained after this one: only what is below may be deleted once
                this returns. 0 leaves the boundary where it is.

        Raises:
            Fenced: A newer driver has this number; stop.
            Unavailable: Certainly not committed; the next commit may use another number.
            OutcomeUnknown: Neither committed nor given up; the driver must stop and the next start resolves it.
        """
        if checkpoint.checkpoint_id != self.next_sequence or not self.epoch:
            raise ValueError(f"checkpoint {checkpoint.checkpoint_id} is not the next number {self.next_sequence}")
        if self.is_unknown:
            raise OutcomeUnknown(f"what became of record {self.next_sequence} is unknown: restart the query")
        record = self._record("checkpoint", self.next_sequence, self.epoch, checkpoint.query_id, checkpoint, oldest)
        data = encode_record(record, inlined)
        # Unknown until proven otherwise: also where the caller's deadline cancels us in the middle.
        self.is_unknown = True
        try:
            await self._commit(record, data)
        except OutcomeUnknown:
            if await self._given_up(record):
                self._go_on(record)
                raise Unavailable(
                    f"checkpoint {record.sequence} could not be stored in {self._store.location} and was given up"
                ) from None
        except DstlError:
            self.is_unknown = False
            raise
        return self._committed(record)

    def _go_on(self, record: ManifestRecord) -> None:
        if self.epoch != record.epoch:
            raise Fenced(f"record {record.sequence} is of epoch {record.epoch}; this driver has begun {self.epoch}")
        self.is_unknown = False
        self.next_sequence = record.sequence + 1

    def _committed(self, record: ManifestRecord) -> ManifestRecord:
        """The boundary moves with the checkpoint that it was made for, never without it."""
        self._go_on(record)
        self.boundary = max(self.boundary, record.oldest)
        return record

    def _record(
        self,
        kind: str,
        sequence: int,
        epoch: int,
        query_id: str,
        checkpoint: CompletedCheckpoint | None = None,
        oldest: int = 0,
    ) -> ManifestRecord:
        return ManifestRecord(
            kind=kind,  # type: ignore[arg-type]
            sequence=sequence,
            epoch=epoch,
            oldest=max(self.boundary, min(oldest, sequence)),
            put_id=self._runtime.new_id(),
            query_id=query_id,
            created_at=self._runtime.clock.wall(),
            checkpoint=checkpoint,
        )

    async def _commit(self, record: ManifestRecord, data: bytes) -> None:
        """Create the record's object, or learn whose it is."""
        name, sent = manifest_name(record.sequence), False
        for attempt in range(self._attempts):
            if attempt:
                await self._back_off(attempt)
            try:
                await self._store.put(name, data, if_absent=True)
            except ObjectExists:
                await self._or_unknown(record, self._check_ours(record))
                sent = True
            except Unavailable as error:
                _log.warning("commit of record %d: %s", record.sequence, error)
                continue
            except OutcomeUnknown as error:
                sent = True
                _log.warning("commit of record %d, outcome unknown: %s", record.sequence, error)
                continue
            except DstlError as error:
                if sent:
                    raise OutcomeUnknown(f"what became of record {record.sequence} is unknown: {error}") from error
                raise
            if sent:
                # A repeated request may have created a name anew that a newer driver had already cleaned away.
                await self._or_unknown(record, self._check_not_overtaken(record))
            return
        if sent:
            raise OutcomeUnknown(f"whether record {record.sequence} is in {self._store.location} is unknown")
        raise Unavailable(f"{self._store.location} took no record in {self._attempts} attempts")

    async def _or_unknown(self, record: ManifestRecord, check: Awaitable[None]) -> None:
        """Make a check of a record that was sent; one that cannot be made says nothing about the record."""
        try:
            await check
        except Fenced:
            raise
        except DstlError as error:
            raise OutcomeUnknown(f"what became of record {record.sequence} is unknown: {error}") from error

    async def _check_ours(self, record: ManifestRecord) -> None:
        """Raise where the record's name is somebody else's."""
        try:
            found = await self.read(record.sequence)
        except ObjectNotFound:
            whose = "gone again, cleaned by a newer driver"
        else:
            if found.put_id == record.put_id:
                return
            whose = f"a {found.kind} of epoch {found.epoch}"
        raise Fenced(
            f"{self._store.location} was taken over: record {record.sequence} is {whose}; this driver "
            f"(epoch {record.epoch}) must stop"
        )

    async def _check_not_overtaken(self, record: ManifestRecord) -> None:
        tail = await self.tail()
        if tail > record.sequence:
            raise Fenced(f"{self._store.location} was taken over: record {tail} is newer than our {record.sequence}")

    async def _given_up(self, record: ManifestRecord) -> bool:
        """Win an abort marker at the record's name; False where the record's late request has landed after all."""
        marker = self._record("abort", record.sequence, record.epoch, record.query_id)
        try:
            await self._commit(marker, encode_record(marker))
        except Fenced:
            await self._or_unknown(record, self._check_ours(record))
            await self._or_unknown(record, self._check_not_overtaken(record))
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
                # Cleaned away since it was seen, so somebody is far ahead: the fence will not be the highest.
                return
            except CorruptData:
                if not self._skip_damaged:
                    raise
                # The newest readable one's may be lower: then more is taken for retained than is, never less.
                self.boundary = max(self.boundary, (await self.scan()).boundary)

    async def _listed(self) -> dict[int, ObjectInfo]:
        """Return the objects of all records by number.

        A listing may be stale, so names beyond its end are probed until one is missing.
        """

        async def names() -> dict[int, ObjectInfo]:
            found = {}
            async for info in self._store.list(_PREFIX):
                sequence = manifest_sequence(info.name)
                if sequence is not None:
                    found[sequence] = info
            return found

        listed = await self._patiently(names)
        while True:
            following = max(listed, default=0) + 1
            try:
                listed[following] = await self._patiently(partial(self._store.head, manifest_name(following)))
            except ObjectNotFound:
                return listed

    async def _found(self, sequence: int) -> ManifestRecord | DstlError | None:
        try:
            return await self.read(sequence)
        except ObjectNotFound:
            return None
        except (CorruptData, Invalid) as error:
            return error

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, self._attempts):
            try:
                return await call()
            except Unavailable as error:
                _log.warning("reading the manifest log of %s: %s", self._store.location, error)
                await self._back_off(attempt)
        return await call()

    async def _back_off(self, attempt: int) -> None:
        longest = min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0**attempt)
        await self._runtime.clock.sleep(longest * self._runtime.rng.uniform(0.5, 1.0))
