"""Jobs in short runs, or with long triggers, get their bases: log and restore stay within the ratio of the options."""

import asyncio
import random

import pytest

from dstl.changelog.change_set import OP_PUT
from dstl.checkpoint.assembly import recovery_work
from dstl.options import MaterializationOptions
from handles.checkpoint import CompletedCheckpoint
from tests.simulation.virtual_time import run_in_virtual_time
from worlds.materialization import GROUPS, SlowBases, World
from worlds.table_changes import Change

BATCH_S = 20.0
BASE_S = 2.0
"""A file's upload: all thirty or so take a minute, three times as long as a batch."""


def _rows(rng: random.Random) -> dict[str, list[Change]]:
    keys = (rng.randrange(20000).to_bytes(4, "big") for _ in range(4000))
    return {"left": [(key[-1] % GROUPS, 0, OP_PUT, key, b"", rng.randbytes(400)) for key in keys], "right": []}


class _Job:
    """Batches of 1.6 MB for a state of up to 8 MB, with the default options."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, options=MaterializationOptions(file_bytes=1 << 18))
        self.world.store = self.bases = SlowBases(self.world.memory, BASE_S)
        self.rng = random.Random(seed)

    async def batch(self) -> dict[str, list[int]]:
        rows = _rows(self.rng)
        winners = self.world.run_attempts(rows)
        await asyncio.sleep(BATCH_S)
        checkpoint = await self.world.checkpoint(winners)
        assert checkpoint is not None
        self.world.take(checkpoint, rows)
        await self.world.subsume()
        return winners

    async def check(self) -> CompletedCheckpoint:
        """Check what the options promise of the newest checkpoint, and that it is right."""
        newest = self.world.newest
        assert newest is not None
        work = recovery_work(newest)
        state = sum(map(len, self.world.model["left"].values()))
        log = sum(segment.handle.size for segment in newest.segments)
        # Beyond 4 MiB of log a base begins, and one more batch comes before it is named; two generations keep theirs.
        assert work.log_bytes <= (6 << 20) + state * 0.2
        assert log <= 2 * ((6 << 20) + state * 0.2)
        assert len(newest.materialized) > 0
        await self.world.check(newest)
        return newest


@pytest.mark.parametrize("way", ["runs", "hourly"])
def test_log_and_restore_stay_short_whatever_the_length_of_a_run(
    seed: int, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        job = _Job(seed)
        named: set[str] = set()
        await job.world.start(1)
        for run in range(1, 15):
            if run > 1 and way == "runs":
                await job.world.start(1)
            winners = await job.batch()
            manager = job.world.members[0].manager
            idle = 0.0 if way == "runs" else 1000.0
            await asyncio.sleep(idle)
            while manager.running:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            if manager.waiting():
                await job.world.publish(winners)
            named |= {name for handle in job.world.newest.materialized for name in handle.objects()}
            if way == "hourly":
                await asyncio.sleep(3600 - BATCH_S - idle)
            if run >= 8:
                await job.check()
        assert named == job.bases.uploaded, "what was uploaded is in a checkpoint"
        await job.world.close()

    run_in_virtual_time(main())
    assert not caplog.records


def test_the_age_of_the_log_outlives_a_run(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Prevents that a job in short runs never hears that its log gets longer and older."""

    async def main() -> None:
        options = MaterializationOptions(min_log_bytes=1, overdue_s=1000.0, timeout_s=1e6)
        world = World(seed, options=options)
        world.store = SlowBases(world.memory, 1e9)
        await world.start(1)
        for _ in range(12):
            await world.batch_of(30)
            await asyncio.sleep(100.0)
            await world.start(1)
        log = world.members[0].backend.bases["left"].log(1)
        assert 1100 <= world.runtime.clock.now() - log.oldest_at <= 1300
        assert world.members[0].recorder.gauges["oldestUnmaterializedSeconds"] >= 1100
        await world.close()

    run_in_virtual_time(main())
    assert "materialization.publish_within_s" in caplog.text
