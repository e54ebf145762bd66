"""A driver process in the simulated world: the real coordinator, and as much of Spark as runs a streaming query."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from pyspark.errors import StreamingQueryException

from dstl.checkpoint.report import CheckpointReport, RestoreReport
from dstl.checkpoint.service import CoordinatorService, CoordinatorSettings, DriverHooks
from dstl.errors import DstlError, Fenced
from dstl.options import CheckpointOptions
from dstl.rpc.protocol import Secret
from dstl.taskmanager.config import TaskManagerConfig
from tests.simulation.checkpoint_directory import CheckpointDirectory
from tests.simulation.clocked_model import sparks_watermark_ms
from tests.simulation.faces import SPARKS
from tests.simulation.faults import FaultKind
from tests.simulation.fleet import DRIVERS_HOST, SimulatedFleet
from tests.simulation.operator import simulated_operator
from tests.simulation.process import Process
from tests.simulation.program import run_program
from tests.simulation.spark import ConcurrentUpdate, TaskSpec
from tests.simulation.watching import Watch, check_progress, name_a_savepoint
from tests.simulation.worker import Worker
from tests.simulation.world import World

_MOST_FAILURES = 4  # spark.task.maxFailures
_HEARTBEAT_S = 60.0


class QueryFailed(StreamingQueryException):  # type: ignore[misc]
    """A task failed too often, or another driver has written to the query's log: Spark stops the query."""


@dataclass(frozen=True)
class DriverOptions:
    """The options of one driver; parallelism and TaskManagers may differ from its predecessor's."""

    operators: tuple[str, ...]
    parallelism: int
    task_managers: int | None
    secret: Secret
    checkpoints: CheckpointOptions
    task_manager: TaskManagerConfig
    together: bool
    commit_attempts: int
    version: int
    batches: int | None = None
    """How many there are for it; None: it goes on for ever."""
    slots: tuple[int, ...] = ()
    """Of each executor's host, whose tasks launch TaskManagers; none: the driver starts them."""
    goes_back: bool = False
    """``restore="previous"``."""


@dataclass(eq=False)
class _Running:
    """One attempt of a task that has not ended."""

    spec: TaskSpec
    slot: int
    worker: Worker
    ended: asyncio.Future[BaseException | None] = field(repr=False)
    is_reported: bool = False


