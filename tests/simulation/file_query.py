"""A query of Spark's own on ``dstl://`` in a simulated world: its batches, its deaths, and what must hold of them.

Checked at every start of a run, and at the end:
    1. The commit before the latest offsets is there. What a source was told of is committed.
    2. Each committed version is that of the task attempts that the committing run has ended with; so a task that loads
       one reads it, on whatever host.
    3. A snapshot's files are there. Every file can be read.
    4. A query that has written offsets has its id, and always the same.
And at every batch: a sink that has the batch already has it of the same offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from dstl.errors import DstlError, ObjectExists, ObjectNotFound, TaskManagerLost
from dstl.files.namespace import METADATA
from dstl.files.rules import batch_of
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.file_copies import look
from tests.simulation.file_services import FileServices, FileWorld, JvmFiles, Outside
from tests.simulation.network import NetworkLoop
from tests.simulation.remembered import remembering
from tests.simulation.runner import dispose, quiet

PARTITIONS = 3
KEPT = 6
CALM_BATCHES = 3
LIMIT_S = 3000.0
_END_S = 60.0
_IN_A_ROW = 30
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


class _Run:
    """One run of the query in one driver."""

    def __init__(self, world: FileWorld, services: FileServices, outside: Outside, name: str) -> None:
        self._world = world
        self._services = services
        self._outside = outside
        self._run = self.name = name
        self._rng = world.rng(name)
        self._directory = services.directory
        self._jvm = services.jvm
        self._owners: dict[int, str] = {}

    async def go(self, batches: int) -> None:
        """Look where the query is, and run so many batches; what fails ends it."""
        told = self._outside.told
        await self._look_for_its_id()
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
            # Then as triggers have it: what many batches in a row can show, so many do.
            is_quick = number < batch + _IN_A_ROW
            await asyncio.sleep(self._rng.choice((0.0, 0.02, 0.2)) if is_quick else self._rng.uniform(0.5, 5.0))

    async def _look_for_its_id(self) -> None:
        """Read the query's id, or write one, as Spark does before it has a run.

        A driver that hangs finds its own: it is fenced when the run reads what it must not see.
        """
        if await self._jvm.is_there(METADATA, ""):
            self._id = await self._jvm.read(METADATA, "")
        else:
            self._id = b'{"id":"%x"}' % self._rng.getrandbits(60)
            await self._jvm.put(METADATA, "", -1, self._id, overwrite=False)

    def _check_its_id(self) -> None:
        """A sink knows a query's batches again by its id; so does whoever reads its commits."""
        known = self._outside.query_id
        if known and self._id != known:
            self._violate(f"the query's id is {self._id!r}, and was {known!r}")

    async def _batch(self, batch: int, *, is_new: bool) -> None:
        outside, run = self._outside, self._run
        if is_new:
            await self._jvm.put(f"offsets/{batch}", run, -1, b"%d" % self._rng.getrandbits(60), overwrite=False)
            if self._world.config.files.sources == "forget":
                outside.told = max(outside.told, batch - 1)
        rows = await self._jvm.read(f"offsets/{batch}", run)
        tasks = [self._partition(batch, partition, rows) for partition in range(PARTITIONS)]
        ended = dict(await asyncio.gather(*tasks))
        self._check_its_id()
        outside.query_id = self._id
        if outside.sink.setdefault(batch, rows) != rows:
            self._violate(f"batch {batch} ran again with other rows than its sink has")
        if await self._jvm.is_there(f"commits/{batch}", run):
            raise ObjectExists(f"batch {batch} is committed already")
        outside.ended[batch, run] = ended
        await self._jvm.put(f"commits/{batch}", run, -1, run.encode(), overwrite=False)
        outside.committed += 1
        self._owners[batch] = run
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
            jvm = self._place()
            attempt, content = self._next(rows)
            try:
                await self._load(jvm, batch, partition)
                await self._put(jvm, path, attempt, content)
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
                self._services.process.spawn(self._maintain(jvm, partition, batch), "maintenance")
            return path, content
        raise AssertionError

    async def _load(self, jvm: JvmFiles, batch: int, partition: int) -> None:
        """Read the version before, as a task does that another one of its partition has not run before it there."""
        owner = self._owners.get(batch - 1)
        if owner is None or self._rng.random() < 0.5:
            return
        path = f"state/0/{partition}/{batch}.changelog"
        async with self._in_time(jvm):
            found = await jvm.open(path, self._run)
        if found != self._outside.ended[batch - 1, owner][path]:
            self._violate(
                f"a task of batch {batch} has loaded another {path} than {owner} has committed: {found!r:.80}"
            )

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

    async def _maintain(self, jvm: JvmFiles, partition: int, batch: int) -> None:
        """Put a snapshot, and delete the one before the last: nothing needs it any more."""
        front = f"state/0/{partition}"
        sst = f"{front}/SSTs/{batch:06d}-{self._rng.getrandbits(32):08x}.sst"
        with contextlib.suppress(DstlError):
            await self._put(jvm, sst, -1, self._rng.randbytes(self._rng.choice((100, 3000, 20000))))
            await self._put(jvm, f"{front}/{batch + 1}.zip", -1, sst.encode())
            old = f"{batch + 1 - 2 * _SNAPSHOT_EVERY}.zip"
            async with self._in_time(jvm):
                if old in [name for name, _ in await jvm.listing(front, self._run)]:
                    held = (await jvm.read(f"{front}/{old}", self._run)).decode()
                    for gone in (f"{front}/{old}", held):
                        await jvm.delete(gone, self._run)

    def _next(self, rows: bytes) -> tuple[int, bytes]:
        self._outside.attempt += 1
        padding = b"." * self._rng.choice((0, 0, 2000, 9000))
        return self._outside.attempt, b"%s by %d%s" % (rows, self._outside.attempt, padding)

    def _place(self) -> JvmFiles:
        """Return where a task runs: on the driver's host, or on another one."""
        executors = list(self._services.executors.values())
        if not executors or self._rng.random() < 0.3:
            return self._jvm
        return self._rng.choice(executors)

    async def _put(self, jvm: JvmFiles, path: str, attempt: int, content: bytes) -> None:
        async with self._in_time(jvm):
            await jvm.put(path, self._run, attempt, content)

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
            owner = self._owners[batch] = (await self._jvm.read(f"commits/{batch}", self._run)).decode()
            for path, content in self._outside.ended[batch, owner].items():
                try:
                    found = await self._jvm.read(path, self._run)
                except ObjectNotFound:
                    found = b""
                if found != content:
                    self._violate(f"{path} is not what run {owner} has committed: {found!r:.80}")
        if commits:
            self._check_its_id()
        for partition in range(PARTITIONS):
            front = f"state/0/{partition}"
            for name, size in await self._jvm.listing(front, self._run):
                if size < 0:
                    continue
                content = await self._jvm.read(f"{front}/{name}", self._run)
                if name.endswith(".zip") and not await self._jvm.is_there(content.decode(), self._run):
                    self._violate(f"{front}/{name} is there without {content.decode()}")

    @contextlib.asynccontextmanager
    async def _in_time(self, jvm: JvmFiles) -> AsyncIterator[None]:
        """Give a call up where another host than the driver's hangs."""
        try:
            async with asyncio.timeout(None if jvm is self._jvm else _PUT_S):
                yield
        except TimeoutError:
            raise TaskManagerLost("a host hangs") from None

    def _violate(self, what: str) -> None:
        self._world.violations.append(f"seed {self._world.seed}, run {self._run}: {what}")


