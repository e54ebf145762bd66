"""``dstl gc`` in the simulated world: beside a running job, killed now and then, and twice when everything is over."""

from __future__ import annotations

import asyncio

from dstl.checkpoint.manifest.reader import ManifestReader
from dstl.checkpoint.upkeep.cleaner import CleanerReport, LiveDriver, clean
from dstl.errors import CorruptData, DstlError, Invalid
from tests.simulation.process import Process
from tests.simulation.world import World


async def clean_periodically(world: World) -> None:
    """Start the cleaner again and again, as a cron job would."""
    rng = world.rng("cleaner")
    number = 0
    while True:
        await asyncio.sleep(rng.uniform(2.0, 60.0))
        number += 1
        process = world.process(f"world.gc-{number}")
        process.spawn(_clean_once(world, process), "main")


async def clean_now(world: World) -> None:
    """Clean once, beside whatever there is."""
    process = world.process(f"world.gc-at-{world.loop.time():.0f}")
    await process.spawn(_clean_once(world, process), "main")


async def sweep_twice(world: World) -> None:
    """Clean when nothing runs any more: after two passes beyond the grace period no orphan is left (I14)."""
    for number in range(2):
        await asyncio.sleep(world.grace_s + 120.0)
        process = world.process(f"world.last-gc-{number}")
        task = process.spawn(_clean(world, process, nobody_lives=True), "main")
        report = await task
        world.trace("swept", f"{report.deleted} of {report.objects}")
    for name in world.check.orphans():
        world.check.fail("I14", f"{name} is still there after two sweeps, and nothing names it")


async def _clean_once(world: World, process: Process) -> None:
    # It may have listed the location before the first of them, and have waited for the store since.
    known = world.check.checkpoints
    try:
        report = await _clean(world, process, nobody_lives=False)
        world.cleanings += 1
        world.trace("cleaned", f"{report.deleted} of {report.objects}")
    except DstlError as error:
        world.trace("cleaning-failed", type(error).__name__)
        corrupt = isinstance(error, CorruptData) and world.may_corrupt
        if isinstance(error, (Invalid, CorruptData)) and known and not corrupt:
            world.check.fail("I21", f"the cleaner failed: {error!r}")
    process.kill()


async def _clean(world: World, process: Process, *, nobody_lives: bool) -> CleanerReport:
    store, runtime = world.store.client(process), world.runtime(process.name)

    async def nobody() -> tuple[str, ...]:
        return ()

    return await clean(
        store,
        ManifestReader(store, runtime),
        grace_s=world.grace_s,
        driver=LiveDriver(writer_ids=nobody if nobody_lives else None),
        dry_run=False,
    )
