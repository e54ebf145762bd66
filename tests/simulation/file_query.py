"""A query of Spark's own on ``dstl://`` in a simulated world: its batches, its deaths, and what must hold of them.

Checked at every start of a run, and at the end:
    1. The commit before the latest offsets is there. What a source was told of is committed.
    2. Each committed version is that of the task attempts that the committing run has ended with.
    3. A snapshot's files are there. Every file can be read.
And at every batch: a sink that has the batch already has it of the same offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field

from dstl.errors import DstlError, ObjectExists, ObjectNotFound, TaskManagerLost
from dstl.files.inspection import export_files, opened_files, roll_back, verify_files
from dstl.files.namespace import StateFile, location_of
from dstl.files.options import FileOptions
from dstl.files.rules import batch_of
from dstl.store.base import ObjectStore
from dstl.store.memory import MemoryStore
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.file_services import ROOT, FileServices, FileWorld
from tests.simulation.network import NetworkLoop
from tests.simulation.runner import dispose, quiet

PARTITIONS = 3
KEPT = 6
CALM_BATCHES = 3
LIMIT_S = 3000.0
_SNAPSHOT_EVERY = 3
_PUT_S = 5.0
"""A task gives up sooner than in the JVM, so that hosts that hang are met by commits, and not by tasks alone."""


@dataclass
class FileResult:
    """The figures of one seed.

    Attributes:
        seed: The seed.
        violations: Invariants that did not hold.
        batches: Batches that were committed.
        runs: Runs of the query.
        faults: How often each fault has happened.
        handed_over: Hosts that have handed over what they had before they ended.
    """

    seed: int
    violations: list[str]
    batches: int = 0
    runs: int = 0
    faults: Counter[FaultKind] = field(default_factory=Counter)
    handed_over: int = 0


@dataclass
class _Outside:
    """Everything that outlives the query's processes: sink, source, and what each run's tasks have ended with."""

    sink: dict[int, bytes] = field(default_factory=dict)
    told: int = -1
    ended: dict[tuple[int, str], dict[str, bytes]] = field(default_factory=dict)
    attempt: int = 0
    committed: int = 0
    runs: int = 0


class _Run:
    """One run of the query in one driver."""

    def __init__(self, world: FileWorld, services: FileServices, outside: _Outside, name: str) -> None:
        self._world = world
        self._services = services
        self._outside = outside
        self._run = self.name = name
        self._rng = world.rng(name)
        self._directory = services.directory
        self._jvm = services.jvm

    async def go(self, batches: int) -> None:
        """Look where the query is, and run so many batches; what fails ends it."""
        told = self._outside.told
        # The first look is Spark's, and takes nothing over: a driver that was fenced must learn of it here.
        await self._numbers("offsets")
        # Another driver may go on until it is fenced.
        await self._directory.claim()
        offsets, commits = await self._numbers("offsets"), await self._numbers("commits")
        await self._check(offsets, commits, told)
        batch = max(offsets, default=-1)
        if batch in commits or batch < 0:
            batch += 1
        for number in range(batch, batch + batches):
            await self._batch(number, is_new=number not in offsets)
            await asyncio.sleep(self._rng.choice((0.0, 0.02, 0.2)))

    async def _batch(self, batch: int, *, is_new: bool) -> None:
        outside, run = self._outside, self._run
        if is_new:
            await self._jvm.put(f"offsets/{batch}", run, -1, b"%d" % self._rng.getrandbits(60), overwrite=False)
            if self._world.options.sources == "forget":
                outside.told = max(outside.told, batch - 1)
        rows = await self._jvm.read(f"offsets/{batch}", run)
        tasks = [self._partition(batch, partition, rows) for partition in range(PARTITIONS)]
        ended = dict(await asyncio.gather(*tasks))
        if outside.sink.setdefault(batch, rows) != rows:
            self._violate(f"batch {batch} ran again with other rows than its sink has")
        if await self._jvm.is_there(f"commits/{batch}", run):
            raise ObjectExists(f"batch {batch} is committed already")
        outside.ended[batch, run] = ended
        await self._jvm.put(f"commits/{batch}", run, -1, run.encode(), overwrite=False)
        outside.committed += 1
        if batch > KEPT:
            gone = batch - KEPT
            changes = (f"state/0/{partition}/{gone + 1}.changelog" for partition in range(PARTITIONS))
            for path in (f"offsets/{gone}", f"commits/{gone}", *changes):
                await self._jvm.delete(path, run)

    async def _partition(self, batch: int, partition: int, rows: bytes) -> tuple[str, bytes]:
        """Run a task until an attempt ends well; others may end before it, or long after it."""
        path = f"state/0/{partition}/{batch + 1}.changelog"
        await asyncio.sleep(self._rng.uniform(0, 0.1))
        for left in range(3, -1, -1):
            files = self._place()
            attempt, content = self._next(rows)
            try:
                await self._put(files, path, attempt, content)
            except DstlError:
                if not left:
                    raise
                continue
            if self._rng.random() < 0.15:
                # A retry of a task that had ended: its output is what Spark keeps.
                attempt, content = self._next(rows)
                await self._put(self._place(), path, attempt, content)
            if self._rng.random() < 0.2:
                self._services.process.spawn(self._zombie(path, rows), "zombie")
            if batch % _SNAPSHOT_EVERY == 0:
                self._services.process.spawn(self._maintain(files, partition, batch), "maintenance")
            return path, content
        raise AssertionError

    async def _zombie(self, path: str, rows: bytes) -> None:
        """Put the file of an attempt once more, when its batch is over."""
        batch = batch_of(path)
        for _ in range(100):
            await asyncio.sleep(self._rng.choice((0.02, 0.1)))
            if f"commits/{batch}" in self._directory.run.index:
                break
        else:
            return
        attempt, content = self._next(rows + b"zombie")
        with contextlib.suppress(DstlError):
            await self._put(self._place(), path, attempt, content)

    async def _maintain(self, files: FileServices | str, partition: int, batch: int) -> None:
        """Put a snapshot, and delete what an older one has made dispensable."""
        front = f"state/0/{partition}"
        sst = f"{front}/SSTs/{batch:06d}-{self._rng.getrandbits(32):08x}.sst"
        with contextlib.suppress(DstlError):
            await self._put(files, sst, -1, self._rng.randbytes(self._rng.choice((100, 3000, 20000))))
            await self._put(files, f"{front}/{batch + 1}.zip", -1, sst.encode())

    def _next(self, rows: bytes) -> tuple[int, bytes]:
        self._outside.attempt += 1
        padding = b"." * self._rng.choice((0, 0, 2000, 9000))
        return self._outside.attempt, b"%s by %d%s" % (rows, self._outside.attempt, padding)

    def _place(self) -> FileServices | str:
        """Return where a task runs: on the driver's host, or on another one."""
        names = sorted(self._services.hosts)
        if not names or self._rng.random() < 0.3:
            return self._services
        return self._rng.choice(names)

    async def _put(self, place: FileServices | str, path: str, attempt: int, content: bytes) -> None:
        if not isinstance(place, str):
            await self._jvm.put(path, self._run, attempt, content)
            return
        host = self._services.hosts.get(place) or self._services.host()
        try:
            async with asyncio.timeout(_PUT_S):
                await host.jvm.put(path, self._run, attempt, content)
        except TimeoutError:
            raise TaskManagerLost(f"{place} hangs") from None

    async def _numbers(self, kind: str) -> list[int]:
        return [int(name) for name, _ in await self._jvm.listing(kind, self._run)]

    async def _check(self, offsets: list[int], commits: list[int], told: int) -> None:
        last = max(offsets, default=-1)
        newest = max(commits, default=-1)
        if newest < last - 1 or newest > last:
            self._violate(f"offsets up to {last} and commits up to {newest}")
        if newest < told:
            self._violate(f"a source was told of batch {told}, and {newest} is the last commit")
        for batch in commits:
            owner = (await self._jvm.read(f"commits/{batch}", self._run)).decode()
            for path, content in self._outside.ended[batch, owner].items():
                try:
                    found = await self._jvm.read(path, self._run)
                except ObjectNotFound:
                    found = b""
                if found != content:
                    self._violate(f"{path} is not what run {owner} has committed: {found!r:.80}")
        for partition in range(PARTITIONS):
            front = f"state/0/{partition}"
            for name, size in await self._jvm.listing(front, self._run):
                if size < 0:
                    continue
                content = await self._jvm.read(f"{front}/{name}", self._run)
                if name.endswith(".zip") and not await self._jvm.is_there(content.decode(), self._run):
                    self._violate(f"{front}/{name} is there without {content.decode()}")

    def _violate(self, what: str) -> None:
        self._world.violations.append(f"seed {self._world.seed}, run {self._run}: {what}")


