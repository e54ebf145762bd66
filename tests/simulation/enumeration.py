"""One fault at every place of one scenario, until there is no n-th request, connection, message or step any more.

The scenario is three checkpoints, materializations, savepoints beside them, a restart wherever the fault leads to one,
two checkpoints more, and a restore of everything that is left. Nothing is drawn but the scenario itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.simulation.faults import FaultKind, FaultPlan, Strike
from tests.simulation.runner import SeedResult, run_seed

SCENARIO_SEED = 13
"""A world that materializes and makes savepoints early; any other seed is another scenario."""

WAYS: tuple[tuple[str, FaultKind], ...] = (
    ("request", FaultKind.UNAVAILABLE),
    ("request", FaultKind.LOST_RESPONSE),
    ("request", FaultKind.LATE_PUT),
    ("request", FaultKind.STUCK),
    ("connection", FaultKind.CONNECTION_RESET),
    ("message", FaultKind.CONNECTION_RESET),
    ("message", FaultKind.PARTITION),
    ("driver-1", FaultKind.DRIVER_CRASH),
    ("driver-1.tm-1", FaultKind.TASK_MANAGER_CRASH),
    ("driver-1.tm-1", FaultKind.TASK_MANAGER_PAUSE),
    ("driver-1.worker-1", FaultKind.WORKER_CRASH),
    ("world.savepoint-1", FaultKind.SAVEPOINT_CRASH),
)
"""Where faults strike, and which."""

_BATCHES = 3
_MOST = 20_000


def strike_everywhere(
    where: str, what: FaultKind, *, every: int = 1, first: int = 1, seed: int = SCENARIO_SEED
) -> Iterator[tuple[int, SeedResult]]:
    """Run the scenario once for each place of one fault, and yield the place's number and what the run showed.

    Args:
        where: As in :class:`Strike`.
        what: The fault.
        every: Leave places out between: 1 for none.
        first: The first place.
        seed: The scenario.
    """
    for nth in range(first, _MOST, every):
        strike = Strike(where, nth, what)
        plan = FaultPlan(strike=strike, saves=1.0)
        result = run_seed(seed, plan=plan, target_batches=_BATCHES)
        if strike.steps < nth:
            return
        yield nth, result
