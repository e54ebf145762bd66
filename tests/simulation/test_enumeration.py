"""One fault at places of a scenario; the long form, at each: ``python -m tests.simulation --enumerate 1``."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import FaultPlan, SeedResult, run_seed
from tests.simulation import __main__ as simulate
from tests.simulation.audit import Violation
from tests.simulation.enumeration import SCENARIO_SEED, WAYS, strike_everywhere
from tests.simulation.faults import FaultKind, Strike

EVERY = {"request": 40, "connection": 5, "world.savepoint-1": 5, "message": 150, "driver-1": 400, "driver-1.tm-1": 200}
"""Which places of a kind are struck: one in so many."""


def check(where: str, what: FaultKind, every: int, first: int) -> int:
    struck = 0
    for nth, result in strike_everywhere(where, what, every=every, first=first):
        struck += 1
        assert not result.violations, f"{what} at {where} {nth}: {result.violations[0]}"
        assert result.checkpoints >= 3
    return struck


def test_the_scenario_has_checkpoints_materializations_and_savepoints() -> None:
    plan = FaultPlan(strike=Strike("nowhere", 1, FaultKind.RESET), saves=1.0)
    result = run_seed(SCENARIO_SEED, plan=plan, target_batches=3)
    assert result.violations == ()
    assert result.checkpoints >= 5
    assert result.materialized > 0
    assert result.savepoints > 0
    assert result.verified > 0


def test_a_fault_at_any_place_of_the_scenario_breaks_no_invariant(seed: int) -> None:
    # Two ways of ten at each run, and another part of their places: the seed draws both.
    for where, what in random.Random(seed).sample(WAYS, 2):
        every = EVERY.get(where, 60)
        assert check(where, what, every, 1 + seed % every) >= 1


def test_an_enumeration_that_was_killed_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    struck: list[int] = []

    def strike(
        where: str,
        what: FaultKind,
        *,
        every: int = 1,
        first: int = 1,
    ) -> Iterator[tuple[int, SeedResult]]:
        for nth in range(first, 5):
            if nth == 3 and not struck.count(3):
                struck.append(nth)
                raise KeyboardInterrupt
            struck.append(nth)
            yield nth, replace(result, violations=(Violation("I6", 1.0, "the test's"),) if nth == 2 else ())

    result = run_seed(SCENARIO_SEED, plan=FaultPlan(), target_batches=1)
    monkeypatch.setattr(simulate, "WAYS", WAYS[:1])
    monkeypatch.setattr(simulate, "strike_everywhere", strike)
    command = ["--enumerate", "1", "--journal", str(tmp_path / "places")]
    with pytest.raises(KeyboardInterrupt):
        simulate.main(command)
    for _ in range(2):
        # The second finds all of it done, and tells of what was violated.
        assert simulate.main(command) == 1
        told = capsys.readouterr()
        assert "4 places" in told.out
        assert f"{WAYS[0][1]} at request 2: " in told.err
    assert struck == [1, 2, 3, 3, 4]

    (tmp_path / "places").write_text('{"code":"another"}\n')
    with pytest.raises(SystemExit):
        simulate.main(command)
    assert "written by other code" in capsys.readouterr().err
