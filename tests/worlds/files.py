"""Coordinators and hosts' services of files in one event loop, and JVMs that speak the real protocol."""

import asyncio
import base64
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import msgpack

from dstl.checkpoint.manifest.format import decode_record
from dstl.checkpoint.manifest.log import ManifestLog
from dstl.errors import OutcomeUnknown
from dstl.options import S3Options, SealingOptions
from dstl.process.launch_spec import LaunchSpec
from dstl.process.lifecycle import ProcessLife
from dstl.rpc.async_connection import AsyncConnection
from dstl.rpc.client import Address
from dstl.rpc.file_messages import (
    DeleteFile,
    EndRun,
    ListFiles,
    PlacedFiles,
    PlaceFiles,
    PutFile,
    ReadFile,
    StagePart,
    StatFile,
)
from dstl.rpc.protocol import Secret
from dstl.runtime import SystemClock, system_runtime
from dstl.store import open_store
from dstl.store.base import ObjectInfo, ObjectStore
from dstl.store.instrumented import InstrumentedStore
from dstl.store.memory import MemoryStore
from handles.file_record import FILES_OWNER
from tests.simulation.faulty_store import Fault, FaultRule, FaultyStore
from worlds.wrapped_store import WrappedStore

Stores = dict[str, ObjectStore]
"""What is in the stores outlives the applications of a test: each by its location."""

ROOT = "dstl:///jobs/query"
DRIVER_HOST = "127.0.0.1"
BIG = 300 << 10
"""More bytes than are written inside a record, whatever compression does: use :func:`noise`."""


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def changelog(partition: int, version: int) -> str:
    """Return the path of a partition's changes."""
    return f"state/0/{partition}/{version}.changelog"


class HastyClock(SystemClock):
    """A clock by which pauses between attempts are over at once."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 1000)


class LaterClock(SystemClock):
    """A clock that can be put forward."""

    ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


class FencesBehind(FaultyStore):
    """Another driver takes over behind a commit of batch 1 whose answer is lost."""

    owner = FILES_OWNER

    async def put(self, name: str, data: bytes | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        info = await super().put(name, data, if_absent=if_absent)
        files = decode_record(bytes(data), name).files if name.startswith("manifests/") else None
        if files is not None and files.barrier == "commits/1":
            await ManifestLog(self, system_runtime()).fence(self.owner)
            raise OutcomeUnknown("the answer is lost")
        return info


def denying(**which: Any) -> Callable[[ObjectStore], ObjectStore]:
    """Return what wraps stores that refuse some PUTs for good: those of a rule, whichever of them is asked."""
    matched: Counter[FaultRule] = Counter()

    def wrap(store: ObjectStore) -> ObjectStore:
        made = FaultyStore(store, [FaultRule(Fault.DENIED, "put", **which)])
        made._matched = matched
        return made

    return wrap


class Jvm:
    """One JVM on a host: its run is that of its driver's query."""

    def __init__(self, connection: AsyncConnection, run: str, root: str = ROOT) -> None:
        self._connection = connection
        self.run = run
        self.root = root

    async def put(
        self,
        path: str,
        content: bytes = b"x",
        *,
        attempt: int = -1,
        overwrite: bool = True,
        run: str | None = None,
        token: str = "",
        staged: int = 0,
    ) -> None:
        run = self.run if run is None else run
        await self._connection.call(
            PutFile(f"{self.root}/{path}", run, attempt, overwrite, token, staged + len(content), content)
        )

    async def stage(self, token: str, content: bytes) -> None:
        await self._connection.call(StagePart(token, content))

    async def offsets(self, batch: int, content: bytes = b"v1\n{}") -> None:
        await self.put(f"offsets/{batch}", content, overwrite=False)

    async def commit(self, batch: int, *ids: str) -> None:
        body = {"nextBatchWatermarkMs": 0, **({"stateUniqueIds": {"0": [[each] for each in ids]}} if ids else {})}
        await self.put(f"commits/{batch}", b"v2\n" + json.dumps(body).encode(), overwrite=False)

    async def batch(self, batch: int, files: dict[str, bytes]) -> None:
        await self.offsets(batch)
        for path, content in files.items():
            await self.put(path, content)
        await self.commit(batch)

    async def delete(self, path: str, run: str | None = None) -> None:
        await self._connection.call(DeleteFile(f"{self.root}/{path}", self.run if run is None else run))

    async def read(self, path: str) -> bytes:
        found = await self._connection.call(ReadFile(f"{self.root}/{path}", self.run, 0, 1 << 30))
        return bytes(found.data)

    async def names(self, path: str) -> list[str]:
        found = await self._connection.call(ListFiles(f"{self.root}/{path}", self.run))
        return [name for name, _, _ in found.entries]

    async def is_there(self, path: str) -> bool:
        found = await self._connection.call(StatFile(f"{self.root}/{path}", self.run))
        return found.is_directory or found.size >= 0

    async def size(self, path: str) -> int | None:
        found = await self._connection.call(StatFile(f"{self.root}/{path}", self.run))
        return found.size if found.size >= 0 else None

    async def end_run(self) -> None:
        """What the plugin tells the coordinator when the query has ended."""
        await self._connection.call(EndRun(self.run))

    def close(self) -> None:
        self._connection.close()