async def drive_query(world: FileWorld, services: FileServices, outside: Outside, batches: int) -> bool:
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
    rng, outside = world.rng("life"), Outside()
    beside: list[FileServices] = []
    for number in range(rng.randrange(2, 6)):
        services = FileServices(world, f"driver-{number}", hosts=rng.randrange(3))
        driving = services.process.spawn(drive_query(world, services, outside, 1000), "query")
        striking = [
            world.loop.create_task(strike(world, world.rng(f"{name}-{number}"), services))
            for name, strike in (("nemesis", _strike), ("leaving", _terminate))
        ]
        # Now and then for longer than a host may hang.
        await asyncio.wait([driving], timeout=rng.uniform(1, rng.choice((15, 15, 60))))
        for each in striking:
            each.cancel()
        ending = rng.random()
        if ending < 0.15:
            closing = services.process.spawn(services.close(), "close")
            await asyncio.wait([closing], timeout=_END_S)
            services.kill()
        elif ending < 0.8:
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
    last = FileServices(world, "driver-last", hosts=1)
    done = last.process.spawn(drive_query(world, last, outside, CALM_BATCHES), "query")
    await asyncio.wait([done], timeout=LIMIT_S)
    if not done.done() or not done.result():
        world.violations.append(f"seed {world.seed}: the query does not go on when all faults are over")
    else:
        check = last.process.spawn(drive_query(world, FileServices(world, "reader"), outside, 0), "check")
        await asyncio.wait([check], timeout=LIMIT_S)
        if not world.violations:
            looking = last.process.spawn(look(world, last, outside, drive_query), "command-line")
            await asyncio.wait([looking], timeout=LIMIT_S)
            looking.result()
    return FileResult(world.seed, world.violations, outside.committed, outside.runs, world.fired, world.handed_over)


def run_file_seed(
    seed: int, options: Mapping[str, str] | None = None, plan: FaultPlan | None = None, *, collect: bool = True
) -> FileResult:
    """Run one seed to its end.

    Args:
        seed: Everything follows from it.
        options: Spark's configuration of when files become durable; by default drawn.
        plan: Faults other than the seed's own.
        collect: Collect the world's garbage at the end; the collector is off meanwhile.
    """
    rng = random.Random(f"files:{seed}")
    if options is None:
        options = {
            "spark.dstl.commit": rng.choice(("now", "with-next")),
            "spark.dstl.sources": rng.choice(("forget", "keep")),
            "spark.dstl.durability": rng.choice(("commit", "task")),
        }
    with quiet(collect=collect):
        loop = NetworkLoop(start=1_000_000.0)
        asyncio.set_event_loop(loop)
        world = FileWorld(loop, seed, options, plan)
        loop.set_exception_handler(lambda *_: None)
        try:
            with remembering():
                return loop.run_until_complete(_live(world))
        finally:
            loop.run_until_complete(dispose(world))
            asyncio.set_event_loop(None)
            loop.close()