async def _drive(world: FileWorld, services: FileServices, outside: _Outside, batches: int) -> bool:
    """Run the query again and again until a run ends well; False where the driver could not go on."""
    for _ in range(40):
        await services.open()
        outside.runs += 1
        run = _Run(world, services, outside, f"run-{outside.runs}")
        try:
            await run.go(batches)
        except (DstlError, ObjectExists):
            await asyncio.sleep(0.2)
            # Spark tells of most queries that have ended.
            if outside.runs % 3:
                with contextlib.suppress(DstlError):
                    await services.jvm.end_run(run.name)
        else:
            return True
    return False


async def _strike(world: FileWorld, rng: random.Random, services: FileServices) -> None:
    """Let a host die now and then, or hang for longer than it may; or let a connection break."""
    while True:
        await asyncio.sleep(rng.expovariate(1 / world.plan.nemesis_mean_s))
        names = sorted(services.hosts)
        if not names or rng.random() < 0.5:
            continue
        process, what = services.hosts[rng.choice(names)].process, rng.random()
        if what < 0.6:
            world.fired[FaultKind.TASK_MANAGER_CRASH] += 1
            process.kill()
        elif what < 0.8:
            world.fired[FaultKind.TASK_MANAGER_PAUSE] += 1
            process.stop()
            if rng.random() < 0.3:
                world.fired[FaultKind.HANG] += 1
            else:
                world.loop.call_later(rng.uniform(1, 60), process.go_on, context=world.context)
        elif world.network.reset_one():
            world.fired[FaultKind.CONNECTION_RESET] += 1


