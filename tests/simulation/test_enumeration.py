"""One fault at places of a scenario; the long form, at each: ``python -m dstl.testing.simulate --enumerate 1``."""

import random

import pytest

from dstl.testing.simulation import FaultPlan, run_seed
from dstl.testing.simulation.enumeration import SCENARIO_SEED, WAYS, strike_everywhere
from dstl.testing.simulation.faults import FaultKind, Strike

EVERY = {"request": 40, "world.savepoint-1": 5, "message": 150, "driver-1": 400, "driver-1.tm-1": 200}
"""Which places of a kind are struck: one in so many."""


def check(where: str, what: FaultKind, every: int, first: int) -> int:
    struck = 0
    for nth, result in strike_everywhere(where, what, every=every, first=first):
        struck += 1
        assert not result.violations, f"{what} at {where} {nth}: {result.violations[0]}"
        assert result.checkpoints >= 3
    return struck


def test_the_scenario_has_checkpoints_materializations_and_savepoints() -> None:
    result = run_seed(
        SCENARIO_SEED, plan=FaultPlan(strike=Strike("nowhere", 1, FaultKind.RESET), saves=1.0), target_batches=3
    )
    assert result.violations == ()
    assert result.checkpoints >= 5
    assert result.materialized > 0
    assert result.savepoints > 0
    assert result.verified > 0


def test_a_fault_at_any_place_of_the_scenario_breaks_no_invariant(seed: int) -> None:
    # Three ways of ten at each run, and another part of their places: the seed draws both.
    for where, what in random.Random(seed).sample(WAYS, 3):
        every = EVERY.get(where, 60)
        assert check(where, what, every, 1 + seed % every) >= 1


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("where", "what"), WAYS, ids=lambda each: str(each))
def test_a_fault_at_every_place_of_the_scenario_breaks_no_invariant(where: str, what: FaultKind) -> None:
    # A savepoint has seven places.
    assert check(where, what, 1, 1) > (5 if where == "world.savepoint-1" else 20)
