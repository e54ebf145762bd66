"""The PeriodicMaterializationManager: starts materializations, ends them, and watches over the age of the log.

One TaskManager has one, on its loop. A materialization is::

    waiting --(a trigger's reason)--> running: drop expired entries of some key groups, a piece at a time
                                             -> prepare (flush, in a thread)
                                             -> snapshot and the checkpoint it is of, at once (synchronous part)
                                             -> encode and upload (asynchronous part, batches go on)
            --> finished: its report rides with the next batch's checkpoint; that makes it a base
            --> backing off after a failure or a timeout, then running again

Where no batch comes, or the run ends, the coordinator makes the last batch's checkpoint again, which then names it
(``dstl/checkpoint/base_publication.py``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from dstl.crash_points import reach
from dstl.errors import Closed, DstlError
from dstl.metrics import NullRecorder, Recorder
from dstl.options import MaterializationOptions
from dstl.runtime import Runtime, call_in_thread
from handles.checkpoint import CheckpointId
from handles.key_group import KeyGroupRange
from materializer.bases.operator_bases import FinishedMaterialization, OperatorBases
from materializer.expiry import ExpirySweep
from materializer.materialization import BaseWriter, WrittenBases
from materializer.tables import Expired, RocksDBTableSnapshot, StateTable, TableSize
from materializer.trigger import Action, MaterializationTrigger, UnmaterializedLog

_log = logging.getLogger(__name__)


class MaterializationSource(Protocol):
    """The state that is materialized. What it returns belongs together while nothing is awaited."""

    @property
    def base(self) -> CheckpointId | None:
        """The checkpoint that the tables hold."""

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups that are owned."""

    @property
    def bases(self) -> Mapping[str, OperatorBases]:
        """Bases and log by operator."""

    def table(self, operator: str) -> StateTable:
        """Return an operator's table."""

    def size(self, operator: str) -> TableSize:
        """Return about how much it holds: a look waits for no change to be made to it."""

    def expired(self, operator: str) -> Expired:
        """Return which values of an operator have expired at the checkpoint."""


