"""Running seeds: one world each, first with faults, then without, then with everything it has left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dstl.changelog import segments_in_flight
from dstl.changelog.segment.reader import ReadSizes
from dstl.rpc import state_client
from dstl.state.entry_state import EntryState
from dstl.state.task_input import TaskInput
from dstl.taskmanager import memory_limit
from materializer.bases import base_fetch, cold_reads, key_group_block, key_group_file
from materializer.restore import log_replay, restore
from materializer.tables import key_column, value_slots
from tests.simulation.audit import Violation
from tests.simulation.calm_audit import BASES_AFTER
from tests.simulation.cleaning import clean_now, clean_periodically, sweep_twice
from tests.simulation.cluster_manager import ClusterManager
from tests.simulation.damage import meet_damaged_segment, repair
from tests.simulation.faults import FaultKind, FaultPlan
from tests.simulation.file_services import FileWorld
from tests.simulation.nemesis import Nemesis
from tests.simulation.network import NetworkLoop
from tests.simulation.remembered import remembering
from tests.simulation.saving import (
    check_savepoints,
    delete_unfinished,
    look_at_everything,
    look_before_the_sweep,
    save_periodically,
)
from tests.simulation.scratch import readers_in_threads
from tests.simulation.strangers import knock
from tests.simulation.world import World

_FAULTY_S = 400.0
_HEALED_S = 900.0
_HEALED_BATCHES = 2
_CALM_RUNS = (0, 0, 1, 2, BASES_AFTER)
"""One is drawn. Each costs as much as the batches before it."""
_OFTEN, _MANY_RUNS = 0.004, 100
"""In this share of the worlds there are so many."""
_CLEANED_EVERY = 10
"""Runs between two of the cleaner's that somebody starts, as where drivers have none."""
_MOST_CALLBACKS = 20_000
_LOOK_S = 5.0
"""How often it is looked how many there were."""
_AWAKE_S = 20.0
"""How long one that has slept for days is watched: it learns within seconds that another has led."""
_AWAKE_BATCHES = 3
"""Then it leads again, and goes on as others do."""
_PIECES = (60, 2)
"""Bytes of a part of a change set, and rows of a call."""


@dataclass(frozen=True)
class SeedResult:
    """The figures of one seed.

    Attributes:
        seed: The seed.
        violations: Invariants that did not hold; empty for a good run.
        trace_hash: The same for every run of this seed on the same code.
        faults: Number of times that each fault has happened.
        batches: Batches that Spark has committed.
        checkpoints: Checkpoints committed, of any driver.
        restores: Starts of a query that found or did not find a checkpoint.
        verified: Checkpoints that were restored and compared with the model.
        materialized: Checkpoints that name a base.
        cleanings: Passes of the cleaner that ended well while the job ran.
        given_up: Commits that were given up by an abort marker.
        replays: Batches that Spark ran again.
        savepoints: Savepoints that were made, and restored after everything.
        virtual_seconds: Virtual seconds that the world lasted.
        trace: Its lines, where they were asked for.
    """

    seed: int
    violations: tuple[Violation, ...]
    trace_hash: str
    faults: Counter[FaultKind] = field(repr=False)
    batches: int
    checkpoints: int
    restores: int
    verified: int
    materialized: int
    cleanings: int
    given_up: int
    replays: int
    savepoints: int
    virtual_seconds: float
    trace: tuple[str, ...] = field(default=(), repr=False)


def run_seed(
    seed: int,
    *,
    plan: FaultPlan | None = None,
    keep_trace: bool = False,
    target_batches: int | None = None,
    starts: int | None = None,
    collect: bool = True,
) -> SeedResult:
    """Run one seed to its end, or to its first violation.

    Args:
        seed: Everything follows from it.
        plan: Faults other than the seed's own.
        keep_trace: Return the trace's lines too: one per event.
        target_batches: Batches to commit under faults; by default the seed's own number.
        starts: Runs without a fault behind them; by default the seed's own number.
        collect: Collect the world's garbage at the end; the collector is off meanwhile.
    """
    loop = NetworkLoop(start=1_000_000.0)
    with quiet(collect=collect), readers_in_threads():
        asyncio.set_event_loop(loop)
        try:
            world = World(loop, seed, plan=plan, keep_trace=keep_trace)
            try:
                with _small_thresholds(world), remembering():
                    return loop.run_until_complete(_live(world, target_batches, starts))
            finally:
                try:
                    loop.run_until_complete(dispose(world))
                    world.stacks.close()
                finally:
                    world.disk.remove()
                    world.memory.remove()
        finally:
            asyncio.set_event_loop(None)
            loop.close()