async def _terminate(world: FileWorld, rng: random.Random, services: FileServices) -> None:
    """Let a host be asked to end now and then, in some worlds, as a cluster that shrinks does."""
    while world.leaves:
        await asyncio.sleep(rng.expovariate(1 / world.plan.nemesis_mean_s))
        names = sorted(services.hosts)
        if names:
            services.hosts[rng.choice(names)].terminate()


async def _live(world: FileWorld) -> FileResult:
    rng, outside = world.rng("life"), _Outside()
    beside: list[FileServices] = []
    for number in range(rng.randrange(2, 6)):
        services = FileServices(world, f"driver-{number}")
        for _ in range(rng.randrange(3)):
            services.host()
        driving = services.process.spawn(_drive(world, services, outside, 1000), "query")
        striking = [
            world.loop.create_task(strike(world, world.rng(f"{name}-{number}"), services))
            for name, strike in (("nemesis", _strike), ("leaving", _terminate))
        ]
        # Now and then for longer than a host may hang.
        await asyncio.wait([driving], timeout=rng.uniform(1, rng.choice((15, 15, 60))))
        for each in striking:
            each.cancel()
        if rng.random() < 0.8:
            world.fired[FaultKind.DRIVER_CRASH] += 1
            services.kill()
        else:
            # It goes on beside the next one, and must notice.
            world.fired[FaultKind.SECOND_DRIVER] += 1
            beside.append(services)
    world.plan.healed = True
    for services in beside:
        # Two that are started again and again would fence each other for ever.
        services.kill()
    last = FileServices(world, "driver-last")
    last.host()
    done = last.process.spawn(_drive(world, last, outside, CALM_BATCHES), "query")
    await asyncio.wait([done], timeout=LIMIT_S)
    if not done.done() or not done.result():
        world.violations.append(f"seed {world.seed}: the query does not go on when all faults are over")
    else:
        check = last.process.spawn(_drive(world, FileServices(world, "reader"), outside, 0), "check")
        await asyncio.wait([check], timeout=LIMIT_S)
        if not world.violations:
            looking = last.process.spawn(_look(world, last, outside), "command-line")
            await asyncio.wait([looking], timeout=LIMIT_S)
            looking.result()
    return FileResult(world.seed, world.violations, outside.committed, outside.runs, world.fired, world.handed_over)


async def _look(world: FileWorld, services: FileServices, outside: _Outside) -> None:
    """Verify, copy and roll back, as the command line does with a directory whose query has ended; then go on."""
    runtime = world.runtime(services.process)

    def open_store(location: str) -> ObjectStore:
        return world.store.client(services.process) if location == location_of(ROOT) else MemoryStore()

    async with opened_files(ROOT, runtime, open_store) as files:
        batches, problems = files.batches, await verify_files(files)
        copied = await export_files(files, MemoryStore())
    if problems or not copied or len(batches) < 2:
        world.violations.append(f"seed {world.seed}: of batches {batches} {copied} bytes were copied: {problems}")
        return
    back = batches[-2]
    await roll_back(ROOT, back, runtime, open_store)
    async with opened_files(ROOT, runtime, open_store) as files:
        state = [(path, found.version) for path in files.entries if (found := StateFile.of(path)) is not None]
        ahead = [path for path, version in state if version > back + 1]
        if files.batches != batches[:-1] or ahead or await verify_files(files):
            world.violations.append(f"seed {world.seed}: rolled back to {back}, it has {files.batches} and {ahead}")
    # What the user takes back the sink and the source take back.
    outside.told = min(outside.told, back)
    for batch in [each for each in outside.sink if each > back]:
        del outside.sink[batch]
    again = FileServices(world, "driver-rolled-back")
    if not await _drive(world, again, outside, 2):
        world.violations.append(f"seed {world.seed}: the query does not go on when it was rolled back")
    await _drive(world, FileServices(world, "last-reader"), outside, 0)


def run_file_seed(
    seed: int, options: FileOptions | None = None, plan: FaultPlan | None = None, *, collect: bool = True
) -> FileResult:
    """Run one seed to its end.

    Args:
        seed: Everything follows from it.
        options: When files become durable; by default drawn.
        plan: Faults other than the seed's own.
        collect: Collect the world's garbage at the end; the collector is off meanwhile.
    """
    rng = random.Random(f"files:{seed}")
    if options is None:
        options = FileOptions(
            commit=rng.choice(("now", "with-next")),
            sources=rng.choice(("forget", "keep")),
            durability=rng.choice(("commit", "task")),
        )
    with quiet(collect=collect):
        loop = NetworkLoop(start=1_000_000.0)
        asyncio.set_event_loop(loop)
        world = FileWorld(loop, seed, options, plan)
        loop.set_exception_handler(lambda *_: None)
        try:
            return loop.run_until_complete(_live(world))
        finally:
            loop.run_until_complete(dispose(world))
            asyncio.set_event_loop(None)
            loop.close()
