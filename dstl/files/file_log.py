"""The log of one checkpoint directory on one host: files become change sets, and durable with a record."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dstl.changelog.ledger import Ownership
from dstl.changelog.log_segment import LogSegment, PersistResult
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed, DstlError, MissingState, TaskManagerLost, Unavailable
from dstl.files.file_parts import ALL_KEY_GROUPS, cut, file_batch, parts_of
from dstl.files.namespace import is_of_the_driver, is_snapshot
from dstl.files.reader import FileReader
from dstl.files.riders import Rider, Riders
from dstl.files.rules import in_order, needs_snapshots
from dstl.rpc.codec import Payload
from dstl.rpc.fleet_messages import Persisted, PersistedFile, PersistedPart
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from handles.file_record import FILES_OWNER, FileEntry
from handles.segment_handle import INITIAL_SQN, SegmentHandle, SequenceNumber

_log = logging.getLogger(__name__)

_SMALL = 256 << 10
"""Bytes up to which a file stays in the cache once it is put: offsets, commits and small deltas, which Spark soon reads
again. Larger ones would push them out."""
_ROOM_S = 600.0
"""A file waits so long for room: longer than a store's outage that a batch rides out."""
_ANSWER_S = 10.0
"""A commit takes fractions of a second; Docker kills what it has told to end after ten, Kubernetes after thirty."""
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
        config: Of the process.
        runtime: Time and ids.
        reader: Reads what records name; its store is the log's.
        hedge_store: The same location over other connections, for second requests; closed with this. The same store
            where None.

    Attributes:
        reader: The same.
        riders: What no record holds.
        stores_in_background: Large snapshots are stored before a record asks for them; else the caller does it.
    """

    def __init__(
        self, config: TaskManagerConfig, runtime: Runtime, reader: FileReader, hedge_store: ObjectStore | None = None
    ) -> None:
        self.riders = Riders()
        self.reader = reader
        self._hedge_store = hedge_store
        components = Components(store=reader.store, hedge_store=hedge_store, runtime=runtime)
        self._changelog = Changelog(config, components, FILES_OWNER)
        self._runtime = runtime
        # Encoded they may be a little more.
        self._room = config.batching.inline_threshold * 3 // 4
        self.stores_in_background = True
        self._writers: dict[tuple[str, Lane], StateChangelogWriter] = {}
        self._run = ""
        self._stale: list[Rider] = []
        self._open: list[_Open] = []
        self._storing = asyncio.Lock()
        self._uploads: set[asyncio.Task[None]] = set()

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> Rider | None:
        """Take a file; waits while the budget is used up. None where a higher attempt's is here already.

        Raises:
            Unavailable: The store has made no room for too long.
        """
        rider = await self._append(Rider(path, run, attempt, sum(map(len, content)), self._now_ms()), content)
        if rider is not None and Lane.of(path) is Lane.SNAPSHOT:
            self._store_soon(run, above=self._room)
        return rider

    def delete(self, path: str, run: str) -> None:
        """Note that a file is gone."""
        self.riders.add(Rider(path, run, -1, -1, self._now_ms()))

    def discard(self, rider: Rider) -> None:
        """Forget a file whose put has failed."""
        self.riders.remove([rider])

    async def read(self, rider: Rider, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of a file that no record holds yet, or a part of them, as :meth:`FileReader.read` does.

        Raises:
            DstlError: They are stored, and cannot be read.
        """
        held = self._writers[rider.run, Lane.of(rider.path)].ledger.find(rider.sqn)
        if isinstance(held, SegmentHandle):
            entry = FileEntry(rider.path, rider.size, rider.modified_ms, held, rider.log_id, rider.sqn)
            return await self.reader.read(entry, offset, length)
        stop = rider.size if length is None else min(rider.size, offset + length)
        return cut(parts_of(held.batches()), min(offset, stop), stop)

    def end_other_runs(self, run: str) -> None:
        """Drop what other runs have put: they are over. What a record of theirs may name stays the coordinator's.

        Args:
            run: The one that goes on; empty: they all do.
        """
        if run != self._run:
            self._run = run
            self._note_stale()
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
            writer.truncate_and_close(INITIAL_SQN)
        self._writers = {key: writer for key, writer in self._writers.items() if writer.log_id not in ended}

    def _note_stale(self) -> None:
        """Mark for another upload files of no run that were stored for a record which they are not in."""
        asked = {rider for each in self._open if each.is_asked for rider in each.riders}
        self._stale = [r for r in self.riders.of("") if not r.is_deletion and r not in asked and self._is_stored(r)]
        # Whoever was told of these owns them.
        self._open = [each for each in self._open if each.is_asked or set(self._stale).isdisjoint(each.riders)]

    def _is_stored(self, rider: Rider) -> bool:
        ledger = self._writers[rider.run, Lane.of(rider.path)].ledger
        return ledger.ownership(rider.sqn) is not Ownership.BUFFERED

    async def _append_anew(self) -> None:
        """Append once more what :meth:`_note_stale` has found.

        Raises:
            TaskManagerLost: A cleaner has taken one for an orphan already.
            DstlError: They cannot be read now.
        """
        while self._stale:
            rider = self._stale[-1]
            if self.riders.find(rider.path, "") == rider:
                try:
                    content = await self.read(rider)
                except MissingState as error:
                    self.discard(self._stale.pop())
                    raise TaskManagerLost(
                        f"{rider.path}, which was written outside of a query, is lost, for another driver has led "
                        f"since: run the job again that has written it ({error})"
                    ) from error
                await self._append(rider, [content])
            self._stale.remove(rider)

    async def _append(self, rider: Rider, content: Sequence[Payload]) -> Rider | None:
        """Append a file as the next change set; None where a higher attempt's is here already."""
        try:
            async with asyncio.timeout(_ROOM_S), self._changelog.storage.budget.reserve(rider.size):
                writer = self._writer(rider.run, Lane.of(rider.path))
                sqn = writer.next_sequence_number()
                appended = replace(rider, log_id=writer.log_id, sqn=sqn)
                if not self.riders.add(appended):
                    return None
                writer.append_batch(file_batch(rider.path, content, sqn))
                writer.next_sequence_number()
        except TimeoutError:
            raise Unavailable(
                f"there was no room for {rider.path} in {_ROOM_S:.0f} s: this host holds all that batching.byte_budget "
                "allows, and the store does not take it; look at the store, then let the query run again"
            ) from None
        # What is of no run may be needed once more (invariant 4), when its object is gone.
        if rider.size <= _SMALL or not rider.run:
            self.reader.keep(writer.log_id, sqn, b"".join(content))
        return appended

    async def persist(self, run: str, lanes: Collection[Lane] = ALL_LANES, version: int | None = None) -> Persisted:
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
        await self._append_anew()
        wait = version is not None and needs_snapshots([rider.path for rider in self.riders.of(run)], version)
        if wait or any(Lane.of(rider.path) is Lane.STATE for rider in self._on_their_way()):
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
        return _part([*asked, added], has_more=bool(left))

    async def store(self, run: str, lanes: Collection[Lane]) -> Persisted | None:
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
            return _part([added])

    async def hand_over(self) -> list[tuple[str, Persisted]]:
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
        return [(max(rider.run for rider in each.riders), _part([each])) for each in stored]

    def complete(self, located: Mapping[str, SegmentHandle]) -> None:
        """The record of the persists since the last one is durable.

        Args:
            located: Where it holds each inlined seal.
        """
        done = [each for each in self._open if each.is_asked]
        self._open = [each for each in self._open if not each.is_asked]
        for each in done:
            assert each.result is not None
            self._changelog.storage.confirm(each.result, located)
            self.riders.remove(each.riders)
        needed: dict[str, SequenceNumber] = {}
        for rider in self.riders:
            needed[rider.log_id] = min(needed.get(rider.log_id, rider.sqn), rider.sqn)
        for writer in self._writers.values():
            writer.truncate(needed.get(writer.log_id, writer.next_sequence_number()))

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
        covered = {rider for each in self._open for rider in each.riders}
        return [r for r in self.riders.of(run, lambda path: Lane.of(path) in lanes) if r not in covered]

    def _left_behind(self, pending: Sequence[Rider]) -> list[Rider]:
        """Return the snapshots that a record does not wait for: too large to ride in it, or behind one on its way."""
        on_their_way = self._on_their_way()
        snapshots = [r for r in pending if Lane.of(r.path) is Lane.SNAPSHOT and not r.is_deletion]
        nbytes = sum(rider.size for rider in snapshots)
        others = sum(r.size for r in pending if not r.is_deletion) - nbytes
        # Beside a large commit's own segment a few more bytes take no time.
        fits = nbytes <= self._room and (others > self._room or nbytes + others <= self._room)
        return [*on_their_way, *snapshots] if on_their_way or not fits else []

    def _on_their_way(self) -> list[Rider]:
        """Return the files that are being stored."""
        return [rider for each in self._open if each.result is None and each.is_kept for rider in each.riders]

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
        if self._hedge_store is not None:
            await self._hedge_store.close()

    def _writer(self, run: str, lane: Lane) -> StateChangelogWriter:
        writer = self._writers.get((run, lane))
        if writer is None:
            writer = self._changelog.storage.create_writer(self._runtime.new_id())
            self._writers[run, lane] = writer
        return writer

    def _now_ms(self) -> int:
        return int(self._runtime.clock.wall() * 1000)


def _part(opened: Iterable[_Open], *, has_more: bool = False) -> Persisted:
    """Return what the coordinator is told of persists."""
    part, files = PersistedPart(), []
    for each in opened:
        assert each.result is not None
        for rider in each.riders:
            place = -1
            if not rider.is_deletion:
                location = _segment_of(each.result.segments[rider.log_id], rider.sqn).location
                place = part.place(location, ALL_KEY_GROUPS)
            files.append(
                PersistedFile(rider.path, rider.attempt, rider.size, rider.modified_ms, rider.log_id, rider.sqn, place)
            )
    return replace(part.finish(), files=tuple(files), has_more=has_more)


def _segment_of(segments: Sequence[LogSegment], sqn: SequenceNumber) -> LogSegment:
    return next(each for each in segments if sqn in each.range)