@contextmanager
def _small_thresholds(world: World) -> Iterator[None]:
    """Do what is done from so many bytes on here too, where no change set has as many: in some worlds, or in all."""
    changed: list[tuple[Any, str, Any]] = [(memory_limit, "_LOOK_BYTES", 0)]
    if world.rng("encoded-ahead").random() < 0.25:
        changed += [(module, "ENCODED_AHEAD_BYTES", 0) for module in (segments_in_flight, state_client)]
    large = world.rng("large")
    if large.random() < 0.3:
        # A log of kilobytes is read by ranges and staged in files, and a key's list by pages.
        changed += [
            (log_replay, "_SIZES", ReadSizes(0, large.choice((40, 1 << 10)), 0, large.choice((1, 500)), 100, 50)),
            (restore, "PIECE_BYTES", large.choice((1, 300))),
            (restore, "PREPARED_BYTES", 600),
            (restore, "STAGED_BYTES", 1),
            (EntryState, "whole_bytes", large.choice((1, 60))),
        ]
    beside = world.rng("side-by-side")
    if beside.random() < 0.25:
        # A key or two of one length lie side by side in arrays, as thousands do.
        one_by_one, few = beside.choice((0, 8)), beside.choice((0, 64))
        changed += [(value_slots, "FEWEST_SIDE_BY_SIDE", 1), (key_column, "ONE_BY_ONE", one_by_one)]
        changed += [(value_slots, "ONE_BY_ONE", one_by_one), (key_column, "_SHORT", few)]
    parts = world.rng("parts")
    if parts.random() < 0.25:
        # Segments and bases are larger than one part of an upload.
        world.store.part_size = parts.choice((150, 600))
    if world.rng("in-pieces").random() < 0.25:
        # Rows of some keys are folded at a time, and what a task writes is sent in many parts.
        made: Any = TaskInput.__init__
        changed.append((made, "__defaults__", (*made.__defaults__[: -len(_PIECES)], *_PIECES)))
    lazy = world.rng("lazy")
    if lazy.random() < 0.5:
        # A base of some rows has many blocks, and its key groups come one by one while batches run.
        world.store.slow_bases_s = lazy.choice((0.0, 1.0, 6.0))
        raw = lazy.choice((-math.inf, 2.0, math.inf, math.inf))
        changed += [
            (key_group_file, "BLOCK_BYTES", lazy.choice((1, 200))),
            (key_group_block, "FRAME_BYTES", lazy.choice((7, key_group_block.FRAME_BYTES))),
            (base_fetch, "FETCH_BYTES", lazy.choice((300, 1 << 10))),
            (base_fetch, "AHEAD_FETCHES", lazy.choice((8, 16))),
            (
                cold_reads,
                "READ_COSTS",
                cold_reads.ReadCosts(
                    lazy.choice((0, 300)), 1, 0, 0, raw, 1, math.inf, lazy.choice((1, 400)), lazy.choice((1, 4))
                ),
            ),
        ]
    before = [getattr(owner, name) for owner, name, _ in changed]
    try:
        for owner, name, value in changed:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


async def _live(world: World, target_batches: int | None, starts: int | None) -> SeedResult:
    loop = world.loop
    target = target_batches if target_batches is not None else world.rng("target").randrange(2, 9)
    life = loop.create_task(_phases(world, target, starts))
    violated = loop.create_task(world.violated.wait())
    await asyncio.wait({life, violated}, return_when=asyncio.FIRST_COMPLETED)
    if life.done() and not life.cancelled() and life.exception() is not None:
        raise life.exception()  # type: ignore[misc]
    return SeedResult(
        seed=world.seed,
        violations=tuple(world.check.violations),
        trace_hash=world.trace_hash,
        faults=world.fired,
        batches=world.logs.committed,
        checkpoints=world.check.checkpoints,
        restores=world.restores,
        verified=world.check.verified,
        materialized=world.materialized,
        cleanings=world.cleanings,
        given_up=world.given_up,
        replays=world.replays,
        savepoints=len(world.savepoints),
        virtual_seconds=loop.time() - world.began,
        trace=tuple(world.lines or ()),
    )


