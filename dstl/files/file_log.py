"""The log of one checkpoint directory on one host: files become change sets, and durable with a record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.changelog.log_segment import InlineSegment, LogSegment
from dstl.changelog.storage import PersistResult
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed, DstlError
from dstl.files.namespace import is_of_the_driver, is_snapshot
from dstl.files.riders import Rider, Riders
from dstl.files.rules import in_order, needs_snapshots
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import PersistedFile, PersistedFiles
from dstl.runtime import Runtime
from dstl.taskmanager.task_manager import Changelog
from handles.segment_handle import SegmentHandle
from handles.sequence_number import INITIAL_SQN, SequenceNumber

__all__ = ["ALL_LANES", "FileLog", "Lane", "file_batch", "file_bytes", "joined"]

_log = logging.getLogger(__name__)

_PART = 32 << 20
_KEY_GROUPS = 32_000
_SMALL = 256 << 10
_ANSWER_S = 10.0
_LOOK_S = 0.02
"""So long a process that is about to end waits for the record that is being made, looking so often."""


class Lane(StrEnum):
    """The log of its own that a file goes to, so that one barrier need not wait for what another one waits for."""

    DRIVER = "driver"
    STATE = "state"
    SNAPSHOT = "snapshot"

    @staticmethod
    def of(path: str) -> Lane:
        """Return a file's lane."""
        if is_of_the_driver(path):
            return Lane.DRIVER
        return Lane.SNAPSHOT if is_snapshot(path) else Lane.STATE


ALL_LANES = frozenset(Lane)


def file_batch(path: str, content: Sequence[Payload], sqn: SequenceNumber) -> pa.RecordBatch:
    """Return a file as changes: one for each 32 MiB, in key groups of their own, so that each is a block of its own."""
    whole = content[0] if len(content) == 1 else b"".join(content)
    parts = [memoryview(whole)[i : i + _PART] for i in range(0, len(whole), _PART)] or [memoryview(b"")]
    count = len(parts)
    columns = (
        pa.array([(sqn + i) % _KEY_GROUPS for i in range(count)], pa.uint16()),
        pa.array([0] * count, pa.uint16()),
        pa.array([OP_PUT] * count, pa.uint8()),
        pa.array([path.encode()] * count, pa.binary()),
        pa.array([i.to_bytes(4, "big") for i in range(count)], pa.binary()),
        pa.array(parts, pa.binary()),
    )
    return pa.RecordBatch.from_arrays(list(columns), schema=CHANGE_SCHEMA)


