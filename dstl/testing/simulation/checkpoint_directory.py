"""A query's checkpoint directory in a simulated world: on a disk that never fails, or in the log of its checkpoints."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Protocol

from dstl.checkpoint.committed_runs import CommittedRuns
from dstl.errors import ObjectExists
from dstl.files.file_log import FileLog
from dstl.files.query_directory import QueryDirectory
from dstl.files.query_records import METADATA
from dstl.rpc.codec import Payload
from dstl.runtime import Runtime
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from dstl.taskmanager.config import TaskManagerConfig
from dstl.taskmanager.task_manager import Changelog, Components
from dstl.testing.simulation.spark import ConcurrentUpdate, QueryLogs
from dstl.testing.simulation.world import World

__all__ = ["CheckpointDirectory", "LoggedDirectory", "PlainDirectory"]

_ROOT = "dstl:///jobs/query"
_KEPT = 6


class CheckpointDirectory(Protocol):
    """Offsets and commits of a query, as Spark's driver writes them."""

    async def plan(self, run: str) -> tuple[int, int | None]:
        """Begin a run; return the batch that it begins with, and where it ends if that is written already."""
        ...

    async def write_offsets(self, run: str, batch: int, end: int) -> None:
        """Write where a batch ends.

        Raises:
            ConcurrentUpdate: Another driver has.
            DstlError: It may or may not have been written.
        """
        ...

    async def commit(self, run: str, batch: int) -> None:
        """Write that a batch is done; errors as of :meth:`write_offsets`."""
        ...

    async def close(self) -> None:
        """End."""
        ...


class PlainDirectory:
    """Files on a disk that never fails.

    Args:
        logs: What is on it.
        rng: How long it takes.
    """

    def __init__(self, logs: QueryLogs, rng: random.Random) -> None:
        self._logs = logs
        self._rng = rng

    async def plan(self, run: str) -> tuple[int, int | None]:
        """Begin a run, and return the batch that it begins with."""
        await self._disk()
        return self._logs.plan()

    async def write_offsets(self, run: str, batch: int, end: int) -> None:
        """Write where a batch ends."""
        await self._disk()
        self._logs.write_offsets(batch, end)

    async def commit(self, run: str, batch: int) -> None:
        """Write that a batch is done."""
        await self._disk()
        self._logs.commit(batch)

    async def close(self) -> None:
        """There is nothing to end."""

    async def _disk(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.001, 0.02))


class LoggedDirectory:
    """Files in the manifest log of the query's checkpoints: the product's own, whose commits are the checkpoints.

    What it says is the truth that the world's logs follow: a write whose outcome nobody knows is looked up by the next
    run, as Spark does.

    Args:
        world: The world.
        store: The query's location.
        commits: Joins the directory to the checkpoints.
        config: How much a record holds.
        runtime: The driver's.
    """

    def __init__(
        self, world: World, store: ObjectStore, commits: CommittedRuns, config: TaskManagerConfig, runtime: Runtime
    ) -> None:
        self._world = world
        self._clock = runtime.clock
        changelog = Changelog(config, Components(store=store, runtime=runtime), "files")
        log = FileLog(changelog, runtime, config.batching.inline_threshold)
        self._directory = QueryDirectory(_ROOT, store, MemoryStore(), log, commits, runtime)

    async def plan(self, run: str) -> tuple[int, int | None]:
        """Begin a run, and return the batch that it begins with."""
        logs = self._world.logs
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
        logs.committed = max(logs.committed, newest + 1)
        return (newest + 1, logs.ends[last]) if last > newest else (newest + 1, None)

    async def write_offsets(self, run: str, batch: int, end: int) -> None:
        """Write where a batch ends."""
        header = {"batchWatermarkMs": 0, "batchTimestampMs": int(self._clock.wall() * 1000), "conf": {}}
        content = b"v1\n" + json.dumps(header).encode() + b"\n" + json.dumps({"logOffset": end}).encode()
        await self._write(f"offsets/{batch}", run, content)
        self._found(run, batch, end)

    async def commit(self, run: str, batch: int) -> None:
        """Write that a batch is done."""
        await self._write(f"commits/{batch}", run, b"v1\n{}")
        logs = self._world.logs
        logs.committed = max(logs.committed, batch + 1)
        if batch >= _KEPT:
            for kind in ("offsets", "commits"):
                await self._directory.delete(f"{kind}/{batch - _KEPT}", run)

    async def close(self) -> None:
        """Flush, and end."""
        await self._directory.close()

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
