"""A query of a StateBackend: coordinator, TaskManagers, tasks, and the JVM that writes Spark's own files."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

from dstl.files.query_directory import QueryDirectory
from dstl.files.roots import CheckpointRoots
from dstl.files.service import FileService
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.protocol import Secret
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from worlds.files import Jvm
from worlds.service import ROOT, Driver, Events, Job, Model

QUERY = "query-1"


class Query:
    """One driver process: what Spark's thread does, and its tasks."""

    def __init__(self, driver: Driver, directory: QueryDirectory, jvm: Jvm) -> None:
        self.driver = driver
        self.directory = directory
        self.jvm = jvm

    async def start(self, run: str) -> int:
        """Begin a run as Spark does, and return the batch that it goes on with."""
        self.jvm.run = run
        if await self.jvm.size("metadata") is None:
            await self.jvm.put("metadata", json.dumps({"id": QUERY}).encode(), run="")
        commits = [int(name) for name in await self.jvm.names("commits")]
        return max(commits, default=-1) + 1

    async def plan(self, batch: int, time_ms: int = 1) -> None:
        """Write a batch's offsets, unless they are there from an earlier run."""
        if await self.jvm.size(f"offsets/{batch}") is None:
            header = {"batchWatermarkMs": 0, "batchTimestampMs": time_ms, "conf": {}}
            await self.jvm.offsets(batch, b"v1\n" + json.dumps(header).encode() + b'\n{"logOffset":%d}' % batch)

    async def run_batch(
        self, batch: int, events: Events | None = None, model: Model | None = None, time_ms: int = 1
    ) -> None:
        """Plan, run and commit a batch."""
        await self.plan(batch, time_ms)
        await self.driver.run_batch(self.jvm.run, batch, events, model)

    async def run_batches(self, batches: Iterable[int]) -> None:
        for batch in batches:
            await self.run_batch(batch)

    async def run_uncommitted(self, batch: int, events: Events | None = None, model: Model | None = None) -> Model:
        """Plan a batch and run its tasks; return the state that there will be once it is committed."""
        await self.plan(batch)
        return await self.driver.run_uncommitted(self.jvm.run, batch, events, model)


@contextlib.asynccontextmanager
async def open_query(
    job: Job, place: Path, store: ObjectStore | None = None, plain: Mapping[str, bytes] | None = None, **settings: Any
) -> AsyncIterator[Query]:
    """Start the next driver process of a job.

    Args:
        job: What outlives it.
        place: An empty directory for a socket.
        store: Another store than the job's.
        plain: Files of an earlier checkpoint directory, to be taken over.
        settings: Of :class:`Driver`.
    """
    earlier = MemoryStore()
    for name, content in (plain or {}).items():
        await earlier.put(name, content)
    async with job.driver(store, plain=earlier, **settings) as driver:
        directory = driver.directory
        secret = Secret.generate()

        async def of(root: str) -> QueryDirectory:
            return directory

        roots = CheckpointRoots()
        roots.add(ROOT)
        files = FileService(of, roots, secret, {})
        socket = str(place / f"s{job.drivers}")
        await files.server.listen_unix(socket)
        jvm = Jvm(await AsyncConnection.open(Address("127.0.0.1", path=socket), secret), "", ROOT)
        try:
            yield Query(driver, directory, jvm)
        finally:
            jvm.close()
            await files.server.close()
