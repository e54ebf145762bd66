"""``dstl savepoint create`` in the simulated world: beside a query, killed now and then, and kept to the end."""

from __future__ import annotations

import asyncio

from dstl.checkpoint.savepoint.creation import create_savepoint
from dstl.checkpoint.savepoint.format import SAVEPOINTS, Savepoint, directory_of
from dstl.errors import CorruptData, DstlError, Invalid
from tests.simulation.faults import FaultKind
from tests.simulation.process import Process
from tests.simulation.world import World

_MOST_STEPS = 40
"""A savepoint takes a few dozen steps: with 500 none of 100 seeds had one that was killed."""
_MOST = 12
"""Of one world: each is restored at its end, which takes as long as a batch."""


async def save_periodically(world: World) -> None:
    """Make savepoints now and then, in some worlds."""
    rng = world.rng("savepoints")
    if rng.random() >= world.plan.saves:
        return
    number = 0
    while number < _MOST:
        await asyncio.sleep(rng.uniform(0.1, 1.0) if world.plan.strike else rng.uniform(0.2, 8.0))
        number += 1
        process = world.process(f"world.savepoint-{number}")
        if rng.random() < 0.2 and not world.plan.healed:
            world.light_fuse(process, _MOST_STEPS, lambda process=process: _kill(world, process))  # type: ignore[misc]
        process.spawn(_save(world, process, f"s-{number}"), "main")


def delete_unfinished(world: World) -> None:
    """Delete what failed savepoints have left, as ``dstl savepoint delete`` does: it holds a cleaner for a day."""
    made = {directory_of(savepoint.name) for savepoint in world.savepoints}
    for name in sorted(world.store.objects):
        if name.startswith(SAVEPOINTS) and not any(name.startswith(directory) for directory in made):
            del world.store.objects[name]


async def check_savepoints(world: World) -> None:
    """Restore every savepoint that was made, when its job and two sweeps of the cleaner are over (I6)."""
    for savepoint in world.savepoints:
        await world.check.check_savepoint(savepoint)


async def _save(world: World, process: Process, name: str) -> None:
    store, runtime = world.store.client(process), world.runtime(process.name)
    try:
        savepoint: Savepoint = await create_savepoint(store, store, runtime, name)
    except DstlError as error:
        world.trace("savepoint-failed", type(error).__name__)
        corrupt = isinstance(error, CorruptData) and not world.may_corrupt
        if type(error) is Invalid or corrupt:
            world.check.fail("I21", f"savepoint {name} failed: {error!r}")
    else:
        world.trace("savepoint", f"{name} of {savepoint.checkpoint_id}")
        world.savepoints.append(savepoint)
    process.kill()


def _kill(world: World, process: Process) -> None:
    world.count(FaultKind.SAVEPOINT_CRASH)
    process.kill()
