"""A changelog storage over a store whose every PUT the test decides: the world of the writer's tests."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dstl.changelog.change_set import OP_PUT
from dstl.changelog.log_segment import InlineSegment, LogSegment, PersistResult
from dstl.changelog.segment.reader import decode_segment
from dstl.changelog.writer import StateChangelogWriter
from dstl.errors import Unavailable
from dstl.options import BatchingOptions, HedgingOptions, UploadOptions
from dstl.store.base import ObjectInfo
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from handles.segment_handle import SegmentHandle, SequenceNumberRange
from tests.simulation.virtual_time import LoopClock, seeded_runtime
from worlds.memory_recorder import MemoryRecorder
from worlds.segment_samples import batch_of
from worlds.wrapped_store import WrappedStore


@dataclass(eq=False)
class HeldPut:
    """One PUT that waits for the test's word."""

    name: str
    data: bytes
    word: asyncio.Future[BaseException | None] = field(repr=False)

    def succeed(self) -> None:
        self.word.set_result(None)

    def fail(self, error: BaseException | None = None) -> None:
        self.word.set_result(error or Unavailable("the test says no"))


class HeldStore(WrappedStore):
    """A memory store that does each PUT at once, or holds it until the test lets it succeed or fail."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(clock=LoopClock()))
        self.holding = False
        self.held: list[HeldPut] = []
        self.acknowledged: dict[str, bytes] = {}
        self.started = 0
        self.delete_fails = False

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        self.started += 1
        if self.holding:
            put = HeldPut(name, bytes(data), asyncio.get_running_loop().create_future())
            self.held.append(put)
            try:
                error = await put.word
            finally:
                self.held.remove(put)
            if error is not None:
                raise error
        info = await self.inner.put(name, data, if_absent=if_absent)
        self.acknowledged[name] = bytes(data)
        return info

    async def delete(self, names: Sequence[str]) -> None:
        if self.delete_fails:
            raise Unavailable("the test says no to deletions")
        await self.inner.delete(names)

    async def names(self) -> set[str]:
        return {info.name async for info in self.inner.list()}


class World:
    """Store, uploader and storage, made on the running loop; no retries and no hedges unless asked for."""

    def __init__(self, *, seed: int = 1, upload: UploadOptions | None = None, **batching: object) -> None:
        self.runtime = seeded_runtime(seed)
        self.store = HeldStore()
        self.recorder = MemoryRecorder()
        self.options = BatchingOptions(**batching)
        config = TaskManagerConfig(
            self.store.location,
            batching=self.options,
            upload=upload or UploadOptions(max_attempts=1, attempt_timeout_s=1e6, deadline_s=1e6, delete_grace_s=0),
            hedging=HedgingOptions(enabled=False),
        )
        components = Components(store=self.store, runtime=self.runtime, recorder=self.recorder)
        self._changelog = Changelog(config, components, "query")
        self.uploader, self.names = self._changelog.uploader, self._changelog.names
        self.storage = self._changelog.storage

    def writer(self, log_id: str = "log-a") -> StateChangelogWriter:
        return self.storage.create_writer(log_id)

    def wrote(self, value: bytes) -> StateChangelogWriter:
        """A log with one change."""
        writer = self.writer()
        put(writer, value)
        return writer

    def persist(
        self, writer: StateChangelogWriter, from_sqn: int = 0, *, allow_inline: bool = False
    ) -> asyncio.Task[tuple[LogSegment, ...]]:
        """Persist one log from the next turn on; where it lies."""

        async def persist() -> tuple[LogSegment, ...]:
            result = await self.storage.persist_all([(writer, from_sqn)], allow_inline=allow_inline)
            return result.segments[writer.log_id]

        task = asyncio.ensure_future(persist())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a test may not care how it ends
        return task

    async def uploading(self, value: bytes = b"x") -> tuple[StateChangelogWriter, asyncio.Task[tuple[LogSegment, ...]]]:
        """A log whose first persist waits at the store, which holds every PUT from now on."""
        self.store.holding = True
        writer = self.wrote(value)
        future = self.persist(writer)
        await turn()
        return writer, future

    async def reserve(self, nbytes: int) -> None:
        """Wait until so many bytes fit, and give them back."""
        async with self.storage.budget.reserve(nbytes):
            pass

    async def append(self, writer: StateChangelogWriter, nbytes: int) -> None:
        """Append a change of so many bytes once they fit."""
        async with self.storage.budget.reserve(nbytes):
            put(writer, b"y" * (nbytes - 6))

    async def close(self) -> None:
        await self._changelog.close()

    async def read(self, log_id: str, segments: Iterable[LogSegment]) -> list[bytes]:
        """Return the values of a log's segments in order: what a replay would apply."""
        values: list[bytes] = []
        for segment in segments:
            values += decoded(log_id, segment, await self.bytes_of(segment.location))
        return values

    async def bytes_of(self, location: SegmentHandle | InlineSegment) -> bytes:
        if isinstance(location, InlineSegment):
            return location.data
        data = await self.store.get(location.name)
        return data[location.offset : location.offset + location.size]

    async def manifest(self, inline: InlineSegment, name: str) -> SegmentHandle:
        """Do the coordinator's part: write the seal inside a manifest and return where."""
        head = b"manifest " + name.encode()
        await self.store.inner.put(name, head + inline.data)
        return SegmentHandle(name, inline.size, inline.checksum, len(head))


def inlined_of(result: PersistResult) -> tuple[InlineSegment, ...]:
    """Return the seals that must be written inside the manifest; each once."""
    found = (segment.location for log in result.segments.values() for segment in log)
    return tuple({each.id: each for each in found if isinstance(each, InlineSegment)}.values())


def result_of(writer: StateChangelogWriter, from_sqn: int, to_sqn: int) -> PersistResult:
    """Return what a persist of this range is confirmed or reset by."""
    return PersistResult({writer.log_id: SequenceNumberRange(from_sqn, to_sqn)}, {})


def decoded(log_id: str, segment: LogSegment, data: bytes) -> list[bytes]:
    found = [
        (sqn, batch.column("value").to_pylist())
        for each, sqn, _, batch in decode_segment(data, "test")
        if each == log_id and sqn in segment.range
    ]
    return [value for _, values in sorted(found, key=lambda pair: pair[0]) for value in values]


def put(writer: StateChangelogWriter, value: bytes, key_group: int = 1) -> None:
    """Append one change whose value says which it is."""
    writer.append_batch(batch_of([(key_group, 0, OP_PUT, b"k", b"", value)]))


async def turn(seconds: float = 0.0) -> None:
    """Let everything that is ready run; with seconds, let virtual time pass too."""
    if seconds:
        await asyncio.sleep(seconds)
    for _ in range(12):
        await asyncio.sleep(0)


@asynccontextmanager
async def world(**settings: object) -> AsyncIterator[World]:
    each = World(**settings)
    try:
        yield each
    finally:
        each.store.holding = False
        for held in list(each.store.held):
            held.succeed()
        await each.close()
        assert each.storage.budget.used == 0, "bytes were not given back"
        assert len(each.storage.references) == 0, "a change set of a segment was never ended"
