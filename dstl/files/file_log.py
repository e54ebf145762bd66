"""The log of one checkpoint directory on one host: files become change sets, and durable with a record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from dstl.changelog.change_set import CHANGE_SCHEMA, OP_PUT
from dstl.changelog.log_segment import InlineSegment, LogSegment
from dstl.changelog.storage import PersistResult
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Closed
from dstl.files.namespace import is_of_the_driver, is_snapshot
from dstl.files.riders import Rider, Riders
from dstl.rpc.codec import Payload
from dstl.rpc.file_messages import PersistedFile, PersistedFiles
from dstl.runtime import Runtime
from dstl.taskmanager.task_manager import Changelog
from handles.segment_handle import SegmentHandle
from handles.sequence_number import INITIAL_SQN, SequenceNumber

__all__ = ["ALL_LANES", "FileLog", "Lane", "file_batch", "file_bytes"]

_PART = 32 << 20
_KEY_GROUPS = 32_000
_SMALL = 256 << 10


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


@dataclass(frozen=True, slots=True)
class _Open:
    """A persist whose record is not written yet."""

    result: PersistResult
    riders: list[Rider]


class FileLog:
    """Files of one checkpoint directory that this process takes, until a record holds them. One event loop.

    Invariants:
        1. A file is one change set of its run's log. What a run that is over has left is not uploaded any more.
        2. Between :meth:`persist` and its :meth:`complete` or :meth:`reset` there is no other persist.

    Args:
        changelog: The log's parts; closed with this.
        runtime: Time and ids.
    """

    def __init__(self, changelog: Changelog, runtime: Runtime) -> None:
        self.riders = Riders()
        self._changelog = changelog
        self._runtime = runtime
        self._writers: dict[tuple[str, Lane], StateChangelogWriter] = {}
        self._durable: dict[str, SequenceNumber] = {}
        self._held: dict[tuple[str, SequenceNumber], pa.RecordBatch] = {}
        self._open: _Open | None = None

    async def put(self, path: str, run: str, attempt: int, content: Sequence[Payload]) -> Rider | None:
        """Take a file; waits while the budget is used up. None where a higher attempt's is here already."""
        nbytes = sum(map(len, content))
        async with self._changelog.storage.reserve(nbytes):
            writer = self._writer(run, Lane.of(path))
            sqn = writer.next_sequence_number()
            rider = Rider(path, run, attempt, nbytes, self._now_ms(), writer.log_id, sqn)
            replaced = self.riders.find(path, run)
            if not self.riders.add(rider):
                return None
            batch = file_batch(path, content, sqn)
            writer.append_batch(batch)
            writer.next_sequence_number()
            self._held[rider.log_id, sqn] = batch
            if replaced is not None and replaced.run == run:
                self._held.pop((replaced.log_id, replaced.sqn), None)
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
        """Drop what other runs have put: they are over."""
        self.riders.keep_only(run)
        for (owner, lane), writer in list(self._writers.items()):
            if owner not in (run, ""):
                del self._writers[owner, lane]
                self._forget(writer)
                writer.truncate_and_close(self._durable.pop(writer.log_id, INITIAL_SQN))

    async def persist(self, run: str, lanes: Collection[Lane] = ALL_LANES) -> PersistedFiles:
        """Make what a run and no run have put durable, or ready to be written inside a record.

        Raises:
            DstlError: The store did not take it; it is kept.
        """
        if self._open is not None:
            raise Closed("a record of this directory is being written: persist after complete or reset")
        wanted = [w for (owner, lane), w in self._writers.items() if owner in (run, "") and lane in lanes]
        riders = self.riders.of(run, lambda path: Lane.of(path) in lanes)
        requests = [(writer, self._durable.get(writer.log_id, INITIAL_SQN)) for writer in wanted]
        self._open = _Open(PersistResult({}, {}), riders)
        try:
            result = await self._changelog.storage.persist_all(requests)
        except BaseException:
            self._open = None
            raise
        self._open = _Open(result, riders)
        return _told(riders, result)

    def complete(self, located: Mapping[str, SegmentHandle]) -> list[tuple[str, SequenceNumber, bytes]]:
        """The record of the latest persist is durable.

        Args:
            located: Where it holds each inlined seal.

        Returns:
            Log, number and bytes of its small files, which Spark reads back soon.
        """
        done, self._open = self._open, None
        if done is None:
            return []
        small = [(r.log_id, r.sqn, self.read(r)) for r in done.riders if not r.is_deletion and r.size <= _SMALL]
        self._changelog.storage.confirm(done.result, located)
        self.riders.remove(done.riders)
        for rider in done.riders:
            self._held.pop((rider.log_id, rider.sqn), None)
        for writer in self._writers.values():
            if (span := done.result.ranges.get(writer.log_id)) is not None:
                self._durable[writer.log_id] = span.to_sqn
                writer.truncate(span.to_sqn)
        return small

    def reset(self) -> None:
        """The record of the latest persist was certainly not written."""
        done, self._open = self._open, None
        if done is not None:
            self._changelog.storage.reset(done.result)

    async def close(self) -> None:
        """Drop what no record holds. Idempotent."""
        await self._changelog.close()

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
    return PersistedFiles(tuple(files), tuple(segments), b"".join(inlined))


def _segment_of(segments: Sequence[LogSegment], sqn: SequenceNumber) -> LogSegment:
    return next(each for each in segments if sqn in each.range)