class PeriodicMaterializationManager:
    """Materializes the operators of one TaskManager, one at a time. One event loop.

    Invariants:
        1. One materialization runs at a time, and none of an operator whose last one still waits for a manifest.
        2. It takes nothing from a batch but the snapshot: no batch waits for an encoding or an upload.
        3. Failures are tolerated: they delay, and cost nothing but the log's growth.

    Args:
        source: The state.
        writer: Writes base files.
        options: When, and how.
        runtime: Clock and jitter.
        recorder: Flink's ``startedMaterialization``, ``completedMaterialization``, ``failedMaterialization``,
            ``lastDurationOfMaterialization`` (milliseconds); ours ``materializationSyncSeconds``,
            ``materializedBytes``, ``materializationsDropped``, ``oldestUnmaterializedSeconds``,
            ``estimatedReplaySeconds``, ``expiredEntriesDropped``.

    Attributes:
        replay_bytes_per_s: Of the last restore, if there was one that can tell.
        is_held_up: A materialization is due, of tables that are not loaded yet.
    """

    def __init__(
        self,
        source: MaterializationSource,
        writer: BaseWriter,
        *,
        options: MaterializationOptions,
        runtime: Runtime,
        recorder: Recorder = NullRecorder(),
    ) -> None:
        self._source = source
        self._writer = writer
        self._options = options
        self._runtime = runtime
        self._recorder = recorder
        self._sweep = ExpirySweep(runtime.clock, recorder)
        self._triggers: dict[str, MaterializationTrigger] = {}
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._warned: set[str] = set()
        self._named: Sequence[FinishedMaterialization] = ()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self.replay_bytes_per_s: float | None = None
        self.is_held_up = False

    @property
    def running(self) -> str | None:
        """The operator that is being materialized."""
        return self._running[0] if self._running else None

    def look(self) -> None:
        """Decide what is due now. Called whenever the log grew, and by its own timer."""
        if self._closed or not self._options.enabled:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._runtime.clock.now()
        self.is_held_up = False
        ask_again_at = float("inf")
        oldest = replay = 0.0
        for operator, bases in self._source.bases.items():
            trigger = self._triggers.get(operator)
            if trigger is None:
                trigger = self._triggers[operator] = MaterializationTrigger(self._options, self._runtime, now)
            try:
                log = self._log_of(operator, bases)
            except DstlError as error:
                # It is restored with the query's next run; until then there is nothing to materialize.
                _log.info("the table of %s cannot be looked at: %s", operator, error)
                continue
            oldest = max(oldest, now - log.oldest_at if log.bytes else 0.0)
            replay = max(replay, log.replay_seconds(self._options))
            overdue_at = trigger.overdue_at(log)
            self._watch(operator, now > overdue_at and not self._is_named(bases), now - log.oldest_at)
            if overdue_at >= now:
                # No batch may come that would look again.
                ask_again_at = min(ask_again_at, overdue_at)
            if bases.finished is not None:
                continue
            decision = trigger.decide(now, log)
            if bases.is_loading:
                # Whoever ends the load looks again.
                self.is_held_up |= decision.action is Action.START
                continue
            if decision.action is Action.ABANDON and self._running is not None:
                self._running[1].cancel()
            elif decision.action is Action.START and self._running is None and self._source.base is not None:
                _log.debug("materialization of %s starts: %s", operator, decision.reason)
                trigger.started(now)
                self._start(operator, bases)
                ask_again_at = min(ask_again_at, now + self._options.timeout_s)
            elif decision.action is Action.WAIT:
                ask_again_at = min(ask_again_at, decision.ask_again_at)
        self._recorder.gauge("oldestUnmaterializedSeconds", oldest)
        self._recorder.gauge("estimatedReplaySeconds", replay)
        if ask_again_at < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.001, ask_again_at - now), self.look)

    def reset(self) -> None:
        """The tables were replaced: what runs is given up, and every trigger begins anew."""
        if lost := len(self._unnamed()) + (self._running is not None):
            self._recorder.increment("materializationsDropped", lost)
        self._triggers.clear()
        self._sweep.reset()
        self._warned.clear()
        if self._running is not None:
            _, task = self._running
            self._running = None
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def take_reports(self) -> list[FinishedMaterialization]:
        """Return what a checkpoint of now may name, however long it has waited."""
        return [bases.finished for bases in self._source.bases.values() if bases.finished is not None]

    def named(self, finished: Sequence[FinishedMaterialization]) -> None:
        """Record that a checkpoint is durable which names these, before the tables follow it."""
        self._named = finished

    def waiting(self) -> list[float]:
        """Return for how many seconds each finished one has waited that no checkpoint names yet."""
        now = self._runtime.clock.now()
        return [now - finished.at for finished in self._unnamed()]

    def _unnamed(self) -> list[FinishedMaterialization]:
        return [b.finished for b in self._source.bases.values() if b.finished is not None and not self._is_named(b)]

    def _is_named(self, bases: OperatorBases) -> bool:
        return any(bases.finished is each for each in self._named)

    async def close(self) -> None:
        """Give up what runs. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.reset()
        if self._ending:
            await asyncio.wait(self._ending)

    def _log_of(self, operator: str, bases: OperatorBases) -> UnmaterializedLog:
        return bases.log(self._source.size(operator).bytes, self.replay_bytes_per_s)

    def _watch(self, operator: str, overdue: bool, age: float) -> None:
        if not overdue:
            self._warned.discard(operator)
        elif operator not in self._warned:
            self._warned.add(operator)
            _log.warning(
                "the log of %s is %.0f s old and in no base: materializations fail, or runs end before they do "
                "(materialization.publish_within_s); recovery gets longer",
                operator,
                age,
            )

    def _start(self, operator: str, bases: OperatorBases) -> None:
        self._recorder.increment("startedMaterialization")
        task = asyncio.get_running_loop().create_task(self._run(operator, bases))
        self._running = (operator, task)

    async def _run(self, operator: str, bases: OperatorBases) -> None:
        task = asyncio.current_task()
        started = self._runtime.clock.now()
        try:
            finished, written, expired = await self._materialize(operator, bases)
        except BaseException as error:
            if self._is_current(task):
                self._running = None
                self._failed(operator, error)
                if not isinstance(error, DstlError | OSError | asyncio.CancelledError):
                    _log.exception("materialization of %s failed unexpectedly", operator)
            elif not isinstance(error, DstlError | asyncio.CancelledError):
                raise
            return
        if not self._is_current(task):
            self._writer.discard(list(finished.report.objects()))
            return
        bases.finished = finished
        reach("M5")
        now = self._runtime.clock.now()
        self._recorder.increment("completedMaterialization")
        self._recorder.increment("materializedBytes", finished.report.bytes)
        self._recorder.gauge("lastDurationOfMaterialization", (now - started) * 1000)
        _log.info(
            "materialization %s of checkpoint %d: %d key groups, %d new objects of %d bytes, %.2f s",
            operator,
            finished.report.checkpoint,
            sum(len(handle.parts) for handle in finished.report.handles),
            len(list(finished.report.objects())),
            finished.report.bytes,
            now - started,
        )
        try:
            await self._sweep.drop(written.expired, self._source.table(operator), expired)
        except (DstlError, asyncio.CancelledError) as error:
            # The base is there whatever becomes of them.
            _log.info("expired entries of %s stay in the table for now: %s", operator, str(error) or "it took too long")
        if self._is_current(task):
            self._running = None
            self._triggers[operator].succeeded(self._runtime.clock.now())
            self.look()

    def _is_current(self, task: asyncio.Task[None] | None) -> bool:
        return self._running is not None and self._running[1] is task

    def _failed(self, operator: str, error: BaseException) -> None:
        self._recorder.increment("failedMaterialization")
        trigger = self._triggers[operator]
        tolerated = trigger.failed(self._runtime.clock.now())
        why = "it took too long" if isinstance(error, asyncio.CancelledError) else str(error)
        level = logging.INFO if tolerated else logging.ERROR
        _log.log(level, "materialization of %s failed, %d in a row: %s", operator, trigger.failures, why)
        self.look()

    async def _materialize(
        self, operator: str, bases: OperatorBases
    ) -> tuple[FinishedMaterialization, WrittenBases, Expired]:
        table = self._source.table(operator)
        expired = self._source.expired(operator)
        await self._sweep.run(operator, table, expired, bases.outdated)
        await call_in_thread(table.prepare_snapshot)
        # From here to the end of the plan nothing is awaited: table, checkpoint and versions are of one moment.
        checkpoint = self._source.base
        if checkpoint is None or self._source.table(operator) is not table:
            raise Closed(f"the table of {operator} was replaced")
        reach("M1")
        before = self._runtime.clock.now()
        snapshot = table.snapshot()
        versions = dict(snapshot.versions)
        plan = bases.plan(
            checkpoint,
            self._source.key_groups,
            versions,
            generations=self._options.generations,
            min_live_share=self._options.min_live_share,
            in_files=self._options.share_files and isinstance(snapshot, RocksDBTableSnapshot),
        )
        self._recorder.observe("materializationSyncSeconds", self._runtime.clock.now() - before)
        reach("M2")
        written = await self._writer.write(operator, plan, snapshot, expired)
        reach("M4")
        report = bases.report(operator, plan, written.handles)
        finished = FinishedMaterialization(report, versions, self._runtime.clock.now(), written.raw_bytes)
        return finished, written, expired