class DriverActor:
    """One driver: it starts TaskManagers and workers, runs batches, restarts its query or gives up."""

    def __init__(self, world: World, process: Process, options: DriverOptions) -> None:
        self.process = process
        self.options = options
        self.workers: list[Worker] = []
        self.service: CoordinatorService | None = None
        self._world = world
        self._rng = world.rng(process.name)
        self.fleet = SimulatedFleet(world, process, self._rng, options.secret, options.slots)
        self._spark = world.rng(f"{process.name}:actions")  # apart, so that what was drawn before it came stays
        self._unread = world.rng(f"{process.name}:unread")
        self._exits = world.rng(f"{process.name}:exits")
        self._kept: dict[tuple[str, int], list[TaskSpec]] = {}
        self._stages = self._attempts = self._started_workers = 0
        self._running: dict[int, _Running] = {}
        self._at_work: tuple[str, int] | None = None
        self._directory: CheckpointDirectory | None = None
        self._retired: list[Worker] = []
        process.on_death.append(self._died)

    @property
    def epoch(self) -> int:
        """Number of the fence that its coordinator has won; 0 before."""
        return self.service._log.epoch if self.service is not None else 0

    async def run(self) -> None:
        """Run the query, and run it again when it fails in a way that may pass."""
        world, options = self._world, self.options
        runtime = world.runtime(self.process.name)
        store = world.store.client(self.process)
        self.service = CoordinatorService(
            store,
            runtime,
            options.secret,
            CoordinatorSettings(
                options=options.checkpoints,
                max_parallelism=options.task_manager.max_parallelism,
                task_managers=options.task_managers,
                host=DRIVERS_HOST,
                task_manager_config=options.task_manager.to_json() if options.slots else b"",
                task_managers_elsewhere=bool(options.slots),
                allow_non_restored_state=False,
                fall_back=options.goes_back,
                materialization=options.task_manager.materialization,
                commit_attempts=options.commit_attempts,
            ),
            DriverHooks(
                on_event=self._on_event,
                on_progress=partial(check_progress, world, self.process.name),
                on_task_manager_lost=self.fleet.replace,
                executor_hosts=self.fleet.hosts if options.slots else None,
                execution=self,
                spark_watermarks=self,
            ),
        )
        commits = self.service.commits
        directory = self._directory = CheckpointDirectory(
            world, store, commits, options.task_manager, runtime, self.process.name
        )
        await self.service.start()
        await name_a_savepoint(world, store, self.service, runtime)
        self.process.spawn(Watch(world, self.process, self.service).run(), "watch")
        for operator in options.operators:
            groups = options.task_manager.max_parallelism
            definition = simulated_operator(operator, options.parallelism, groups, version=options.version)
            await definition.announce_to(self.service)
        self.fleet.start(self.service, options.task_manager, options.task_managers or 0)
        try:
            await world.stacks.run(partial(run_program, self, world, runtime.clock))
            await directory.settle()
            await self.service.bases.finish()
        finally:
            await directory.close()
            await self.service.close()
            self.process.post(self.process.kill)

    async def check(self, query_id: str) -> None:
        """Refuse no query."""

    async def is_running(self, run_id: str) -> bool:
        """Return True: of a run that is over, this Spark brings nothing late."""
        return True

    async def fitted_offsets(self, run_id: str, content: bytes) -> bytes:
        """Return a record of offsets as it is: the sources are the same ones."""
        return content

    async def of_batch(self, query_id: str) -> Mapping[str, tuple[int, int]] | None:
        """Return Spark's watermarks of the batch at work, and of the one before it."""
        if self._at_work is None:
            return None
        run, batch = self._at_work
        mark, late = (sparks_watermark_ms(self._world.logs, number, run) for number in (batch, batch - 1))
        return {SPARKS: (mark, late)}

    async def batch_done(self, query_id: str, batch_id: int) -> None:
        """A batch's rows have all gone through: it has begun."""
        if self._at_work is None or batch_id > self._at_work[1]:
            self._world.check.fail("I9", f"{self.process.name} has heard of batch {batch_id} before it began")

    async def run_query(self, run: str, completed: Callable[[], None]) -> None:
        """Run batches from where Spark's log stands, and tell of each that was completed, until one fails.

        Raises:
            QueryFailed: One has failed.
        """
        world = self._world
        try:
            await self._run_batches(run, completed)
        except ConcurrentUpdate as error:
            world.trace("stopped", f"{self.process.name} {error}")
            raise QueryFailed(str(error)) from error
        except DstlError as error:
            self._failed(error)
            raise QueryFailed(str(error)) from error
        except QueryFailed as error:
            self._failed(error.__cause__)
            raise
        finally:
            self._at_work = None

    def _failed(self, cause: BaseException | None) -> None:
        if isinstance(cause, Fenced):
            self._world.check.fenced(self.process.name, cause)
        self._world.check.query_failed(self.process.name, cause)

    async def _run_batches(self, run: str, completed: Callable[[], None]) -> None:
        world, directory = self._world, self._directory
        assert directory is not None
        batch, end = await directory.plan(run)
        last = batch + self.options.batches if self.options.batches is not None else None
        while batch != last:
            if end is None:
                end = (world.logs.ends[-1] if world.logs.ends else 0) + self._rng.choice((0, 1, 2, 5, 9))
                await directory.write_offsets(run, batch, end)
            else:
                world.replays += 1
            self._at_work = run, batch
            world.trace("batch", f"{self.process.name} {run} {batch}")
            await self._batch(run, batch)
            if self._kept:
                world.check.sink_commits(self.process.name, batch)
            kept = partial(world.check.batch_committed, self.process.name, batch, self._kept)
            if await directory.lacks_tasks(run, batch):
                # Into nothing: what the sink has of the batch stays what it has kept.
                self._kept = {}
                if not await self._reads_in_part(run, batch):
                    await self._action(run, batch)
            await directory.commit(run, batch, kept)
            completed()
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
            batch, end = batch + 1, None

    async def _batch(self, run: str, batch: int) -> None:
        """Run the stages of a batch, and sometimes one of them twice, one after the other or both at once."""
        rng = self._rng
        self._kept = {}
        if self._happens(rng, FaultKind.ABANDONED_STAGE):
            abandoned = asyncio.ensure_future(self._stage(run, batch, self.options.operators[0]))
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            abandoned.cancel()
            await asyncio.gather(abandoned, return_exceptions=True)
        if await self._reads_in_part(run, batch):
            return
        actions = 1 + self._happens(rng, FaultKind.SECOND_ACTION)
        if self._happens(self._spark, FaultKind.SECOND_ACTION_BESIDE):
            await self._together([partial(self._action, run, batch) for _ in range(2)])
        else:
            for _ in range(actions):
                await self._action(run, batch)

    def _happens(self, rng: Random, kind: FaultKind) -> bool:
        """Draw whether one of Spark's faults happens here."""
        happens = self._world.plan.task_fault(rng, kind)
        if happens:
            self._world.count(kind)
        return happens

    async def _reads_in_part(self, run: str, batch: int) -> bool:
        """Run some tasks or none, and return True, where the sink has the batch, or a function reads a part of it."""
        if not self._happens(self._unread, FaultKind.UNREAD_OUTPUT):
            return False
        slots = range(self.options.parallelism)
        for operator in self.options.operators:
            if read := self._unread.sample(slots, self._unread.randrange(len(slots))):
                await self._piece(run, batch, operator, read)
        return True

    async def _action(self, run: str, batch: int) -> None:
        """Run the stages of one action."""
        stages = [partial(self._stage, run, batch, operator) for operator in self.options.operators]
        if self.options.together:
            await self._together(stages)
        else:
            for stage in stages:
                await stage()

    async def _together(self, works: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run all at once; the first that fails ends the others."""
        together = [asyncio.ensure_future(work()) for work in works]
        try:
            await asyncio.gather(*together)
        finally:
            for each in together:
                each.cancel()
            await asyncio.gather(*together, return_exceptions=True)

    async def _stage(self, run: str, batch: int, operator: str) -> None:
        """Run all tasks of one operator, sometimes in pieces: ``take(1)`` and then all, or ``toLocalIterator()``.

        Raises:
            QueryFailed: One of them failed too often.
        """
        slots = range(self.options.parallelism)
        if not self._world.plan.task_fault(self._spark, FaultKind.CONSUMED_IN_PIECES):
            await self._piece(run, batch, operator, slots)
            return
        self._world.count(FaultKind.CONSUMED_IN_PIECES)
        if self._spark.random() < 0.5:
            pieces = [self._spark.sample(slots, self._spark.randrange(1, len(slots) + 1)), list(slots)]
        else:
            size = self._spark.randrange(1, len(slots) + 1)
            pieces = [list(slots[at : at + size]) for at in range(0, len(slots), size)]
        for piece in pieces:
            await self._piece(run, batch, operator, piece)

    async def _piece(self, run: str, batch: int, operator: str, slots: Sequence[int]) -> None:
        """Run one stage; sometimes some of its tasks again, as when an executor's output is lost.

        Raises:
            QueryFailed: One of them failed too often.
        """
        stage = self._stages = self._stages + 1
        try:
            kept = await self._tasks(run, batch, operator, stage, slots)
            if self._happens(self._spark, FaultKind.STAGE_RERUN):
                lost = self._spark.sample(slots, self._spark.randrange(1, len(slots) + 1))
                kept |= await self._tasks(run, batch, operator, stage, lost)
            for slot, spec in kept.items():
                self._kept.setdefault((operator, slot), []).append(spec)
        finally:
            for running in list(self._running.values()):
                if running.spec.stage == stage:
                    self._forget(running)

    async def _tasks(
        self, run: str, batch: int, operator: str, stage: int, slots: Iterable[int]
    ) -> dict[int, TaskSpec]:
        """Run tasks of a stage and return the attempt of each whose output is kept."""
        tasks = {slot: asyncio.ensure_future(self._task(run, batch, operator, stage, slot)) for slot in slots}
        try:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _task(self, run: str, batch: int, operator: str, stage: int, slot: int) -> TaskSpec:
        """Run attempts of one task until one has ended well, and return it: its output is the task's."""
        world, rng = self._world, self._rng
        failures = 0
        while True:
            attempts = [self._launch(run, batch, operator, stage, slot)]
            error: BaseException | None = None
            if world.plan.task_fault(rng, FaultKind.SPECULATION):
                await asyncio.wait([attempts[0].ended], timeout=rng.uniform(0.0, 0.3))
                if not attempts[0].ended.done():
                    world.count(FaultKind.SPECULATION)
                    attempts.append(self._launch(run, batch, operator, stage, slot))
            while True:
                waiting = [each.ended for each in attempts if not each.ended.done()]
                ended = [each.ended.result() for each in attempts if each.ended.done()]
                error = next((each for each in ended if each is not None), None)
                if None in ended or not waiting:
                    error = None if None in ended else error
                    break
                done, _ = await asyncio.wait(waiting, timeout=_HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                for each in attempts if not done else ():
                    if not each.worker.process.is_running and not each.ended.done():
                        each.ended.set_result(ConnectionError("no heartbeat: the executor is lost (simulated)"))
            for each in attempts:
                self._forget(each)
            if error is None and self._happens(rng, FaultKind.LOST_RESULT):
                error = ConnectionError("the task's result was lost (simulated)")
            if error is None:
                return next(each.spec for each in attempts if each.ended.done() and each.ended.result() is None)
            failures += 1
            if failures >= _MOST_FAILURES:
                raise QueryFailed(f"task {slot} of {operator} failed {failures} times") from error
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    def _launch(self, run: str, batch: int, operator: str, stage: int, slot: int) -> _Running:
        self._attempts += 1
        options, attempt = self.options, self._attempts
        spec = TaskSpec(
            query="query",
            run=run,
            operator=operator,
            batch=batch,
            slot=slot,
            stage=stage,
            attempt=attempt,
            parallelism=options.parallelism,
            operations=self._world.logs.operations(batch, slot, options.parallelism, run),
            rules=self._world.logs.rules_of(batch, run),
        )
        worker = self._free_worker()
        running = _Running(spec, slot, worker, asyncio.get_running_loop().create_future())
        self._running[attempt] = running
        worker.process.post(
            lambda: worker.process.spawn(worker.execute(spec, partial(self._report, running)), f"task-{attempt}"),
            delay=self._rng.uniform(0.0002, 0.005),
        )
        return running

    def _report(self, running: _Running, error: BaseException | None) -> None:
        """Called in the worker: tell the driver; later where the worker exits, for its JVM has files to close."""
        exits = error is None and self._world.plan.task_fault(self._exits, FaultKind.WORKER_EXIT)
        delay = self._exits.uniform(0.001, 0.5) if exits else self._rng.uniform(0.0002, 0.003)
        self.process.post(_settle, running.ended, error, delay=delay)
        running.is_reported = True
        if exits:
            self._world.count(FaultKind.WORKER_EXIT)
            running.worker.process.kill()

    def _forget(self, running: _Running) -> None:
        """Spark has no more use for an attempt: its worker is killed a while later, and works on until then.

        One that stands still, as its host does, goes on when it wakes, with no other task beside its own.
        """
        if self._running.pop(running.spec.attempt, None) is not None and not running.is_reported:
            process = running.worker.process
            self._retired.append(running.worker)
            if process.is_running:
                self._world.loop.call_later(self._rng.uniform(0.0, 0.5), process.kill, context=self._world.context)

    def _free_worker(self) -> Worker:
        """Return a worker without a task, a new one where none is free."""
        busy = {id(each.worker) for each in self._running.values() if not each.ended.done()}
        self.workers = [w for w in self.workers if not w.process.is_dead and w not in self._retired]
        for worker in self.workers:
            if worker.process.is_running and id(worker) not in busy:
                return worker
        self._started_workers += 1
        assert self.service is not None
        process = self._world.process(f"{self.process.name}.worker-{self._started_workers}")
        process.on_death.append(partial(self._worker_died, process))
        host = self.fleet.host()
        place = host, partial(self.fleet.launch, host)
        worker = Worker(self._world, process, self.service.address, self.options.secret, place)
        self.workers.append(worker)
        return worker

    def _worker_died(self, process: Process) -> None:
        for running in self._running.values():
            if running.worker.process is process and not running.is_reported:
                error = ConnectionError("the worker died (simulated)")
                self.process.post(_settle, running.ended, error, delay=self._rng.uniform(0.001, 0.5))

    def _on_event(self, report: CheckpointReport | RestoreReport) -> None:
        world = self._world
        if isinstance(report, RestoreReport):
            world.restores += 1
            world.trace("restored", f"{self.process.name} {report.checkpoint_id}")
            if report.lost_batches:
                world.check.damage.gone_back(self.process.name, report, may=self.options.goes_back)
        else:
            world.check.checkpoint_reported(self.process.name, self.epoch, report)

    def _died(self) -> None:
        """Do what the operating system does after a driver: children see their input closed, executors end."""
        world, rng = self._world, self._rng
        self.fleet.driver_died()
        for worker in (*self.workers, *self._retired):
            world.loop.call_later(rng.uniform(0.0, 2.0), worker.process.kill, context=world.context)


def _settle(future: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not future.done():
        future.set_result(error)
