"""The audit of runs without a fault, behind all others: they cost what is promised, and bases take the log's place.

That nothing fails in them (``I22``) is seen where it would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from dstl.checkpoint.report import CheckpointReport
from handles.checkpoint import CompletedCheckpoint
from tests.simulation.stage import Stage


class CalmAudit:
    """Compares what calm runs have written with what is promised.

    Args:
        world: The world.
        fail: Takes an invariant's number and what was observed.
    """

    def __init__(self, world: Stage, fail: Callable[[str, str], None]) -> None:
        self._world = world
        self._fail = fail

    def reported(self, report: CheckpointReport) -> None:
        """A checkpoint costs a record, and a request of each TaskManager that has room for its changes (I23)."""
        world = self._world
        requests = report.requests - report.hedges
        if world.is_calm and world.is_roomy and not report.materializations and requests > 1 + world.task_managers:
            self._fail("I23", f"checkpoint {report.checkpoint_id} took {requests} requests")

    def ended(
        self, newest: CompletedCheckpoint, since: int, records: int, batches: int, costs: Sequence[tuple[int, int]]
    ) -> None:
        """Runs that ended well cost few records (I23), and bases take the place of the log before them (I24).

        Args:
            newest: The checkpoint that they have led to.
            since: The newest record before them.
            records: The records since.
            batches: Their batches.
            costs: Of each run how many requests it has made, and how many objects there are behind it.
        """
        runs = len(costs)
        # A batch's offsets and its commit; a run's fence, and a checkpoint once more for its bases.
        if records > 2 * batches + 4 * runs:
            self._fail("I23", f"{records} records for {batches} batches in {runs} runs")
        old = {each.checkpoint for each in newest.segments if each.checkpoint <= since}
        if old and runs >= BASES_AFTER and self._world.materializes:
            self._fail("I24", f"checkpoint {newest.checkpoint_id} has the log of {sorted(old)} after {runs} calm runs")
        if runs < 2 * _SOME:
            return
        # However often it was started before, a run costs what the first ones have cost. Without bases the log grows.
        for what, early, late in zip(
            ("requests of a run", "objects"),
            map(max, zip(*costs[:_SOME], strict=True)),
            map(median, zip(*costs[-_SOME:], strict=True)),
            strict=True,
        ):
            if late > 2 * early + _SOME and (what != "objects" or self._world.materializes):
                self._fail("I23", f"{what}: {late} after {runs} starts, and {early} at most in the first {_SOME}")


_SOME = 20
"""Runs whose costs are compared."""
BASES_AFTER = 8
"""Calm runs after which what was logged before them is in bases: a short run loads first, and makes a part of them."""
