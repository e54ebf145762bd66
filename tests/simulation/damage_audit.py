"""What a query does that meets a bit of its log that is wrong: it refuses, or goes back where it may."""

from __future__ import annotations

from collections.abc import Callable

from dstl.checkpoint.report import RestoreReport
from dstl.errors import CorruptData
from tests.simulation.stage import Stage


class DamageAudit:
    """Hears of refusals, and of queries that go on without what some batches did.

    Args:
        world: The world.
        fail: Takes an invariant's number and what was observed.

    Attributes:
        refusals: Errors that named a damaged object.
        went_back: Checkpoints that queries went back to.
    """

    def __init__(self, world: Stage, fail: Callable[[str, str], None]) -> None:
        self.refusals = 0
        self.went_back: list[int | None] = []
        self._world = world
        self._fail = fail

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error names an object of which a bit is wrong."""
        refuses = isinstance(error, CorruptData) and any(name in str(error) for name in self._world.damaged)
        self.refusals += refuses
        return refuses

    def gone_back(self, driver: str, report: RestoreReport, *, may: bool) -> None:
        """A query goes on from an older checkpoint: it may, and what batches did since is lost (I6)."""
        if not may:
            self._fail("I6", f"{driver} has gone back to checkpoint {report.checkpoint_id} unasked")
        self.went_back.append(report.checkpoint_id)
        self._world.logs.lose(range(report.first_batch - report.lost_batches, report.first_batch))
