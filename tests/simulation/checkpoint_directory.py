"""A query's checkpoint directory in a simulated world, as Spark's driver reads and writes it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from dstl.checkpoint.committed_runs import CommittedRuns
from dstl.errors import DstlError, ObjectExists
from dstl.files.file_log import FileLog
from dstl.files.namespace import METADATA
from dstl.files.options import FileOptions
from dstl.files.query_directory import QueryDirectory
from dstl.files.reader import FileReader
from dstl.rpc.codec import Payload
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.spark import ConcurrentUpdate
from tests.simulation.world import World

_ROOT = "dstl:///jobs/query"
_KEPT = 6
_WAITS = (
    FileOptions(),
    FileOptions(commit="with-next"),
    FileOptions(commit="with-next", sources="keep"),
)
"""When a driver's batches wait for their records."""


class CheckpointDirectory:
    """Files in the manifest log of the query's checkpoints: the product's own, whose commits are the checkpoints.

    What it says is the truth that the world's logs follow: a write whose outcome nobody knows is looked up by the next
    run, as Spark does.

    Args:
        world: The world.
        store: The query's location.
        commits: Joins the directory to the checkpoints.
        config: How much a record holds.
        runtime: The driver's.
        driver: Its name.
    """

    def __init__(
        self,
        world: World,
        store: ObjectStore,
        commits: CommittedRuns,
        config: TaskManagerConfig,
        runtime: Runtime,
        driver: str,
    ) -> None:
        self._world = world
        self._options = world.rng(f"{driver}:waits").choice(_WAITS)
        self._told: tuple[str, int, Callable[[], None]] | None = None
        self._clock = runtime.clock
        log = FileLog(config, runtime, FileReader(store, MemoryStore(), runtime))
        self._directory = QueryDirectory(_ROOT, log, commits, runtime, self._options)

    async def plan(self, run: str) -> tuple[int, int | None]:
        """Begin a run; return the batch that it begins with, and where it ends if that is written already."""
        logs = self._world.logs
        if self._options.commit != "now":
            logs.deferring.add(run)
        # What is known before the directory is asked must be in its answer, once nobody else can write.
        committed = logs.committed
        if await self._directory.find(METADATA, run) is None:
            await self._put(METADATA, "", json.dumps({"id": "query"}).encode())
        await self._directory.claim()
        offsets, commits = await self._numbers("offsets", run), await self._numbers("commits", run)
        newest, last = max(commits, default=-1), max(offsets, default=-1)
        if newest < committed - 1:
            self._world.check.fail("I8", f"{run} finds commit {newest}, and batch {committed - 1} was committed")
        if not newest <= last <= newest + 1:
            self._world.check.fail("I8", f"{run} finds offsets up to {last} and commits up to {newest}")
        for batch in sorted(offsets):
            content = await self._directory.read(f"offsets/{batch}", run)
            self._found(run, batch, int(json.loads(content.splitlines()[-1])["logOffset"]))
        if self._told is not None and not self._world.check.has_landed(*self._told[:2]):
            # Of a run that is over: the commit of that number is another driver's.
            self._told = None
        self._durable(newest + 1)
        return (newest + 1, logs.ends[last]) if last > newest else (newest + 1, None)

    async def write_offsets(self, run: str, batch: int, end: int) -> None:
        """Write where a batch ends; it may be on its way still when this returns.

        Raises:
            ConcurrentUpdate: Another driver has.
            DstlError: It may or may not have been written.
        """
        header = {"batchWatermarkMs": 0, "batchTimestampMs": int(self._clock.wall() * 1000), "conf": {}}
        content = b"v1\n" + json.dumps(header).encode() + b"\n" + json.dumps({"logOffset": end}).encode()
        self._world.logs.planned[run] = batch, end
        await self._write(f"offsets/{batch}", run, content)
        # Before any task of the batch is let in.
        known = asyncio.ensure_future(self._known(run, batch, end))
        if self._options.sources == "forget":
            await known

    async def _known(self, run: str, batch: int, end: int) -> None:
        """Wait until where a batch ends is durable, and with it the commit of the batch before."""
        try:
            await self._directory.batch_time_ms(batch, run)
        except DstlError:
            # Its tasks are told.
            return
        self._found(run, batch, end)
        self._durable(batch)

    def _durable(self, batch: int) -> None:
        """The batches before this one are committed for good."""
        logs, told = self._world.logs, self._told
        logs.commit(batch)
        self._told = None
        if told is not None and told[1] < batch:
            told[2]()

    async def lacks_tasks(self, run: str, batch: int) -> bool:
        """Return whether tasks of a batch have to run before it is committed, as Spark's JVM asks."""
        return await self._directory.lacks_tasks(f"commits/{batch}", run)

    async def commit(self, run: str, batch: int, then: Callable[[], None]) -> None:
        """Write that a batch is done, and call ``then`` once that is durable; errors as of :meth:`write_offsets`."""
        await self._write(f"commits/{batch}", run, b"v1\n{}")
        self._told = run, batch, then
        if self._options.commit == "now":
            self._durable(batch + 1)
        if batch >= _KEPT:
            for kind in ("offsets", "commits"):
                await self._directory.delete(f"{kind}/{batch - _KEPT}", run)

    async def settle(self) -> None:
        """Make a commit durable that waits for the next offsets, as a backend does that is closed."""
        await self._directory.settle()

    async def close(self) -> None:
        """Flush, and end."""
        await self._directory.close()
        # A commit of that number may be another driver's, which has gone on while this one stood still.
        if self._told is not None and self._world.check.has_landed(*self._told[:2]):
            self._durable(self._told[1] + 1)

    def _found(self, run: str, batch: int, end: int) -> None:
        """Take over where a batch ends: it can be written anew only as long as nobody has been told."""
        ends = self._world.logs.ends
        if batch == len(ends):
            ends.append(end)
        elif ends[batch] != end:
            self._world.check.fail("I10", f"{run} finds batch {batch} to end at {end}, and it ended at {ends[batch]}")

    async def _write(self, path: str, run: str, content: bytes) -> None:
        try:
            await self._directory.check_free(path, run)
            await self._put(path, run, content)
        except ObjectExists as error:
            raise ConcurrentUpdate(f"{path} is there already") from error

    async def _put(self, path: str, run: str, content: Payload) -> None:
        await self._directory.put(path, run, -1, [content])

    async def _numbers(self, kind: str, run: str) -> list[int]:
        return [int(name) for name, _, _ in await self._directory.listing(kind, run)]