class Application:
    """A driver with its coordinator, and services of other hosts."""

    def __init__(
        self,
        stores: Stores,
        wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store,
        options: dict[str, str] | None = None,
    ) -> None:
        self.stores = stores
        self.options = options or {}
        self.runtime = system_runtime()
        self.secret = Secret.generate()
        self.opened: list[InstrumentedStore] = []
        self.jvms: list[Jvm] = []
        self._wrap = wrap
        self._hosts: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self.socket = ""

    def _open_store(self, location: str, options: S3Options, sealing: SealingOptions) -> ObjectStore:
        if sealing.key_file is not None:  # its location is a directory
            return open_store(location, options, sealing)
        found = self.stores.setdefault(location, MemoryStore())
        counted = InstrumentedStore(self._wrap(kept(found)))
        self.opened.append(counted)
        return counted

    @property
    def puts(self) -> int:
        return sum(store.calls["put"] for store in self.opened)

    @property
    def gets(self) -> int:
        return sum(store.calls["get"] for store in self.opened)

    @property
    def requests(self) -> int:
        return sum(store.calls.total() for store in self.opened)

    async def __aenter__(self) -> "Application":
        spec = LaunchSpec("", None, self.secret, DRIVER_HOST, bind=DRIVER_HOST, options=self.options)
        self._coordinator, self._ended, self.socket = await self._started(spec)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for jvm in self.jvms:
            jvm.close()
        for host in list(self._hosts):
            await self.end_host(host)
        self._ended.set()
        await asyncio.wait([self._coordinator])

    async def driver(self, run: str, root: str = ROOT) -> Jvm:
        return await self._jvm(self.socket, run, root)

    async def executor(self, host: str, run: str, root: str = ROOT) -> Jvm:
        """A JVM on another host, whose service it starts if nobody has: as the plugin does."""
        placed = await self.place(host)
        if placed.socket:
            return await self._jvm(placed.socket, run, root)
        assert placed.member
        where = Address(placed.coordinator_host, placed.coordinator_port)
        spec = LaunchSpec(placed.member, where, self.secret, host, bind=host)
        task, ended, socket = await self._started(spec)
        self._hosts[host] = task, ended
        return await self._jvm(socket, run, root)

    async def begun(self, host: str) -> tuple[Jvm, Jvm]:
        """The driver's JVM and one on another host, in the first batch of a run."""
        driver, far = await self.driver("run"), await self.executor(host, "run")
        await driver.offsets(0)
        return driver, far

    async def place(self, host: str, lost: str = "") -> PlacedFiles:
        """Ask where a host's service is, or under which name to start it."""
        ask = await AsyncConnection.open(Address(DRIVER_HOST, path=self.socket), self.secret)
        placed = await ask.call(PlaceFiles(host, lost))
        ask.close()
        return placed

    async def end_host(self, host: str) -> None:
        """End a host's service as if it was killed."""
        task, _ = self._hosts.pop(host)
        task.cancel()
        await asyncio.wait([task])

    async def dismiss_host(self, host: str) -> None:
        """End a host's service as SIGTERM does."""
        task, ended = self._hosts.pop(host)
        ended.set()
        await asyncio.wait([task])

    async def _started(self, spec: LaunchSpec) -> tuple[asyncio.Task[None], asyncio.Event, str]:
        """Begin the life of a process in this loop; returns it, what ends it, and where it serves."""
        ended, said = asyncio.Event(), asyncio.get_running_loop().create_future()
        life = ProcessLife(spec, None, self._open_store, self.runtime, said.set_result)
        task = asyncio.ensure_future(life.run(ended))
        await asyncio.wait([said, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        return task, ended, msgpack.unpackb(base64.b64decode(await said))["socket"]

    async def _jvm(self, socket: str, run: str, root: str) -> Jvm:
        jvm = Jvm(await AsyncConnection.open(Address(DRIVER_HOST, path=socket), self.secret), run, root)
        self.jvms.append(jvm)
        return jvm


class _Kept(WrappedStore):
    """A store that outlives those who close it."""

    async def close(self) -> None:
        pass


def kept(store: ObjectStore) -> ObjectStore:
    """Return a store that outlives those who close it."""
    return cast("ObjectStore", _Kept(store))


@contextlib.asynccontextmanager
async def application(
    stores: Stores,
    wrap: Callable[[ObjectStore], ObjectStore] = lambda store: store,
    *,
    is_hasty: bool = False,
    **options: str,
) -> AsyncIterator[Application]:
    told = {f"spark.dstl.{name}": value for name, value in options.items()}
    started = Application(stores, wrap, told)
    if is_hasty:
        started.runtime = replace(system_runtime(), clock=HastyClock())
    async with started:
        yield started


@contextlib.asynccontextmanager
async def driven(
    stores: Stores, run: str = "next", *wrap: Callable[[ObjectStore], ObjectStore], **options: Any
) -> AsyncIterator[Jvm]:
    """The driver's JVM of an application that has no other."""
    async with application(stores, *wrap, **options) as app:
        yield await app.driver(run)
