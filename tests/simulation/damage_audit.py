"""What a query does that meets a bit of its log that is wrong: it refuses, or goes back where it may."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dstl.checkpoint.report import RestoreReport
from dstl.errors import CorruptData
from tests.simulation.stage import Stage
from tests.simulation.store import Stored


class DamageAudit:
    """Hears of refusals, and of queries that go on without what some batches did.

    Args:
        world: The world.
        fail: Takes an invariant's number and what was observed.

    Attributes:
        names: Objects of which a bit was ever wrong.
        refusals: Errors that named one of them.
        went_back: Checkpoints that queries went back to.
    """

    def __init__(self, world: Stage, fail: Callable[[str, str], None]) -> None:
        self.names: set[str] = set()
        self.refusals = 0
        self.went_back: list[int | None] = []
        self._world = world
        self._fail = fail

    def is_refusal(self, error: BaseException) -> bool:
        """Return whether an error names an object of which a bit was wrong."""
        refuses = isinstance(error, CorruptData) and any(name in str(error) for name in self.names)
        self.refusals += refuses
        return refuses

    def as_before(self, objects: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return objects with the segments as they were: what holds with a replica's help."""
        return {**objects, **{name: stored for name, stored in self._world.damaged.items() if name.endswith(".seg")}}

    def gone_back(self, driver: str, report: RestoreReport, *, may: bool) -> None:
        """A query goes on from an older checkpoint: it may, and what batches did since is lost (I6)."""
        if not may:
            self._fail("I6", f"{driver} has gone back to checkpoint {report.checkpoint_id} unasked")
        self.went_back.append(report.checkpoint_id)
        self._world.logs.lose(range(report.first_batch - report.lost_batches, report.first_batch))