def file_bytes(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return the file whose changes these are, in whatever order they come."""
    parts = {
        user_key: value
        for batch in batches
        for user_key, value in zip(batch.column(4).to_pylist(), batch.column(5), strict=True)
    }
    return b"".join(parts[each].as_buffer() for each in sorted(parts))


@dataclass(slots=True, eq=False)
class _Open:
    """A persist whose record is not written yet.

    Attributes:
        riders: What it covers.
        first: The first change set that it covers, by log.
        is_kept: The coordinator knows where these are for good: a record that fails leaves them as they are.
        result: Where they are; None while they are on their way.
        is_asked: They are a part of the record that is being made.
    """

    riders: list[Rider]
    first: dict[str, SequenceNumber]
    is_kept: bool
    result: PersistResult | None = None
    is_asked: bool = False


class FileLog:
    """Files of one checkpoint directory that this process takes, until a record holds them. One event loop.

    Invariants:
        1. A file is one change set of its run's log. What a run that is over has left is not uploaded any more.
        2. What :meth:`persist` returns is one record's: the next :meth:`complete` or :meth:`reset` is the answer to all
           persists since the last one. What :meth:`store` stores meanwhile is the next record's.
        3. A snapshot is in a record behind all that was put before it (:func:`~dstl.files.rules.in_order`).
        4. What is of no run is stored anew for each run: another driver may have led between two of them, and what lies
           stored from before its fence, and is in no record, its cleaner takes for an orphan.

    Args:
        changelog: The log's parts; closed with this.
        runtime: Time and ids.
        inline_threshold: Bytes that a record may hold.

    Attributes:
        riders: What no record holds.
        stores_in_background: Large snapshots are stored before a record asks for them; else the caller does it.
    """

    def __init__(self, changelog: Changelog, runtime: Runtime, inline_threshold: int) -> None:
        self.riders = Riders()
        self._changelog = changelog
        self._runtime = runtime
        # Encoded they may be a little more.
        self._room = inline_threshold * 3 // 4
        self.stores_in_background = True
        self._writers: dict[tuple[str, Lane], StateChangelogWriter] = {}
        self._held: dict[tuple[str, SequenceNumber], pa.RecordBatch] = {}
        self._run = ""
        self._stored: set[Rider] = set()
        self._open: list[_Open] = []
        self._storing = asyncio.Lock()
        self._uploads: set[asyncio.Task[None]] = set()

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> Rider | None:
        """Take a file; waits while the budget is used up. None where a higher attempt's is here already."""
        nbytes = sum(map(len, content))
        async with self._changelog.storage.reserve(nbytes):
            replaced = self.riders.find(path, run)
            rider = self._append(Rider(path, run, attempt, nbytes, self._now_ms()), content)
            if rider is None:
                return None
            if replaced is not None and replaced.run == run and replaced not in self._covered():
                self._held.pop((replaced.log_id, replaced.sqn), None)
        if Lane.of(path) is Lane.SNAPSHOT:
            self._store_soon(run, above=self._room)
        return rider

    def delete(self, path: str, run: str) -> None:
        """Note that a file is gone."""
        self.riders.add(Rider(path, run, -1, -1, self._now_ms()))

    def discard(self, rider: Rider) -> None:
        """Forget a file whose put has failed."""
        self.riders.remove([rider])
        self._held.pop((rider.log_id, rider.sqn), None)

    def read(self, rider: Rider) -> bytes:
        """Return the bytes of a file that no record holds yet."""
        return file_bytes([self._held[rider.log_id, rider.sqn]])

    def end_other_runs(self, run: str) -> None:
        """Drop what other runs have put: they are over. What a record of theirs may name stays the coordinator's.

        Args:
            run: The one that goes on; empty: they all do.
        """
        if run != self._run:
            self._run = run
            self._append_anew()
        if not run:
            return
        self.riders.keep_only(run)
        ended = {w.log_id: w for (owner, _), w in self._writers.items() if owner not in (run, "")}
        over = [each for each in self._open if not ended.keys().isdisjoint(each.first)]
        for each in over:
            self._open.remove(each)
            if each.result is not None and not each.is_asked:
                self._changelog.storage.reset(each.result)
        for writer in ended.values():
            self._forget(writer)
            writer.truncate_and_close(INITIAL_SQN)
        self._writers = {key: writer for key, writer in self._writers.items() if writer.log_id not in ended}

    def _append_anew(self) -> None:
        """Append what is of no run, and was stored for a record that it is not in, so that it is stored once more."""
        asked = {rider for each in self._open if each.is_asked for rider in each.riders}
        again = [rider for rider in self.riders.of("") if rider in self._stored and rider not in asked]
        # Whoever was told of these owns them.
        self._open = [each for each in self._open if each.is_asked or set(again).isdisjoint(each.riders)]
        self._stored &= asked
        for rider in again:
            self._append(rider, [self.read(rider)])
            del self._held[rider.log_id, rider.sqn]

    def _append(self, rider: Rider, content: Sequence[Payload]) -> Rider | None:
        """Append a file as the next change set; None where a higher attempt's is here already."""
        writer = self._writer(rider.run, Lane.of(rider.path))
        sqn = writer.next_sequence_number()
        appended = replace(rider, log_id=writer.log_id, sqn=sqn)
        if not self.riders.add(appended):
            return None
        batch = file_batch(rider.path, content, sqn)
        writer.append_batch(batch)
        writer.next_sequence_number()
        self._held[writer.log_id, sqn] = batch
        return appended

    async def persist(
        self, run: str, lanes: Collection[Lane] = ALL_LANES, version: int | None = None
    ) -> PersistedFiles:
        """Make what a run and no run have put durable, or ready to be written inside a record.

        Snapshots take part where that makes nobody wait: stored already, or small. Else they are stored from now on,
        for a later record.

        Args:
            run: The run.
            lanes: Those that take part.
            version: The one that a commit leads to; snapshots are waited for where it has no other copy.

        Raises:
            DstlError: The store did not take it; it is kept.
        """
        wait = version is not None and needs_snapshots([rider.path for rider in self.riders.of(run)], version)
        if wait or self._stores(Lane.STATE):
            async with self._storing:
                pass  # what was on its way is stored now
        pending = self._pending(run, lanes)
        left = [] if wait else self._left_behind(pending)
        added = self._begin(in_order(pending, left), is_kept=False)
        asked = [each for each in self._open if each.result is not None and not each.is_asked]
        for each in (*asked, added):
            each.is_asked = True
        try:
            await self._persist(added, allow_inline=True)
        except BaseException:
            self.reset()
            raise
        if left:
            self._store_soon(run, above=0)
        told = [_told(each.riders, each.result) for each in (*asked, added) if each.result is not None]
        return joined(told, has_more=bool(left))

    async def store(self, run: str, lanes: Collection[Lane]) -> PersistedFiles | None:
        """Store what a run has put in some lanes, one after another; None where nothing is to be stored.

        Raises:
            DstlError: The store did not take it; it is kept.
        """
        async with self._storing:
            riders = [rider for rider in self._pending(run, lanes) if not rider.is_deletion]
            if not riders:
                return None
            added = self._begin(riders, is_kept=True)
            await self._persist(added, allow_inline=False)
            assert added.result is not None
            return _told(added.riders, added.result)

    async def hand_over(self) -> list[tuple[str, PersistedFiles]]:
        """Store all files that no record holds, and return them by run: this process is about to end.

        Raises:
            DstlError: The store did not take them.
        """
        began = self._runtime.clock.now()
        while any(each.is_asked for each in self._open) and self._runtime.clock.now() < began + _ANSWER_S:
            await self._runtime.clock.sleep(_LOOK_S)
        self.abandon()
        for run in self.riders.runs():
            await self.store(run, ALL_LANES)
        stored = [each for each in self._open if each.result is not None]
        return [(max(r.run for r in each.riders), _told(each.riders, each.result)) for each in stored if each.result]

    def complete(self, located: Mapping[str, SegmentHandle]) -> list[tuple[str, SequenceNumber, bytes]]:
        """The record of the persists since the last one is durable.

        Args:
            located: Where it holds each inlined seal.

        Returns:
            Log, number and bytes of its small files, which Spark reads back soon.
        """
        done = [each for each in self._open if each.is_asked]
        self._open = [each for each in self._open if not each.is_asked]
        small = []
        for each in done:
            assert each.result is not None
            # A barrier may have been given up when its record's outcome was unknown.
            held = [r for r in each.riders if r.size <= _SMALL and (r.log_id, r.sqn) in self._held]
            small += [(r.log_id, r.sqn, self.read(r)) for r in held]
            self._changelog.storage.confirm(each.result, located)
            self.riders.remove(each.riders)
            self._stored.difference_update(each.riders)
            for rider in each.riders:
                self._held.pop((rider.log_id, rider.sqn), None)
        needed: dict[str, SequenceNumber] = {}
        for rider in self.riders:
            needed[rider.log_id] = min(needed.get(rider.log_id, rider.sqn), rider.sqn)
        for writer in self._writers.values():
            writer.truncate(needed.get(writer.log_id, writer.next_sequence_number()))
        return small

    def reset(self) -> None:
        """The record of the persists since the last one was certainly not written."""
        for each in [each for each in self._open if each.is_asked]:
            each.is_asked = False
            if not each.is_kept and each.result is not None:
                self._open.remove(each)
                self._changelog.storage.reset(each.result)

    def abandon(self) -> None:
        """Nobody knows whether the record of the persists since the last one was written: what it may name stays."""
        self._open = [each for each in self._open if not each.is_asked]

    def _pending(self, run: str, lanes: Collection[Lane]) -> list[Rider]:
        covered = self._covered()
        return [r for r in self.riders.of(run, lambda path: Lane.of(path) in lanes) if r not in covered]

    def _covered(self) -> set[Rider]:
        return {rider for each in self._open for rider in each.riders}

    def _left_behind(self, pending: Sequence[Rider]) -> list[Rider]:
        """Return the snapshots that a record does not wait for: too large to ride in it, or behind one on its way."""
        on_their_way = [rider for each in self._open if each.result is None and each.is_kept for rider in each.riders]
        snapshots = [r for r in pending if Lane.of(r.path) is Lane.SNAPSHOT and not r.is_deletion]
        nbytes = sum(rider.size for rider in snapshots)
        others = sum(r.size for r in pending if not r.is_deletion) - nbytes
        # Beside a large commit's own segment a few more bytes take no time.
        fits = nbytes <= self._room and (others > self._room or nbytes + others <= self._room)
        return [*on_their_way, *snapshots] if on_their_way or not fits else []

    def _stores(self, lane: Lane) -> bool:
        """Return True while files of a lane are being stored."""
        stored = [rider for each in self._open if each.result is None and each.is_kept for rider in each.riders]
        return any(Lane.of(rider.path) is lane for rider in stored)

    def _begin(self, riders: list[Rider], *, is_kept: bool) -> _Open:
        first: dict[str, SequenceNumber] = {}
        for rider in riders:
            if not rider.is_deletion:
                first[rider.log_id] = min(first.get(rider.log_id, rider.sqn), rider.sqn)
        added = _Open(riders, first, is_kept)
        self._open.append(added)
        return added

    async def _persist(self, added: _Open, *, allow_inline: bool) -> None:
        writers = {writer.log_id: writer for writer in self._writers.values()}
        requests = [(writers[log_id], sqn) for log_id, sqn in added.first.items()]
        try:
            added.result = await self._changelog.storage.persist_all(requests, allow_inline=allow_inline)
        except BaseException:
            if added in self._open:
                self._open.remove(added)
            raise
        self._stored.update(rider for rider in added.riders if not rider.run and not rider.is_deletion)

    def _store_soon(self, run: str, above: int) -> None:
        """Store snapshots in the background where there are more bytes of them than so many."""
        waiting = sum(r.size for r in self._pending(run, {Lane.SNAPSHOT}) if not r.is_deletion)
        if waiting <= above or self._uploads or not self.stores_in_background:
            return

        async def upload() -> None:
            try:
                await self.store(run, {Lane.SNAPSHOT})
            except Closed:
                return  # its run is over
            except DstlError as error:
                _log.warning("a snapshot could not be stored, and is tried again with the next commit: %s", error)

        task = asyncio.get_running_loop().create_task(upload())
        self._uploads.add(task)
        task.add_done_callback(self._uploads.discard)

    async def close(self) -> None:
        """Drop what no record holds. Idempotent."""
        await self._changelog.close()
        if self._uploads:
            await asyncio.wait(self._uploads)

    def _writer(self, run: str, lane: Lane) -> StateChangelogWriter:
        writer = self._writers.get((run, lane))
        if writer is None:
            writer = self._changelog.storage.create_writer(self._runtime.new_id())
            self._writers[run, lane] = writer
        return writer

    def _forget(self, writer: StateChangelogWriter) -> None:
        for log_id, sqn in [each for each in self._held if each[0] == writer.log_id]:
            del self._held[log_id, sqn]

    def _now_ms(self) -> int:
        return int(self._runtime.clock.wall() * 1000)


def _told(riders: Sequence[Rider], result: PersistResult) -> PersistedFiles:
    """Return what the coordinator is told of a persist."""
    places: dict[SegmentHandle | InlineSegment, int] = {}
    files = []
    for rider in riders:
        place = -1
        if not rider.is_deletion:
            location = _segment_of(result.segments[rider.log_id], rider.sqn).location
            place = places.setdefault(location, len(places))
        files.append(
            PersistedFile(rider.path, rider.attempt, rider.size, rider.modified_ms, rider.log_id, rider.sqn, place)
        )
    segments, inlined, offset = [], [], 0
    for location in places:
        if isinstance(location, InlineSegment):
            segments.append((location.id, "", location.size, location.checksum, offset))
            inlined.append(location.data)
            offset += location.size
        else:
            segments.append(("", location.name, location.size, location.checksum, location.offset))
    return PersistedFiles(tuple(files), tuple(segments), False, b"".join(inlined))


def joined(parts: Sequence[PersistedFiles], *, has_more: bool = False) -> PersistedFiles:
    """Return what several persists have told as one answer."""
    files: list[PersistedFile] = []
    segments: list[tuple[str, str, int, int, int]] = []
    inlined, offset = [], 0
    for part in parts:
        base = len(segments)
        files += [replace(file, segment=file.segment + base) if file.size >= 0 else file for file in part.files]
        for seal, name, size, checksum, at in part.segments:
            segments.append((seal, name, size, checksum, at + offset if seal else at))
        inlined.append(bytes(part.inlined))
        offset += len(part.inlined)
    return PersistedFiles(tuple(files), tuple(segments), has_more, b"".join(inlined))


def _segment_of(segments: Sequence[LogSegment], sqn: SequenceNumber) -> LogSegment:
    return next(each for each in segments if sqn in each.range)
