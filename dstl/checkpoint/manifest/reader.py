"""Reads the manifest log of a location: records, scans, checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from dstl.checkpoint.manifest.format import MANIFESTS, ManifestRecord, decode_record, manifest_name, manifest_sequence
from dstl.checkpoint.manifest.history import HistoryEntry
from dstl.errors import CorruptData, DstlError, Invalid, MissingState, ObjectNotFound, Unavailable
from dstl.runtime import Runtime
from dstl.store.base import ObjectInfo, ObjectStore
from dstl.store.retry_policy import RetryPolicy
from handles.checkpoint import CheckpointId, CompletedCheckpoint
from handles.file_record import barrier_batch


@dataclass(frozen=True, slots=True)
class ManifestScan:
    """The records of a log that mean anything: those not below the cleanup boundary.

    Attributes:
        listed: Every record's object by number; those below the boundary only where the newest record is damaged.
        records: The readable records from the boundary on, by number.
        damaged: Why the others from the boundary on cannot be read, or are not there.
        boundary: No checkpoint below it is retained.
        query_id: The query that the location belongs to; empty where no query has written anything but fences.
    """

    listed: Mapping[int, ObjectInfo]
    records: Mapping[int, ManifestRecord]
    damaged: Mapping[int, DstlError]
    boundary: int
    query_id: str

    @property
    def tail(self) -> int:
        """The highest number in use, 0 for an empty log."""
        return max(self.listed, default=0)

    @property
    def epoch(self) -> int:
        """The number of the newest fence that is visible: whose driver may commit; 0 without one."""
        return max((record.epoch for record in self.records.values()), default=0)

    @property
    def retained(self) -> list[CompletedCheckpoint]:
        """The checkpoints that can be restored, oldest first."""
        checkpoints = (record.checkpoint for _, record in sorted(self.records.items()))
        return retained_of(c for c in checkpoints if c is not None and c.checkpoint_id >= self.boundary)

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """The figures of the last checkpoints, failures and restores, oldest first, as the newest record has them."""
        return next((record.history for _, record in sorted(self.records.items(), reverse=True) if record.history), ())

    def choose(self, checkpoint_id: CheckpointId | None, location: str) -> CompletedCheckpoint:
        """Return a retained checkpoint, the latest where none is named.

        Raises:
            MissingState: There is none, or none of that number.
            CorruptData: Its record, or a newer one, is damaged.
            Invalid: A newer version wrote the record.
        """
        found = {each.checkpoint_id: each for each in self.retained}
        newest = max(found, default=0)
        if checkpoint_id is None:
            for sequence, error in sorted(self.damaged.items(), reverse=True):
                if sequence > newest:
                    raise error
        elif checkpoint_id in self.damaged:
            raise self.damaged[checkpoint_id]
        chosen = found.get(newest if checkpoint_id is None else checkpoint_id)
        if chosen is None:
            held = ", ".join(map(str, sorted(found))) or "none"
            wanted = "checkpoint" if checkpoint_id is None else f"checkpoint {checkpoint_id}"
            raise MissingState(f"{location} has no {wanted}; it retains: {held}. See dstl checkpoints list")
        return chosen


def no_location(location: str, why: str) -> Invalid:
    """Return the error for a location that no query has written to."""
    return Invalid(
        f"{location} is not a location of DSTL: {why}. Give the location that StateBackend(...) was given, once its "
        "query has started"
    )


def retained_of(checkpoints: Iterable[CompletedCheckpoint]) -> list[CompletedCheckpoint]:
    """Return those that no later one replaces: a batch that was run again voids what came of it and after it.

    Args:
        checkpoints: By ascending number.
    """
    kept: list[CompletedCheckpoint] = []
    for checkpoint in checkpoints:
        while kept and kept[-1].batch_id >= checkpoint.batch_id:
            kept.pop()
        kept.append(checkpoint)
    return kept


def _lost_records(scan: ManifestScan) -> dict[int, DstlError]:
    """Return the errors of the records that are not there though a barrier of Spark's files was in them.

    Offsets and commits of batches take turns, which shows a lost one. That a number is free does not: a checkpoint's
    that was made again for the same batch is deleted at any place.
    """
    lost: dict[int, DstlError] = {}
    steps = [(s, r.files) for s, r in sorted(scan.records.items()) if r.files is not None]
    first = max((at for at, (_, files) in enumerate(steps) if files.is_whole), default=len(steps))
    batches: dict[str, set[int]] = {"offsets": set(), "commits": set()}
    before = 0
    for sequence, files in steps[first:]:
        for kind, known in batches.items():
            known -= {barrier_batch(path, kind) for path in files.removed}
            known |= {n for row in files.added if (n := barrier_batch(row[0], kind)) is not None}
        if not batches["offsets"]:
            continue
        planned = max(batches["offsets"])
        committed = max(batches["commits"], default=min(batches["offsets"]) - 1)
        between = range(before + 1, sequence) if before else ()
        if planned - committed not in (0, 1) and not any(number in scan.damaged for number in between):
            what = f"offsets/{committed}" if committed > planned else f"commits/{planned - 1}"
            lost |= {number: _lost_record(number, what) for number in between if number not in scan.listed}
            batches["offsets"].add(max(planned, committed))
            batches["commits"].add(max(planned - 1, committed))
        before = sequence
    return lost


def _lost_record(sequence: int, what: str) -> CorruptData:
    return CorruptData(
        f"manifest {manifest_name(sequence)}, with {what} of Spark's directory, was deleted, and not by DSTL: "
        'restore it from a replica; a StateBackend(..., restore="previous") may go on without it'
    )


T = TypeVar("T")

ATTEMPTS = 20
"""With the pauses between them, at least 30 s of a store that answers nothing but 503 are waited out."""
_LONGEST_PAUSE_S = 4.0  # a store that is back is noticed within seconds
_TOGETHER = 16  # hides a store's latency without a burst that it would refuse
_SCAN_ROUNDS = 16  # a round fails only where a job completes checkpoints faster than a list takes


class ManifestReader:
    """Reads the manifest log of a location; changes nothing. One event loop.

    Reads are repeated for some 30 to 60 s of an unavailable store.

    Args:
        store: The location's; stays the caller's.
        runtime: Clock, jitter.
        attempts: How often a read is tried.
    """

    def __init__(self, store: ObjectStore, runtime: Runtime, *, attempts: int = ATTEMPTS) -> None:
        self.store = store
        self.runtime = runtime
        self._retries = RetryPolicy(runtime, attempts=attempts, longest_s=_LONGEST_PAUSE_S)
        # The highest cleanup boundary that was read, below which no record says anything: listings end there.
        self._floor = 0

    async def read(self, sequence: int) -> ManifestRecord:
        """Return one record.

        Raises:
            ObjectNotFound: There is none of that number.
            CorruptData: It is damaged.
            Invalid: A newer version wrote it.
            Unavailable: The store did not answer.
        """
        return await self._repeat(partial(self._read_once, sequence))

    async def _read_once(self, sequence: int) -> ManifestRecord:
        name = manifest_name(sequence)
        record = decode_record(await self.store.get(name), name)
        if record.sequence != sequence:
            raise CorruptData(
                f"manifest {name} holds record {record.sequence}: two objects were swapped; restore both from a replica"
            )
        self._floor = max(self._floor, record.oldest)
        return record

    async def tail(self) -> int:
        """Return the highest number in use, 0 for an empty log."""
        return max(await self._list(newest=True), default=self._floor)

    async def scan(self) -> ManifestScan:
        """Return the records from the log's cleanup boundary on, damaged ones included; only reads.

        It is of one moment: a record that is deleted while it reads was subsumed by one that it has not listed, so it
        begins anew, for without either nothing would seem to be retained.

        Raises:
            Unavailable: The store did not answer, or the log moved on faster than it could be read.
        """
        gone: Mapping[int, DstlError] = {}
        for _ in range(_SCAN_ROUNDS):
            scan = await self._scan_once()
            if scan is None:
                continue
            lost = _lost_records(scan)
            # What a driver deletes while this one lists lies below its boundary by the next look.
            if lost.keys() == gone.keys():
                return replace(scan, damaged={**scan.damaged, **lost}) if lost else scan
            gone = lost
        raise Unavailable(f"the manifest log of {self.store.location} moves on faster than it can be read: try again")

    async def scan_used(self) -> ManifestScan:
        """Return what :meth:`scan` does, of a location that is known to have a log.

        Raises:
            Invalid: No query has used it.
            Unavailable: As for :meth:`scan`.
        """
        scan = await self.scan()
        if not scan.listed:
            raise no_location(self.store.location, "it holds no manifest")
        return scan

    async def _scan_once(self) -> ManifestScan | None:
        """Return a scan, or None where a record of it was deleted meanwhile."""
        listed = await self._list()
        gone = 0
        records: dict[int, ManifestRecord] = {}
        damaged: dict[int, DstlError] = {}
        boundary = 0
        waiting = sorted(listed)
        # The newest first, alone: it says where to stop, however many fences lie below.
        together = 1
        while waiting and waiting[-1] >= boundary:
            numbers, waiting = waiting[-together:], waiting[:-together]
            for sequence, found in zip(numbers, await asyncio.gather(*map(self._find, numbers)), strict=True):
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
        # A fence says nothing: it was won before its driver knew of the log, or for a query that never began.
        written = {s: records[s] for s in sorted(records, reverse=True) if records[s].kind in ("checkpoint", "files")}
        query_id = next((record.query_id for record in written.values()), "")
        for sequence, record in written.items():
            if record.query_id != query_id:
                del records[sequence]
                damaged[sequence] = CorruptData(
                    f"manifest {manifest_name(sequence)} is of query {record.query_id}, and {self.store.location} "
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

    async def _list(self, newest: bool = False) -> dict[int, ObjectInfo]:
        """Return the objects of the records from the boundary on by number; of all where the newest cannot be read.

        A listing begins with the newest, whose record says where it may end. It may be stale, so names beyond its
        beginning are probed until one is missing.

        Args:
            newest: The newest alone is wanted.
        """

        async def names() -> dict[int, ObjectInfo]:
            found: dict[int, ObjectInfo] = {}
            # A store's listing is a generator, and a request of it is under way until it is closed.
            async with contextlib.aclosing(self.store.list(MANIFESTS)) as listing:
                async for info in listing:
                    sequence = manifest_sequence(info.name)
                    if sequence is None:
                        continue
                    if sequence < self._floor:
                        break
                    found[sequence] = info
                    if newest:
                        break
                    if len(found) == 1 and not self._floor:
                        # Once: what wraps this repeats it, and twenty times twenty attempts take a quarter of an hour.
                        await self._find(sequence, self._read_once)
            return found

        listed = await self._repeat(names)
        # An empty one may lack the floor's own record, too, which may be gone by now.
        following = max(listed, default=max(0, self._floor - 1))
        while True:
            following += 1
            try:
                listed[following] = await self._repeat(partial(self.store.head, manifest_name(following)))
            except ObjectNotFound:
                if following != self._floor:
                    return listed

    async def _find(
        self, sequence: int, read: Callable[[int], Awaitable[ManifestRecord]] | None = None
    ) -> ManifestRecord | DstlError | None:
        try:
            return await (read or self.read)(sequence)
        except ObjectNotFound:
            return None
        except (CorruptData, Invalid) as error:
            return error

    async def _repeat(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._retries.repeat(call, f"reading the manifest log of {self.store.location}")