async def _phases(world: World, target: int, starts: int | None) -> None:
    """Faults, then healing, then the end of everything."""
    loop = world.loop
    cluster = ClusterManager(world)
    cluster.start_driver()
    nemesis = loop.create_task(Nemesis(world, cluster).run())
    supervisor = loop.create_task(cluster.supervise())
    cleaner = loop.create_task(clean_periodically(world))
    saver = loop.create_task(save_periodically(world))
    stranger = loop.create_task(knock(world))
    deadline = loop.time() + _FAULTY_S
    while loop.time() < deadline and loop.callbacks < _MOST_CALLBACKS and not await world.logs.reach(target, _LOOK_S):
        pass
    nemesis.cancel()
    await _heal(world)
    if not await world.logs.reach(world.logs.committed + _HEALED_BATCHES, _HEALED_S):
        world.check.fail("I16", f"no batch within {_HEALED_S} s after the faults ended")
        return
    supervisor.cancel()
    cleaner.cancel()
    saver.cancel()
    stranger.cancel()
    for driver in cluster.drivers:
        if driver.process not in world.asleep:
            driver.process.kill()
    # Late requests arrive, TaskManagers end.
    await asyncio.sleep(2 * world.plan.longest_delay_s + 60.0)
    await _wake_sleepers(world, cluster)
    await _run_calmly(world, cluster, starts)
    await world.check.settle()
    await look_before_the_sweep(world)
    delete_unfinished(world)
    await sweep_twice(world)
    await check_savepoints(world)
    await world.check.check_retained()
    if not world.violated.is_set() and await look_at_everything(world):
        await meet_damaged_segment(world, cluster)


async def _wake_sleepers(world: World, cluster: ClusterManager) -> None:
    """Let drivers that have slept for days go on, when another has led, and the cleaner has been there."""
    sleepers = [driver.process for driver in cluster.drivers if driver.process in world.asleep]
    if not sleepers or world.violated.is_set():
        return
    await cluster.start_driver(1).process.wait_dead(_HEALED_S)
    await asyncio.sleep(world.rng("sleepers").choice((3600.0, 200_000.0)))
    await clean_now(world)
    for process in sleepers:
        process.go_on()
    await world.logs.reach(world.logs.committed + _AWAKE_BATCHES, _AWAKE_S)
    for process in sleepers:
        process.kill()
    await asyncio.sleep(2 * world.plan.longest_delay_s + 60.0)


async def _run_calmly(world: World, cluster: ClusterManager, starts: int | None) -> None:
    """Let runs end well, hours apart, as a scheduler's jobs do: now nothing may fail, and logs stay short."""
    if world.violated.is_set():
        return
    world.is_calm = True
    rng, since, batches = world.rng("calm"), world.check.highest, 0
    runs, many = rng.choice(_CALM_RUNS), world.rng("starts").random() < _OFTEN
    runs = starts if starts is not None else _MANY_RUNS if many else runs
    costs: list[tuple[int, int]] = []
    for number in range(runs):
        before, requests = world.logs.committed, world.store.requests
        driver = cluster.start_driver(rng.choice((1, 1, 2)))
        await driver.process.wait_dead(_HEALED_S)
        if not driver.process.is_dead or world.logs.committed == before:
            world.check.fail("I22", f"{driver.process.name} has not ended within {_HEALED_S} s, without a fault")
            return
        batches += world.logs.committed - before
        if number % _CLEANED_EVERY == _CLEANED_EVERY - 1:
            await clean_now(world)
        costs.append((world.store.requests - requests, len(world.store.objects)))
        await asyncio.sleep(rng.choice((10.0, 3600.0, 100_000.0)))
    if runs:
        check = world.check
        check.calm.ended(check.retained()[-1], since, check.highest - since, batches, costs)
    world.is_calm = False


async def _heal(world: World) -> None:
    world.trace("healed", "")
    world.plan.healed = True
    world.network.heal()
    world.network.strike = None
    repair(world)
    for process in list(world.processes):
        process.fuse = None
        if process not in world.asleep:
            process.go_on()


async def dispose(world: World | FileWorld) -> None:
    """End every task of a world, those of dead processes too; nothing that they do reaches anything any more."""
    loop = world.loop
    loop.set_exception_handler(lambda *_: None)
    for store in world.stores:
        store.closed = True
    world.network.close()
    if isinstance(world, World):
        world.stacks.end()
    for process in world.processes:
        process.revive()
    own = asyncio.current_task()
    for _ in range(20):
        left = [task for task in loop.tasks if task is not own and not task.done()]
        if not left:
            return
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=100.0)
    for task in loop.tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


@contextmanager
def quiet(*, collect: bool) -> Iterator[None]:
    """Without logs, and without the collector: it would run the finally blocks of dead processes at random times."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    enabled = gc.isenabled()
    gc.disable()
    if collect:
        gc.freeze()  # what is there by now is no world's garbage, and need not be looked at
    with warnings.catch_warnings():
        # A process that is killed before a request's first step leaves a coroutine that nobody will ever await.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        # Nor is a file closed of which its killed process has not heard yet that it is open.
        warnings.filterwarnings("ignore", "unclosed file .*dstl-simulated-disk", ResourceWarning)
        try:
            yield
        finally:
            if collect:
                gc.collect()
                gc.unfreeze()
            if enabled and collect:
                gc.enable()
            logging.disable(level)
